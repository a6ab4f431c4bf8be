"""Write the output files of a run.

What is there belongs to the losses beside it: of an earlier run nothing is left once a new one has
begun its own, and what is written has another name until it is whole.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

from schedir.checkpoints.checkpoint_directory import CheckpointDirectory
from schedir.errors import UsageError
from schedir.io.directory_lock import DirectoryLock, LockHeldError
from schedir.io.files import atomic_write, opened, path_of, reason
from schedir.io.terminal import as_json
from schedir.io.timeline_file import save_timeline
from schedir.ir.program import Program
from schedir.predict.calibrate import unexplained
from schedir.predict.timeline import Timeline
from schedir.training.config.run_config import Config, OutputConfig
from schedir.training.resume_checks import RUN, RunIdentity, expect_resumable, origin

LOSSES, SUMMARY, PICTURE = RESULTS = ("loss.csv", "summary.json", "timeline.png")
EVALUATIONS: Final = "evaluation.csv"
TRACE: Final = "measured.timeline"
LOCK: Final = ".lock"
COLUMNS: Final = "step,loss,learning_rate,gradient_norm,skipped\n"
EVALUATED: Final = "step,loss,perplexity,tokens\n"


@dataclass(frozen=True)
class RunResult:
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


class LossLog:
    """The losses of a run, a line per step, in a file that is there from `begin` on."""

    def __init__(self, config: Config, run: RunIdentity) -> None:
        self.config, self.output, self.run = config, config.output, run
        self.file: TextIO | None = None

    def begin(self, made: int = 0) -> None:
        """Begin the results of this run, or go on with them after `made` steps, to be called when a
        step is certain: those of an earlier run, which `claimed` has allowed to replace, are gone
        then, and so are this one's own of later steps."""
        path, folder = Path(self.output.dir, LOSSES), self.config.train.checkpoint_dir
        goes_on = made > 0 and self.run.has(self.output.dir)
        kept = lines(path, made) if goes_on else []
        looks = Path(self.output.dir, EVALUATIONS)
        seen = _until(looks, made) if goes_on else []
        if folder is not None:
            if not made:
                CheckpointDirectory(folder).remove_all()
            self.run.write(folder)
        runs = [Path(f, RUN) for f in (self.output.dir, folder) if f is not None]
        for file in (*_results(self.output), *runs):
            for part in file.parent.glob(f".{file.name}.*"):  # of a run that ended while writing it
                part.unlink(missing_ok=True)
        for old in _results(self.output):
            if old != path and not (old == looks and seen):
                old.unlink(missing_ok=True)
        if seen:
            with atomic_write(looks) as temporary:
                temporary.write_text("".join([EVALUATED, *seen]))
        if folder is not None:
            self.run.write(self.output.dir)
        else:
            Path(self.output.dir, RUN).unlink(missing_ok=True)
        with atomic_write(path) as temporary:
            self.file = temporary.open("w")
            self.file.writelines([COLUMNS, *kept])
            self.file.flush()

    def secure(self) -> None:
        """Return when what has been written outlives the machine."""
        if self.file is not None:
            os.fsync(self.file.fileno())

    @property
    def finished(self) -> bool:
        """Whether an earlier start of this run has left its summary."""
        folder = self.output.dir
        return self.run.has(folder) and Path(folder, SUMMARY).exists()

    def last(self) -> float:
        """The loss of the last step that an earlier start of this run has written; NaN if none."""
        path = Path(self.output.dir, LOSSES)
        rows = path.read_text().splitlines()[1:] if self.run.has(self.output.dir) else []
        return float(rows[-1].split(",")[1]) if rows else math.nan

    def write(self, lines: str) -> None:
        """Add lines, which are in the file when this returns."""
        if self.file is not None:
            try:
                self.file.write(lines)
                self.file.flush()
            except OSError as error:  # which does not say of which file
                path = str(Path(self.output.dir, LOSSES))
                raise OSError(error.errno, error.strerror, path) from None

    def evaluated(self, line: str) -> None:
        """Add a line to the losses of what is held out, whose file the first one makes."""
        path = Path(self.output.dir, EVALUATIONS)
        if path.exists():
            with path.open("a") as file:
                file.write(line)
            return
        with atomic_write(path) as temporary:
            temporary.write_text(EVALUATED + line)

    def close(self) -> None:
        """Close the file of losses."""
        if self.file is not None:
            with suppress(OSError):  # the write that failed has already raised it
                self.file.close()


def lines(path: Path, step: int) -> list[str]:
    """The lines of a file of losses up to a step, which may begin after it.

    Raises UsageError for one that ends before.
    """
    kept = _until(path, step)
    if kept and (had := kept[-1].partition(",")[0]) != str(step):
        raise UsageError(
            f"{path} ends at step {had}, and the run goes on after step {step}",
            hint="--set output.dir=... writes elsewhere",
            fields=["dir"],
        )
    return kept


def _until(path: Path, step: int) -> list[str]:
    """The lines of a file, behind its first, up to a step; the last one may have been cut off."""
    found: list[str] = []
    with suppress(FileNotFoundError):
        found = path.read_text().splitlines(keepends=True)[1:]
    rows = [row for row in found if row.endswith("\n")]
    return [row for row in rows if int(row.partition(",")[0]) <= step]


