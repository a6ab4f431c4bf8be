"""Tests of steps over real NCCL on one GPU: memory, waits, all options at once, failures."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedir import check
from schedir.errors import DeadlockError
from schedir.hang_diagnosis.stall_cause import ProcessLayout
from schedir.io.black_box import ProcessPhase
from schedir.ir.isa.instructions import Instr, Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.program_state import Call
from schedir.runtime.recording.allocator_growth import count_allocations
from schedir.schedules import one_f_one_b, pipedream_2bw
from schedir.training.processes.process_exit import RunMember
from schedir.training.processes.watchdog import Watchdog
from schedir.transports.gloo import GlooTransport
from schedir.transports.process_transport import ProcessTransport
from tests.cpu.gloo_processes import RankError
from tests.cpu.gloo_processes import run_fresh as run
from tests.cpu.tiny_stages import (
    Case,
    copy_parameters,
    gpt_executor,
    make_batch,
    make_replica_batch,
)
from tests.gpu.shared import REHEARSED, make_transport, no_wait, share_gpu, wait_for_device

HANG_CYCLES = 100_000_000_000  # cycles, about a minute
WATCHDOG_SECONDS = 10.0  # seconds, of the watchdog


PLAIN = Case(one_f_one_b, PipelineShape(2, 4), tp=2, buffer_sharing="latency_preserving")
MANY = PLAIN._replace(shape=PipelineShape(2, 24))
ALL = PLAIN._replace(dp=2, record=True)
UPDATES = PLAIN._replace(
    schedule=pipedream_2bw, shape=PipelineShape(2, 8, optimizer_steps=2, weight_delay=1), tp=1,
    dp=2, clip=False,
)  # fmt: skip
PROVEN = PLAIN._replace(tp=1, clip=False, overlap=False, tied=False)


def make_executor(case: Case, program: Program, transport: Any, device: torch.device) -> Executor:
    """Return an executor with AdamW, whose large epsilon does not amplify small differences."""
    adamw = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True)
    options = case.get_options(max_norm=0.5)
    return gpt_executor(program, transport, device, make_optimizer=adamw, **options)


def train(rank: int, folder: str | None, case: Case, steps: int) -> tuple[list[Tensor], list[int]]:
    """Return the weights after some steps, and each step's number of device memory requests.

    They run over NCCL if there is a folder, and otherwise over Gloo.
    """
    program = case.compile()
    if folder is None:
        device = torch.device("cpu")
        transport: ProcessTransport = GlooTransport(program)
    else:
        device = share_gpu(rank, folder)
        transport = make_transport(program, device)
    executor, allocations = make_executor(case, program, transport, device), []
    for step in range(steps):
        inputs, targets, scale = make_replica_batch(program, transport, seed=step)
        step_inputs = inputs.to(device), targets.to(device), scale
        before = count_allocations(device)
        with no_wait() if step else nullcontext():
            executor.step(*step_inputs)
        allocations.append(count_allocations(device) - before)
    return [p.cpu() for p in copy_parameters(executor)], allocations


def assert_trains_as_on_cpu(folder: Path, case: Case, steps: int = 3) -> list[list[int]]:
    expected = run(train, case.processes, None, case, steps)
    got = run(train, case.processes, str(folder), case, steps, limit=270)
    for (ours, _), (theirs, _) in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return [allocations for _, allocations in got]


def test_no_memory_is_allocated_after_first_step(tmp_path: Path) -> None:
    for first_step, *others in assert_trains_as_on_cpu(tmp_path, MANY, 4):
        assert (first_step > 0) != REHEARSED and others == [0, 0, 0]


def has_expandable_segments(rank: int, folder: str) -> bool:
    """Return whether the allocator expands segments, which `initialise` requests early."""
    torch.ones(1, device=share_gpu(rank, folder))
    settings: dict[str, Any] = torch.cuda.memory._snapshot()["allocator_settings"]
    return bool(settings["expandable_segments"])


@pytest.mark.usefixtures("real_gpu")
def test_allocator_uses_expandable_segments(tmp_path: Path) -> None:
    assert run(has_expandable_segments, 2, str(tmp_path), limit=100) == [True, True]


@pytest.mark.parametrize("case", [ALL, UPDATES], ids=["all options", "two updates"])
def test_options_train_as_on_cpu(tmp_path: Path, case: Case) -> None:
    assert_trains_as_on_cpu(tmp_path, case)


class DeviceSync(nn.Module):
    """A layer that synchronizes the device and releases cached memory in each forward."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        nn.init.constant_(self.inner.bias, k)

    def forward(self, x: Tensor) -> Tensor:
        wait_for_device()
        y: Tensor = self.inner(x)
        return y


