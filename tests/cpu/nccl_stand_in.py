"""A stand-in for NCCL with its use of streams, in real processes. The data go over Gloo.

As in torch's ProcessGroupNCCL, each process group has a stream. Work issued to a group waits for
the current stream, and runs on the group's stream after earlier work. `wait` of a Work makes the
current stream wait, and does not block the host. Synchronous collectives run on the current stream.
Messages are first copied into static memory, and a side stream waits for gathers.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from schedir.ir.isa.instructions import Lane
from schedir.ir.program import Program
from schedir.runtime.autograd.weight_gradient_formulas import PendingTensor
from schedir.runtime.executor import Executor
from schedir.runtime.recording.recorder import EventTimestamps
from schedir.tensor_parallel.mappings import _start_all_reduce as start_sum
from schedir.transports import collectives
from schedir.transports.collectives import GroupKey, start_in_group
from schedir.transports.p2p_groups import DirectedEdge, EdgeGroups
from schedir.transports.transport import Work
from tests.cpu.race_detector import RaceDetector
from tests.cpu.virtual_gpu import Event, Stream, VirtualGPU

Kind = Literal["send", "recv", "dX", "all_to_all"] | collectives.CollectiveName


def _name(kind: collectives.Collective) -> Kind:
    return "all_to_all" if isinstance(kind, collectives.AllToAll) else kind


class _StreamWork:
    """Work in progress on a group's stream."""

    def __init__(self, transport: NcclStandIn, kind: Kind, work: Work, stream: Stream) -> None:
        self.transport, self.kind = transport, kind
        self.work: Work | None = work
        self.end = Event(transport.gpu)
        self.end.record(stream)

    def wait(self) -> None:
        current = self.transport.gpu.stream
        # The recorder's own streams wait as soon as work is issued. The host must not wait for
        # data there, since the peer may send them later.
        if current not in self.transport.recorders and self.work is not None:
            with _disable_current_modes():
                self.work.wait()
            self.work = None  # Gloo's work can be waited for only once
        if self.kind != self.transport.unwaited:
            current.wait_event(self.end)


class _Issued:
    """A collective on a stream of the transport, with the work that transfers the data."""

    def __init__(self, transport: NcclStandIn, kind: Kind, issued: Any, data: Work) -> None:
        self.transport, self.kind, self.issued, self.data = transport, kind, issued, data
        self.record_end = issued.record_end

    def wait(self) -> None:
        with _disable_current_modes():
            self.data.wait()
        if self.kind != self.transport.unwaited:
            self.issued.wait()


class NcclStandIn(EdgeGroups):
    """A transport with NCCL's use of streams.

    With `unwaited`, it never waits for the end of that kind of work. This is a mutant that tests
    must find. `uses` counts issued work by kind. "dX" is a layer's sum of its input's gradient, if
    layers start it by `start_sum`.
    """

    def __init__(
        self, program: Program, gpu: VirtualGPU, races: RaceDetector, unwaited: Kind | None = None
    ) -> None:
        self.gpu, self.races, self.unwaited = gpu, races, unwaited
        self.streams: dict[int, Stream] = {}
        self.recorders: list[Any] = []  # streams on which the recorder waits
        self.uses: Counter[Kind] = Counter()
        super().__init__(program)
        self.use_streams("cuda")

    def follow(self, executor: Executor) -> None:
        """Remember the recorder's streams."""
        if isinstance(executor.timestamps, EventTimestamps):
            self.recorders = [*executor.timestamps.side_streams.values()]

    def _note(self, kind: Kind, stream: Stream, reads: list[Tensor], writes: list[Tensor]) -> None:
        stream.seen[stream] += 1
        self.uses[kind] += 1
        for tensor in reads:
            self.races.use(tensor, stream, kind, writes=False)
        for tensor in writes:
            self.races.use(tensor, stream, kind, writes=True)

    def _issue(
        self, kind: Kind, group: Any, reads: list[Tensor], writes: list[Tensor], start: Any
    ) -> Work:
        """Issue work that reads and writes these tensors to a group."""
        stream = self.streams.setdefault(id(group), Stream(self.gpu))
        stream.wait_stream(self.gpu.stream)
        self._note(kind, stream, reads, writes)
        with _disable_current_modes():
            work: Work = start()
        return _StreamWork(self, kind, work, stream)

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        group = self.edge_groups[DirectedEdge(lane, self.rank, peer)]
        start = partial(super().send, tensor, peer, lane)
        return self._issue("send", group, [tensor], [], start)

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        group = self.edge_groups[DirectedEdge(lane, peer, self.rank)]
        start = partial(super().recv, tensor, peer, lane)
        return self._issue("recv", group, [], [tensor], start)

    def issue_collective(
        self,
        kind: collectives.Collective,
        group: GroupKey,
        output_tensor: Tensor,
        input_tensor: Tensor,
    ) -> None:
        self._note(_name(kind), self.gpu.stream, [input_tensor], [output_tensor])
        with _disable_current_modes():
            self.data = start_in_group(
                kind, self.groups[group], output_tensor, input_tensor, is_async=True
            )

    def start_collective(
        self,
        kind: collectives.Collective,
        group: GroupKey,
        output_tensor: Tensor,
        input_tensor: Tensor,
    ) -> Work:
        issued = super().start_collective(kind, group, output_tensor, input_tensor)
        return _Issued(self, _name(kind), issued, self.data)

    def start_sum(self, group: Any, x: Tensor) -> PendingTensor:
        """Start the sum of an input's gradient over a group, as layers do."""

        def start() -> Any:
            return SimpleNamespace(wait=start_sum(group, x))

        work = self._issue("dX", group, [], [x], start)

        def wait() -> Tensor:
            work.wait()
            return x

        return wait
