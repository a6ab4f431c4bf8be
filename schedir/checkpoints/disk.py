"""Disk: what fails there, in one sentence, and what is on it for good.  Needs no torch."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from schedir.checkpoints.manifest import NotWholeError
from schedir.errors import CheckpointError, in_bytes
from schedir.io.files import is_disk_full, reason

# Of what should be there.
_DAMAGED: Final = (errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.ELOOP)


@contextmanager
def reads(path: Path, step: int) -> Iterator[None]:
    """What fails in this is a CheckpointError; NotWholeError where something is missing."""
    name = path.parent.name
    try:
        yield
    except OSError as error:
        if error.errno in _DAMAGED:
            why = (
                "is not there"
                if error.errno == errno.ENOENT
                else f"cannot be read: {error.strerror}"
            )
            raise NotWholeError(
                f"{name} is not whole: {path.name} {why}", step=step, file=path.name
            ) from None
        raise CheckpointError(
            f"cannot read {path.name} of {name}: {error.strerror}", step=step, file=path.name
        ) from None


@contextmanager
def writes(
    doing: str, step: int | None = None, *, folder: Path | None = None, needed: int | None = None
) -> Iterator[None]:
    """Turn an OSError in this context into a CheckpointError of one sentence.

    Args:
        doing: What cannot be done, as in "cannot save step 3".
        step: The step of the checkpoint.
        folder: The folder that is written to. If its disk is full, the error has its free bytes.
        needed: The number of bytes that this process writes, if it is known.

    Raises:
        CheckpointError: An OSError was raised in this context.
    """
    free = None if folder is None else _free(folder)
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise CheckpointError(f"cannot {doing}: {reason(error)}", step=step) from None
        facts = [] if needed is None else [f"this process writes {in_bytes(needed)}"]
        facts += [] if free is None else [f"{in_bytes(free)} were free"]
        numbers = f": {' and '.join(facts)}" if facts else ""
        raise CheckpointError(
            f"cannot {doing}: {reason(error)}{numbers}",
            step=step,
            hint="remove files from this disk, or save to a folder on another disk",
        ) from None


def _free(folder: Path) -> int | None:
    """Return the free bytes on the disk of a folder, or None if the system does not tell."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
