"""Divide the time limit of a search among its heuristics, and keep the shortest orders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from math import inf
from operator import itemgetter
from random import Random
from time import perf_counter

from schedir.analysis.numba_jit import NumbaStatus, compile_within
from schedir.predict.possible_saving import RELATIVE_TOLERANCE
from schedir.schedule_search.heuristics.annealing import (
    ANNEALING_ROUNDS,
    FINAL_TEMPERATURE_SHARE,
    MAX_FAILED_ROUNDS,
    MIN_TEMPERATURE,
)
from schedir.schedule_search.heuristics.dispatch_policies import (
    generate_neighbours,
    generate_policies,
)
from schedir.schedule_search.heuristics.order_evaluator import LOOPS, DispatchPolicy, OrderEvaluator
from schedir.schedule_search.problem import SchedulingProblem
from schedir.schedule_search.rank_order import Order, compute_peaks, order_one_by_one
from schedir.schedule_search.search_results import SearchStep

# One order is shorter than another order only if its length is less than the length of the other
# order times this factor. A smaller difference is a rounding error.
_IMPROVEMENT_FACTOR = 1 - 1e-12
_CLOCK_SECONDS = 0.05  # Seconds between two checks of the budget.
# There are two phases. In each phase, the search first tries policies and then varies the best
# policies. Each pair of numbers belongs to a phase. The numbers are the shares of the budget that
# are used when the first part and the second part of the phase end. The rest of the budget is for
# annealing.
_POLICY_PHASES = ((0.08, 0.2), (0.35, 0.5))
_MAX_FINALISTS = 4  # The number of shortest orders to keep.
# The largest number of orders of the shortest length that are compiled. The lengths of their
# programs differ, because messages may wait for each other.
_MAX_EQUAL_ORDERS = 32
# The largest number of moves from the shortest order to an order of the same length.
_MAX_EQUAL_MOVES = 500
_FIRST_MOVES = 16  # The number of moves before the first check of the budget.
_POOL_SIZE = 24  # Annealing starts from the orders of this many policies.
_COMPILE_AFTER_SECONDS = 0.2  # For a shorter search, loading the compiled loops takes too long.
_UNLIMITED_EVALUATIONS = 2**62  # The number that means "no limit".


class BudgetExhausted(Exception):
    """Raised when a search has used its time limit or its number of evaluations."""


class HeuristicSearch:
    """A search for short orders, with its results so far.

    Args:
        problem: The problem.
        bound: A lower bound on the length. The search ends if the length of an order reaches it.
        start_time: The start of the search, by `time.perf_counter`.
        seconds: The time limit in seconds, from `start_time`.
        evaluations: The largest number of evaluated orders, or None for no limit. If this limit
            ends the search before `seconds`, the results depend only on `seed`.
        seed: The random seed.
        report: A function that the search calls with each shorter order.
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
        self.problem = problem
        self.bound = bound
        # Lists of (length, order), the shortest first.
        self.shortest_orders: list[tuple[float, Order]] = []
        self.initial_orders: list[tuple[float, Order]] = []
        self.improvements: list[SearchStep] = []
        self.start_time = start_time
        self._seconds = seconds
        self._evaluations = evaluations
        self._report = report
        self._random = Random(seed)
        self.numba: NumbaStatus = "not needed"
        self._evaluator = OrderEvaluator(problem)
        self._earlier_evaluations = 0
        self._moves_per_second = 1e4  # An estimate until the first round of annealing.
        self._pool: list[tuple[float, DispatchPolicy]] = []
        # Policies without a better neighbour.
        self._exhausted_policies: set[DispatchPolicy] = set()

    @property
    def length(self) -> float:
        """The length of the shortest order. Infinite if there is none."""
        return self.shortest_orders[0][0] if self.shortest_orders else inf

    @property
    def best_order(self) -> Order:
        """The shortest order so far."""
        return self.shortest_orders[0][1]

    @property
    def is_proved(self) -> bool:
        """Return whether the lower bound proves that the best order is the shortest."""
        return self.length <= self.proof_length

    @property
    def proof_length(self) -> float:
        """The bound plus a tolerance for rounding in sums of times."""
        return self.bound * (1 + RELATIVE_TOLERANCE)

    @property
    def num_evaluated(self) -> int:
        """The number of orders that were evaluated."""
        return self._earlier_evaluations + self._evaluator.evaluations

    @property
    def elapsed(self) -> float:
        """The seconds since the start of the search."""
        return perf_counter() - self.start_time

    def add_order(self, length: float, order: Order, method: str) -> bool:
        """If an order is the shortest so far, keep and report it.

        Args:
            length: The length of the order.
            order: The order.
            method: The method that found the order, for the report.

        Returns:
            True if the order is the shortest so far.
        """
        if length >= self.length * _IMPROVEMENT_FACTOR:
            return False
        self.shortest_orders.insert(0, (length, order))
        del self.shortest_orders[_MAX_FINALISTS:]
        self.improvements.append(SearchStep(self.elapsed, method, length))
        self._report(self.improvements[-1])
        return True

    def add_initial_orders(self, orders: Iterable[tuple[str, Order]]) -> None:
        """Evaluate the initial orders that fit into memory, and keep them.

        Args:
            orders: Pairs of a name and an order.
        """
        for name, order in orders:
            if all(map(self.problem.fits_on_rank, compute_peaks(self.problem, order), count())):
                self.initial_orders.append((self._evaluator.evaluate_order(order), order))
                self.add_order(*self.initial_orders[-1], name)
        self.initial_orders.sort(key=itemgetter(0))

    def run(self, tighten_bound: Callable[[], float] | None = None) -> bool:
        """Search until a proof, the end of the budget, or too many rounds without improvement.

        Args:
            tighten_bound: A function that returns a larger lower bound. The search calls it once,
                if there is no proof after the first phase.

        Returns:
            False if the budget ended the search, else True.
        """
        try:
            policies = generate_policies(self.problem, self._random)
            for policy_share, neighbour_share in _POLICY_PHASES:
                self._try_policies(policies, policy_share)
                self._improve_policies(neighbour_share)
                if tighten_bound is not None and not self.is_proved:
                    self.bound, tighten_bound = tighten_bound(), None
            self._anneal()
        except BudgetExhausted:
            return False
        return True

    def list_finalists(self) -> Iterator[tuple[float, Order]]:
        """Yield the orders to compile, each with its length, the shortest first.

        After the shortest order come other orders of the same length, and then the orders that were
        the shortest before. The search for orders of the same length uses the remaining seconds.
        """
        yield from self.shortest_orders[:1]
        for order in islice(self._generate_equal_orders(), _MAX_EQUAL_ORDERS):
            yield self.length, order
        yield from self.shortest_orders[1:]

    def _generate_equal_orders(self) -> Iterator[Order]:
        """Yield orders of the shortest length, by random moves from the shortest order."""
        while self.shortest_orders and self.elapsed < self._seconds:
            self._use_compiled_loops()
            annealing = self._evaluator.start_annealing(
                self.best_order, 0.0, 1.0, self._random.randrange(2**31)
            )
            annealing.run(min(self.problem.num_tasks, _MAX_EQUAL_MOVES), 0.0)
            yield annealing.current_order

    # ------------------------------------------------------------ methods of the search

    def _try_policies(self, policies_to_try: Iterator[DispatchPolicy], budget_share: float) -> None:
        """Evaluate policies until a share of the budget is spent.

        Keep the best policies in the pool.
        """
        while (
            not self.is_proved
            and self._check_budget() <= budget_share
            and (policy := next(policies_to_try, None))
        ):
            self._pool.append((self._evaluate_policy(policy, "policy"), policy))
            if self.elapsed >= _COMPILE_AFTER_SECONDS:
                self._use_compiled_loops()
        self._pool.sort(key=lambda entry: entry[0])
        del self._pool[_POOL_SIZE:]

    def _improve_policies(self, budget_share: float) -> None:
        """Replace each policy of the pool by a better neighbour until no neighbour is better."""
        for k, (length, policy) in enumerate(self._pool):
            better_policy = None if policy in self._exhausted_policies else policy
            while (
                better_policy is not None
                and not self.is_proved
                and self._check_budget() <= budget_share
            ):
                policy, better_policy = better_policy, None
                for neighbour in generate_neighbours(self.problem, policy, self._random):
                    changed_length = self._evaluate_policy(neighbour, "changed policy")
                    if changed_length < length * _IMPROVEMENT_FACTOR:
                        length, better_policy = changed_length, neighbour
                        break
                    if self.is_proved or self._check_budget() > budget_share:
                        break
            if self._check_budget() <= budget_share:
                self._exhausted_policies.add(policy)
            self._pool[k] = length, policy

    def _anneal(self) -> None:
        """Run rounds of annealing from the best order and from the orders of policies."""
        if not self.is_proved:
            self._use_compiled_loops()
        if not self.shortest_orders:  # With little memory, all policies may fail.
            order = order_one_by_one(self.problem)
            self.add_order(self._evaluator.evaluate_order(order), order, "one microbatch at a time")
        policy_orders = [
            self._order_from_policy(policy) for length, policy in self._pool if length < inf
        ]
        num_tasks = self.problem.num_tasks
        mean_task_time = (
            sum(self.problem.get_compute_time(rank) for rank in range(self.problem.shape.ranks))
            / num_tasks
        )
        num_failed = round_number = 0
        while not self.is_proved and num_failed < MAX_FAILED_ROUNDS:
            temperature, num_moves = ANNEALING_ROUNDS[round_number % len(ANNEALING_ROUNDS)]
            num_moves *= num_tasks
            order = (
                policy_orders[round_number // 2 % len(policy_orders)]
                if round_number % 2 and policy_orders
                else self.best_order
            )
            max_moves = self._count_affordable_moves() // 3
            if num_moves > max_moves:  # A shorter round needs a lower temperature.
                temperature = max(temperature * max_moves / num_moves, MIN_TEMPERATURE)
                num_moves = max_moves
                order = self.best_order
            num_failed = (
                0
                if self._run_annealing_round(order, temperature * mean_task_time, max(num_moves, 1))
                else num_failed + 1
            )
            round_number += 1

    def _run_annealing_round(self, order: Order, temperature: float, num_moves: int) -> bool:
        """Run a round of annealing, and return whether it found a shorter order."""
        cooling = float(FINAL_TEMPERATURE_SHARE ** (1 / num_moves))
        annealing = self._evaluator.start_annealing(
            order, temperature, cooling, self._random.randrange(2**31)
        )
        batch_size, has_improved = _FIRST_MOVES, False
        while num_moves > 0 and not self.is_proved:
            batch_size = min(batch_size, num_moves, self._count_remaining())
            start_time = perf_counter()
            length = annealing.run(batch_size, self.proof_length)
            duration = max(perf_counter() - start_time, 1e-9)
            if length < self.length * _IMPROVEMENT_FACTOR:
                has_improved |= self.add_order(length, annealing.best_order, "annealing")
            num_moves -= batch_size
            self._moves_per_second = batch_size / duration
            batch_size = max(int(min(self._moves_per_second * _CLOCK_SECONDS, batch_size * 8)), 1)
            self._check_budget()
        return has_improved

    # ------------------------------------------------------------ the evaluator and the budget

    def _evaluate_policy(self, policy: DispatchPolicy, method: str) -> float:
        length = self._evaluator.evaluate_policy(policy)
        if length < self.length * _IMPROVEMENT_FACTOR:
            self.add_order(length, self._evaluator.last_order, method)
        return length

    def _order_from_policy(self, policy: DispatchPolicy) -> Order:
        self._evaluator.evaluate_policy(policy)
        return self._evaluator.last_order

    def _use_compiled_loops(self) -> None:
        """Switch to compiled loops if they save more time than loading or compiling them takes."""
        if self._evaluator.is_compiled:
            return
        loops, self.numba = compile_within(LOOPS, self._seconds - self.elapsed)
        if loops is not None:
            self._earlier_evaluations += self._evaluator.evaluations
            self._evaluator = OrderEvaluator(self.problem, loops)

    def _count_affordable_moves(self) -> int:
        """Estimate the number of moves that the remaining budget allows."""
        if self._evaluations is not None:
            return self._count_remaining()
        return int(
            min((self._seconds - self.elapsed) * self._moves_per_second, _UNLIMITED_EVALUATIONS)
        )

    def _count_remaining(self) -> int:
        return (
            _UNLIMITED_EVALUATIONS
            if self._evaluations is None
            else self._evaluations - self.num_evaluated
        )

    def _check_budget(self) -> float:
        """Return the share of the budget that is spent. Raise BudgetExhausted if none is left."""
        time_share = self.elapsed / self._seconds
        spent_share = (
            time_share if self._evaluations is None else self.num_evaluated / self._evaluations
        )
        if time_share >= 1 or spent_share >= 1:
            raise BudgetExhausted
        return spent_share
