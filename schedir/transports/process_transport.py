"""The base class of transports over torch.distributed: process groups and collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Real
from typing import Any, Final, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from schedir.analysis.progress_models import ProgressModel
from schedir.errors import ModelError, UsageError, describe, require_type
from schedir.ir.isa.instructions import Lane
from schedir.ir.pipeline.process_mesh import find_process_count_error, make_process_mesh
from schedir.ir.pipeline.tied_weights import find_reduction_groups
from schedir.ir.program import Program
from schedir.transports import process_groups
from schedir.transports.collectives import Collective, GroupKey, start_in_group
from schedir.transports.in_process.cuda_streams import StreamPoint
from schedir.transports.json_collectives import RecordTypes, find_difference, gather
from schedir.transports.transport import (
    BufferSizes,
    SlotKey,
    Work,
    allocate_buffers,
    require_all_processes,
)

_LANE_OF_GROUP: Final[dict[GroupKey, Lane]] = {
    "tp": Lane.TP,
    "params": Lane.PARAMS,
    "expert_params": Lane.PARAMS,
    "ep": Lane.EP,
}


def _describe_program(program: Program) -> str:
    """Return a text that differs between processes if their programs differ."""
    return f"{program.name} ({program.shape}, digest {program.digest[:12]})"


class ProcessTransport:
    """The process groups and collectives of a transport over torch.distributed.

    Subclasses add messages: `send` and `recv`. To let `schedir train` choose a subclass, add a row
    to `registry`.

    The processes form a mesh (dp, pp, tp). tp is the innermost dimension, so the processes of a
    tensor-parallel group are adjacent. Groups for tensors on a GPU use NCCL.

    The instructions of the program and the layers of the model use separate tensor-parallel groups
    and separate CUDA streams. So a gather that waits for its message does not delay a layer.

    `torch.distributed` must be initialised with pp * tp * dp processes, or `group` must have that
    number of processes. With `group`, the members of the group create this transport, and other
    processes do not. Other groups may create other transports.

    Args:
        program: The program that the transport runs.
        timeout: The time that a process waits for other processes in its groups, in seconds. NCCL
            groups wait longer, by `process_groups.WATCHDOG_MARGIN`. By default Gloo groups have the
            timeout of `group` or of the default group, and NCCL groups have the default of torch.
        device: The device of the tensors.
        max_message_bytes: The size of the largest message, in bytes, or 0 if it is unknown.
        group: The process group that runs the program. By default all processes run it.
        extra_programs: Other programs that run on the same mesh. The transport creates the groups
            and edges of all programs.

    Raises:
        ModelError: The number of processes is not pp * tp * dp, the processes have different
            programs or transports, or an extra program has a different mesh.
        UsageError: A program is not a `Program`, or `timeout` is not a positive number.
    """

    progress_model: ProgressModel
    is_grouped = False
    blocking_hosts = True
    has_pipeline_group = False  # True if one group of all pipeline ranks sends the messages
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
        require_type(program, "program", Program, "schedir.compile(schedule, shape)")
        for index, extra in enumerate(extra_programs):
            name = f"extra_programs[{index}]"
            require_type(extra, name, Program, "schedir.evaluation_program(program)")
        if timeout is not None and not (isinstance(timeout, Real) and timeout > 0):
            fact = f"timeout must be a positive number of seconds, not {describe(timeout)}"
            raise UsageError(fact, fields=["timeout"])
        self.programs: tuple[Program, ...] = (program, *extra_programs)
        self.device: torch.device | str = device
        self.max_message_bytes = max_message_bytes
        self.require_supported_device()
        self.uses_static_buffers: bool = torch.device(device).type != "cpu"
        self.tp: int = program.tp
        self.dp: int = program.dp
        pp = program.shape.ranks
        self.parent_group = group
        if group is None and not dist.is_initialized():
            raise ModelError(
                f"{type(self).__name__} needs a process group, and there is none",
                program=program.name,
                hint='call torch.distributed.init_process_group("gloo") first, and start the '
                f"script with torchrun --nproc-per-node {pp * self.tp * self.dp}",
            )
        world_size = dist.get_world_size(group)
        if fact := find_process_count_error(world_size, pp, self.tp, self.dp):
            raise ModelError(
                fact,
                program=program.name,
                hint=f"torchrun --nproc-per-node {pp * self.tp * self.dp}, or compile a program "
                f"whose pp x tp x dp is {world_size}",
            )
        members = np.array(dist.get_process_group_ranks(group or dist.group.WORLD))
        self.mesh: NDArray[np.int64] = members.reshape(self.dp, pp, self.tp)
        coordinates = np.unravel_index(dist.get_rank(group), self.mesh.shape)
        self.dp_rank: int = int(coordinates[0])
        self.rank: int = int(coordinates[1])
        self.tp_rank: int = int(coordinates[2])
        if timeout is None and not self.uses_static_buffers:
            timeout = process_groups.get_host_timeout(group)
        self.timeout = timeout
        self.make_group: Callable[..., Any] = partial(
            process_groups.make_group, timeout=timeout, device=device
        )
        self.name: str = program.name
        facts = {"the program": _describe_program(program), "the transport": type(self).__name__}
        facts |= {
            f"extra_programs[{k}]": _describe_program(extra)
            for k, extra in enumerate(extra_programs)
        }
        facts["the number of programs"] = str(len(self.programs))
        with require_all_processes(f"a {type(self).__name__}", self.name):
            group_counts = self.check_agreement(facts, process_groups.count_created_groups())
        process_groups.align_group_count(group_counts)
        for extra_program in extra_programs:
            self._require_mesh(extra_program)
        if self.has_pipeline_group:
            rows_of_ranks = self.mesh.swapaxes(1, 2).reshape(-1, pp)
            self.pipeline_group: Any = self._make_own_group(rows_of_ranks)
        # The layers use this group. Instructions use a separate group, `self.groups["tp"]`.
        self.tp_group: Any = None
        if self.tp > 1:
            self.tp_group = self._make_own_group(self.mesh.reshape(-1, self.tp))
        self.groups: dict[GroupKey, Any] = {}
        rows = collect_group_rows(*self.programs)
        for keys in process_groups.partition_disjoint(rows, lambda name: {*rows[name].flat}):
            key_group = self.make_group(
                [row for name in keys for row in members[rows[name]].tolist()]
            )
            self.groups |= dict.fromkeys(keys, key_group)
        self.lane_streams: dict[Lane, torch.cuda.Stream] = {}
        if self.uses_static_buffers:
            self.use_streams(device)
        self.open_channels()

    def require_supported_device(self) -> None:
        """Refuse a device or programs that the transport does not support.

        The constructor calls this method before it creates groups. By default, it refuses nothing.

        Raises:
            ModelError: The transport does not support the device or a program.
        """

    def open_channels(self) -> None:
        """Create the groups and the connections for messages.

        The constructor calls this method at its end. By default, it does nothing.

        Raises:
            ModelError: The processes cannot exchange messages.
        """

    def use_streams(self, device: torch.device | str) -> None:
        """Run collectives on CUDA streams of this transport, one for each lane with collectives.

        By default torch has one stream for each group. The streams have high priority, because a
        gather must not wait until compute kernels release their multiprocessors.

        Args:
            device: The GPU.
        """
        self.uses_static_buffers = True
        lanes = dict.fromkeys((*_LANE_OF_GROUP.values(), Lane.DP))
        if "ep" not in self.groups:
            del lanes[Lane.EP]
        self.lane_streams = {lane: torch.cuda.Stream(device, priority=-1) for lane in lanes}
        self.side_stream = partial(torch.cuda.stream, self.lane_streams[Lane.TP])

    @classmethod
    def supports(cls, program: Program, group: dist.ProcessGroup | None = None) -> bool:
        """Return whether these processes can run the program over this transport.

        All processes must call this.

        Args:
            program: The program.
            group: The process group that runs the program. By default all processes run it.
        """
        return True

    def disconnect(self) -> None:
        """Close the connections for messages, even in the middle of a step.

        A rank that waits for a message of this rank gets an error. This rank cannot send
        afterwards. In `EdgeGroups` and `GroupedMessages`, this method does nothing.
        """

    def shut_down(self) -> None:
        """Disconnect, and release the threads, sockets and memory of the groups.

        No transfer may be in progress. `tp_group` stays usable, because the layers use it. NCCL
        connections for messages stay open.
        """
        self.disconnect()
        for group in {*self.groups.values()}:
            if group is not None:
                dist.destroy_process_group(group)
        self.groups = {}

    def _make_own_group(self, rows: NDArray[np.int64]) -> Any:
        """Create a group for each row of processes, and return this process's group or None."""
        return self.make_group(rows.tolist())

    def check_agreement(
        self, facts: Mapping[str, str], payload: object = None, record_types: RecordTypes = ()
    ) -> list[Any]:
        """See `Transport.check_agreement`. All processes must call this."""
        results = gather((dict(facts), payload), self.parent_group, record_types)
        if fact := find_difference([process_facts for process_facts, _ in results]):
            hint = "every process must pass the same options and costs to schedir.compile"
            is_program = " do not agree on the program: " in fact
            raise ModelError(fact, program=self.name, hint=hint if is_program else "")
        return [process_payload for _, process_payload in results]

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """See `Transport.send`."""
        raise NotImplementedError

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """See `Transport.recv`."""
        raise NotImplementedError

    def allocate_buffers(
        self, buffer_sizes: BufferSizes, device: torch.device, programs: Sequence[Program]
    ) -> dict[SlotKey, Tensor]:
        """Allocate the memory into which messages are received.

        Args:
            buffer_sizes: The bytes of each slot, by kind (`schedir.ir.isa.instructions.Value`):
                `{Value.ACT_IN: [4096, 4096]}`.
            device: The device of the memory.
            programs: The programs that will run.

        Returns:
            A flat uint8 tensor for each slot, by kind and number: `(Value.ACT_IN, 0)`.

        Raises:
            ModelError: The transport was not created for one of the programs.
        """
        self.require_supported(programs)
        return allocate_buffers(buffer_sizes, device)

    def require_supported(self, programs: Sequence[Program]) -> None:
        """Refuse programs that need groups or edges that this transport does not have.

        Args:
            programs: The programs to check.

        Raises:
            ModelError: A program has a different mesh than this transport, or needs a group or an
                edge that this transport lacks.
        """
        for program in programs:
            self._require_mesh(program)
            if missing := self.describe_missing_channels(program):
                raise ModelError(
                    f"the transport of {self.name} has no {missing}",
                    program=program.name,
                    hint="pass all programs to the transport: extra_programs=[...]",
                )

    def describe_missing_channels(self, program: Program) -> str:
        """Return a description of a group or edge that a program needs and this transport lacks.

        Args:
            program: The program.

        Returns:
            A noun phrase for an error message, or "" if nothing is missing.
        """
        missing_keys = collect_group_rows(program).keys() - self.groups.keys()
        return f"group of processes for {min(map(str, missing_keys))}" if missing_keys else ""

    def _require_mesh(self, program: Program) -> None:
        mesh_sizes = len(self.mesh[0]), self.tp, self.dp
        if (program.shape.ranks, program.tp, program.dp) != mesh_sizes:
            raise ModelError(
                f"the program has pp {program.shape.ranks} x tp {program.tp} x dp {program.dp}, "
                f"but the transport has pp {mesh_sizes[0]} x tp {mesh_sizes[1]} "
                f"x dp {mesh_sizes[2]}",
                program=program.name,
            )

    def on_step_begin(self, program: int) -> None:
        """Do nothing, because this transport matches messages only by their order.

        Args:
            program: The index of the program in the `programs` of `allocate_buffers`.
        """

    def on_step_end(self) -> None:
        """Do nothing, because no peer waits for the end of a step."""

    def start_group(self) -> None:
        """Do nothing. Transports with `is_grouped` override this."""

    def end_group(self) -> None:
        """Do nothing. Transports with `is_grouped` override this."""

    def start_collective(
        self, kind: Collective, group: GroupKey, output_tensor: Tensor, input_tensor: Tensor
    ) -> Work:
        """See `Transport.start_collective`."""
        if not self.lane_streams:
            work = start_in_group(
                kind, self.groups[group], output_tensor, input_tensor, is_async=True
            )
            return cast(Work, work)
        lane_stream = self.lane_streams[_LANE_OF_GROUP.get(group, Lane.DP)]
        lane_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(lane_stream):
            self.issue_collective(kind, group, output_tensor, input_tensor)
        return LaneWork(lane_stream, (output_tensor, input_tensor))

    def issue_collective(
        self, kind: Collective, group: GroupKey, output_tensor: Tensor, input_tensor: Tensor
    ) -> None:
        """Issue a collective to the current CUDA stream.

        Args:
            kind: The collective.
            group: The group that runs the collective.
            output_tensor: The output, see `Transport.start_collective`.
            input_tensor: The input.
        """
        start_in_group(kind, self.groups[group], output_tensor, input_tensor, is_async=False)


