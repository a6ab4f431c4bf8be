"""Greedy list scheduling: an idle rank starts what its policy ranks first.

Everything that it reads or fills comes as a list or an array.  Codes are those of an Order.
"""

from __future__ import annotations

from typing import Any, Final

Numbers = Any  # of one dimension: a list, or an array

_NEVER: Final = 1e300


def dispatch(
    ranks: int,
    stages: int,
    m: int,
    split: int,
    rank_of: Numbers,
    own: Numbers,
    begin: Numbers,
    first: Numbers,
    cost: Numbers,
    hop: Numbers,
    more: Numbers,
    change: Numbers,
    room: Numbers,
    kept: Numbers,
    lead: Numbers,
    lag: Numbers,
    wait: float,
    late: float,
    slack: float,
    forward_first: int,
    pick: int,
    done: Numbers,
    at: Numbers,
    held: Numbers,
    now: Numbers,
    idle: Numbers,
    since: Numbers,
    waits: Numbers,
    count: Numbers,
    out: Numbers,
) -> float:
    """Let each idle rank decide by a policy what it does next, and fill `out` with the order.

    An idle rank runs, in this turn: a W where more than `lag` of them wait; an I that is there,
    after an F if `forward_first`; an F below its stage's `lead` that fits, unless an I comes within
    `wait` of its cost; a W if memory keeps other work from running, if nothing is known to come, if
    it ends at most `late` of its cost after the next value comes, or if else the rank would have
    idled more than `slack` of what any has, since its first F.  Else it waits.  Of several stages
    the I and the F with the lowest microbatch go first, and of these the deepest; by `pick` 1 the
    deepest F, by 2 the first.

    `kept` is the room that later stages of its rank need to go on, which no F of a stage takes: so
    the deepest microbatch can always move.  Returns 0, or _NEVER if that was not enough.
    """
    for r in range(ranks):
        now[r] = 0.0
        held[r] = 0.0
        idle[r] = 0.0
        waits[r] = 0
        count[r] = 0
    for c in range(3 * stages):
        done[c] = 0
        for k in range(m):
            at[c * m + k] = _NEVER
    for k in range(m):
        at[k] = 0.0
    left = (2 + split) * m * stages
    most = 0.0
    while left > 0:
        r = 0
        for q in range(1, ranks):
            if now[q] < now[r]:
                r = q
        t = now[r]
        if t >= _NEVER:
            return _NEVER
        if waits[r]:
            waits[r] = 0
            if count[r] > 0:
                idle[r] += t - since[r]
                if idle[r] > most:
                    most = idle[r]
        free = room[r] - held[r]
        # What it could do: the best of each kind, and when the next value comes.
        f = i = w = -1
        pending = 0
        blocked = 0
        comes = _NEVER
        gradient = _NEVER
        for x in range(begin[r], begin[r + 1]):
            s = own[x]
            c = 3 * s
            fs, gs = done[c], done[c + 1]
            if gs < fs:
                a = at[(c + 1) * m + gs]
                if a <= t:
                    if free < more[c + 1]:
                        blocked = 1
                    elif i < 0 or gs <= done[3 * i + 1]:
                        i = s
                elif a < gradient:
                    gradient = a
            if fs < m and fs - gs < lead[s]:
                a = at[c * m + fs]
                if a <= t:
                    if free < more[c] + kept[s]:
                        blocked = 1
                    elif f < 0 or pick == 1 or (pick == 0 and fs <= done[3 * f]):
                        f = s
                elif a < comes:
                    comes = a
            ws = done[c + 2]
            if split and ws < gs:
                pending += gs - ws
                if w < 0 or ws < done[3 * w + 2]:
                    w = s
        if gradient < comes:
            comes = gradient
        code = -1
        if w >= 0 and pending > lag[r]:
            code = 3 * w + 2
        elif i >= 0:
            code = 3 * i + 1
            if forward_first and f >= 0:
                code = 3 * f
        elif f >= 0 and gradient - t >= wait * cost[3 * f]:
            code = 3 * f
        elif w >= 0 and (
            (blocked and f < 0)
            or comes >= _NEVER
            or t + cost[3 * w + 2] <= comes + late * cost[3 * w + 2]
            or idle[r] + comes - t > slack * most
        ):
            code = 3 * w + 2
        if code < 0:
            now[r] = comes
            waits[r] = 1
            since[r] = t
            continue
        s = code // 3
        kind = code - 3 * s
        k = done[code]
        done[code] = k + 1
        held[r] += change[code]
        out[first[r] + count[r]] = code
        count[r] += 1
        end = t + cost[code]
        now[r] = end
        left -= 1
        if kind < 2:
            # Whose value it is: the next stage's F, the stage's own I, or that of the stage before.
            target = -1
            if kind == 0:
                target = code + 3 if s + 1 < stages else code + 1
            elif s > 0:
                target = code - 3
            if target >= 0:
                given = end + hop[code]
                at[target * m + k] = given
                q = rank_of[target // 3]
                if waits[q] and given < now[q]:
                    now[q] = given
        if done[3 * own[begin[r]]] == m:
            # A rank through with everything never comes up again.
            over = 1
            for x in range(begin[r], begin[r + 1]):
                c = 3 * own[x]
                if done[c] < m or done[c + 1] < m or (split and done[c + 2] < m):
                    over = 0
            if over:
                now[r] = _NEVER * 2
    return 0.0
