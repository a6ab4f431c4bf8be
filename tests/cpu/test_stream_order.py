"""Tests that events order the work of virtual ranks on streams, whatever runs first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from schedir import compile
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.models import gpt
from schedir.passes.pass_types import BufferSharing
from schedir.runtime.executor_options import ExecutionOptions, GradientOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.schedules import chimera, interleaved, one_f_one_b
from schedir.transports.in_process import cuda_streams
from tests.cases import each_value
from tests.cpu.race_detector import RaceDetector
from tests.cpu.tiny_stages import (
    BOUNDARY,
    copy_gradients,
    gpt_stages,
    have_same_bits,
    make_batch,
    run_reference,
    split_1f1b,
)
from tests.cpu.virtual_gpu import install_virtual_gpu

CASES = [
    (one_f_one_b, PipelineShape(3, 4)),
    (split_1f1b, PipelineShape(2, 4)),
    (interleaved, PipelineShape(2, 4, 2)),
    (chimera, PipelineShape(2, 4, placement="mirror")),
]


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> Iterator[RaceDetector]:
    with RaceDetector(install_virtual_gpu(monkeypatch)) as races:
        yield races


def run_steps(
    schedule: Any,
    shape: PipelineShape,
    buffer_sharing: BufferSharing | None = None,
    record: bool = False,
    seeds: Sequence[int | None] = (None,),
) -> Any:
    program = compile(
        schedule, shape, progress_model="per_edge", overlap=True, tied_weights=True,
        clip_grad_norm=True, buffer_sharing=buffer_sharing,
    )  # fmt: skip
    stages = gpt_stages(shape.stages)
    world = InProcessExecutor(
        program, stages, loss=gpt.loss, boundary=BOUNDARY,
        execution=ExecutionOptions(record_timestamps=record),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        gradients=GradientOptions(max_norm=1e9),
    )  # fmt: skip
    for seed in seeds:
        world.step(*make_batch(shape.microbatches), order_seed=seed)
    return copy_gradients(stages)


@pytest.mark.parametrize(
    ("schedule", "shape", "buffer_sharing", "static"),
    each_value(CASES, [None, "minimal"], [False, True]),
)
def test_programs_have_no_races(
    schedule: Any,
    shape: PipelineShape,
    buffer_sharing: BufferSharing | None,
    static: bool,
    races: RaceDetector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Static send memory, as NCCL needs it, is tested together with time stamps."""
    monkeypatch.setattr(cuda_streams.StreamMailbox, "uses_static_buffers", static)
    got = run_steps(schedule, shape, buffer_sharing, record=static, seeds=(None, 0))
    assert not races.found
    assert have_same_bits(got, run_reference(shape)[1]) or shape.placement_rows > 1


class _NoWait(cuda_streams.StreamPoint):
    """A point for which no stream waits."""

    def __init__(self) -> None: ...

    def wait(self) -> None: ...


@pytest.mark.parametrize("side", ["source", "target"])
def test_missing_wait_before_copy_is_detected(
    side: str, races: RaceDetector, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = cuda_streams._copy_message

    def copy_without_wait(source: Any, target: Any) -> Any:
        sides = {"source": source, "target": target}
        sides[side] = sides[side]._replace(ready_point=_NoWait())
        return copy(**sides)

    monkeypatch.setattr(cuda_streams, "_copy_message", copy_without_wait)
    run_steps(one_f_one_b, PipelineShape(3, 4), "minimal")
    assert any("copy_" in race for race in races.found)


def test_missing_wait_for_caller_is_detected(
    races: RaceDetector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_streams.StreamMailbox, "wait_for_caller", lambda self: None)
    run_steps(one_f_one_b, PipelineShape(3, 4))
    assert races.found
