"""Insert instructions before or after others, without splitting groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedir.ir.program import Program, StreamSlices, Words


def behind(program: Program, at: NDArray[Any], words: Words) -> Program:
    """The program with words put behind given positions, or behind the whole group of each."""
    ranks = _ranks(program, at)
    if (joined := program.joined).any():
        last = np.flatnonzero(np.append(~joined[1:], True))
        at = last[np.searchsorted(last, at)]
    return at_places(program, at + 1, ranks, words)


def before(program: Program, at: NDArray[Any], words: Words) -> Program:
    """The program with words put before given positions, or before the whole group of each."""
    ranks = _ranks(program, at)
    if (joined := program.joined).any():
        first = np.flatnonzero(~joined)
        at = first[np.searchsorted(first, at, side="right") - 1]
    return at_places(program, at, ranks, words)


def at_ends(program: Program, ranks: Words, words: Words) -> Program:
    """The program with words at the ends of the Streams of given ranks."""
    return at_places(program, program.offsets[ranks + 1], ranks, words)


def _ranks(program: Program, at: NDArray[Any]) -> Words:
    return np.searchsorted(program.offsets, at, side="right") - 1


def at_places(program: Program, at: NDArray[Any], ranks: Words, words: Words) -> Program:
    """The program with words of given ranks at places between others: before the position `at`.  Of
    several at one place, those of lower ranks come first, and else they are in the order told."""
    order = np.lexsort((ranks, at))
    offsets = program.offsets.copy()
    offsets[1:] += np.cumsum(np.bincount(ranks, minlength=program.shape.ranks))
    streams = StreamSlices.at(np.insert(program.words, at[order], words[order]), offsets)
    return replace(program, streams=streams)