def train_with_device_syncs(rank: int, folder: str) -> int:
    device = share_gpu(rank, folder)
    program = PROVEN.compile()
    check(program, "per_edge", host_device_sync=True)
    executor = Executor(
        program, rank, {rank: DeviceSync(rank).to(device)}, make_transport(program, device),
        loss=lambda y, target: (y - target).square().sum(), boundary=Boundary((2, 4)),
        execution=ExecutionOptions(allow_identical_stages=True),
    )  # fmt: skip
    x = torch.ones(4, 2, 4, device=device)
    for _ in range(3):
        executor.step(x, x)
    return executor.random_streams.step


def test_proven_program_survives_device_syncs(tmp_path: Path) -> None:
    """The checker refuses a program with early receives, so it is not run."""
    with pytest.raises(DeadlockError):
        check(PROVEN._replace(overlap=True).compile(), "per_edge", host_device_sync=True)
    assert run(train_with_device_syncs, 2, str(tmp_path), limit=200) == [3, 3]


def run_failing_step(rank: int, folder: str, failure: str) -> None:
    """Kill process 1 in its second step, or let its forward hang on the GPU."""
    device = share_gpu(rank, folder)
    os.dup2(os.open(str(Path(folder, f"said-{rank}")), os.O_CREAT | os.O_WRONLY), 2)
    program = PLAIN.compile()
    transport = make_transport(program, device)
    executor = make_executor(PLAIN, program, transport, device)
    inputs, targets, scale = make_batch(4)
    step_inputs = inputs.to(device), targets.to(device), scale
    executor.step(*step_inputs)
    if transport.rank == 1:
        k = executor.state.index_of[Instr(Opcode.Forward, 1, 1)]
        wait, forward = executor.runner.calls[k]
        fail = {"dies": partial(os.kill, os.getpid(), signal.SIGKILL),
                "hangs": partial(torch.cuda._sleep, HANG_CYCLES)}[failure]  # fmt: skip

        def run_failing_forward() -> None:
            fail()
            forward()

        executor.runner.calls[k] = Call(wait, run_failing_forward)
    member = RunMember(folder, ProcessLayout.from_program(program), rank)
    member.black_box.enter_phase(ProcessPhase.STEP, executor.random_streams.step)
    with Watchdog(member, WATCHDOG_SECONDS) as watchdog, watchdog.watch(executor):
        executor.step(*step_inputs)
        wait_for_device()


def read_outputs(folder: Path, failure: str) -> dict[int, str]:
    """Return the output of each process."""
    with pytest.raises(RankError) as error:
        run(run_failing_step, 4, str(folder), failure, limit=240, grace=90)
    for rank, text in error.value.tracebacks.items():
        print(f"rank {rank}: {text}", file=sys.stderr)
        assert "was killed" not in text and "Timeout (" not in text, f"rank {rank} hung"
    return {
        rank: Path(folder, f"said-{rank}").read_text(errors="replace") + text
        for rank, text in error.value.tracebacks.items()
    }


def test_all_processes_end_when_one_dies(tmp_path: Path) -> None:
    outputs = read_outputs(tmp_path, "dies")
    ended = {rank: text for rank, text in outputs.items() if text != "died without an error report"}
    assert len(outputs) == 4 and len(ended) >= 2, outputs


@pytest.mark.usefixtures("real_gpu")
def test_hanging_kernel_is_named_and_all_processes_end(tmp_path: Path) -> None:
    outputs = read_outputs(tmp_path, "hangs")
    hung = [text for text in outputs.values() if "F 1.1" in text]
    assert len(outputs) == 4 and hung, outputs
    assert any("waits for rank 1 to" in text for text in outputs.values()), outputs
