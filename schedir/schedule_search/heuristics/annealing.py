"""Simulated annealing of rank orders, in loops that numba can compile.

Everything that they read or fill comes as a list or an array.  Codes are those of an Order.
"""

from __future__ import annotations

from typing import Any, Final

Numbers = Any  # of one dimension: a list, or an array

_NEVER: Final = 1e300
_WAVES: Final = 4  # one of so many moves is of several ranks


def times(
    ranks: int,
    stages: int,
    m: int,
    rank_of: Numbers,
    first: Numbers,
    code: Numbers,
    cost: Numbers,
    hop: Numbers,
    tail: Numbers,
    own_span: int,
    at: Numbers,
    done: Numbers,
    upto: Numbers,
    now: Numbers,
    stack: Numbers,
    stacked: Numbers,
    start: Numbers,
    nth: Numbers,
) -> float:
    """Fill the earliest `start` of each piece of work of an order, and say what all takes.

    `nth` gets the microbatch of each.  What never ends takes _NEVER.
    """
    for c in range(3 * stages):
        done[c] = 0
        for k in range(m):
            at[c * m + k] = _NEVER
    for k in range(m):
        at[k] = 0.0
    top = ranks
    for r in range(ranks):
        upto[r] = first[r]
        now[r] = 0.0
        stack[r] = ranks - 1 - r
        stacked[r] = 1
    while top > 0:
        top -= 1
        r = stack[top]
        stacked[r] = 0
        t = now[r]
        x = upto[r]
        last = first[r + 1]
        while x < last:
            c = code[x]
            k = done[c]
            kind = c % 3
            if kind < 2:
                a = at[c * m + k]
                if a >= _NEVER:
                    break
                if a > t:
                    t = a
            start[x] = t
            nth[x] = k
            done[c] = k + 1
            t += cost[c]
            x += 1
            target = -1
            if kind == 0:
                target = c + 3 if c + 3 < 3 * stages else c + 1
            elif kind == 1 and c > 3:
                target = c - 3
            if target >= 0:
                at[target * m + k] = t + hop[c]
                q = rank_of[target // 3]
                if (
                    q != r
                    and stacked[q] == 0
                    and upto[q] < first[q + 1]
                    and code[upto[q]] == target
                ):
                    stacked[q] = 1
                    stack[top] = q
                    top += 1
        upto[r] = x
        now[r] = t
    longest = 0.0
    for r in range(ranks):
        if upto[r] < first[r + 1]:
            return _NEVER
        takes = now[r] + tail[r]
        if own_span:
            takes = now[r] - start[first[r]]
        if takes > longest:
            longest = takes
    return longest


def anneal(
    ranks: int,
    stages: int,
    m: int,
    rank_of: Numbers,
    first: Numbers,
    code: Numbers,
    cost: Numbers,
    hop: Numbers,
    tail: Numbers,
    own_span: int,
    at: Numbers,
    done: Numbers,
    upto: Numbers,
    now: Numbers,
    stack: Numbers,
    stacked: Numbers,
    start: Numbers,
    nth: Numbers,
    more: Numbers,
    change: Numbers,
    room: Numbers,
    rank_at: Numbers,
    own: Numbers,
    begin: Numbers,
    path: Numbers,
    best: Numbers,
    undo: Numbers,
    turns: int,
    heats: Numbers,
    randoms: Numbers,
    goal: float,
) -> float:
    """Move one piece of work at a time of the order `code`, and keep the shortest in `best`.

    Most moves are of work on a critical path: one of two that follow each other without a pause.
    Some have the like done on several ranks (`wave`): where memory is short, or a rank has several
    stages, one rank alone can change but little.
    What would hold too much, or never end, is not done; what is longer is done if it is by less
    than a random part of a heat.  `heats` has that, a time, and by what factor it falls in each of
    the `turns`; `randoms` has the last random number, and gets how many turns were made.
    These are of a linear congruence, so Python
    and machine code draw the same.  All goes on where it ended, if it is called again.
    """
    n = first[ranks]
    length = times(
        ranks, stages, m, rank_of, first, code, cost, hop, tail, own_span,
        at, done, upto, now, stack, stacked, start, nth,
    )  # fmt: skip
    shortest = heats[2]
    heat, cooling = heats[0], heats[1]
    random = randoms[0]
    randoms[1] = turns
    for turn in range(turns):
        if shortest <= goal:
            randoms[1] = turn
            break
        heat *= cooling
        random = (random * 1103515245 + 12345) % 2147483648
        draw = random >> 8
        x = -1
        if draw % 8 > 0:
            # One critical path, from its end on: work that starts as the one before it ends.
            y = -1
            for r in range(ranks):
                takes = now[r] + tail[r]
                if own_span:
                    takes = now[r] - start[first[r]]
                if takes >= length * (1 - 1e-12):
                    y = first[r + 1] - 1
            joints = 0
            while y >= 0:
                c = code[y]
                r = rank_at[y]
                if y > first[r] and start[y] <= start[y - 1] + cost[code[y - 1]]:
                    path[joints] = y
                    joints += 1
                    y -= 1
                    continue
                kind = c % 3
                source = -1
                if kind == 0 and c >= 3:
                    source = c - 3
                elif kind == 1:
                    source = c + 3 if c + 3 < 3 * stages else c - 1
                if source < 0:
                    break
                # Where the work stands whose value this waited for.
                q = rank_of[source // 3]
                lo, hi = first[q], first[q + 1] - 1
                due = start[y] - hop[source] - cost[source]
                while lo < hi:
                    mid = (lo + hi + 1) // 2
                    if start[mid] <= due + 1e-9 * (1 + due):
                        lo = mid
                    else:
                        hi = mid - 1
                while lo > first[q] and not (code[lo] == source and nth[lo] == nth[y]):
                    lo -= 1
                y = lo if code[lo] == source and nth[lo] == nth[y] else -1
            if joints > 0:
                random = (random * 1103515245 + 12345) % 2147483648
                x = path[(random >> 8) % joints]
        random = (random * 1103515245 + 12345) % 2147483648
        if x < 0:
            x = (random >> 8) % n
            random = (random * 1103515245 + 12345) % 2147483648
        draw = random >> 8
        # The work from x on goes before that which ends there: mostly one of the two is one piece.
        ahead, behind = 1, 1
        if draw % 4 == 1:
            ahead = 1 + (draw >> 8) % 8
        elif draw % 4 == 2:
            behind = 1 + (draw >> 8) % 8
        elif draw % 4 == 3:
            ahead = 1 + (draw >> 8) % 3
            behind = 1 + (draw >> 12) % 3
        r = rank_at[x]
        low = high = r
        random = (random * 1103515245 + 12345) % 2147483648
        spread = random >> 8
        if x > first[r] and ranks > 1 and spread % _WAVES == 0:
            if (spread >> 2) % 2 == 0:
                low, high = 0, ranks - 1
            else:
                low = (spread >> 3) % (r + 1)
                high = r + (spread >> 12) % (ranks - r)
            lo, hi = first[low], first[high + 1]
            for y in range(lo, hi):
                undo[y] = code[y]
            if wave(low, high, own, begin, first, code, nth, rank_at, x, (spread >> 20) % 2) == 0:
                continue
        else:
            lo, hi = x - ahead, x + behind
            if lo < first[r]:
                lo = first[r]
            if hi > first[r + 1]:
                hi = first[r + 1]
            # Nothing goes past its like, nor past what makes what it needs, or needs what it makes.
            for y in range(x, hi):
                c = code[y]
                z = x - 1
                while z >= lo and code[z] != c and (code[z] // 3 != c // 3 or nth[z] != nth[y]):
                    z -= 1
                if z >= lo:
                    if y == x:
                        lo = z + 1
                    else:
                        hi = y
                        break
            if lo >= x:
                continue
            for y in range(lo, hi):
                undo[y] = code[y]
            for y in range(x, hi):
                code[lo + y - x] = undo[y]
            for y in range(lo, x):
                code[hi - x + y] = undo[y]
        fits = 1
        for q in range(low, high + 1):
            held = 0.0
            for y in range(first[q], min(first[q + 1], hi)):
                d = code[y]
                if y >= lo and held + more[d] > room[q]:
                    fits = 0
                    break
                held += change[d]
        longer = 0.0
        if fits:
            found = times(
                ranks, stages, m, rank_of, first, code, cost, hop, tail, own_span,
                at, done, upto, now, stack, stacked, start, nth,
            )  # fmt: skip
            longer = found - length
            if longer > 0:
                random = (random * 1103515245 + 12345) % 2147483648
                if longer > heat * ((random >> 8) / 8388608.0):
                    fits = 0
            if fits:
                length = found
                if found < shortest * (1 - 1e-12):
                    shortest = found
                    for y in range(n):
                        best[y] = code[y]
        if not fits:
            for y in range(lo, hi):
                code[y] = undo[y]
            if longer > 0:
                times(
                    ranks, stages, m, rank_of, first, code, cost, hop, tail, own_span,
                    at, done, upto, now, stack, stacked, start, nth,
                )  # fmt: skip
    heats[0] = heat
    heats[2] = shortest
    randoms[0] = random
    return float(shortest)


def wave(
    low: int,
    high: int,
    own: Numbers,
    begin: Numbers,
    first: Numbers,
    code: Numbers,
    nth: Numbers,
    rank_at: Numbers,
    x: int,
    behind: int,
) -> int:
    """Have the work at `x` go before that ahead of it, and the like on ranks from `low` to `high`.

    The like is of the same kinds and microbatches, of the stages that are their ranks' as many-th.
    What goes ahead takes the place right before the other, or with `behind` the other the place
    right after it.  Where it is so already, or would pass its like or what it needs, a rank stays
    as it is.  `nth` has the microbatches of the order as it was.  Returns how many ranks changed.
    """
    r = rank_at[x]
    one, other = code[x], code[x - 1]
    mb, met = nth[x], nth[x - 1]
    place = place_of_other = -1
    for k in range(begin[r], begin[r + 1]):
        if own[k] == one // 3:
            place = k - begin[r]
        if own[k] == other // 3:
            place_of_other = k - begin[r]
    changed = 0
    for q in range(low, high + 1):
        if begin[q] + place >= begin[q + 1] or begin[q] + place_of_other >= begin[q + 1]:
            continue
        c = 3 * own[begin[q] + place] + one % 3
        d = 3 * own[begin[q] + place_of_other] + other % 3
        lo = hi = -1
        for y in range(first[q], first[q + 1]):
            if code[y] == d and nth[y] == met:
                lo = y
            elif code[y] == c and nth[y] == mb:
                hi = y
                break
        if lo < 0 or hi < 0:
            continue
        # What moves is one piece; nothing between the two may be its like, or of its microbatch.
        moves, n = (d, met) if behind else (c, mb)
        free = 1
        for y in range(lo + behind, hi + behind):
            if code[y] == moves or (code[y] // 3 == moves // 3 and nth[y] == n):
                free = 0
                break
        if free == 0:
            continue
        if behind:
            for y in range(lo, hi):
                code[y] = code[y + 1]
            code[hi] = d
        else:
            for y in range(hi, lo, -1):
                code[y] = code[y - 1]
            code[lo] = c
        changed += 1
    return changed
