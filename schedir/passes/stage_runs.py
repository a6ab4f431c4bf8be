"""Find runs of instructions that use the same stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.ir.isa.instructions import Opcode
from schedir.ir.program import STAGE_SHIFT, Program

Ints = NDArray[np.int64]


class StageRuns(NamedTuple):
    """The stages of each run, over all ranks.

    If a run consists of groups of joined instructions, the run has all stages of such a group.

    Attributes:
        rank: The rank of each entry, shape (entries,).
        run: The number of the run of each entry.
        stage: The stage of each entry. A run has an entry for each of its stages.
        end: The position after the last instruction of the run.
    """

    rank: Ints
    run: Ints
    stage: Ints
    end: Ints

    @property
    def max_stages(self) -> int:
        """The largest number of stages of a run."""
        return int(np.bincount(self.run).max(initial=0))


def find_stage_runs(program: Program, ops: Sequence[Opcode]) -> StageRuns:
    """Find the runs of instructions with given opcodes, on trained stages.

    A run ends before an instruction with such an opcode on another stage. Instructions with other
    opcodes do not end a run.

    Args:
        program: The program.
        ops: The opcodes.
    """
    group = np.cumsum(~program.joined)
    at = np.flatnonzero(np.isin(program.op, ops))
    at = at[(program.words[at] >> STAGE_SHIFT & 0xFFFF) >= program.frozen_stages]
    stage = program.words[at] >> STAGE_SHIFT & 0xFFFF
    order = np.lexsort((stage, group[at]))  # the next lines keep each stage of a group once
    at, stage, group = at[order], stage[order], group[at[order]]
    once = _is_changed(group) | _is_changed(stage)
    at, stage, group = at[once], stage[once], group[once]
    rank = np.searchsorted(program.offsets, at, side="right") - 1
    ends = np.flatnonzero(np.append(~program.joined[1:], True)) + 1
    end = ends[np.searchsorted(ends, at, side="right")]

    begins = np.flatnonzero(_is_changed(group))
    size = np.diff(np.append(begins, len(at)))
    before = np.append(0, begins)[:-1]  # the start of the previous group
    same = (size == np.append(0, size)[:-1]) & (rank[begins] == rank[before])
    if len(begins):
        there = np.minimum(np.repeat(before - begins, size) + np.arange(len(at)), len(at) - 1)
        same &= np.logical_and.reduceat(stage == stage[there], begins)
    last = np.repeat(np.append(~same[1:], True)[: len(same)], size)  # the last group of each run
    step = np.repeat(np.cumsum(~same) - 1, size)
    return StageRuns(rank[last], step[last], stage[last], end[last])


def number_occurrences(keys: Ints) -> Ints:
    """Return, for each number of a list, how often it occurs earlier in the list.

    Args:
        keys: The numbers, shape (k,).

    Returns:
        Counts from 0, shape (k,).
    """
    order = np.argsort(keys, kind="stable")
    turn = np.empty(len(keys), np.int64)
    turn[order] = np.arange(len(keys)) - np.searchsorted(keys[order], keys[order])
    return turn


def _is_changed(numbers: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the numbers that differ from the previous one."""
    return np.append(True, numbers[1:] != numbers[:-1])[: len(numbers)]
