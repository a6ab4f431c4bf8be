"""The unnamed file to which a rank writes data that does not fit in host memory.

The file is unlinked when it is created, so that it disappears even if the process is killed.
Nothing reads its content after the process ends. So no write waits until the data is on the disk.
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

from schedir.errors import ModelError, format_bytes
from schedir.runtime.offload.arena import Arena, ArenaBlock

_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


class SpillFile:
    """An unnamed file in a directory. The attribute `arena` manages its blocks.

    The constructor warns if the directory is on a file system in memory.

    Args:
        directory: The directory.
        program: The name of the program, for errors.

    Raises:
        ModelError: No file can be created in the directory.
    """

    def __init__(self, directory: str | Path, program: str = "") -> None:
        self.directory = Path(directory)
        try:
            file = tempfile.TemporaryFile(dir=self.directory, buffering=0)  # noqa: SIM115
        except (OSError, ValueError) as error:  # ValueError: the path has a null character.
            why = error.strerror if isinstance(error, OSError) else error
            raise ModelError(
                f"spill_dir {str(self.directory)!r} is not writable: {why}",
                program=program,
                hint="set Executor(..., spill_dir=...), or [memory] spill_dir, to a writable "
                "folder on a disk",
            ) from error
        self.file = file
        weakref.finalize(self, file.close)
        if (kind := find_file_system_type(self.directory)) in _MEMORY_FILE_SYSTEMS:
            warnings.warn(
                f"spill_dir {str(self.directory)!r} is a {kind}, which is in host memory",
                stacklevel=2,
            )
        self.length = 0
        self.arena: Arena[int] = Arena(self._extend)

    def _extend(self, size: int) -> int:
        """Extend the file, and allocate its disk space now, to detect a full disk early."""
        at = self.length
        try:
            os.posix_fallocate(self.file.fileno(), at, size)
        except OSError as error:
            free = os.statvfs(self.file.fileno())
            raise OSError(
                f"cannot extend the spill file in {self.directory} from {format_bytes(at)} by "
                f"{format_bytes(size)}: {error.strerror}, "
                f"{format_bytes(free.f_bavail * free.f_frsize)} are free"
            ) from error
        self.length += size
        return at

    def map_block(self, block: ArenaBlock[int], size: int, used_bytes: int) -> Tensor:
        """Return the first bytes of a block as a memory map of the file.

        The block is released when no tensor refers to the map any more.

        Args:
            block: The block.
            size: The number of bytes to map.
            used_bytes: The `used_bytes` with which the block was acquired.

        Returns:
            A uint8 tensor of `size` bytes.
        """
        before = block.location % mmap.ALLOCATIONGRANULARITY
        length = before + max(size, 1)
        at = block.location - before
        mapping = mmap.mmap(self.file.fileno(), length, offset=at)
        weakref.finalize(mapping, self.arena.release, block, used_bytes).atexit = False
        return torch.frombuffer(mapping, dtype=torch.uint8)[before : before + size]

    def write(self, offset: int, memory: Tensor) -> None:
        """Write bytes to the file.

        Args:
            offset: The offset in the file, in bytes.
            memory: A contiguous tensor in host memory.
        """
        rest = _as_buffer(memory)
        number = self.file.fileno()
        while rest:
            done = os.pwrite(number, rest, offset)
            rest, offset = rest[done:], offset + done

    def read(self, offset: int, memory: Tensor) -> None:
        """Read bytes from the file.

        Args:
            offset: The offset in the file, in bytes.
            memory: A contiguous tensor in host memory, which this fills.

        Raises:
            OSError: The file is too short.
        """
        rest = _as_buffer(memory)
        number = self.file.fileno()
        while rest:
            done = os.preadv(number, [rest], offset)
            if not done:
                raise OSError(
                    f"the spill file in {self.directory} is shorter than the data written to it"
                )
            rest, offset = rest[done:], offset + done


def _as_buffer(memory: Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory as a writable buffer."""
    return memoryview(cast(bytearray, memory.numpy()))


def find_file_system_type(directory: Path) -> str:
    """Return the Linux name of the file system type of a directory, such as "tmpfs".

    Args:
        directory: The directory.

    Returns:
        The type, or "" on systems without /proc/self/mounts.
    """
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    path, longest_match = directory.resolve(), (0, "")
    for line in mounts:
        _, at, kind, *_ = line.split(" ")
        place = Path(at.encode().decode("unicode_escape"))
        if path.is_relative_to(place):
            longest_match = max(longest_match, (len(place.parts), kind))
    return longest_match[1]
