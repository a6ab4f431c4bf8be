"""A transport wrapper that can run one operation at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from schedir.ir.isa.instructions import Lane
from schedir.transports.collectives import Collective, GroupKey
from schedir.transports.transport import CompletedWork, Transport, TransportWrapper, Work


class SerializedTransport(TransportWrapper):
    """A transport that forwards all calls to another transport, and can serialize the calls.

    Within `serialize`, each operation has completed for the current stream when its call returns.
    Transfers are not grouped, and the side stream is not used.

    Args:
        inner: The transport that moves the tensors.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.is_serialized: bool = False

    @contextmanager
    def serialize(self) -> Iterator[None]:
        """Run one operation at a time within this context."""
        self.is_serialized = True
        try:
            yield
        finally:
            self.is_serialized = False

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """See `Transport.send`."""
        return self._wait_if_serialized(self.inner.send(tensor, peer, lane))

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """See `Transport.recv`."""
        return self._wait_if_serialized(self.inner.recv(tensor, peer, lane))

    def start_collective(
        self, kind: Collective, group: GroupKey, output_tensor: Tensor, input_tensor: Tensor
    ) -> Work:
        """See `Transport.start_collective`."""
        return self._wait_if_serialized(
            self.inner.start_collective(kind, group, output_tensor, input_tensor)
        )

    def _wait_if_serialized(self, work: Work) -> Work:
        if not self.is_serialized:
            return work
        work.wait()
        return CompletedWork()

    def start_group(self) -> None:
        """See `Transport.start_group`. Within `serialize` this method does nothing."""
        if not self.is_serialized:
            self.inner.start_group()

    def end_group(self) -> None:
        """See `Transport.end_group`. Within `serialize` this method does nothing."""
        if not self.is_serialized:
            self.inner.end_group()

    def side_stream(self) -> AbstractContextManager[object]:
        """See `Transport.side_stream`. Within `serialize` the side stream is the current stream."""
        return nullcontext() if self.is_serialized else self.inner.side_stream()
