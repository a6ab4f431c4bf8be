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
from schedir.io.files import atomic_write, describe_os_error, open_regular_file, require_path
from schedir.io.terminal import format_json
from schedir.io.timeline_file import save_timeline
from schedir.ir.program import Program
from schedir.predict.calibrate import compute_unexplained_share
from schedir.predict.timeline import Timeline
from schedir.training.config.run_config import Config, OutputConfig
from schedir.training.resume_checks import (
    RUN_FILE,
    RunIdentity,
    find_resumed_run,
    require_resumable,
)

LOSSES_FILE, SUMMARY_FILE, PICTURE_FILE = RESULT_FILES = (
    "loss.csv",
    "summary.json",
    "timeline.png",
)
EVALUATIONS_FILE: Final = "evaluation.csv"
TRACE_FILE: Final = "measured.timeline"
LOCK_FILE: Final = ".lock"
LOSSES_HEADER: Final = "step,loss,learning_rate,gradient_norm,skipped\n"
EVALUATIONS_HEADER: Final = "step,loss,perplexity,tokens\n"


@dataclass(frozen=True)
class RunResult:
    """What a run leaves: its last loss and speed, and its last step, measured and predicted.

    The prediction is from the mean times that the step measured.  There are no `timelines` where
    nothing was recorded.  `predicted_memory` is the most that each rank holds, in bytes, as
    predicted from what the stages keep of one microbatch, and `counted_memory` as counted in the
    second step, if it was.
    """

    program: Program
    loss: float
    tokens_per_second: float
    predicted_memory: tuple[float, ...]
    counted_memory: tuple[int, ...]
    timelines: tuple[Timeline, Timeline] | None


class LossLog:
    """The losses of a run, a line per step, in a file that is there from `begin` on."""

    def __init__(self, config: Config, run: RunIdentity) -> None:
        self.config, self.output, self.run = config, config.output, run
        self.file: TextIO | None = None

    def begin(self, start_step: int = 0) -> None:
        """Begin the results of this run, or go on with them after `start_step` steps, to be called
        when a step is certain: those of an earlier run, which `claim_directories` has allowed to
        replace, are gone then, and so are this one's own of later steps."""
        path, folder = Path(self.output.dir, LOSSES_FILE), self.config.train.checkpoint_dir
        goes_on = start_step > 0 and self.run.owns_directory(self.output.dir)
        kept = read_loss_lines(path, start_step) if goes_on else []
        looks = Path(self.output.dir, EVALUATIONS_FILE)
        seen = _read_lines_until(looks, start_step) if goes_on else []
        if folder is not None:
            if not start_step:
                CheckpointDirectory(folder).remove_all()
            self.run.write(folder)
        runs = [Path(f, RUN_FILE) for f in (self.output.dir, folder) if f is not None]
        for file in (*_list_result_files(self.output), *runs):
            for part in file.parent.glob(f".{file.name}.*"):  # of a run that ended while writing it
                part.unlink(missing_ok=True)
        for old in _list_result_files(self.output):
            if old != path and not (old == looks and seen):
                old.unlink(missing_ok=True)
        if seen:
            with atomic_write(looks) as temporary:
                temporary.write_text("".join([EVALUATIONS_HEADER, *seen]))
        if folder is not None:
            self.run.write(self.output.dir)
        else:
            Path(self.output.dir, RUN_FILE).unlink(missing_ok=True)
        with atomic_write(path) as temporary:
            self.file = temporary.open("w")
            self.file.writelines([LOSSES_HEADER, *kept])
            self.file.flush()

    def sync_to_disk(self) -> None:
        """Return when what has been written outlives the machine."""
        if self.file is not None:
            os.fsync(self.file.fileno())

    @property
    def is_finished(self) -> bool:
        """Whether an earlier start of this run has left its summary."""
        folder = self.output.dir
        return self.run.owns_directory(folder) and Path(folder, SUMMARY_FILE).exists()

    def read_last_loss(self) -> float:
        """The loss of the last step that an earlier start of this run has written; NaN if none."""
        path = Path(self.output.dir, LOSSES_FILE)
        rows = path.read_text().splitlines()[1:] if self.run.owns_directory(self.output.dir) else []
        return float(rows[-1].split(",")[1]) if rows else math.nan

    def write(self, lines: str) -> None:
        """Add lines, which are in the file when this returns."""
        if self.file is not None:
            try:
                self.file.write(lines)
                self.file.flush()
            except OSError as error:  # which does not say of which file
                path = str(Path(self.output.dir, LOSSES_FILE))
                raise OSError(error.errno, error.strerror, path) from None

    def write_evaluation(self, line: str) -> None:
        """Add a line to the losses of what is held out, whose file the first one makes."""
        path = Path(self.output.dir, EVALUATIONS_FILE)
        if path.exists():
            with path.open("a") as file:
                file.write(line)
            return
        with atomic_write(path) as temporary:
            temporary.write_text(EVALUATIONS_HEADER + line)

    def close(self) -> None:
        """Close the file of losses."""
        if self.file is not None:
            with suppress(OSError):  # the write that failed has already raised it
                self.file.close()


def read_loss_lines(path: Path, step: int) -> list[str]:
    """The lines of a file of losses up to a step, which may begin after it.

    Raises UsageError for one that ends before.
    """
    kept = _read_lines_until(path, step)
    if kept and (had := kept[-1].partition(",")[0]) != str(step):
        raise UsageError(
            f"{path} ends at step {had}, and the run goes on after step {step}",
            hint="--set output.dir=... writes elsewhere",
            fields=["dir"],
        )
    return kept


