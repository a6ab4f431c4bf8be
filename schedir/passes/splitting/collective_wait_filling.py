"""Reorder compute so that it runs while a segment waits for a collective or an all-to-all.

The pass simulates the program with several rules, and each rule gives a new order of computes on
each rank. With most rules, a rank whose next compute waits only for a running collective runs the
first later compute that is ready. With one rule, as in list scheduling, a rank always runs the
compute with the longest remaining path. The pass lowers and simulates each order. It keeps the best
order, or the original order if none is better.
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

from schedir.analysis.critical_path.longest_path import compute_remaining_times
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.memory.footprint import compute_footprints
from schedir.errors import CommandHint, UsageError, describe
from schedir.ir.cost.sizes import add_tolerance
from schedir.ir.instruction_index import NO_POSITION
from schedir.ir.isa.instructions import (
    BACKWARD_OPS,
    BACKWARD_WEIGHT_OPS,
    BOUNDARY_COLLECTIVE_OPS,
    COMPUTE_OPS,
    EP_COLLECTIVE_OPS,
    FORWARD_OPS,
    FULL_BACKWARD_OPS,
    GRAD_ADDING_OPS_BY_WEIGHT,
    Opcode,
    find_segment_collectives,
)
from schedir.ir.pipeline.field_schema import FieldType
from schedir.ir.pipeline.stage_segments import has_collectives
from schedir.ir.program import Program, StreamSlices
from schedir.passes.memory.offload_placement import predict_span
from schedir.passes.pass_types import Options, Pass

_COSTS_HINT: Final = CommandHint(
    "costs=Costs(F=1, B=2, tp_reduce=0.5)", "--costs F=1,B=2,tp_reduce=0.5"
)
# Opcodes that end the work of a stage on a microbatch.
_MICROBATCH_END_OPS: Final = (
    *FULL_BACKWARD_OPS,
    *BACKWARD_WEIGHT_OPS,
)
# Value of the option -> tuples of opcodes that may fill a wait.  The pass tries each tuple, and
# keeps the best result.
_FILL_OPS: Final = {
    "W": (BACKWARD_WEIGHT_OPS,),
    "F": (FORWARD_OPS,),
    "all": (COMPUTE_OPS, BACKWARD_WEIGHT_OPS, FORWARD_OPS),
}
# Number of later pairs of direction (forward or backward) and microbatch whose segments may run
# early.
_LOOKAHEADS: Final = (1, 2)
# The largest duration of a compute that fills a wait, as a multiple of the wait.  With None, the
# compute with the longest remaining path always runs.
_DURATION_FACTORS: Final[tuple[float | None, ...]] = (1.0, 2.0, 4.0, inf, None)
_MAX_ROUNDS: Final = 2  # each round starts from the best order of the previous one

MicrobatchDirection = tuple[bool, int]  # (True for a backward, number of the microbatch)


def fill_collective_waits(program: Program, options: Options) -> Program:
    """Reorder a draft so that compute runs during collectives between segments.

    Each stage adds to its gradients in the original order, so training results stay bitwise equal.
    The simulated time of the result is not longer than that of the original. The result does not
    exceed a memory limit by more bytes than the original. Without a limit, no rank has more
    forwards without their backwards at the same time than in the original.

    Args:
        program: A draft with segments.
        options: The options, with costs. `extra_options["fill_collective_waits"]` selects the
            computes that may fill a wait. "W": weight gradients. "F": forwards of other
            microbatches. "all": the shortest result of "W", "F", and all computes.

    Raises:
        UsageError: The option has another value, there are no costs, the costs of the collectives
            are 0, the program has no segments, or some computes are joined.
    """
    which = options.extra_options["fill_collective_waits"]
    if which not in _FILL_OPS:
        raise UsageError(
            f"fill_collective_waits {_REQUIREMENT}, not {describe(which)}",
            fields=["fill_collective_waits"],
        )
    if options.costs is None:
        raise UsageError(
            "fill_collective_waits needs costs, to predict the waits",
            hint=_COSTS_HINT,
            fields=["fill_collective_waits"],
        )
    if not program.segment_boundaries and options.extra_options.get("stage_segments") is None:
        raise UsageError(
            "fill_collective_waits fills waits between the segments of a stage, but no stage has "
            "segments",
            hint="stage_segments=5",
            fields=["fill_collective_waits", "stage_segments"],
        )
    if not has_collectives(program.segment_boundaries):
        return program  # with tp=1 and ep=1 there are no collectives
    if not any(
        options.costs.for_opcode(op, program.shape).any()
        for op in find_segment_collectives(program.sequence_parallel)
    ):
        raise UsageError(
            "fill_collective_waits fills waits for collectives between segments, but these "
            "collectives take no time",
            hint=CommandHint(
                f"{_COSTS_HINT}; with experts, give dispatch and combine",
                f"{_COSTS_HINT.command}; with experts, give dispatch and combine",
            ),
            fields=["fill_collective_waits", "costs"],
        )
    if program.joined.any():
        raise UsageError(
            "fill_collective_waits cannot move computes that run in groups, and some stages "
            "without segments have groups",
            hint="split each stage into segments with stage_segments",
            fields=["fill_collective_waits", "stage_segments"],
        )
    lowered, most = options.run_later_passes(program), None
    if options.memory_limit is None and program.has_backward:
        most = [
            _find_max_ahead(own.op, own.stage >= program.frozen_stages) for own in program.streams
        ]
    found = [_search_order(program, lowered, options, fills, most) for fills in _FILL_OPS[which]]
    return min(found, key=lambda one: one[1])[0]


def _search_order(
    program: Program,
    lowered: Program,
    options: Options,
    fill_ops: tuple[Opcode, ...],
    max_ahead: list[int] | None,
) -> tuple[Program, tuple[float, float]]:
    """Return the program with the best order if `fill_ops` fill waits, and its evaluation.

    If no order is better than that of the program, the program itself is returned.
    """
    best, least = program, _evaluate_program(lowered, options)
    for _ in range(_MAX_ROUNDS):
        tried = best
        seen = {tried.words.tobytes()}
        for ahead, longer in product(
            _LOOKAHEADS if fill_ops != BACKWARD_WEIGHT_OPS else _LOOKAHEADS[:1], _DURATION_FACTORS
        ):
            found = _ProgramSimulation(
                lowered, options, fill_ops, ahead, longer, max_ahead
            ).reorder(tried)
            if (bits := found.words.tobytes()) in seen:
                continue
            seen.add(bits)
            judged = _evaluate_program(options.run_later_passes(found), options)
            if judged[0] <= least[0] and judged < (least[0], least[1] * (1 - 1e-9)):
                best, least = found, judged
        if best is tried:
            break
        lowered = options.run_later_passes(best)
    return best, least


def _count_ahead(op: int) -> int:
    """Return by how much an opcode changes the number of forwards without their backwards."""
    return (op in FORWARD_OPS) - (op in _MICROBATCH_END_OPS)


def _find_max_ahead(op: NDArray[Any], trained: NDArray[Any]) -> int:
    """Return the peak of the number of forwards of trained stages without their backwards."""
    return int(
        (np.array([_count_ahead(one) for one in op.tolist()]) * trained).cumsum().max(initial=0)
    )


def _evaluate_program(lowered: Program, options: Options) -> tuple[float, float]:
    """Return the bytes above the memory limit, and the predicted time.

    Without a limit, the number of bytes is 0.
    """
    over = 0.0
    if options.sizes is not None and options.memory_limit is not None:
        most = max(
            own.total_bytes.max(initial=0.0)
            for own in compute_footprints(lowered, options.sizes, worst_case=True)
        )
        over = max(0.0, most - add_tolerance(options.memory_limit))
    return over, predict_span(lowered, options)


class _ProgramSimulation:
    """A simulation of a lowered program in which each rank chooses the order of its computes.

    The nodes of the dependency graph wait for the producers of their values. A rank runs one
    compute and one tensor-parallel or expert-parallel collective at a time. All other instructions
    start as soon as their values exist.
    """

    def __init__(
        self,
        program: Program,
        options: Options,
        fill_ops: tuple[Opcode, ...],
        lookahead: int,
        duration_factor: float | None,
        max_ahead: list[int] | None,
    ) -> None:
        assert options.costs is not None
        graph = Graph.from_program(program, options.progress_model)
        index, node = graph.index, graph.node
        self.lookahead = lookahead
        self.duration_factor = duration_factor
        self.remaining_time: list[float] = (
            compute_remaining_times(graph, options.costs).tolist()
            if duration_factor is None
            else []
        )
        self.max_ahead = max_ahead
        table, row = graph.get_cost_table(options.costs)
        cost = np.zeros(len(index))
        np.maximum.at(cost, node, table[row])
        self.cost: list[float] = cost.tolist()
        self.rank = index.rank.tolist()
        self.op = index.op.tolist()
        self.stage = index.stage.tolist()
        self.mb = index.mb.tolist()
        each = np.array([_count_ahead(op) for op in self.op], np.int64)
        self.ahead_change: list[int] = (each * (index.stage >= program.frozen_stages)).tolist()
        self.successors: list[list[int]] = [[] for _ in range(len(index))]
        self.predecessors: list[list[int]] = [[] for _ in range(len(index))]
        for giver in graph.needs:
            for at in np.flatnonzero(giver != NO_POSITION).tolist():
                one = int(node[giver[at]])
                other = int(node[at])
                self.successors[one].append(other)
                self.predecessors[other].append(one)
        self.num_pending = [len(own) for own in self.predecessors]
        self.nodes = np.flatnonzero(node == np.arange(len(node))).tolist()
        computes = index.is_op(COMPUTE_OPS)
        self.is_compute: list[bool] = computes.tolist()
        self.is_segment_collective: list[bool] = index.is_op(
            find_segment_collectives(program.sequence_parallel)
        ).tolist()
        self.is_boundary_collective: list[bool] = index.is_op(
            BOUNDARY_COLLECTIVE_OPS + EP_COLLECTIVE_OPS
        ).tolist()
        self.is_fill: list[bool] = index.is_op(fill_ops).tolist()
        self.rank_computes = [
            np.flatnonzero(computes[lo:hi]) + lo for lo, hi in pairwise(program.offsets)
        ]
        self.ready_nodes: list[set[int]] = [
            set() for _ in self.rank_computes
        ]  # nodes of each rank that can start
        self.end_times: dict[int, float] = {}  # node that has started -> time of its end
        self.finished_nodes: set[int] = set()
        # The number of forwards without their backwards on each rank: now, and after each position
        # in the order of the rank.
        self.num_ahead = [0] * len(self.rank_computes)
        self.ahead_profile = [
            np.cumsum([self.ahead_change[at] for at in own]) for own in self.rank_computes
        ]
        self.order_index = {int(at): k for own in self.rank_computes for k, at in enumerate(own)}
        # Queues of computes of a stage that must keep their order: computes of an opcode that adds
        # to no gradients, and computes that add to the same gradients.
        self.ordered_queues: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        for own in self.rank_computes:
            for at in own.tolist():
                for line in self._list_queues(at):
                    self.ordered_queues[line].append(at)

    def _list_queues(self, at: int) -> Iterator[tuple[int, int]]:
        """Yield the keys of the ordered queues that contain an instruction."""
        op, stage = self.op[at], self.stage[at]
        if all(op not in ops for ops in GRAD_ADDING_OPS_BY_WEIGHT):
            yield op, stage
        for k, ops in enumerate(GRAD_ADDING_OPS_BY_WEIGHT):
            if op in ops:
                yield -1 - k, stage

    def reorder(self, draft: Program) -> Program:
        """Return the draft with each rank's computes in the simulated order.

        The simulated program must be the lowered form of this draft. If the order does not change,
        the draft itself is returned.
        """
        order = self._simulate()
        here = [k for k, computes in enumerate(self.is_compute) if computes]
        place = {at: k for k, at in enumerate(here)}  # node -> position in the draft
        moved = np.array([place[at] for own in order for at in own], np.intp)
        if (moved == np.arange(len(moved))).all():
            return draft
        return replace(draft, streams=StreamSlices.from_words(draft.words[moved], draft.offsets))

    def _simulate(self) -> list[list[int]]:
        """Return the computes of each rank in the order in which they run."""
        order: list[list[int]] = [[] for _ in self.rank_computes]
        self.remaining_computes = [deque(own.tolist()) for own in self.rank_computes]
        events: list[tuple[float, int]] = []
        collectives: list[deque[int]] = [deque() for _ in order]  # collectives that can start
        busy = [False] * len(order)
        in_collective = [False] * len(order)

        def begin(at: int, now: float) -> None:
            self.end_times[at] = now + self.cost[at]
            heappush(events, (self.end_times[at], at))

        def can_begin(at: int, now: float) -> None:
            if self.is_compute[at]:
                self.ready_nodes[self.rank[at]].add(at)
            elif self.is_boundary_collective[at]:
                collectives[self.rank[at]].append(at)
            else:
                begin(at, now)

        def go_on(rank: int, now: float) -> None:
            if collectives[rank] and not in_collective[rank]:
                in_collective[rank] = True
                begin(collectives[rank].popleft(), now)
            if not busy[rank] and (at := self._pick_next(rank, now)) is not None:
                busy[rank] = True
                order[rank].append(at)
                self._update_ahead(rank, at)
                self.ready_nodes[rank].remove(at)
                for line in self._list_queues(at):
                    self.ordered_queues[line].popleft()
                begin(at, now)

        for at in self.nodes:
            if not self.num_pending[at]:
                can_begin(at, 0.0)
        for rank in range(len(order)):
            go_on(rank, 0.0)
        while events:
            now, touched = events[0][0], set[int]()
            while events and events[0][0] <= now:
                _, at = heappop(events)
                rank = self.rank[at]
                self.finished_nodes.add(at)
                touched.add(rank)
                busy[rank] &= not self.is_compute[at]
                in_collective[rank] &= not self.is_boundary_collective[at]
                for other in self.successors[at]:
                    self.num_pending[other] -= 1
                    if not self.num_pending[other]:
                        can_begin(other, now)
                        touched.add(self.rank[other])
            for rank in sorted(touched):
                go_on(rank, now)
        return order

    def _pick_next(self, rank: int, now: float) -> int | None:
        """Return the compute that a rank runs next, or None if the rank must wait."""
        left = self.remaining_computes[rank]
        while left and left[0] in self.end_times:
            left.popleft()
        if not left:
            return None
        head = int(left[0])
        if self.duration_factor is None:
            some = [head] * (not self.num_pending[head]) + self._find_fillers(rank, left)
            return max(some, key=lambda at: (self.remaining_time[at], -at), default=None)
        if not self.num_pending[head]:
            return head
        missing = [at for at in self.predecessors[head] if at not in self.finished_nodes]
        if not all(self.is_segment_collective[at] and not self.num_pending[at] for at in missing):
            return None  # the next compute waits for more than running collectives
        wait = max(self.end_times.get(at, inf) for at in missing) - now
        most = self.duration_factor * wait * (1 + 1e-9)
        return next((at for at in self._find_fillers(rank, left) if self.cost[at] <= most), None)

    def _find_fillers(self, rank: int, remaining: Iterable[int]) -> list[int]:
        """Return the ready computes that may run before the next compute of the rank's order."""
        ways: list[MicrobatchDirection | None] = [None, *self._find_next_directions(remaining)]
        return [
            at
            for at in sorted(self.ready_nodes[rank])
            if self.is_fill[at]
            and self._find_direction(at) in ways
            and all(self.ordered_queues[line][0] == at for line in self._list_queues(at))
            and self._is_within_limit(rank, at)
        ]

    def _find_passed(self, rank: int, at: int) -> slice:
        """Return the slice of the rank's order that an instruction overtakes if it runs next."""
        left = self.remaining_computes[rank]
        while left and left[0] in self.end_times:
            left.popleft()
        return slice(self.order_index[left[0]] if left else 0, self.order_index[at])

    def _is_within_limit(self, rank: int, at: int) -> bool:
        """Return whether a rank keeps its limit `max_ahead` if an instruction runs next."""
        if self.max_ahead is None or self.ahead_change[at] <= 0:
            return True
        over = self._find_passed(rank, at)
        there = max(self.num_ahead[rank], self.ahead_profile[rank][over].max(initial=0))
        return bool(there < self.max_ahead[rank])

    def _update_ahead(self, rank: int, at: int) -> None:
        """Update the numbers of forwards without their backwards when an instruction starts."""
        self.ahead_profile[rank][self._find_passed(rank, at)] += self.ahead_change[at]
        self.num_ahead[rank] += self.ahead_change[at]

    def _find_direction(self, at: int) -> MicrobatchDirection | None:
        """Return the direction and the microbatch of a compute; None for a BackwardWeight."""
        op = self.op[at]
        return None if op in BACKWARD_WEIGHT_OPS else (op in BACKWARD_OPS, self.mb[at])

    def _find_next_directions(self, remaining: Iterable[int]) -> list[MicrobatchDirection]:
        """Return the next `lookahead` + 1 pairs of direction and microbatch in a rank's order.

        The computes of these pairs may run early.
        """
        found: list[MicrobatchDirection] = []
        for at in remaining:
            if at in self.end_times or (way := self._find_direction(at)) is None or way in found:
                continue
            if len(found) > self.lookahead:
                break
            found.append(way)
        return found


def _parse_fill(text: str) -> str:
    if text not in _FILL_OPS:
        raise ValueError(f"{_REQUIREMENT}, not {describe(text)}")
    return text


_REQUIREMENT: Final = "must be W, F or all"

PASSES: Final = (
    Pass(
        "fill_collective_waits",
        "draft",
        fill_collective_waits,
        should_run=lambda program, options: (
            options.extra_options.get("fill_collective_waits") is not None
        ),
        option_names=("fill_collective_waits",),
        option_types={
            "fill_collective_waits": FieldType(_REQUIREMENT, _parse_fill, str, metavar="WHAT")
        },
        description="computes that run while a segment waits for its tensor-parallel collective: "
        "W, F (of other microbatches) or all",
        order=1,
    ),
)
