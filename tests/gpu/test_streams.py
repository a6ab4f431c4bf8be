"""Tests of virtual ranks of one process on a GPU, with streams and events without host waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu import record_host_waits
from schedir import compile
from schedir.errors import ExecutionError
from schedir.ir.isa.instructions import Lane
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.models import gpt
from schedir.predict.timeline import Timeline
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.parameters.mixed_precision import use_float32_gradients
from schedir.runtime.recording.recorder import EVENT_RESOLUTION
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import interleaved, one_f_one_b
from tests.cpu.tiny_stages import BOUNDARY, copy_gradients, gpt_stages, make_batch, split_1f1b
from tests.timeline_legality import find_early_instructions

PLANS = [
    (one_f_one_b, PipelineShape(4, 6)),
    (split_1f1b, PipelineShape(4, 4)),
    (interleaved, PipelineShape(2, 5, 3)),
]


@pytest.fixture(autouse=True)
def restore_determinism() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def are_close(actual: Sequence[dict[str, Tensor]], expected: Sequence[dict[str, Tensor]]) -> bool:
    return all(
        float((a[n] - b[n]).norm()) <= 1e-5 * float(b[n].norm())
        for a, b in zip(actual, expected, strict=True)
        for n in b
    )


def make_gpu_stages(stages: int, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    modules = [m.to("cuda", dtype) for m in gpt_stages(stages)]
    for module in modules:
        use_float32_gradients(module)
    return modules


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("schedule", "shape"), PLANS)
def test_gradients_match_reference_in_any_order(
    schedule: Any, shape: PipelineShape, dtype: torch.dtype
) -> None:
    torch.use_deterministic_algorithms(True)
    inputs, targets, scale = make_batch(shape.microbatches)
    inputs, targets = inputs.cuda(), targets.cuda()
    plain, rank_stages = make_gpu_stages(shape.stages, dtype), make_gpu_stages(shape.stages, dtype)
    loss = run_sequential(plain, inputs, targets, loss=gpt.loss, grad_scale=scale)
    program = compile(schedule, shape, tied_weights=True)
    boundary = Boundary(BOUNDARY.shape, dtype)
    world = InProcessExecutor(program, rank_stages, loss=gpt.loss, boundary=boundary)
    for seed in range(4):
        got = world.step(inputs, targets, scale, seed)
        torch.testing.assert_close(got, loss)
        assert are_close(copy_gradients(rank_stages), copy_gradients(plain))


@pytest.mark.parametrize("record", [False, True])
def test_host_never_waits_inside_step(record: bool) -> None:
    shape = PipelineShape(4, 6)
    inputs, targets, scale = make_batch(shape.microbatches)
    inputs, targets = inputs.cuda(), targets.cuda()
    program = compile(
        one_f_one_b, shape, progress_model="per_edge", tied_weights=True, clip_grad_norm=True
    )
    world = InProcessExecutor(
        program, make_gpu_stages(4), loss=gpt.loss, boundary=BOUNDARY,
        execution=ExecutionOptions(record_timestamps=record),
    )  # fmt: skip
    world.step(inputs, targets, scale)
    with record_host_waits() as waits:
        world.step(inputs, targets, scale)
    assert waits == []
    if record:
        assert_measured(world.timeline())


@pytest.mark.usefixtures("real_gpu")
def test_host_waits_are_detected() -> None:
    with record_host_waits() as waits:
        torch.ones(1, device="cuda").item()
        torch.cuda.Event().synchronize()
        torch.cuda.synchronize()
    assert len(waits) >= 3


def assert_measured(timeline: Timeline) -> None:
    """Assert that a Timeline is complete, in seconds, and without effects before causes."""
    spans = timeline.spans
    assert (timeline.kind, timeline.unit, timeline.start_time) == ("measured", "s", 0.0)
    assert 0 < timeline.span < 60 and (spans["end"] <= timeline.span).all()
    assert (spans["end"] > spans["start"])[spans["lane"] == Lane.COMPUTE].all()
    assert not find_early_instructions(timeline, 2 * EVENT_RESOLUTION)


class _OutOfMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        torch.empty(1 << 45, device="cuda")
        return x * self.weight


@pytest.mark.usefixtures("real_gpu")
def test_out_of_memory_names_rank_and_instruction() -> None:
    stages = [nn.Linear(4, 4).cuda(), _OutOfMemory()]
    program = compile(one_f_one_b, PipelineShape(2, 2))
    world = InProcessExecutor(program, stages, loss=nn.functional.mse_loss, boundary=(2, 4))
    batch = torch.ones(2, 2, 4, device="cuda")
    with pytest.raises(ExecutionError) as error:
        world.step(batch, batch)
    (site,) = error.value.sites
    assert (site.rank, str(site.instr)) == (1, "F 1.0")
    assert "OutOfMemoryError" in error.value.fact
