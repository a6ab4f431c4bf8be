"""A schedule in your own file: two forwards, then two backwards, and so on.

schedir draw examples/mine.py:in_pairs --ranks 4 --microbatches 8
"""

from collections.abc import Iterator

from schedir import B, F, RankSchedule


def in_pairs(rank: int, ranks: int, microbatches: int) -> Iterator[RankSchedule]:
    """Yield two forwards, then two backwards, and so on, for a loss of two microbatches."""
    warmup = min(2 * (ranks - 1 - rank), microbatches)
    yield warmup * F
    for _ in range((microbatches - warmup) // 2):
        yield 2 * F
        yield 2 * B
    yield (microbatches - warmup) % 2 * (F + B) + warmup * B
