"""Greedy list scheduling: an idle rank starts what its policy ranks first.

Everything that it reads or fills comes as a list or an array.  Codes are those of an Order.
"""

from __future__ import annotations

from typing import Any, Final

Vector = Any  # of one dimension: a list, or an array

_NEVER: Final = 1e300


def dispatch_by_policy(
    ranks: int,
    stages: int,
    microbatches: int,
    split: int,
    rank_of: Vector,
    rank_stages: Vector,
    stage_offsets: Vector,
    rank_offsets: Vector,
    cost: Vector,
    delays: Vector,
    start_memory: Vector,
    memory_change: Vector,
    capacity: Vector,
    reserved_memory: Vector,
    max_lead: Vector,
    max_lag: Vector,
    wait_share: float,
    late_share: float,
    idle_share: float,
    forward_first: int,
    stage_choice: int,
    next_mb: Vector,
    arrivals: Vector,
    memory: Vector,
    rank_time: Vector,
    idle_time: Vector,
    idle_since: Vector,
    is_waiting: Vector,
    num_started: Vector,
    codes: Vector,
) -> float:
    """Let each idle rank decide by a policy what it does next, and fill `codes` with the order.

    An idle rank runs, in this turn: a W where more than `max_lag` of them wait; an I that is there,
    after an F if `forward_first`; an F below its stage's `max_lead` that fits, unless an I comes
    within
    `wait_share` of its cost; a W if memory keeps other work from running, if nothing is known to
    come, if it ends at most `late_share` of its cost after the next value comes, or if else the
    rank would have idled more than `idle_share` of what any has, since its first F.  Else it waits.
    Of several stages the I and the F with the lowest microbatch go first, and of these the deepest;
    by
    `stage_choice` 1 the deepest F, by 2 the first.

    `reserved_memory` is the room that later stages of its rank need to go on, which no F of a stage
    takes: so the deepest microbatch can always move.  Returns 0, or _NEVER if that was not enough.
    """
    for r in range(ranks):
        rank_time[r] = 0.0
        memory[r] = 0.0
        idle_time[r] = 0.0
        is_waiting[r] = 0
        num_started[r] = 0
    for c in range(3 * stages):
        next_mb[c] = 0
        for k in range(microbatches):
            arrivals[c * microbatches + k] = _NEVER
    for k in range(microbatches):
        arrivals[k] = 0.0
    left = (2 + split) * microbatches * stages
    most = 0.0
    while left > 0:
        r = 0
        for q in range(1, ranks):
            if rank_time[q] < rank_time[r]:
                r = q
        t = rank_time[r]
        if t >= _NEVER:
            return _NEVER
        if is_waiting[r]:
            is_waiting[r] = 0
            if num_started[r] > 0:
                idle_time[r] += t - idle_since[r]
                if idle_time[r] > most:
                    most = idle_time[r]
        free = capacity[r] - memory[r]
        # What it could do: the best of each kind, and when the next value comes.
        f = i = w = -1
        pending = 0
        blocked = 0
        comes = _NEVER
        gradient = _NEVER
        for x in range(stage_offsets[r], stage_offsets[r + 1]):
            s = rank_stages[x]
            c = 3 * s
            fs, gs = next_mb[c], next_mb[c + 1]
            if gs < fs:
                a = arrivals[(c + 1) * microbatches + gs]
                if a <= t:
                    if free < start_memory[c + 1]:
                        blocked = 1
                    elif i < 0 or gs <= next_mb[3 * i + 1]:
                        i = s
                elif a < gradient:
                    gradient = a
            if fs < microbatches and fs - gs < max_lead[s]:
                a = arrivals[c * microbatches + fs]
                if a <= t:
                    if free < start_memory[c] + reserved_memory[s]:
                        blocked = 1
                    elif f < 0 or stage_choice == 1 or (stage_choice == 0 and fs <= next_mb[3 * f]):
                        f = s
                elif a < comes:
                    comes = a
            ws = next_mb[c + 2]
            if split and ws < gs:
                pending += gs - ws
                if w < 0 or ws < next_mb[3 * w + 2]:
                    w = s
        if gradient < comes:
            comes = gradient
        code = -1
        if w >= 0 and pending > max_lag[r]:
            code = 3 * w + 2
        elif i >= 0:
            code = 3 * i + 1
            if forward_first and f >= 0:
                code = 3 * f
        elif f >= 0 and gradient - t >= wait_share * cost[3 * f]:
            code = 3 * f
        elif w >= 0 and (
            (blocked and f < 0)
            or comes >= _NEVER
            or t + cost[3 * w + 2] <= comes + late_share * cost[3 * w + 2]
            or idle_time[r] + comes - t > idle_share * most
        ):
            code = 3 * w + 2
        if code < 0:
            rank_time[r] = comes
            is_waiting[r] = 1
            idle_since[r] = t
            continue
        s = code // 3
        kind = code - 3 * s
        k = next_mb[code]
        next_mb[code] = k + 1
        memory[r] += memory_change[code]
        codes[rank_offsets[r] + num_started[r]] = code
        num_started[r] += 1
        end = t + cost[code]
        rank_time[r] = end
        left -= 1
        if kind < 2:
            # Whose value it is: the next stage's F, the stage's own I, or that of the stage before.
            target = -1
            if kind == 0:
                target = code + 3 if s + 1 < stages else code + 1
            elif s > 0:
                target = code - 3
            if target >= 0:
                given = end + delays[code]
                arrivals[target * microbatches + k] = given
                q = rank_of[target // 3]
                if is_waiting[q] and given < rank_time[q]:
                    rank_time[q] = given
        if next_mb[3 * rank_stages[stage_offsets[r]]] == microbatches:
            # A rank through with everything never comes up again.
            over = 1
            for x in range(stage_offsets[r], stage_offsets[r + 1]):
                c = 3 * rank_stages[x]
                if (
                    next_mb[c] < microbatches
                    or next_mb[c + 1] < microbatches
                    or (split and next_mb[c + 2] < microbatches)
                ):
                    over = 0
            if over:
                rank_time[r] = _NEVER * 2
    return 0.0
