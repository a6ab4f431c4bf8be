"""Tests that offload on a GPU keeps the bits, uses pinned memory, and has no host waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.gpu import record_host_waits
from schedir import compile
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.models import gpt
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.offload.memory_tiers import MemoryTiers
from schedir.schedules import gpipe, one_f_one_b
from tests.cpu.tiny_stages import BOUNDARY, copy_gradients, gpt_stages, have_same_bits, make_batch
from tests.gpu.shared import REHEARSED


def make_gpu_stages(stages: int) -> list[nn.Module]:
    return [module.cuda() for module in gpt_stages(stages, tied=False)]


@pytest.mark.parametrize("recompute", [None, "all"])
@pytest.mark.parametrize(
    ("schedule", "shape"), [(gpipe, PipelineShape(2, 6)), (one_f_one_b, PipelineShape(4, 6))]
)
def test_offload_keeps_bits(schedule: Any, shape: PipelineShape, recompute: Any) -> None:
    torch.use_deterministic_algorithms(True)
    inputs, targets, scale = make_batch(shape.microbatches)
    inputs, targets, results = inputs.cuda(), targets.cuda(), []
    option_sets: list[dict[str, Any]] = [{}, {"offload": "all", "buffer_sharing": "minimal"}]
    for options in option_sets:
        program = compile(
            schedule, shape, progress_model="per_edge", recompute=recompute, **options
        )
        stages = make_gpu_stages(shape.stages)
        world = InProcessExecutor(program, stages, loss=gpt.loss, boundary=BOUNDARY)
        world.step(inputs, targets, scale)
        with record_host_waits() as waited:
            total = world.step(inputs, targets, scale)
        assert not waited
        results.append((total, copy_gradients(stages)))
        for rank in world.executors:
            blocks = rank.resources.service(MemoryTiers).host_arena.free_blocks
            assert REHEARSED or all(block.location.is_pinned() for block in blocks)
    torch.use_deterministic_algorithms(False)
    assert have_same_bits(*results)
