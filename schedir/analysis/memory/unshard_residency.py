"""Find the intervals in which each stage of a rank is unsharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

DEFAULT_PREFETCH: Final = 1  # while one stage is computed with, the next is gathered


class UnshardedInterval(NamedTuple):
    """From where to where each `stage` is whole: places in a list, between two of its entries."""

    stage: Ints
    begin: Ints
    end: Ints


def find_unsharded_intervals(
    run: Ints,
    stage: Ints,
    end: Ints,
    max_unsharded: int,
    prefetch: int = DEFAULT_PREFETCH,
    start_position: int = 0,
) -> UnshardedInterval:
    """Where stages are made whole and let go of, for uses as those of `find_stays`, which end at
    given
    places: each as soon as it can be, from the place `start_position` on."""
    first, last = find_stays(run, stage, max_unsharded, prefetch).T
    ends = end[last]
    begins = np.append(np.full(min(max_unsharded, len(ends)), start_position), np.sort(ends))
    return UnshardedInterval(stage[first], begins[: len(ends)], ends)


def place_unshards(
    uses: Sequence[Sequence[int]], max_unsharded: int
) -> list[list[tuple[int, bool]]]:
    """Of a list whose entries use stages, or none: which stages are to be made whole (True) and let
    go of (False) before each entry, and behind the last.

    Entries that use the same are one step.  No more than `max_unsharded` stages are whole at once,
    or than an entry uses.
    """
    runs: list[tuple[tuple[int, ...], int]] = []  # what is used, and the place behind it
    for place, entry in enumerate(uses, 1):
        if used := tuple(sorted(entry)):
            if runs and runs[-1][0] == used:
                runs.pop()
            runs.append((used, place))
    each = [(step, one, end) for step, (used, end) in enumerate(runs) for one in used]
    step, stage, end = np.array(each, np.int64).reshape(-1, 3).T
    found = find_unsharded_intervals(step, stage, end, max(max_unsharded, *map(len, uses), 0))
    put: list[list[tuple[int, bool]]] = [[] for _ in range(len(uses) + 1)]
    for begins, places in ((False, found.end), (True, found.begin)):
        for one, place in zip(found.stage.tolist(), places.tolist(), strict=True):
            put[place].append((one, begins))
    return put


def find_stays(run: Ints, stage: Ints, max_unsharded: int, prefetch: int = 0) -> Ints:
    """When stages are made whole and let go of, so that each is whole where it is used.

    Use i is of stage `stage[i]` in step `step[i]`; steps ascend, and the uses of one step, no more
    than `max_unsharded`, are all needed at once.  In each step those must be whole that are used in
    it and in the `prefetch` steps behind it, the nearest first, as far as there is room: no more
    than
    `max_unsharded` stages are whole at once.  Returns the first and last use of each stay, shape
    (stays, 2), by the first.

    The choice is Belady's (A study of replacement algorithms for a virtual-storage computer, IBM
    Systems Journal 5, 1966): a stage is made whole when it must be, and of those that need not be
    the one goes whose next use is farthest.  No other makes fewer stays.  For let another choose as
    Belady does up to some step, and there let go of x, where he lets go of y, which must be whole
    later.  Let it go of y instead, and have x in the place of y, until it makes x whole or lets go
    of y.  One of these comes before y must be whole, for x must be so first.  Where it makes x
    whole, let it make y whole, if it still has that, and do nothing if not; and where it lets go of
    y, let it go of x.  So it makes no more stays than before, and is one choice nearer to his.

    The k-th stay can begin where the (k - active)-th of all their ends is, for where it must begin
    all but `max_unsharded` - 1 of those before it have ended.  An earlier stay of the same stage is
    among these, and is no later than that end: whatever was kept in its place is used after it.
    """
    n = len(stage)
    order = np.argsort(stage, kind="stable")
    same = stage[order][1:] == stage[order][:-1]
    if len(order) - int(same.sum()) <= max_unsharded:  # there is room for all: each stays
        first = np.append(True, ~same)[:n]
        last = np.append(~same, True)[:n]
        found = np.stack([order[first], order[last]], 1)
        return found[np.argsort(found[:, 0])]
    following = np.full(n, n)
    following[order[:-1][same]] = order[1:][same]
    steps, nexts = run.tolist(), following.tolist()
    first_of: dict[int, int] = {}
    last_of: dict[int, int] = {}  # of each whole stage the last use that it is kept for
    ended: list[tuple[int, int]] = []
    now = 0  # the step in which the stage of a use is made whole
    for use, one in enumerate(stage.tolist()):
        if one not in last_of:
            if len(last_of) == max_unsharded:
                soonest = min(steps[at] for at in last_of.values()) + 1
                now = max(now, steps[use] - prefetch, soonest)
                idle = [whole for whole, at in last_of.items() if steps[at] < now]
                gone = max(idle, key=lambda whole: nexts[last_of[whole]])
                ended.append((first_of[gone], last_of.pop(gone)))
            first_of[one] = use
        last_of[one] = use
    ended += [(first_of[one], at) for one, at in last_of.items()]
    return np.array(sorted(ended), np.int64).reshape(-1, 2)
