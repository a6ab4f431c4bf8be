"""The interface through which an executor moves tensors between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from schedir.analysis.progress_models import ProgressModel
from schedir.errors import CommandHint, ExecutionError
from schedir.ir.isa.instructions import Lane, Value
from schedir.ir.program import Program
from schedir.transports.collectives import Collective, GroupKey

SlotKey = tuple[Value, int]  # the kind and the number of a slot
BufferSizes = Mapping[Value, Sequence[int]]  # by kind, the bytes of each slot


class Work(Protocol):
    """An operation in progress."""

    def wait(self) -> object:
        """Wait for the operation. Call this method once."""
        ...


class Transport(Protocol):
    """The transport of one rank.

    Methods block the host only if their documentation mentions it. `Work.wait` may block, too.
    Messages of one lane between two ranks arrive in the order in which they are sent.

    Attributes:
        progress_model: The progress model of the transport. The executor refuses programs that are
            not proven free of deadlocks under this model.
        blocking_hosts: True if all instructions after a compute instruction in a stream wait for
            the end of the compute. On a CPU, the host waits. Over NCCL, torch makes a message wait
            for all earlier computation. The deadlock check of a program must include these waits.
        is_grouped: True if the executor must start the transfers of a group of the program between
            `start_group` and `end_group`. `end_group` issues these transfers together.
        uses_static_buffers: True if the executor must copy sent tensors to memory that is allocated
            once. Without the copy, a library that sends on other streams would keep the tensor for
            an unknown time.
        tp: The tensor-parallel size.
        dp: The number of replicas.
        tp_rank: The index of this process in its tensor-parallel group.
        dp_rank: The index of this process's replica.
    """

    progress_model: ProgressModel
    blocking_hosts: bool
    is_grouped: bool
    uses_static_buffers: bool
    tp: int
    dp: int
    tp_rank: int
    dp_rank: int

    def check_agreement(
        self, facts: Mapping[str, str], payload: object = None, record_types: Sequence[type] = ()
    ) -> list[Any]:
        """Compare facts of all processes, and return their payloads.

        This method blocks. Without this check, a difference would cause a hang or a wrong result
        later.

        Args:
            facts: The facts of this process: values by name. Each fact is compared among the
                processes that have it.
            payload: A plain value for the other processes, see `json_collectives.gather`.
            record_types: NamedTuples, dataclasses and Enums that payloads may contain.

        Returns:
            The payloads of all processes, by process.

        Raises:
            ModelError: Two processes have different values of a fact. All processes raise this
                error.
        """

    def allocate_buffers(
        self, buffer_sizes: BufferSizes, device: torch.device, programs: Sequence[Program]
    ) -> dict[SlotKey, Tensor]:
        """Allocate the memory into which messages of programs are received.

        All processes call this method once for each executor. The method may block. Afterwards,
        earlier executors of this transport cannot be used.

        Args:
            buffer_sizes: The bytes of each slot, by kind.
            device: The device of the memory.
            programs: The programs that will run.

        Returns:
            A flat uint8 tensor for each slot.

        Raises:
            ModelError: The transport was not created for one of the programs.
        """

    def on_step_begin(self, program: int) -> None:
        """Begin a step.

        Args:
            program: The index of the step's program in the `programs` of `allocate_buffers`.
        """

    def on_step_end(self) -> None:
        """End a step. This rank no longer reads the messages that it received in the step."""

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """Start to send a tensor to a pipeline rank.

        Args:
            tensor: The tensor. It must not change before the Work has completed.
            peer: The pipeline rank that receives.
            lane: The lane of the message, a member of `schedir.ir.isa.instructions.Lane`.

        Returns:
            The Work of the send.
        """

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """Start to receive a tensor from a pipeline rank.

        Args:
            tensor: The tensor to receive into. It must not be used before the Work has completed.
            peer: The pipeline rank that sends.
            lane: The lane of the message, a member of `schedir.ir.isa.instructions.Lane`.

        Returns:
            The Work of the receive.
        """

    def start_group(self) -> None:
        """Defer the following transfers until `end_group`."""

    def end_group(self) -> None:
        """Issue the deferred transfers together."""

    def start_collective(
        self, kind: Collective, group: GroupKey, output_tensor: Tensor, input_tensor: Tensor
    ) -> Work:
        """Start a collective of the n members of a group.

        Neither tensor may be used before the Work has completed. Both tensors are contiguous. They
        are flat, except for "all_reduce".

        Args:
            kind: "all_reduce" outputs the sum of all inputs, which have the same shape.
                "all_gather" outputs all inputs, concatenated in the order of ranks.
                "reduce_scatter" splits the sum of all inputs into n equal parts, and outputs the
                part of this rank. An `AllToAll` outputs the part of each input that is for this
                rank, concatenated in the order of ranks.
            group: The group of ranks.
            output_tensor: The output. For "all_reduce" it may be `input_tensor`. For
                "reduce_scatter" it may be the view of this rank's part in `input_tensor`.
            input_tensor: The input of this rank. For "all_gather" it may be the view of this rank's
                part in `output_tensor`.

        Returns:
            The Work of the collective.
        """

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context in which waits do not delay computation.

        A wait in this context delays only the gathers that are started in the same context. If a
        wait of this transport blocks the host, a wait in this context blocks the host, too.
        """


