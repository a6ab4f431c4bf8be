"""Translate a Program into the actions of torch's runtime."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining.schedules import _Action

from schedir.errors import GroupError
from schedir.io.torch_csv import cells
from schedir.ir.isa.instructions import FORWARD, SPLITS
from schedir.ir.program import FIELDS, Program, is_op

Orders = dict[int, list[Any]]  # by rank


def compute_only(program: Program) -> Orders:
    """The F, B, I and W of each rank, as torch's schedules list them in `pipeline_order`."""
    return _parsed(cells(program, "torch"))


def with_transfers(program: Program) -> Orders:
    """All that torch's runtime does of a program, in the program's order.

    Raises GroupError for transfers that are issued as one, and UsageError for two holders of a
    stage and for several updates, for which it has no actions.
    """
    try:
        return _parsed(cells(program, "torch-2.13"))
    except GroupError as error:
        error.hint = "compile it without overlap, or give the schedule itself"
        raise


def _parsed(rows: list[list[str]]) -> Orders:
    return {rank: [*map(_Action.from_str, row)] for rank, row in enumerate(rows)}


def splits(program: Program) -> frozenset[int]:
    """The stages some of whose backwards are in halves."""
    words = program.words.view(FIELDS)
    return frozenset(words["stage"][is_op(words["op"], SPLITS)].tolist())


def order_of_last(program: Program, last: int) -> list[int]:
    """The microbatches in the order in which the last stage runs them forward."""
    words = program.words.view(FIELDS)
    mine = is_op(words["op"], (FORWARD,)) & (words["stage"] == last)
    return [int(mb) for mb in words["mb"][mine]]
