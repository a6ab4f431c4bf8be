"""Find CUDA streams of a rank that share a hardware queue.

Nobody says which streams a GPU gives one hardware queue, so it is tried, once, before the first
step.  At each end of each edge a receive waits for a message that is held back.  Meanwhile the
rank's other streams get something short to do; what does not end shares a queue with the edge.
Then the message is sent, and all of it ends.  Nothing can hang: only hosts wait.

Of streams that share, the program says whether it matters: most pairs may.  What is not tried is
whether the streams of ours share one among themselves, and the one communicator of `Grouped`.
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
from schedir.analysis.shared_queues import SharedQueueGraph
from schedir.errors import ModelError
from schedir.ir.instruction_index import NO_POSITION
from schedir.ir.isa.instructions import INSTRUCTIONS, RECV_OPS, TRANSFER_OPS, Lane
from schedir.ir.program import Program
from schedir.transports import process_groups
from schedir.transports.p2p_groups import DirectedEdge, EdgeGroups

PROBE_TIMEOUT: Final = 2.0  # seconds; what shares no queue takes some microseconds
Queue = DirectedEdge | Lane
# Something short, issued to the stream of a lane: says whether it has ended.
LaneProbe = Callable[[Lane], Callable[[], bool]]


class SharedQueuePair(NamedTuple):
    """Two queues of a rank that wait for each other; of two edges the lesser first."""

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
    """The queues that share a hardware queue, on any rank; all processes must call this.

    `probe` must have done before what it does at first use.  Raises ModelError in each process if
    the program would hang so.
    """
    told = transport.check_agreement(
        {},
        find_shared_queues(transport, probe, timeout),
        record_types=[SharedQueuePair, DirectedEdge, Lane],
    )
    shared = sorted({one for each in told for one in each}, key=str)
    if shared:
        pairs = [(_find_queue_number(program, s.rank, s.edge),
            _find_queue_number(program, s.rank, s.other_queue))
                 for s in shared]  # fmt: skip
        known = [pair for pair in pairs if NO_POSITION not in pair]
        graph = SharedQueueGraph(
            program, transport.progress_model, known, blocking_hosts=transport.blocking_hosts
        )
        reached = compute_earliest_times(graph)
        if not reached.is_done.all():
            why = explain_deadlock(graph, reached)
            raise ModelError(
                f"streams share a hardware queue of a GPU ({'; '.join(map(str, shared))}), and the "
                f"program would wait for ever: {why.fact}",
                program=program.name,
                hint='transport = "nccl_grouped", or a program with fewer edges on a rank',
            ) from why
    return shared


def find_shared_queues(
    transport: EdgeGroups, probe: LaneProbe, timeout: float = PROBE_TIMEOUT
) -> list[SharedQueuePair]:
    """The queues of this process's rank that share one with an edge; all processes must call it."""
    rank, found = transport.rank, set[SharedQueuePair]()
    lanes = [Lane.COMPUTE, *transport.lane_streams]
    # Made before anything waits: an allocation may wait for the device.
    numbers = {edge: torch.zeros(1, device=transport.device) for edge in transport.edge_groups}

    ranks = transport.mesh.shape[1]  # each slice of each replica by itself
    hosts = process_groups.make_group(transport.mesh.swapaxes(1, 2).reshape(-1, ranks).tolist())

    def meet() -> None:
        dist.all_reduce(torch.zeros(1), group=hosts)

    def along(edge: DirectedEdge, *, sends: bool) -> Any:
        return transport.start_transfer(edge, numbers[edge], is_send=sends)

    for edge in transport.edges:  # both ways, which have a first use each
        for source in (edge.source, edge.target):
            if edge in numbers:
                along(edge, sends=rank == source).wait()
    for edge in transport.edges:
        for here, there in ((edge.target, edge.source), (edge.source, edge.target)):
            others = [e for e in transport.edges if e != edge and here in (e.source, e.target)]
            works: dict[DirectedEdge, Any] = {}
            asks: dict[Queue, Callable[[], bool]] = {}
            meet()
            if rank == here:
                works[edge] = along(edge, sends=False)
                asks = {lane: probe(lane) for lane in lanes}
            for other in others:
                if other in numbers:
                    works[other] = along(other, sends=rank != here)
            if rank == here:
                asks |= {other: works[other].is_completed for other in others}
                found |= {
                    _make_pair(here, edge, queue) for queue in _find_late_queues(asks, timeout)
                }
            meet()
            if rank == there:
                works[edge] = along(edge, sends=True)
            for work in works.values():
                work.wait()
    meet()
    return sorted(found, key=str)


def _make_pair(rank: int, edge: DirectedEdge, other_queue: Queue) -> SharedQueuePair:
    if isinstance(other_queue, Lane):
        return SharedQueuePair(rank, edge, other_queue)
    return SharedQueuePair(rank, *sorted((edge, other_queue)))


def _find_late_queues(
    completion_checks: dict[Queue, Callable[[], bool]], timeout: float
) -> list[Queue]:
    """What does not end in time, but for messages that follow a computation which does not."""
    over = time.monotonic() + timeout
    late = [*completion_checks]
    while late and time.monotonic() < over:
        time.sleep(1e-4)
        late = [queue for queue, ended in completion_checks.items() if not ended()]
    return [q for q in late if Lane.COMPUTE not in late or isinstance(q, Lane)]


def _find_queue_number(program: Program, rank: int, queue: Queue) -> int:
    """The number of a rank's queue in the program's graph; -1 if it has nothing to do."""
    graph = Graph.from_program(program, "per_edge")
    index = graph.index
    for k in range(int(program.offsets[rank]), int(program.offsets[rank + 1])):
        row = INSTRUCTIONS[index.op[k]]
        if isinstance(queue, Lane):
            same = row.lane is queue
        elif row.op in TRANSFER_OPS and row.lane is queue.lane:
            peer = program.peer_rank(index.locate(k)[2])
            ends = (peer, rank) if row.op in RECV_OPS else (rank, peer)
            same = ends == (queue.source, queue.target)
        else:
            same = False
        if same:
            return int(graph.queue[k])
    return NO_POSITION


def _describe_queue(queue: Queue) -> str:
    """A queue, as a person calls it."""
    if isinstance(queue, Lane):
        return {Lane.COMPUTE: "what it computes", Lane.TP: "gathers"}.get(queue, "reductions")
    kind = "activations" if queue.lane is Lane.ACT else "gradients"
    return f"{kind} from {queue.source} to {queue.target}"


def make_cuda_probe(transport: EdgeGroups, device: torch.device | str) -> LaneProbe:
    """Of streams of a GPU: a kernel on each, which has been there once."""
    one = torch.zeros(1, device=device)

    def touch(lane: Lane) -> Callable[[], bool]:
        stream = transport.lane_streams.get(lane, torch.cuda.current_stream(device))
        ended = torch.cuda.Event()
        with torch.cuda.stream(stream):
            one.add_(1)
            ended.record(stream)
        return ended.query

    for lane in (Lane.COMPUTE, *transport.lane_streams):
        touch(lane)
    torch.cuda.synchronize(device)
    return touch
