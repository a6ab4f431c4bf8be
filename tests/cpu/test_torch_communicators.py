"""Tests of programs for torch's communicators, run by virtual ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from schedir.compiler.compile import compile
from schedir.errors import ModelError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.passes.communication.transfer_overlap import group_opposite_transfers
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import one_f_one_b
from schedir.testing.tiny_model import make_batch, make_tiny_stages, squared_error
from tests.edits import written


def make_executor(program: Program) -> InProcessExecutor:
    stages: list[nn.Module] = [*make_tiny_stages(program.shape.stages, 0)]
    inputs, _ = make_batch(program.shape.microbatches, 0)
    boundary = Boundary(tuple(inputs.shape[1:]), inputs.dtype)
    return InProcessExecutor(
        program, stages, loss=squared_error, boundary=boundary, progress_model="torch_lazy"
    )


def test_torch_lazy_groups_run_in_any_order() -> None:
    program = group_opposite_transfers(compile(one_f_one_b, PipelineShape(3, 6)))
    assert program.joined.any()
    inputs, targets = make_batch(6, 0)
    expected_loss = run_sequential([*make_tiny_stages(3, 0)], inputs, targets, loss=squared_error)
    for seed in (None, 0, 1):
        assert torch.equal(
            make_executor(program).step(inputs, targets, order_seed=seed), expected_loss
        )


def test_reordered_messages_between_two_ranks_are_refused() -> None:
    """torch uses two communicators for them, but a mailbox would return the wrong message."""
    program = written(
        "F 0.0; F 0.1; send_act 0.0 & recv_act 3.1; send_act 0.1; F 3.1; recv_act 3.0; F 3.0",
        "recv_act 1.1; F 1.1; F 2.1; recv_act 1.0 & send_act 2.1; F 1.0; F 2.0; send_act 2.0",
        microbatches=2, header="stages_per_rank 2 placement vee",
    )  # fmt: skip
    with pytest.raises(ModelError) as caught:
        make_executor(program)
    assert [str(s.instr) for s in caught.value.sites[:2]] == ["recv_act 1.1", "recv_act 1.0"]
