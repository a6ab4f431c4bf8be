"""Files: read as text, and written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path

from schedir.errors import UsageError, said


def read_text(path: str | Path) -> str:
    """The text of a file, without the byte-order mark that some editors put before it.

    Raises UsageError if it cannot be read, or is no UTF-8.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: byte {error.start} cannot be read") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def path_of(given: object) -> Path:
    """A path.  Raises UsageError for what names no file."""
    if not isinstance(given, str | os.PathLike):
        raise UsageError(f"a file is named by a text or a Path, not {said(given)}")
    return Path(given)


def named(place: str | Path, in_folder: Callable[[Path], list[Path]]) -> list[Path]:
    """The files that a person names: a file, those of a folder, or those that fit a pattern like
    `trace/rank*.json`; none where there are none."""
    path = Path(place)
    if path.is_dir():
        return in_folder(path)
    return [path] if path.exists() else [Path(name) for name in sorted(glob(str(place)))]


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
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if temporary.is_file() and temporary != target:
            temporary.unlink()