@contextmanager
def claimed(config: Config) -> Iterator[None]:
    """Within this, the folders of a run are its own; they are made if they are not there.

    Raises UsageError if they cannot be written, if another run that is under way has claimed one,
    for checkpoints that it cannot go on from, and for results of an earlier run, unless they are to
    be replaced.  Nothing is removed here.
    """
    output = config.output
    with ExitStack() as locks:
        own: list[os.stat_result] = []
        for name in _KINDS:
            section, _, setting = name.partition(".")
            if (folder := getattr(getattr(config, section), setting)) is None:
                continue
            make_folder(folder, name)
            if not any(os.path.samestat(os.stat(folder), one) for one in own):  # however it is told
                own.append(os.stat(folder))
                locks.enter_context(_locked(folder, name))
        expect_resumable(config)
        before = origin(config)
        for path in _results(output):
            if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
                raise UsageError(f"cannot write {path}: it is no file that can be replaced")
        found = [p for p in _results(output) if _holds_any(p)]
        if before is not None and before.has(output.dir):
            lines(Path(output.dir, LOSSES), before.step)
        elif found and not output.overwrite:
            folder = str(found[0].parent)
            name = "dir" if found[0].parent == Path(output.dir) else "trace"
            raise UsageError(
                f"{folder} has results of an earlier run: "
                f"{', '.join(p.name for p in found if str(p.parent) == folder)}",
                hint=f"--set output.{name}=... writes elsewhere, "
                "--set output.overwrite=true replaces them at the first step",
                fields=[name, "overwrite"],
            )
        yield


def make_folder(folder: str, name: str = "output.dir") -> None:
    """Make a folder for results, or what the setting of a name says.  Raises UsageError if nothing
    can be written there."""
    try:
        path_of(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write to the {_KINDS[name]} {folder}: {reason(error)}",
            fields=[name.partition(".")[2]],
        ) from None


_KINDS: Final = {
    "output.dir": "output folder",
    "output.trace": "output folder",
    "train.checkpoint_dir": "folder of checkpoints",
}


def _results(output: OutputConfig) -> list[Path]:
    """What a run writes, or another may have written in its place."""
    own = [Path(output.dir, name) for name in (*RESULTS, EVALUATIONS, TRACE)]
    return own if output.trace is None else list(dict.fromkeys([*own, Path(output.trace, TRACE)]))


def _holds_any(path: Path) -> bool:
    """Whether a result says anything; losses may be of a run that never made a step."""
    if not path.exists():
        return False
    if path.name != LOSSES:
        return True
    with opened(path) as file:
        return file.read(len(COLUMNS) + 1) not in (b"", COLUMNS.encode())


@contextmanager
def _locked(folder: str, name: str) -> Iterator[None]:
    """Within this, no other process can lock the folder that a setting of this name gives."""
    lock = DirectoryLock(Path(folder, LOCK))
    try:
        if why := lock.take():
            print(
                f"{folder} has no locks ({why}): nothing keeps another run out of it",
                file=sys.stderr,
                flush=True,
            )
    except LockHeldError as other:
        raise UsageError(
            f"the {_KINDS[name]} {folder} is in use by another run"
            f"{f', {other.owner}' if other.owner else ''}",
            hint=f"--set {name}=... writes elsewhere",
            fields=[name.partition(".")[2]],
        ) from None
    except OSError as error:
        raise UsageError(f"cannot write to the {_KINDS[name]} {folder}: {reason(error)}") from None
    try:
        yield
    finally:
        lock.leave()


def save(result: RunResult, output: OutputConfig) -> None:
    """The picture and the trace of a run that was recorded, and the summary.

    Raises what keeps one of them from being written, when the others are.
    """
    facts: dict[str, Any] = {
        "program": result.program.name,
        "digest": result.program.digest,
        "loss": result.loss,
        "tokens_per_second": result.tokens_per_second,
        "memory": {"predicted": result.memory},
    }
    if result.lived:
        facts["memory"]["counted"] = result.lived
    wrote, failed = [LOSSES], list[Exception]()
    if result.runs is not None:
        measured, predicted = result.runs
        facts["bubble"] = {
            "measured": measured.bubble,
            "predicted": predicted.bubble,
            "unexplained": unexplained(predicted, measured),
        }
        facts["seconds"] = {"measured": measured.span, "predicted": predicted.span}
        facts["clock_error"] = measured.clock_error
        try:
            from schedir.viz import compare
            from schedir.viz import save as save_picture

            save_picture(compare([predicted, measured]), Path(output.dir, PICTURE))
            wrote.append(PICTURE)
        except Exception as error:
            failed.append(error)
        if output.trace is not None:
            path = Path(output.trace, TRACE)
            try:
                save_timeline(measured, path)
                print(f"wrote {path}")
            except Exception as error:
                failed.append(error)
    with atomic_write(Path(output.dir, SUMMARY)) as temporary:
        temporary.write_text(as_json(facts))
    wrote.insert(1, SUMMARY)
    print(f"wrote {', '.join(wrote[:-1])} and {wrote[-1]} to {output.dir}", flush=True)
    if failed:
        raise failed[0]
