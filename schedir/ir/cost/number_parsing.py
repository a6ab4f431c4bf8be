"""Parse numbers that users type, in the digits 0 to 9 only.

Python's `int` and `float` also accept the digits of other scripts, `1_000` and `infinity`. This
module refuses such texts, because a reader may misunderstand them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Final

# Types that are neither numbers nor ordered collections of numbers.  Python would convert some
# values of these types to numbers.
NON_NUMBER_TYPES: Final = (str, bytes, bool, Set, Mapping)

# The largest numbers of a model and a cluster.  With larger numbers, sums of bytes and operations
# overflow 64 bits, and loops over layers or GPUs take minutes.
MAX_LAYERS: Final = 2**16
# Number of rows of a matrix, of tokens of a vocabulary or a sequence, or of heads.
MAX_WIDTH: Final = 2**24
MAX_GPUS: Final = 2**20
MAX_SEQUENCES: Final = 2**30  # Number of sequences of a batch.
MIN_RATE, MAX_RATE = 1e-30, 1e30  # Range of a cluster's bytes, FLOP/s, bytes/s and seconds.

_INTEGER_PATTERN = re.compile(r"\s*[+-]?[0-9]{1,18}\s*")
_DECIMAL_PATTERN = re.compile(r"\s*[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\s*")


def parse_integer(text: str) -> int:
    """Parse an integer.

    Args:
        text: A sign, at most 18 digits, and spaces around them.

    Returns:
        The integer.

    Raises:
        ValueError: The text has another form.

    Example:
        >>> parse_integer("12")
        12
        >>> parse_integer("1_2")
        Traceback (most recent call last):
        ...
        ValueError: '1_2' is not an integer
    """
    if not _INTEGER_PATTERN.fullmatch(text):
        raise ValueError(f"{text!r:.60} is not an integer{_describe_digits(text)}")
    return int(text)


def parse_decimal(text: str) -> float:
    """Parse a decimal number.

    Args:
        text: A number such as `2`, `.5` or `1e-3`, and spaces around it.

    Returns:
        The number.

    Raises:
        ValueError: The text has another form.

    Example:
        >>> parse_decimal("1e-3")
        0.001
    """
    if not _DECIMAL_PATTERN.fullmatch(text):
        raise ValueError(f"{text!r:.60} is not a number{_describe_digits(text)}")
    return float(text)


def _describe_digits(text: str) -> str:
    """Return the end of an error message: a remark if the text is not ASCII, or else ""."""
    return "" if text.isascii() else " in the digits 0 to 9"
