"""Tests that all members of a group take part in a collective or none, without pass rules too."""

from __future__ import annotations

import random

import pytest

from schedir.compiler.compile import compile
from schedir.errors import UnmatchedTransferError
from schedir.ir.instruction_index import InstructionIndex
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.ir.text_format import from_text, to_text
from schedir.schedules import dualpipe_v, one_f_one_b
from schedir.testing import random_compute_program
from schedir.verify.communication import require_group_members
from schedir.verify.inspector import Inspector


def met(program: Program) -> None:
    require_group_members(Inspector(program, InstructionIndex.from_program(program)))


def without(program: Program, rank: int, what: str) -> Program:
    head, *ranks = to_text(program, folded=False).split("\nrank ")
    assert ranks[rank].count(f"  {what}\n") == 1
    ranks[rank] = ranks[rank].replace(f"  {what}\n", "")
    return from_text("\nrank ".join([head, *ranks]))


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("update", range(2))
def test_one_of_all_ranks_is_missing(rank: int, update: int) -> None:
    shape = PipelineShape(3, 4, optimizer_steps=2, weight_delay=1)
    program = compile(one_f_one_b, shape, clip_grad_norm=True)
    met(program)
    what = "reduce_norm" + " 1" * update
    with pytest.raises(
        UnmatchedTransferError, match=f"has no counterpart on rank {rank}"
    ) as caught:
        met(without(program, rank, what))
    (site,) = caught.value.sites
    assert str(site.instr) == what and site.rank == (rank == 0)
    met(without(without(without(program, 0, what), 1, what), 2, what))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("side", range(2))
def test_one_of_two_holders_is_missing(stage: int, side: int) -> None:
    shape = PipelineShape(4, 4, placement="mirror")
    program = compile(random_compute_program(shape, random.Random(1)))
    met(program)
    rank, other = shape.replica_ranks[side, stage], shape.replica_ranks[1 - side, stage]
    with pytest.raises(
        UnmatchedTransferError, match=f"has no counterpart on rank {rank}"
    ) as caught:
        met(without(program, rank, f"reduce_replicated_stages {stage}"))
    (site,) = caught.value.sites
    assert str(site.instr) == f"reduce_replicated_stages {stage}" and site.rank == other


def test_programs_without_meetings() -> None:
    met(compile(dualpipe_v, PipelineShape(2, 4, 2, "vee")))
