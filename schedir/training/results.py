"""Results: what a run leaves in its folder, where one at a time writes, and none over another's.

What is there belongs to the losses beside it: of an earlier run nothing is left once a new one has
begun its own, and what is written has another name until it is whole.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

from schedir.errors import UsageError
from schedir.io.files import atomic_write
from schedir.io.terminal import as_json
from schedir.io.timeline_file import save_timeline
from schedir.ir.program import Program
from schedir.predict.calibrate import unexplained
from schedir.predict.timeline import Timeline
from schedir.training.config import OutputConfig

LOSSES, SUMMARY, PICTURE = RESULTS = ("loss.csv", "summary.json", "timeline.png")
TRACE: Final = "measured.timeline"
LOCK: Final = ".lock"
COLUMNS: Final = "step,loss,learning_rate,gradient_norm,skipped\n"
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what a file system may say


@dataclass(frozen=True)
class Result:
    """What a run leaves: its last loss and speed, and its last step, measured and predicted.

    The prediction is from the mean times that the step measured.  There are no `runs` where
    nothing was recorded.  `memory` is the most that each rank holds, in bytes, as predicted from
    what the stages keep of one microbatch, and `lived` as counted in the second step, if it was.
    """

    program: Program
    loss: float
    tokens_per_second: float
    memory: tuple[float, ...]
    lived: tuple[int, ...]
    runs: tuple[Timeline, Timeline] | None


class Losses:
    """The losses of a run, a line per step, in a file that is there from `begin` on."""

    def __init__(self, output: OutputConfig) -> None:
        self.output = output
        self.file: TextIO | None = None

    def begin(self) -> None:
        """Begin the results of this run, to be called when its first step is certain: those of an
        earlier one, which `claimed` has allowed to replace, are gone then."""
        path = Path(self.output.folder, LOSSES)
        for old in _results(self.output):
            for part in old.parent.glob(f".{old.name}.*"):  # of a run that ended while writing it
                part.unlink(missing_ok=True)
            if old != path:
                old.unlink(missing_ok=True)
        with atomic_write(path) as temporary:
            self.file = temporary.open("w")
            self.file.write(COLUMNS)
            self.file.flush()

    def write(self, lines: str) -> None:
        """Add lines, which are in the file when this returns."""
        if self.file is not None:
            self.file.write(lines)
            self.file.flush()

    def close(self) -> None:
        """Nothing comes any more."""
        if self.file is not None:
            self.file.close()


@contextmanager
def claimed(output: OutputConfig) -> Iterator[None]:
    """Within this, the folders of a run are its own; they are made if they are not there.

    Raises UsageError if they cannot be written, if another run that is under way has claimed one,
    and for results of an earlier run, unless they are to be replaced.  Nothing is removed here.
    """
    with ExitStack() as locks:
        for folder, name in _folders(output).items():
            make_folder(folder)
            locks.enter_context(_locked(folder, name))
        for path in _results(output):
            if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
                raise UsageError(f"cannot write {path}: it is no file that can be replaced")
        if not output.replace and (found := [p for p in _results(output) if _holds_any(p)]):
            folder = str(found[0].parent)
            name = "folder" if found[0].parent == Path(output.folder) else "trace"
            raise UsageError(
                f"{folder} has results of an earlier run: "
                f"{', '.join(p.name for p in found if str(p.parent) == folder)}",
                hint=f"--set output.{name}=... writes elsewhere, "
                "--set output.replace=true replaces them at the first step",
                fields=[name, "replace"],
            )
        yield


def make_folder(folder: str) -> None:
    """Make a folder for results.  Raises UsageError if they cannot be written there."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"cannot write to the output folder {folder}: {error.strerror}") from None


def _folders(output: OutputConfig) -> dict[str, str]:
    """The folders that a run writes to, each once, and the setting that names it."""
    trace = output.trace
    if trace is None or Path(trace).resolve() == Path(output.folder).resolve():
        return {output.folder: "folder"}
    return {output.folder: "folder", trace: "trace"}


def _results(output: OutputConfig) -> list[Path]:
    """What a run writes, or another may have written in its place."""
    own = [Path(output.folder, name) for name in (*RESULTS, TRACE)]
    return own if output.trace is None else list(dict.fromkeys([*own, Path(output.trace, TRACE)]))


def _holds_any(path: Path) -> bool:
    """Whether a result says anything; losses may be of a run that never made a step."""
    if not path.exists():
        return False
    return path.name != LOSSES or path.read_bytes() not in (b"", COLUMNS.encode())


@contextmanager
def _locked(folder: str, name: str) -> Iterator[None]:
    """Within this, no other process can lock the folder that output.NAME gives.

    The lock is the system's, on a file that is open here: with the last process that has it open
    it goes, however that ends.  The file may stay, and means nothing.
    """
    path = Path(folder, LOCK)
    file = -1
    try:
        while file < 0:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is(path, file):  # it was removed by who had it before
                os.close(file)
                file = -1
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except OSError as error:
        if file >= 0 and error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            owner = os.pread(file, 200, 0).decode(errors="replace").strip()
            os.close(file)
            raise UsageError(
                f"the output folder {folder} is in use by another run"
                f"{f', {owner}' if owner.isprintable() and owner else ''}",
                hint=f"--set output.{name}=... writes elsewhere",
                fields=[name],
            ) from None
        if error.errno not in _NO_LOCKS:
            raise UsageError(
                f"cannot write to the output folder {folder}: {error.strerror}"
            ) from None
        print(
            f"{folder} has no locks ({error.strerror}): nothing keeps another run out of it",
            file=sys.stderr,
            flush=True,
        )
    try:
        yield
    finally:
        with suppress(OSError):  # before it is unlocked, so that it is nobody else's
            if _is(path, file):
                path.unlink()
        if file >= 0:
            os.close(file)


def _is(path: Path, file: int) -> bool:
    """Whether an open file is the one that has a name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except OSError:
        return False


def save(result: Result, output: OutputConfig) -> None:
    """The summary, and of a run that was recorded the picture and the trace."""
    summary, picture = Path(output.folder, SUMMARY), Path(output.folder, PICTURE)
    facts: dict[str, Any] = {
        "program": result.program.name,
        "digest": result.program.digest,
        "loss": result.loss,
        "tokens_per_second": result.tokens_per_second,
        "memory": {"predicted": result.memory},
    }
    if result.lived:
        facts["memory"]["counted"] = result.lived
    if result.runs is not None:
        from schedir.viz import compare
        from schedir.viz import save as save_picture

        measured, predicted = result.runs
        save_picture(compare([predicted, measured]), picture)
        facts["bubble"] = {
            "measured": measured.bubble,
            "predicted": predicted.bubble,
            "unexplained": unexplained(predicted, measured),
        }
        facts["seconds"] = {"measured": measured.span, "predicted": predicted.span}
        facts["clock_error"] = measured.clock_error
        if output.trace is not None:
            path = Path(output.trace, TRACE)
            save_timeline(measured, path)
            print(f"wrote {path}")
    with atomic_write(summary) as temporary:
        temporary.write_text(as_json(facts))
    wrote = RESULTS if result.runs is not None else RESULTS[:-1]
    print(f"wrote {', '.join(wrote[:-1])} and {wrote[-1]} to {output.folder}", flush=True)
