"""Arena: preallocated memory of a tier, in blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from schedir.runtime.offload.copy_lanes import LaneJob

Place = TypeVar("Place")  # where a room is: memory, or the place in a file


@dataclass(eq=False)
class ArenaBlock(Generic[Place]):
    """A room of `size` bytes; whoever takes it writes when what is `pending_jobs` has ended.

    `views` are the tensors in it, and `layouts` how, as whoever was there last has made them.
    """

    location: Place
    size: int
    pending_jobs: list[LaneJob]
    layouts: list[Any] = field(default_factory=list)
    views: list[Any] = field(default_factory=list)


class Arena(Generic[Place]):
    """The rooms of a tier; `used_bytes` are the bytes of what is in them, and `peak_bytes` the most
    ever.

    A value takes the smallest room that is free and holds it.  Where none does, one is made: in the
    first step, for a step takes rooms in the order of its Stream, as the one before it did.

    Where it is said how many rooms there are, as many are made, and then whoever needs one waits
    for that which is free longest, of those that hold it.  Where none does, that one is made
    larger, when whoever reads it has ended: of memory there is never more than of these rooms.
    """

    def __init__(self, allocate: Callable[[int], Place]) -> None:
        self.allocate = allocate
        self.free_blocks: list[ArenaBlock[Place]] = []
        self.used_bytes = self.peak_bytes = self.allocated_bytes = self.block_count = 0

    def acquire(
        self, size: int, used_bytes: int, max_blocks: int | None = None
    ) -> ArenaBlock[Place]:
        """A room of at least `size` bytes, for so many that count; of `max_blocks`, if that is
        said.

        Raises what those have raised who were waited for.
        """
        self.used_bytes += used_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        fit = [room for room in self.free_blocks if room.size >= size]
        if max_blocks is None and fit:
            room = min(fit, key=lambda one: one.size)
        elif max_blocks is None or self.block_count < max_blocks or not self.free_blocks:
            return self._allocate_block(size)
        elif fit:
            room = fit[0]
        else:
            room = self.free_blocks[0]
            self._resize_block(room, size)
        self.free_blocks.remove(room)
        return room

    def _allocate_block(self, size: int) -> ArenaBlock[Place]:
        room = ArenaBlock(self.allocate(size), size, [])
        self.allocated_bytes += size
        self.block_count += 1
        return room

    def _resize_block(self, block: ArenaBlock[Place], size: int) -> None:
        """Let a room that is free be of another size, and what it had be gone before."""
        for job in block.pending_jobs:
            job.finish()
        block.layouts, block.views = [], []
        del block.location
        block.location, block.pending_jobs = self.allocate(size), []
        self.allocated_bytes += size - block.size
        block.size = size

    def add_block(self, size: int) -> None:
        """Make a room that nobody needs yet."""
        self.free_blocks.append(self._allocate_block(size))

    def release(
        self, block: ArenaBlock[Place], used_bytes: int, reader: LaneJob | None = None
    ) -> None:
        """Let others have a room, when a job that reads it has ended."""
        self.used_bytes -= used_bytes
        block.pending_jobs = [] if reader is None else [reader]
        self.free_blocks.append(block)
