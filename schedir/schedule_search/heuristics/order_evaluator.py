"""Evaluate policies and orders of a problem, interpreted or compiled."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np

from schedir.analysis.numba_jit import Loop
from schedir.schedule_search.heuristics.annealing import anneal, times
from schedir.schedule_search.heuristics.list_scheduling import dispatch
from schedir.schedule_search.problem import MOST, SchedulingProblem
from schedir.schedule_search.rank_order import KINDS, Order

LOOPS: Final = (times, dispatch, anneal)  # what is compiled


class DispatchPolicy(NamedTuple):
    """How idle ranks decide: see `dispatch`.  `lead` is by stage, and `lag` by rank."""

    lead: tuple[int, ...]
    lag: tuple[int, ...]
    wait: float = 0.0
    late: float = 0.0
    slack: float = inf
    forward_first: bool = False
    pick: int = 0


class OrderEvaluator:
    """Runs policies and orders of one SchedulingProblem, by Python over lists, or compiled over
    arrays.

    The results have the same bits.
    """

    def __init__(self, problem: SchedulingProblem, loops: tuple[Loop, ...] | None = None) -> None:
        self.problem = problem
        self._array = loops is not None
        run: tuple[Loop, ...] = loops or LOOPS
        self._times, self._dispatch, self._anneal = run
        shape, m = problem.shape, problem.microbatches
        P, S = shape.ranks, shape.stages
        none = (0.0,) * S
        grows = [both - saved for saved, both in zip(problem.saved, problem.both, strict=True)]
        leaves = [tape - saved for saved, tape in zip(problem.saved, problem.tape, strict=True)]
        kept = [0.0] * S
        for own in problem.own:
            for k, stage in enumerate(own):
                later = sum(problem.saved[other] for other in own[k + 1 :])
                kept[stage] = later + max(0.0, *(grows[other] for other in own))
        room = [min(most, MOST) for most in problem.ample]
        counts = (P, S, m)
        rank_of = self._ints(problem.rank_of)
        first = [0]
        for own in problem.own:
            first.append(first[-1] + len(own))
        per = m * problem.kinds
        self._first = [k * per for k in first]
        cost = self._floats(_woven(problem.F, problem.I, problem.W))
        hop = self._floats(_woven(problem.act, problem.grad, none))
        more = self._floats(_woven(problem.saved, grows, none))
        change = self._floats(_woven(problem.saved, leaves, [-tape for tape in problem.tape]))
        at, done = self._floats([0.0] * (KINDS * S * m)), self._ints([0] * (KINDS * S))
        now = self._floats([0.0] * P)
        n = S * per
        self._out, self._start = self._ints([0] * n), self._floats([0.0] * n)
        starts = self._ints(self._first)
        own_span = int(problem.objective == "own")
        own_stages = self._ints([stage for own in problem.own for stage in own])
        begin = self._ints(first)
        self._given_policy = (
            *counts, int(problem.split), rank_of, own_stages, begin,
            starts, cost, hop, more, change, self._floats(room), self._floats(kept),
        )  # fmt: skip
        self._room_policy = (
            done, at, self._floats([0.0] * P), now, self._floats([0.0] * P),
            self._floats([0.0] * P), self._ints([0] * P), self._ints([0] * P), self._out,
        )  # fmt: skip
        self._given_order = (*counts, rank_of, starts)
        self._rest = (
            cost, hop, self._floats(problem.tail), own_span, at, done, self._ints([0] * P), now,
            self._ints([0] * P), self._ints([0] * P), self._start, self._ints([0] * n),
        )  # fmt: skip
        rank_at = [r for r, own in enumerate(problem.own) for _ in range(len(own) * per)]
        self._moved = (
            more, change, self._floats(room), self._ints(rank_at), own_stages, begin,
        )  # fmt: skip
        self._path, self._undo = self._ints([0] * n), self._ints([0] * n)
        self.evaluations = 0

    @property
    def is_compiled(self) -> bool:
        """Whether it runs machine code."""
        return self._array

    def _ints(self, each: Sequence[int]) -> Any:
        return np.array(each, np.int64) if self._array else list(each)

    def _floats(self, each: Sequence[float]) -> Any:
        return np.array(each, float) if self._array else list(map(float, each))

    def run(self, policy: DispatchPolicy) -> float:
        """What the order takes that a policy makes; infinite if it makes none."""
        self.evaluations += 1
        stuck = self._dispatch(
            *self._given_policy, self._ints(policy.lead), self._ints(policy.lag),
            policy.wait, policy.late, min(policy.slack, MOST), int(policy.forward_first),
            policy.pick, *self._room_policy,
        )  # fmt: skip
        return inf if stuck else self._length(self._out)

    @property
    def made(self) -> Order:
        """The order that the last policy made."""
        return self._cut(self._out)

    def length(self, order: Order) -> float:
        """What an order takes, by the SchedulingProblem's objective; infinite for one that never
        ends."""
        self.evaluations += 1
        return self._length(self._ints([code for codes in order for code in codes]))

    def annealing(self, order: Order, heat: float, cooling: float, seed: int) -> AnnealingState:
        """What moves the work of an order about: see `anneal`."""
        return AnnealingState(self, order, heat, cooling, seed)

    def _length(self, code: Any) -> float:
        takes = float(self._times(*self._given_order, code, *self._rest))
        return takes if takes < MOST else inf

    def _cut(self, code: Any) -> Order:
        flat = code.tolist() if self._array else code
        first = self._first
        return tuple(tuple(flat[a:b]) for a, b in pairwise(first))


class AnnealingState:
    """An order whose work is moved about, and the shortest that it has been."""

    def __init__(
        self, machine: OrderEvaluator, order: Order, heat: float, cooling: float, seed: int
    ) -> None:
        flat = [code for codes in order for code in codes]
        self._machine = machine
        self._code, self._best = machine._ints(flat), machine._ints(flat)
        self.length = machine.length(order)
        self._heats = machine._floats([heat, cooling, self.length])
        self._randoms = machine._ints([seed, 0])

    def run(self, turns: int, goal: float) -> float:
        """Go on for some turns, or until it takes no more than the goal; the shortest so far."""
        machine = self._machine
        self.length = float(
            machine._anneal(
                *machine._given_order, self._code, *machine._rest, *machine._moved,
                machine._path, self._best, machine._undo, turns, self._heats, self._randoms, goal,
            )
        )  # fmt: skip
        machine.evaluations += int(self._randoms[1])
        return self.length

    @property
    def order(self) -> Order:
        """The order as it is now."""
        return self._machine._cut(self._code)

    @property
    def best(self) -> Order:
        """The shortest order so far."""
        return self._machine._cut(self._best)


def _woven(*kinds: Sequence[float]) -> list[float]:
    """Numbers of each kind of work, by code."""
    return [number for stage in zip(*kinds, strict=True) for number in stage]
