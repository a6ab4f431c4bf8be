"""Tests of the executor: refusals, frozen weights, and released values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedir.analysis.memory.buffer_slots import SLOT_KINDS
from schedir.compiler.compile import compile
from schedir.errors import ModelError
from schedir.ir.isa.instructions import (
    COMPUTE_OPS,
    INSTRUCTIONS,
    SEND_OPS,
    TRANSFER_OPS,
    Scope,
    Value,
)
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.models import gpt
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.sequential_reference import run_sequential
from schedir.runtime.services.pending_sends import PendingSends
from schedir.schedules import gpipe, one_f_one_b
from schedir.transports.gloo import GlooTransport
from tests.cpu.gloo_processes import RankError, run
from tests.cpu.stage_chains import squared_error
from tests.cpu.tiny_stages import (
    BATCH,
    BOUNDARY,
    CONTEXT,
    HIDDEN,
    copy_gradients,
    gpt_stages,
    have_same_bits,
    make_batch,
    split_1f1b,
)


def _start_two_programs(rank: int) -> None:
    GlooTransport(compile([gpipe, one_f_one_b][rank], PipelineShape(2, 4)))


def _start_with_wrong_world_size(rank: int) -> None:
    GlooTransport(compile(gpipe, PipelineShape(3, 4)))


def _create_executor_of_other_rank(rank: int) -> None:
    program = compile(gpipe, PipelineShape(2, 4))
    transport = GlooTransport(program)
    model = gpt_stages(2, tied=False)
    for stages in ({0: model[0]}, {1: model[1]}) if rank == 1 else ():
        with pytest.raises(ModelError, match="rank is 0, but the transport of this process has"):
            Executor(program, 0, stages, transport, loss=gpt.loss, boundary=BOUNDARY)


def test_rank_that_differs_from_transport_is_refused() -> None:
    run(_create_executor_of_other_rank, 2)


@pytest.mark.parametrize("fn", [_start_two_programs, _start_with_wrong_world_size])
def test_different_programs_or_world_size_fail_on_all_ranks(fn: Any) -> None:
    with pytest.raises(RankError) as caught:
        run(fn, 2)
    assert all("ModelError" in tb for tb in caught.value.tracebacks.values())


def _make_executor(program: Program, stages: list[nn.Module]) -> InProcessExecutor:
    return InProcessExecutor(program, stages, loss=gpt.loss, boundary=BOUNDARY)


def test_stages_that_do_not_match_program_are_refused() -> None:
    shape = PipelineShape(2, 2)
    cases: list[dict[str, Any]] = [{}, {"tied_weights": True, "tp": 2}]
    for options in cases:
        with pytest.raises(ModelError):
            _make_executor(compile(gpipe, shape, **options), gpt_stages(2))


class Scale(nn.Module):
    """Multiplies by a weight, whose dtype may differ from that of the boundary."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((HIDDEN,), 1.5, dtype=dtype))
        self.bias = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight.float() + self.bias)


