"""Tests that `require_group_members` refuses a collective that only some ranks have."""

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


def check_groups(program: Program) -> None:
    require_group_members(Inspector(program, InstructionIndex.from_program(program)))


def remove_instruction(program: Program, rank: int, instruction: str) -> Program:
    head, *ranks = to_text(program, folded=False).split("\nrank ")
    assert ranks[rank].count(f"  {instruction}\n") == 1
    ranks[rank] = ranks[rank].replace(f"  {instruction}\n", "")
    return from_text("\nrank ".join([head, *ranks]))


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("update", range(2))
def test_missing_norm_reduction_of_one_rank_is_refused(rank: int, update: int) -> None:
    shape = PipelineShape(3, 4, optimizer_steps=2, weight_delay=1)
    program = compile(one_f_one_b, shape, clip_grad_norm=True)
    check_groups(program)
    instruction = "reduce_norm" + " 1" * update
    with pytest.raises(
        UnmatchedTransferError, match=f"has no counterpart on rank {rank}"
    ) as caught:
        check_groups(remove_instruction(program, rank, instruction))
    (site,) = caught.value.sites
    assert str(site.instr) == instruction and site.rank == (rank == 0)
    for any_rank in range(3):
        program = remove_instruction(program, any_rank, instruction)
    check_groups(program)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("side", range(2))
def test_missing_reduction_of_one_stage_replica_is_refused(stage: int, side: int) -> None:
    shape = PipelineShape(4, 4, placement="mirror")
    program = compile(random_compute_program(shape, random.Random(1)))
    check_groups(program)
    rank, other = shape.replica_ranks[side, stage], shape.replica_ranks[1 - side, stage]
    with pytest.raises(
        UnmatchedTransferError, match=f"has no counterpart on rank {rank}"
    ) as caught:
        check_groups(remove_instruction(program, rank, f"reduce_replicated_stages {stage}"))
    (site,) = caught.value.sites
    assert str(site.instr) == f"reduce_replicated_stages {stage}" and site.rank == other


def test_program_without_collectives_is_accepted() -> None:
    check_groups(compile(dualpipe_v, PipelineShape(2, 4, 2, "vee")))
