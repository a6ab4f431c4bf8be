"""Transport: the interface through which an executor moves tensors between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from schedir.analysis.progress_models import ProgressModel
from schedir.ir.isa.instructions import Lane, Value
from schedir.ir.program import Program
from schedir.transports.collectives import CollectiveName, GroupKey

SlotKey = tuple[Value, int]  # a slot: its kind and number
BufferSizes = Mapping[Value, Sequence[int]]  # the bytes of each slot, by kind


class Work(Protocol):
    """Something under way.  `wait` is called once, and blocks until it has ended."""

    def wait(self) -> object: ...


class Transport(Protocol):
    """Moves tensors for one rank.  Nothing here blocks but what says so; a Work's `wait` does.

    `progress_model` is the progress model that it gives: the executor refuses programs that are not
    proven under it.  `tp` and `dp` are the sizes of its groups, `tp_rank` and `dp_rank` this
    process's place in its tensor-parallel group and among the replicas.  Messages of one lane
    between two ranks arrive in the order in which they are sent.

    With `blocking_hosts` the instructions after a compute in its Stream wait for it: on a CPU the
    host itself waits, and over NCCL torch lets a message wait for all that was issued to
    compute before it.  Programs must be proven for that, too.

    Where it is `uses_static_buffers`, what is sent is copied into memory that is made once: a
    library that sends on streams of its own would hold whatever it is given for as long as it
    likes.

    Where it is `is_grouped`, the transfers of a group of the program are called between
    `start_group` and `end_group`, and are issued as one.
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
        """Compare facts, by name, among all that have them; raise ModelError in all processes
        where one differs: unseen, it would be a hang or a wrong result later.  Returns what all
        tell: plain values, and records of these `record_types`.  It blocks."""

    def allocate_buffers(
        self, buffer_sizes: BufferSizes, device: torch.device, programs: Sequence[Program]
    ) -> dict[SlotKey, Tensor]:
        """Memory for what is received in steps of these programs, by kind and slot: flat tensors of
        as many bytes.  Called once for each executor, by all processes; it may block.  An executor
        before it is over then.  Raises ModelError for a program for which it was not made."""

    def on_step_begin(self, program: int) -> None:
        """A step begins, of a program by its place among those that `allocate_buffers` was told."""

    def on_step_end(self) -> None:
        """A step has ended: nothing that was received in it is looked at again."""

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """Start to send to a pipeline rank; the tensor must not change before the end."""

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """Start to receive from a pipeline rank."""

    def start_group(self) -> None:
        """Hold back the transfers that come."""

    def end_group(self) -> None:
        """Issue those that were held back, as one."""

    def start_collective(
        self, kind: CollectiveName, group: GroupKey, output_tensor: Tensor, input_tensor: Tensor
    ) -> Work:
        """Start what a group of n ranks does together: each brings `input_tensor`, and gets
        `output_tensor`.

        "all_reduce": the sum of all `input_tensor`, which have one shape.  "all_gather": all
        `input_tensor` one after the other, in the order of ranks.  "reduce_scatter": of the sum the
        1/n that is the rank's in that order.  `output_tensor` may be `input_tensor` of an
        all_reduce; the part that a gather brings may lie in its place in `output_tensor`, and what
        a reduce_scatter gives in its place in
        `input_tensor`.  Both are contiguous, and flat but for an all_reduce.  Neither may be
        touched before the end.
        """

    def side_stream(self) -> AbstractContextManager[object]:
        """Within this a wait holds up no computation, but the gathers that are started within it;
        and the host, where it is the one that waits."""


def allocate_buffers(
    buffer_sizes: BufferSizes, device: torch.device, programs: Sequence[Program] = ()
) -> dict[SlotKey, Tensor]:
    """As Transport.buffers, in memory of the process."""
    return {
        (kind, number): allocate_bytes(device, size)
        for kind, sizes in buffer_sizes.items()
        for number, size in enumerate(sizes)
    }


def allocate_bytes(device: torch.device, size: int) -> Tensor:
    """Memory on a device."""
    return torch.empty(size, dtype=torch.uint8, device=device)


# What Gloo, NCCL and torch's store say where the other end of a connection has gone.
_CLOSED_PHRASES = ("connection closed", "connection reset", "broken pipe", "socket closed",
           "remote process exited", "connection was likely closed")  # fmt: skip
# And Gloo of all that goes on, where one wait was in vain.
_GLOO_TIMEOUT_PHRASE = "application timeout caused pair closure"


def describe_peer_exit(error: BaseException) -> str:
    """What an error says in words of its own where a peer has ended; "" for any other error.

    A connection of a module's own that breaks is another error.
    """
    if isinstance(error, PeerLeft):
        return str(error)
    lost = isinstance(error, RuntimeError) and any(
        w in str(error.args).lower() for w in _CLOSED_PHRASES
    )
    return "a peer has left" if lost else ""


def describe_peer_error(error: BaseException) -> str:
    """What an error says of a peer in words of its own: that it has left, or has not come in time;
    "" for any other error."""
    late = (
        ""
        if isinstance(error, PeerLate) or not _is_peer_timeout(error)
        else "a peer has not come in time"
    )
    return describe_peer_exit(error) or late


def is_caused_by_peer(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is that others have gone or have not come in time: a word of
    Gloo's, of torch's store, or of a transport."""
    while error is not None:
        if describe_peer_exit(error) or _is_peer_timeout(error):
            return True
        error = error.__cause__
    return False


def _is_peer_timeout(error: BaseException) -> bool:
    words = str(error.args).lower()
    theirs = isinstance(error, RuntimeError) and (
        ".cc:" in words or isinstance(error, dist.DistError)
    )
    late = theirs and ("timed out" in words or "timeout" in words)
    late |= isinstance(error, RuntimeError) and _GLOO_TIMEOUT_PHRASE in words
    return isinstance(error, PeerLate) or late


class PeerLate(TimeoutError):
    """A transport's own word that nothing has come from a peer in time."""


class PeerLeft(ConnectionError):
    """A transport's own word that a peer has ended."""


def view_tp_shard(transport: Transport, boundary: Tensor) -> Tensor:
    """This tensor-parallel rank's 1/t of a boundary, flat, in its place in the whole."""
    return boundary.view(transport.tp, -1)[transport.tp_rank]


class CompletedWork:
    """Work that had ended when it was returned."""

    def wait(self) -> None:
        """Return at once."""


class ChainedWork:
    """Work, and what is to be done after it."""

    def __init__(self, work: Work, callback: Callable[[], None]) -> None:
        self.work, self.callback = work, callback

    def wait(self) -> None:
        """Wait, and do it."""
        self.work.wait()
        self.callback()

    def is_completed(self) -> bool:
        """Return whether the work has completed, or True if it has no `is_completed`."""
        return bool(getattr(self.work, "is_completed", lambda: True)())


class TransportWrapper:
    """What a transport that is around another has of it: all but what moves tensors."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.progress_model, self.blocking_hosts, self.is_grouped = (
            inner.progress_model,
            inner.blocking_hosts,
            inner.is_grouped,
        )
        self.uses_static_buffers = inner.uses_static_buffers
        self.tp, self.dp = inner.tp, inner.dp
        self.tp_rank, self.dp_rank = inner.tp_rank, inner.dp_rank
        self.check_agreement, self.allocate_buffers = inner.check_agreement, inner.allocate_buffers
        self.on_step_begin, self.on_step_end = inner.on_step_begin, inner.on_step_end
