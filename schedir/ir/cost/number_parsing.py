"""Parse numbers that people write, in the digits 0 to 9 only.

Python's `int` and `float` also take the digits of other scripts, `1_000` and `infinity`: what
looks like no number, or like another one, is none here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Final

# What is no number, nor numbers in an order, though Python can make some of it.
NON_NUMBER_TYPES: Final = (str, bytes, bool, Set, Mapping)

# The largest numbers of a model and a cluster.  With larger ones, sums of bytes and operations
# overflow 64 bits, and lists of layers or GPUs take minutes.
MAX_LAYERS: Final = 2**16
MAX_WIDTH: Final = 2**24  # of a matrix, a vocabulary, a sequence or heads
MAX_GPUS: Final = 2**20
MAX_SEQUENCES: Final = 2**30  # of a batch
MIN_RATE, MAX_RATE = 1e-30, 1e30  # of a cluster's bytes, FLOP/s, bytes/s and seconds

_INTEGER_PATTERN = re.compile(r"\s*[+-]?[0-9]{1,18}\s*")
_DECIMAL_PATTERN = re.compile(r"\s*[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\s*")


def parse_integer(text: str) -> int:
    """The whole number that a text says, of at most 18 digits; ValueError for any other text.

    >>> parse_integer("12")
    12
    >>> parse_integer("1_2")
    Traceback (most recent call last):
    ...
    ValueError: '1_2' is no whole number in the digits 0 to 9
    """
    if not _INTEGER_PATTERN.fullmatch(text):
        raise ValueError(f"{text!r:.60} is no whole number in the digits 0 to 9")
    return int(text)


def parse_decimal(text: str) -> float:
    """The number that a text says, as in `2`, `.5` or `1e-3`; ValueError for any other text.

    >>> parse_decimal("1e-3")
    0.001
    """
    if not _DECIMAL_PATTERN.fullmatch(text):
        raise ValueError(f"{text!r:.60} is no number in the digits 0 to 9")
    return float(text)