def allocate_buffers(
    buffer_sizes: BufferSizes, device: torch.device, programs: Sequence[Program] = ()
) -> dict[SlotKey, Tensor]:
    """Allocate slots in the memory of this process, see `Transport.allocate_buffers`.

    Args:
        buffer_sizes: The bytes of each slot, by kind.
        device: The device of the memory.
        programs: Not used.

    Returns:
        A flat uint8 tensor for each slot.
    """
    return {
        (kind, number): allocate_bytes(device, size)
        for kind, sizes in buffer_sizes.items()
        for number, size in enumerate(sizes)
    }


def allocate_bytes(device: torch.device, size: int) -> Tensor:
    """Return an uninitialised flat uint8 tensor.

    Args:
        device: The device.
        size: The number of bytes.
    """
    return torch.empty(size, dtype=torch.uint8, device=device)


# Phrases in the errors of Gloo, NCCL and torch's store when the peer of a connection has ended.
_CLOSED_PHRASES = ("connection closed", "connection reset", "broken pipe", "socket closed",
           "remote process exited", "connection was likely closed")  # fmt: skip
# Gloo raises this error for the other operations of a connection after one operation timed out.
_GLOO_TIMEOUT_PHRASE = "application timeout caused pair closure"


def describe_peer_exit(error: BaseException) -> str:
    """Return a description of an error that the end of a peer caused, or "" for other errors.

    The result is "" for a `ConnectionError` of a socket that the model opened.

    Args:
        error: The error.
    """
    if isinstance(error, PeerLeft):
        return str(error)
    is_lost = isinstance(error, RuntimeError) and any(
        w in str(error.args).lower() for w in _CLOSED_PHRASES
    )
    return "the connection to another process was lost" if is_lost else ""


def describe_peer_error(error: BaseException) -> str:
    """Return a description of an error that the end or a timeout of a peer caused.

    Return "" for other errors, and for `PeerTimeout`: its message is already a description.

    Args:
        error: The error.
    """
    timeout_text = (
        ""
        if isinstance(error, PeerTimeout) or not _is_peer_timeout(error)
        else "a peer did not respond within the timeout"
    )
    return describe_peer_exit(error) or timeout_text


def is_caused_by_peer(error: BaseException | None) -> bool:
    """Return whether the end or a timeout of a peer caused an error, directly or indirectly.

    Gloo, torch's store and transports raise such errors. An indirect error has one of these errors
    in its chain of causes.

    Args:
        error: The error.
    """
    while error is not None:
        if describe_peer_exit(error) or _is_peer_timeout(error):
            return True
        error = error.__cause__
    return False


def _is_peer_timeout(error: BaseException) -> bool:
    text = str(error.args).lower()
    is_distributed = isinstance(error, RuntimeError) and (
        ".cc:" in text or isinstance(error, dist.DistError)
    )
    is_timeout = is_distributed and ("timed out" in text or "timeout" in text)
    is_timeout |= isinstance(error, RuntimeError) and _GLOO_TIMEOUT_PHRASE in text
    return isinstance(error, PeerTimeout) or is_timeout


@contextmanager
def require_all_processes(what: str, program_name: str = "") -> Iterator[None]:
    """Raise a clear error if another process is missing while all processes create an object.

    Args:
        what: The object that all processes create, such as "an Executor".
        program_name: The name of the program, for the error.

    Raises:
        ExecutionError: Another process does not arrive within the timeout, or has ended.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        if not (fact := describe_peer_error(error)):
            raise
        raise ExecutionError(
            f"{fact} while this process created {what}",
            program=program_name,
            hint=CommandHint(
                f"all processes of the group must create {what} at the same place; if another "
                "process failed, its error is the cause",
                "another process failed: its error is the cause",
            ),
        ) from error


class PeerTimeout(TimeoutError):
    """Error of a transport: a peer did not respond within the timeout."""


class PeerLeft(ConnectionError):
    """Error of a transport: the process of a peer has ended."""


def view_tp_shard(transport: Transport, boundary: Tensor) -> Tensor:
    """Return a flat view of the shard of a boundary that belongs to this tensor-parallel rank.

    Each of t tensor-parallel ranks has 1/t of the boundary.

    Args:
        transport: The transport with the size t and the rank.
        boundary: The full boundary, contiguous.
    """
    return boundary.view(transport.tp, -1)[transport.tp_rank]


class CompletedWork:
    """Work that has completed before it is returned."""

    def wait(self) -> None:
        """Return immediately."""


class ChainedWork:
    """Work with a callback that runs after the work.

    Args:
        work: The work.
        callback: The function that `wait` calls after it has waited for `work`.
    """

    def __init__(self, work: Work, callback: Callable[[], None]) -> None:
        self.work = work
        self.callback = callback

    def wait(self) -> None:
        """Wait for the work, and run the callback."""
        self.work.wait()
        self.callback()

    def is_completed(self) -> bool:
        """Return whether the work has completed, or True if it has no `is_completed`."""
        return bool(getattr(self.work, "is_completed", lambda: True)())


class TransportWrapper:
    """Base class of a transport that wraps another transport.

    The wrapper has all attributes and methods of the wrapped transport that it does not replace.

    Args:
        inner: The transport that is wrapped.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
