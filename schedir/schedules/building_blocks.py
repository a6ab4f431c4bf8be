"""V-Half, V-Min and waves: schedules that repeat a building block.

A building block lists the time slots in which a rank processes one microbatch. The distances
between these slots determine the memory. See Qi et al., "Pipeline Parallelism with Controllable
Memory" (arXiv 2405.15362).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np

from schedir.errors import ScheduleError
from schedir.schedules.schedule_algebra import B, F, I, RankSchedule, W, concat, with_placement

Block = Callable[[int, int], tuple[int, int, int, int]]

_LETTERS = (F[0], F[1], I[1], I[0], W[1], W[0])  # The W of the I at index k is at index k + 2.


@with_placement("vee")
def wave(r: int, P: int, m: int, v: int) -> RankSchedule:
    """Run Hanayo's waves: each microbatch passes down the ranks and back v / 2 times.

    P microbatches form a wave. If a rank would be idle during a wave, it runs later microbatches.
    If B differs from F, each wave adds idle time. So the schedule is best with m = P. The order is
    derived from the paper, not from its code.

    - Idle time of each rank, if P divides m: (P-1)(2 min(F,B) + 2(m/P)|B-F|).
    - In flight, if m >= P: (v-1)P + r+1 stage activations on rank r.

    Args:
        r: Rank, 0 to P - 1.
        P: Number of ranks.
        m: Number of microbatches.
        v: Number of stages on each rank. It must be even.

    Returns:
        The rank schedule of rank `r`.

    Raises:
        ScheduleError: `v` is odd.

    References:
        arXiv 2308.15762.

    Example:
        >>> from schedir.schedules import wave
        >>> from schedir.viz.doctest_chart import draw_schedule
        >>> print(draw_schedule(wave, ranks=2, microbatches=2, placement="vee"))
        rank 0  F0  F1  ..  F0' B0' --  F1' B1' --  ..  B0  --  ..  ..  B1  --
        rank 1  ..  F0  F0' F1  F1' ..  B0' --  B0  --  B1' --  B1  --  ..  ..
    """
    if v % 2:
        raise ScheduleError(f"a wave needs an even stages_per_rank (v), not {v}")
    local_stages = [j * P + (P - 1 - r if j % 2 else r) for j in range(v)]
    block = [(s, F[j]) for j, s in enumerate(local_stages)]
    block += [(2 * v * P - 1 - s, B[j]) for j, s in enumerate(local_stages)]
    # A microbatch starts in every second slot. So on each rank, the forwards of even local stages
    # and the forwards of odd local stages have slots of different parity. P microbatches fill a
    # wave.
    starts = [k // P * 2 * v * P + k % P * 2 for k in range(m)]
    return order_by_slot((slot + start, letter) for slot, letter in block for start in starts)


def order_by_slot(slots: Iterable[tuple[int, RankSchedule]]) -> RankSchedule:
    """Sort rank schedules by their slots, and concatenate them.

    Args:
        slots: Pairs of a slot and the rank schedule that runs in it.

    Returns:
        All these rank schedules, in ascending order of their slots.
    """
    return RankSchedule(np.concatenate([w.letters for _, w in sorted(slots, key=lambda s: s[0])]))


@with_placement("vee", 2)
def v_half(r: int, P: int, m: int) -> RankSchedule:
    """Run V-Half, which needs about half of the memory of 1F1B on many ranks.

    For m = P up to 8, a constraint solver found that no order with this memory has less idle time.
    If all messages of a rank share a queue, give `compile` the costs of your model. The costs
    determine the order of the messages.

    - Idle time of each rank, if F = I = W and m >= P: (3P-7) F for an even P >= 4. For an odd
      P >= 3: (3P-4) F. 1F1B has 6(P-1) F for the same model, because its stages take twice as long.
    - At other costs, each microbatch adds the idle time max(0, 2F-W-2I, 2I-W-2F).
    - In flight: at most 2(P//2 + 1) stage activations on each rank.

    Args:
        r: Rank, 0 to P - 1.
        P: Number of ranks.
        m: Number of microbatches.

    Returns:
        The rank schedule of rank `r`.

    References:
        arXiv 2405.15362, "V-shape building blocks".

    Example:
        >>> from schedir.schedules import v_half
        >>> from schedir.viz.doctest_chart import draw_schedule
        >>> print(draw_schedule(v_half, ranks=2, microbatches=3, placement="vee"))
        rank 0  F0  F1  ..  F0' I0' F1' W0' F2  I0  I1' W0  F2' I2' I1  W1' I2  W2' W1  W2
        rank 1  ..  F0  F0' F1  F1' I0' W0' I0  W0  F2  F2' I1' I1  I2' I2  W1' W1  W2' W2
    """
    max_lead = 2 * P - 2 if P % 2 else 2 * P + 1
    return _repeat_block(_v_half_block, P, m, 2 * (P // 2 + 1), max_lead)[r]


@with_placement("vee", 2)
def v_min(r: int, P: int, m: int) -> RankSchedule:
    """Run V-Min, which needs about a third of the memory of 1F1B on many ranks.

    The schedule is efficient only if F, I and W are similar.

    - Idle time of each rank, if F = I = W and m >= P >= 2: (4P-7) F, or (4P-5) F if P = 1 modulo 3.
      1F1B has 6(P-1) F for the same model, because its stages take twice as long.
    - At other costs, each microbatch adds the idle time 6 max(F, I) - 2(F+I+W), if P >= 3 and
      W <= max(F, I).
    - In flight: at most 2((P+1)//3 + 1) stage activations on each rank.

    Args:
        r: Rank, 0 to P - 1.
        P: Number of ranks.
        m: Number of microbatches.

    Returns:
        The rank schedule of rank `r`.

    References:
        arXiv 2405.15362, "V-shape building blocks".

    Example:
        >>> from schedir.schedules import v_min
        >>> from schedir.viz.doctest_chart import draw_schedule
        >>> print(draw_schedule(v_min, ranks=2, microbatches=3, placement="vee"))
        rank 0  F0  F1  ..  F0' I0' F1' I1' I0  W0' F2  I1  W1' W0  F2' I2' W1  W2' I2  W2
        rank 1  ..  F0  F0' F1  F1' I0' I0  I1' I1  W0' F2  W0  F2' W1' W1  I2' I2  W2' W2
    """
    return _repeat_block(_v_min_block, P, m, 2 * ((P + 1) // 3 + 1), (2, 0, 4)[P % 3])[r]


def _v_half_block(r: int, P: int) -> tuple[int, int, int, int]:
    d = 0 if P % 2 else 3  # The slots of a rank must differ modulo 6.
    return 2 * r, 3 * P - r - 2, 3 * P + d + 2 * r - 1, 6 * P + d - r - 2


def _v_min_block(r: int, P: int) -> tuple[int, int, int, int]:
    d = 0 if P % 3 else 2
    return r, 2 * P - r - 1, 2 * P + d + r, 4 * P + d - r - 1


@lru_cache(maxsize=4)
def _repeat_block(
    block: Block, P: int, m: int, capacity: int, max_lead: int
) -> tuple[RankSchedule, ...]:
    """Return the order of each rank: F and I in the slots of `block`, and W between them.

    The order of a microbatch on a rank is F0, F1, I1, I0. Microbatches follow each other at a
    distance of six slots. In each slot, a rank runs the ready instruction that is first in the
    block. If no instruction of the block is ready, the rank runs its oldest W. At most `capacity`
    stage activations are in flight. At most `capacity` - 1 of these belong to F0, so that F1 can
    always run.

    Instructions that run before their slots shorten the warmup and the end. Between the warmup and
    the end, an instruction starts at most `max_lead` slots before its slot in the block. So the
    distances of the block, which tolerate unequal costs, change little in this middle part. The
    part begins at slot 3P of the block, and ends 2P slots after the first slot of the last
    microbatch.
    """
    cooldown_start = 6 * (m - 1) + 2 * P
    start_slots = [block(r, P) for r in range(P)]
    # A microbatch passes through the F of each stage, and then through the I of each stage.  Each
    # rank has four links of this chain.
    links = [(r, 2 * P - 1 - r, 2 * P + r, 4 * P - 1 - r) for r in range(P)]
    passed_counts = [0] * (4 * P)  # Number of microbatches that have passed each link.
    live_counts = [[0, 0] for _ in range(P)]  # Activations of each of the two local stages.
    pending_weights: list[deque[int]] = [deque() for _ in range(P)]
    letters_per_rank: list[list[int]] = [[] for _ in range(P)]
    slot = 0
    while min(passed_counts) < m or any(pending_weights):
        arrived_counts = [m, *passed_counts[:-1]]
        for r, rank_links in enumerate(links):
            has_memory = sum(live_counts[r]) < capacity
            may_start = (has_memory and live_counts[r][0] < capacity - 1, has_memory, True, True)
            slots = [
                (start_slots[r][k] + 6 * passed_counts[c], k)
                for k, c in enumerate(rank_links)
                if may_start[k] and passed_counts[c] < arrived_counts[c]
            ]
            slots = [
                s for s in slots if s[0] <= slot + max_lead or not 3 * P <= s[0] <= cooldown_start
            ]
            if slots:
                _, k = min(slots)
                passed_counts[rank_links[k]] += 1
                if k < 2:
                    live_counts[r][k] += 1
                else:
                    pending_weights[r].append(k + 2)
            elif pending_weights[r]:
                k = pending_weights[r].popleft()
                live_counts[r][5 - k] -= 1
            else:
                continue
            letters_per_rank[r].append(k)
        slot += 1
    return tuple(concat(_LETTERS[k] for k in letters) for letters in letters_per_rank)
