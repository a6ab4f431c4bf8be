"""Choose the places of the unshards and reshards of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# A stage is unsharded this many runs before the run that uses it. A run is a sequence of computes
# of the same stages. With 1, a rank gathers the weights of the next run while the current run
# computes.
DEFAULT_PREFETCH: Final = 1


class UnshardedInterval(NamedTuple):
    """Intervals in which stages are unsharded. Places are indices in a list, such as a Stream.

    Attributes:
        stage: The stage of each interval, shape (intervals,).
        begin: The place of the unshard, shape (intervals,). The unshard comes before the entry at
            this place.
        end: The place of the reshard, shape (intervals,). The reshard comes before the entry at
            this place.
    """

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
    """Return the intervals in which stages are unsharded, each as early as possible.

    Args:
        run: See `find_stays`.
        stage: See `find_stays`.
        end: The place after the last entry of each use, shape (uses,).
        max_unsharded: Largest number of stages that are unsharded at the same time.
        prefetch: See `find_stays`.
        start_position: The first place at which a stage can be unsharded.
    """
    first, last = find_stays(run, stage, max_unsharded, prefetch).T
    ends = end[last]
    begins = np.append(np.full(min(max_unsharded, len(ends)), start_position), np.sort(ends))
    return UnshardedInterval(stage[first], begins[: len(ends)], ends)


def place_unshards(
    uses: Sequence[Sequence[int]], max_unsharded: int
) -> list[list[tuple[int, bool]]]:
    """Return the unshards and reshards before each entry of a list, and after the last one.

    Consecutive entries that use the same stages count as one run.

    Args:
        uses: The stages that each entry uses; may be empty for an entry.
        max_unsharded: Largest number of stages that are unsharded at the same time. If an entry
            uses more stages, the largest number of stages of an entry is the limit.

    Returns:
        A list of (stage, is_unshard) for each entry and one for the end. `is_unshard` is False for
        a reshard.
    """
    runs: list[tuple[tuple[int, ...], int]] = []  # used stages, and the place after the run
    for place, entry in enumerate(uses, 1):
        if used_stages := tuple(sorted(entry)):
            if runs and runs[-1][0] == used_stages:
                runs.pop()
            runs.append((used_stages, place))
    stage_uses = [(run, s, end) for run, (used_stages, end) in enumerate(runs) for s in used_stages]
    run, stage, end = np.array(stage_uses, np.int64).reshape(-1, 3).T
    intervals = find_unsharded_intervals(run, stage, end, max(max_unsharded, *map(len, uses), 0))
    moves: list[list[tuple[int, bool]]] = [[] for _ in range(len(uses) + 1)]
    for is_unshard, places in ((False, intervals.end), (True, intervals.begin)):
        for s, place in zip(intervals.stage.tolist(), places.tolist(), strict=True):
            moves[place].append((s, is_unshard))
    return moves


def find_stays(run: Ints, stage: Ints, max_unsharded: int, prefetch: int = 0) -> Ints:
    """Return the first and the last use of each interval in which a stage stays unsharded.

    Such an interval is called a stay. A run is a set of uses that need their stages unsharded at
    the same time. During a run, the stages of the run are unsharded. The stages of the next
    `prefetch` runs are unsharded too, the nearest run first, as long as there are at most
    `max_unsharded` unsharded stages.

    The policy is Belady's: a stage is unsharded when it must be, and the stage with the farthest
    next use is resharded. An exchange argument shows that no policy makes fewer stays. Compare
    Belady's policy with another policy, and take the first run in which they reshard different
    stages. In this run, the other policy reshards x, and Belady's policy reshards y. Then the next
    use of x is before the next use of y. Change the other policy: it reshards y in this run, and
    keeps x in the place of y until the original policy unshards x or reshards y. One of these
    happens before the next use of y, because x is used first. If the original policy unshards x and
    keeps y, the changed policy unshards y. If the original policy unshards x and reshards y, the
    changed policy does nothing. If the original policy reshards y and does not unshard x, the
    changed policy reshards x. So the changed policy makes no more stays than the original policy,
    and agrees with Belady's policy in one more choice.

    The k-th stay can begin at the (k - max_unsharded)-th smallest end of all stays. When the k-th
    stay must begin, all earlier stays except `max_unsharded` - 1 have ended. An earlier stay of the
    same stage is one of the ended stays. This earlier stay has also ended when the k-th stay can
    begin, because another stage took its place, and the stay of this other stage ends later.

    Args:
        run: The number of the run of each use, ascending, shape (uses,). A run has at most
            `max_unsharded` uses, which need their stages at the same time.
        stage: The stage of each use, shape (uses,).
        max_unsharded: Largest number of stages that are unsharded at the same time.
        prefetch: A stage is unsharded up to this many runs before the run that uses it.

    Returns:
        Indices of the first and the last use of each stay, shape (stays, 2), sorted by the first.

    References:
        Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
        Journal 5, 1966.
    """
    n = len(stage)
    order = np.argsort(stage, kind="stable")
    is_same_stage = stage[order][1:] == stage[order][:-1]
    num_stages = len(order) - int(is_same_stage.sum())
    if num_stages <= max_unsharded:  # all stages fit, so each has one stay
        is_first = np.append(True, ~is_same_stage)[:n]
        is_last = np.append(~is_same_stage, True)[:n]
        stays = np.stack([order[is_first], order[is_last]], 1)
        return stays[np.argsort(stays[:, 0])]
    next_use = np.full(n, n)
    next_use[order[:-1][is_same_stage]] = order[1:][is_same_stage]
    runs, next_uses = run.tolist(), next_use.tolist()
    first_use_by_stage: dict[int, int] = {}  # first use in the stay of each unsharded stage
    last_use_by_stage: dict[int, int] = {}  # last use so far of each unsharded stage
    ended_stays: list[tuple[int, int]] = []
    unshard_run = 0  # the run in which the stage of the current use is unsharded
    for use, used_stage in enumerate(stage.tolist()):
        if used_stage not in last_use_by_stage:
            if len(last_use_by_stage) == max_unsharded:
                earliest_run = min(runs[last] for last in last_use_by_stage.values()) + 1
                unshard_run = max(unshard_run, runs[use] - prefetch, earliest_run)
                idle_stages = [
                    s for s, last in last_use_by_stage.items() if runs[last] < unshard_run
                ]
                farthest_stage = max(idle_stages, key=lambda s: next_uses[last_use_by_stage[s]])
                last = last_use_by_stage.pop(farthest_stage)
                ended_stays.append((first_use_by_stage[farthest_stage], last))
            first_use_by_stage[used_stage] = use
        last_use_by_stage[used_stage] = use
    ended_stays += [(first_use_by_stage[s], last) for s, last in last_use_by_stage.items()]
    return np.array(sorted(ended_stays), np.int64).reshape(-1, 2)
