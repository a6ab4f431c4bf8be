"""Residency: which of a rank's stages are whole when, where there is room for some at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def stays(step: Ints, stage: Ints, active: int, ahead: int = 0) -> Ints:
    """When stages are made whole and let go of, so that each is whole where it is used.

    Use i is of stage `stage[i]` in step `step[i]`; steps ascend, and the uses of one step are all
    needed at once.  No more than `active` stages are whole at once, and each is so from `ahead`
    steps before its use, or as soon as what is used in between leaves room for it.
    Returns the first and last use of each stay, shape (stays, 2), by the first.

    It is Belady's rule (A study of replacement algorithms for a virtual-storage computer, IBM
    Systems Journal 5, 1966): a stage is made whole when it must be, and of those that are not used
    meanwhile the one goes whose next use is farthest.  No other choice makes fewer stays.  For let
    another choice keep the rule up to some point, and there let go of x, where the rule says y,
    which is used later.  Let it go of y instead and hold x in its place, until it makes x whole
    again, or lets go of y: before y is used it does either, for x is used first.  If it makes x
    whole, y is made whole in its place, or not even that; and if it lets go of y, that is now x.
    So it makes no more stays, and keeps the rule one choice longer.

    `step` must leave room: no step has more than `active` stages.
    """
    n = len(stage)
    order = np.argsort(stage, kind="stable")
    same = stage[order][1:] == stage[order][:-1]
    if len(order) - int(same.sum()) <= active:  # there is room for all: each stays
        first = np.append(True, ~same)[:n]
        last = np.append(~same, True)[:n]
        found = np.stack([order[first], order[last]], 1)
        return found[np.argsort(found[:, 0])]
    following = np.full(n, n)
    following[order[:-1][same]] = order[1:][same]
    steps, nexts = step.tolist(), following.tolist()
    first_of: dict[int, int] = {}
    last_of: dict[int, int] = {}  # of each whole stage the last use that it is kept for
    ended: list[tuple[int, int]] = []
    now = 0  # the step in which the stage of a use is made whole
    for use, one in enumerate(stage.tolist()):
        if one not in last_of:
            if len(last_of) == active:
                soonest = min(steps[at] for at in last_of.values()) + 1
                now = max(now, steps[use] - ahead, soonest)
                idle = [whole for whole, at in last_of.items() if steps[at] < now]
                gone = max(idle, key=lambda whole: nexts[last_of[whole]])
                ended.append((first_of[gone], last_of.pop(gone)))
            first_of[one] = use
        last_of[one] = use
    ended += [(first_of[one], at) for one, at in last_of.items()]
    return np.array(sorted(ended), np.int64).reshape(-1, 2)
