"""Find runs of consecutive instructions of the same stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.ir.isa.instructions import Opcode
from schedir.ir.program import STAGE_SHIFT, Program

Ints = NDArray[np.int64]


class StageRuns(NamedTuple):
    """Each `stage` of each run, by the number of the run (`run`), over all ranks.

    `end` is the place behind the run's last instruction, before another one.  What is issued as one
    is of all its stages at once: they are of one run.
    """

    rank: Ints
    run: Ints
    stage: Ints
    end: Ints

    @property
    def max_stages(self) -> int:
        """The most stages of a run."""
        return int(np.bincount(self.run).max(initial=0))


def find_stage_runs(program: Program, ops: Sequence[Opcode]) -> StageRuns:
    """The runs of some kinds of instructions of trained stages; others may stand between."""
    group = np.cumsum(~program.joined)
    at = np.flatnonzero(np.isin(program.op, ops))
    at = at[(program.words[at] >> STAGE_SHIFT & 0xFFFF) >= program.frozen_stages]
    stage = program.words[at] >> STAGE_SHIFT & 0xFFFF
    order = np.lexsort((stage, group[at]))  # of a group by stage, each once
    at, stage, group = at[order], stage[order], group[at[order]]
    once = _is_changed(group) | _is_changed(stage)
    at, stage, group = at[once], stage[once], group[once]
    rank = np.searchsorted(program.offsets, at, side="right") - 1
    ends = np.flatnonzero(np.append(~program.joined[1:], True)) + 1
    end = ends[np.searchsorted(ends, at, side="right")]

    begins = np.flatnonzero(_is_changed(group))
    size = np.diff(np.append(begins, len(at)))
    before = np.append(0, begins)[:-1]  # where the group before begins
    same = (size == np.append(0, size)[:-1]) & (rank[begins] == rank[before])
    if len(begins):
        there = np.minimum(np.repeat(before - begins, size) + np.arange(len(at)), len(at) - 1)
        same &= np.logical_and.reduceat(stage == stage[there], begins)
    last = np.repeat(np.append(~same[1:], True)[: len(same)], size)  # those of a run's last group
    step = np.repeat(np.cumsum(~same) - 1, size)
    return StageRuns(rank[last], step[last], stage[last], end[last])


def number_occurrences(keys: Ints) -> Ints:
    """Of each number in a list how many times it was there before."""
    order, turn = np.argsort(keys, kind="stable"), np.empty(len(keys), np.int64)
    turn[order] = np.arange(len(keys)) - np.searchsorted(keys[order], keys[order])
    return turn


def _is_changed(numbers: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each number is another than the one before it."""
    return np.append(True, numbers[1:] != numbers[:-1])[: len(numbers)]
