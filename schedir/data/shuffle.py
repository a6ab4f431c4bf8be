"""Shuffle the windows of an epoch without a list of them.

A keyed permutation of the numbers below `size` in O(1) memory: a balanced Feistel network (Luby and
Rackoff, SIAM J. Comput. 17, 1988) over the next even number of bits, followed along its cycle until
it is below `size` again (Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002,
section 4).  Its arithmetic is that of whole numbers: any version of any library gives the same.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

_ROUNDS: Final = 8
_MIN_HALF_BITS: Final = 3  # bits of a half: of fewer, there are few permutations

Numbers = NDArray[np.uint64]


def shuffle_indices(indices: Numbers, size: int, seed: int, epoch: int) -> Numbers:
    """Where the `indices`-th numbers below `size` come in the order of an epoch: a permutation.

    >>> shuffle_indices(np.arange(6, dtype=np.uint64), 6, seed=0, epoch=0).tolist()
    [2, 4, 3, 0, 1, 5]
    """
    keys = np.frombuffer(blake2b(f"{seed} {epoch}".encode()).digest(), "<u8")
    half = max(_MIN_HALF_BITS, -(-(size - 1).bit_length() // 2))
    found = _feistel(indices, keys, half)
    while len(over := np.flatnonzero(found >= size)):
        found[over] = _feistel(found[over], keys, half)
    return found


def _feistel(indices: Numbers, keys: Numbers, half: int) -> Numbers:
    """A permutation of the numbers of 2 * `half` bits."""
    bits, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = indices >> bits, indices & mask
    for key in keys[:_ROUNDS]:
        left, right = right, left ^ (_mix_bits(right + key) & mask)
    return (left << bits) | right


def _mix_bits(x: Numbers) -> Numbers:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
