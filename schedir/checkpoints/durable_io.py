"""Flush files to the disk, and convert I/O errors to errors of one sentence.

Needs no torch.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import BinaryIO, Final

from schedir.checkpoints.manifest import IncompleteCheckpointError
from schedir.errors import CheckpointError, format_bytes
from schedir.io.files import describe_os_error, is_disk_full

# Errors that mean that a file of a checkpoint is missing or damaged.
_DAMAGE_ERRNOS: Final = (errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.ELOOP)
_READ_BYTES: Final = 2**22  # bytes of one read
_MAX_THREADS: Final = 8  # threads of `compute_digests`


@contextmanager
def open_regular_file(path: Path, step: int) -> Iterator[BinaryIO]:
    """Open a regular file of a checkpoint for reading, within a context.

    Links, pipes and devices are refused: they may lead out of the checkpoint, or block forever.

    Args:
        path: The file.
        step: The step of the checkpoint, for errors.

    Raises:
        IncompleteCheckpointError: The file is missing or damaged, or is not a regular file.
        CheckpointError: The file cannot be read for another reason, such as permissions.
    """
    name, file = path.parent.name, path.name
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise IncompleteCheckpointError(
                f"{name} is not complete: {file} is not a regular file", step, file
            )
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags), "rb") as stream:
            yield stream
    except OSError as error:
        if error.errno not in _DAMAGE_ERRNOS:
            fact = f"cannot read {file} of {name}: {error.strerror}"
            raise CheckpointError(fact, step, file) from None
        is_missing = error.errno == errno.ENOENT
        reason = "is missing" if is_missing else f"cannot be read: {error.strerror}"
        name = f"{name} is not complete"
        raise IncompleteCheckpointError(f"{name}: {file} {reason}", step, file) from None


def compute_digests(sizes: Mapping[Path, int], step: int) -> Iterator[tuple[Path, str]]:
    """Compute the sha256 of files of a checkpoint, in several threads.

    Large files are read first. If the caller closes the generator, the threads stop.

    Args:
        sizes: The files, and their expected sizes in bytes.
        step: The step of the checkpoint, for errors.

    Yields:
        Each file with its digest in hexadecimal digits, as soon as the digest is computed.

    Raises:
        IncompleteCheckpointError: See `open_regular_file`.
        CheckpointError: See `open_regular_file`.
    """
    stop = Event()

    def digest(path: Path) -> tuple[Path, str]:
        sha = sha256()
        buffer = memoryview(bytearray(min(_READ_BYTES, sizes[path] + 1)))
        with open_regular_file(path, step) as file:
            while not stop.is_set() and (size := file.readinto(buffer)):  # type: ignore[attr-defined]
                sha.update(buffer[:size])
        return path, sha.hexdigest()

    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)), max(len(sizes), 1))
    with ThreadPoolExecutor(threads) as pool:
        largest = sorted(sizes, key=lambda path: -sizes[path])
        try:
            for future in as_completed([pool.submit(digest, path) for path in largest]):
                yield future.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


@contextmanager
def translate_os_errors(
    action: str,
    step: int | None = None,
    *,
    directory: Path | None = None,
    needed_bytes: int | None = None,
) -> Iterator[None]:
    """Convert an OSError in this context to a CheckpointError of one sentence.

    Args:
        action: The action that failed, as in "save step 3".
        step: The step of the checkpoint.
        directory: The directory to which the context writes. If its disk is full, the error has the
            bytes that were free when the context was entered.
        needed_bytes: The number of bytes that this process writes, or None if it is unknown.

    Raises:
        CheckpointError: An OSError was raised in this context.
    """
    free_bytes = None if directory is None else _get_free_bytes(directory)
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise CheckpointError(
                f"cannot {action}: {describe_os_error(error)}", step=step
            ) from None
        facts = (
            [] if needed_bytes is None else [f"this process writes {format_bytes(needed_bytes)}"]
        )
        facts += [] if free_bytes is None else [f"{format_bytes(free_bytes)} were free"]
        numbers = f": {' and '.join(facts)}" if facts else ""
        raise CheckpointError(
            f"cannot {action}: {describe_os_error(error)}{numbers}",
            step=step,
            hint="remove files from this disk, or save to a folder on another disk",
        ) from None


def _get_free_bytes(directory: Path) -> int | None:
    """Return the free bytes on the disk of a directory, or None if they are unknown."""
    try:
        disk = os.statvfs(directory)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize


def fsync_path(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk.

    Args:
        path: The file or directory.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def print_to_stderr(text: str) -> None:
    """Print a line to stderr, and flush it.

    Args:
        text: The line.
    """
    print(text, file=sys.stderr, flush=True)
