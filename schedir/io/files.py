"""Read text files, and write files atomically."""

from __future__ import annotations

import errno
import gzip
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path
from typing import BinaryIO, Final

from schedir.errors import UsageError, describe, format_bytes

MAX_TEXT_BYTES: Final = 2**28  # bytes of a text file: a larger one is probably a mistake
_READ_SIZE: Final = 2**20  # bytes of one read, so that a short file needs little memory
_EXPORT_HEADER_BYTES: Final = 4096  # The metadata of an export is within these first bytes.
_SPECIAL_FILE_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading.

    Other kinds of files are refused: a read of a pipe or a socket may wait forever, and a device
    may have no end.

    Args:
        path: The file.

    Returns:
        The open binary file, which the caller closes.

    Raises:
        UsageError: The file cannot be read, or it is a folder, pipe, socket or device.
    """
    try:
        # The kind is checked first, because opening a device may already have an effect.
        mode = os.stat(require_path(path)).st_mode
        if kind := next((kind for is_kind, kind in _SPECIAL_FILE_KINDS if is_kind(mode)), ""):
            raise UsageError(f"cannot read {path}: it is {kind}, not a regular file")
        # The file may have become a pipe since the check. O_NONBLOCK opens a pipe without waiting.
        return os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def read_bytes(path: str | Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Read a regular file.

    Args:
        path: The file.
        max_bytes: The largest size that is read.

    Returns:
        The bytes of the file.

    Raises:
        UsageError: The file cannot be read, is not a regular file, or has more than `max_bytes`
            bytes. A file that is too large is refused before it is read.
    """
    with open_regular_file(path) as file:
        is_too_large = os.fstat(file.fileno()).st_size > max_bytes
        if is_too_large or len(data := read_prefix(file, max_bytes + 1)) > max_bytes:
            raise UsageError(
                f"cannot read {path}: it has more than {format_bytes(max_bytes)}, the limit"
            )
    return data


def read_prefix(file: BinaryIO, max_bytes: int) -> bytes:
    """Read the first bytes of a file. Memory is allocated only for bytes that exist.

    Args:
        file: The open file.
        max_bytes: The largest number of bytes to read.

    Returns:
        `max_bytes` bytes, or fewer if the file ends.
    """
    parts, remaining_bytes = [], max_bytes
    while remaining_bytes and (part := file.read(min(remaining_bytes, _READ_SIZE))):
        parts.append(part)
        remaining_bytes -= len(part)
    return b"".join(parts)


def read_text(path: str | Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Read a UTF-8 text file, and drop its byte-order mark.

    Args:
        path: The file.
        max_bytes: The largest size that is read.

    Returns:
        The text.

    Raises:
        UsageError: `read_bytes` refuses the file, or the file is not UTF-8 text.
    """
    data = read_bytes(path, max_bytes)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: byte {error.start} is invalid") from None


def require_path(value: object) -> Path:
    """Return a value as a path.

    Args:
        value: A text or a path.

    Raises:
        UsageError: The value is neither a text nor a path, or it contains a zero byte.
    """
    if not isinstance(value, str | os.PathLike):
        raise UsageError(f"a path must be a str or a pathlib.Path, not {describe(value)}")
    if "\0" in str(value):
        raise UsageError(f"the path {str(value)!r:.80} contains a zero byte")
    return Path(value)


def expand_paths(pattern: str | Path, list_directory: Callable[[Path], list[Path]]) -> list[Path]:
    """Return the files that a path or a pattern names.

    Args:
        pattern: A file, a folder, or a pattern such as `trace/rank*.json`.
        list_directory: A function that returns the files of a folder.

    Returns:
        The file itself, the files of the folder, or the sorted files that match the pattern. The
        list is empty if no file matches.

    Raises:
        UsageError: `pattern` is not a path, or the system cannot read it.
    """
    path = require_path(pattern)
    try:
        if path.is_dir():
            return list_directory(path)
        return [path] if path.exists() else [Path(name) for name in sorted(glob(str(pattern)))]
    except OSError as error:  # the name is too long, or the folder cannot be listed
        raise UsageError(f"cannot read {pattern!s:.200}: {error.strerror}") from None


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path, and rename it to `path` when the block ends.

    The temporary file is in the folder of `path`. If the block raises, the temporary file is
    removed, and `path` stays as it was.

    Args:
        path: The file to write.

    Yields:
        The temporary path, at which the block writes the content.

    Raises:
        UsageError: The file cannot be written, or `path` exists and is not a regular file. This is
            raised before the block. Or the block raised an OSError.
    """
    target = require_path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}") if target.name else target
    try:
        if target.exists() and not target.is_file():  # a rename would replace a device
            raise UsageError(f"cannot write {path}: it exists and is not a regular file")
        temporary.touch()  # fails before the block if the file cannot be written
        yield temporary
        os.replace(temporary, target)
    except OSError as error:
        folder = target.parent
        if isinstance(error, FileNotFoundError) and not folder.exists():
            raise UsageError(
                f"cannot write {path}: there is no folder {folder}", hint=f"mkdir -p {folder}"
            ) from None
        raise UsageError(f"cannot write {path}: {describe_os_error(error)}") from None
    finally:
        if temporary.is_file() and temporary != target:
            temporary.unlink()


def is_perfetto_export(path: Path) -> bool:
    """Return whether a file begins with the metadata that `schedir.io.perfetto` writes.

    Args:
        path: A regular file, which is read with gzip if its name ends in .gz.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return b'"microseconds_per_unit":' in file.read(_EXPORT_HEADER_BYTES)
    except (OSError, EOFError, zlib.error):  # The file is not readable, or not compressed.
        return False


# Suffix of a file -> the command that writes such files.
_WRITING_COMMANDS: Final = {
    ".sched": "compile",
    ".timeline": "simulate",
    **dict.fromkeys((".svg", ".png", ".pdf", ".html"), "draw"),
    ".csv": "export",
}


def require_suffix(output: str, subject: str, suffix: str) -> None:
    """Raise UsageError if the file of the option `-o` does not end in a given suffix.

    Args:
        output: The file.
        subject: The subject of the error, such as "the file of a program".
        suffix: The suffix, such as ".sched".
    """
    if not output.endswith(suffix):
        command = _WRITING_COMMANDS.get(Path(output).suffix, "")
        raise UsageError(
            f"-o {output}: {subject} must end in {suffix}",
            hint=f"schedir {command} SCHEDULE -o {output}" if command else "",
        )


def require_writable(path: str | Path) -> None:
    """Raise UsageError if no file can be written at `path`.

    Call this function before a long computation of the content. An existing file at `path` stays as
    it is.

    Args:
        path: The file that will be written.

    Raises:
        UsageError: `atomic_write` cannot write the file.
    """
    with suppress(_TrialDone), atomic_write(path):
        raise _TrialDone


class _TrialDone(Exception):
    """Ends the block of `atomic_write` before the rename, which also removes the temporary file."""


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error means that the disk, or the user's quota of it, is full.

    Args:
        error: The error. Only an OSError can have this meaning.
    """
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def describe_os_error(error: OSError) -> str:
    """Return the reason why a file could not be written, in a few words.

    Args:
        error: The error.
    """
    if isinstance(error, FileExistsError | NotADirectoryError) and error.filename:
        path = Path(error.filename)
        if file := next((p for p in (path, *path.parents) if p.is_file()), None):
            return f"{file} is a file, not a folder"
    reason = error.strerror or str(error)
    return f"the disk is full ({reason})" if is_disk_full(error) else reason
