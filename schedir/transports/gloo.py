"""Transports over torch.distributed: the process mesh, and Gloo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Final, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from schedir.analysis.progress_models import ProgressModel
from schedir.errors import ModelError
from schedir.ir.isa.instructions import Lane
from schedir.ir.pipeline.process_mesh import make_process_mesh
from schedir.ir.pipeline.tied_weights import find_reduction_groups
from schedir.ir.program import Program
from schedir.transports import process_groups
from schedir.transports.collectives import COLLECTIVES, CollectiveName, GroupKey
from schedir.transports.in_process.cuda_streams import StreamPoint
from schedir.transports.json_collectives import RecordTypes, find_difference, gather
from schedir.transports.transport import BufferSizes, SlotKey, Work, allocate_buffers


def require_cpus(processes: int) -> None:
    """Every machine has a CPU for its processes."""


def initialise(timeout: float, **init_args: Any) -> torch.device:
    """Initialise torch.distributed over Gloo, as torchrun says, or as `init_args` tells
    `init_process_group`; returns where the tensors of its processes are."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout), **init_args)
    return torch.device("cpu")


_LANE_OF_GROUP: Final[dict[GroupKey, Lane]] = {"tp": Lane.TP, "params": Lane.PARAMS}


class ProcessTransport:
    """Processes of torch.distributed, and what they do together: all but messages.

    Ranks lie in a mesh (dp, pp, tp), tp innermost, so that tensor-parallel groups are
    neighbours.  Groups for tensors on a GPU are NCCL's.

    The tensor-parallel group of collectives is another one than that of the layers, and runs on a
    CUDA stream of its own: a gather that waits for its message holds up no layer.

    `timeout` is how many seconds its groups wait for each other, NCCL's longer; unless told, as the
    `group` does, or all processes, and NCCL's as torch has it.  `device` is where tensors are, and
    `max_message_bytes` how many bytes one has at most, 0 if that is not known.

    `extra_programs` are programs beside the first that are to run on it, on the same mesh: it is
    made for the groups, and edges, of all.

    `torch.distributed` must be initialised with pp * tp * dp processes, or a `group` of it given
    that has so many: then its members alone make this, and other groups make theirs beside it.
    Raises ModelError otherwise.

    One that `schedir train` may choose has a row in `registry`.
    """

    progress_model: ProgressModel
    is_grouped = False
    blocking_hosts = True
    has_pipeline_group = False  # whether messages go through a group of the pipeline's ranks
    side_stream: Callable[[], AbstractContextManager[object]] = staticmethod(nullcontext)

    def __init__(
        self,
        program: Program,
        timeout: float | None = None,
        *,
        device: torch.device | str = "cpu",
        max_message_bytes: int = 0,
        group: dist.ProcessGroup | None = None,
        extra_programs: Sequence[Program] = (),
    ) -> None:
        self.programs = (program, *extra_programs)
        self.uses_static_buffers = torch.device(device).type != "cpu"
        self.tp, self.dp, pp = program.tp, program.dp, program.shape.ranks
        self.parent_group = group
        world = dist.get_world_size(group)
        if world != pp * self.tp * self.dp:
            raise ModelError(
                f"{world} processes do not make pp {pp} x tp {self.tp} x dp {self.dp} = "
                f"{pp * self.tp * self.dp}",
                program=program.name,
            )
        members = np.array(dist.get_process_group_ranks(group or dist.group.WORLD))
        self.mesh = mesh = members.reshape(self.dp, pp, self.tp)
        self.dp_rank, self.rank, self.tp_rank = (
            int(k) for k in np.unravel_index(dist.get_rank(group), mesh.shape)
        )
        if timeout is None and not self.uses_static_buffers:
            timeout = process_groups.get_host_timeout(group)
        self.timeout = timeout
        self.make_group = partial(process_groups.make_group, timeout=timeout, device=device)
        self.name = program.name
        told = {"the program": program.digest[:12], "the transport": type(self).__name__}
        told |= {f"program {k}": one.digest[:12] for k, one in enumerate(self.programs[1:], 2)}
        told["the number of programs"] = str(len(self.programs))
        process_groups.align_group_count(
            self.check_agreement(told, process_groups.count_created_groups())
        )
        for one in extra_programs:
            self._require_mesh(one)
        if self.has_pipeline_group:
            self.pipeline_group = self._make_own_group(mesh.swapaxes(1, 2).reshape(-1, pp))
        # That of the layers is another one than that of gathers.
        self.tp_group = self._make_own_group(mesh.reshape(-1, self.tp)) if self.tp > 1 else None
        self.groups: dict[GroupKey, Any] = {}
        rows = collect_group_rows(*self.programs)
        for some in process_groups.partition_disjoint(rows, lambda name: {*rows[name].flat}):
            made = self.make_group([row for name in some for row in members[rows[name]].tolist()])
            self.groups |= dict.fromkeys(some, made)
        self.lane_streams: dict[Lane, torch.cuda.Stream] = {}
        if self.uses_static_buffers:
            self.use_streams(device)

    def use_streams(self, device: torch.device | str) -> None:
        """Let collectives run on streams of ours, one for each queue that a rank has of them.

        Of itself torch would have a stream for each group.  They are of high priority: a gather
        must not wait for multiprocessors behind what computes.
        """
        self.uses_static_buffers = True
        lanes = dict.fromkeys((*_LANE_OF_GROUP.values(), Lane.DP))
        self.lane_streams = {lane: torch.cuda.Stream(device, priority=-1) for lane in lanes}
        self.side_stream = partial(torch.cuda.stream, self.lane_streams[Lane.TP])

    @classmethod
    def supports(cls, program: Program, group: dist.ProcessGroup | None = None) -> bool:
        """Whether these processes can run the program so; all must ask."""
        return True

    def disconnect(self) -> None:
        """Go, in the middle of a step or not: the connections of messages are closed, and a rank
        that waits for this one is told so.  Nothing can be sent after it."""

    def shut_down(self) -> None:
        """Leave, where nothing is under way, and give back what its groups hold: threads, sockets
        and memory.  `tp_group` stays: it is the layers'.  Messages over NCCL stay connected."""
        self.disconnect()
        for group in {*self.groups.values()}:
            if group is not None:
                dist.destroy_process_group(group)
        self.groups = {}

    def _make_own_group(self, rows: NDArray[np.int64]) -> Any:
        """The group of the row that this process is in; None if it is in none."""
        return self.make_group(rows.tolist())

    def check_agreement(
        self, facts: Mapping[str, str], payload: object = None, record_types: RecordTypes = ()
    ) -> list[Any]:
        """As Transport.agree: all processes must call this."""
        all_of = gather((dict(facts), payload), self.parent_group, record_types)
        if fact := find_difference([own for own, _ in all_of]):
            raise ModelError(fact, program=self.name)
        return [told for _, told in all_of]

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """As Transport.send."""
        raise NotImplementedError

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """As Transport.recv."""
        raise NotImplementedError

    def allocate_buffers(
        self, buffer_sizes: BufferSizes, device: torch.device, programs: Sequence[Program]
    ) -> dict[SlotKey, Tensor]:
        """As Transport.buffers."""
        self.require_supported(programs)
        return allocate_buffers(buffer_sizes, device)

    def require_supported(self, programs: Sequence[Program]) -> None:
        """Raise ModelError for a program that has other groups, or edges, than those of this."""
        for program in programs:
            self._require_mesh(program)
            if lacks := self.describe_missing_channels(program):
                raise ModelError(
                    f"the transport of {self.name} has no {lacks}",
                    program=program.name,
                    hint="a transport is made for all that it runs: extra_programs=[...]",
                )

    def describe_missing_channels(self, program: Program) -> str:
        """What a program needs, and this has not, in words; "" if nothing."""
        lacks = collect_group_rows(program).keys() - self.groups.keys()
        return f"group of processes for {min(map(str, lacks))}" if lacks else ""

    def _require_mesh(self, program: Program) -> None:
        own = len(self.mesh[0]), self.tp, self.dp
        if (program.shape.ranks, program.tp, program.dp) != own:
            raise ModelError(
                f"the program is for pp {program.shape.ranks} x tp {program.tp} x dp {program.dp}, "
                f"and its transport for pp {own[0]} x tp {own[1]} x dp {own[2]}",
                program=program.name,
            )

    def on_step_begin(self, program: int) -> None:
        """Messages are matched by their order, whatever the program is."""

    def on_step_end(self) -> None:
        """Nobody needs to know."""

    def start_group(self) -> None:
        """Only a transport that is `is_grouped` is told."""

    def end_group(self) -> None:
        """As `start_group`."""

    def start_collective(
        self, kind: CollectiveName, group: GroupKey, output_tensor: Tensor, input_tensor: Tensor
    ) -> Work:
        """As Transport.collective."""
        if not self.lane_streams:
            return cast(
                Work, COLLECTIVES[kind].start(self.groups[group], output_tensor, input_tensor, True)
            )
        lane = self.lane_streams[_LANE_OF_GROUP.get(group, Lane.DP)]
        lane.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(lane):
            self.issue_collective(kind, group, output_tensor, input_tensor)
        return LaneWork(lane, (output_tensor, input_tensor))

    def issue_collective(
        self, kind: CollectiveName, group: GroupKey, output_tensor: Tensor, input_tensor: Tensor
    ) -> None:
        """Issue a collective to the current stream."""
        COLLECTIVES[kind].start(self.groups[group], output_tensor, input_tensor, False)


