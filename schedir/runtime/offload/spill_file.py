"""The unnamed file to which a rank spills what does not fit in host memory.

It has no name: it is unlinked as it is made, so that nothing is left of it however the process
ends.  Nothing in it is to outlive the process, so nobody waits until it is on the medium.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import warnings
import weakref
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from schedir.errors import ModelError
from schedir.runtime.offload.arena import Arena, ArenaBlock

_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


class SpillFile:
    """A file without a name in a folder, and its rooms: places in it.

    Raises ModelError for a folder that is none, or in which there can be no file.
    """

    def __init__(self, directory: str | Path, program: str = "") -> None:
        self.directory = Path(directory)
        try:
            file = tempfile.TemporaryFile(dir=self.directory, buffering=0)  # noqa: SIM115
        except (OSError, ValueError) as error:  # or what is no path
            why = error.strerror if isinstance(error, OSError) else error
            raise ModelError(
                f"nothing can be written to {str(self.directory)!r}: {why}",
                program=program,
                hint="Executor(..., spill_dir=), or [memory] spill_dir, is one to write in, "
                "on a disk",
            ) from error
        self.file = file
        weakref.finalize(self, file.close)
        if (kind := find_file_system_type(self.directory)) in _MEMORY_FILE_SYSTEMS:
            warnings.warn(
                f"{self.directory} is a {kind}: what is spilled there stays in the host's memory",
                stacklevel=2,
            )
        self.length = 0
        self.arena: Arena[int] = Arena(self._extend)

    def _extend(self, size: int) -> int:
        """Make the file longer, on the disk itself: where that is full, it is so now."""
        at = self.length
        try:
            os.posix_fallocate(self.file.fileno(), at, size)
        except OSError as error:
            free = os.statvfs(self.file.fileno())
            raise OSError(
                f"no room for {size} bytes more in {self.directory} beside {at}: "
                f"{error.strerror}, {free.f_bavail * free.f_frsize} are free"
            ) from error
        self.length += size
        return at

    def map_block(self, block: ArenaBlock[int], size: int, used_bytes: int) -> Tensor:
        """The first bytes of a room, so many of which count, as memory that is the file's; others
        have the room when nobody has any of it."""
        before = block.location % mmap.ALLOCATIONGRANULARITY
        length, at = before + max(size, 1), block.location - before
        there = mmap.mmap(self.file.fileno(), length, offset=at)
        weakref.finalize(there, self.arena.release, block, used_bytes).atexit = False
        return torch.frombuffer(there, dtype=torch.uint8)[before : before + size]

    def write(self, offset: int, memory: Tensor) -> None:
        """Write bytes to a place."""
        rest, number = _as_buffer(memory), self.file.fileno()
        while rest:
            done = os.pwrite(number, rest, offset)
            rest, offset = rest[done:], offset + done

    def read(self, offset: int, memory: Tensor) -> None:
        """Read the bytes of a place.  Raises OSError where there are fewer."""
        rest, number = _as_buffer(memory), self.file.fileno()
        while rest:
            done = os.preadv(number, [rest], offset)
            if not done:
                raise OSError(f"what was spilled to {self.directory} is not there any more")
            rest, offset = rest[done:], offset + done


def _as_buffer(memory: Tensor) -> memoryview:
    """The bytes of memory of the host, to be read or written."""
    return memoryview(cast(bytearray, memory.numpy()))


def find_file_system_type(directory: Path) -> str:
    """The kind of file system that a folder is on, as Linux names it; "" where nobody knows."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    where, found = directory.resolve(), (0, "")
    for line in mounts:
        _, at, kind, *_ = line.split(" ")
        place = Path(at.encode().decode("unicode_escape"))
        if where.is_relative_to(place):
            found = max(found, (len(place.parts), kind))
    return found[1]
