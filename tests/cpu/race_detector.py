"""Finds accesses that would race on a GPU, on a machine without one.

On a virtual GPU every operation of torch runs at once, and is recorded for the current stream. A
stream has seen the earlier work that its events order before it. Two uses of a memory must be
ordered if one of them writes. torch's caching allocator gives released memory back to the stream
that requested it, so that stream must have seen the end of all other uses.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cpu.virtual_gpu import Stream, VirtualGPU


class _Memory:
    """A storage, with the stream that requested it, the last write, and the reads since."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.write: tuple[Stream, int, str] | None = None
        self.reads: dict[Stream, tuple[int, str]] = {}


class RaceDetector(TorchDispatchMode):
    """Collects in `found` the unordered uses of memory while the context is active."""

    def __init__(self, gpu: VirtualGPU) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gpu = gpu
        self.memories: dict[int, _Memory] = {}
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        is_view, name, arguments = _read_schema(func)
        if is_view:
            return out  # a view does not access the memory
        stream = self.gpu.stream
        stream.seen[stream] += 1
        read: list[Tensor] = []
        written = [*_tensors(out)]
        for k, (argument, writes) in enumerate(arguments):
            value = args[k] if k < len(args) else (kwargs or {}).get(argument)
            (written if writes else read).extend(_tensors(value))
        for tensor in read:
            self.use(tensor, stream, name, writes=False)
        for tensor in written:
            self.use(tensor, stream, name, writes=True)
        return out

    def use(self, tensor: Tensor, stream: Stream, name: str, writes: bool) -> None:
        """Record a use of a tensor, which may be one that torch does not see."""
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
            if stream.seen[other] < when:
                self.found.append(f"{name} {'writes' if writes else 'reads'} beside {what}")
        if writes:
            memory.write, memory.reads = (stream, stream.seen[stream], name), {}
        else:
            memory.reads[stream] = stream.seen[stream], name

    def _free(self, key: int) -> None:
        memory = self.memories.pop(key)
        uses = [(s, t, n) for s, (t, n) in memory.reads.items()]
        for stream, tick, name in [*uses, *([memory.write] if memory.write else [])]:
            if memory.stream.seen[stream] < tick:
                self.found.append(f"memory is let go while {name} uses it")


@cache
def _read_schema(func: Any) -> tuple[bool, str, list[tuple[str, bool]]]:
    """Return whether an operation returns a view, its name, and which arguments it writes."""
    schema = func._schema
    returned = [r.alias_info for r in schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in returned)
    arguments = [(a.name, a.alias_info is not None and a.alias_info.is_write)
                 for a in schema.arguments]  # fmt: skip
    return is_view, str(func), arguments


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors of an operation's arguments or results, and both parts of a sparse one."""
    if isinstance(values, Tensor):
        yield from [values._indices(), values._values()] if values.is_sparse else [values]
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
