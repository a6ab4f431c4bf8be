"""Tests that the training loop on a GPU never waits for a step, and names a hanging one."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch

from schedir import compile
from schedir.ir.isa.instructions import Instr, Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.models import gpt
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.program_state import Call
from schedir.runtime.recording.async_scalars import AsyncScalarBuffer
from schedir.runtime.recording.gpu_progress import GpuProgress
from schedir.schedules import one_f_one_b
from schedir.training.batches.prefetch import Prefetch
from schedir.training.batches.samples import Batches
from schedir.training.processes.watchdog import make_stall_error
from schedir.training.step_queue import StepQueue
from schedir.training.train import run
from tests.cpu.tiny_stages import BOUNDARY, gpt_stages, make_batch
from tests.cpu.train_command import (
    ONE_PROCESS,
    read_losses,
    train_in_this_process,
    write_config,
)
from tests.gpu.shared import no_wait

LONG_CYCLES = 2_000_000_000  # cycles, about a second

pytestmark = [
    pytest.mark.usefixtures("real_gpu"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]


def test_async_scalar_copy_does_not_block_host() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    readings = AsyncScalarBuffer(device, 2)
    numbers = torch.tensor([1.5, math.nan], dtype=torch.float64, device=device)
    with no_wait():
        torch.cuda._sleep(LONG_CYCLES)
        first_copy = readings.copy(numbers)
        second_copy = readings.copy(numbers + 1)
        assert not first_copy.row.copy_event.query()
    assert first_copy.read()[0] == 1.5 and math.isnan(second_copy.read()[1])


def test_prefetched_batches_are_ordered_without_host_wait() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    source = Batches(np.arange(200, dtype=np.uint8), 8, 4, seed=3)
    with Prefetch(
        source, 8, device, replica=1, replicas=2, count_tokens=gpt.count_tokens
    ) as prefetch:
        for step in range(8):
            with no_wait():
                torch.cuda._sleep(LONG_CYCLES // 100)
                prefetched = prefetch.take(step)
            expected = source.read_batch(4 * step, 4)
            assert torch.equal(prefetched.inputs.cpu(), expected[0][2:])
            assert torch.equal(prefetched.targets.cpu(), expected[1][2:])


def test_stall_error_names_hanging_instruction() -> None:
    program = compile(
        one_f_one_b, PipelineShape(2, 4), progress_model="per_edge", tied_weights=True
    )
    stages = [stage.cuda() for stage in gpt_stages(2)]
    world = InProcessExecutor(
        program, stages, loss=gpt.loss, boundary=BOUNDARY,
        execution=ExecutionOptions(record_timestamps=False),
    )  # fmt: skip
    progress = [GpuProgress(rank) for rank in world.executors]
    inputs, targets, scale = make_batch(4)
    inputs, targets = inputs.cuda(), targets.cuda()
    world.step(inputs, targets, scale)
    torch.cuda.synchronize()
    assert [p.get_progress() for p in progress] == [None, None]
    executor = world.executors[1]
    k = executor.state.index_of[Instr(Opcode.Forward, 1, 1)]
    wait, run_it = executor.runner.calls[k]

    def run_after_hang() -> None:
        torch.cuda._sleep(2 * LONG_CYCLES)
        run_it()

    executor.runner.calls[k] = Call(wait, run_after_hang)
    world.step(inputs, targets, scale)
    sleep(0.5)  # the rest of the step ends much earlier
    stall_sites = []
    for rank, rank_progress in zip(world.executors, progress, strict=True):
        error = make_stall_error("it stands", rank, 2, rank_progress, rank_progress.get_progress())
        stall_sites.append([(str(site.instr), site.note) for site in error.sites])
    assert stall_sites[1] == [("F 1.1", "in step 2, computes")]
    assert stall_sites[0] and all("waits for rank 1 to" in note for _, note in stall_sites[0])
    torch.cuda.synchronize()
    assert [p.get_progress() for p in progress] == [None, None]


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_unreported_step_has_no_host_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    config = write_config(tmp_path)
    issue = StepQueue.issue

    def issue_without_host_wait(self: StepQueue, *args: Any) -> None:
        with no_wait() if self.last_issued_step >= 2 else nullcontext():
            return issue(self, *args)

    monkeypatch.setattr(StepQueue, "issue", issue_without_host_wait)
    sets = ["train.log_every=100", "output.record=false", f"train.precision={precision}"]
    cuda = [*ONE_PROCESS, *sets, "train.device=cuda", f'output.dir="{tmp_path / "gpu"}"']
    assert run(str(config), cuda) == 0
    expected_losses = train_in_this_process(str(config), tmp_path / "cpu", "train.log_every=100")
    assert read_losses(tmp_path / "gpu") == pytest.approx(expected_losses, rel=2e-2)
