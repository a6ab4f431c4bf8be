"""How often a rank gathers weights with ZeRO 3, beside what torch's own list would.

    python benchmarks/zero_gathers.py [--ranks 4] [--microbatches 16] [--stages-per-rank 4]

For each schedule with several stages on a rank, and each number of stages that are whole at once:
the gathers of each rank with none ahead (the fewest that there can be) and with one run ahead (the
default), and those of `_add_unshard_reshard` of torch.distributed.pipelining where its list holds
no more stages at once; one number where the ranks are alike.  Then how often each rank reduces
gradients, at the end of a step and in turns, and what a process sends for that.
Beside them the time that a step is predicted to take, in forwards, where F takes 1, B 2, I and W 1,
a message 0.05 and a gather half a forward; with none and one ahead, and where gathers are free.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch.distributed.pipelining.schedules import _add_unshard_reshard

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import parse
from schedir import Costs, Plan, Program, Sizes, compile, schedules, simulate
from schedir.analysis.gathers import gathers
from schedir.commands.simulate import volume
from schedir.errors import PlanError
from schedir.ir.ops import Lane
from schedir.schedules.draft import draft
from schedir.schedules.words import placed_for, takes_v
from tests.cpu.test_zero_gathers import actions, residency

COSTS = Costs(F=1, I=1, W=1, send=0.05, unshard=0.5)


class Row(NamedTuple):
    """Of one schedule with so many stages whole at once."""

    active: int
    few: list[int]
    ours: list[int]
    torch: list[int]
    spans: tuple[float, float, float]


def of_torch(program: Program, held: int) -> list[int]:
    """The gathers of each rank in torch's lists, the fewest of those that hold no more stages at
    once; none where each holds more."""
    found: list[list[int]] = []
    for active in range(1, held + 1):
        listed = [
            residency(_add_unshard_reshard(actions(program, rank), active))
            for rank in range(program.plan.ranks)
        ]
        if max(peak for _, peak in listed) <= held:
            found.append([times for times, _ in listed])
    return min(found, default=[])


def rows(program: Program) -> Iterator[Row]:
    """A row for each number of active stages that there can be."""
    for active in range(1, max(map(len, program.plan.stages_of)) + 1):
        try:
            lowered = [compile(program, dp=2, zero=3, active=active, ahead=k) for k in (0, 1)]
        except PlanError:
            continue  # what runs as one uses more
        few, ours = (gathers(one).times for one in lowered)
        free = replace(COSTS, unshard=0)
        spans = [simulate(one, COSTS).span for one in lowered]
        spans.append(simulate(lowered[1], free).span)
        yield Row(active, few, ours, of_torch(program, active), (spans[0], spans[1], spans[2]))


def told(times: Sequence[float]) -> str:
    """The numbers of all ranks, as one number where they are alike."""
    return " ".join(map(str, times if len({*times}) > 1 else times[:1])) or "-"


def reductions(program: Program) -> str:
    """A row of how often gradients are reduced, and what is sent for that, at the end and in turns.

    A stage has 1 GB of gradients, and there are 4 replicas.
    """
    found = []
    for how in ("end", "turn"):
        lowered = compile(program, dp=4, zero=2, reduce=how)
        sent = volume(lowered, Sizes(grads=1e9))[Lane.DP] / 1e9
        found += [told(gathers(lowered).reductions), told([round(each, 1) for each in sent])]
    return " | ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--stages-per-rank", type=int, default=4)
    args = parse(parser, ranks=2, microbatches=4, stages_per_rank=2)
    print("| schedule | stages of a rank | whole | fewest | one ahead | torch | ", end="")
    print("time, none ahead | one ahead | free |\n| --- |" + " --- |" * 8)
    drafts: dict[str, Program] = {}
    for name in schedules.__all__:
        schedule = getattr(schedules, name)
        placement, v = placed_for(schedule)
        v = v or (args.stages_per_rank if takes_v(schedule) else 1)
        if v == 1:
            continue  # its one stage is gathered once, and stays whole
        plan = Plan(args.ranks, args.microbatches, v, placement or "loop")
        drafts[name] = draft(schedule, plan)
        for row in rows(drafts[name]):
            spans = " | ".join(f"{span:.1f}" for span in row.spans)
            times = " | ".join(map(told, (row.few, row.ours, row.torch)))
            print(f"| {name} | {v} | {row.active} | {times} | {spans} |")
    print("\n| schedule | at the end | sent, GB | in turns | sent, GB |\n| --- |" + " --- |" * 4)
    for name, program in drafts.items():
        if program.trains:
            print(f"| {name} | {reductions(program)} |")


if __name__ == "__main__":
    main()
