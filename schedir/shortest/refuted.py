"""Refuted: suppose that a schedule takes no longer than some time, and see whether that can be.

Where of two pieces of a rank's work one cannot come before the other, as too much must run before
it and too much after that, the order of the two is known.  Then more must have run before some, so
that starts that come later, and what must follow grows; and so on, until nothing changes, or a
piece of work has no time left: then every schedule takes longer.  (Lower bounds by destructive
improvement: Klein and Scholl, EJOR 112, 1999; with the immediate selections of Carlier and Pinson,
Management Science 35, 1989.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil, gcd, inf
from typing import Final

from schedir.shortest.earliest import Done, Known, preemptive
from schedir.shortest.found import Bound
from schedir.shortest.problem import ROUNDING, Problem

_ROUNDS: Final = 12  # after which it is not waited that nothing changes
_TRIES: Final = 14  # times that are supposed
_STEP: Final = 0.002  # of the first time that is supposed, beyond the bound that is known
_GRID: Final = 10**6  # digits behind the point that costs are seen to end at

Counts = list[dict[int, list[int]]]


def refuted_bound(problem: Problem, known: Known, bound: Bound) -> Bound:
    """A bound that is no less than the one given: the longest time that is refuted.

    A time is supposed some times, and more of it as long as that is refuted.  Where one is not, the
    length that all work has by then is a bound: a schedule that takes longer than was supposed is
    longer than that, too.
    """
    least, most, step = bound.value, inf, _STEP * bound.value
    for _ in range(_TRIES):
        time = least + step if most == inf else (least + most) / 2
        length = _Supposed(known, time).length()
        if length > time:
            least, step = time, 2 * step
        else:
            least, most = max(least, length), time
        if most * (1 - ROUNDING) <= least:
            break
    value = _next_sum(problem, least)
    if value <= bound.value * (1 + ROUNDING):
        return bound
    return Bound(
        value,
        f"suppose that a schedule is shorter than {value:.6g}: then much of the order on each rank "
        "is known, as there is no time for another, and with that some work must end too late",
    )


def _next_sum(problem: Problem, value: float) -> float:
    """The least time from `value` on that costs can sum up to, if they have few digits."""
    costs = [
        *problem.F, *problem.I, *problem.W, *problem.act, *problem.grad, *problem.tail
    ]  # fmt: skip
    whole = [round(cost * _GRID) for cost in costs]
    if any(abs(cost * _GRID - n) > ROUNDING * n for cost, n in zip(costs, whole, strict=True)):
        return value
    grid = gcd(*whole)
    return max(value, ceil(value * _GRID / grid * (1 - ROUNDING)) * grid / _GRID)


class _Supposed:
    """What is known of a schedule that takes no longer than `time`.

    `before[x][y][j]` is how many pieces of code y have run on the rank before piece j of code x.
    """

    def __init__(self, known: Known, time: float) -> None:
        self.known, self.time = known, time * (1 + ROUNDING)
        self.heads = [[*each] for each in known.heads]
        self.tails = [[*each] for each in known.tails]
        m = self.microbatches = max(map(len, self.heads))
        self.before: Counts = [
            {n.before: [min(max(j - n.lag + 1, 0), m) for j in range(m)] for n in each}
            for each in known.relations.ran
        ]

    def length(self) -> float:
        """The least length of a schedule that takes no longer; inf if there is none."""
        for _ in range(_ROUNDS):
            if not self._order():
                break
            if not (self._starts() and self._ends()):
                return inf
            if self._longest() > self.time:
                return inf
        return self._longest()

    def _longest(self) -> float:
        known = replace(self.known, heads=self.heads, tails=self.tails)
        return max(preemptive(known.jobs(rank))[0] for rank in range(len(known.codes)))

    def _order(self) -> bool:
        """Find what must come first of two pieces of work; whether any is new."""
        cost, new = self.known.cost, False
        for codes in self.known.codes:
            for x in codes:
                spare = [self.time - head - cost[x] for head in self.heads[x]]
                for y in codes:
                    if x != y:
                        needed = [cost[y] + tail for tail in self.tails[y]]
                        new |= self._before(x, y, spare, needed)
        return new

    def _before(self, x: int, y: int, spare: Sequence[float], needed: Sequence[float]) -> bool:
        """No x with less time to spare than a y needs comes before that y."""
        m = self.microbatches
        known = self.before[x].get(y, [0] * m)
        found, number = [], 0
        for j, left in enumerate(spare):
            number = max(number, known[j])
            while number < m and needed[number] > left:
                number += 1
            found.append(number)
        if found != known:
            self.before[x][y] = found
        return found != known

    def _starts(self) -> bool:
        """Make starts as late as what must have run before asks for; whether all can end."""
        relations, cost, heads = self.known.relations, self.known.cost, self.heads
        done = [Done() for _ in cost]
        for j in range(self.microbatches):
            for x in relations.turn:
                start, mine = heads[x][j], done[x]
                for y, counts in self.before[x].items():
                    for i in range(counts[j - 1] if j else 0, counts[j]):
                        mine.add(heads[y][i], cost[y])
                if mine.ends and mine.ends[-1] > start:
                    start = mine.ends[-1]
                for y, _, delay in relations.needs[x]:
                    if (end := heads[y][j] + cost[y] + delay) > start:
                        start = end
                heads[x][j] = start
                if start + cost[x] + self.tails[x][j] > self.time:
                    return False
        return True

    def _ends(self) -> bool:
        """The same from the end of the run."""
        relations, cost, tails = self.known.backwards, self.known.cost, self.tails
        m, after = self.microbatches, self._after()
        done = [Done() for _ in cost]
        for j in range(m - 1, -1, -1):
            for x in relations.turn:
                tail, mine = tails[x][j], done[x]
                for y, first in after[x].items():
                    for i in range(first[j], first[j + 1] if j + 1 < m else m):
                        if tails[y][i] > -inf:
                            mine.add(tails[y][i], cost[y])
                if mine.ends and mine.ends[-1] > tail:
                    tail = mine.ends[-1]
                for y, _, delay in relations.needs[x]:
                    if (end := tails[y][j] + cost[y] + delay) > tail:
                        tail = end
                tails[x][j] = tail
                if self.heads[x][j] + cost[x] + tail > self.time:
                    return False
        return True

    def _after(self) -> Counts:
        """By code and code, of each piece the first of the other code that must come after it."""
        m = self.microbatches
        after: Counts = [{} for _ in self.before]
        for x, each in enumerate(self.before):
            for y, counts in each.items():
                first: list[int] = []
                for j, (had, has) in enumerate(pairwise([0, *counts])):
                    first += [j] * (has - had)
                after[y][x] = first + [m] * (m - len(first))
        return after
