"""Tests that offload has the predicted bytes on each tier at every instruction."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from schedir.analysis.memory.buffer_slots import find_host_values, number_groups
from schedir.analysis.memory.footprint import Footprint, compute_footprints
from schedir.compiler.compile import compile
from schedir.ir.cost.sizes import Sizes
from schedir.ir.instruction_index import InstructionIndex
from schedir.ir.isa.instructions import Lane, Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program, SlotCounts
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.offload.activation_offloader import OffloadMoves
from schedir.runtime.offload.copy_lanes import CopyLanes, LaneJob
from schedir.runtime.offload.memory_tiers import MemoryTiers
from schedir.runtime.program_state import Call
from schedir.runtime.recording.live_memory import LiveMemory
from schedir.schedules import dualpipe, dualpipe_v, gpipe, interleaved, one_f_one_b, zb_h1
from schedir.verify.check import check
from tests.cases import cases
from tests.cpu.activation_offload_programs import offload_randomly
from tests.cpu.test_activation_offload import checked
from tests.cpu.test_measured_sizes import MODELS, Witness, _refs
from tests.cpu.test_recompute import BOUNDARY as FLAT
from tests.cpu.test_recompute import WIDTH, noisy, squares
from tests.cpu.test_recompute import batch as flat_batch
from tests.cpu.tiny_stages import BOUNDARY

torch.set_num_threads(1)

SHAPES = [
    (gpipe, PipelineShape(2, 4)),
    (one_f_one_b, PipelineShape(3, 4)),
    (zb_h1, PipelineShape(3, 5)),
    (dualpipe_v, PipelineShape(2, 5, placement="vee", stages_per_rank=2)),
    (dualpipe, PipelineShape(2, 4, placement="mirror")),
]
PLAIN_MODEL, RECOMPUTED_MODEL = ("gpt", None), ("normed", "all")


class TierWitness(Witness):
    """A witness that also counts reloaded tensors, and memory of the host and the disk."""

    def __init__(self, rank: Executor, footprint: Footprint, tiers: dict[str, Footprint]) -> None:
        super().__init__(rank, footprint)
        self.most_on = dict.fromkeys(tiers, 0)
        for k, (wait, run) in enumerate(rank.runner.calls):
            rank.runner.calls[k] = Call(wait, partial(self.after, k, run, tiers))

    def after(self, k: int, run: Any, tiers: dict[str, Footprint]) -> None:
        run()
        for tier, footprint in tiers.items():
            actual = self.rank.resources.service(MemoryTiers).count_bytes(tier)
            at = int(np.searchsorted(footprint.positions, k, side="right")) - 1
            assert actual == footprint.total_bytes[at], (k, tier)
            self.most_on[tier] = max(self.most_on[tier], actual)

    def living(self) -> dict[StorageWeakRef, int]:
        values = self.rank.state.service(OffloadMoves).values.values()
        self.born.made |= _refs([x for value in values for x in value.list_device_tensors()])
        return super().living()


@pytest.fixture
def serial_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the host wait for each operation on a lane."""
    start = CopyLanes.start

    def start_and_wait(*args: Any) -> LaneJob:
        job = start(*args)
        job.wait()
        return job

    monkeypatch.setattr(CopyLanes, "start", start_and_wait)


def make_ranks(
    program: Program, model: str, folder: Path
) -> tuple[InProcessExecutor, Sizes, tuple[Tensor, Tensor, float]]:
    """Return the ranks of a program that offloads, the sizes of its model, and a batch."""
    make, data, loss = MODELS[model]
    shape = program.shape
    stages, batch = make(shape.stages), data(shape.microbatches)
    sizes = measure_sizes(
        stages, batch[0][0], batch[1][0], loss=loss, boundary=BOUNDARY, optimizer_state=0
    )
    program = checked(offload_randomly(program, 1, spilled=0.5), "minimal")
    execution = ExecutionOptions(spill_dir=folder)
    world = InProcessExecutor(program, stages, loss=loss, boundary=BOUNDARY, execution=execution)
    return world, sizes, batch


