"""Translate a Program into the actions of torch's runtime."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining.schedules import _Action

from schedir.errors import GroupError
from schedir.io.torch_csv import format_cells
from schedir.ir.isa.instructions import BACKWARD_INPUT_OPS, FORWARD
from schedir.ir.program import WORD_DTYPE, Program, is_op

ActionLists = dict[int, list[Any]]  # rank -> actions


def make_compute_actions(program: Program) -> ActionLists:
    """Return the F, B, I and W of each rank, as torch's schedules list them in `pipeline_order`.

    Args:
        program: The program.
    """
    return _parse_actions(format_cells(program, "torch"))


def make_actions(program: Program) -> ActionLists:
    """Return all actions of torch's runtime for a program, in the program's order.

    Args:
        program: The program.

    Raises:
        GroupError: The program groups transfers.
        UsageError: A stage has several replicas, or the program has several updates. torch has no
            actions for these.
    """
    try:
        return _parse_actions(format_cells(program, "torch-2.13"))
    except GroupError as error:
        error.hint = "compile with overlap=False, or pass schedule=... instead of program=..."
        raise


def _parse_actions(rows: list[list[str]]) -> ActionLists:
    return {rank: [*map(_Action.from_str, row)] for rank, row in enumerate(rows)}


def find_split_stages(program: Program) -> frozenset[int]:
    """Return the stages that have at least one split backward.

    Args:
        program: The program.
    """
    words = program.words.view(WORD_DTYPE)
    return frozenset(words["stage"][is_op(words["op"], BACKWARD_INPUT_OPS)].tolist())


def get_last_stage_order(program: Program, last_stage: int) -> list[int]:
    """Return the microbatches in the order in which the last stage runs their forwards.

    Args:
        program: The program.
        last_stage: The number of the last stage.
    """
    words = program.words.view(WORD_DTYPE)
    is_last_forward = is_op(words["op"], (FORWARD,)) & (words["stage"] == last_stage)
    return [int(mb) for mb in words["mb"][is_last_forward]]
