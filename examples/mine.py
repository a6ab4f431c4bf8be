"""A schedule of pairs: two forwards, then two backwards.

schedir draw examples/mine.py:in_pairs --ranks 4 --microbatches 8
"""

from collections.abc import Iterator

from schedir import B, F, RankSchedule


def in_pairs(rank: int, ranks: int, microbatches: int) -> Iterator[RankSchedule]:
    """Return two forwards, then two backwards, and so on: a loss could use both microbatches."""
    lead = min(2 * (ranks - 1 - rank), microbatches)
    yield lead * F
    for _ in range((microbatches - lead) // 2):
        yield 2 * F
        yield 2 * B
    yield (microbatches - lead) % 2 * (F + B) + lead * B
