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

MAX_TEXT_BYTES: Final = 2**28  # of a text that is read whole
_READ_SIZE: Final = 2**20  # bytes that are read at a time
_SPECIAL_FILE_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular_file(path: str | Path) -> BinaryIO:
    """An ordinary file, to be read.

    Raises UsageError for one that cannot be read, and for what is no ordinary file: a pipe and a
    socket may wait for ever, and a device may have no end.
    """
    try:
        mode = os.stat(require_path(path)).st_mode  # opening a device, too, may do something
        if kind := next((kind for is_a, kind in _SPECIAL_FILE_KINDS if is_a(mode)), ""):
            raise UsageError(f"cannot read {path}: it is {kind}, and no ordinary file")
        # What has become a pipe since keeps nobody waiting.
        return os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def read_bytes(path: str | Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """What is in an ordinary file.  Raises what `open_regular_file` does, and UsageError, before it
    is read, for more than `max_bytes` bytes."""
    with open_regular_file(path) as file:
        large = os.fstat(file.fileno()).st_size > max_bytes
        if large or len(data := read_prefix(file, max_bytes + 1)) > max_bytes:
            raise UsageError(f"cannot read {path}: it has more than {format_bytes(max_bytes)}")
    return data


def read_prefix(file: BinaryIO, max_bytes: int) -> bytes:
    """The first bytes of a file, at most so many: memory is taken for those that are there."""
    parts, left = [], max_bytes
    while left and (part := file.read(min(left, _READ_SIZE))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_text(path: str | Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The text of a file, without the byte-order mark that some editors put before it.

    Raises what `read_bytes` does, and UsageError for what is no UTF-8.
    """
    data = read_bytes(path, max_bytes)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: byte {error.start} cannot be read") from None


def require_path(value: object) -> Path:
    """A path.  Raises UsageError for what names no file."""
    if not isinstance(value, str | os.PathLike):
        raise UsageError(f"a file is named by a text or a Path, not {describe(value)}")
    if "\0" in str(value):
        raise UsageError(f"no file is named {str(value)!r:.80}: a name ends at a zero byte")
    return Path(value)


def expand_paths(pattern: str | Path, list_directory: Callable[[Path], list[Path]]) -> list[Path]:
    """The files that a person names: a file, those of a folder, or those that fit a pattern like
    `trace/rank*.json`; none where there are none."""
    path = require_path(pattern)
    try:
        if path.is_dir():
            return list_directory(path)
        return [path] if path.exists() else [Path(name) for name in sorted(glob(str(pattern)))]
    except OSError as error:  # of a name that is too long, a folder that cannot be listed
        raise UsageError(f"cannot read {pattern!s:.200}: {error.strerror}") from None


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """A temporary name beside `path`; what is written there becomes `path` when the block ends.

    If the block raises, `path` is left as it was.  Raises UsageError for a path that cannot be
    written, and for one that is there but is no ordinary file.
    """
    target = require_path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}") if target.name else target
    try:
        if target.exists() and not target.is_file():  # never rename over a folder or a device
            raise UsageError(f"cannot write {path}: it is there and is no ordinary file")
        yield temporary
        os.replace(temporary, target)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {describe_os_error(error)}") from None
    finally:
        if temporary.is_file() and temporary != target:
            temporary.unlink()


def require_writable(path: str | Path) -> None:
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


def describe_os_error(error: OSError) -> str:
    """Return why a file could not be written, in a few words."""
    why = error.strerror or str(error)
    return f"the disk is full ({why})" if is_disk_full(error) else why
