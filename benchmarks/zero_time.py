"""Step times of ZeRO 3: beside plain data parallelism, beside a prediction, and beside FSDP2.

    python benchmarks/zero_time.py [--rounds 20] [--only hidden|fsdp]

Two processes over Gloo, of one thread each: two replicas of a GPT whose stages are all on one rank.

hidden: gathers of weights take a given time, in which no processor works: a transport lets each
end that long after the one ahead of it on its lane.  Plain data parallelism (zero 0) and zero 3
take turns, a step each.  Its costs are calibrated by the last step of the former, the time of a
gather is the given one: at these the latter is predicted.

fsdp: zero 3 and torch's `fully_shard` of each stage take turns, a step each, on the same weights
and microbatches, each with its own AdamW.  FSDP2 runs each microbatch forward and backward, and
reduces with the last; ours runs breadth-first.

A step begins as both processes leave a barrier, and takes as long as on the one where it takes
longest.  A ratio is one of two steps of the same round: its median, and in brackets the order
statistics between which the median of such rounds lies 95 times of 100.  "CPU" is the ratio of the
processor time of both processes, Gloo's threads included.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import head, line, parse
from benchmarks.paired_steps import alternate, on_ranks
from schedir import Plan, compile, schedules, simulate
from schedir.ir.program import Program
from schedir.predict.calibrate import calibrate
from schedir.runtime.executor import Executor
from schedir.runtime.measured import measured
from schedir.training import gpt
from schedir.transports.collectives import Group, Kind
from schedir.transports.processes import Gloo
from schedir.transports.transport import Work

DP, STAGES = 2, 4
CONFIG = gpt.GPTConfig(vocab=512, layers=8, hidden=256, heads=4, context=64, tied=False)
SMALL = gpt.GPTConfig(vocab=512, layers=4, hidden=16, heads=2, context=64, tied=False)
ROWS, TOKENS = 2, 64  # of a microbatch
# Microbatches, schedule, stages that are whole at once, seconds that a gather takes.
HIDDEN = (
    (4, "looped_bfs", 2, 0.005),
    (4, "looped_bfs", 2, 0.02),
    (4, "looped_bfs", 2, 0.1),
    (4, "looped_bfs", 1, 0.02),
    (4, "interleaved", 2, 0.02),
)
FSDP = ((1, 2), (4, 2), (4, STAGES))  # microbatches, stages that are whole at once


class Until:
    """What ends no earlier than at some time."""

    def __init__(self, work: Work, when: float) -> None:
        self.work, self.when = work, when

    def wait(self) -> None:
        """Sleep until then."""
        self.work.wait()
        time.sleep(max(0.0, self.when - perf_counter()))


class Slowed(Gloo):
    """Gloo, with gathers of weights that take `delay` seconds each, one after the other."""

    delay, free = 0.0, 0.0

    def collective(self, kind: Kind, group: Group, out: Tensor, own: Tensor) -> Work:
        """As Transport.collective."""
        work = super().collective(kind, group, out, own)
        if group != "params":
            return work
        self.free = max(self.free, perf_counter()) + self.delay
        return Until(work, self.free)


def program_of(m: int, schedule: str, zero: int, active: int | None = None) -> Program:
    """All stages on one rank."""
    more: dict[str, Any] = {"active": active} if active else {}
    plan = Plan(1, m, STAGES)
    return compile(
        getattr(schedules, schedule), plan, dp=DP, model="edge", overlap=True, zero=zero, **more
    )


def stages_and_batch(
    config: gpt.GPTConfig, m: int, rank: int
) -> tuple[list[nn.Module], Tensor, Tensor]:
    """The same weights for all, and other tokens on each replica."""
    stages: list[nn.Module] = [gpt.build_stage(config, s, STAGES) for s in range(STAGES)]
    draw = torch.Generator().manual_seed(rank)
    tokens = torch.randint(config.vocab, (m, ROWS, TOKENS + 1), generator=draw)
    return stages, tokens[:, :, :-1].contiguous(), tokens[:, :, 1:].contiguous()


class Ours:
    """An executor and its batch."""

    def __init__(
        self, config: gpt.GPTConfig, program: Program, rank: int, transport: type[Gloo] = Gloo
    ) -> None:
        m = program.plan.microbatches
        stages, self.x, self.y = stages_and_batch(config, m, rank)
        adam = torch.optim.AdamW([p for s in stages for p in s.parameters()], lr=1e-4)
        self.transport = transport(program)
        self.executor = Executor(
            program, 0, stages, self.transport, loss=gpt.loss,
            boundary=(ROWS, TOKENS, config.hidden), optimizer=adam,
        )  # fmt: skip
        self.scale = 1 / (m * ROWS * TOKENS)

    def step(self) -> None:
        self.executor.step(self.x, self.y, self.scale)


class Theirs:
    """FSDP2: each stage is sharded."""

    def __init__(self, config: gpt.GPTConfig, m: int, rank: int) -> None:
        stages, self.x, self.y = stages_and_batch(config, m, rank)
        for stage in stages:
            fully_shard(stage)
        whole: Any = nn.Sequential(*stages)
        self.model: Any = fully_shard(whole)
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.scale = 1 / (m * ROWS * TOKENS)

    def step(self) -> None:
        self.adam.zero_grad()
        for k, (x, y) in enumerate(zip(self.x, self.y, strict=True)):
            self.model.set_requires_gradient_sync(k == len(self.x) - 1)
            (gpt.loss(self.model(x), y) * self.scale).backward()
        self.adam.step()


def hidden(
    rank: int, rounds: int, config: gpt.GPTConfig, rows: Sequence[tuple[int, str, int, float]]
) -> None:
    """Zero 3 beside zero 0."""
    for m, schedule, active, delay in rows:
        plain = Ours(config, program_of(m, schedule, 0), rank)
        parts = Ours(config, program_of(m, schedule, 3, active), rank, Slowed)
        parts.transport.delay = delay  # type: ignore[attr-defined]
        took = alternate(plain.step, parts.step, rounds)
        timeline = measured(plain.executor, plain.transport)
        if rank:
            continue
        assert timeline is not None
        costs = calibrate(timeline)
        gathers = len([i for i in parts.executor.state.stream if str(i).startswith("unshard")])
        spans = [
            simulate(each.executor.program, replace(costs, unshard=delay), model="edge").span
            for each in (plain, parts)
        ]
        line(
            f"{schedule}, active {active}", f"{gathers} x {delay * 1e3:g}",
            *took.cells(), f"{spans[1] / spans[0]:.3f}",
            f"{spans[1] / np.median(took.wall[:, 1]) - 1:+.1%}",
        )  # fmt: skip


def fsdp(rank: int, rounds: int, config: gpt.GPTConfig, rows: Sequence[tuple[int, int]]) -> None:
    """Zero 3 beside FSDP2."""
    for m, active in rows:
        theirs = Theirs(config, m, rank)
        ours = Ours(config, program_of(m, "looped_bfs", 3, active), rank)
        took = alternate(theirs.step, ours.step, rounds)
        if not rank:
            line(f"m={m}, active {active}", *took.cells())


HEADS = {
    "hidden": ["program", "gathers, ms", "zero 0, ms", "zero 3, ms", "ratio", "CPU", "predicted",
               "predicted step less measured"],
    "fsdp": ["microbatches", "FSDP2, ms", "zero 3, ms", "ratio", "CPU"],
}  # fmt: skip


def table(rank: int, rounds: int, name: str, smoke: bool) -> None:
    """Measure a table, and print it on rank 0."""
    if not rank:
        head(*HEADS[name])
    config, rows = (SMALL, 1) if smoke else (CONFIG, None)
    if name == "hidden":
        hidden(rank, rounds, config, HIDDEN[:rows])
    else:
        fsdp(rank, rounds, config, FSDP[:rows])


def main() -> None:
    """Print both tables, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="steps of each")
    parser.add_argument("--only", default="", choices=("", *HEADS), help="one table")
    args = parse(parser, rounds=1)
    for name in HEADS:
        if args.only in ("", name):
            on_ranks(table, DP, args.rounds, name, args.smoke)


if __name__ == "__main__":
    main()
