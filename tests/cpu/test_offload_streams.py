"""Tests of offload on a virtual GPU: events order the streams, and the host does not wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from schedir.compiler.compile import compile
from schedir.ir.isa.instructions import Lane
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.models import gpt
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.offload.activation_offloader import SavedActivations
from schedir.runtime.offload.copy_lanes import CopyLanes, LaneJob
from schedir.runtime.offload.memory_tiers import MemoryTiers
from schedir.schedules import dualpipe_v, gpipe, one_f_one_b
from tests.cases import ALL, cases
from tests.cpu.activation_offload_programs import offload_randomly
from tests.cpu.race_detector import RaceDetector
from tests.cpu.test_activation_offload import checked
from tests.cpu.tiny_stages import BOUNDARY, copy_gradients, gpt_stages, have_same_bits, make_batch
from tests.cpu.virtual_gpu import VirtualGPU, install_virtual_gpu

PLANS = [
    (gpipe, PipelineShape(2, 4)),
    (one_f_one_b, PipelineShape(3, 4)),
    (dualpipe_v, PipelineShape(2, 4, 2, "vee")),
]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> VirtualGPU:
    return install_virtual_gpu(monkeypatch)


@pytest.fixture
def races(gpu: VirtualGPU) -> Iterator[RaceDetector]:
    with RaceDetector(gpu) as races:
        yield races


def make_ranks(
    schedule: Any, shape: PipelineShape, slots: Any, spilled: float = 0.0, **options: Any
) -> InProcessExecutor:
    program = compile(
        schedule, shape, progress_model="per_edge", recompute=options.pop("recompute", None)
    )
    program = checked(offload_randomly(program, 1, spilled=spilled), slots)
    stages = gpt_stages(shape.stages, tied=False)
    world = InProcessExecutor(program, stages, loss=gpt.loss, boundary=BOUNDARY, **options)
    for rank in world.executors:
        rank.resources.service(CopyLanes).uses_streams = True
        rank.resources.service(MemoryTiers).poisons_sources = False
    return world


def read_gradients(world: InProcessExecutor) -> Any:
    first_ranks = enumerate(world.program.shape.first_rank_per_stage)
    return copy_gradients([world.executors[r].stages[s].module for s, r in first_ranks])


@pytest.mark.parametrize(
    ("schedule", "shape", "recompute", "slots"),
    cases([(*PLANS[0], None, "minimal"), (*PLANS[1], "all", None), (*PLANS[2], None, "minimal")],
          [(*PLANS[0], "all", None), (*PLANS[1], None, "minimal"), (*PLANS[2], "all", None)]),
)  # fmt: skip
def test_offload_has_no_races(
    schedule: Any,
    shape: PipelineShape,
    recompute: Any,
    slots: Any,
    races: RaceDetector,
    gpu: VirtualGPU,
) -> None:
    """There are no races on reused device memory, and none on host buffers."""
    world = make_ranks(schedule, shape, slots, recompute=recompute)
    plain = InProcessExecutor(
        compile(schedule, shape, progress_model="per_edge"), gpt_stages(shape.stages, tied=False),
        loss=gpt.loss, boundary=BOUNDARY,
    )  # fmt: skip
    plain.step(*make_batch(shape.microbatches))
    for seed in (None, 0, 1) if ALL else (None, 0):
        gpu.host_may_wait = seed is None  # the first use of an event creates it
        world.step(*make_batch(shape.microbatches), order_seed=seed)
    assert not races.found
    assert have_same_bits(read_gradients(world), read_gradients(plain))


def test_offload_to_disk_has_no_races(races: RaceDetector, tmp_path: Path) -> None:
    execution = ExecutionOptions(spill_dir=tmp_path)
    world = make_ranks(*PLANS[0], "minimal", spilled=1.0, execution=execution)
    for seed in (None, 0):
        world.step(*make_batch(4), order_seed=seed)
    assert not races.found


@pytest.mark.parametrize("what", ["ready", "after", "arrive", "let_go"])
def test_missing_wait_is_found_as_race(
    what: str, races: RaceDetector, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = CopyLanes.start
    release_device_memory = SavedActivations.release_device_memory
    finish_reload = SavedActivations.finish_reload

    def start_without_wait(
        lanes: CopyLanes, lane: Lane, run: Callable[[], object], size: int, after: Any, marks: Any
    ) -> LaneJob:
        if what == "ready":
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):  # a wrong current stream
                return start(lanes, lane, run, size, after, marks)
        return start(lanes, lane, run, size, () if what == "after" else after, marks)

    finished_job: Any = SimpleNamespace(wait=lambda: None)

    def release_without_wait(value: SavedActivations) -> None:
        value.offload_job = value.offload_job and finished_job
        release_device_memory(value)

    def reload_without_wait(value: SavedActivations) -> None:
        value.reload_job = value.reload_job and finished_job
        finish_reload(value)

    monkeypatch.setattr(CopyLanes, "start", start_without_wait)
    if what == "let_go":
        monkeypatch.setattr(SavedActivations, "release_device_memory", release_without_wait)
    if what == "arrive":
        monkeypatch.setattr(SavedActivations, "finish_reload", reload_without_wait)
    world = make_ranks(gpipe, PipelineShape(2, 4), "minimal")
    world.step(*make_batch(4))
    if not races.found:  # the race may need memory of an earlier step
        world.step(*make_batch(4))
    assert races.found


def test_lanes_overlap_with_computes(gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded Timeline shows the overlap."""
    world = make_ranks(gpipe, PipelineShape(1, 3), "minimal")
    (rank,) = world.executors
    copy_out = SavedActivations.copy_to_block

    def copy_slowly(value: SavedActivations, *args: Any, **options: Any) -> None:
        copy_out(value, *args, **options)
        gpu.work(5.0)

    monkeypatch.setattr(SavedActivations, "copy_to_block", copy_slowly)
    world.step(*make_batch(3))
    timeline = world.timeline()
    spans = timeline.spans
    durations = (spans["end"] - spans["start"])[spans["lane"] == Lane.D2H]
    assert durations == pytest.approx([5.0] * len(durations), abs=1e-3) and len(durations) == 3
    assert rank.resources.service(CopyLanes).streams.keys() == {Lane.D2H, Lane.H2D}
