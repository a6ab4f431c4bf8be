"""V-Half and V-Min: schedules that repeat a building block (arXiv 2405.15362).

Qi et al., "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362): what a microbatch
does on a rank is fixed in slots, and how far apart they are decides the memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np

from schedir.errors import ScheduleError
from schedir.schedules.schedule_algebra import B, F, I, RankSchedule, W, concat, with_placement

Block = Callable[[int, int], tuple[int, int, int, int]]

_LETTERS = (F[0], F[1], I[1], I[0], W[1], W[0])  # W two places after its I


@with_placement("vee")
def wave(r: int, P: int, m: int, v: int) -> RankSchedule:
    """Hanayo's waves: v = 2w stages per rank, down the ranks and back w times (arXiv 2308.15762).

    Known from the paper's idea, not from its code: P microbatches make a wave, and further ones
    follow in the slots that it leaves.  Where P divides m, ranks idle (P-1)(2 min(F,B) +
    2(m/P)|B-F|), whatever v: at F = B that is `interleaved`'s bubble.  Elsewhere each wave costs
    anew, so it suits m = P.  (v-1)P + r+1 stage activations in flight, for m >= P.

    >>> from schedir.schedules import wave
    >>> from schedir.viz.doctest_chart import draw_schedule
    >>> print(draw_schedule(wave, ranks=2, microbatches=2, placement="vee"))
    rank 0  F0  F1  ..  F0' B0' --  F1' B1' --  ..  B0  --  ..  ..  B1  --
    rank 1  ..  F0  F0' F1  F1' ..  B0' --  B0  --  B1' --  B1  --  ..  ..
    """
    if v % 2:
        raise ScheduleError(f"a wave goes down and back: v must be even, not {v}")
    own = [j * P + (P - 1 - r if j % 2 else r) for j in range(v)]
    block = [(s, F[j]) for j, s in enumerate(own)]
    block += [(2 * v * P - 1 - s, B[j]) for j, s in enumerate(own)]
    # A microbatch every other slot: down and back fall on odd and even ones.  P fill the wave.
    starts = [k // P * 2 * v * P + k % P * 2 for k in range(m)]
    return order_by_slot((slot + start, word) for slot, word in block for start in starts)


def order_by_slot(slots: Iterable[tuple[int, RankSchedule]]) -> RankSchedule:
    """What a rank does, by slot."""
    return RankSchedule(np.concatenate([w.letters for _, w in sorted(slots, key=lambda s: s[0])]))


@with_placement("vee", 2)
def v_half(r: int, P: int, m: int) -> RankSchedule:
    """V-Half: half of 1F1B's memory (arXiv 2405.15362, "V-shape building blocks").

    2(P//2 + 1) stage activations in flight at most.  At F = I = W and m >= P ranks idle
    (3P-7) F for even P >= 4 and (3P-4) F for odd P >= 3: less than half of 1F1B's 6(P-1), and the
    least that this memory allows, as a constraint solver finds for m = P up to 8.  That grows by
    max(0, 2F-W-2I, 2I-W-2F) with each microbatch.  There is no slack, so where all messages of a
    rank share a queue, compile it at its own costs.

    >>> from schedir.schedules import v_half
    >>> from schedir.viz.doctest_chart import draw_schedule
    >>> print(draw_schedule(v_half, ranks=2, microbatches=3, placement="vee"))
    rank 0  F0  F1  ..  F0' I0' F1' W0' F2  I0  I1' W0  F2' I2' I1  W1' I2  W2' W1  W2
    rank 1  ..  F0  F0' F1  F1' I0' W0' I0  W0  F2  F2' I1' I1  I2' I2  W1' W1  W2' W2
    """
    early = 2 * P - 2 if P % 2 else 2 * P + 1
    return _repeat_block(_v_half_block, P, m, 2 * (P // 2 + 1), early)[r]


@with_placement("vee", 2)
def v_min(r: int, P: int, m: int) -> RankSchedule:
    """V-Min: a third of 1F1B's memory (arXiv 2405.15362, "V-shape building blocks").

    2((P+1)//3 + 1) stage activations in flight at most.  At F = I = W and m >= P >= 2 ranks idle
    (4P-7) F, or (4P-5) F where P = 1 modulo 3: two thirds of 1F1B's 6(P-1).  It needs costs that
    are alike: for P >= 3 and W <= max(F, I) each microbatch adds 6 max(F, I) - 2(F+I+W).

    >>> from schedir.schedules import v_min
    >>> from schedir.viz.doctest_chart import draw_schedule
    >>> print(draw_schedule(v_min, ranks=2, microbatches=3, placement="vee"))
    rank 0  F0  F1  ..  F0' I0' F1' I1' I0  W0' F2  I1  W1' W0  F2' I2' W1  W2' I2  W2
    rank 1  ..  F0  F0' F1  F1' I0' I0  I1' I1  W0' F2  W0  F2' W1' W1  I2' I2  W2' W2
    """
    return _repeat_block(_v_min_block, P, m, 2 * ((P + 1) // 3 + 1), (2, 0, 4)[P % 3])[r]


def _v_half_block(r: int, P: int) -> tuple[int, int, int, int]:
    d = 0 if P % 2 else 3  # keeps slots apart modulo 6
    return 2 * r, 3 * P - r - 2, 3 * P + d + 2 * r - 1, 6 * P + d - r - 2


def _v_min_block(r: int, P: int) -> tuple[int, int, int, int]:
    d = 0 if P % 3 else 2
    return r, 2 * P - r - 1, 2 * P + d + r, 4 * P + d - r - 1


@lru_cache(maxsize=4)
def _repeat_block(
    block: Block, P: int, m: int, capacity: int, max_lead: int
) -> tuple[RankSchedule, ...]:
    """Every rank's word: F0, F1, I1, I0 as `block` says, six slots a microbatch, W in between.

    Slot by slot, a rank does what is ready and comes first in the block, or else its oldest W;
    at most `capacity` stage activations are in flight, and F0 leaves one of them to F1.  So both
    ends are squeezed.  In the middle, from the block's slot 3P to 2P slots after the last
    microbatch's first, nothing starts more than `max_lead` slots ahead of the block: its rhythm,
    which bears unequal costs, is kept, and begins as soon as the room allows.
    """
    cool = 6 * (m - 1) + 2 * P
    begin = [block(r, P) for r in range(P)]
    # A microbatch goes through F of each stage, then I of each; four of these links are a rank's.
    links = [(r, 2 * P - 1 - r, 2 * P + r, 4 * P - 1 - r) for r in range(P)]
    passed = [0] * (4 * P)  # how many microbatches have
    alive = [[0, 0] for _ in range(P)]  # activations of either own stage
    owed: list[deque[int]] = [deque() for _ in range(P)]
    said: list[list[int]] = [[] for _ in range(P)]
    now = 0
    while min(passed) < m or any(owed):
        ready = [m, *passed[:-1]]
        for r, own in enumerate(links):
            fits = sum(alive[r]) < capacity
            may = (fits and alive[r][0] < capacity - 1, fits, True, True)
            slots = [
                (begin[r][k] + 6 * passed[c], k)
                for k, c in enumerate(own)
                if may[k] and passed[c] < ready[c]
            ]
            slots = [s for s in slots if s[0] <= now + max_lead or not 3 * P <= s[0] <= cool]
            if slots:
                _, k = min(slots)
                passed[own[k]] += 1
                if k < 2:
                    alive[r][k] += 1
                else:
                    owed[r].append(k + 2)
            elif owed[r]:
                k = owed[r].popleft()
                alive[r][5 - k] -= 1
            else:
                continue
            said[r].append(k)
        now += 1
    return tuple(concat(_LETTERS[k] for k in own) for own in said)
