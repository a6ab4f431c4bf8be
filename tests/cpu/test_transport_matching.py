"""Tests of other transports than plain Gloo: NCCL's queues over Gloo, and shared memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from schedir import compile, expand_schedule
from schedir.analysis.progress_models import ProgressModel
from schedir.errors import DeadlockError
from schedir.ir.isa.instructions import SEND_OPS, Lane
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.passes.pass_types import BufferSharing
from schedir.schedules import gpipe, interleaved, one_f_one_b
from schedir.transports import process_groups
from schedir.transports.p2p_groups import (
    EdgeGroups,
    GroupedMessages,
    directed_edges,
    partition_disjoint_edges,
)
from schedir.transports.process_transport import ProcessTransport
from schedir.transports.shared_memory import SharedMemoryTransport
from schedir.transports.transport import Work
from schedir.verify.check import check
from tests.cases import cases, each_value
from tests.cpu.gloo_processes import RankError, run
from tests.cpu.per_device_transport import PerDeviceTransport
from tests.cpu.tiny_stages import (
    gpt_executor,
    gradients_by_stage,
    have_same_bits,
    make_batch,
    run_reference,
    split_1f1b,
)
from tests.pure.test_check import naive

TRANSPORTS: dict[str, type[ProcessTransport]] = {
    "per_edge": EdgeGroups,
    "grouped": GroupedMessages,
    "strict": PerDeviceTransport,
    "shared": SharedMemoryTransport,
}


TP_TRANSPORTS = cases(["per_edge", "shared"], ["grouped", "strict"])


def _run_steps(transport: ProcessTransport, program: Program) -> Any:
    executor = gpt_executor(program, transport)
    for _ in range(2):
        executor.step(*make_batch(program.shape.microbatches))
    return gradients_by_stage(executor)


def assert_reference_bits(shape: PipelineShape, results: list[Any]) -> None:
    """Assert that the gradients of all ranks, by stage, are those of the reference."""
    got = {s: gradients for rank in results for s, gradients in rank.items()}
    assert have_same_bits(got, dict(enumerate(run_reference(shape)[1])))


def run_rank(rank: int, kind: str, schedule: Any, shape: PipelineShape, tp: int) -> Any:
    model: ProgressModel = TRANSPORTS[kind].progress_model
    program = compile(schedule, shape, tp=tp, progress_model=model, tied_weights=True, overlap=True)
    return _run_steps(TRANSPORTS[kind](program), program)


@pytest.mark.parametrize(
    ("kind", "schedule", "shape"),
    cases(
        [
            ("per_edge", interleaved, PipelineShape(2, 4, 2)),  # both neighbours are the same peer
            ("grouped", interleaved, PipelineShape(2, 4, 2)),
            ("strict", one_f_one_b, PipelineShape(3, 4)),
            ("shared", split_1f1b, PipelineShape(3, 4)),
        ],
        [
            ("per_edge", one_f_one_b, PipelineShape(3, 4)),
            ("grouped", one_f_one_b, PipelineShape(3, 4)),
            ("strict", gpipe, PipelineShape(2, 3)),
            ("shared", interleaved, PipelineShape(2, 4, 2)),
        ],
    ),
)
def test_transports_have_reference_bits(kind: str, schedule: Any, shape: PipelineShape) -> None:
    assert_reference_bits(shape, run(run_rank, shape.ranks, kind, schedule, shape, 1))


def test_overlapped_programs_have_message_groups() -> None:
    for schedule, shape in (
        (one_f_one_b, PipelineShape(3, 4)),
        (interleaved, PipelineShape(2, 4, 2)),
    ):
        program = compile(schedule, shape, progress_model="per_device", overlap=True)
        assert all(stream.joined.any() for stream in program.streams)


def test_transports_with_tensor_parallelism_have_same_bits() -> None:
    """Scattered messages cross the edges of each slice, and all transports give the same bits."""
    shape = PipelineShape(2, 3)
    edge, *others = (run(run_rank, 4, kind, one_f_one_b, shape, 2) for kind in TP_TRANSPORTS)
    assert all(have_same_bits(edge, other) for other in others)


class StaticSends(EdgeGroups):
    """Sends from static memory, as NCCL does, and records the addresses."""

    def __init__(self, program: Program) -> None:
        self.sent: list[int] = []
        super().__init__(program)
        self.uses_static_buffers = True

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        self.sent.append(tensor.data_ptr())
        # The buffer is as large as the message: a part of a boundary is not in a whole one.
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        return super().send(tensor, peer, lane)


def count_sends(program: Program, rank: int) -> int:
    return sum(op in SEND_OPS for op, _, _ in program.streams[rank])


def record_send_addresses(
    rank: int, schedule: Any, shape: PipelineShape, tp: int, buffer_sharing: BufferSharing | None
) -> Any:
    """Return whether two steps send from the same addresses, how many there are, and gradients.

    Addresses of warmup steps are counted too.
    """
    program = compile(schedule, shape, tp=tp, tied_weights=True, buffer_sharing=buffer_sharing)
    transport = StaticSends(program)
    transport.sent.clear()
    grads = _run_steps(transport, program)
    sent, sends = transport.sent, count_sends(program, transport.rank)
    return sent[-2 * sends : -sends] == sent[-sends:], len({*sent}), grads


@pytest.mark.parametrize(
    ("schedule", "shape", "buffer_sharing"),
    each_value(
        [(split_1f1b, PipelineShape(2, 4)), (interleaved, PipelineShape(2, 4, 2))],
        [None, "minimal"],
    ),
)
def test_sends_use_static_memory(
    schedule: Any, shape: PipelineShape, buffer_sharing: BufferSharing | None
) -> None:
    results = run(record_send_addresses, shape.ranks, schedule, shape, 1, buffer_sharing)
    program = compile(schedule, shape, tied_weights=True, buffer_sharing=buffer_sharing)
    assert_reference_bits(shape, [gradients for _, _, gradients in results])
    for rank, (is_same, num_addresses, _) in enumerate(results):
        sends = count_sends(program, rank)
        assert is_same and 0 < num_addresses <= sends
        assert (num_addresses == sends) == (buffer_sharing is None)


def test_scattered_sends_use_static_memory() -> None:
    shape = PipelineShape(2, 3)
    static_results = run(record_send_addresses, 4, one_f_one_b, shape, 2, None)
    plain_results = run(run_rank, 4, "per_edge", one_f_one_b, shape, 2)
    expected = [(True, 3, gradients) for gradients in plain_results]
    assert have_same_bits(static_results, expected)


def run_unchecked_program(rank: int, kind: str) -> Any:
    """Run a program that only `per_edge` accepts, on a transport that claims this model."""
    program = naive(expand_schedule(one_f_one_b, PipelineShape(2, 4)))
    strict = partial(PerDeviceTransport, waits=2.0)
    transport: ProcessTransport = (strict if kind == "strict" else EdgeGroups)(program)
    with pytest.raises(DeadlockError):
        check(program, "per_device")
    transport.progress_model = "per_edge"
    return len(_run_steps(transport, program))


def test_program_illegal_per_device_hangs_only_on_strict_transport() -> None:
    assert run(run_unchecked_program, 2, "per_edge") == [1, 1]
    with pytest.raises(RankError) as error:
        run(run_unchecked_program, 2, "strict", limit=30)
    assert any("TransferTimeout" in tb for tb in error.value.tracebacks.values())


def record_groups(rank: int) -> Any:
    """Record the groups that this process helps to create, in order, and check its edges."""
    created, new_group = [], dist.new_group

    def record_group(ranks: list[int], *args: Any, **options: Any) -> Any:
        created.append(tuple(ranks))
        return new_group(ranks, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", record_group)
        transport = EdgeGroups(compile(one_f_one_b, PipelineShape(3, 4), tp=2))
    return created, sorted(transport.edge_groups)


def test_process_creates_only_its_own_groups() -> None:
    program = compile(one_f_one_b, PipelineShape(3, 4), tp=2)
    for rank, (created, own_edges) in enumerate(run(record_groups, 6)):
        before, after = (rank - 2, rank), (rank, rank + 2)
        # Each edge has a group for activations and one for gradients.
        edge_groups = [before] * 2 * (rank >= 2) + [after] * 2 * (rank < 4)
        # There are groups for the model, the layers and the gathers, and four colours of edges. A
        # process without an edge of a color is alone in that group.
        assert len(created) == 7 and all(rank in row for row in created)
        assert sorted(row for row in created[3:] if len(row) > 1) == sorted(edge_groups)
        assert own_edges == [
            e for e in directed_edges(program) if rank // 2 in (e.source, e.target)
        ]


def test_edges_of_one_color_have_no_common_rank() -> None:
    for schedule, shape, most in (
        # The minimum, since a rank in the middle has four edges.
        (one_f_one_b, PipelineShape(16, 16), 4),
        (interleaved, PipelineShape(8, 8, 2), 4),
        # There are 10 edges, and five ranks have at most two disjoint pairs.
        (interleaved, PipelineShape(5, 10, 2), 5),
    ):
        edges = directed_edges(compile(schedule, shape))
        colours = partition_disjoint_edges(edges)
        assert sorted(e for colour in colours for e in colour) == edges
        for colour in colours:
            ends = [rank for e in colour for rank in (e.source, e.target)]
            assert len({*ends}) == len(ends)
        assert len(colours) == most


def run_after_uneven_groups(rank: int) -> Any:
    """Create edges where processes already created different numbers of groups.

    torch returns the same color for all groups, and NCCL would create one group of them.
    """
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    program = compile(one_f_one_b, PipelineShape(3, 4), tied_weights=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_process_group_color", lambda ranks: 7)
        return _run_steps(EdgeGroups(program), program)


def run_after_destroyed_groups(rank: int) -> Any:
    """Create a transport after another one, some or all of whose groups were destroyed."""
    program = compile(one_f_one_b, PipelineShape(3, 4), tied_weights=True)
    for _ in range(2):
        transport = EdgeGroups(program, timeout=10.0)
        for group in transport.groups.values():
            if group is not None:
                dist.destroy_process_group(group)
    for group in transport.edge_groups.values():
        dist.destroy_process_group(group)
    return _run_steps(EdgeGroups(program, timeout=10.0), program)


@pytest.mark.parametrize("run_rank", [run_after_uneven_groups, run_after_destroyed_groups])
def test_edge_groups_work_after_other_groups(run_rank: Any) -> None:
    assert_reference_bits(PipelineShape(3, 4), run(run_rank, 3, limit=30))


def test_rows_of_one_color_are_separated(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(0, 1), (2, 3), (4, 5)]
    assert process_groups._partition_by_color(rows) == [rows]
    monkeypatch.setattr(dist.distributed_c10d, "_process_group_color", lambda ranks: ranks[0] % 4)
    assert process_groups._partition_by_color(rows) == [[(0, 1), (2, 3)], [(4, 5)]]


def test_directed_edges_of_one_f_one_b() -> None:
    edges = directed_edges(compile(one_f_one_b, PipelineShape(3, 4)))
    assert [(e.lane.name, e.source, e.target) for e in edges] == [
        ("ACT", 0, 1), ("ACT", 1, 2), ("GRAD", 1, 0), ("GRAD", 2, 1),
    ]  # fmt: skip


def wait_within_group(rank: int) -> Any:
    """Check that waiting for a transfer of an open group, which would never end, is refused."""
    transport = GroupedMessages(compile(one_f_one_b, PipelineShape(2, 2)))
    transport.start_group()
    work = transport.send(torch.zeros(1), 1 - rank, Lane.ACT)
    with pytest.raises(AssertionError):
        work.wait()
    other = transport.recv(torch.empty(1), 1 - rank, Lane.GRAD)
    transport.end_group()
    other.wait()
    work.wait()
    return True


def test_message_group_is_issued_at_its_end() -> None:
    assert run(wait_within_group, 2) == [True, True]