@pytest.mark.parametrize("schedule", [one_f_one_b, split_1f1b])
@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1), (0, 1, 2), "parameterless", "mixed"])
@pytest.mark.filterwarnings("ignore:.* is not split")
def test_stages_with_few_trained_parameters(schedule: Any, frozen: Any) -> None:
    x = torch.randn(4, BATCH, CONTEXT, HIDDEN, generator=torch.Generator().manual_seed(0))

    def make_stages() -> list[nn.Module]:
        if frozen == "parameterless":
            return [nn.Tanh(), Scale(), nn.Tanh()]
        if frozen == "mixed":
            return [Scale(torch.bfloat16), Scale(), Scale(torch.float64)]
        modules: list[nn.Module] = [Scale(), Scale(), Scale()]
        for k in frozen:
            modules[k].requires_grad_(False)
        return modules

    expected_stages, stages = make_stages(), make_stages()
    total = run_sequential(expected_stages, x, x + 1, loss=squared_error, grad_scale=0.5)
    program = compile(schedule, PipelineShape(3, 4), clip_grad_norm=True)
    options = GradientOptions(max_norm=1e9)
    ranks = InProcessExecutor(
        program, stages, loss=squared_error, boundary=BOUNDARY, gradients=options
    )
    for _ in range(2):
        assert torch.equal(ranks.step(x, x + 1, 0.5), total)
        assert have_same_bits(copy_gradients(expected_stages), copy_gradients(stages))
    assert frozen == (0, 1, 2) or any(
        g.any() for grads in copy_gradients(expected_stages) for g in grads.values()
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_sent_values_are_released_during_step(overlap: bool) -> None:
    shape = PipelineShape(4, 16)
    program = compile(
        one_f_one_b, shape, tied_weights=True, overlap=overlap, progress_model="per_edge"
    )
    ranks = _make_executor(program, gpt_stages(4))
    peak_counts = {(r, op): 0 for r in range(4) for op in SEND_OPS}
    for r, rank in enumerate(ranks.executors):

        def run_and_count(
            index: int, r: int = r, rank: Any = rank, call: Any = rank.runner.run_instruction
        ) -> None:
            call(index)
            for op in SEND_OPS:
                count = sum(
                    rank.state.stream[sent].op == op
                    for sent in rank.state.service(PendingSends).works
                )
                peak_counts[r, op] = max(peak_counts[r, op], count)

        rank.runner.run_instruction = run_and_count  # type: ignore[method-assign]
    ranks.step(*make_batch(16), order_seed=1)
    assert not any(rank.state.service(PendingSends).works for rank in ranks.executors)
    # The tensors that the schedule holds, and one or two that are released after the next send.
    assert (
        all(count <= 4 - r + 1 for (r, _), count in peak_counts.items())
        and peak_counts[0, SEND_OPS[0]] >= 3
    )


def test_gradients_may_be_none_between_steps() -> None:
    """Three steps give the same weights as the reference, with and without zero_grad between."""
    shape, trained = PipelineShape(2, 3), []
    for case in ("kept", "forgotten", "reference"):
        stages = gpt_stages(2, tied=False)
        ranks = _make_executor(compile(one_f_one_b, shape), stages)
        for step in range(3):
            inputs, targets, scale = make_batch(3, seed=step)
            if case == "reference":
                run_sequential(stages, inputs, targets, loss=gpt.loss, grad_scale=scale)
            else:
                ranks.step(inputs, targets, scale)
            for p in (p for s in stages for p in s.parameters()):
                assert p.grad is not None
                p.data.sub_(p.grad, alpha=0.5)
                if case == "forgotten":  # like zero_grad(set_to_none=True)
                    p.grad = None
        trained.append([{n: p.detach() for n, p in s.named_parameters()} for s in stages])
    assert have_same_bits(trained[0], trained[1]) and have_same_bits(trained[0], trained[2])
    assert not have_same_bits(
        trained[0], [dict(s.named_parameters()) for s in gpt_stages(2, False)]
    )


def test_instructions_use_values_of_their_table_row() -> None:
    """Each instruction of a middle stage reads, stores and frees the values that its row lists."""
    checked_ops = set()
    for schedule, recompute in ((one_f_one_b, None), (split_1f1b, None), (one_f_one_b, "all")):
        program = compile(schedule, PipelineShape(3, 3), tied_weights=True, recompute=recompute)
        ranks = InProcessExecutor(program, gpt_stages(3), loss=gpt.loss, boundary=BOUNDARY)
        middle = ranks.executors[1]
        call = middle.runner.run_instruction

        def run_and_check(index: int, call: Any = call, middle: Executor = middle) -> None:
            instr = middle.state.stream[index]
            row = INSTRUCTIONS[instr.op]

            def list_stored_values() -> set[Value]:
                return {
                    t
                    for t in SLOT_KINDS
                    if any(
                        middle.state.slot_tables[t].values[slot] is not None
                        for slot in middle.state.slot_assignment.get((t, 1, instr.mb), {}).values()
                    )
                }

            before = list_stored_values()
            call(index)
            after, kinds = list_stored_values(), {*SLOT_KINDS}
            if row.scope is Scope.MICROBATCH:
                possible_values = {
                    t for t in kinds if middle.program.takes_memory(t)
                }  # there are no skips
                assert {*row.needs} & possible_values <= before, instr
                assert after - before == {*row.gives} & possible_values - before, instr
                assert before - after == {*row.frees} & possible_values, instr
                checked_ops.add(row.op)

        middle.runner.run_instruction = run_and_check  # type: ignore[method-assign]
        ranks.step(*make_batch(3))
    assert checked_ops == {op for op in COMPUTE_OPS + TRANSFER_OPS if "Skip" not in op.name}