class LaneWork(StreamPoint):
    """What was issued to a stream; the memory that it uses is kept until somebody waits."""

    def __init__(self, lane_stream: torch.cuda.Stream, used_tensors: tuple[Tensor, ...]) -> None:
        super().__init__(lane_stream)
        self.used_tensors = used_tensors

    def wait(self) -> None:
        """Let the current stream follow."""
        super().wait()
        self.used_tensors = ()


def collect_group_rows(*programs: Program) -> dict[GroupKey, NDArray[np.int64]]:
    """By what the collectives of programs are for, the processes that meet, a row for each group:
    by their places in the mesh, in its order."""
    rows: dict[GroupKey, NDArray[np.int64]] = {}
    for program in programs:
        rows = _list_group_rows(program) | rows
    return rows


def _list_group_rows(program: Program) -> dict[GroupKey, NDArray[np.int64]]:
    tp, dp, shape = program.tp, program.dp, program.shape
    mesh = make_process_mesh(shape.ranks, tp, dp)
    rows: dict[GroupKey, NDArray[np.int64]] = {"model": mesh.reshape(dp, -1)}
    if tp > 1:
        rows["tp"] = mesh.reshape(-1, tp)
    if dp > 1:
        rows["dp"] = mesh.reshape(dp, -1).T
    if dp > 1 and program.zero:  # of its own: gathers must not queue behind reductions
        rows["params"] = rows["dp"]
    for ranks in find_reduction_groups(program.trained_ties, shape):
        rows[ranks] = mesh[:, ranks].swapaxes(1, 2).reshape(-1, len(ranks))
    return rows


