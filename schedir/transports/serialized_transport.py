"""A transport that can run one operation at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from schedir.ir.isa.instructions import Lane
from schedir.transports.collectives import Group, Kind
from schedir.transports.transport import CompletedWork, Transport, TransportWrapper, Work


class SerializedTransport(TransportWrapper):
    """A transport that does as its own; but within `one_by_one` whatever it begins has ended when
    it returns, for the stream that is current, and nothing is issued together or aside."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.alone = False

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Within this, one thing at a time."""
        self.alone = True
        try:
            yield
        finally:
            self.alone = False

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """As Transport.send."""
        return self._ended(self.inner.send(tensor, peer, lane))

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """As Transport.recv."""
        return self._ended(self.inner.recv(tensor, peer, lane))

    def collective(self, kind: Kind, group: Group, out: Tensor, own: Tensor) -> Work:
        """As Transport.collective."""
        return self._ended(self.inner.collective(kind, group, out, own))

    def _ended(self, work: Work) -> Work:
        if not self.alone:
            return work
        work.wait()
        return CompletedWork()

    def start_group(self) -> None:
        """As Transport.start_group."""
        if not self.alone:
            self.inner.start_group()

    def end_group(self) -> None:
        """As Transport.end_group."""
        if not self.alone:
            self.inner.end_group()

    def aside(self) -> AbstractContextManager[object]:
        """As Transport.aside."""
        return nullcontext() if self.alone else self.inner.aside()
