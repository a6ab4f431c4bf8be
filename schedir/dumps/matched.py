"""Matched: the messages that ranks have recorded, as the transfers of a program.

The messages of a rank in a process group are those transfers of its Stream that go that way, in
the order of the Stream, over and over, a step after the other.  So the n-th message of all is known
from n alone; the rest of the recording must agree, or it is not of this program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.graph import Graph
from schedir.dumps.flight_recorder import Group
from schedir.dumps.standing import Job
from schedir.dumps.turns import OtherTurn, Recorded, Run, is_small_talk
from schedir.errors import UsageError
from schedir.ir.program import Program


@dataclass(frozen=True)
class Matched:
    """A copy of the program: which rank of the job runs which of its ranks, and how far each is.

    `step` is the step that all this is of, from 0, or None where the recordings cannot say which.
    `issued`, `started` and `ended` have an entry per instruction, by position, and are true of
    transfers; what has started is known only where ranks record it.
    `left_out` messages are no transfers, but shapes, objects, or one number.  `apart` has, for each
    rank and process group, the transfers that it carries.  `names` has the position of each
    message, by the rank of the job and its number there.  Of the ranks in `counted` only counters
    tell the place in the step, which other messages, lost by now, would have moved.

    `loose` is not empty where a rank has another order than its Stream, and tells where.  Then
    its sends, and what it receives from each rank, go as the program says, and are named by that.
    """

    ranks: tuple[int, ...]
    step: int | None
    issued: NDArray[np.bool_]
    started: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    dumped: tuple[bool, ...]
    left_out: int
    apart: tuple[NDArray[np.int32], ...]
    names: Mapping[tuple[int, int], int]
    counted: tuple[int, ...]
    loose: str = ""


def match(job: Job, program: Program) -> list[Matched]:
    """Each copy of the program that the job runs, as tensor- and data-parallel ranks have them.

    Raises UsageError where the recordings cannot be of this program.
    """
    graph = Graph.of(program)
    return [_match(job, graph, ranks) for ranks in _pipelines(job, program)]


def circles(job: Job) -> list[tuple[int, ...]]:
    """The ranks that exchange messages with each other, directly or not, ascending."""
    circle: dict[int, set[int]] = {}
    for rank, dump in job.dumps.items():
        for peer in {op.peer for op in dump.ops if op.is_message}:
            both = circle.get(rank, {rank}) | circle.get(peer, {peer})
            circle.update(dict.fromkeys(both, both))
    return sorted({tuple(sorted(one)) for one in circle.values()})


def _pipelines(job: Job, program: Program) -> list[tuple[int, ...]]:
    """The ranks that exchange messages, a copy each, in the order of the program's ranks.

    That is the order of a process group of just these ranks, if their messages go in one.
    """
    many, found = program.plan.ranks, circles(job)
    if not found and many > 1:
        raise UsageError(
            "no message between ranks is recorded, only collectives",
            hint="leave out --program; torch's Gloo records no messages, NCCL does",
        )
    used = {op.group for dump in job.dumps.values() for op in dump.ops if op.is_message}
    whole = [g.ranks for g in sorted(used) if g.known and len(g.ranks) == many]
    copies = []
    for ranks in found:
        around = [own for own in whole if {*ranks} <= {*own}]
        if not around and len(ranks) != many:
            raise UsageError(
                f"messages go between {len(ranks)} ranks ({_some(ranks)}), and {program.name} is "
                f"for {many}",
                fields=["ranks"],
            )
        copies.append(around[0] if around else ranks)
    return [*dict.fromkeys(copies)]


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)


def _match(job: Job, graph: Graph, ranks: tuple[int, ...]) -> Matched:
    program = graph.program
    runs: dict[int, list[Run]] = {}
    left_out, loose = 0, ""
    carriers = _carriers(job, ranks)
    steps: list[int] = []
    for own, rank in enumerate(ranks):
        if (dump := job.dumps.get(rank)) is not None:
            messages = [op for op in dump.ops if op.is_message and op.peer in ranks]
            kept = [op for op in messages if not is_small_talk(op)]
            left_out += len(messages) - len(kept)
            of = Recorded(graph, own, ranks, dump, carriers)
            try:
                runs[own] = of.runs(kept, whole=True)
            except OtherTurn as other:
                loose = loose or str(other)
                runs[own] = of.runs(kept, whole=False)
                of.check_causes(kept, runs[own])
            of.check_steps(kept, runs[own])
            if not dump.lost and sum(len(run.turns) for run in runs[own]) < len(of.ways):
                steps.append(0)  # in a process group that it has not used yet
    if left_out and not any(runs.values()):
        raise UsageError(
            f"all {left_out} messages of ranks {_some(ranks)} are of whole numbers, or of one "
            "number, as torch sends shapes and objects: none is a transfer",
            hint="leave out --program",
        )
    known = all(run.first is not None for own in runs.values() for run in own)
    every = [run for own in runs.values() for run in own]
    step = min([*steps, *(run.step(known) for run in every)], default=0)
    names = {
        (ranks[own], number): at
        for own, each in runs.items()
        for run in each
        for number, _, at in run.named()
    }
    issued, started, ended = np.zeros((3, len(program)), bool)
    for run in every:
        run.mark(step, known, issued, started, ended)
    return Matched(
        ranks,
        step if known else None,
        issued,
        started,
        ended,
        tuple(rank in job.dumps for rank in ranks),
        left_out,
        tuple(run.turns for run in every),
        names,
        tuple(ranks[own] for own, each in runs.items() if not all(run.fits for run in each)),
        loose,
    )


def _carriers(job: Job, ranks: tuple[int, ...]) -> dict[tuple[int, int], list[Group]]:
    """From whom to whom, the process groups that carry messages, the first to be used first."""
    found: dict[tuple[int, int], dict[Group, None]] = defaultdict(dict)
    for rank in ranks:
        for op in job.dumps[rank].ops if rank in job.dumps else ():
            if op.is_message and not is_small_talk(op):
                ends = (rank, op.peer) if op.kind == "send" else (op.peer, rank)
                found[ends][op.group] = None
    return defaultdict(list, {ends: [*groups] for ends, groups in found.items()})
