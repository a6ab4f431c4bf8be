"""Evaluate policies and orders of a problem, interpreted or compiled."""

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

LOOPS: Final = (compute_times, dispatch_by_policy, anneal)  # what is compiled


class DispatchPolicy(NamedTuple):
    """How idle ranks decide: see `dispatch_by_policy`.  `max_lead` is by stage, and `max_lag` by
    rank."""

    max_lead: tuple[int, ...]
    max_lag: tuple[int, ...]
    wait_share: float = 0.0
    late_share: float = 0.0
    idle_share: float = inf
    forward_first: bool = False
    stage_choice: int = 0


class OrderEvaluator:
    """Runs policies and orders of one SchedulingProblem, by Python over lists, or compiled over
    arrays.

    The results have the same bits.
    """

    def __init__(self, problem: SchedulingProblem, loops: tuple[Loop, ...] | None = None) -> None:
        self.problem = problem
        self._uses_arrays = loops is not None
        run: tuple[Loop, ...] = loops or LOOPS
        self._compute_times, self._dispatch, self._anneal = run
        shape, m = problem.shape, problem.microbatches
        P, S = shape.ranks, shape.stages
        none = (0.0,) * S
        grows = [
            both - saved
            for saved, both in zip(problem.saved, problem.saved_and_deferred, strict=True)
        ]
        leaves = [
            tape - saved for saved, tape in zip(problem.saved, problem.deferred_wgrad, strict=True)
        ]
        kept = [0.0] * S
        for own in problem.stages_of_rank:
            for k, stage in enumerate(own):
                later = sum(problem.saved[other] for other in own[k + 1 :])
                kept[stage] = later + max(0.0, *(grows[other] for other in own))
        room = [min(most, MAX_TIME) for most in problem.rounded_capacity]
        counts = (P, S, m)
        rank_of = self._to_ints(problem.rank_of)
        first = [0]
        for own in problem.stages_of_rank:
            first.append(first[-1] + len(own))
        per = m * problem.num_task_kinds
        self._rank_offsets = [k * per for k in first]
        cost = self._to_floats(_interleave_by_code(problem.F, problem.I, problem.W))
        hop = self._to_floats(_interleave_by_code(problem.act_delay, problem.grad_delay, none))
        more = self._to_floats(_interleave_by_code(problem.saved, grows, none))
        change = self._to_floats(
            _interleave_by_code(problem.saved, leaves, [-tape for tape in problem.deferred_wgrad])
        )
        at, done = self._to_floats([0.0] * (KINDS * S * m)), self._to_ints([0] * (KINDS * S))
        now = self._to_floats([0.0] * P)
        n = S * per
        self._codes, self._starts = self._to_ints([0] * n), self._to_floats([0.0] * n)
        starts = self._to_ints(self._rank_offsets)
        own_span = int(problem.objective == "own")
        own_stages = self._to_ints([stage for own in problem.stages_of_rank for stage in own])
        begin = self._to_ints(first)
        self._policy_inputs = (
            *counts, int(problem.split_backward), rank_of, own_stages, begin,
            starts, cost, hop, more, change, self._to_floats(room), self._to_floats(kept),
        )  # fmt: skip
        self._policy_buffers = (
            done, at, self._to_floats([0.0] * P), now, self._to_floats([0.0] * P),
            self._to_floats([0.0] * P), self._to_ints([0] * P), self._to_ints([0] * P), self._codes,
        )  # fmt: skip
        self._order_inputs = (*counts, rank_of, starts)
        self._order_buffers = (
            cost, hop, self._to_floats(problem.tail_time), own_span, at, done,
            self._to_ints([0] * P), now,
            self._to_ints([0] * P), self._to_ints([0] * P), self._starts, self._to_ints([0] * n),
        )  # fmt: skip
        rank_at = [r for r, own in enumerate(problem.stages_of_rank) for _ in range(len(own) * per)]
        self._annealing_inputs = (
            more, change, self._to_floats(room), self._to_ints(rank_at), own_stages, begin,
        )  # fmt: skip
        self._path_buffer, self._undo_buffer = self._to_ints([0] * n), self._to_ints([0] * n)
        self.evaluations = 0

    @property
    def is_compiled(self) -> bool:
        """Whether it runs machine code."""
        return self._uses_arrays

    def _to_ints(self, each: Sequence[int]) -> Any:
        return np.array(each, np.int64) if self._uses_arrays else list(each)

    def _to_floats(self, each: Sequence[float]) -> Any:
        return np.array(each, float) if self._uses_arrays else list(map(float, each))

    def evaluate_policy(self, policy: DispatchPolicy) -> float:
        """What the order takes that a policy makes; infinite if it makes none."""
        self.evaluations += 1
        stuck = self._dispatch(
            *self._policy_inputs, self._to_ints(policy.max_lead), self._to_ints(policy.max_lag),
            policy.wait_share, policy.late_share, min(policy.idle_share, MAX_TIME),
            int(policy.forward_first),
            policy.stage_choice, *self._policy_buffers,
        )  # fmt: skip
        return inf if stuck else self._evaluate_codes(self._codes)

    @property
    def last_order(self) -> Order:
        """The order that the last policy made."""
        return self._split_by_rank(self._codes)

    def evaluate_order(self, order: Order) -> float:
        """What an order takes, by the SchedulingProblem's objective; infinite for one that never
        ends."""
        self.evaluations += 1
        return self._evaluate_codes(self._to_ints([code for codes in order for code in codes]))

    def start_annealing(
        self, order: Order, heat: float, cooling: float, seed: int
    ) -> AnnealingState:
        """What moves the work of an order about: see `anneal`."""
        return AnnealingState(self, order, heat, cooling, seed)

    def _evaluate_codes(self, codes: Any) -> float:
        takes = float(self._compute_times(*self._order_inputs, codes, *self._order_buffers))
        return takes if takes < MAX_TIME else inf

    def _split_by_rank(self, codes: Any) -> Order:
        flat = codes.tolist() if self._uses_arrays else codes
        first = self._rank_offsets
        return tuple(tuple(flat[a:b]) for a, b in pairwise(first))


class AnnealingState:
    """An order whose work is moved about, and the shortest that it has been."""

    def __init__(
        self, evaluator: OrderEvaluator, order: Order, heat: float, cooling: float, seed: int
    ) -> None:
        flat = [code for codes in order for code in codes]
        self._evaluator = evaluator
        self._codes, self._best_codes = evaluator._to_ints(flat), evaluator._to_ints(flat)
        self.length = evaluator.evaluate_order(order)
        self._heats = evaluator._to_floats([heat, cooling, self.length])
        self._randoms = evaluator._to_ints([seed, 0])

    def run(self, num_moves: int, goal: float) -> float:
        """Go on for some turns, or until it takes no more than the goal; the shortest so far."""
        machine = self._evaluator
        self.length = float(
            machine._anneal(
                *machine._order_inputs, self._codes, *machine._order_buffers,
                *machine._annealing_inputs,
                machine._path_buffer, self._best_codes, machine._undo_buffer, num_moves,
                self._heats, self._randoms, goal,
            )
        )  # fmt: skip
        machine.evaluations += int(self._randoms[1])
        return self.length

    @property
    def current_order(self) -> Order:
        """The order as it is now."""
        return self._evaluator._split_by_rank(self._codes)

    @property
    def best_order(self) -> Order:
        """The shortest order so far."""
        return self._evaluator._split_by_rank(self._best_codes)


def _interleave_by_code(*kinds: Sequence[float]) -> list[float]:
    """Numbers of each kind of work, by code."""
    return [number for stage in zip(*kinds, strict=True) for number in stage]
