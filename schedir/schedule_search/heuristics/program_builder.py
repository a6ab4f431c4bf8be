"""Compile orders into programs with the costs and the limit of a search."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from time import perf_counter
from typing import NamedTuple

import numpy as np

from schedir.analysis.memory.footprint import compute_footprints
from schedir.compiler.compile import compile
from schedir.errors import MemoryLimitError
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes, add_tolerance
from schedir.ir.program import Program
from schedir.passes.pass_types import BufferSharing
from schedir.predict.possible_saving import RELATIVE_TOLERANCE
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.schedule_search.problem import Objective, SchedulingProblem
from schedir.schedule_search.rank_order import (
    Order,
    compute_peaks,
    draft_from_order,
    order_one_by_one,
)

_BUFFER_SHARING_CHOICES: tuple[BufferSharing | None, ...] = (None, "latency_preserving", "minimal")


class BuiltProgram(NamedTuple):
    """A program's prediction, and what that takes."""

    length: float
    timeline: Timeline


class ProgramBuilder:
    """Makes programs of orders of a SchedulingProblem.

    Messages take room beside what the SchedulingProblem counts, in slots of which there may be more
    or fewer.
    """

    def __init__(
        self,
        problem: SchedulingProblem,
        costs: Costs,
        sizes: Sizes | None,
        memory_limit: float | None,
    ) -> None:
        self._problem, self._costs, self._sizes, self._memory_limit = (
            problem,
            costs,
            sizes,
            memory_limit,
        )

    @property
    def counts_messages(self) -> bool:
        """Whether messages are to fit into the limit, too."""
        kinds = ("activation", "activation_grad")
        return self._memory_limit is not None and any(
            self._sizes is not None and self._sizes.per_microbatch(kind, self._problem.shape).any()
            for kind in kinds
        )

    def reserve_message_memory(self, order: Order, problem: SchedulingProblem) -> SchedulingProblem:
        """A Problem with less room than `problem`, too little for an order that holds too much,
        messages and all, with enough slots to lose no time.  The same where it fits.

        Less by half of that only, since orders with less room have fewer messages waiting, too.
        """
        if not self.counts_messages:
            return problem
        assert self._sizes is not None and self._memory_limit is not None
        program = compile(
            draft_from_order(self._problem, order),
            costs=self._costs,
            buffer_sharing="latency_preserving",
        )
        most = np.array(
            [
                own.total_bytes.max()
                for own in compute_footprints(program, self._sizes, worst_case=True)
            ]
        )
        over = np.maximum(most - add_tolerance(self._memory_limit), 0).tolist()
        room = tuple(
            max(min(room - more / 2, peak * (1 - 1e-6)), problem.get_min_capacity(rank))
            if more
            else room
            for rank, (room, more, peak) in enumerate(
                zip(problem.capacity, over, compute_peaks(problem, order), strict=True)
            )
        )
        return replace(problem, capacity=room)

    def build_shortest(
        self,
        orders: Iterable[tuple[float, Order]],
        best: BuiltProgram | None = None,
        deadline: float = inf,
    ) -> BuiltProgram | None:
        """What the shortest of some orders takes as a program, or None if none fits.

        `best` is the shortest that there is already.  The shortest order comes first; `deadline`
        then, by perf_counter, others may be tried.  Opposite messages are grouped where that is
        shorter: they then wait less for each other.
        """
        for length, order in orders:
            for overlap in (False, True):
                as_thought = best is not None and best.length <= length * (1 + RELATIVE_TOLERANCE)
                if best is not None and (as_thought or perf_counter() > deadline):
                    return best  # those that follow are longer, or nobody has time for them
                try:
                    timeline = self._simulate_draft(draft_from_order(self._problem, order), overlap)
                except MemoryLimitError:
                    continue
                made = BuiltProgram(objective_value(timeline, self._problem.objective), timeline)
                best = made if best is None or made.length < best.length else best
        return best

    def build_smallest(self) -> BuiltProgram:
        """What holds the least as a program.  Raises MemoryLimitError where that does not fit."""
        timeline = self._simulate_draft(
            draft_from_order(self._problem, order_one_by_one(self._problem)), False
        )
        return BuiltProgram(objective_value(timeline, self._problem.objective), timeline)

    def _simulate_draft(self, draft: Program, overlap: bool) -> Timeline:
        """The prediction of a draft's program, with as many slots as fit."""
        ways = _BUFFER_SHARING_CHOICES if self.counts_messages else _BUFFER_SHARING_CHOICES[:1]
        for slots in ways:
            try:
                program = compile(
                    draft, costs=self._costs, sizes=self._sizes, memory_limit=self._memory_limit,
                    buffer_sharing=slots,
                    overlap=overlap,
                )  # fmt: skip
                break
            except MemoryLimitError:
                if slots == ways[-1]:
                    raise
        return simulate(program, self._costs, sizes=self._sizes)


def objective_value(timeline: Timeline, objective: Objective) -> float:
    """What a prediction takes, by what was to be short."""
    return float(timeline.active_span.max()) if objective == "own" else timeline.span
