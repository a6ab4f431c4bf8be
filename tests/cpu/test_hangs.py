"""Tests that no rank waits forever when another rank fails, is stopped or dies.

They check the errors and their times. Executors run over Gloo and shared memory, in processes with
a timeout of torch.distributed. `benchmarks/faults.py` runs `schedir train` with random faults.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from schedir.checkpoints import dcp_storage
from schedir.compiler.compile import compile
from schedir.errors import ExecutionError
from schedir.hang_diagnosis.stall_cause import ProcessLayout
from schedir.io.black_box import ProcessPhase, read_process_state
from schedir.ir.isa.instructions import Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.runtime.executor_options import ExecutionOptions, GradientOptions
from schedir.schedules import one_f_one_b
from schedir.training.checkpointing import TrainingCheckpoints
from schedir.training.config.train_config import TrainConfig
from schedir.training.processes import process_exit
from schedir.training.processes.process_exit import RunMember, exit_cleanly, join_run
from schedir.training.processes.watchdog import Watchdog, find_user_location, read_stack
from schedir.transports import process_groups
from schedir.transports.gloo import GlooTransport
from schedir.transports.process_transport import ProcessTransport
from schedir.transports.shared_memory import (
    SharedMemoryTransport,
    close_connections,
    connect_neighbours,
    receive_memory,
    start_listening,
)
from schedir.transports.transport import PeerLeft, PeerTimeout
from tests.cases import cases
from tests.cpu.gloo_processes import CONTEXT, run
from tests.cpu.process_faults import cause_fault, install_instruction_fault
from tests.cpu.tiny_stages import gpt_executor, make_replica_batch
from tests.cpu.train_command import wait_until

TIMEOUT = 2.0  # seconds after which a rank reports an error
EXTRA_SECONDS = 15.0  # additional time for a busy machine


class Case(NamedTuple):
    """A program, and the fault of its process 0, with its instruction and time."""

    options: dict[str, Any]
    transport: type[ProcessTransport]
    kind: str
    op: Opcode
    when: str = "within"

    @property
    def program(self) -> Program:
        return compile(one_f_one_b, PipelineShape(2, 2), **self.options)


def run_rank(number: int, case: Case, folder: Path, barrier: Any) -> None:
    """Run steps until one fails, and write the error and the time. The process does not end."""
    torch.set_num_threads(1)
    program = case.program
    world = program.shape.ranks * program.dp * program.tp
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=number, world_size=world,
        timeout=timedelta(seconds=EXTRA_SECONDS),
    )  # fmt: skip
    group = dist.new_group([*range(world)], timeout=timedelta(seconds=TIMEOUT))
    transport = case.transport(program, group=group)

    def record_time_and_fail() -> None:
        (folder / "at").write_text(str(time.time()))
        cause_fault(case.kind)

    if number == 0:
        stream = program.streams[0]
        install_instruction_fault(
            [i.op for i in stream].index(case.op), 2, case.when, record_time_and_fail
        )
    clip = 1.0 if program.clip_grad_norm else None
    executor = gpt_executor(
        program,
        transport,
        lr=0.1,
        execution=ExecutionOptions(spill_dir=folder),
        gradients=GradientOptions(max_norm=clip),
    )
    barrier.wait()
    text = "no step failed"
    try:
        for step in range(4):
            executor.step(*make_replica_batch(program, transport, step))
    except ExecutionError as error:
        text = str(error)
    (folder / f"new-{number}").write_text(f"{time.time()}\n{text}")
    os.rename(folder / f"new-{number}", folder / f"said-{number}")
    time.sleep(1000)


@contextmanager
def running_ranks(case: Case, folder: Path) -> Iterator[int]:
    program = case.program
    world = program.shape.ranks * program.dp * program.tp
    barrier = CONTEXT.Barrier(world)
    processes = [
        CONTEXT.Process(target=run_rank, args=(k, case, folder, barrier)) for k in range(world)
    ]
    try:
        for process in processes:
            process.start()
        yield world
    finally:
        for process in processes:
            process.kill()
            process.join()


OFFLOAD_TO_DISK = {"offload": "all", "offload_to_disk": "all"}
CASES = {
    "stopped in a reduction": Case(
        {"dp": 2, "zero": 3, "clip_grad_norm": True}, GlooTransport, "stop", Opcode.ReduceScatter
    ),
    "raised on the disk's lane": Case(
        OFFLOAD_TO_DISK, SharedMemoryTransport, "raise", Opcode.OffloadToDisk, "on the lane"
    ),
    "raised on the host's lane": Case(
        {"dp": 2, "optimizer_placement": "cpu_step"},
        GlooTransport,
        "raise",
        Opcode.HostOptimizerStep,
        "on the lane",
    ),
    "died as it stores states": Case(
        {"optimizer_placement": "host", "checkpoint_snapshots": True},
        GlooTransport,
        "kill",
        Opcode.OffloadState,
    ),
    "raised, and stays": Case({"dp": 2}, GlooTransport, "raise", Opcode.Backward),
    "stopped in a forward": Case({"tp": 2}, SharedMemoryTransport, "stop", Opcode.Forward),
}


@pytest.mark.parametrize("name", cases([*CASES][:3], [*CASES][3:]))
def test_other_ranks_report_instruction_within_timeout(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    with running_ranks(case, tmp_path) as world:
        other_processes = [k for k in range(world) if k or case.kind == "raise"]
        wait_until(lambda: all((tmp_path / f"said-{k}").exists() for k in other_processes))
    start = float((tmp_path / "at").read_text())
    for k in other_processes:
        end, _, error = (tmp_path / f"said-{k}").read_text().partition("\n")
        rank = k // case.program.tp % 2
        assert float(end) - start < TIMEOUT + EXTRA_SECONDS
        # A process that waits for the end of the step has no current instruction.
        place = f"after the last instruction of rank {rank}:"
        assert (f"rank {rank}" in error and "#" in error) or place in error, error
        if k:
            causes = (  # the message depends on the process that detects the fault first
                "another process was lost",
                "rank 0 has left",
                "a peer did not respond",
                "rank 0 sent nothing within the timeout",
                "rank 0 has not ended its step in",
            )
            assert any(cause in error for cause in causes), error
        else:
            assert "no such luck" in error, error


def test_silent_neighbour_times_out_in_set_up() -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
        name = start_listening(listener, 2)
        for calls in (False, True):
            if calls:
                caller.connect(name)
            with pytest.raises(PeerTimeout, match="rank 0 did not connect within the timeout"):
                connect_neighbours(listener, ["", name], 1, [0], 0.2)


def test_disconnected_neighbour_raises_in_set_up() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        name = start_listening(listener, 2)
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(name)
        with pytest.raises(PeerLeft):
            connect_neighbours(listener, ["", name], 1, [0], 5.0)


def test_neighbour_without_shared_memory_times_out() -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
        caller.connect(start_listening(listener, 2))
        caller.sendall(struct.pack("q", 0))
        connections = connect_neighbours(listener, [], 1, [0], 0.2)
        with pytest.raises(PeerTimeout, match="rank 0 did not share its memory within the timeout"):
            receive_memory(connections[0], 0)
        close_connections(connections.values())


def run_save(number: int, folder: Path, stops: bool) -> None:
    """Run a process during a save. The second process is stopped, or has a slow disk."""
    join_run(member := RunMember(folder, ProcessLayout(2, 1, 1), number))
    process_exit.EXIT_GRACE = 0.1  # type: ignore[misc]
    with open(folder / f"said-{number}", "w") as log:
        os.dup2(log.fileno(), 2)
    with Watchdog(member, 0.5):
        member.black_box.enter_phase(ProcessPhase.SAVE, 4)
        if number and stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(20 if stops else 2)
    exit_cleanly()


@pytest.mark.parametrize("stops", [True, False])
def test_watchdog_reports_stopped_process_but_not_slow_disk(stops: bool, tmp_path: Path) -> None:
    processes = [CONTEXT.Process(target=run_save, args=(k, tmp_path, stops)) for k in (1, 0)]
    try:
        processes[0].start()
        if stops:  # otherwise the other process may find that it has not started
            wait_until(lambda: read_process_state(processes[0].pid or 0, 0) == "stopped")
        processes[1].start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == (
            [-signal.SIGKILL, 1] if stops else [0, 0]
        )
    finally:
        for process in processes:
            process.kill()
            process.join()
    output = (tmp_path / "said-0").read_text().partition("\n")[0]
    expected = (
        "no process has made progress for 0.5 s: process 1 (pipeline rank 1) is stopped, "
        "saving step 4"
    )
    assert output.startswith(expected) if stops else not output


def run_peer_failure(number: int, folder: Path) -> None:
    """Stop the second process. The first reports that a message exceeded its timeout."""
    join_run(member := RunMember(folder, ProcessLayout(2, 1, 1), number))
    process_exit.EXIT_GRACE = 0.1  # type: ignore[misc]
    member.black_box.enter_phase(ProcessPhase.SAVE, 4)
    if number:
        os.kill(os.getpid(), signal.SIGSTOP)
    with open(folder / "errors", "w") as log:
        os.dup2(log.fileno(), 2)
    process_exit.exit_with_error("a peer did not respond", is_peer_failure=True)


def test_report_of_stopped_process_begins_with_reason(tmp_path: Path) -> None:
    processes = [CONTEXT.Process(target=run_peer_failure, args=(k, tmp_path)) for k in (1, 0)]
    try:
        processes[0].start()
        wait_until(lambda: read_process_state(processes[0].pid or 0, 0) == "stopped")
        processes[1].start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [-signal.SIGKILL, 1]
    finally:
        for process in processes:
            process.kill()
            process.join()
    report = (tmp_path / "errors").read_text()
    expected = "a peer did not respond: process 1 (pipeline rank 1) is stopped, saving step 4"
    assert report.startswith(expected)


def run_slow_set_up(folder: Path) -> None:
    """Set up for longer than the timeout, and then make no progress for a moment."""
    join_run(member := RunMember(folder, ProcessLayout(1, 1, 1), 0))
    program = compile(one_f_one_b, PipelineShape(1, 2))
    executor: Any = SimpleNamespace(
        position=None, program=program, rank=0, state=SimpleNamespace(device=torch.device("cpu"))
    )
    executor.runner = executor.current_runner = executor
    executor.state.stream, executor.position = program.streams[0], 0
    with Watchdog(member, 1.5) as watchdog:
        member.black_box.enter_phase(ProcessPhase.SET_UP)
        time.sleep(2)
        with watchdog.watch(executor):
            time.sleep(0.5)
    exit_cleanly()


def test_slow_set_up_is_not_reported_as_hang(tmp_path: Path) -> None:
    process = CONTEXT.Process(target=run_slow_set_up, args=(tmp_path,))
    process.start()
    process.join(60)
    process.kill()
    process.join()
    assert process.exitcode == 0


def save_with_slow_disk(rank: int, folder: Path, snapshots: bool) -> bool:
    """Save while the disk of the first process takes longer than the timeout."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT))
    program = compile(one_f_one_b, PipelineShape(2, 2), checkpoint_snapshots=snapshots)
    executor = gpt_executor(program, GlooTransport(program, group=group), lr=0.1)
    write = dcp_storage.write

    def write_slowly(*arguments: Any) -> Any:
        if not rank:
            time.sleep(TIMEOUT + 0.5)
        return write(*arguments)

    dcp_storage.write = write_slowly  # type: ignore[assignment]
    batches: Any = SimpleNamespace(batch_size=1, make_cursor=lambda taken: None)
    checkpoints = TrainingCheckpoints(
        executor, TrainConfig(checkpoint_dir=str(folder)), batches, None
    )
    checkpoints.save(1)
    return checkpoints.saved_step == 1


