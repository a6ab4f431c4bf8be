"""Compile orders into programs with the costs and the memory limit of a search."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from time import perf_counter
from typing import NamedTuple

import numpy as np

from schedir.analysis.memory.footprint import compute_peak_bytes
from schedir.compiler.compile import check_memory, compile
from schedir.errors import MemoryLimitError
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes, add_tolerance
from schedir.ir.program import Program
from schedir.passes.memory.buffer_sharing import share_slots
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
from schedir.verify.check import check

_BUFFER_SHARING_CHOICES: tuple[BufferSharing | None, ...] = (None, "latency_preserving", "minimal")


class BuiltProgram(NamedTuple):
    """The prediction of a compiled program.

    Attributes:
        length: The time that the search minimizes.
        timeline: The predicted timeline, which contains the program.
    """

    length: float
    timeline: Timeline


class ProgramBuilder:
    """Compiles orders of a problem into programs that fit into memory with their messages.

    The problem does not include the memory of messages. The builder chooses how many slots the
    messages have.

    Args:
        problem: The problem.
        costs: The costs of stages.
        sizes: The sizes in bytes. Required for a memory limit in bytes.
        memory_limit: The memory of each rank in bytes, or None.
    """

    def __init__(
        self,
        problem: SchedulingProblem,
        costs: Costs,
        sizes: Sizes | None,
        memory_limit: float | None,
    ) -> None:
        self._problem = problem
        self._costs = costs
        self._sizes = sizes
        self._memory_limit = memory_limit

    @property
    def counts_messages(self) -> bool:
        """Return whether messages must fit into the memory limit."""
        kinds = ("activation", "activation_grad")
        return self._memory_limit is not None and any(
            self._sizes is not None and self._sizes.per_microbatch(kind, self._problem.shape).any()
            for kind in kinds
        )

    def reserve_message_memory(self, order: Order, problem: SchedulingProblem) -> SchedulingProblem:
        """Return a problem with less capacity if an order with its messages exceeds the limit.

        The messages get as many slots as they need to cause no delay. The capacity is reduced only
        by half of the excess, because orders with less memory usually have fewer messages.

        Args:
            order: The order to check.
            problem: The problem whose capacity may be too large.

        Returns:
            The problem with less capacity, at least `get_min_capacity`. An equal problem if the
            order fits with its messages.
        """
        if not self.counts_messages:
            return problem
        assert self._sizes is not None and self._memory_limit is not None
        program = compile(
            draft_from_order(self._problem, order),
            costs=self._costs,
            buffer_sharing="latency_preserving",
        )
        peak_bytes = compute_peak_bytes(program, self._sizes)
        excess = np.maximum(peak_bytes - add_tolerance(self._memory_limit), 0).tolist()
        capacity = tuple(
            max(min(capacity - extra / 2, peak * (1 - 1e-6)), problem.get_min_capacity(rank))
            if extra
            else capacity
            for rank, (capacity, extra, peak) in enumerate(
                zip(problem.capacity, excess, compute_peaks(problem, order), strict=True)
            )
        )
        return replace(problem, capacity=capacity)

    def build_shortest(
        self,
        orders: Iterable[tuple[float, Order]],
        best: BuiltProgram | None = None,
        deadline: float = inf,
    ) -> BuiltProgram | None:
        """Compile orders, and return the shortest program that fits.

        Each order is compiled without and with groups of opposite messages (`overlap`), because
        messages in groups may wait less for each other.

        Args:
            orders: Pairs of a length and an order, the shortest first.
            best: The shortest program so far.
            deadline: A time by `time.perf_counter`. After this time, the function compiles more
                orders only if it has no program yet.

        Returns:
            The shortest program, or None if none fits.
        """
        for length, order in orders:
            for overlap in (False, True):
                best_is_shorter = best is not None and best.length <= length * (
                    1 + RELATIVE_TOLERANCE
                )
                if best is not None and (best_is_shorter or perf_counter() > deadline):
                    return best  # The next orders are longer, or the time is over.
                try:
                    timeline = self._simulate_draft(draft_from_order(self._problem, order), overlap)
                except MemoryLimitError:
                    continue
                built = BuiltProgram(objective_value(timeline, self._problem.objective), timeline)
                best = built if best is None or built.length < best.length else best
        return best

    def build_smallest(self) -> BuiltProgram:
        """Compile the order that needs the least memory.

        Raises:
            MemoryLimitError: The program of this order does not fit into the memory limit.
        """
        timeline = self._simulate_draft(
            draft_from_order(self._problem, order_one_by_one(self._problem)), False
        )
        return BuiltProgram(objective_value(timeline, self._problem.objective), timeline)

    def _simulate_draft(self, draft: Program, overlap: bool) -> Timeline:
        """Compile a draft with as many message slots as fit, and return its prediction."""
        program = compile(draft, costs=self._costs, overlap=overlap)
        if self._memory_limit is not None:
            program = self._fit_into_memory(program, self._memory_limit)
        return simulate(program, self._costs, sizes=self._sizes)

    def _fit_into_memory(self, program: Program, memory_limit: float) -> Program:
        """Return a compiled program with as many message slots as fit into a limit.

        The slots are the last step of `compile`, so the program is lowered only once for all
        choices of `buffer_sharing`.
        """
        assert self._sizes is not None
        choices = _BUFFER_SHARING_CHOICES if self.counts_messages else _BUFFER_SHARING_CHOICES[:1]
        for sharing in choices:
            candidate = program if sharing is None else share_slots(program, sharing, self._costs)
            if compute_peak_bytes(candidate, self._sizes).max() <= add_tolerance(memory_limit):
                break
        else:
            check_memory(candidate, self._sizes, memory_limit)  # raises the error
        return candidate if candidate is program else check(candidate)


def objective_value(timeline: Timeline, objective: Objective) -> float:
    """Return the length of a prediction by an objective.

    Args:
        timeline: The prediction.
        objective: "span" for the span, or "active_span" for the longest active span of a rank.
    """
    return float(timeline.active_span.max()) if objective == "active_span" else timeline.span
