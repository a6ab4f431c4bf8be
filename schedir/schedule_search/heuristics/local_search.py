"""Search for shorter orders until the time limit or a proof of optimality."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from math import inf
from operator import itemgetter
from random import Random
from time import perf_counter

from schedir.analysis.numba_jit import NumbaStatus, compile_within
from schedir.predict.possible_saving import RELATIVE_TOLERANCE
from schedir.schedule_search.heuristics.dispatch_policies import (
    generate_neighbours,
    generate_policies,
)
from schedir.schedule_search.heuristics.order_evaluator import LOOPS, DispatchPolicy, OrderEvaluator
from schedir.schedule_search.problem import SchedulingProblem
from schedir.schedule_search.rank_order import Order, compute_peaks, order_one_by_one
from schedir.schedule_search.search_results import SearchStep

_IMPROVEMENT_FACTOR = 1 - 1e-12  # times that differ by less are the same
_CLOCK_SECONDS = 0.05  # seconds between two looks at the clock
# Until when policies are tried, and then changed, in parts of the budget; the rest is annealing.
_POLICY_PHASES = ((0.08, 0.2), (0.35, 0.5))
_MAX_FINALISTS = 4  # of the shortest orders that are kept
_MAX_EQUAL_ORDERS = (
    32  # orders as short as the shortest that are looked at, whose messages may wait less
)
_MAX_EQUAL_MOVES = 500  # moves at most from the shortest to one of these
_FIRST_MOVES = 16  # moves of work between two looks at the clock
_POOL_SIZE = 24  # policies whose orders are starting points
_COMPILE_AFTER_SECONDS = (
    0.2  # seconds before machine code is asked for, which takes as long to come
)
_MAX_FAILED_ROUNDS = (
    64  # rounds of annealing without anything better, after which there is hardly any
)
# The heat at which rounds begin, in mean times of a piece of work, and moves for each piece.
_ANNEALING_ROUNDS = ((4.0, 100), (8.0, 400), (16.0, 100), (4.0, 1600), (2.0, 400))
_UNLIMITED_EVALUATIONS = 2**62  # evaluations where nobody counts them
_MIN_HEAT = 0.1  # the least heat
_FINAL_HEAT_SHARE = 1 / 30  # what is left of a round's heat at its end


class BudgetExhausted(Exception):
    """The budget is spent."""


class LocalSearch:
    """The shortest orders so far, and how they came.

    The budget is in `seconds`, or in `evaluations` of orders: then what is found depends on the
    seed alone, as long as the seconds are enough.
    """

    def __init__(
        self,
        problem: SchedulingProblem,
        bound: float,
        *,
        start_time: float,
        seconds: float,
        evaluations: int | None,
        seed: int,
        report: Callable[[SearchStep], None],
    ) -> None:
        self.problem, self.bound = problem, bound
        self.shortest_orders: list[tuple[float, Order]] = []  # the shortest first
        self.initial_orders: list[
            tuple[float, Order]
        ] = []  # those that it began with, the shortest first
        self.improvements: list[SearchStep] = []
        self.start_time = start_time
        self._seconds, self._evaluations, self._report = seconds, evaluations, report
        self._random = Random(seed)
        self.numba: NumbaStatus = "not needed"
        self._evaluator, self._earlier_evaluations = OrderEvaluator(problem), 0
        self._moves_per_second = 1e4  # moves of work in a second
        self._pool: list[tuple[float, DispatchPolicy]] = []
        self._exhausted_policies: set[DispatchPolicy] = set()  # of which no neighbour is better

    @property
    def length(self) -> float:
        """What the shortest order takes; infinite if there is none."""
        return self.shortest_orders[0][0] if self.shortest_orders else inf

    @property
    def best_order(self) -> Order:
        """The shortest order."""
        return self.shortest_orders[0][1]

    @property
    def is_proved(self) -> bool:
        """Whether no order can be shorter than the best."""
        return self.length <= self.proof_length

    @property
    def proof_length(self) -> float:
        """The bound, and what sums of times may differ from it by rounding."""
        return self.bound * (1 + RELATIVE_TOLERANCE)

    @property
    def num_evaluated(self) -> int:
        """How many orders were evaluated."""
        return self._earlier_evaluations + self._evaluator.evaluations

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return perf_counter() - self.start_time

    def add_order(self, length: float, order: Order, method: str) -> bool:
        """Keep an order if it is the shortest so far, and say whether it is."""
        if length >= self.length * _IMPROVEMENT_FACTOR:
            return False
        self.shortest_orders.insert(0, (length, order))
        del self.shortest_orders[_MAX_FINALISTS:]
        self.improvements.append(SearchStep(self.elapsed, method, length))
        self._report(self.improvements[-1])
        return True

    def add_initial_orders(self, orders: Iterable[tuple[str, Order]]) -> None:
        """Look at orders that somebody has made, as far as they fit."""
        for name, order in orders:
            if all(map(self.problem.fits_on_rank, compute_peaks(self.problem, order), count())):
                self.initial_orders.append((self._evaluator.evaluate_order(order), order))
                self.add_order(*self.initial_orders[-1], name)
        self.initial_orders.sort(key=itemgetter(0))

    def run(self, tighten_bound: Callable[[], float] | None = None) -> bool:
        """Look until there is a proof, the budget is spent (False), or nothing better comes.

        What is not soon proved asks once for a tighter bound.
        """
        try:
            tried = generate_policies(self.problem, self._random)
            for swept, descended in _POLICY_PHASES:
                self._try_policies(tried, swept)
                self._improve_policies(descended)
                if tighten_bound is not None and not self.is_proved:
                    self.bound, tighten_bound = tighten_bound(), None
            self._anneal()
        except BudgetExhausted:
            return False
        return True

    def list_finalists(self) -> Iterator[tuple[float, Order]]:
        """The shortest order, others that are as short, and then those that were it before.

        Others are looked for in what is left of the seconds.
        """
        yield from self.shortest_orders[:1]
        for order in islice(self._generate_equal_orders(), _MAX_EQUAL_ORDERS):
            yield self.length, order
        yield from self.shortest_orders[1:]

    def _generate_equal_orders(self) -> Iterator[Order]:
        """Orders as short as the shortest, of which some work is moved."""
        while self.shortest_orders and self.elapsed < self._seconds:
            self._use_compiled_loops()
            moving = self._evaluator.start_annealing(
                self.best_order, 0.0, 1.0, self._random.randrange(2**31)
            )
            moving.run(min(self.problem.num_tasks, _MAX_EQUAL_MOVES), 0.0)
            yield moving.current_order

    # ------------------------------------------------------------ ways of looking

    def _try_policies(self, policies_to_try: Iterator[DispatchPolicy], budget_share: float) -> None:
        """Policies of all kinds."""
        while (
            not self.is_proved
            and self._check_budget() <= budget_share
            and (policy := next(policies_to_try, None))
        ):
            self._pool.append((self._evaluate_policy(policy, "policy"), policy))
            if self.elapsed >= _COMPILE_AFTER_SECONDS:
                self._use_compiled_loops()
        self._pool.sort(key=lambda each: each[0])
        del self._pool[_POOL_SIZE:]

    def _improve_policies(self, budget_share: float) -> None:
        """The best policies, changed in one thing after another as long as that is better."""
        for k, (length, policy) in enumerate(self._pool):
            better = None if policy in self._exhausted_policies else policy
            while (
                better is not None and not self.is_proved and self._check_budget() <= budget_share
            ):
                policy, better = better, None
                for other in generate_neighbours(self.problem, policy, self._random):
                    found = self._evaluate_policy(other, "changed policy")
                    if found < length * _IMPROVEMENT_FACTOR:
                        length, better = found, other
                        break
                    if self.is_proved or self._check_budget() > budget_share:
                        break
            if self._check_budget() <= budget_share:
                self._exhausted_policies.add(policy)
            self._pool[k] = length, policy

    def _anneal(self) -> None:
        """Rounds of annealing, from the best and from where policies led."""
        if not self.is_proved:
            self._use_compiled_loops()
        if not self.shortest_orders:  # no policy has led to the end in so little room
            order = order_one_by_one(self.problem)
            self.add_order(self._evaluator.evaluate_order(order), order, "one by one")
        starts = [self._order_from_policy(policy) for length, policy in self._pool if length < inf]
        pieces = self.problem.num_tasks
        mean = (
            sum(self.problem.get_compute_time(rank) for rank in range(self.problem.shape.ranks))
            / pieces
        )
        vain = turn = 0
        while not self.is_proved and vain < _MAX_FAILED_ROUNDS:
            heat, turns = _ANNEALING_ROUNDS[turn % len(_ANNEALING_ROUNDS)]
            turns *= pieces
            order = starts[turn // 2 % len(starts)] if turn % 2 and starts else self.best_order
            most = self._count_affordable_moves() // 3
            if turns > most:  # in a short round heat does more harm than good
                heat, turns, order = max(heat * most / turns, _MIN_HEAT), most, self.best_order
            vain = 0 if self._run_annealing_round(order, heat * mean, max(turns, 1)) else vain + 1
            turn += 1

    def _run_annealing_round(self, order: Order, heat: float, num_moves: int) -> bool:
        """Whether a round of annealing finds anything better."""
        cooling = float(_FINAL_HEAT_SHARE ** (1 / num_moves))
        moving = self._evaluator.start_annealing(
            order, heat, cooling, self._random.randrange(2**31)
        )
        each, better = _FIRST_MOVES, False
        while num_moves > 0 and not self.is_proved:
            each = min(each, num_moves, self._count_remaining())
            begin = perf_counter()
            length = moving.run(each, self.proof_length)
            took = max(perf_counter() - begin, 1e-9)
            if length < self.length * _IMPROVEMENT_FACTOR:
                better |= self.add_order(length, moving.best_order, "annealing")
            num_moves -= each
            self._moves_per_second = each / took
            each = max(int(min(self._moves_per_second * _CLOCK_SECONDS, each * 8)), 1)
            self._check_budget()
        return better

    # ------------------------------------------------------------ the machine, and the budget

    def _evaluate_policy(self, policy: DispatchPolicy, method: str) -> float:
        length = self._evaluator.evaluate_policy(policy)
        if length < self.length * _IMPROVEMENT_FACTOR:
            self.add_order(length, self._evaluator.last_order, method)
        return length

    def _order_from_policy(self, policy: DispatchPolicy) -> Order:
        self._evaluator.evaluate_policy(policy)
        return self._evaluator.last_order

    def _use_compiled_loops(self) -> None:
        """Go on with machine code, where there is time to get it."""
        if self._evaluator.is_compiled:
            return
        loops, self.numba = compile_within(LOOPS, self._seconds - self.elapsed)
        if loops is not None:
            self._earlier_evaluations += self._evaluator.evaluations
            self._evaluator = OrderEvaluator(self.problem, loops)

    def _count_affordable_moves(self) -> int:
        """How many moves of work the budget is enough for, as far as one can tell."""
        if self._evaluations is not None:
            return self._count_remaining()
        return int(
            min((self._seconds - self.elapsed) * self._moves_per_second, _UNLIMITED_EVALUATIONS)
        )

    def _count_remaining(self) -> int:
        """How many evaluations are left."""
        return (
            _UNLIMITED_EVALUATIONS
            if self._evaluations is None
            else self._evaluations - self.num_evaluated
        )

    def _check_budget(self) -> float:
        """The part of the budget that is spent; raises Spent where it is all."""
        time = self.elapsed / self._seconds
        part = time if self._evaluations is None else self.num_evaluated / self._evaluations
        if time >= 1 or part >= 1:
            raise BudgetExhausted
        return part