@pytest.mark.parametrize(
    ("schedule", "shape", "model", "recompute"),
    cases(
        [(zb_h1, PipelineShape(2, 4), *RECOMPUTED_MODEL)],
        [(*shape, *model) for shape in SHAPES for model in (PLAIN_MODEL, RECOMPUTED_MODEL)],
    ),
)
def test_memory_of_each_tier_equals_prediction(
    schedule: Any,
    shape: PipelineShape,
    model: str,
    recompute: Any,
    tmp_path: Path,
    serial_lanes: None,
) -> None:
    program = compile(schedule, shape, progress_model="per_edge", recompute=recompute)
    world, sizes, batch = make_ranks(program, model, tmp_path)
    on_device, *others = (
        compute_footprints(world.program, sizes, tier) for tier in ("device", "host", "disk")
    )
    tiers = [dict(zip(("host", "disk"), pair, strict=True)) for pair in zip(*others, strict=True)]
    witnesses = [*map(TierWitness, world.executors, on_device, tiers)]
    for _ in range(2):
        world.step(*batch)
    assert all(witness.beside == 0 for witness in witnesses)
    assert any(witness.most_on["disk"] for witness in witnesses)


def test_timeline_has_peak_memory_of_each_tier(tmp_path: Path, serial_lanes: None) -> None:
    """The recorded run has no overlap of lanes."""
    world, sizes, batch = make_ranks(compile(one_f_one_b, PipelineShape(2, 6)), "gpt", tmp_path)
    with ExitStack() as stack:
        live_memories = [stack.enter_context(LiveMemory(rank)) for rank in world.executors]
        world.step(*batch)
    timeline = replace(world.timeline(), sizes=sizes)
    for tier in ("host", "disk"):
        peaks = [max(curve.total) for curve in timeline.memory_on(tier)]
        assert [live_memory.peak_by_tier[tier] for live_memory in live_memories] == peaks
        assert max(peaks) > 0
    spans = timeline.spans
    moves = np.isin(
        spans["op"], [Opcode.Offload, Opcode.Reload, Opcode.OffloadToDisk, Opcode.ReloadFromDisk]
    )
    assert (spans["end"] > spans["start"])[moves].all()


class WideStage(nn.Module):
    """Saves activations of a given width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


@pytest.mark.parametrize(("more", "spilled"), cases([(0, 0.7), (1, 0.0)], [(0, 0.0), (1, 0.7)]))
def test_host_memory_has_at_most_one_value_per_slot(
    more: int, spilled: float, tmp_path: Path
) -> None:
    """Reloads are slow, and sizes differ between stages."""
    shape = PipelineShape(1, 6, 3)
    program = offload_randomly(compile(interleaved, shape), 1, spilled=spilled, late=0.0)
    groups = number_groups(InstructionIndex.from_program(program))
    slots = int(find_host_values(program).count_peak(groups)[0]) + more
    program = check(program.with_slots([SlotCounts.unspecified()._replace(host=slots)]), "per_edge")
    stages = noisy(shape.stages, partial(next, map(WideStage, (400, 40, 4))))
    world = InProcessExecutor(
        program, stages, loss=squares, boundary=FLAT, execution=ExecutionOptions(spill_dir=tmp_path)
    )
    (rank,) = world.executors
    rank.resources.service(CopyLanes).bandwidth = {Lane.H2D: 2e5, Lane.DISK: 2e5}
    for k in range(3):
        world.step(*flat_batch(shape.microbatches, k), order_seed=k or None)
        spans = world.timeline().spans
        start_times, end_times = (
            spans[field][np.isin(spans["op"], ops)] for field, ops in (
                ("start", (Opcode.Offload, Opcode.ReloadFromDisk)),
                ("end", (Opcode.Reload, Opcode.OffloadToDisk)),
            )
        )  # fmt: skip
        started = np.searchsorted(np.sort(start_times), start_times, "right")
        assert (started - np.searchsorted(np.sort(end_times), start_times, "right")).max() <= slots
        arena = rank.resources.service(MemoryTiers).host_arena
        values = rank.state.service(OffloadMoves).values.values()
        assert len(arena.free_blocks) == slots
        assert arena.allocated_bytes == sum(block.size for block in arena.free_blocks)
        assert arena.allocated_bytes <= slots * max(value.block_size for value in values)
