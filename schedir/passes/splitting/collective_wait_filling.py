"""Reorder compute so that it runs while a segment waits for a tensor-parallel collective.

Each rank's order is made anew along a simulation, in several ways: whenever what comes next waits
for nothing but a sum that is under way, the first of what comes later that can run, runs; or always
that behind which most is left, as list scheduling has it.  What becomes of each is simulated as a
program, and the best is kept, or the order as it was.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import heappop, heappush
from itertools import pairwise, product
from math import inf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.critical_path.longest_path import remaining
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.memory.footprint import held
from schedir.errors import UsageError, describe
from schedir.ir.cost.sizes import ample
from schedir.ir.instruction_index import NONE
from schedir.ir.isa.instructions import (
    ADDS_TO_WEIGHTS,
    BACKWARDS,
    BOUNDARY_COLLECTIVES,
    COMPUTE,
    FORWARDS,
    LATE,
    WHOLES,
    Opcode,
    between_segments,
)
from schedir.ir.pipeline.field_schema import FieldType
from schedir.ir.pipeline.stage_segments import ranks_meet
from schedir.ir.program import Program, StreamSlices
from schedir.passes.memory.offload_placement import span_of
from schedir.passes.pass_types import Options, Pass

_ENDS: Final = (*WHOLES, *LATE)  # of a microbatch in a stage
# What may fill, by what is said; of several the best is kept.
_FILLS: Final = {"W": (LATE,), "F": (FORWARDS,), "all": (COMPUTE, LATE, FORWARDS)}
_AHEAD: Final = (1, 2)  # of how many other forwards or backwards pieces may come early
# How many times as long as the wait what runs meanwhile may take; or None, where
# that runs behind which most is left, whether it comes next or not.
_LONGER: Final[tuple[float | None, ...]] = (1.0, 2.0, 4.0, inf, None)
_ROUNDS: Final = 2

Way = tuple[bool, int]  # back or forth, of a microbatch


def fill(program: Program, options: Options) -> Program:
    """A draft in pieces whose order lets something compute while a piece waits for a sum.

    "W" are the halves of backwards that nobody waits for, "F" forwards of other microbatches, "all"
    whatever can run, or one of these where that is shorter.  Each stage adds to its gradients in
    the order of before, so all bits stay.  What is kept is no longer, by simulation, than what is
    given, and no farther above a limit of memory; without a limit no rank is ahead with more
    forwards at once.

    Raises UsageError for what says nothing, without costs or where sums are free, and for a program
    that is not cut.
    """
    which = options.more["fill_collective_waits"]
    if which not in _FILLS:
        raise UsageError(
            f"fill_collective_waits {_TAKES}, not {describe(which)}",
            fields=["fill_collective_waits"],
        )
    if options.costs is None:
        raise UsageError(
            "fill_collective_waits puts work where a simulation has time for it, and needs costs",
            hint="--costs F=1,B=2,tp_reduce=0.5, or costs=Costs(...)",
            fields=["fill_collective_waits"],
        )
    if not program.segment_boundaries and options.more.get("stage_segments") is None:
        raise UsageError(
            "fill_collective_waits puts work behind what segments sum, and no stage has segments",
            hint="stage_segments=5",
            fields=["fill_collective_waits", "stage_segments"],
        )
    if not ranks_meet(program.segment_boundaries):
        return program  # one tensor-parallel rank meets nobody
    if not any(
        options.costs.of(op, program.shape).any()
        for op in between_segments(program.sequence_parallel)
    ):
        raise UsageError(
            "fill_collective_waits puts work in the time of sums, and these take none",
            hint="--costs F=1,B=2,tp_reduce=0.5, or costs=Costs(...)",
            fields=["fill_collective_waits", "costs"],
        )
    if program.joined.any():
        raise UsageError(
            "fill_collective_waits takes computes one by one, and some of a stage without segments "
            "run together",
            hint="give each stage segments",
            fields=["fill_collective_waits", "stage_segments"],
        )
    lowered, most = options.rest(program), None
    if options.memory_limit is None and program.trains:
        most = [_most_ahead(own.op, own.stage >= program.frozen_stages) for own in program.streams]
    found = [_filled(program, lowered, options, fills, most) for fills in _FILLS[which]]
    return min(found, key=lambda one: one[1])[0]


def _filled(
    program: Program,
    lowered: Program,
    options: Options,
    fills: tuple[Opcode, ...],
    most: list[int] | None,
) -> tuple[Program, tuple[float, float]]:
    """The best of what these fill, or the program, and how it is judged."""
    best, least = program, _judged(lowered, options)
    for _ in range(_ROUNDS):  # each begins where the last one has led
        tried = best
        seen = {tried.words.tobytes()}
        for ahead, longer in product(_AHEAD if fills != LATE else _AHEAD[:1], _LONGER):
            found = _ProgramSimulation(lowered, options, fills, ahead, longer, most).filled(tried)
            if (bits := found.words.tobytes()) in seen:
                continue
            seen.add(bits)
            judged = _judged(options.rest(found), options)
            if judged[0] <= least[0] and judged < (least[0], least[1] * (1 - 1e-9)):
                best, least = found, judged
        if best is tried:
            break
        lowered = options.rest(best)
    return best, least


def _ahead(op: int) -> int:
    """How many more forwards are without their backwards, all of these, after an instruction."""
    return (op in FORWARDS) - (op in _ENDS)


def _most_ahead(op: NDArray[Any], trained: NDArray[Any]) -> int:
    """The most forwards that are without their backwards at once; those of what is not trained have
    none."""
    return int((np.array([_ahead(one) for one in op.tolist()]) * trained).cumsum().max(initial=0))


def _judged(lowered: Program, options: Options) -> tuple[float, float]:
    """By how many bytes a program is above the limit, if there is one, and how long it takes."""
    over = 0.0
    if options.sizes is not None and options.memory_limit is not None:
        most = max(own.bytes.max(initial=0.0) for own in held(lowered, options.sizes, late=True))
        over = max(0.0, most - ample(options.memory_limit))
    return over, span_of(lowered, options)


class _ProgramSimulation:
    """Runs a lowered program, whose ranks take what they compute as they can.

    Nodes are those of the graph, and wait for what gives their values.  A rank computes one thing
    at a time, and its group meets for one; all else waits for nothing of its kind.
    """

    def __init__(
        self,
        program: Program,
        options: Options,
        fills: tuple[Opcode, ...],
        ahead: int,
        longer: float | None,
        most: list[int] | None,
    ) -> None:
        assert options.costs is not None
        graph = Graph.of(program, options.progress_model)
        index, node = graph.index, graph.node
        self.ahead, self.longer = ahead, longer
        self.tail: list[float] = remaining(graph, options.costs).tolist() if longer is None else []
        self.most = most
        table, row = graph.costs(options.costs)
        cost = np.zeros(len(index))
        np.maximum.at(cost, node, table[row])
        self.cost: list[float] = cost.tolist()
        self.rank, self.op = index.rank.tolist(), index.op.tolist()
        self.stage, self.mb = index.stage.tolist(), index.mb.tolist()
        each = np.array([_ahead(op) for op in self.op], np.int64)
        self.adds: list[int] = (each * (index.stage >= program.frozen_stages)).tolist()
        self.after: list[list[int]] = [[] for _ in range(len(index))]
        self.before: list[list[int]] = [[] for _ in range(len(index))]
        for giver in graph.needs:
            for at in np.flatnonzero(giver != NONE).tolist():
                one, other = int(node[giver[at]]), int(node[at])
                self.after[one].append(other)
                self.before[other].append(one)
        self.waits = [len(own) for own in self.before]
        self.nodes = np.flatnonzero(node == np.arange(len(node))).tolist()
        computes = index.is_op(COMPUTE)
        self.computes: list[bool] = computes.tolist()
        self.sums: list[bool] = index.is_op(between_segments(program.sequence_parallel)).tolist()
        self.meets: list[bool] = index.is_op(BOUNDARY_COLLECTIVES).tolist()
        self.fills: list[bool] = index.is_op(fills).tolist()
        self.todo = [np.flatnonzero(computes[lo:hi]) + lo for lo, hi in pairwise(program.offsets)]
        self.ready: list[set[int]] = [set() for _ in self.todo]  # by rank, what could begin
        self.begun: dict[int, float] = {}  # until when
        self.over: set[int] = set()
        # How many forwards are without their backwards, now and behind each place in the order of a
        # rank.
        self.now = [0] * len(self.todo)
        self.height = [np.cumsum([self.adds[at] for at in own]) for own in self.todo]
        self.place = {int(at): k for own in self.todo for k, at in enumerate(own)}
        # By stage, what must stay in its order: forwards, and who adds to the same gradients.
        self.turns: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        for own in self.todo:
            for at in own.tolist():
                for line in self._lines(at):
                    self.turns[line].append(at)

    def _lines(self, at: int) -> Iterator[tuple[int, int]]:
        """The lines in which an instruction stands, with others of its stage."""
        op, stage = self.op[at], self.stage[at]
        if all(op not in ops for ops in ADDS_TO_WEIGHTS):
            yield op, stage
        for k, ops in enumerate(ADDS_TO_WEIGHTS):
            if op in ops:
                yield -1 - k, stage

    def filled(self, draft: Program) -> Program:
        """The draft, of whose lowering this is made, with each rank's computes in the order in
        which it runs them; itself where that is the same."""
        order = self._run()
        here = [k for k, computes in enumerate(self.computes) if computes]
        place = {at: k for k, at in enumerate(here)}  # as the draft has them
        moved = np.array([place[at] for own in order for at in own], np.intp)
        if (moved == np.arange(len(moved))).all():
            return draft
        return replace(draft, streams=StreamSlices.at(draft.words[moved], draft.offsets))

    def _run(self) -> list[list[int]]:
        """What each rank computes, in order."""
        order: list[list[int]] = [[] for _ in self.todo]
        self.left = [deque(own.tolist()) for own in self.todo]
        events: list[tuple[float, int]] = []
        group: list[deque[int]] = [deque() for _ in order]  # what it does next
        busy, meeting = [False] * len(order), [False] * len(order)

        def begin(at: int, now: float) -> None:
            self.begun[at] = now + self.cost[at]
            heappush(events, (self.begun[at], at))

        def can_begin(at: int, now: float) -> None:
            if self.computes[at]:
                self.ready[self.rank[at]].add(at)
            elif self.meets[at]:
                group[self.rank[at]].append(at)
            else:
                begin(at, now)

        def go_on(rank: int, now: float) -> None:
            if group[rank] and not meeting[rank]:
                meeting[rank] = True
                begin(group[rank].popleft(), now)
            if not busy[rank] and (at := self._next(rank, now)) is not None:
                busy[rank] = True
                order[rank].append(at)
                self._move(rank, at)
                self.ready[rank].remove(at)
                for line in self._lines(at):
                    self.turns[line].popleft()
                begin(at, now)

        for at in self.nodes:
            if not self.waits[at]:
                can_begin(at, 0.0)
        for rank in range(len(order)):
            go_on(rank, 0.0)
        while events:
            now, touched = events[0][0], set[int]()
            while events and events[0][0] <= now:
                _, at = heappop(events)
                rank = self.rank[at]
                self.over.add(at)
                touched.add(rank)
                busy[rank] &= not self.computes[at]
                meeting[rank] &= not self.meets[at]
                for other in self.after[at]:
                    self.waits[other] -= 1
                    if not self.waits[other]:
                        can_begin(other, now)
                        touched.add(self.rank[other])
            for rank in sorted(touched):
                go_on(rank, now)
        return order

    def _next(self, rank: int, now: float) -> int | None:
        """What a rank computes next: what comes next in its order, or what fills its wait."""
        left = self.left[rank]
        while left and left[0] in self.begun:
            left.popleft()
        if not left:
            return None
        head = int(left[0])
        if self.longer is None:
            some = [head] * (not self.waits[head]) + self._fillers(rank, left)
            return max(some, key=lambda at: (self.tail[at], -at), default=None)
        if not self.waits[head]:
            return head
        missing = [at for at in self.before[head] if at not in self.over]
        if not all(self.sums[at] and not self.waits[at] for at in missing):
            return None  # it waits for more than sums
        wait = max(self.begun.get(at, inf) for at in missing) - now
        most = self.longer * wait * (1 + 1e-9)
        return next((at for at in self._fillers(rank, left) if self.cost[at] <= most), None)

    def _fillers(self, rank: int, left: Iterable[int]) -> list[int]:
        """What could run before what comes next, in order."""
        ways: list[Way | None] = [None, *self._ways(left)]
        return [
            at
            for at in sorted(self.ready[rank])
            if self.fills[at]
            and self._way(at) in ways
            and all(self.turns[line][0] == at for line in self._lines(at))
            and self._holds(rank, at)
        ]

    def _over(self, rank: int, at: int) -> slice:
        """What an instruction passes that runs next, by place in the order of its rank."""
        left = self.left[rank]
        while left and left[0] in self.begun:
            left.popleft()
        return slice(self.place[left[0]] if left else 0, self.place[at])

    def _holds(self, rank: int, at: int) -> bool:
        """Whether a rank has no more forwards ahead than it may, if an instruction runs next."""
        if self.most is None or self.adds[at] <= 0:
            return True
        over = self._over(rank, at)
        there = max(self.now[rank], self.height[rank][over].max(initial=0))
        return bool(there < self.most[rank])

    def _move(self, rank: int, at: int) -> None:
        """Let an instruction run next."""
        self.height[rank][self._over(rank, at)] += self.adds[at]
        self.now[rank] += self.adds[at]

    def _way(self, at: int) -> Way | None:
        """Which way a microbatch goes that a compute is of; None for what nobody waits for."""
        op = self.op[at]
        return None if op in LATE else (op in BACKWARDS, self.mb[at])

    def _ways(self, left: Iterable[int]) -> list[Way]:
        """The next ways in the order of a rank: as many as may be gone at once."""
        found: list[Way] = []
        for at in left:
            if at in self.begun or (way := self._way(at)) is None or way in found:
                continue
            if len(found) > self.ahead:
                break
            found.append(way)
        return found


def _read(text: str) -> str:
    if text not in _FILLS:
        raise ValueError(f"{_TAKES}, not {describe(text)}")
    return text


_TAKES: Final = "is W, F or all"

PASSES: Final = (
    Pass(
        "fill_collective_waits",
        "draft",
        fill,
        wanted=lambda program, options: options.more.get("fill_collective_waits") is not None,
        options=("fill_collective_waits",),
        kinds={"fill_collective_waits": FieldType(_TAKES, _read, str, metavar="WHAT")},
        about="what computes while a segment waits for its tensor-parallel collective: W, F (of "
        "other microbatches) or all",
        order=1,
    ),
)
