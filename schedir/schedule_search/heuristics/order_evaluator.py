"""Compute the lengths of policies and orders of a problem, in interpreted or compiled loops."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np

from schedir.analysis.numba_jit import Loop
from schedir.schedule_search.heuristics.annealing import anneal, compute_times
from schedir.schedule_search.heuristics.list_scheduling import dispatch_by_policy
from schedir.schedule_search.problem import MAX_TIME, SchedulingProblem
from schedir.schedule_search.rank_order import KINDS, Order

LOOPS: Final = (compute_times, dispatch_by_policy, anneal)  # The functions that Numba compiles.


class DispatchPolicy(NamedTuple):
    """The parameters by which idle ranks choose their tasks: see `dispatch_by_policy`.

    Attributes:
        max_lead: For each stage, the largest number of F's whose I has not run.
        max_lag: For each rank, the largest number of W's that wait.
        wait_share: A rank waits for a gradient that arrives within this share of an F's cost.
        late_share: A W may end later than the next arrival by this share of the W's cost.
        idle_share: A rank runs a W instead of waiting if its idle time would otherwise exceed this
            share of the largest idle time of all ranks.
        forward_first: True to run an F before an I if both are possible.
        stage_choice: Which F runs if F's of several stages are possible. 0: the F with the lowest
            microbatch. 1: the F of the highest stage. 2: the F of the lowest stage.
    """

    max_lead: tuple[int, ...]
    max_lag: tuple[int, ...]
    wait_share: float = 0.0
    late_share: float = 0.0
    idle_share: float = inf
    forward_first: bool = False
    stage_choice: int = 0


class OrderEvaluator:
    """Computes the lengths of orders of one problem, and of the orders that policies produce.

    Interpreted loops use lists, and compiled loops use arrays. The results are bitwise equal. An
    evaluator reuses its buffers, so it is not thread-safe.

    Args:
        problem: The problem.
        loops: The compiled functions of `LOOPS`. By default Python interprets them.
    """

    def __init__(self, problem: SchedulingProblem, loops: tuple[Loop, ...] | None = None) -> None:
        self.problem = problem
        self._uses_arrays = loops is not None
        loop_functions: tuple[Loop, ...] = loops or LOOPS
        self._compute_times, self._dispatch, self._anneal = loop_functions
        shape, m = problem.shape, problem.microbatches
        P, S = shape.ranks, shape.stages
        zeros = (0.0,) * S
        I_growth = [
            saved_and_deferred - saved
            for saved, saved_and_deferred in zip(
                problem.saved, problem.saved_and_deferred, strict=True
            )
        ]
        I_change = [
            deferred - saved
            for saved, deferred in zip(problem.saved, problem.deferred_wgrad, strict=True)
        ]
        reserved = [0.0] * S
        for local_stages in problem.stages_of_rank:
            for k, stage in enumerate(local_stages):
                later_memory = sum(
                    problem.saved[local_stage] for local_stage in local_stages[k + 1 :]
                )
                reserved[stage] = later_memory + max(
                    0.0, *(I_growth[local_stage] for local_stage in local_stages)
                )
        capacity = [min(limit, MAX_TIME) for limit in problem.rounded_capacity]
        counts = (P, S, m)
        rank_of = self._to_ints(problem.rank_of)
        offsets = [0]
        for local_stages in problem.stages_of_rank:
            offsets.append(offsets[-1] + len(local_stages))
        tasks_per_stage = m * problem.num_task_kinds
        self._rank_offsets = [k * tasks_per_stage for k in offsets]
        cost = self._to_floats(_interleave_by_code(problem.F, problem.I, problem.W))
        delays = self._to_floats(_interleave_by_code(problem.act_delay, problem.grad_delay, zeros))
        start_memory = self._to_floats(_interleave_by_code(problem.saved, I_growth, zeros))
        memory_change = self._to_floats(
            _interleave_by_code(
                problem.saved, I_change, [-deferred for deferred in problem.deferred_wgrad]
            )
        )
        arrivals = self._to_floats([0.0] * (KINDS * S * m))
        next_mb = self._to_ints([0] * (KINDS * S))
        rank_time = self._to_floats([0.0] * P)
        n = S * tasks_per_stage
        self._codes = self._to_ints([0] * n)
        self._starts = self._to_floats([0.0] * n)
        rank_offsets = self._to_ints(self._rank_offsets)
        minimizes_active_span = int(problem.objective == "active_span")
        rank_stages = self._to_ints(
            [stage for local_stages in problem.stages_of_rank for stage in local_stages]
        )
        stage_offsets = self._to_ints(offsets)
        self._policy_inputs = (
            *counts, int(problem.split_backward), rank_of, rank_stages, stage_offsets,
            rank_offsets, cost, delays, start_memory, memory_change,
            self._to_floats(capacity), self._to_floats(reserved),
        )  # fmt: skip
        self._policy_buffers = (
            next_mb, arrivals, self._to_floats([0.0] * P), rank_time, self._to_floats([0.0] * P),
            self._to_floats([0.0] * P), self._to_ints([0] * P), self._to_ints([0] * P), self._codes,
        )  # fmt: skip
        self._order_inputs = (*counts, rank_of, rank_offsets)
        self._order_buffers = (
            cost, delays, self._to_floats(problem.tail_time), minimizes_active_span,
            arrivals, next_mb, self._to_ints([0] * P), rank_time,
            self._to_ints([0] * P), self._to_ints([0] * P), self._starts, self._to_ints([0] * n),
        )  # fmt: skip
        rank_at = [
            r
            for r, local_stages in enumerate(problem.stages_of_rank)
            for _ in range(len(local_stages) * tasks_per_stage)
        ]
        self._annealing_inputs = (
            start_memory, memory_change, self._to_floats(capacity), self._to_ints(rank_at),
            rank_stages, stage_offsets,
        )  # fmt: skip
        self._path_buffer = self._to_ints([0] * n)
        self._undo_buffer = self._to_ints([0] * n)
        self.evaluations = 0

    @property
    def is_compiled(self) -> bool:
        """Return whether the loops are compiled."""
        return self._uses_arrays

    def _to_ints(self, values: Sequence[int]) -> Any:
        return np.array(values, np.int64) if self._uses_arrays else list(values)

    def _to_floats(self, values: Sequence[float]) -> Any:
        return np.array(values, float) if self._uses_arrays else list(map(float, values))

    def evaluate_policy(self, policy: DispatchPolicy) -> float:
        """Return the length of the order that a policy produces.

        The length is infinite if the ranks cannot continue within their memory.

        Args:
            policy: The policy.
        """
        self.evaluations += 1
        is_stuck = self._dispatch(
            *self._policy_inputs, self._to_ints(policy.max_lead), self._to_ints(policy.max_lag),
            policy.wait_share, policy.late_share, min(policy.idle_share, MAX_TIME),
            int(policy.forward_first),
            policy.stage_choice, *self._policy_buffers,
        )  # fmt: skip
        return inf if is_stuck else self._evaluate_codes(self._codes)

    @property
    def last_order(self) -> Order:
        """The order that the last evaluated policy produced."""
        return self._split_by_rank(self._codes)

    def evaluate_order(self, order: Order) -> float:
        """Return the length of an order by the objective of the problem.

        The length is infinite if the order deadlocks.

        Args:
            order: The order.
        """
        self.evaluations += 1
        return self._evaluate_codes(self._to_ints([code for codes in order for code in codes]))

    def start_annealing(
        self, order: Order, temperature: float, cooling: float, seed: int
    ) -> AnnealingState:
        """Return a new state of simulated annealing. See `anneal`.

        Args:
            order: The order from which annealing starts.
            temperature: The initial temperature, in the unit of the costs.
            cooling: A factor below 1. Each move multiplies the temperature by it.
            seed: The random seed, 0 to 2**31 - 1.
        """
        return AnnealingState(self, order, temperature, cooling, seed)

    def _evaluate_codes(self, codes: Any) -> float:
        length = float(self._compute_times(*self._order_inputs, codes, *self._order_buffers))
        return length if length < MAX_TIME else inf

    def _split_by_rank(self, codes: Any) -> Order:
        all_codes = codes.tolist() if self._uses_arrays else codes
        rank_offsets = self._rank_offsets
        return tuple(tuple(all_codes[a:b]) for a, b in pairwise(rank_offsets))


class AnnealingState:
    """The current order of annealing, and the shortest order so far.

    Args:
        evaluator: The evaluator of the problem. Annealing uses its buffers.
        order: The order from which annealing starts.
        temperature: The initial temperature, in the unit of the costs.
        cooling: A factor below 1. Each move multiplies the temperature by it.
        seed: The random seed, 0 to 2**31 - 1.
    """

    def __init__(
        self, evaluator: OrderEvaluator, order: Order, temperature: float, cooling: float, seed: int
    ) -> None:
        all_codes = [code for codes in order for code in codes]
        self._evaluator = evaluator
        self._codes = evaluator._to_ints(all_codes)
        self._best_codes = evaluator._to_ints(all_codes)
        self.length = evaluator.evaluate_order(order)
        self._temperatures = evaluator._to_floats([temperature, cooling, self.length])
        self._randoms = evaluator._to_ints([seed, 0])

    def run(self, num_moves: int, goal: float) -> float:
        """Try `num_moves` moves, and return the shortest length so far.

        Args:
            num_moves: The largest number of moves to try.
            goal: The function returns early when an order has this length or less.
        """
        evaluator = self._evaluator
        self.length = float(
            evaluator._anneal(
                *evaluator._order_inputs, self._codes, *evaluator._order_buffers,
                *evaluator._annealing_inputs,
                evaluator._path_buffer, self._best_codes, evaluator._undo_buffer, num_moves,
                self._temperatures, self._randoms, goal,
            )
        )  # fmt: skip
        evaluator.evaluations += int(self._randoms[1])
        return self.length

    @property
    def current_order(self) -> Order:
        """The order after the last move."""
        return self._evaluator._split_by_rank(self._codes)

    @property
    def best_order(self) -> Order:
        """The shortest order so far."""
        return self._evaluator._split_by_rank(self._best_codes)


def _interleave_by_code(*kinds: Sequence[float]) -> list[float]:
    """Return one number for each code of a task, in the order of the codes.

    Each argument has the numbers of one kind of task, by stage.
    """
    return [number for stage in zip(*kinds, strict=True) for number in stage]
