"""A deadlock between two ranks, which schedir finds without a run.

    schedir check examples/deadlock.py:wrong_warmup --ranks 2 --microbatches 4

In 1F1B, the first rank runs the most forwards before its first backward. In this schedule, the last
rank runs the most forwards first. Rank 0 waits for a gradient, and rank 1 waits for an activation.
"""

from schedir import B, F, RankSchedule


def wrong_warmup(rank: int, ranks: int, microbatches: int) -> RankSchedule:
    """Return 1F1B with the warmup of the opposite rank."""
    warmup = min(rank, microbatches)  # right is: ranks - 1 - rank
    return warmup * F + (microbatches - warmup) * (F + B) + warmup * B