class LaneWork(StreamPoint):
    """Work that was issued to a CUDA stream, with the tensors that the work uses.

    Args:
        lane_stream: The stream.
        used_tensors: Tensors. Their memory must not be reused before `wait`.
    """

    def __init__(self, lane_stream: torch.cuda.Stream, used_tensors: tuple[Tensor, ...]) -> None:
        super().__init__(lane_stream)
        self.used_tensors: tuple[Tensor, ...] = used_tensors

    def wait(self) -> None:
        """Let the current stream wait for the work, and drop the references to its tensors."""
        super().wait()
        self.used_tensors = ()


def collect_group_rows(*programs: Program) -> dict[GroupKey, NDArray[np.int64]]:
    """Return the process groups that the collectives of programs need.

    Args:
        *programs: Programs on the same mesh.

    Returns:
        For each group key an array with one row for each group. A row has the indices of the
        group's processes in the flattened mesh (dp, pp, tp).
    """
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
    if (ep := program.ep) > 1:
        groups = mesh.reshape(dp // ep, ep, -1)
        rows["ep"] = rows["ep_counts"] = groups.swapaxes(1, 2).reshape(-1, ep)
        if dp > ep:
            rows["expert_dp"] = groups.reshape(dp // ep, -1).T
    if dp > 1 and program.zero:  # a separate group, so that gathers do not wait for reductions
        rows["params"] = rows["dp"]
        if "expert_dp" in rows:
            rows["expert_params"] = rows["expert_dp"]
    for ranks in find_reduction_groups(program.trained_ties, shape):
        rows[ranks] = mesh[:, ranks].swapaxes(1, 2).reshape(-1, len(ranks))
    return rows