def _read_lines_until(path: Path, step: int) -> list[str]:
    """The lines of a file, behind its first, up to a step; the last one may have been cut off."""
    found: list[str] = []
    with suppress(FileNotFoundError):
        found = path.read_text().splitlines(keepends=True)[1:]
    rows = [row for row in found if row.endswith("\n")]
    return [row for row in rows if int(row.partition(",")[0]) <= step]


@contextmanager
def claim_directories(config: Config) -> Iterator[None]:
    """Within this, the folders of a run are its own; they are made if they are not there.

    Raises UsageError if they cannot be written, if another run that is under way has claimed one,
    for checkpoints that it cannot go on from, and for results of an earlier run, unless they are to
    be replaced.  Nothing is removed here.
    """
    output = config.output
    with ExitStack() as locks:
        own: list[os.stat_result] = []
        for name in _DIRECTORY_KINDS:
            section, _, setting = name.partition(".")
            if (folder := getattr(getattr(config, section), setting)) is None:
                continue
            make_directory(folder, name)
            if not any(os.path.samestat(os.stat(folder), one) for one in own):  # however it is told
                own.append(os.stat(folder))
                locks.enter_context(_lock_directory(folder, name))
        require_resumable(config)
        before = find_resumed_run(config)
        for path in _list_result_files(output):
            if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
                raise UsageError(f"cannot write {path}: it is no file that can be replaced")
        found = [p for p in _list_result_files(output) if _has_content(p)]
        if before is not None and before.owns_directory(output.dir):
            read_loss_lines(Path(output.dir, LOSSES_FILE), before.step)
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


def make_directory(directory: str, setting: str = "output.dir") -> None:
    """Make a folder for results, or what the setting of a name says.  Raises UsageError if nothing
    can be written there."""
    try:
        require_path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write to the {_DIRECTORY_KINDS[setting]} {directory}: "
            f"{describe_os_error(error)}",
            fields=[setting.partition(".")[2]],
        ) from None


_DIRECTORY_KINDS: Final = {
    "output.dir": "output folder",
    "output.trace": "output folder",
    "train.checkpoint_dir": "folder of checkpoints",
}


def _list_result_files(output: OutputConfig) -> list[Path]:
    """What a run writes, or another may have written in its place."""
    own = [Path(output.dir, name) for name in (*RESULT_FILES, EVALUATIONS_FILE, TRACE_FILE)]
    return (
        own if output.trace is None else list(dict.fromkeys([*own, Path(output.trace, TRACE_FILE)]))
    )


def _has_content(path: Path) -> bool:
    """Whether a result says anything; losses may be of a run that never made a step."""
    if not path.exists():
        return False
    if path.name != LOSSES_FILE:
        return True
    with open_regular_file(path) as file:
        return file.read(len(LOSSES_HEADER) + 1) not in (b"", LOSSES_HEADER.encode())


@contextmanager
def _lock_directory(directory: str, setting: str) -> Iterator[None]:
    """Within this, no other process can lock the folder that a setting of this name gives."""
    lock = DirectoryLock(Path(directory, LOCK_FILE))
    try:
        if why := lock.acquire():
            print(
                f"{directory} has no locks ({why}): nothing keeps another run out of it",
                file=sys.stderr,
                flush=True,
            )
    except LockHeldError as other:
        raise UsageError(
            f"the {_DIRECTORY_KINDS[setting]} {directory} is in use by another run"
            f"{f', {other.owner}' if other.owner else ''}",
            hint=f"--set {setting}=... writes elsewhere",
            fields=[setting.partition(".")[2]],
        ) from None
    except OSError as error:
        raise UsageError(
            f"cannot write to the {_DIRECTORY_KINDS[setting]} {directory}: "
            f"{describe_os_error(error)}"
        ) from None
    try:
        yield
    finally:
        lock.release()


def save_results(result: RunResult, output: OutputConfig) -> None:
    """The picture and the trace of a run that was recorded, and the summary.

    Raises what keeps one of them from being written, when the others are.
    """
    facts: dict[str, Any] = {
        "program": result.program.name,
        "digest": result.program.digest,
        "loss": result.loss,
        "tokens_per_second": result.tokens_per_second,
        "memory": {"predicted": result.predicted_memory},
    }
    if result.counted_memory:
        facts["memory"]["counted"] = result.counted_memory
    wrote, failed = [LOSSES_FILE], list[Exception]()
    if result.timelines is not None:
        measured, predicted = result.timelines
        facts["bubble"] = {
            "measured": measured.bubble,
            "predicted": predicted.bubble,
            "unexplained": compute_unexplained_share(predicted, measured),
        }
        facts["seconds"] = {"measured": measured.span, "predicted": predicted.span}
        facts["clock_error"] = measured.clock_error
        try:
            from schedir.viz import compare
            from schedir.viz import save as save_picture

            save_picture(compare([predicted, measured]), Path(output.dir, PICTURE_FILE))
            wrote.append(PICTURE_FILE)
        except Exception as error:
            failed.append(error)
        if output.trace is not None:
            path = Path(output.trace, TRACE_FILE)
            try:
                save_timeline(measured, path)
                print(f"wrote {path}")
            except Exception as error:
                failed.append(error)
    with atomic_write(Path(output.dir, SUMMARY_FILE)) as temporary:
        temporary.write_text(format_json(facts))
    wrote.insert(1, SUMMARY_FILE)
    print(f"wrote {', '.join(wrote[:-1])} and {wrote[-1]} to {output.dir}", flush=True)
    if failed:
        raise failed[0]