@pytest.mark.parametrize("snapshots", cases([False], [True]))
def test_save_waits_longer_than_timeout(snapshots: bool, tmp_path: Path) -> None:
    assert run(save_with_slow_disk, 2, tmp_path, snapshots) == [True, True]


def test_groups_use_timeout_of_torch() -> None:
    timeout = timedelta(seconds=7)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)  # type: ignore[attr-defined]
    try:
        assert process_groups.get_host_timeout() == 7.0
        transport = GlooTransport(compile(one_f_one_b, PipelineShape(1, 2)))
        assert process_groups.get_host_timeout(transport.pipeline_group) == 7.0
        assert (
            process_groups.get_host_timeout(
                GlooTransport(compile(one_f_one_b, PipelineShape(1, 2)), 3.0).pipeline_group
            )
            == 3.0
        )
    finally:
        dist.destroy_process_group()


def test_stack_of_running_thread_has_only_positions_of_its_code() -> None:
    """A thread that calls functions and generators all the time is read many times."""
    stopped = Event()

    def numbers(depth: int) -> Iterator[int]:
        if depth:
            yield from numbers(depth - 1)
        yield depth

    def main() -> None:
        while not stopped.is_set():
            sum(numbers(8))

    thread = Thread(target=main)
    thread.start()
    stacks = [read_stack(thread.ident or 0) for _ in range(200)]
    stopped.set()
    thread.join()
    own = [[p.function for p in stack if p.file == __file__] for stack in stacks]
    assert all(names[-1] == "main" and {*names[:-1]} <= {"numbers"} for names in own)
    assert any(names[:-1] for names in own)
    assert {find_user_location(stack).rpartition(" in ")[2] for stack in stacks} <= {
        "main",
        "numbers",
    }
    assert read_stack(thread.ident or 0) == ()
