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
from schedir.errors import CheckpointError

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
def writes(doing: str, step: int | None = None) -> Iterator[None]:
    """What fails in this is a CheckpointError in one sentence."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {doing}: {error.strerror or error}", step=step) from None


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
