"""Find CUDA streams of a rank that share a hardware queue.

CUDA does not report which streams share a hardware queue, so a probe detects them before the first
step. At each end of each edge, the probe starts a receive of a message that is not sent yet.
Meanwhile the other streams of the rank get a short operation each. A stream whose operation does
not end shares a queue with the edge. Then the message is sent, and all operations end. The probe
cannot hang: a host waits only for other hosts, and the message ends all blocked operations.

Most streams may share a queue without harm. `require_safe_queues` refuses a program only if the
shared queues would make the program deadlock. The probe does not test two cases: collective streams
that share a queue with each other, and the single communicator of `GroupedMessages`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from schedir.analysis.critical_path.longest_path import compute_earliest_times
from schedir.analysis.deadlock import explain_deadlock
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.shared_queue_graph import SharedQueueGraph
from schedir.errors import ModelError
from schedir.ir.instruction_index import NO_POSITION
from schedir.ir.isa.instructions import INSTRUCTIONS, RECV_OPS, TRANSFER_OPS, Lane
from schedir.ir.program import Program
from schedir.transports import process_groups
from schedir.transports.p2p_groups import DirectedEdge, EdgeGroups

PROBE_TIMEOUT: Final = 2.0  # seconds; an operation that shares no queue takes microseconds
Queue = DirectedEdge | Lane
# Issues a short operation to the stream of a lane, and returns a function that returns whether the
# operation has ended.
LaneProbe = Callable[[Lane], Callable[[], bool]]


class SharedQueuePair(NamedTuple):
    """Two queues of a rank that share a hardware queue, and therefore wait for each other.

    Attributes:
        rank: The rank.
        edge: A directed edge. If both queues are edges, `edge` is the first edge in sorted order.
        other_queue: Another edge, or a lane.
    """

    rank: int
    edge: DirectedEdge
    other_queue: Queue

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {_describe_queue(self.edge)}, and "
            f"{_describe_queue(self.other_queue)}"
        )


def require_safe_queues(
    program: Program, transport: EdgeGroups, probe: LaneProbe, timeout: float = PROBE_TIMEOUT
) -> list[SharedQueuePair]:
    """Find queues that share a hardware queue, and refuse a program that would hang.

    All processes must call this.

    Args:
        program: The program that will run.
        transport: The transport. The process group of each edge must already exist.
        probe: Issues a short operation, see `LaneProbe`. The operation must have run once before
            this call, because its first run may take longer.
        timeout: Seconds after which an operation counts as blocked.

    Returns:
        The pairs of all ranks, sorted by their descriptions.

    Raises:
        ModelError: The program would deadlock with these shared queues. All processes raise this
            error.
    """
    pairs_per_process = transport.check_agreement(
        {},
        find_shared_queues(transport, probe, timeout),
        record_types=[SharedQueuePair, DirectedEdge, Lane],
    )
    shared_pairs = sorted(
        {shared_pair for process_pairs in pairs_per_process for shared_pair in process_pairs},
        key=str,
    )
    if shared_pairs:
        queue_numbers = [(_find_queue_number(program, s.rank, s.edge),
            _find_queue_number(program, s.rank, s.other_queue))
                 for s in shared_pairs]  # fmt: skip
        used_pairs = [pair for pair in queue_numbers if NO_POSITION not in pair]
        graph = SharedQueueGraph(
            program, transport.progress_model, used_pairs, blocking_hosts=transport.blocking_hosts
        )
        earliest_times = compute_earliest_times(graph)
        if not earliest_times.is_done.all():
            deadlock = explain_deadlock(graph, earliest_times)
            raise ModelError(
                f"streams share a hardware queue of a GPU ({'; '.join(map(str, shared_pairs))}), "
                f"so the program would deadlock: {deadlock.fact}",
                program=program.name,
                hint='transport = "nccl_grouped", or a program in which each rank exchanges '
                "messages with fewer ranks",
            ) from deadlock
    return shared_pairs


def find_shared_queues(
    transport: EdgeGroups, probe: LaneProbe, timeout: float = PROBE_TIMEOUT
) -> list[SharedQueuePair]:
    """Return the queues of this process's rank that share a hardware queue with an edge.

    All processes must call this.

    Args:
        transport: The transport. The process group of each edge must already exist.
        probe: Issues a short operation, see `LaneProbe`.
        timeout: Seconds after which an operation counts as blocked.

    Returns:
        The pairs of this rank, sorted by their descriptions.
    """
    rank, shared_pairs = transport.rank, set[SharedQueuePair]()
    lanes = [Lane.COMPUTE, *transport.lane_streams]
    # The tensors are allocated before any receive waits, because an allocation may wait for the
    # device.
    tensor_of_edge = {
        edge: torch.zeros(1, device=transport.device) for edge in transport.edge_groups
    }

    # The pipeline ranks with the same replica and tensor-parallel rank form a group.
    ranks = transport.mesh.shape[1]
    host_group = process_groups.make_group(
        transport.mesh.swapaxes(1, 2).reshape(-1, ranks).tolist()
    )

    def host_barrier() -> None:
        dist.all_reduce(torch.zeros(1), group=host_group)

    def transfer(edge: DirectedEdge, *, sends: bool) -> Any:
        return transport.start_transfer(edge, tensor_of_edge[edge], is_send=sends)

    # Use each direction of each edge once now, because the first use may take longer than the probe
    # allows.
    for edge in transport.edges:
        for source in (edge.source, edge.target):
            if edge in tensor_of_edge:
                transfer(edge, sends=rank == source).wait()
    for edge in transport.edges:
        for receiver, sender in ((edge.target, edge.source), (edge.source, edge.target)):
            other_edges = [
                e for e in transport.edges if e != edge and receiver in (e.source, e.target)
            ]
            works: dict[DirectedEdge, Any] = {}
            completion_checks: dict[Queue, Callable[[], bool]] = {}
            host_barrier()
            if rank == receiver:
                works[edge] = transfer(edge, sends=False)
                completion_checks = {lane: probe(lane) for lane in lanes}
            for other_edge in other_edges:
                if other_edge in tensor_of_edge:
                    works[other_edge] = transfer(other_edge, sends=rank != receiver)
            if rank == receiver:
                completion_checks |= {
                    other_edge: works[other_edge].is_completed for other_edge in other_edges
                }
                shared_pairs |= {
                    _make_pair(receiver, edge, queue)
                    for queue in _find_late_queues(completion_checks, timeout)
                }
            host_barrier()
            if rank == sender:
                works[edge] = transfer(edge, sends=True)
            for work in works.values():
                work.wait()
    host_barrier()
    return sorted(shared_pairs, key=str)


def _make_pair(rank: int, edge: DirectedEdge, other_queue: Queue) -> SharedQueuePair:
    if isinstance(other_queue, Lane):
        return SharedQueuePair(rank, edge, other_queue)
    return SharedQueuePair(rank, *sorted((edge, other_queue)))


def _find_late_queues(
    completion_checks: dict[Queue, Callable[[], bool]], timeout: float
) -> list[Queue]:
    """Return the queues whose operations do not end in time.

    If the compute stream is blocked, the result omits the queues of messages, because messages wait
    for computation.
    """
    deadline = time.monotonic() + timeout
    late_queues = [*completion_checks]
    while late_queues and time.monotonic() < deadline:
        time.sleep(1e-4)
        late_queues = [queue for queue, has_ended in completion_checks.items() if not has_ended()]
    return [q for q in late_queues if Lane.COMPUTE not in late_queues or isinstance(q, Lane)]


def _find_queue_number(program: Program, rank: int, queue: Queue) -> int:
    """Return the number of a queue in the program's graph, or NO_POSITION if it is unused."""
    graph = Graph.from_program(program, "per_edge")
    index = graph.index
    for k in range(int(program.offsets[rank]), int(program.offsets[rank + 1])):
        row = INSTRUCTIONS[index.op[k]]
        if isinstance(queue, Lane):
            is_queue = row.lane is queue
        elif row.op in TRANSFER_OPS and row.lane is queue.lane:
            peer = program.peer_rank(index.locate(k)[2])
            ends = (peer, rank) if row.op in RECV_OPS else (rank, peer)
            is_queue = ends == (queue.source, queue.target)
        else:
            is_queue = False
        if is_queue:
            return int(graph.queue[k])
    return NO_POSITION


def _describe_queue(queue: Queue) -> str:
    if isinstance(queue, Lane):
        names = {Lane.COMPUTE: "computation", Lane.TP: "gathers", Lane.EP: "all-to-alls"}
        return names.get(queue, "reductions")
    kind = "activations" if queue.lane is Lane.ACT else "gradients"
    return f"{kind} from {queue.source} to {queue.target}"


def make_cuda_probe(transport: EdgeGroups, device: torch.device | str) -> LaneProbe:
    """Return a probe that runs a small kernel on the CUDA stream of a lane.

    The kernel has run once on each stream before this function returns.

    Args:
        transport: The transport with the streams.
        device: The GPU.
    """
    tensor = torch.zeros(1, device=device)

    def touch(lane: Lane) -> Callable[[], bool]:
        stream = transport.lane_streams.get(lane, torch.cuda.current_stream(device))
        end_event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            tensor.add_(1)
            end_event.record(stream)
        return end_event.query

    for lane in (Lane.COMPUTE, *transport.lane_streams):
        touch(lane)
    torch.cuda.synchronize(device)
    return touch
