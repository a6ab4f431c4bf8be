"""Verify: that files are as a manifest says, and which is the newest checkpoint that is whole."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Event, Lock
from typing import BinaryIO, NamedTuple, Protocol, TypeVar

from schedir.checkpoints.manifest import File, Manifest, NotWholeError
from schedir.errors import CheckpointError

Progress = Callable[[int, int], None]  # bytes that are done, and of how many
_PIECE = 2**22  # bytes that are read at a time
_THREADS = 8
_T = TypeVar("_T")


class Found(NamedTuple):
    """The newest whole checkpoint, None where none is, and why each newer one was passed over."""

    manifest: Manifest | None
    passed: tuple[str, ...]


class Checkpoints(Protocol):
    """What is asked of a folder."""

    given: str

    def steps(self) -> list[int]: ...

    def read(self, step: int) -> Manifest: ...

    def check_sizes(self, manifest: Manifest) -> None: ...

    def check_files(
        self, manifest: Manifest, names: list[str] | None, progress: Progress | None
    ) -> None: ...


def require_file(path: Path) -> BinaryIO:
    """An ordinary file, to be read.

    Raises OSError, and NotWholeError for a link, a pipe and so on: these may lead elsewhere, or
    wait for ever.
    """
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise NotWholeError(
            f"{path.parent.name} is not whole: {path.name} is no ordinary file", file=path.name
        )
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags), "rb")


def verify(
    files: Mapping[str, File], opened: Callable[[str], BinaryIO], progress: Progress | None = None
) -> Iterator[tuple[str, str]]:
    """The digest of each of some files, in the order in which they are read.

    Several are read side by side.  When the one who asks has enough, none is read on.
    """
    whole, done = sum(file.size for file in files.values()), 0
    lock, stop = Lock(), Event()

    def digest(name: str) -> str:
        nonlocal done
        found, buffer = hashlib.sha256(), memoryview(bytearray(min(_PIECE, files[name].size + 1)))
        with opened(name) as file:
            while not stop.is_set() and (size := file.readinto(buffer)):  # type: ignore[attr-defined]
                found.update(buffer[:size])
                with lock:
                    done += size
                    if progress is not None:
                        progress(done, whole)
        return found.hexdigest()

    threads = min(_THREADS, len(os.sched_getaffinity(0)), max(len(files), 1))
    with ThreadPoolExecutor(threads) as pool:
        try:
            largest = sorted(files, key=lambda name: -files[name].size)
            started = {pool.submit(digest, name): name for name in largest}
            for future in as_completed(started):
                yield started[future], future.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


Share = Callable[[Manifest], list[str]]  # of its files, those that a process verifies
Agree = Callable[[str], list[str]]  # what each process says, of what this one does


def first_whole(
    folder: Checkpoints, own: Share | None, agree: Agree | None, progress: Progress | None
) -> Found:
    """The newest checkpoint of a folder that is whole; see `Folder.find`."""
    passed: list[str] = []
    every = {step for steps in _made(folder.steps, agree) for step in steps}
    for step in sorted(every, reverse=True):  # one that not all see is not whole
        try:
            return Found(whole(folder, step, own, agree, progress), tuple(passed))
        except NotWholeError as error:
            passed.append(error.fact)
    return Found(None, tuple(passed))


def whole(
    folder: Checkpoints,
    step: int,
    own: Share | None,
    agree: Agree | None,
    progress: Progress | None,
) -> Manifest:
    """The manifest of a step's checkpoint, of which processes together have verified all files;
    where it is not whole for one, all raise what that one does."""
    found: list[Manifest] = []

    def digest() -> str:
        manifest = folder.read(step)
        found.append(manifest)
        folder.check_sizes(manifest)  # of all: who reads one may not be who verified it
        folder.check_files(manifest, own and own(manifest), progress)
        return manifest.digest

    if len({*_made(digest, agree)}) > 1:
        raise NotWholeError(
            f"the checkpoint of step {step} is not the same to all processes", step=step
        )
    return found[0]


def _made(make: Callable[[], _T], agree: Agree | None) -> list[_T]:
    """What each process makes, which JSON can say; what any was refused, all are.

    Raises CheckpointError, or NotWholeError where nobody raises another.
    """
    outcome: list[object]
    try:
        outcome = ["", make(), None, ""]
    except CheckpointError as error:
        kind = "not whole" if isinstance(error, NotWholeError) else "refused"
        outcome = [kind, error.fact, error.step, error.file]
    text = json.dumps(outcome)
    outcomes = [json.loads(one) for one in ([text] if agree is None else agree(text))]
    for name, raised in (("refused", CheckpointError), ("not whole", NotWholeError)):
        for said, fact, step, file in outcomes:
            if said == name:
                raise raised(fact, step, file)
    return [made for _, made, _, _ in outcomes]
