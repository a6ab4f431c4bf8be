"""A deadlock of two ranks. `schedir check` finds it without a run.

    schedir check examples/deadlock.py:wrong_warmup --ranks 2 --microbatches 4

In 1F1B, the first rank runs the most forwards before its first backward: its warmup is the longest.
In this schedule, the warmup of the last rank is the longest. So rank 0 waits for a gradient, and
rank 1 waits for an activation.
"""

from schedir import B, F, RankSchedule


def wrong_warmup(rank: int, ranks: int, microbatches: int) -> RankSchedule:
    """Return 1F1B with the warmup of the opposite rank."""
    warmup = min(rank, microbatches)  # the mistake: 1F1B has ranks - 1 - rank
    return warmup * F + (microbatches - warmup) * (F + B) + warmup * B
