"""Compute block counts of kernel launches in plain Python, faster than `triton.cdiv` does."""

from __future__ import annotations


def count_blocks(n: int, block_size: int) -> int:
    """Return the number of blocks that n elements need.

    Args:
        n: The number of elements.
        block_size: The number of elements in a block.

    Example:
        >>> [count_blocks(n, 4) for n in (1, 4, 5)]
        [1, 1, 2]
    """
    return -(-n // block_size)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n.

    Args:
        n: A positive integer.

    Example:
        >>> [next_power_of_2(n) for n in (1, 2, 3, 4, 5)]
        [1, 2, 4, 4, 8]
    """
    return 1 << (n - 1).bit_length()
