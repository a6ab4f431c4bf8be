"""Write the output files of a run.

All results in an output directory are from the run that wrote the `loss.csv` there. A new run
removes the results of an earlier run before it writes its own results. A new file has a temporary
name until its first content is written.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

from schedir.checkpoints.checkpoint_directory import CheckpointDirectory
from schedir.checkpoints.durable_io import print_to_stderr
from schedir.errors import UsageError
from schedir.io.directory_lock import DirectoryLock, LockHeldError
from schedir.io.files import atomic_write, describe_os_error, open_regular_file, require_path
from schedir.io.terminal_output import format_json
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
    """The results of a run: its last loss, its speed, and its last step.

    Args:
        program: The program that was trained.
        loss: The mean loss per token of the last step, in nats.
        tokens_per_second: The mean speed of all steps but the first.
        predicted_memory: The predicted peak memory of each rank, in bytes.
        counted_memory: The peak memory of each rank in the second step, in bytes. Empty if the
            memory was not counted.
        timelines: The measured timeline of the last step, and the timeline that is predicted from
            the mean time of each kind of instruction. None if nothing was recorded.
    """

    program: Program
    loss: float
    tokens_per_second: float
    predicted_memory: tuple[float, ...]
    counted_memory: tuple[int, ...]
    timelines: tuple[Timeline, Timeline] | None


class LossLog:
    """The file `loss.csv`, with a line for each step. `begin` creates the file.

    Args:
        config: The configuration of the run.
        run: The name and the settings of the run.
    """

    def __init__(self, config: Config, run: RunIdentity) -> None:
        self.config = config
        self.output = config.output
        self.run = run
        self.file: TextIO | None = None

    def begin(self, start_step: int = 0) -> None:
        """Create the result files of this run, or continue them.

        This method removes the results of an earlier run; `claim_directories` has verified that
        this is allowed. A resumed run keeps its own lines of `loss.csv` and `evaluation.csv` up to
        `start_step`. A new run also removes all checkpoints in its checkpoint directory. Call this
        only when it is certain that a step follows.

        Args:
            start_step: The number of complete steps. 0 begins a new run.

        Raises:
            UsageError: `loss.csv` of this run ends before `start_step`.
        """
        path, folder = Path(self.output.dir, LOSSES_FILE), self.config.train.checkpoint_dir
        is_resumed = start_step > 0 and self.run.owns_directory(self.output.dir)
        loss_lines = read_loss_lines(path, start_step) if is_resumed else []
        evaluations_path = Path(self.output.dir, EVALUATIONS_FILE)
        evaluation_lines = _read_lines_until(evaluations_path, start_step) if is_resumed else []
        if folder is not None:
            if not start_step:
                CheckpointDirectory(folder).remove_all()
            self.run.write(folder)
        runs = [Path(f, RUN_FILE) for f in (self.output.dir, folder) if f is not None]
        for file in (*_list_result_files(self.output), *runs):
            # If a run ended while it wrote a file, a temporary file remains.
            for part in file.parent.glob(f".{file.name}.*"):
                part.unlink(missing_ok=True)
        for old_file in _list_result_files(self.output):
            if old_file != path and not (old_file == evaluations_path and evaluation_lines):
                old_file.unlink(missing_ok=True)
        if evaluation_lines:
            with atomic_write(evaluations_path) as temporary:
                temporary.write_text("".join([EVALUATIONS_HEADER, *evaluation_lines]))
        if folder is not None:
            self.run.write(self.output.dir)
        else:
            Path(self.output.dir, RUN_FILE).unlink(missing_ok=True)
        with atomic_write(path) as temporary:
            self.file = temporary.open("w")
            self.file.writelines([LOSSES_HEADER, *loss_lines])
            self.file.flush()

    def sync_to_disk(self) -> None:
        """Flush the file to the disk, so that its lines survive a crash of the machine."""
        if self.file is not None:
            os.fsync(self.file.fileno())

    @property
    def is_finished(self) -> bool:
        """Return whether an earlier start of this run has written its summary."""
        folder = self.output.dir
        return self.run.owns_directory(folder) and Path(folder, SUMMARY_FILE).exists()

    def read_last_loss(self) -> float:
        """Return the last loss that an earlier start of this run wrote, or NaN if there is none."""
        path = Path(self.output.dir, LOSSES_FILE)
        rows = path.read_text().splitlines()[1:] if self.run.owns_directory(self.output.dir) else []
        return float(rows[-1].split(",")[1]) if rows else math.nan

    def write(self, lines: str) -> None:
        """Append lines to the file, and flush them to the operating system.

        Args:
            lines: Lines with their line ends.

        Raises:
            OSError: The file cannot be written. The error contains its path.
        """
        if self.file is not None:
            try:
                self.file.write(lines)
                self.file.flush()
            except OSError as error:  # The error of a flush has no path.
                path = str(Path(self.output.dir, LOSSES_FILE))
                raise OSError(error.errno, error.strerror, path) from None

    def write_evaluation(self, line: str) -> None:
        """Append a line to `evaluation.csv`. The first call creates the file.

        Args:
            line: A line with its line end.
        """
        path = Path(self.output.dir, EVALUATIONS_FILE)
        if path.exists():
            with path.open("a") as file:
                file.write(line)
            return
        with atomic_write(path) as temporary:
            temporary.write_text(EVALUATIONS_HEADER + line)

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            with suppress(OSError):  # `write` has already raised the error.
                self.file.close()


def read_loss_lines(path: Path, step: int) -> list[str]:
    """Return the lines of a `loss.csv` up to a step.

    Args:
        path: The file. The file may be missing, or may begin after the step.
        step: The last step to return, from 1.

    Returns:
        The lines without the header.

    Raises:
        UsageError: The file has lines of earlier steps, but no line of this step.
    """
    lines = _read_lines_until(path, step)
    if lines and (had := lines[-1].partition(",")[0]) != str(step):
        raise UsageError(
            f"{path} ends at step {had}, but the run resumes after step {step}",
            hint="--set output.dir=... writes elsewhere",
            fields=["dir"],
        )
    return lines


def _read_lines_until(path: Path, step: int) -> list[str]:
    """Return the complete lines of a file up to a step, without the header."""
    lines: list[str] = []
    with suppress(FileNotFoundError):
        lines = path.read_text().splitlines(keepends=True)[1:]
    rows = [row for row in lines if row.endswith("\n")]
    return [row for row in rows if int(row.partition(",")[0]) <= step]


@contextmanager
def claim_directories(config: Config) -> Iterator[None]:
    """Lock the directories of a run while the context is active, and create missing directories.

    This function removes no files.

    Args:
        config: The configuration of the run.

    Raises:
        UsageError: A directory cannot be written, or another run uses it. Or the run cannot resume
            from the checkpoints. Or there are results of an earlier run, and `output.overwrite` is
            false.
    """
    output = config.output
    with ExitStack() as locks:
        locked: list[os.stat_result] = []
        for name in _DIRECTORY_KINDS:
            section, _, setting = name.partition(".")
            if (folder := getattr(getattr(config, section), setting)) is None:
                continue
            make_directory(folder, name)
            # Two settings may name the same directory by different paths.
            if not any(os.path.samestat(os.stat(folder), locked_stat) for locked_stat in locked):
                locked.append(os.stat(folder))
                locks.enter_context(_lock_directory(folder, name))
        require_resumable(config)
        previous_run = find_resumed_run(config)
        for path in _list_result_files(output):
            if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
                raise UsageError(f"cannot write {path}: it is not a writable file")
        result_files = [p for p in _list_result_files(output) if _has_content(p)]
        if previous_run is not None and previous_run.owns_directory(output.dir):
            read_loss_lines(Path(output.dir, LOSSES_FILE), previous_run.step)
        elif result_files and not output.overwrite:
            folder = str(result_files[0].parent)
            name = "dir" if result_files[0].parent == Path(output.dir) else "trace"
            raise UsageError(
                f"{folder} has results of an earlier run: "
                f"{', '.join(p.name for p in result_files if str(p.parent) == folder)}",
                hint=f"--set output.{name}=... writes elsewhere, "
                "--set output.overwrite=true replaces them at the first step",
                fields=[name, "overwrite"],
            )
        yield


def make_directory(directory: str, setting: str = "output.dir") -> None:
    """Create a directory, and check that files can be written there.

    Args:
        directory: The path.
        setting: The setting that gives the path, for errors.

    Raises:
        UsageError: The directory cannot be created, or files cannot be written there.
    """
    try:
        require_path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write to the {_DIRECTORY_KINDS[setting]} {directory}: "
            f"{describe_os_error(error)}",
            hint=f"--set {setting}=... writes elsewhere",
            fields=[setting.partition(".")[2]],
        ) from None


_DIRECTORY_KINDS: Final = {
    "output.dir": "output folder",
    "output.trace": "output folder",
    "train.checkpoint_dir": "checkpoint folder",
}


def _list_result_files(output: OutputConfig) -> list[Path]:
    """Return the paths of all results that runs with these settings may write."""
    paths = [Path(output.dir, name) for name in (*RESULT_FILES, EVALUATIONS_FILE, TRACE_FILE)]
    return (
        paths
        if output.trace is None
        else list(dict.fromkeys([*paths, Path(output.trace, TRACE_FILE)]))
    )


def _has_content(path: Path) -> bool:
    """Return whether a result file has content. A `loss.csv` with only a header has no content."""
    if not path.exists():
        return False
    if path.name != LOSSES_FILE:
        return True
    with open_regular_file(path) as file:
        return file.read(len(LOSSES_HEADER) + 1) not in (b"", LOSSES_HEADER.encode())


@contextmanager
def _lock_directory(directory: str, setting: str) -> Iterator[None]:
    """Lock a directory against other processes while the context is active."""
    lock = DirectoryLock(Path(directory, LOCK_FILE))
    try:
        if problem := lock.acquire():
            print_to_stderr(
                f"{directory} has no file locks ({problem}): another run could use it, too"
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
    """Write the summary of a run. If the run was recorded, write its picture and timeline, too.

    Args:
        result: The results of the run.
        output: The section [output] of the configuration.

    Raises:
        Exception: The picture or the timeline cannot be written. The other files are written first.
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
    written_names, errors = [LOSSES_FILE], list[Exception]()
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
            written_names.append(PICTURE_FILE)
        except Exception as error:
            errors.append(error)
        if output.trace is not None:
            path = Path(output.trace, TRACE_FILE)
            try:
                save_timeline(measured, path)
                print(f"wrote {path}")
            except Exception as error:
                errors.append(error)
    with atomic_write(Path(output.dir, SUMMARY_FILE)) as temporary:
        temporary.write_text(format_json(facts))
    written_names.insert(1, SUMMARY_FILE)
    if Path(output.dir, EVALUATIONS_FILE).exists():
        written_names.insert(1, EVALUATIONS_FILE)
    print(
        f"wrote {', '.join(written_names[:-1])} and {written_names[-1]} to {output.dir}", flush=True
    )
    if errors:
        raise errors[0]
