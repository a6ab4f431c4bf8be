"""Tests that built-in schedules train a GPT over Gloo with the bits of the reference."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from schedir.compiler.compile import compile
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.models import gpt
from schedir.runtime.executor import Executor
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import get_built_in_schedules
from schedir.schedules.schedule_algebra import B, F, I, RankSchedule, W, get_placement_mark
from schedir.transports.gloo import GlooTransport
from tests.cases import each_value
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import (
    BOUNDARY,
    copy_gradients,
    gpt_stages,
    have_same_bits,
    make_batch,
    run_reference,
)

M = 6


def newest_first(r: int, P: int, m: int) -> RankSchedule:
    """Return GPipe with backwards in descending order of microbatches; the first half is split."""
    descending = [(m - 1 - k, k < m // 2) for k in range(m)]
    backwards = sum((I.at(mb) if split else B.at(mb) for mb, split in descending), 0 * F)
    return m * F + backwards + sum((W.at(mb) for mb, split in descending if split), 0 * F)


def program_of(schedule: Any, overlap: bool = False) -> Program:
    placement, fixed = get_placement_mark(schedule)
    v = fixed or (2 if "v" in signature(schedule).parameters else 1)
    shape = PipelineShape(2, M, v, placement or "loop")
    return compile(schedule, shape, tied_weights=True, progress_model="per_edge", overlap=overlap)


ZOO = {name: s for name, s in get_built_in_schedules().items() if name != "forward_only"}


def _expected_results(program: Program) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Return the loss and gradients in the order of the program, which are near the reference's."""
    loss, plain = run_reference(program.shape)
    if program.reduces_in_microbatch_order:
        return loss, plain
    stages = gpt_stages(program.shape.stages)
    inputs, targets, scale = make_batch(M)
    loss = run_sequential(stages, inputs, targets, loss=gpt.loss, grad_scale=scale, program=program)
    ordered = copy_gradients(stages)
    for ordered_stage, plain_stage in zip(ordered, plain, strict=True):
        for name, grad in ordered_stage.items():
            assert (grad - plain_stage[name]).norm() <= 1e-6 * plain_stage[name].norm(), name
    assert not have_same_bits(ordered, plain)
    return loss, ordered


OVER_GLOO = each_value(
    ("dualpipe_v", "interleaved_zb", "v_half", "wave", "zb_h2", "zb_v"), (False, True)
)


def _run_schedules_on_rank(rank: int) -> list[tuple[Tensor | None, dict[int, dict[str, Tensor]]]]:
    """Run one schedule after the other in one of two processes."""
    results = []
    for name, overlap in OVER_GLOO:
        program = program_of(ZOO[name], overlap)
        all_stages = gpt_stages(program.shape.stages)
        stages = {s: all_stages[s] for s in program.shape.stages_on_rank[rank]}
        executor = Executor(
            program, rank, stages, GlooTransport(program), loss=gpt.loss, boundary=BOUNDARY
        )
        loss = executor.step(*make_batch(M))
        results.append((loss, {s: copy_gradients([stage])[0] for s, stage in stages.items()}))
    return results


def test_built_in_schedules_over_gloo_equal_reference() -> None:
    by_case = zip(*run(_run_schedules_on_rank, 2), strict=True)
    for (name, _), results in zip(OVER_GLOO, by_case, strict=True):
        loss, expected_gradients = _expected_results(program_of(ZOO[name]))
        assert [torch.equal(actual, loss) for actual, _ in results if actual is not None] == [
            True
        ], name
        actual = {s: grads for _, stages in results for s, grads in stages.items()}
        assert have_same_bits(
            [actual[s] for s in range(len(expected_gradients))], expected_gradients
        ), name
