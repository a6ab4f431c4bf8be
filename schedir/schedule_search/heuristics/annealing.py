"""Shorten rank orders by simulated annealing, in loops that Numba can compile.

All inputs and outputs are numbers, lists or arrays. The code of a task is KINDS * stage + kind, as
in an `Order`. A position is an index into `codes`, the concatenated codes of all ranks.
"""

from __future__ import annotations

from typing import Any, Final

# For each round: (initial temperature, number of moves per task). The unit of temperatures is the
# mean time of a task.
ANNEALING_ROUNDS: Final = ((4.0, 100), (8.0, 400), (16.0, 100), (4.0, 1600), (2.0, 400))
MAX_FAILED_ROUNDS: Final = 64  # Annealing ends after this many successive rounds without success.
MIN_TEMPERATURE: Final = 0.1  # The smallest initial temperature, in the same unit.
FINAL_TEMPERATURE_SHARE: Final = 1 / 30  # Final temperature / initial temperature of a round.

Vector = Any  # A list or a one-dimensional array.

_NEVER: Final = 1e300  # A time that is never reached.
_MULTI_RANK_MOVE_INTERVAL: Final = 4  # About one move in 4 changes several ranks.


def compute_times(
    ranks: int,
    stages: int,
    microbatches: int,
    rank_of: Vector,
    rank_offsets: Vector,
    codes: Vector,
    cost: Vector,
    delays: Vector,
    tail: Vector,
    minimizes_active_span: int,
    arrivals: Vector,
    next_mb: Vector,
    next_position: Vector,
    rank_time: Vector,
    stack: Vector,
    is_on_stack: Vector,
    start: Vector,
    mb_at: Vector,
) -> float:
    """Compute the earliest start of each task of an order, and return the length of the order.

    Args:
        ranks: The number of ranks.
        stages: The number of stages.
        microbatches: The number of microbatches.
        rank_of: The rank of each stage.
        rank_offsets: The first position of each rank, and the total number of tasks.
        codes: The order: the codes of all ranks, concatenated.
        cost: The time of a task, for each code.
        delays: The time from the end of a task to the arrival of its value, for each code.
        tail: For each rank, the time of its gradient reduction and its optimizer step after its
            last task.
        minimizes_active_span: 1 for the objective "active_span", 0 for "span".
        arrivals: Buffer: the time at which the input of a task arrives, for each code and
            microbatch.
        next_mb: Buffer: the next microbatch, for each code.
        next_position: Buffer: the next position of each rank.
        rank_time: Output: the end of the last task of each rank.
        stack: Buffer: the ranks that may be able to continue.
        is_on_stack: Buffer: 1 for each rank on the stack.
        start: Output: the start of each task, by position.
        mb_at: Output: the microbatch of each task, by position.

    Returns:
        The length of the order, or `_NEVER` if it deadlocks.
    """
    for c in range(3 * stages):
        next_mb[c] = 0
        for k in range(microbatches):
            arrivals[c * microbatches + k] = _NEVER
    for k in range(microbatches):
        arrivals[k] = 0.0
    top = ranks
    for r in range(ranks):
        next_position[r] = rank_offsets[r]
        rank_time[r] = 0.0
        stack[r] = ranks - 1 - r
        is_on_stack[r] = 1
    while top > 0:
        top -= 1
        r = stack[top]
        is_on_stack[r] = 0
        time = rank_time[r]
        position = next_position[r]
        end_position = rank_offsets[r + 1]
        while position < end_position:
            c = codes[position]
            k = next_mb[c]
            kind = c % 3
            if kind < 2:
                arrival = arrivals[c * microbatches + k]
                if arrival >= _NEVER:
                    break
                if arrival > time:
                    time = arrival
            start[position] = time
            mb_at[position] = k
            next_mb[c] = k + 1
            time += cost[c]
            position += 1
            target = -1
            if kind == 0:
                target = c + 3 if c + 3 < 3 * stages else c + 1
            elif kind == 1 and c > 3:
                target = c - 3
            if target >= 0:
                arrivals[target * microbatches + k] = time + delays[c]
                q = rank_of[target // 3]
                if (
                    q != r
                    and is_on_stack[q] == 0
                    and next_position[q] < rank_offsets[q + 1]
                    and codes[next_position[q]] == target
                ):
                    is_on_stack[q] = 1
                    stack[top] = q
                    top += 1
        next_position[r] = position
        rank_time[r] = time
    longest = 0.0
    for r in range(ranks):
        if next_position[r] < rank_offsets[r + 1]:
            return _NEVER
        rank_length = rank_time[r] + tail[r]
        if minimizes_active_span:
            rank_length = rank_time[r] - start[rank_offsets[r]]
        if rank_length > longest:
            longest = rank_length
    return longest


def anneal(
    ranks: int,
    stages: int,
    microbatches: int,
    rank_of: Vector,
    rank_offsets: Vector,
    codes: Vector,
    cost: Vector,
    delays: Vector,
    tail: Vector,
    minimizes_active_span: int,
    arrivals: Vector,
    next_mb: Vector,
    next_position: Vector,
    rank_time: Vector,
    stack: Vector,
    is_on_stack: Vector,
    start: Vector,
    mb_at: Vector,
    start_memory: Vector,
    memory_change: Vector,
    capacity: Vector,
    rank_at: Vector,
    rank_stages: Vector,
    stage_offsets: Vector,
    path_joints: Vector,
    best_codes: Vector,
    saved_codes: Vector,
    num_moves: int,
    temperature_state: Vector,
    random_state: Vector,
    goal: float,
) -> float:
    """Change the order `codes` by random moves, and keep the shortest order in `best_codes`.

    Most moves exchange tasks of a critical path that follow each other without idle time. Some
    moves change several ranks in the same way (`move_on_several_ranks`), because with little
    memory, or with several stages per rank, a change of one rank alone is rarely possible.

    A move that exceeds a capacity or deadlocks is undone. A longer order is kept if the increase is
    less than a random share of the temperature. Random numbers come from a linear congruential
    generator, so Python and compiled code draw the same numbers. The next call continues where the
    previous call ended.

    Args:
        ranks: See `compute_times`.
        stages: See `compute_times`.
        microbatches: See `compute_times`.
        rank_of: See `compute_times`.
        rank_offsets: See `compute_times`.
        codes: The order, changed in place.
        cost: See `compute_times`.
        delays: See `compute_times`.
        tail: See `compute_times`.
        minimizes_active_span: See `compute_times`.
        arrivals: See `compute_times`.
        next_mb: See `compute_times`.
        next_position: See `compute_times`.
        rank_time: See `compute_times`.
        stack: See `compute_times`.
        is_on_stack: See `compute_times`.
        start: See `compute_times`.
        mb_at: See `compute_times`.
        start_memory: The memory that must be free at the start of a task, for each code.
        memory_change: The memory that a task adds until its end, for each code. Negative if the
            task frees memory.
        capacity: The memory of each rank.
        rank_at: The rank of each position.
        rank_stages: The stages of all ranks, concatenated.
        stage_offsets: The first index of each rank in `rank_stages`, and the number of stages.
        path_joints: Buffer: positions on the critical path whose task starts when the task before
            it on the rank ends.
        best_codes: Output: the shortest order so far.
        saved_codes: Buffer: the order before a move.
        num_moves: The number of moves to try.
        temperature_state: The temperature, the factor by which each move reduces it, and the
            shortest length so far. Updated in place. The temperature is a time, in the unit of the
            costs.
        random_state: The last random number, updated in place. The second entry is an output: the
            number of moves that were tried.
        goal: The search stops when an order has this length or less.

    Returns:
        The shortest length so far.
    """
    n = rank_offsets[ranks]
    length = compute_times(
        ranks, stages, microbatches, rank_of, rank_offsets, codes, cost, delays, tail,
        minimizes_active_span,
        arrivals, next_mb, next_position, rank_time, stack, is_on_stack, start, mb_at,
    )  # fmt: skip
    shortest = temperature_state[2]
    temperature, cooling = temperature_state[0], temperature_state[1]
    random = random_state[0]
    random_state[1] = num_moves
    for move in range(num_moves):
        if shortest <= goal:
            random_state[1] = move
            break
        temperature *= cooling
        random = (random * 1103515245 + 12345) % 2147483648
        draw = random >> 8
        position = -1
        if draw % 8 > 0:
            # Follow one critical path backward from its end. On a critical path, each task starts
            # when the task before it ends, or when its input arrives.
            y = -1
            for r in range(ranks):
                rank_length = rank_time[r] + tail[r]
                if minimizes_active_span:
                    rank_length = rank_time[r] - start[rank_offsets[r]]
                if rank_length >= length * (1 - 1e-12):
                    y = rank_offsets[r + 1] - 1
            num_joints = 0
            while y >= 0:
                c = codes[y]
                r = rank_at[y]
                if y > rank_offsets[r] and start[y] <= start[y - 1] + cost[codes[y - 1]]:
                    path_joints[num_joints] = y
                    num_joints += 1
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
                # Find the position of the task that produced the input of this task.
                q = rank_of[source // 3]
                lo, hi = rank_offsets[q], rank_offsets[q + 1] - 1
                source_start = start[y] - delays[source] - cost[source]
                while lo < hi:
                    mid = (lo + hi + 1) // 2
                    if start[mid] <= source_start + 1e-9 * (1 + source_start):
                        lo = mid
                    else:
                        hi = mid - 1
                while lo > rank_offsets[q] and not (codes[lo] == source and mb_at[lo] == mb_at[y]):
                    lo -= 1
                y = lo if codes[lo] == source and mb_at[lo] == mb_at[y] else -1
            if num_joints > 0:
                random = (random * 1103515245 + 12345) % 2147483648
                position = path_joints[(random >> 8) % num_joints]
        random = (random * 1103515245 + 12345) % 2147483648
        if position < 0:
            position = (random >> 8) % n
            random = (random * 1103515245 + 12345) % 2147483648
        draw = random >> 8
        # Exchange the `num_before` tasks before `position` with the `num_after` tasks from
        # `position` on. In most moves, one of the two groups has only one task.
        num_before, num_after = 1, 1
        if draw % 4 == 1:
            num_before = 1 + (draw >> 8) % 8
        elif draw % 4 == 2:
            num_after = 1 + (draw >> 8) % 8
        elif draw % 4 == 3:
            num_before = 1 + (draw >> 8) % 3
            num_after = 1 + (draw >> 12) % 3
        r = rank_at[position]
        low_rank = high_rank = r
        random = (random * 1103515245 + 12345) % 2147483648
        spread = random >> 8
        if position > rank_offsets[r] and ranks > 1 and spread % _MULTI_RANK_MOVE_INTERVAL == 0:
            if (spread >> 2) % 2 == 0:
                low_rank, high_rank = 0, ranks - 1
            else:
                low_rank = (spread >> 3) % (r + 1)
                high_rank = r + (spread >> 12) % (ranks - r)
            lo, hi = rank_offsets[low_rank], rank_offsets[high_rank + 1]
            for y in range(lo, hi):
                saved_codes[y] = codes[y]
            if (
                move_on_several_ranks(
                    low_rank,
                    high_rank,
                    rank_stages,
                    stage_offsets,
                    rank_offsets,
                    codes,
                    mb_at,
                    rank_at,
                    position,
                    (spread >> 20) % 2,
                )
                == 0
            ):
                continue
        else:
            lo, hi = position - num_before, position + num_after
            if lo < rank_offsets[r]:
                lo = rank_offsets[r]
            if hi > rank_offsets[r + 1]:
                hi = rank_offsets[r + 1]
            # A task must not pass a task of the same code, or of the same stage and microbatch.
            for y in range(position, hi):
                c = codes[y]
                z = position - 1
                while (
                    z >= lo and codes[z] != c and (codes[z] // 3 != c // 3 or mb_at[z] != mb_at[y])
                ):
                    z -= 1
                if z >= lo:
                    if y == position:
                        lo = z + 1
                    else:
                        hi = y
                        break
            if lo >= position:
                continue
            for y in range(lo, hi):
                saved_codes[y] = codes[y]
            for y in range(position, hi):
                codes[lo + y - position] = saved_codes[y]
            for y in range(lo, position):
                codes[hi - position + y] = saved_codes[y]
        is_accepted = 1
        for q in range(low_rank, high_rank + 1):
            memory = 0.0
            for y in range(rank_offsets[q], min(rank_offsets[q + 1], hi)):
                d = codes[y]
                if y >= lo and memory + start_memory[d] > capacity[q]:
                    is_accepted = 0
                    break
                memory += memory_change[d]
        increase = 0.0
        if is_accepted:
            new_length = compute_times(
                ranks, stages, microbatches, rank_of, rank_offsets, codes, cost, delays, tail,
                minimizes_active_span,
                arrivals, next_mb, next_position, rank_time, stack, is_on_stack, start, mb_at,
            )  # fmt: skip
            increase = new_length - length
            if increase > 0:
                random = (random * 1103515245 + 12345) % 2147483648
                if increase > temperature * ((random >> 8) / 8388608.0):
                    is_accepted = 0
            if is_accepted:
                length = new_length
                if new_length < shortest * (1 - 1e-12):
                    shortest = new_length
                    for y in range(n):
                        best_codes[y] = codes[y]
        if not is_accepted:
            for y in range(lo, hi):
                codes[y] = saved_codes[y]
            if increase > 0:
                compute_times(
                    ranks, stages, microbatches, rank_of, rank_offsets, codes, cost, delays,
                    tail, minimizes_active_span,
                    arrivals, next_mb, next_position, rank_time, stack, is_on_stack, start, mb_at,
                )  # fmt: skip
    temperature_state[0] = temperature
    temperature_state[2] = shortest
    random_state[0] = random
    return float(shortest)


def move_on_several_ranks(
    low_rank: int,
    high_rank: int,
    rank_stages: Vector,
    stage_offsets: Vector,
    rank_offsets: Vector,
    codes: Vector,
    mb_at: Vector,
    rank_at: Vector,
    position: int,
    move_behind: int,
) -> int:
    """Exchange a task with the task before it, and the corresponding tasks on other ranks.

    Corresponding tasks have the same kinds, microbatches and local stages. On another rank, other
    tasks may be between the two corresponding tasks. A rank stays unchanged if its two tasks are
    already in the new order. It also stays unchanged if a task would pass a task of the same code,
    or of the same stage and microbatch.

    Args:
        low_rank: The first rank to change.
        high_rank: The last rank to change.
        rank_stages: The stages of all ranks, concatenated.
        stage_offsets: The first index of each rank in `rank_stages`, and the number of stages.
        rank_offsets: The first position of each rank, and the total number of tasks.
        codes: The order, changed in place.
        mb_at: The microbatch of each position, before the change.
        rank_at: The rank of each position.
        position: The position of the later task.
        move_behind: 0 to move the later task directly before the earlier task. 1 to move the
            earlier task directly after the later task.

    Returns:
        The number of changed ranks.
    """
    r = rank_at[position]
    code, other_code = codes[position], codes[position - 1]
    mb, other_mb = mb_at[position], mb_at[position - 1]
    local_stage = other_local_stage = -1
    for k in range(stage_offsets[r], stage_offsets[r + 1]):
        if rank_stages[k] == code // 3:
            local_stage = k - stage_offsets[r]
        if rank_stages[k] == other_code // 3:
            other_local_stage = k - stage_offsets[r]
    num_changed = 0
    for q in range(low_rank, high_rank + 1):
        if (
            stage_offsets[q] + local_stage >= stage_offsets[q + 1]
            or stage_offsets[q] + other_local_stage >= stage_offsets[q + 1]
        ):
            continue
        c = 3 * rank_stages[stage_offsets[q] + local_stage] + code % 3
        d = 3 * rank_stages[stage_offsets[q] + other_local_stage] + other_code % 3
        lo = hi = -1
        for y in range(rank_offsets[q], rank_offsets[q + 1]):
            if codes[y] == d and mb_at[y] == other_mb:
                lo = y
            elif codes[y] == c and mb_at[y] == mb:
                hi = y
                break
        if lo < 0 or hi < 0:
            continue
        # No task between the two tasks may have the code, or the stage and microbatch, of the task
        # that moves.
        moving_code, moving_mb = (d, other_mb) if move_behind else (c, mb)
        can_move = 1
        for y in range(lo + move_behind, hi + move_behind):
            if codes[y] == moving_code or (
                codes[y] // 3 == moving_code // 3 and mb_at[y] == moving_mb
            ):
                can_move = 0
                break
        if can_move == 0:
            continue
        if move_behind:
            for y in range(lo, hi):
                codes[y] = codes[y + 1]
            codes[hi] = d
        else:
            for y in range(hi, lo, -1):
                codes[y] = codes[y - 1]
            codes[lo] = c
        num_changed += 1
    return num_changed
