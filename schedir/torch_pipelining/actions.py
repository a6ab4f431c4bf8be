"""Translate a Program into the actions of torch's runtime."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining.schedules import _Action

from schedir.errors import GroupError
from schedir.io.torch_csv import format_cells
from schedir.ir.isa.instructions import BACKWARD_INPUT_OPS, FORWARD
from schedir.ir.program import WORD_DTYPE, Program, is_op

ActionLists = dict[int, list[Any]]  # by rank


def make_compute_actions(program: Program) -> ActionLists:
    """The F, B, I and W of each rank, as torch's schedules list them in `pipeline_order`."""
    return _parse_actions(format_cells(program, "torch"))


def make_actions(program: Program) -> ActionLists:
    """All that torch's runtime does of a program, in the program's order.

    Raises GroupError for transfers that are issued as one, and UsageError for two holders of a
    stage and for several updates, for which it has no actions.
    """
    try:
        return _parse_actions(format_cells(program, "torch-2.13"))
    except GroupError as error:
        error.hint = "compile it without overlap, or give the schedule itself"
        raise


def _parse_actions(rows: list[list[str]]) -> ActionLists:
    return {rank: [*map(_Action.from_str, row)] for rank, row in enumerate(rows)}


def find_split_stages(program: Program) -> frozenset[int]:
    """The stages some of whose backwards are in halves."""
    words = program.words.view(WORD_DTYPE)
    return frozenset(words["stage"][is_op(words["op"], BACKWARD_INPUT_OPS)].tolist())


def get_last_stage_order(program: Program, last_stage: int) -> list[int]:
    """The microbatches in the order in which the last stage runs them forward."""
    words = program.words.view(WORD_DTYPE)
    mine = is_op(words["op"], (FORWARD,)) & (words["stage"] == last_stage)
    return [int(mb) for mb in words["mb"][mine]]
