"""Search for shorter orders until the time limit or a proof of optimality."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from math import inf
from operator import itemgetter
from random import Random
from time import perf_counter

from schedir.analysis.numba_jit import Numba, within
from schedir.predict.possible_saving import ROUNDING
from schedir.schedule_search.heuristics.dispatch_policies import neighbours, policies
from schedir.schedule_search.heuristics.order_evaluator import LOOPS, DispatchPolicy, OrderEvaluator
from schedir.schedule_search.problem import SchedulingProblem
from schedir.schedule_search.rank_order import Order, one_by_one, peaks
from schedir.schedule_search.search_results import SearchStep

_SAME = 1 - 1e-12  # times that differ by less are the same
_SLICE = 0.05  # seconds between two looks at the clock
# Until when policies are tried, and then changed, in parts of the budget; the rest is annealing.
_TURNS = ((0.08, 0.2), (0.35, 0.5))
_FINALISTS = 4  # of the shortest orders that are kept
_ALIKE = 32  # orders as short as the shortest that are looked at, whose messages may wait less
_MOVED = 500  # moves at most from the shortest to one of these
_FEW = 16  # moves of work between two looks at the clock
_KEPT = 24  # policies whose orders are starting points
_RENTED = 0.2  # seconds before machine code is asked for, which takes as long to come
_IN_VAIN = 64  # rounds of annealing without anything better, after which there is hardly any
# The heat at which rounds begin, in mean times of a piece of work, and moves for each piece.
_ROUNDS = ((4.0, 100), (8.0, 400), (16.0, 100), (4.0, 1600), (2.0, 400))
_UNCOUNTED = 2**62  # evaluations where nobody counts them
_COOL = 0.1  # the least heat
_COOLED = 1 / 30  # what is left of a round's heat at its end


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
        begin: float,
        seconds: float,
        evaluations: int | None,
        seed: int,
        report: Callable[[SearchStep], None],
    ) -> None:
        self.problem, self.bound = problem, bound
        self.shortest: list[tuple[float, Order]] = []  # the shortest first
        self.given: list[tuple[float, Order]] = []  # those that it began with, the shortest first
        self.trail: list[SearchStep] = []
        self.begin = begin
        self._seconds, self._evaluations, self._report = seconds, evaluations, report
        self._random = Random(seed)
        self.numba: Numba = "not needed"
        self._machine, self._before = OrderEvaluator(problem), 0
        self._rate = 1e4  # moves of work in a second
        self._pool: list[tuple[float, DispatchPolicy]] = []
        self._ended: set[DispatchPolicy] = set()  # of which no neighbour is better

    @property
    def length(self) -> float:
        """What the shortest order takes; infinite if there is none."""
        return self.shortest[0][0] if self.shortest else inf

    @property
    def best(self) -> Order:
        """The shortest order."""
        return self.shortest[0][1]

    @property
    def proved(self) -> bool:
        """Whether no order can be shorter than the best."""
        return self.length <= self.goal

    @property
    def goal(self) -> float:
        """The bound, and what sums of times may differ from it by rounding."""
        return self.bound * (1 + ROUNDING)

    @property
    def tried(self) -> int:
        """How many orders were evaluated."""
        return self._before + self._machine.evaluations

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return perf_counter() - self.begin

    def take(self, length: float, order: Order, method: str) -> bool:
        """Keep an order if it is the shortest so far, and say whether it is."""
        if length >= self.length * _SAME:
            return False
        self.shortest.insert(0, (length, order))
        del self.shortest[_FINALISTS:]
        self.trail.append(SearchStep(self.elapsed, method, length))
        self._report(self.trail[-1])
        return True

    def start(self, orders: Iterable[tuple[str, Order]]) -> None:
        """Look at orders that somebody has made, as far as they fit."""
        for name, order in orders:
            if all(map(self.problem.fits, peaks(self.problem, order), count())):
                self.given.append((self._machine.length(order), order))
                self.take(*self.given[-1], name)
        self.given.sort(key=itemgetter(0))

    def run(self, tighter: Callable[[], float] | None = None) -> bool:
        """Look until there is a proof, the budget is spent (False), or nothing better comes.

        What is not soon proved asks once for a tighter bound.
        """
        try:
            tried = policies(self.problem, self._random)
            for swept, descended in _TURNS:
                self._sweep(tried, swept)
                self._descend(descended)
                if tighter is not None and not self.proved:
                    self.bound, tighter = tighter(), None
            self._anneal()
        except BudgetExhausted:
            return False
        return True

    def finalists(self) -> Iterator[tuple[float, Order]]:
        """The shortest order, others that are as short, and then those that were it before.

        Others are looked for in what is left of the seconds.
        """
        yield from self.shortest[:1]
        for order in islice(self._alike(), _ALIKE):
            yield self.length, order
        yield from self.shortest[1:]

    def _alike(self) -> Iterator[Order]:
        """Orders as short as the shortest, of which some work is moved."""
        while self.shortest and self.elapsed < self._seconds:
            self._compile()
            moving = self._machine.annealing(self.best, 0.0, 1.0, self._random.randrange(2**31))
            moving.run(min(self.problem.pieces, _MOVED), 0.0)
            yield moving.order

    # ------------------------------------------------------------ ways of looking

    def _sweep(self, tried: Iterator[DispatchPolicy], until: float) -> None:
        """Policies of all kinds."""
        while not self.proved and self._spent() <= until and (policy := next(tried, None)):
            self._pool.append((self._try(policy, "policy"), policy))
            if self.elapsed >= _RENTED:
                self._compile()
        self._pool.sort(key=lambda each: each[0])
        del self._pool[_KEPT:]

    def _descend(self, until: float) -> None:
        """The best policies, changed in one thing after another as long as that is better."""
        for k, (length, policy) in enumerate(self._pool):
            better = None if policy in self._ended else policy
            while better is not None and not self.proved and self._spent() <= until:
                policy, better = better, None
                for other in neighbours(self.problem, policy, self._random):
                    found = self._try(other, "changed policy")
                    if found < length * _SAME:
                        length, better = found, other
                        break
                    if self.proved or self._spent() > until:
                        break
            if self._spent() <= until:
                self._ended.add(policy)
            self._pool[k] = length, policy

    def _anneal(self) -> None:
        """Rounds of annealing, from the best and from where policies led."""
        if not self.proved:
            self._compile()
        if not self.shortest:  # no policy has led to the end in so little room
            order = one_by_one(self.problem)
            self.take(self._machine.length(order), order, "one by one")
        starts = [self._order_of(policy) for length, policy in self._pool if length < inf]
        pieces = self.problem.pieces
        mean = sum(self.problem.work(rank) for rank in range(self.problem.shape.ranks)) / pieces
        vain = turn = 0
        while not self.proved and vain < _IN_VAIN:
            heat, turns = _ROUNDS[turn % len(_ROUNDS)]
            turns *= pieces
            order = starts[turn // 2 % len(starts)] if turn % 2 and starts else self.best
            most = self._affordable() // 3
            if turns > most:  # in a short round heat does more harm than good
                heat, turns, order = max(heat * most / turns, _COOL), most, self.best
            vain = 0 if self._round(order, heat * mean, max(turns, 1)) else vain + 1
            turn += 1

    def _round(self, order: Order, heat: float, turns: int) -> bool:
        """Whether a round of annealing finds anything better."""
        cooling = float(_COOLED ** (1 / turns))
        moving = self._machine.annealing(order, heat, cooling, self._random.randrange(2**31))
        each, better = _FEW, False
        while turns > 0 and not self.proved:
            each = min(each, turns, self._left())
            begin = perf_counter()
            length = moving.run(each, self.goal)
            took = max(perf_counter() - begin, 1e-9)
            if length < self.length * _SAME:
                better |= self.take(length, moving.best, "annealing")
            turns -= each
            self._rate = each / took
            each = max(int(min(self._rate * _SLICE, each * 8)), 1)
            self._spent()
        return better

    # ------------------------------------------------------------ the machine, and the budget

    def _try(self, policy: DispatchPolicy, method: str) -> float:
        length = self._machine.run(policy)
        if length < self.length * _SAME:
            self.take(length, self._machine.made, method)
        return length

    def _order_of(self, policy: DispatchPolicy) -> Order:
        self._machine.run(policy)
        return self._machine.made

    def _compile(self) -> None:
        """Go on with machine code, where there is time to get it."""
        if self._machine.is_compiled:
            return
        loops, self.numba = within(LOOPS, self._seconds - self.elapsed)
        if loops is not None:
            self._before += self._machine.evaluations
            self._machine = OrderEvaluator(self.problem, loops)

    def _affordable(self) -> int:
        """How many moves of work the budget is enough for, as far as one can tell."""
        if self._evaluations is not None:
            return self._left()
        return int(min((self._seconds - self.elapsed) * self._rate, _UNCOUNTED))

    def _left(self) -> int:
        """How many evaluations are left."""
        return _UNCOUNTED if self._evaluations is None else self._evaluations - self.tried

    def _spent(self) -> float:
        """The part of the budget that is spent; raises Spent where it is all."""
        time = self.elapsed / self._seconds
        part = time if self._evaluations is None else self.tried / self._evaluations
        if time >= 1 or part >= 1:
            raise BudgetExhausted
        return part
