"""Parts: steps of stages in pieces, unfilled and filled, as predicted and as measured.

    python benchmarks/parts.py [--rounds 20] [--only slowed|real|predicted]

Two processes over Gloo, of one thread each, share all layers of a GPT of one stage (tp 2), which is
cut in pieces; a program and the same one filled take turns, a step each.

slowed: what the tensor-parallel group sums between pieces takes at least a time, in a thread of its
own in which no processor works (`Lanes.bandwidth`): half of an attention piece's, or as much.
Costs are calibrated by steps of the unfilled program before and behind the rounds, and a sum costs
the time told: at the former the other is filled, at the latter both are predicted.

real: the same with sums as Gloo makes them; beside them uncut stages, whose layers sum.

predicted: no process: what filling wins by simulation, of pipelines on 4 ranks.

A ratio is one of two steps of the same round: its median, and in brackets the order statistics
between which the median of such rounds lies 95 times of 100.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.executor import line
from benchmarks.offload import WARM, alternate, cells
from schedir import Plan, compile, in_pieces, schedules, simulate
from schedir.ir.costs import Costs
from schedir.ir.ops import Lane
from schedir.ir.program import Program
from schedir.predict.calibrate import calibrate
from schedir.runtime.executor import Executor
from schedir.runtime.lanes import Lanes
from schedir.runtime.measured import measured
from schedir.testing.processes import run
from schedir.training import gpt
from schedir.training.gpt_pieces import boundaries, cut_of, pieces
from schedir.transports.collectives import Group, Kind
from schedir.transports.processes import Gloo
from schedir.transports.transport import Work

CONFIG = gpt.GPTConfig(vocab=512, layers=2, hidden=512, heads=8, context=64, tied=False)
ROWS, M = 6, 8  # of a microbatch; how many
CUT = cut_of([CONFIG.layers])
ATTENTION = 1  # the first piece of its kind


class Slowed(Gloo):
    """Gloo whose sums between pieces take at least so many `seconds`, one after the other."""

    seconds = 0.0

    def collective(self, kind: Kind, group: Group, out: Tensor, own: Tensor) -> Work:
        """As Transport.collective."""
        work = super().collective(kind, group, out, own)
        if group != "tp" or not self.seconds:
            return work
        if not hasattr(self, "slow"):
            self.slow = Lanes(torch.device("cpu"))
        self.slow.bandwidth[Lane.TP] = 1e6 / self.seconds
        return self.slow.start(Lane.TP, work.wait, 1_000_000)


class Run:
    """An executor of a program of one stage, whole or in pieces, and its batch."""

    def __init__(self, program: Program, seconds: float = 0.0) -> None:
        torch.manual_seed(0)
        self.transport = Slowed(program)
        self.transport.seconds = seconds
        tp = self.transport.tp_group
        stage = gpt.build_stage(CONFIG, 0, 1, tp=tp)
        whole = program.plan.stages == 1
        stages: list[nn.Module] = [stage] if whole else pieces(stage)
        shape = (ROWS, CONFIG.context, CONFIG.hidden)
        self.executor = Executor(
            program, 0, stages, self.transport, loss=partial(gpt.loss, tp=tp),
            boundary=shape if whole else boundaries(CUT, shape),
            optimizer=torch.optim.AdamW(stage.parameters(), lr=1e-4),
        )  # fmt: skip
        tokens = torch.randint(CONFIG.vocab, (M, ROWS, CONFIG.context + 1))
        self.x, self.y = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()

    def step(self) -> None:
        self.executor.step(self.x, self.y, 1 / (M * ROWS * CONFIG.context))

    def costs(self, steps: int = 5) -> Costs:
        """Mean times of some steps, the same in all processes."""
        found: list[Costs] = []
        for _ in range(steps):
            dist.barrier()
            self.step()
            timeline = measured(self.executor, self.transport)
            found += [] if timeline is None else [calibrate(timeline)]
        told: list[Any] = [None]
        if found:
            names = found[0].told
            each = {n: np.mean([one.told[n] for one in found], 0).tolist() for n in names}
            told = [Costs(**each)]
        dist.broadcast_object_list(told)
        own: Costs = told[0]
        return own


WAYS = (("gpipe", "F"), ("gpipe", "all"), ("one_f_one_b", "all"), ("zb_h1", "W"), ("zb_h1", "all"))


def programs(name: str, fill: str, costs: Costs | None = None) -> Program:
    schedule, how = getattr(schedules, name), {"fill": fill} if fill else {}
    return compile(
        schedule, Plan(1, M), tp=2, cut=CUT, model="edge", blocks=True, costs=costs, **how
    )


def slowed(rank: int, rounds: int) -> None:
    """Predicted beside measured."""
    for name, fill in WAYS:
        for share in (0.5, 1.0):
            plain = Run(programs(name, ""))
            for _ in range(WARM):
                plain.step()
            found = plain.costs()
            seconds = share * float(np.ravel(found.told["F"])[ATTENTION])
            plain.transport.seconds = seconds
            costs = replace(plain.costs(), sum=seconds)
            filled = Run(programs(name, fill, costs), seconds)
            took = alternate(plain.step, filled.step, rounds)
            costs = replace(plain.costs(), sum=seconds)
            if rank:
                continue
            span = [
                simulate(each.executor.program, costs, model="edge", blocks=True).span
                for each in (plain, filled)
            ]
            off = [s / statistics.median(pair[k] for pair in took) - 1 for k, s in enumerate(span)]
            ratio = statistics.median(other / one for one, other in took)
            off.append(span[1] / span[0] / ratio - 1)
            line(
                f"{name}, {fill}", f"{1e3 * seconds:.2f}", *cells(took),
                f"{span[1] / span[0]:.3f}", *(f"{one:+.1%}" for one in off),
            )  # fmt: skip


def real(rank: int, rounds: int) -> None:
    """As Gloo sums."""
    whole = Run(compile(schedules.gpipe, Plan(1, M), tp=2, model="edge", blocks=True))
    plain = Run(programs("gpipe", ""))
    took = alternate(whole.step, plain.step, rounds)
    if not rank:
        line("gpipe, uncut beside cut", "", *cells(took))
    for name, fill in WAYS:
        plain = Run(programs(name, ""))
        for _ in range(WARM):
            plain.step()
        costs = plain.costs()
        filled = Run(programs(name, fill, costs))
        took = alternate(plain.step, filled.step, rounds)
        if not rank:
            line(f"{name}, {fill}", f"{1e3 * float(np.mean(costs.told['sum'])):.2f}", *cells(took))


def predicted() -> None:
    """Two layers a rank, in pieces; sums that take a share of an attention or feed-forward."""
    shares = (0.2, 1, 0.2, 1, 0.2, 1, 0.2, 1, 0.2)
    for name, v in (("gpipe", 1), ("one_f_one_b", 1), ("interleaved", 2), ("zb_h1", 1),
                    ("zb_v", 2), ("dualpipe", 1)):  # fmt: skip
        schedule = getattr(schedules, name)
        placement, own = getattr(schedule, "placed", ("loop", v))
        plan = Plan(4, 16, own or 1, placement)
        v = plan.stages // 4 or 1
        for share in (0.3, 0.6):
            costs = in_pieces(
                Costs(F=5 / v, B=10 / v, I=5 / v, W=5 / v, send=0.1, sum=share / v), 9, plan, shares
            )

            def span(fill: str | None, schedule: Any = schedule, plan: Plan = plan,
                     costs: Costs = costs) -> float:  # fmt: skip
                program = compile(
                    schedule, plan, tp=2, cut=9, costs=costs, boundary="sharded", fill=fill
                )
                return simulate(program, costs).span

            plain = span(None)
            free = span(None, costs=replace(costs, sum=0.0))
            each = [span(fill) for fill in ("W", "F", "all")]
            line(name, f"{share:g}", f"{free:.1f}", f"{plain:.1f}",
                 *(f"{one:.1f}" for one in each),
                 f"{max(0.0, (plain - min(each)) / (plain - free)):.0%}")  # fmt: skip


HEADS = {
    "slowed": ["1 rank, m=8", "a sum takes, ms", "unfilled, ms", "filled, ms", "ratio", "predicted",
               "predicted less measured, unfilled", "filled", "ratio"],
    "real": ["1 rank, m=8", "a sum waited for, ms", "unfilled, ms", "filled, ms", "ratio"],
    "predicted": ["4 ranks, m=16", "a sum takes", "sums free", "unfilled", "W", "F", "all",
                  "of the sums' time won"],
}  # fmt: skip


def table(rank: int, rounds: int, name: str) -> None:
    """Measure a table, and print it on rank 0."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not rank:
        line(*HEADS[name])
        line(*["---"] * len(HEADS[name]))
    {"slowed": slowed, "real": real}[name](rank, rounds)


def main() -> None:
    """Print the tables, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="steps of each")
    parser.add_argument("--only", default="", choices=("", *HEADS), help="one table")
    args = parser.parse_args()
    if args.only in ("", "predicted"):
        line(*HEADS["predicted"])
        line(*["---"] * len(HEADS["predicted"]))
        predicted()
    context = multiprocessing.get_context("fork")
    for name in ("slowed", "real"):
        if args.only in ("", name):
            run(table, 2, args.rounds, name, context=context, limit=3600)


if __name__ == "__main__":
    main()
