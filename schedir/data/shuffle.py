"""Shuffle the windows of an epoch without a list of them.

The shuffle is a keyed permutation of the integers below `size` in O(1) memory. The permutation is a
balanced Feistel network over an even number of bits, enough for all integers below `size`. Results
that are not below `size` pass through the network again (cycle walking). All arithmetic is on
integers, so every version of every library gives the same result.

References:
    Luby and Rackoff, SIAM J. Comput. 17, 1988. Black and Rogaway, Ciphers with Arbitrary Finite
    Domains, CT-RSA 2002, section 4.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

_ROUNDS: Final = 8  # rounds of the network, one for each 64-bit key of a blake2b digest
_MIN_HALF_BITS: Final = 3  # Bits of half an index. With fewer bits there are few permutations.

Numbers = NDArray[np.uint64]


def shuffle_indices(indices: Numbers, size: int, seed: int, epoch: int) -> Numbers:
    """Return the indices of the windows at some positions of an epoch's random order.

    Args:
        indices: Positions in the epoch, below `size`. Shape (n,).
        size: The number of windows.
        seed: The random seed.
        epoch: The epoch, from 0.

    Returns:
        The indices of the windows, below `size`. Shape (n,).

    Example:
        >>> shuffle_indices(np.arange(6, dtype=np.uint64), 6, seed=0, epoch=0).tolist()
        [2, 4, 3, 0, 1, 5]
    """
    keys = np.frombuffer(blake2b(f"{seed} {epoch}".encode()).digest(), "<u8")
    half_bits = max(_MIN_HALF_BITS, -(-(size - 1).bit_length() // 2))
    numbers = _feistel(indices, keys, half_bits)
    while len(outside_indices := np.flatnonzero(numbers >= size)):
        numbers[outside_indices] = _feistel(numbers[outside_indices], keys, half_bits)
    return numbers


def _feistel(indices: Numbers, keys: Numbers, half_bits: int) -> Numbers:
    """Return a permutation of the integers of 2 * `half_bits` bits."""
    bits, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = indices >> bits, indices & mask
    for key in keys[:_ROUNDS]:
        left, right = right, left ^ (_mix_bits(right + key) & mask)
    return (left << bits) | right


def _mix_bits(x: Numbers) -> Numbers:
    """Mix bits with the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
