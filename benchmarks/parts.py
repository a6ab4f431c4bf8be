"""Parts: steps of stages in pieces, unfilled, filled and in chunks, as predicted and as measured.

    python benchmarks/parts.py [--rounds 12] [--only slowed|real|predicted]

Two processes over Gloo, of one thread each, share all layers of a GPT of one stage (tp 2), which is
cut in pieces; programs take turns, a step each.  The plain one has the schedule's order, the other
is filled, or takes microbatches in chunks.

slowed: what the tensor-parallel group sums between pieces takes at least its bytes over a
bandwidth, in a thread of its own in which no processor works (`Lanes.bandwidth`): as much as a
forward's attention piece takes, or half of that.  Layers are wide, so that a sum itself is little
work beside what is computed.  In each round costs are calibrated by the step of the plain program;
at these it is predicted itself, which tells what calibration misses, and the other.  The plain one
beside chunks has as many microbatches as there are chunks, in the schedule's order: so it is the
order alone that differs.

real: the same with sums as Gloo makes them, and no prediction, of narrow layers, whose sums take a
larger part; beside them uncut stages, whose layers sum.  Here the plain one beside chunks has whole
microbatches, so what a chunk costs shows.  Steps are those of the process where they take longest.

predicted: no process: what filling and chunks win by simulation, of pipelines on 4 ranks.

A ratio is one of two steps of the same round: its median, and in brackets the order statistics
between which the median of such rounds lies 95 times of 100.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import deviation, head, line, parse, ratio
from benchmarks.paired_steps import on_ranks
from schedir import Plan, compile, in_pieces, schedules, simulate
from schedir.ir.costs import Costs
from schedir.ir.ops import Lane
from schedir.ir.program import Program
from schedir.predict.calibrate import calibrate
from schedir.runtime.executor import Executor
from schedir.runtime.lanes import Lanes
from schedir.runtime.measured import measured
from schedir.training import gpt
from schedir.training.gpt_pieces import boundaries, cut_of, pieces
from schedir.transports.collectives import Group, Kind
from schedir.transports.processes import Gloo
from schedir.transports.transport import Work

WIDE = gpt.GPTConfig(vocab=512, layers=1, hidden=1536, heads=16, context=64, tied=False)
SMALL = gpt.GPTConfig(vocab=512, layers=1, hidden=64, heads=2, context=16, tied=False)
NARROW = gpt.GPTConfig(vocab=512, layers=2, hidden=384, heads=6, context=128, tied=False)
ROWS, M, WARM = 2, 4, 2  # samples of a microbatch; microbatches; rounds that are not counted
ATTENTION = 1  # the first piece of its kind

How = dict[str, Any]
Way = tuple[str, How]  # a schedule, and options of compile
WAYS: tuple[Way, ...] = (
    ("gpipe", {"fill": "all"}),
    ("zb_h1", {"fill": "W"}),
    ("one_f_one_b", {"fill": "all"}),
    ("one_f_one_b", {"chunks": 2}),
    ("one_f_one_b", {"chunks": 2, "fill": "all"}),
)


class Slowed(Gloo):
    """Gloo whose sums between pieces go at a `bandwidth` at most, one after the other."""

    bandwidth = 0.0

    def collective(self, kind: Kind, group: Group, out: Tensor, own: Tensor) -> Work:
        """As Transport.collective."""
        work = super().collective(kind, group, out, own)
        if group != "tp" or not self.bandwidth:
            return work
        if not hasattr(self, "slow"):
            self.slow = Lanes(torch.device("cpu"))
        self.slow.bandwidth[Lane.TP] = self.bandwidth
        return self.slow.start(Lane.TP, work.wait, own.nbytes)


class Run:
    """An executor of a program of one stage, whole or in pieces, and its batch."""

    def __init__(self, config: gpt.GPTConfig, program: Program, bandwidth: float = 0.0) -> None:
        torch.manual_seed(0)
        self.program, self.transport = program, Slowed(program)
        self.transport.bandwidth = bandwidth
        tp, m = self.transport.tp_group, program.plan.microbatches
        stage = gpt.build_stage(config, 0, 1, tp=tp)
        whole = program.plan.stages == 1
        stages: list[nn.Module] = [stage] if whole else pieces(stage)
        shape = (ROWS * M // m, config.context, config.hidden)
        self.executor = Executor(
            program, 0, stages, self.transport, loss=partial(gpt.loss, tp=tp),
            boundary=shape if whole else boundaries(cut_of([config.layers]), shape),
            optimizer=torch.optim.AdamW(stage.parameters(), lr=1e-4),
        )  # fmt: skip
        tokens = torch.randint(config.vocab, (m, shape[0], config.context + 1))
        self.nbytes = 4 * prod(shape)  # of a sum
        self.scale = 1 / (M * ROWS * config.context)
        self.x, self.y = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()

    def step(self) -> float:
        """How long it takes; all processes begin together."""
        dist.barrier()
        began = perf_counter()
        self.executor.step(self.x, self.y, self.scale)
        return perf_counter() - began

    def costs(self) -> Costs:
        """By the last step, the same in all processes."""
        timeline = measured(self.executor, self.transport)
        told: list[Any] = [None if timeline is None else calibrate(timeline)]
        dist.broadcast_object_list(told)
        own: Costs = told[0]
        return own


def made(name: str, layers: int, m: int = M, **how: Any) -> Program:
    """A program of a stage in pieces."""
    cut = cut_of([layers])
    return compile(
        getattr(schedules, name), Plan(1, m), tp=2, cut=cut, model="edge", blocks=True, **how
    )


def told(name: str, how: How) -> str:
    return ", ".join([name, *(f"{what}={value}" for what, value in how.items())])


def slowed(rank: int, rounds: int, config: gpt.GPTConfig, ways: Sequence[Way]) -> None:
    """Predicted beside measured."""
    for name, how in ways:
        for share in (0.5, 1.0) if name == "zb_h1" else (1.0,):
            m = M * how.get("chunks", 1)
            plain = Run(config, made(name, config.layers, m))
            own = []
            for _ in range(2 * WARM):
                plain.step()
                own.append(float(np.ravel(plain.costs().told["F"])[ATTENTION]))
            seconds = share * min(own)
            bandwidth = plain.transport.bandwidth = plain.nbytes / seconds
            plain.step()
            program = made(name, config.layers, costs=plain.costs(), **how)
            other = Run(config, program, bandwidth)
            took: list[list[float]] = []  # both, measured; and both predicted
            for turn in range(WARM + rounds):
                spans = [0.0] * 4
                for each in (plain, other) if turn % 2 else (other, plain):
                    each.step()
                    timeline = measured(each.executor, each.transport)
                    if timeline is None:
                        continue
                    spans[each is other] = timeline.span
                    if each is plain:
                        costs = calibrate(timeline)
                        for k, one in ((2, plain), (3, other)):
                            spans[k] = simulate(one.program, costs, model="edge", blocks=True).span
                took.append(spans)
            if rank:
                continue
            found = np.array(took[WARM:])
            line(
                told(name, how), f"{1e3 * seconds:.2f}",
                *(f"{1e3 * each:.1f}" for each in np.median(found[:, :2], 0)),
                *(ratio((found[:, a] / found[:, b]).tolist()) for a, b in ((1, 0), (3, 2))),
                *(deviation((found[:, a] / found[:, b]).tolist()) for a, b in ((2, 0), (3, 1))),
            )  # fmt: skip


def real(rank: int, rounds: int, config: gpt.GPTConfig, ways: Sequence[Way]) -> None:
    """As Gloo sums."""
    for name, how in ways:
        uncut = compile(getattr(schedules, name), Plan(1, M), tp=2, model="edge", blocks=True)
        whole, plain = Run(config, uncut), Run(config, made(name, config.layers))
        for _ in range(WARM):
            plain.step()
        found, of_pieces = plain.costs(), Plan(1, M, plain.program.plan.stages)
        costs = in_pieces(found, 1, of_pieces, chunks=how.get("chunks", 1))
        runs = [whole, plain, Run(config, made(name, config.layers, costs=costs, **how))]
        took = []
        for turn in range(WARM + rounds):
            order = [(turn + k) % len(runs) for k in range(len(runs))]
            seconds = {k: runs[k].step() for k in order}
            took.append([seconds[k] for k in range(len(runs))])
        each: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(each, took[WARM:])
        if not rank:
            all_of = np.array(each).max(0)
            line(
                told(name, how), f"{1e3 * float(np.mean(found.told['sum'])):.2f}",
                *(f"{1e3 * one:.1f}" for one in np.median(all_of, 0)),
                *(
                    ratio((all_of[:, a] / all_of[:, b]).tolist())
                    for a, b in ((1, 0), (2, 1), (2, 0))
                ),
            )  # fmt: skip


def predicted(rows: Sequence[tuple[str, int]], m: int) -> None:
    """Two layers a rank, in pieces; sums that take a share of an attention or feed-forward."""
    head(*HEADS["predicted"])
    shares = (0.2, 1, 0.2, 1, 0.2, 1, 0.2, 1, 0.2)
    for name, v in rows:
        schedule = getattr(schedules, name)
        placement, own = getattr(schedule, "placed", ("loop", v))
        plan = Plan(4, m, own or v, placement)
        v = plan.stages // 4
        for share in (0.3, 0.6):
            costs = in_pieces(
                Costs(F=5 / v, B=10 / v, I=5 / v, W=5 / v, send=0.1, sum=share / v), 9, plan, shares
            )

            def span(schedule: Any = schedule, plan: Plan = plan, costs: Costs = costs,
                     chunks: int = 1, **how: Any) -> float:  # fmt: skip
                costs = in_pieces(costs, 1, Plan(1, m, plan.stages * 9), chunks=chunks)
                program = compile(
                    schedule, plan, tp=2, cut=9, costs=costs, boundary="sharded", chunks=chunks,
                    **how,
                )  # fmt: skip
                return simulate(program, costs).span

            plain, free = span(), span(costs=replace(costs, sum=0.0))
            filled = [span(fill=fill) for fill in ("W", "F", "all")]
            chunked = [span(chunks=2), span(chunks=4)]
            line(name, f"{share:g}", *(f"{one:.1f}" for one in (free, plain, *filled)),
                 f"{max(0.0, (plain - min(filled)) / (plain - free)):.0%}",
                 *(f"{one:.1f}" for one in chunked))  # fmt: skip


PREDICTED = (  # schedules, with stages per rank
    ("gpipe", 1), ("one_f_one_b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2),
    ("dualpipe", 1),
)  # fmt: skip
HEADS = {
    "slowed": ["1 rank", "a sum takes, ms", "plain, ms", "other, ms", "ratio",
               "predicted ratio", "predicted less measured, plain", "other"],
    "real": ["1 rank", "a sum waited for, ms", "uncut, ms", "plain, ms", "other, ms",
             "plain/uncut", "other/plain", "other/uncut"],
    "predicted": ["4 ranks, m=16", "a sum takes", "sums free", "plain", "fill=W", "F", "all",
                  "of the sums' time won", "chunks=2", "chunks=4"],
}  # fmt: skip


def table(rank: int, rounds: int, name: str, smoke: bool) -> None:
    """Measure a table, and print it on rank 0."""
    if not rank:
        head(*HEADS[name])
    measure, config = {"slowed": (slowed, WIDE), "real": (real, NARROW)}[name]
    measure(rank, rounds, *((SMALL, WAYS[-1:]) if smoke else (config, WAYS)))


def main() -> None:
    """Print the tables, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="steps of each")
    parser.add_argument("--only", default="", choices=("", *HEADS), help="one table")
    args = parse(parser, rounds=1)
    if args.only in ("", "predicted"):
        predicted(*((PREDICTED[:1], 4) if args.smoke else (PREDICTED, 16)))
    for name in ("slowed", "real"):
        if args.only in ("", name):
            on_ranks(table, 2, args.rounds, name, args.smoke)


if __name__ == "__main__":
    main()
