"""Build orders by greedy list scheduling: an idle rank starts the task that its policy prefers.

All inputs and outputs are numbers, lists or arrays. The code of a task is KINDS * stage + kind, as
in an `Order`.
"""

from __future__ import annotations

from typing import Any, Final

Vector = Any  # A list or a one-dimensional array.

_NEVER: Final = 1e300  # A time that is never reached.


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
    """Fill `codes` with the order in which idle ranks choose their tasks by a policy.

    An idle rank starts the first of these tasks that is possible:

    1. A W, if more than `max_lag` W's wait.
    2. An I whose gradient has arrived. With `forward_first`, an F that is possible runs instead.
    3. An F that fits into memory and does not exceed the `max_lead` of its stage. The rank does not
       start it if a gradient arrives within `wait_share` of the F's cost.
    4. A W in four cases: memory blocks other tasks, no arrival is scheduled, the W ends at most
        `late_share` of its cost after the next arrival, or the rank would otherwise be idle for
        longer than `idle_share` allows.

    Otherwise the rank waits. If I's of several stages are possible, the I with the lowest
    microbatch runs first. If their microbatches are equal, the I of the highest stage runs first.
    With `stage_choice` 0, the same rule applies to F's.

    Args:
        ranks: The number of ranks.
        stages: The number of stages.
        microbatches: The number of microbatches.
        split: 1 if backwards are split into I and W, else 0.
        rank_of: The rank of each stage.
        rank_stages: The stages of all ranks, concatenated.
        stage_offsets: The first index of each rank in `rank_stages`, and the number of stages.
        rank_offsets: The first index of each rank in `codes`.
        cost: The time of a task, for each code.
        delays: The time from the end of a task to the arrival of its value, for each code.
        start_memory: The memory that must be free at the start of a task, for each code.
        memory_change: The memory that a task adds until its end, for each code. Negative if the
            task frees memory.
        capacity: The memory of each rank.
        reserved_memory: For each stage, the memory that an F must leave free for later stages of
            its rank, so that the microbatch on the highest stage can always continue.
        max_lead: For each stage, the largest number of F's whose I has not run.
        max_lag: For each rank, the largest number of W's that wait.
        wait_share: A rank waits for a gradient that arrives within this share of an F's cost.
        late_share: A W may end later than the next arrival by this share of the W's cost.
        idle_share: A rank runs a W instead of waiting if its idle time would otherwise exceed this
            share of the largest idle time of all ranks. Idle time is counted from the rank's first
            F.
        forward_first: 1 to run an F before an I if both are possible.
        stage_choice: Which F runs if F's of several stages are possible. 0: the F with the lowest
            microbatch. 1: the F of the highest stage. 2: the F of the lowest stage.
        next_mb: Buffer: the next microbatch, for each code.
        arrivals: Buffer: the time at which the input of a task arrives, for each code and
            microbatch.
        memory: Buffer: the memory in use on each rank.
        rank_time: Buffer: the time at which each rank chooses its next task.
        idle_time: Buffer: the idle time of each rank.
        idle_since: Buffer: the start of the current idle time of each rank.
        is_waiting: Buffer: 1 for each rank that waits.
        num_started: Buffer: the number of tasks that each rank has started.
        codes: Output: the codes of all ranks, concatenated.

    Returns:
        0, or `_NEVER` if the ranks cannot continue within their memory.
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
    num_left = (2 + split) * microbatches * stages
    max_idle_time = 0.0
    while num_left > 0:
        r = 0
        for q in range(1, ranks):
            if rank_time[q] < rank_time[r]:
                r = q
        time = rank_time[r]
        if time >= _NEVER:
            return _NEVER
        if is_waiting[r]:
            is_waiting[r] = 0
            if num_started[r] > 0:
                idle_time[r] += time - idle_since[r]
                if idle_time[r] > max_idle_time:
                    max_idle_time = idle_time[r]
        free_memory = capacity[r] - memory[r]
        # Find the preferred stage of each kind of task, and the time of the next arrival.
        F_stage = I_stage = W_stage = -1
        pending_W = 0
        is_blocked = 0
        next_arrival = _NEVER
        next_gradient = _NEVER
        for x in range(stage_offsets[r], stage_offsets[r + 1]):
            s = rank_stages[x]
            c = 3 * s
            next_F, next_I = next_mb[c], next_mb[c + 1]
            if next_I < next_F:
                arrival = arrivals[(c + 1) * microbatches + next_I]
                if arrival <= time:
                    if free_memory < start_memory[c + 1]:
                        is_blocked = 1
                    elif I_stage < 0 or next_I <= next_mb[3 * I_stage + 1]:
                        I_stage = s
                elif arrival < next_gradient:
                    next_gradient = arrival
            if next_F < microbatches and next_F - next_I < max_lead[s]:
                arrival = arrivals[c * microbatches + next_F]
                if arrival <= time:
                    if free_memory < start_memory[c] + reserved_memory[s]:
                        is_blocked = 1
                    elif (
                        F_stage < 0
                        or stage_choice == 1
                        or (stage_choice == 0 and next_F <= next_mb[3 * F_stage])
                    ):
                        F_stage = s
                elif arrival < next_arrival:
                    next_arrival = arrival
            next_W = next_mb[c + 2]
            if split and next_W < next_I:
                pending_W += next_I - next_W
                if W_stage < 0 or next_W < next_mb[3 * W_stage + 2]:
                    W_stage = s
        if next_gradient < next_arrival:
            next_arrival = next_gradient
        code = -1
        if W_stage >= 0 and pending_W > max_lag[r]:
            code = 3 * W_stage + 2
        elif I_stage >= 0:
            code = 3 * I_stage + 1
            if forward_first and F_stage >= 0:
                code = 3 * F_stage
        elif F_stage >= 0 and next_gradient - time >= wait_share * cost[3 * F_stage]:
            code = 3 * F_stage
        elif W_stage >= 0 and (
            (is_blocked and F_stage < 0)
            or next_arrival >= _NEVER
            or time + cost[3 * W_stage + 2] <= next_arrival + late_share * cost[3 * W_stage + 2]
            or idle_time[r] + next_arrival - time > idle_share * max_idle_time
        ):
            code = 3 * W_stage + 2
        if code < 0:
            rank_time[r] = next_arrival
            is_waiting[r] = 1
            idle_since[r] = time
            continue
        s = code // 3
        kind = code - 3 * s
        k = next_mb[code]
        next_mb[code] = k + 1
        memory[r] += memory_change[code]
        codes[rank_offsets[r] + num_started[r]] = code
        num_started[r] += 1
        end = time + cost[code]
        rank_time[r] = end
        num_left -= 1
        if kind < 2:
            # The result is the input of the F of the next stage, of the I of the same stage, or of
            # the I of the previous stage.
            target = -1
            if kind == 0:
                target = code + 3 if s + 1 < stages else code + 1
            elif s > 0:
                target = code - 3
            if target >= 0:
                value_arrival = end + delays[code]
                arrivals[target * microbatches + k] = value_arrival
                q = rank_of[target // 3]
                if is_waiting[q] and value_arrival < rank_time[q]:
                    rank_time[q] = value_arrival
        if next_mb[3 * rank_stages[stage_offsets[r]]] == microbatches:
            # A rank that has run all its tasks must not be selected again.
            is_finished = 1
            for x in range(stage_offsets[r], stage_offsets[r + 1]):
                c = 3 * rank_stages[x]
                if (
                    next_mb[c] < microbatches
                    or next_mb[c + 1] < microbatches
                    or (split and next_mb[c + 2] < microbatches)
                ):
                    is_finished = 0
            if is_finished:
                rank_time[r] = _NEVER * 2
    return 0.0
