"""Read text files, and write files atomically."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path
from typing import BinaryIO, Final

from schedir.errors import UsageError, describe, format_bytes

MOST_BYTES: Final = 2**28  # of a text that is read whole
_PIECE: Final = 2**20  # bytes that are read at a time
_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def opened(path: str | Path) -> BinaryIO:
    """An ordinary file, to be read.

    Raises UsageError for one that cannot be read, and for what is no ordinary file: a pipe and a
    socket may wait for ever, and a device may have no end.
    """
    try:
        mode = os.stat(path_of(path)).st_mode  # opening a device, too, may do something
        if kind := next((kind for is_a, kind in _KINDS if is_a(mode)), ""):
            raise UsageError(f"cannot read {path}: it is {kind}, and no ordinary file")
        # What has become a pipe since keeps nobody waiting.
        return os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """What is in an ordinary file.  Raises what `opened` does, and UsageError, before it is read,
    for more than `most` bytes."""
    with opened(path) as file:
        large = os.fstat(file.fileno()).st_size > most
        if large or len(data := begin_of(file, most + 1)) > most:
            raise UsageError(f"cannot read {path}: it has more than {format_bytes(most)}")
    return data


def begin_of(file: BinaryIO, most: int) -> bytes:
    """The first bytes of a file, at most so many: memory is taken for those that are there."""
    parts, left = [], most
    while left and (part := file.read(min(left, _PIECE))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """The text of a file, without the byte-order mark that some editors put before it.

    Raises what `read_bytes` does, and UsageError for what is no UTF-8.
    """
    data = read_bytes(path, most)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: byte {error.start} cannot be read") from None


def path_of(given: object) -> Path:
    """A path.  Raises UsageError for what names no file."""
    if not isinstance(given, str | os.PathLike):
        raise UsageError(f"a file is named by a text or a Path, not {describe(given)}")
    if "\0" in str(given):
        raise UsageError(f"no file is named {str(given)!r:.80}: a name ends at a zero byte")
    return Path(given)


def named(place: str | Path, in_folder: Callable[[Path], list[Path]]) -> list[Path]:
    """The files that a person names: a file, those of a folder, or those that fit a pattern like
    `trace/rank*.json`; none where there are none."""
    path = path_of(place)
    try:
        if path.is_dir():
            return in_folder(path)
        return [path] if path.exists() else [Path(name) for name in sorted(glob(str(place)))]
    except OSError as error:  # of a name that is too long, a folder that cannot be listed
        raise UsageError(f"cannot read {place!s:.200}: {error.strerror}") from None


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """A temporary name beside `path`; what is written there becomes `path` when the block ends.

    If the block raises, `path` is left as it was.  Raises UsageError for a path that cannot be
    written, and for one that is there but is no ordinary file.
    """
    target = path_of(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}") if target.name else target
    try:
        if target.exists() and not target.is_file():  # never rename over a folder or a device
            raise UsageError(f"cannot write {path}: it is there and is no ordinary file")
        yield temporary
        os.replace(temporary, target)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {reason(error)}") from None
    finally:
        if temporary.is_file() and temporary != target:
            temporary.unlink()


def expect_writable(path: str | Path) -> None:
    """Raise UsageError if no file can be written at `path`.

    Call this before the long work that makes the content. A file at `path` stays as it is.
    """
    with suppress(_TrialDone), atomic_write(path) as temporary:
        temporary.touch()
        raise _TrialDone


class _TrialDone(Exception):
    """Leaves `atomic_write` before it renames the temporary file, which it then removes."""


def is_disk_full(error: BaseException) -> bool:
    """Return whether an OSError means that a disk, or the user's quota of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def reason(error: OSError) -> str:
    """Return why a file could not be written, in a few words."""
    why = error.strerror or str(error)
    return f"the disk is full ({why})" if is_disk_full(error) else why
