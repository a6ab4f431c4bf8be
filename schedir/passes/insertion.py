"""Insert instructions before or after others, without splitting groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedir.ir.program import Program, StreamSlices, Words


def insert_after(program: Program, positions: NDArray[Any], words: Words) -> Program:
    """The program with words put behind given positions, or behind the whole group of each."""
    ranks = _find_ranks(program, positions)
    if (joined := program.joined).any():
        last = np.flatnonzero(np.append(~joined[1:], True))
        positions = last[np.searchsorted(last, positions)]
    return insert_at_positions(program, positions + 1, ranks, words)


def insert_before(program: Program, positions: NDArray[Any], words: Words) -> Program:
    """The program with words put before given positions, or before the whole group of each."""
    ranks = _find_ranks(program, positions)
    if (joined := program.joined).any():
        first = np.flatnonzero(~joined)
        positions = first[np.searchsorted(first, positions, side="right") - 1]
    return insert_at_positions(program, positions, ranks, words)


def append_to_streams(program: Program, ranks: Words, words: Words) -> Program:
    """The program with words at the ends of the Streams of given ranks."""
    return insert_at_positions(program, program.offsets[ranks + 1], ranks, words)


def _find_ranks(program: Program, positions: NDArray[Any]) -> Words:
    return np.searchsorted(program.offsets, positions, side="right") - 1


def insert_at_positions(
    program: Program, positions: NDArray[Any], ranks: Words, words: Words
) -> Program:
    """The program with words of given ranks at places between others: before the position
    `positions`.  Of several at one place, those of lower ranks come first, and else they are in the
    order told."""
    order = np.lexsort((ranks, positions))
    offsets = program.offsets.copy()
    offsets[1:] += np.cumsum(np.bincount(ranks, minlength=program.shape.ranks))
    streams = StreamSlices.from_words(
        np.insert(program.words, positions[order], words[order]), offsets
    )
    return replace(program, streams=streams)
