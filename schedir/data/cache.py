"""Cache: what is made of a source once, by one process, and read by all.

In $XDG_CACHE_HOME/schedir, by digests of all that it is made of; nothing is removed there.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from schedir.errors import ExecutionError, UsageError

PATIENCE: Final = 3600.0  # seconds without a sign of who makes what others wait for
_OFTEN: Final = 10.0  # seconds between words of progress

Progress = Callable[[int], None]


def home() -> Path:
    """The cache folder, made if it is not there.  Raises UsageError if it cannot be."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "schedir"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritten(folder, error) from None
    return folder


def digest(*said: object) -> str:
    """A digest of some values, by what they are printed as."""
    return blake2b(repr(said).encode(), digest_size=16).hexdigest()


def made(
    path: Path,
    make: Callable[[Path, Progress], None],
    what: str,
    total: int,
    *,
    patience: float = PATIENCE,
) -> Path:
    """`path`, made by the first process of this machine that asks; others wait for it.

    `make` is given an empty folder beside it, in which it writes files named like `path` but for
    their suffixes, and a function that is told how much of `total` is done.  They are renamed
    when all are written, `path` last.  The lock is the system's: it goes with who holds it.
    Raises UsageError where nothing can be written, and ExecutionError where who makes it shows no
    sign of life for `patience` seconds.
    """
    if path.exists():
        return path
    lock = path.with_suffix(".lock")
    try:
        with lock.open("a") as held:
            _acquire(held.fileno(), what, lock, patience)
            if not path.exists():
                with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as folder:
                    make(Path(folder), _progress(what, total, held.fileno()))
                    parts = sorted(Path(folder).iterdir(), key=lambda part: part.name == path.name)
                    for part in parts:
                        os.replace(part, path.with_name(part.name))
            lock.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritten(path, error) from None
    return path


def _acquire(held: int, what: str, lock: Path, patience: float) -> None:
    seen, since = -1, monotonic()
    while True:
        try:
            return fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sign = os.fstat(held).st_mtime_ns
            if sign != seen:
                seen, since = sign, monotonic()
            if monotonic() - since > patience:
                raise ExecutionError(
                    f"{what}: another process has held {lock} for {patience:g} s without a sign "
                    "of life",
                    hint="end that process",
                ) from None
            sleep(0.05)


def _progress(what: str, total: int, held: int) -> Progress:
    """Tells of long work now and then, and shows those who wait that it goes on."""
    last = monotonic()

    def progress(done: int) -> None:
        nonlocal last
        if monotonic() - last >= _OFTEN:
            last = monotonic()
            os.utime(held)
            print(f"{what}: {100 * done // max(total, 1)} % of {total:,} bytes", flush=True)

    return progress


def _unwritten(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write {error.filename or path}: {error.strerror or error}",
        hint="set XDG_CACHE_HOME to a folder to write in",
    )
