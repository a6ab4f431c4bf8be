"""Delayed: the host's step of an update behind its backwards, or under the next update.

    python benchmarks/delayed.py [--rounds 20]

Two processes over Gloo whose forwards and backwards sleep for 50 and 100 ms, and whose hosts step
four updates of four microbatches (states="cpu"), each step at least so long: behind its backwards,
or while the next is computed, on weights of a delay of one.  Both programs run by turns.  What is
predicted is told nothing else; what processors do, little, is what it misses.

A ratio is one of two steps of the same round: its median, and in brackets the order statistics
between which the median of such rounds lies 95 times of 100.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import deviation, head, line, parse, ratio
from benchmarks.paired_steps import on_ranks
from schedir import Plan, compile, schedules, simulate
from schedir.ir.costs import Costs
from schedir.ir.ops import Lane
from schedir.runtime.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.host_steps import HostSteps
from schedir.schedules.words import EMPTY, Word
from schedir.testing import tiny
from schedir.transports.processes import Gloo

RANKS = 2
FORWARD = 0.05  # seconds that a forward sleeps; a backward sleeps twice as long
SHARES = (0.0, 0.25, 0.5, 0.75, 1.25)  # lengths of the host's step, in updates
HEAD = (
    "the host's step takes", "no delay, ms: predicted, measured", "a delay of one, ms",
    "ratio, predicted", "measured", "predicted less measured",
)  # fmt: skip


class _Sleep(torch.autograd.Function):
    """Return its input after a sleep of some seconds, twice as long backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        sleep(2 * ctx.seconds)
        return gradient, None


class Slow(nn.Module):
    """A stage whose forward takes some seconds, and its backward twice as long."""

    def __init__(self, inner: nn.Module, seconds: float) -> None:
        super().__init__()
        self.inner, self.seconds = inner, seconds

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, _Sleep.apply(self.inner(x), self.seconds))  # type: ignore[no-untyped-call]


def measure(rank: int, rounds: int, forward: float, shares: Sequence[float]) -> None:
    """Measure a row for each length of the host's step, and print it on rank 0."""
    if not rank:
        head(*HEAD)
    n, updates, compute = 4, 4, 3 * forward

    def flushed(r: int, P: int, m: int) -> Word:
        return sum((schedules.one_f_one_b(r, P, n) for _ in range(updates)), EMPTY)

    programs = [
        compile(schedule, Plan(RANKS, n * updates, updates=updates, delay=delay), model="edge",
                states="cpu")
        for delay, schedule in enumerate((flushed, schedules.pipedream_2bw))
    ]  # fmt: skip
    pair = []
    for program in programs:
        stages = {rank: Slow(tiny.tiny_stages(RANKS)[rank], forward)}
        pair.append(
            Executor(
                program, rank, stages, Gloo(program), loss=tiny.loss,
                boundary=Boundary((2, tiny.WIDTH), torch.float64),
                optimizer=torch.optim.AdamW(stages[rank].parameters()),
            )
        )  # fmt: skip
    batch = tiny.batch(n * updates)
    for share in shares:
        took: list[list[float]] = []
        for turn in range(1 + rounds):
            spans = [0.0] * 2
            for k in (0, 1) if turn % 2 else (1, 0):
                dist.barrier()
                began = perf_counter()
                pair[k].step(*batch)
                spans[k] = perf_counter() - began
                steps = pair[k].held.states
                assert isinstance(steps, HostSteps), "the program says so"
                if share:
                    nbytes = steps.parts[rank].nbytes()
                    pair[k].held.lanes.bandwidth[Lane.HOST] = nbytes / (share * n * compute)
            took.append(spans)
        each: list[Any] = [None] * RANKS
        dist.all_gather_object(each, took[1:])
        if rank:
            continue
        found = np.array(each).max(0)
        costs = Costs(F=forward, B=2 * forward, step_host=share * n * compute)
        spans = [simulate(one, costs, model="edge", blocks=True).span for one in programs]
        cells = [
            f"{1e3 * told:.0f}, {1e3 * seen:.0f}"
            for told, seen in zip(spans, np.median(found, 0), strict=True)
        ]
        ratios, told = found[:, 1] / found[:, 0], spans[1] / spans[0]
        line(
            f"{share:g} of an update" if share else "nothing", *cells, f"{told:.3f}",
            ratio(ratios.tolist()), deviation((told / ratios).tolist()),
        )  # fmt: skip


def main() -> None:
    """Print the table, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="steps of each")
    parser.add_argument("--forward", type=float, default=FORWARD, help="seconds of a forward")
    args = parse(parser, rounds=1, forward=FORWARD / 10)
    on_ranks(measure, RANKS, args.rounds, args.forward, SHARES[:2] if args.smoke else SHARES)


if __name__ == "__main__":
    main()
