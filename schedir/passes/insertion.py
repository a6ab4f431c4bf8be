"""Insert instructions before or after others, without splitting groups of joined instructions.

A word is an instruction that is packed into an int64 number.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedir.ir.program import JOINED_BIT, Program, StreamSlices, Words


def insert_after(program: Program, positions: NDArray[Any], words: Words) -> Program:
    """Insert words after given positions.

    A word for a position inside a group of joined instructions comes after the group.

    Args:
        program: The program.
        positions: Positions of instructions, shape (k,).
        words: The words to insert, shape (k,).
    """
    ranks = find_ranks(program, positions)
    if (joined := program.joined).any():
        group_ends = np.flatnonzero(np.append(~joined[1:], True))
        positions = group_ends[np.searchsorted(group_ends, positions)]
    return insert_at_positions(program, positions + 1, ranks, words)


def insert_before(program: Program, positions: NDArray[Any], words: Words) -> Program:
    """Insert words before given positions.

    A word for a position inside a group of joined instructions comes before the group.

    Args:
        program: The program.
        positions: Positions of instructions, shape (k,).
        words: The words to insert, shape (k,).
    """
    ranks = find_ranks(program, positions)
    if (joined := program.joined).any():
        group_starts = np.flatnonzero(~joined)
        positions = group_starts[np.searchsorted(group_starts, positions, side="right") - 1]
    return insert_at_positions(program, positions, ranks, words)


def append_to_streams(program: Program, ranks: Words, words: Words) -> Program:
    """Append words to the Streams of given ranks.

    Args:
        program: The program.
        ranks: The rank of each word, shape (k,).
        words: The words to append, shape (k,).
    """
    return insert_at_positions(program, program.offsets[ranks + 1], ranks, words)


def find_ranks(program: Program, positions: NDArray[Any]) -> Words:
    """Return the ranks of given positions.

    Args:
        program: The program.
        positions: Positions of instructions, shape (k,).
    """
    return np.searchsorted(program.offsets, positions, side="right") - 1


def insert_at_positions(
    program: Program, positions: NDArray[Any], ranks: Words, words: Words
) -> Program:
    """Insert words into the Streams of given ranks, before given positions.

    Words at the same position are sorted by rank, and words of one rank keep their given order.

    Args:
        program: The program.
        positions: The position before which each word is inserted, shape (k,). The position after
            the last instruction of a Stream is valid.
        ranks: The rank of each word, shape (k,).
        words: The words to insert, shape (k,).
    """
    order = np.lexsort((ranks, positions))
    offsets = program.offsets.copy()
    offsets[1:] += np.cumsum(np.bincount(ranks, minlength=program.shape.ranks))
    streams = StreamSlices.from_words(
        np.insert(program.words, positions[order], words[order]), offsets
    )
    return replace(program, streams=streams)


def drop_instructions(program: Program, is_dropped: NDArray[np.bool_]) -> Program:
    """Drop instructions. An instruction that was joined with a dropped one runs alone.

    Args:
        program: The program. It is not changed.
        is_dropped: True for each instruction to drop, shape (instructions,).
    """
    words = program.words.copy()
    words[1:][is_dropped[:-1]] &= ~JOINED_BIT
    dropped_counts = np.append(0, np.cumsum(is_dropped))[program.offsets]
    streams = StreamSlices.from_words(words[~is_dropped], program.offsets - dropped_counts)
    return replace(program, streams=streams)
