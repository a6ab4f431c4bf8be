"""Find runs of instructions that use the same stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.ir.isa.instructions import Opcode
from schedir.ir.program import STAGE_SHIFT, Program
from schedir.passes.insertion import find_ranks

Ints = NDArray[np.int64]


class StageRuns(NamedTuple):
    """The stages of each run, over all ranks.

    If a run consists of groups of joined instructions, its stages are the stages of one group.

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

    A run ends before an instruction that has one of these opcodes and belongs to a different stage.
    Instructions with other opcodes do not end a run.

    Args:
        program: The program.
        ops: The opcodes.
    """
    positions = np.flatnonzero(np.isin(program.op, ops))
    stage = program.words[positions] >> STAGE_SHIFT & 0xFFFF
    is_trained = stage >= program.frozen_stages
    positions, stage = positions[is_trained], stage[is_trained]
    group = np.cumsum(~program.joined)[positions]
    order = np.lexsort((stage, group))  # the next lines keep each stage of a group once
    positions, stage, group = positions[order], stage[order], group[order]
    is_first = _is_changed(group) | _is_changed(stage)
    positions, stage, group = positions[is_first], stage[is_first], group[is_first]
    rank = find_ranks(program, positions)
    group_ends = np.flatnonzero(np.append(~program.joined[1:], True)) + 1
    end = group_ends[np.searchsorted(group_ends, positions, side="right")]

    group_starts = np.flatnonzero(_is_changed(group))
    group_size = np.diff(np.append(group_starts, len(positions)))
    previous_start = np.append(0, group_starts)[:-1]  # the start of the previous group
    is_same_run = group_size == np.append(0, group_size)[:-1]
    is_same_run &= rank[group_starts] == rank[previous_start]
    if len(group_starts):
        distance = np.repeat(previous_start - group_starts, group_size)
        previous_entry = np.minimum(distance + np.arange(len(positions)), len(positions) - 1)
        is_same_run &= np.logical_and.reduceat(stage == stage[previous_entry], group_starts)
    # True for the entries of the last group of each run.
    is_last = np.repeat(np.append(~is_same_run[1:], True)[: len(is_same_run)], group_size)
    run = np.repeat(np.cumsum(~is_same_run) - 1, group_size)
    return StageRuns(rank[is_last], run[is_last], stage[is_last], end[is_last])


def number_occurrences(keys: Ints) -> Ints:
    """Return, for each number of a list, how often it occurs earlier in the list.

    Args:
        keys: The numbers, shape (k,).

    Returns:
        Counts from 0, shape (k,).
    """
    order = np.argsort(keys, kind="stable")
    occurrence = np.empty(len(keys), np.int64)
    occurrence[order] = np.arange(len(keys)) - np.searchsorted(keys[order], keys[order])
    return occurrence


def _is_changed(numbers: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the first number and of each number that differs from the previous one."""
    return np.append(True, numbers[1:] != numbers[:-1])[: len(numbers)]
