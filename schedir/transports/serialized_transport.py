"""A transport that can run one operation at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from schedir.ir.isa.instructions import Lane
from schedir.transports.collectives import CollectiveName, GroupKey
from schedir.transports.transport import CompletedWork, Transport, TransportWrapper, Work


class SerializedTransport(TransportWrapper):
    """A transport that does as its own; but within `serialize` whatever it begins has ended when
    it returns, for the stream that is current, and nothing is issued together or aside."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.is_serialized = False

    @contextmanager
    def serialize(self) -> Iterator[None]:
        """Within this, one thing at a time."""
        self.is_serialized = True
        try:
            yield
        finally:
            self.is_serialized = False

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """As Transport.send."""
        return self._wait_if_serialized(self.inner.send(tensor, peer, lane))

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """As Transport.recv."""
        return self._wait_if_serialized(self.inner.recv(tensor, peer, lane))

    def start_collective(
        self, kind: CollectiveName, group: GroupKey, output_tensor: Tensor, input_tensor: Tensor
    ) -> Work:
        """As Transport.collective."""
        return self._wait_if_serialized(
            self.inner.start_collective(kind, group, output_tensor, input_tensor)
        )

    def _wait_if_serialized(self, work: Work) -> Work:
        if not self.is_serialized:
            return work
        work.wait()
        return CompletedWork()

    def start_group(self) -> None:
        """As Transport.start_group."""
        if not self.is_serialized:
            self.inner.start_group()

    def end_group(self) -> None:
        """As Transport.end_group."""
        if not self.is_serialized:
            self.inner.end_group()

    def side_stream(self) -> AbstractContextManager[object]:
        """As Transport.aside."""
        return nullcontext() if self.is_serialized else self.inner.side_stream()
