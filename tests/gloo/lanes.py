"""Streams that run nothing by themselves, and see what would race if they did.

Stand-ins for CUDA streams and events on a machine without a GPU: every operation of torch is run at
once, and noted as one of the stream that is current.  Vector clocks say what events order; two
uses of a memory, one of which writes, must be ordered.  Memory that is let go is taken anew by the
stream that asked for it, so whatever else used it must be over there (torch's caching allocator).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[int, int]  # how far each stream is known to have come


class Stream:
    """A queue of operations: they are ordered among themselves, and by what was waited for."""

    made = 0

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.id = Stream.made
        Stream.made += 1
        self.clock: Clock = {self.id: 0}

    def wait_event(self, event: Event) -> None:
        for stream, tick in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), tick)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def tick(self) -> int:
        self.clock[self.id] += 1
        return self.clock[self.id]


class Event:
    """A point of a stream, and of all that it has waited for."""

    def __init__(self, **how: bool) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or Lanes.current[-1]).clock)


class _Memory:
    """A storage: the stream that asked for it, the last write, and the reads since."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.write: tuple[int, int, str] | None = None
        self.reads: dict[int, tuple[int, str]] = {}


class Lanes(TorchDispatchMode):
    """Within this, `races` are the uses that nothing orders."""

    current: list[Stream]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        Lanes.current = [Stream()]
        self.memories: dict[int, _Memory] = {}
        self.races: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        returned = [r.alias_info for r in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in returned):
            return out  # a view, which uses nothing
        stream = Lanes.current[-1]
        tick, given = stream.tick(), {**dict(enumerate(args)), **(kwargs or {})}
        read: list[Tensor] = []
        written = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        for k, argument in enumerate(func._schema.arguments):
            value = given.get(k, given.get(argument.name))
            writes = argument.alias_info is not None and argument.alias_info.is_write
            (written if writes else read).extend(
                t for t in tree_leaves(value) if isinstance(t, Tensor)
            )
        for tensor in read:
            self._use(tensor, stream, tick, str(func), writes=False)
        for tensor in written:
            self._use(tensor, stream, tick, str(func), writes=True)
        return out

    def _use(self, tensor: Tensor, stream: Stream, tick: int, name: str, writes: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.memories:
            self.memories[key] = _Memory(stream)
            weakref.finalize(storage, self._free, key)
        memory = self.memories[key]
        before = [memory.write] if memory.write else []
        if writes:
            before += [(s, t, n) for s, (t, n) in memory.reads.items()]
        for other, when, what in before:
            if stream.clock.get(other, 0) < when:
                self.races.append(f"{name} {'writes' if writes else 'reads'} beside {what}")
        if writes:
            memory.write, memory.reads = (stream.id, tick, name), {}
        else:
            memory.reads[stream.id] = tick, name

    def _free(self, key: int) -> None:
        memory = self.memories.pop(key)
        uses = [(s, t, n) for s, (t, n) in memory.reads.items()]
        for stream, tick, name in [*uses, *([memory.write] if memory.write else [])]:
            if memory.stream.clock.get(stream, 0) < tick:
                self.races.append(f"memory is let go while {name} uses it")


@contextmanager
def _running(stream: Stream) -> Iterator[None]:
    Lanes.current.append(stream)
    try:
        yield
    finally:
        Lanes.current.pop()


@contextmanager
def lanes() -> Iterator[Lanes]:
    """CUDA's streams are stand-ins within this."""
    found = Lanes()
    with pytest.MonkeyPatch.context() as patch, found:
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", _running)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: Lanes.current[-1])
        yield found
