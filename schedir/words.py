"""The words that a schedule is written in, and the functions that join them."""

from schedir.schedules.words import (
    EMPTY,
    B,
    F,
    I,
    R,
    W,
    Word,
    delayed,
    join,
    overlap,
    placed,
    weave,
)

__all__ = [
    "EMPTY",
    "B",
    "F",
    "I",
    "R",
    "W",
    "Word",
    "delayed",
    "join",
    "overlap",
    "placed",
    "weave",
]