class GlooTransport(ProcessTransport):
    """The transport of CPU processes.  Its progress model is `per_edge`.

    Gloo honours tags: one tag per lane makes each directed edge a queue of its own, which nothing
    else can hold up.

    >>> import schedir
    >>> from torch import distributed
    >>> from schedir.runtime import GlooTransport
    >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    >>> one = schedir.compile(schedir.schedules.gpipe,
    ...     schedir.PipelineShape(ranks=1, microbatches=4))
    >>> GlooTransport(one).progress_model
    'per_edge'
    >>> GlooTransport(schedir.compile(schedir.schedules.gpipe,
    ...     schedir.PipelineShape(ranks=4, microbatches=4), dp=2))
    Traceback (most recent call last):
        ...
    schedir.errors.ModelError: gpipe: 1 processes do not make pp 4 x tp 1 x dp 2 = 8
    >>> distributed.destroy_process_group()
    """

    progress_model: ProgressModel = "per_edge"
    has_pipeline_group = True

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """Start to send; Gloo's sends run on their own."""
        # The group itself: dist.isend would look up each time what is known here.
        return cast(Work, self.pipeline_group.send([tensor], peer, lane))

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """Start to receive."""
        return cast(Work, self.pipeline_group.recv([tensor], peer, lane))

    def disconnect(self) -> None:
        """As Processes.leave: Gloo closes a connection when nobody has its group any more."""
        pipeline, self.pipeline_group = self.pipeline_group, None
        if pipeline is not None:
            dist.destroy_process_group(pipeline)
