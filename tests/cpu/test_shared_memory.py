"""Tests of messages through shared memory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedir import compile
from schedir.errors import ModelError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.models import gpt
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.schedules import bitpipe, chimera, one_f_one_b
from schedir.schedules.schedule_algebra import F, RankSchedule, Schedule
from schedir.transports import shared_memory
from schedir.transports.shared_memory import SharedMemoryTransport
from tests.cases import cases
from tests.cpu.gloo_processes import RankError, run
from tests.cpu.tiny_stages import (
    BOUNDARY,
    copy_gradients,
    gpt_stages,
    have_same_bits,
    make_batch,
    run_reference,
)


def schedule_forwards(r: int, P: int, m: int) -> RankSchedule:
    """Return only forwards, so that only the transport delays a sender."""
    return m * F


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.two = nn.Parameter(torch.full((), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.two


def compile_forwards(m: int) -> Program:
    return compile(schedule_forwards, PipelineShape(2, m), progress_model="per_edge")


def compile_1f1b() -> Program:
    return compile(one_f_one_b, PipelineShape(2, 3), progress_model="per_edge")


def make_executor(
    program: Program, rank: int, transport: SharedMemoryTransport | None = None
) -> Executor:
    """Return a rank that doubles four numbers. The loss is their sum minus a target."""
    return Executor(
        program, rank, {rank: Double()}, transport or SharedMemoryTransport(program, 20.0),
        loss=lambda y, target: (y - target).sum(), boundary=Boundary((4,)),
    )  # fmt: skip


def step_on_ones(executor: Executor) -> Tensor | None:
    """Run a step on microbatches of ones. Each adds 16 to the loss."""
    m = executor.program.shape.microbatches
    return executor.step(torch.ones(m, 4), torch.zeros(m, 4))


def run_gpt(rank: int, schedule: Schedule, shape: PipelineShape) -> Any:
    program = compile(schedule, shape, progress_model="per_edge", tied_weights=True)
    stages = gpt_stages(shape.stages)
    own_stages = {s: stages[s] for s in shape.stages_on_rank[rank]}
    executor = Executor(
        program, rank, own_stages, SharedMemoryTransport(program), loss=gpt.loss, boundary=BOUNDARY
    )
    executor.step(*make_batch(shape.microbatches))
    return {s: copy_gradients([m])[0] for s, m in own_stages.items()}


@pytest.mark.parametrize(
    ("schedule", "placement"), cases([(bitpipe, "mirror-vee")], [(chimera, "mirror")])
)
def test_stage_replicas_have_reference_bits(schedule: Schedule, placement: str) -> None:
    shape = PipelineShape(4, 4, placement=placement)
    program = compile(schedule, shape, tied_weights=True, progress_model="per_edge")
    _, expected_gradients = run_reference(shape, program=program)
    for gradients in run(run_gpt, shape.ranks, schedule, shape):
        assert have_same_bits(gradients, {s: expected_gradients[s] for s in gradients})


def run_slow_receiver(rank: int, steps: int, m: int) -> list[Tensor | None]:
    """Return the losses of steps. The second rank starts each step late."""
    executor = make_executor(compile_forwards(m), rank)
    losses = []
    for step in range(steps):
        if rank:
            time.sleep(0.2)
        x = torch.full((m, 4), float(step))
        losses.append(executor.step(x, torch.zeros(m, 4)))
    return losses


def test_sender_does_not_overwrite_previous_step() -> None:
    _, losses = run(run_slow_receiver, 2, 4, 3)
    assert [float(loss) for loss in losses] == [step * 4.0 * 4 * 3 for step in range(4)]


def send_before_receives(rank: int, m: int) -> Tensor | None:
    """Send all messages before the first receive. A socket cannot buffer them."""
    executor = make_executor(compile_forwards(m), rank)
    if rank:
        dist.barrier()
    loss = step_on_ones(executor)
    if not rank:
        dist.barrier()
    return loss


def test_send_does_not_wait_for_receive() -> None:
    _, loss = run(send_before_receives, 2, 1500)
    assert float(loss) == 16 * 1500


def run_with_lost_peer(rank: int, is_lost: bool) -> None:
    # On a loaded machine, rank 0 may see only after seconds that rank 1 has left.
    program = compile_1f1b()
    transport = SharedMemoryTransport(program, 30.0 if is_lost else 1.5)
    executor = make_executor(program, rank, transport)
    if rank and is_lost:
        os._exit(0)
    if rank:
        time.sleep(6)
    step_on_ones(executor)


@pytest.mark.parametrize(
    ("is_lost", "message"),
    [
        (True, "rank 1 has left"),
        (False, "PeerTimeout: rank 1 sent nothing within the timeout"),
    ],
)
def test_lost_or_late_peer_is_named(is_lost: bool, message: str) -> None:
    with pytest.raises(RankError) as error:
        run(run_with_lost_peer, 2, is_lost, grace=10.0)
    assert message in error.value.tracebacks[0]


def run_in_directory(rank: int, place: str, is_missing: bool) -> str:
    """Use one directory for shared memory, or a missing one for the second rank."""
    transport = SharedMemoryTransport(program := compile_1f1b(), 20.0)
    shared_memory.MEMORY_DIRECTORIES = (place if rank == 0 or not is_missing else f"{place}/none",)
    try:
        executor = make_executor(program, rank, transport)
    except ModelError as error:
        return error.fact
    step_on_ones(executor)
    return ""


@pytest.mark.parametrize("is_missing", [False, True])
def test_memory_files_are_deleted(is_missing: bool, tmp_path: Path) -> None:
    for error in run(run_in_directory, 2, str(tmp_path), is_missing):
        said = error.startswith("process 1 cannot allocate shared memory: No such file")
        assert said == is_missing
    assert not list(tmp_path.iterdir())


def run_in_namespace(rank: int, spaces: list[str]) -> bool:
    shared_memory.NETWORK_NAMESPACE = spaces[rank]
    return shared_memory.can_share_memory()


def test_different_network_namespaces_cannot_share_memory(tmp_path: Path) -> None:
    spaces = [str(tmp_path / "a"), str(tmp_path / "b")]
    for space in spaces:
        os.symlink(f"net:[{space}]", space)
    assert run(run_in_namespace, 2, spaces) == [False, False]
    assert run(run_in_namespace, 2, spaces[:1] * 2) == [True, True]


def run_two_executors(rank: int) -> list[float]:
    """Run executors one after the other on one transport."""
    transport = SharedMemoryTransport(program := compile_1f1b(), 5.0)
    losses = []
    for k in range(2):
        executor = make_executor(program, rank, transport)
        for _ in range(2):
            losses.append(executor.step(torch.full((3, 4), k + 1.0), torch.zeros(3, 4)))
    return [float(loss) for loss in losses if loss is not None]


def test_transport_is_reusable_by_next_executor() -> None:
    assert run(run_two_executors, 2, grace=6.0) == [[], [48.0, 48.0, 96.0, 96.0]]


def run_identity_stage(rank: int) -> list[Tensor | None]:
    """Return losses that are received tensors, in memory that the sender will overwrite."""
    transport = SharedMemoryTransport(program := compile_forwards(3), 20.0)
    stage = Double() if rank == 0 else nn.Identity()
    executor = Executor(
        program, rank, {rank: stage}, transport, loss=lambda y, _: y, boundary=Boundary(())
    )
    end_step = executor.state.transport.on_step_end

    def end_slowly() -> None:
        end_step()
        time.sleep(0.3)

    executor.state.transport.on_step_end = end_slowly  # type: ignore[method-assign]
    return [executor.step(torch.full((3,), float(step)), torch.zeros(3)) for step in range(3)]


def test_loss_in_received_memory_is_summed_before_reuse() -> None:
    _, losses = run(run_identity_stage, 2)
    assert [float(loss) for loss in losses] == [0.0, 6.0, 12.0]


class _DelayedConnection:
    """A connection that delays its last message until the receiver has finished."""

    def __init__(self, connection: Any, messages: int) -> None:
        self.connection, self.left = connection, messages

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)

    def send(self, *how: Any) -> None:
        self.left -= 1
        if not self.left:
            dist.barrier()  # the receiver reads the counters meanwhile
            dist.barrier()
        self.connection.send(*how)


def run_with_delayed_sender(rank: int) -> float:
    transport = SharedMemoryTransport(program := compile_forwards(3), 5.0)
    executor = make_executor(program, rank, transport)
    if rank == 0:
        (channel,) = transport.outgoing.values()
        channel.connection = _DelayedConnection(channel.connection, 3)  # type: ignore[assignment]
    else:
        dist.barrier()
    loss = step_on_ones(executor)
    if rank:
        for channel_in in transport.incoming.values():
            channel_in.connection.close()
        dist.barrier()
    return float(loss or 0)


def test_receiver_may_exit_after_its_last_message() -> None:
    assert run(run_with_delayed_sender, 2) == [0.0, 48.0]


def list_files_while_waiting(rank: int, place: str) -> list[str]:
    """Return the files of the first rank before the second has arrived."""
    transport = SharedMemoryTransport(program := compile_1f1b(), 20.0)
    shared_memory.MEMORY_DIRECTORIES = (place,)
    files = []

    def allocate_late(*how: Any) -> Any:
        time.sleep(1)
        files.extend(os.listdir(place))
        return SharedMemoryTransport.allocate_buffers(transport, *how)

    if rank:
        transport.allocate_buffers = allocate_late  # type: ignore[method-assign, assignment]
    make_executor(program, rank, transport)
    return files


def test_waiting_process_has_no_memory_file(tmp_path: Path) -> None:
    assert run(list_files_while_waiting, 2, str(tmp_path)) == [[], []]


def request_shared_slots(rank: int) -> str:
    shape = PipelineShape(2, 3)
    program = compile(one_f_one_b, shape, progress_model="per_edge", buffer_sharing="minimal")
    with pytest.raises(ModelError) as error:
        SharedMemoryTransport(program)
    return error.value.hint


def test_shared_slots_are_refused() -> None:
    hint = 'GlooTransport(program); in a configuration, transport = "gloo"'
    assert run(request_shared_slots, 2) == [hint] * 2
