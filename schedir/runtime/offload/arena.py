"""The memory of the host or the disk, in blocks that several values use one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from schedir.runtime.offload.copy_lanes import LaneJob

Place = TypeVar("Place")  # location of a block: memory, or an offset in a file


@dataclass(eq=False)
class ArenaBlock(Generic[Place]):
    """A block of memory.

    A user of the block may write to it only after the `pending_jobs` have ended.

    Attributes:
        location: The memory, or the offset in a file.
        size: The size of the block in bytes.
        pending_jobs: The copies that still read the block.
        layouts: The layouts of the tensors in `views`.
        views: The tensors of the value that used the block last. A value with the same layouts
            uses these tensors again.
    """

    location: Place
    size: int
    pending_jobs: list[LaneJob]
    layouts: list[Any] = field(default_factory=list)
    views: list[Any] = field(default_factory=list)


class Arena(Generic[Place]):
    """The blocks of one memory tier: the host or the disk.

    By default, a value gets the smallest free block that is large enough. If no free block is large
    enough, the arena allocates a new block. If sizes do not change, only the first step of a
    program allocates blocks, because each step acquires blocks in the same order.

    With a limit on the number of blocks, the arena first allocates this number of blocks. After
    that, it chooses a block for a value as follows:

    - If one or more free blocks are large enough, the arena takes the one that was released first.
    - If all free blocks are too small, the arena takes the one that was released first. It waits
      until all reads of this block have ended, and then allocates larger memory for the block.
    - If no block is free, the arena exceeds the limit by one more block.

    Args:
        allocate: A function that allocates a number of bytes, and returns their location.

    Attributes:
        used_bytes: The bytes of the values in the blocks.
        peak_bytes: The largest value of `used_bytes`.
        allocated_bytes: The bytes of all blocks.
        block_count: The number of blocks.
    """

    def __init__(self, allocate: Callable[[int], Place]) -> None:
        self.allocate = allocate
        self.free_blocks: list[ArenaBlock[Place]] = []
        self.used_bytes = self.peak_bytes = self.allocated_bytes = self.block_count = 0

    def acquire(
        self, size: int, used_bytes: int, max_blocks: int | None = None
    ) -> ArenaBlock[Place]:
        """Return a block for a value.

        Args:
            size: The smallest size of the block, in bytes.
            used_bytes: The bytes of the value, without padding, for the statistics.
            max_blocks: The largest number of blocks. None means no limit.

        Returns:
            The block. If the method waited for a copy that failed, it raises the error of the copy.
        """
        self.used_bytes += used_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        large_blocks = [block for block in self.free_blocks if block.size >= size]
        if max_blocks is None and large_blocks:
            block = min(large_blocks, key=lambda candidate: candidate.size)
        elif max_blocks is None or self.block_count < max_blocks or not self.free_blocks:
            return self._allocate_block(size)
        elif large_blocks:
            block = large_blocks[0]
        else:
            block = self.free_blocks[0]
            self._resize_block(block, size)
        self.free_blocks.remove(block)
        return block

    def _allocate_block(self, size: int) -> ArenaBlock[Place]:
        block = ArenaBlock(self.allocate(size), size, [])
        self.allocated_bytes += size
        self.block_count += 1
        return block

    def _resize_block(self, block: ArenaBlock[Place], size: int) -> None:
        """Replace the memory of a free block. Free its old memory before the allocation."""
        for job in block.pending_jobs:
            job.finish()
        block.layouts = []
        block.views = []
        del block.location
        block.location = self.allocate(size)
        block.pending_jobs = []
        self.allocated_bytes += size - block.size
        block.size = size

    def add_block(self, size: int) -> None:
        """Allocate a block, and add it to the free blocks.

        Args:
            size: The size of the block in bytes.
        """
        self.free_blocks.append(self._allocate_block(size))

    def release(
        self, block: ArenaBlock[Place], used_bytes: int, reader: LaneJob | None = None
    ) -> None:
        """Return a block to the arena.

        Args:
            block: The block.
            used_bytes: The `used_bytes` with which `acquire` was called.
            reader: A job that still reads the block. The next write to the block must wait for this
                job.
        """
        self.used_bytes -= used_bytes
        block.pending_jobs = [] if reader is None else [reader]
        self.free_blocks.append(block)
