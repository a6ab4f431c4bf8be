"""Reorder compute so that it runs while a segment waits for a collective or an all-to-all.

The pass simulates the program with several rules, and each rule gives a new order of computes on
each rank. With most rules, a rank runs a later compute if its next compute waits only for a running
collective. The rank then runs the first later compute that is ready. With one rule, as in list
scheduling, a rank always runs the compute with the longest remaining path. The pass lowers and
simulates each order. It keeps the best order, or the original order if none is better.
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
from schedir.errors import CommandHint, UsageError, describe
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
from schedir.passes.memory.offload_placement import evaluate_program
from schedir.passes.pass_types import Options, Pass

_COSTS_HINT: Final = CommandHint(
    "costs=Costs(F=1, B=2, tp_reduce=0.5)", "--costs F=1,B=2,tp_reduce=0.5"
)
# Opcodes that end the work of a stage on a microbatch.
_MICROBATCH_END_OPS: Final = (
    *FULL_BACKWARD_OPS,
    *BACKWARD_WEIGHT_OPS,
)
# Value of `fill_collective_waits` -> tuples of opcodes that may fill a wait.  The pass tries each
# tuple, and keeps the best result.
_FILL_OPS: Final = {
    "W": (BACKWARD_WEIGHT_OPS,),
    "F": (FORWARD_OPS,),
    "all": (COMPUTE_OPS, BACKWARD_WEIGHT_OPS, FORWARD_OPS),
}
# The segments of this many later (direction, microbatch) pairs may run early. A direction is
# forward or backward.
_LOOKAHEADS: Final = (1, 2)
# The largest duration of a compute that fills a wait, as a multiple of the wait.  With None, the
# compute with the longest remaining path always runs.
_DURATION_FACTORS: Final[tuple[float | None, ...]] = (1.0, 2.0, 4.0, inf, None)
_MAX_ROUNDS: Final = 2  # each round starts from the best order of the previous one

MicrobatchDirection = tuple[bool, int]  # (True for a backward, number of the microbatch)


def fill_collective_waits(program: Program, options: Options) -> Program:
    """Reorder a draft so that compute runs during collectives between segments.

    Each stage adds to its gradients in the original order, so training results stay bitwise equal.
    The simulated time of the result is not longer than the simulated time of the original. The
    result does not exceed a memory limit by more bytes than the original. Without a limit, the peak
    number of (stage, microbatch) pairs in flight on a rank is not higher than in the original.

    Args:
        program: A draft with segments.
        options: The options, with costs. `extra_options["fill_collective_waits"]` selects the
            computes that may fill a wait. "W": weight gradients. "F": forwards of other
            microbatches. "all": the shortest result of "W", "F", and all computes.

    Raises:
        UsageError: `fill_collective_waits` is not "W", "F" or "all". Or there are no costs, or the
            costs of the collectives are 0. Or the program has no segments, or has pairs of computes
            that run together.
    """
    selection = options.extra_options["fill_collective_waits"]
    if selection not in _FILL_OPS:
        raise UsageError(
            f"fill_collective_waits {_REQUIREMENT}, not {describe(selection)}",
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
            "fill_collective_waits cannot move a pair of computes that run together, but the "
            "program has such pairs in stages without segments",
            hint="split each stage into segments with stage_segments",
            fields=["fill_collective_waits", "stage_segments"],
        )
    lowered, max_ahead = options.run_later_passes(program), None
    if options.memory_limit is None and program.has_backward:
        max_ahead = [
            _find_max_ahead(stream.op, stream.stage >= program.frozen_stages)
            for stream in program.streams
        ]
    results = [
        _search_order(program, lowered, options, fill_ops, max_ahead)
        for fill_ops in _FILL_OPS[selection]
    ]
    return min(results, key=lambda result: result[1])[0]


def _search_order(
    program: Program,
    lowered: Program,
    options: Options,
    fill_ops: tuple[Opcode, ...],
    max_ahead: list[int] | None,
) -> tuple[Program, tuple[float, float]]:
    """Return the program with the best order if `fill_ops` fill waits, and its evaluation.

    If no order is better than the order of the program, the program itself is returned.
    """
    best, best_evaluation = program, evaluate_program(lowered, options)
    for _ in range(_MAX_ROUNDS):
        base = best
        seen_words = {base.words.tobytes()}
        for lookahead, duration_factor in product(
            _LOOKAHEADS if fill_ops != BACKWARD_WEIGHT_OPS else _LOOKAHEADS[:1], _DURATION_FACTORS
        ):
            trial = _ProgramSimulation(
                lowered, options, fill_ops, lookahead, duration_factor, max_ahead
            ).reorder(base)
            if (trial_words := trial.words.tobytes()) in seen_words:
                continue
            seen_words.add(trial_words)
            evaluation = evaluate_program(options.run_later_passes(trial), options)
            best_excess, best_time = best_evaluation
            is_better = evaluation < (best_excess, best_time * (1 - 1e-9))
            if evaluation[0] <= best_excess and is_better:
                best, best_evaluation = trial, evaluation
        if best is base:
            break
        lowered = options.run_later_passes(best)
    return best, best_evaluation


def _count_ahead(op: int) -> int:
    """Return by how much an opcode changes the number of (stage, microbatch) pairs in flight."""
    return (op in FORWARD_OPS) - (op in _MICROBATCH_END_OPS)


def _find_max_ahead(op: NDArray[Any], is_trained: NDArray[Any]) -> int:
    """Return the peak number of (stage, microbatch) pairs in flight, for trained stages."""
    changes = np.array([_count_ahead(opcode) for opcode in op.tolist()]) * is_trained
    return int(changes.cumsum().max(initial=0))


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
        index, node_of_position = graph.index, graph.node
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
        np.maximum.at(cost, node_of_position, table[row])
        self.cost: list[float] = cost.tolist()
        self.rank = index.rank.tolist()
        self.op = index.op.tolist()
        self.stage = index.stage.tolist()
        self.mb = index.mb.tolist()
        changes = np.array([_count_ahead(op) for op in self.op], np.int64)
        self.ahead_change: list[int] = (changes * (index.stage >= program.frozen_stages)).tolist()
        self.successors: list[list[int]] = [[] for _ in range(len(index))]
        self.predecessors: list[list[int]] = [[] for _ in range(len(index))]
        for producer in graph.needs:
            for consumer in np.flatnonzero(producer != NO_POSITION).tolist():
                producer_node = int(node_of_position[producer[consumer]])
                consumer_node = int(node_of_position[consumer])
                self.successors[producer_node].append(consumer_node)
                self.predecessors[consumer_node].append(producer_node)
        self.num_pending = [len(nodes) for nodes in self.predecessors]
        self.nodes = np.flatnonzero(node_of_position == np.arange(len(node_of_position))).tolist()
        is_compute = index.is_op(COMPUTE_OPS)
        self.is_compute: list[bool] = is_compute.tolist()
        self.is_segment_collective: list[bool] = index.is_op(
            find_segment_collectives(program.sequence_parallel)
        ).tolist()
        self.is_boundary_collective: list[bool] = index.is_op(
            BOUNDARY_COLLECTIVE_OPS + EP_COLLECTIVE_OPS
        ).tolist()
        self.is_fill: list[bool] = index.is_op(fill_ops).tolist()
        self.rank_computes = [
            np.flatnonzero(is_compute[begin:end]) + begin
            for begin, end in pairwise(program.offsets)
        ]
        # The nodes of each rank that can start.
        self.ready_nodes: list[set[int]] = [set() for _ in self.rank_computes]
        self.end_times: dict[int, float] = {}  # node that has started -> time of its end
        self.finished_nodes: set[int] = set()
        # The number of (stage, microbatch) pairs in flight on each rank: now, and after each
        # position in the order of the rank.
        self.num_ahead = [0] * len(self.rank_computes)
        self.ahead_profile = [
            np.cumsum([self.ahead_change[node] for node in computes])
            for computes in self.rank_computes
        ]
        self.order_index = {
            int(node): k for computes in self.rank_computes for k, node in enumerate(computes)
        }
        # Queues of computes of a stage that must keep their order: computes of an opcode that adds
        # to no gradients, and computes that add to the same gradients.
        self.ordered_queues: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        for computes in self.rank_computes:
            for node in computes.tolist():
                for queue in self._list_queues(node):
                    self.ordered_queues[queue].append(node)

    def _list_queues(self, node: int) -> Iterator[tuple[int, int]]:
        """Yield the keys of the ordered queues that contain an instruction."""
        op, stage = self.op[node], self.stage[node]
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
        compute_nodes = [k for k, is_compute in enumerate(self.is_compute) if is_compute]
        # Node -> position in the draft.
        draft_position = {node: k for k, node in enumerate(compute_nodes)}
        nodes = [node for rank_order in order for node in rank_order]
        new_order = np.array([draft_position[node] for node in nodes], np.intp)
        if (new_order == np.arange(len(new_order))).all():
            return draft
        words = draft.words[new_order]
        return replace(draft, streams=StreamSlices.from_words(words, draft.offsets))

    def _simulate(self) -> list[list[int]]:
        """Return the computes of each rank in the order in which they run."""
        order: list[list[int]] = [[] for _ in self.rank_computes]
        self.remaining_computes = [deque(computes.tolist()) for computes in self.rank_computes]
        events: list[tuple[float, int]] = []
        collectives: list[deque[int]] = [deque() for _ in order]  # collectives that can start
        is_busy = [False] * len(order)
        in_collective = [False] * len(order)

        def begin(node: int, now: float) -> None:
            self.end_times[node] = now + self.cost[node]
            heappush(events, (self.end_times[node], node))

        def make_ready(node: int, now: float) -> None:
            if self.is_compute[node]:
                self.ready_nodes[self.rank[node]].add(node)
            elif self.is_boundary_collective[node]:
                collectives[self.rank[node]].append(node)
            else:
                begin(node, now)

        def advance(rank: int, now: float) -> None:
            if collectives[rank] and not in_collective[rank]:
                in_collective[rank] = True
                begin(collectives[rank].popleft(), now)
            if not is_busy[rank] and (node := self._pick_next(rank, now)) is not None:
                is_busy[rank] = True
                order[rank].append(node)
                self._update_ahead(rank, node)
                self.ready_nodes[rank].remove(node)
                for queue in self._list_queues(node):
                    self.ordered_queues[queue].popleft()
                begin(node, now)

        for node in self.nodes:
            if not self.num_pending[node]:
                make_ready(node, 0.0)
        for rank in range(len(order)):
            advance(rank, 0.0)
        while events:
            now, changed_ranks = events[0][0], set[int]()
            while events and events[0][0] <= now:
                _, node = heappop(events)
                rank = self.rank[node]
                self.finished_nodes.add(node)
                changed_ranks.add(rank)
                is_busy[rank] &= not self.is_compute[node]
                in_collective[rank] &= not self.is_boundary_collective[node]
                for successor in self.successors[node]:
                    self.num_pending[successor] -= 1
                    if not self.num_pending[successor]:
                        make_ready(successor, now)
                        changed_ranks.add(self.rank[successor])
            for rank in sorted(changed_ranks):
                advance(rank, now)
        return order

    def _pick_next(self, rank: int, now: float) -> int | None:
        """Return the compute that a rank runs next, or None if the rank must wait."""
        remaining = self.remaining_computes[rank]
        while remaining and remaining[0] in self.end_times:
            remaining.popleft()
        if not remaining:
            return None
        next_compute = int(remaining[0])
        if self.duration_factor is None:
            choices = self._find_fillers(rank, remaining)
            if not self.num_pending[next_compute]:
                choices = [next_compute, *choices]
            return max(choices, key=lambda node: (self.remaining_time[node], -node), default=None)
        if not self.num_pending[next_compute]:
            return next_compute
        predecessors = self.predecessors[next_compute]
        missing = [node for node in predecessors if node not in self.finished_nodes]
        is_running = [
            self.is_segment_collective[node] and not self.num_pending[node] for node in missing
        ]
        if not all(is_running):
            return None  # the next compute also waits for another instruction
        wait = max(self.end_times.get(node, inf) for node in missing) - now
        max_cost = self.duration_factor * wait * (1 + 1e-9)
        fillers = self._find_fillers(rank, remaining)
        return next((node for node in fillers if self.cost[node] <= max_cost), None)

    def _find_fillers(self, rank: int, remaining: Iterable[int]) -> list[int]:
        """Return the ready computes that may run before the next compute of the rank's order."""
        directions = [None, *self._find_next_directions(remaining)]
        return [
            node
            for node in sorted(self.ready_nodes[rank])
            if self.is_fill[node]
            and self._find_direction(node) in directions
            and all(self.ordered_queues[queue][0] == node for queue in self._list_queues(node))
            and self._is_within_limit(rank, node)
        ]

    def _find_passed(self, rank: int, node: int) -> slice:
        """Return the slice of the rank's order that an instruction overtakes if it runs next."""
        remaining = self.remaining_computes[rank]
        while remaining and remaining[0] in self.end_times:
            remaining.popleft()
        return slice(self.order_index[remaining[0]] if remaining else 0, self.order_index[node])

    def _is_within_limit(self, rank: int, node: int) -> bool:
        """Return whether a rank keeps its limit `max_ahead` if an instruction runs next."""
        if self.max_ahead is None or self.ahead_change[node] <= 0:
            return True
        passed_range = self._find_passed(rank, node)
        peak = max(self.num_ahead[rank], self.ahead_profile[rank][passed_range].max(initial=0))
        return bool(peak < self.max_ahead[rank])

    def _update_ahead(self, rank: int, node: int) -> None:
        """Update the numbers of (stage, microbatch) pairs in flight when an instruction starts."""
        self.ahead_profile[rank][self._find_passed(rank, node)] += self.ahead_change[node]
        self.num_ahead[rank] += self.ahead_change[node]

    def _find_direction(self, node: int) -> MicrobatchDirection | None:
        """Return the direction and the microbatch of a compute; None for a BackwardWeight."""
        op = self.op[node]
        return None if op in BACKWARD_WEIGHT_OPS else (op in BACKWARD_OPS, self.mb[node])

    def _find_next_directions(self, remaining: Iterable[int]) -> list[MicrobatchDirection]:
        """Return the next `lookahead` + 1 pairs of direction and microbatch in a rank's order.

        The computes of these pairs may run early.
        """
        directions: list[MicrobatchDirection] = []
        for node in remaining:
            if node in self.end_times:
                continue
            direction = self._find_direction(node)
            if direction is None or direction in directions:
                continue
            if len(directions) > self.lookahead:
                break
            directions.append(direction)
        return directions


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
        description="compute instructions that run while a segment waits for its collective: "
        "W, F (of other microbatches) or all",
        order=1,
    ),
)
