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
            reason = error.strerror if isinstance(error, OSError) else error
            raise ModelError(
                f"spill_dir {str(self.directory)!r} is not writable: {reason}",
                program=program,
                hint="set Executor(..., spill_dir=...), or [memory] spill_dir, to a writable "
                "folder on a disk",
            ) from error
        self.file = file
        weakref.finalize(self, file.close)
        if (file_system := find_file_system_type(self.directory)) in _MEMORY_FILE_SYSTEMS:
            warnings.warn(
                f"spill_dir {str(self.directory)!r} is a {file_system}, which is in host memory",
                stacklevel=2,
            )
        self.length = 0
        self.arena: Arena[int] = Arena(self._extend)

    def _extend(self, size: int) -> int:
        """Extend the file, and allocate its disk space now, to detect a full disk early."""
        offset = self.length
        try:
            os.posix_fallocate(self.file.fileno(), offset, size)
        except OSError as error:
            file_system = os.statvfs(self.file.fileno())
            raise OSError(
                f"cannot extend the spill file in {self.directory} from {format_bytes(offset)} by "
                f"{format_bytes(size)}: {error.strerror}, "
                f"{format_bytes(file_system.f_bavail * file_system.f_frsize)} are free"
            ) from error
        self.length += size
        return offset

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
        page_offset = block.location % mmap.ALLOCATIONGRANULARITY
        length = page_offset + max(size, 1)
        map_start = block.location - page_offset
        mapping = mmap.mmap(self.file.fileno(), length, offset=map_start)
        weakref.finalize(mapping, self.arena.release, block, used_bytes).atexit = False
        return torch.frombuffer(mapping, dtype=torch.uint8)[page_offset : page_offset + size]

    def write(self, offset: int, memory: Tensor) -> None:
        """Write bytes to the file.

        Args:
            offset: The offset in the file, in bytes.
            memory: A contiguous tensor in host memory.

        Raises:
            OSError: The disk refuses the write.
        """
        remaining_bytes = _as_buffer(memory)
        file_descriptor = self.file.fileno()
        while remaining_bytes:
            try:
                count = os.pwrite(file_descriptor, remaining_bytes, offset)
            except OSError as error:
                raise OSError(
                    f"cannot write to the spill file in {self.directory}: {error.strerror}"
                ) from error
            remaining_bytes, offset = remaining_bytes[count:], offset + count

    def read(self, offset: int, memory: Tensor) -> None:
        """Read bytes from the file.

        Args:
            offset: The offset in the file, in bytes.
            memory: A contiguous tensor in host memory, which the method fills.

        Raises:
            OSError: The file is too short, or the disk refuses the read.
        """
        remaining_bytes = _as_buffer(memory)
        file_descriptor = self.file.fileno()
        while remaining_bytes:
            try:
                count = os.preadv(file_descriptor, [remaining_bytes], offset)
            except OSError as error:
                raise OSError(
                    f"cannot read the spill file in {self.directory}: {error.strerror}"
                ) from error
            if not count:
                raise OSError(
                    f"the spill file in {self.directory} is shorter than the data written to it"
                )
            remaining_bytes, offset = remaining_bytes[count:], offset + count


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
        _, escaped_path, file_system, *_ = line.split(" ")
        mount_point = Path(escaped_path.encode().decode("unicode_escape"))
        if path.is_relative_to(mount_point):
            longest_match = max(longest_match, (len(mount_point.parts), file_system))
    return longest_match[1]
