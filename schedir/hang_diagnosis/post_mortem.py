"""Read the black boxes of a run, while it runs or after it has ended.

The report is the same as the one that processes and the launcher print after a timeout. It also
covers two cases in which no process is the cause: the run makes progress, or all processes were
stopped at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from schedir.errors import SchedirError, UsageError
from schedir.hang_diagnosis.stall_cause import ProcessLayout, StallCause, StalledRun, StallKind
from schedir.io.black_box import (
    BLACK_BOX_DIRECTORY,
    FORMER_VERDICT_FILE,
    POSITION_TIME_FIELD,
    PROGRAM_FILE,
    VERDICT_FILE,
    BlackBoxField,
    BlackBoxSnapshot,
    ProcessPhase,
    compute_namespace_id,
    read_black_boxes,
)
from schedir.io.files import open_regular_file, read_text, require_path
from schedir.ir.program import Program

MAX_PROCESSES: Final = 2**20  # The most processes of a run.
# A run makes progress if an instruction began less than this time ago.
PROGRESS_SECONDS: Final = 1.0
SAME_END_SECONDS: Final = 0.5  # Processes that end within this time were stopped together.


@dataclass(frozen=True)
class PostMortem:
    """The black boxes of one run.

    Args:
        directory: The directory of the black boxes.
        snapshots: The contents of the black boxes, by process. There is at least one.
        program: The program of the run, if it was saved in this directory.
        verdict: The last message of the launcher, or "".
    """

    directory: Path
    snapshots: Mapping[int, BlackBoxSnapshot]
    program: Program | None = None
    verdict: str = ""

    @cached_property
    def stalled_run(self) -> StalledRun:
        """The waits between the processes that have a black box in this directory."""
        return StalledRun(self.snapshots, self.layout, self.program)

    @property
    def layout(self) -> ProcessLayout:
        """The number of processes along each dimension of the process mesh."""
        return ProcessLayout.from_snapshot(next(iter(self.snapshots.values())))

    @property
    def processes_without_box(self) -> list[int]:
        """The processes that have no black box in this directory."""
        snapshot = next(iter(self.snapshots.values()))
        return [p for p in range(snapshot[BlackBoxField.WORLD_SIZE]) if p not in self.snapshots]

    @cached_property
    def stalled_seconds(self) -> float:
        """The seconds since a running process last began an instruction or a phase."""
        alive_snapshots = [
            snapshot
            for snapshot in self.snapshots.values()
            if snapshot.state in ("runs", "unknown")
        ]
        return min((snapshot.seconds_at_position for snapshot in alive_snapshots), default=0.0)

    @cached_property
    def cause(self) -> StallCause | None:
        """The process that delays the other processes or caused their end, or None.

        The cause is None if the run makes progress, if all processes were stopped at the same time,
        or if each process waits for another one.
        """
        visible_snapshots = [
            snapshot for snapshot in self.snapshots.values() if snapshot.state != "unknown"
        ]
        last_heartbeats = [
            snapshot[BlackBoxField.HEARTBEAT] for snapshot in visible_snapshots if snapshot.is_dead
        ]
        if (
            len(last_heartbeats) == len(self.snapshots) > 1
            and max(last_heartbeats) - min(last_heartbeats) < SAME_END_SECONDS * 1e9
        ):
            return None
        name = "" if self.program is None else f"{self.program.name}: "
        cause = self.stalled_run.find_cause()
        if cause is None or cause.kind in (StallKind.FAILED, StallKind.DIED):
            return cause
        if cause.kind is StallKind.BUSY and self.stalled_seconds < PROGRESS_SECONDS:
            return None
        return self.stalled_run.find_cause(
            f"{name}no process has made progress for {self.stalled_seconds:.1f} s"
        )

    @property
    def message(self) -> str:
        """The message of the launcher, or else of the process that failed first, or ""."""
        failed_snapshots = [
            snapshot
            for snapshot in self.snapshots.values()
            if snapshot.has_failed and snapshot.reason
        ]
        first_failed = min(
            failed_snapshots,
            key=lambda snapshot: snapshot[BlackBoxField.FAILURE_TIME],
            default=None,
        )
        return self.verdict or ("" if first_failed is None else first_failed.reason)

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of a report: the cause, and then where each process is."""
        cause, stalled_run = self.cause, self.stalled_run
        if self.message:
            yield from self.message.splitlines()
            if "\n  process" in self.message:
                return
        elif cause is not None:
            yield from str(cause).splitlines()
        else:
            yield self._describe_no_cause()
        if self.message or cause is None:
            yield from (f"  {line}" for line in stalled_run.describe_processes())
        if self.processes_without_box:
            process_list = ", ".join(map(str, self.processes_without_box[:16])) + ", ..." * (
                len(self.processes_without_box) > 16
            )
            num_processes = len(self.processes_without_box)
            yield f"no black box here of {num_processes} processes: {process_list}"
        if any(snapshot.state == "unknown" for snapshot in self.snapshots.values()):
            yield ("these processes ran on another machine, or before this machine was started: "
                   "schedir cannot determine if they still run")  # fmt: skip

    def _describe_no_cause(self) -> str:
        snapshots = self.snapshots.values()
        processes_text = f"all {len(snapshots)} processes" if len(snapshots) > 1 else "the process"
        if all(snapshot.state == "gone" for snapshot in snapshots):
            seconds_ago = (
                max(snapshot.read_time for snapshot in snapshots)
                - max(snapshot[BlackBoxField.HEARTBEAT] for snapshot in snapshots)
            ) / 1e9
            return (
                f"no process is the cause: {processes_text} ended at once, {seconds_ago:.1f} s ago"
            )
        if self.stalled_seconds < PROGRESS_SECONDS:
            return (
                "the run makes progress: an instruction or a phase began "
                f"{self.stalled_seconds:.2f} s ago"
            )
        return (
            f"no process has made progress for {self.stalled_seconds:.1f} s, and each process "
            "waits for another one"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        stalled_run, cause = self.stalled_run, self.cause
        return {
            "processes": [
                {
                    "process": process,
                    "name": stalled_run.layout.name_process(process),
                    "state": snapshot.state,
                    "has_ended": bool(snapshot[BlackBoxField.HAS_ENDED]),
                    "phase": snapshot.phase.name.lower(),
                    "step": snapshot[BlackBoxField.DEVICE_STEP] or snapshot[BlackBoxField.STEP],
                    "position": snapshot.position if snapshot.phase is ProcessPhase.STEP else None,
                    "location": stalled_run.describe_location(process),
                    "seconds_at_position": snapshot.seconds_at_position,
                    "waits": [
                        {
                            "process": wait.process,
                            "awaited_process": wait.awaited_process,
                            "instruction": wait.instr,
                        }
                        for wait in stalled_run.waits_of[process]
                    ],
                    "failure_reason": snapshot.reason,
                }
                for process, snapshot in self.snapshots.items()
            ],
            "processes_without_box": self.processes_without_box,
            "cause": None if cause is None else {
                "process": cause.process,
                "kind": cause.kind.name.lower(),
                "is_certain": cause.is_certain,
            },
        }  # fmt: skip


def read_post_mortem(path: str) -> PostMortem | None:
    """Read the black boxes of the newest run in a directory.

    Args:
        path: The directory of the black boxes, or the parent of this directory.

    Returns:
        The black boxes, or None if neither directory has black boxes.

    Raises:
        UsageError: The boxes are damaged, or do not belong to one run.
    """
    for folder in (require_path(path) / BLACK_BOX_DIRECTORY, require_path(path)):
        if os.path.isdir(folder) and (snapshots := read_black_boxes(folder)):
            return _make_post_mortem(folder, snapshots)
    return None


def _make_post_mortem(directory: Path, all_snapshots: Mapping[int, BlackBoxSnapshot]) -> PostMortem:
    local_snapshots = {
        p: snapshot
        for p, snapshot in all_snapshots.items()
        if snapshot[BlackBoxField.NAMESPACE_ID] == compute_namespace_id()
    }
    newest = max(
        (local_snapshots or all_snapshots).values(),
        key=lambda snapshot: snapshot[BlackBoxField.START_TIME],
    )
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    start_time = newest[BlackBoxField.START_TIME] / ticks_per_second * 1e9

    def belongs(snapshot: BlackBoxSnapshot) -> bool:
        """Return whether a black box is of the newest run, which may have several launchers."""
        is_equal = [
            snapshot[field] == newest[field]
            for field in (
                BlackBoxField.NAMESPACE_ID,
                BlackBoxField.WORLD_SIZE,
                BlackBoxField.TP,
                BlackBoxField.DP,
            )
        ]
        return all(is_equal) and (
            snapshot[BlackBoxField.RUN_ID] == newest[BlackBoxField.RUN_ID]
            or snapshot[BlackBoxField.HEARTBEAT] > start_time
        )

    run_snapshots = {
        p: snapshot for p, snapshot in sorted(all_snapshots.items()) if belongs(snapshot)
    }
    world_size = newest[BlackBoxField.WORLD_SIZE]
    layout = ProcessLayout.from_snapshot(newest)
    if not (
        len(run_snapshots) <= world_size <= MAX_PROCESSES
        and layout.ranks * layout.tp * layout.dp == world_size
        and 0 <= min(run_snapshots) <= max(run_snapshots) < world_size
    ):
        raise UsageError(
            f"the black boxes in {directory} contradict each other: they do not belong to one run "
            f"of {world_size} processes"
        )
    # Another machine has another clock. So the last time in the boxes is used as the reading time.
    if not local_snapshots:
        last_time = max(
            max(
                snapshot[field]
                for field in (
                    BlackBoxField.HEARTBEAT,
                    BlackBoxField.PHASE_TIME,
                    POSITION_TIME_FIELD,
                )
            )
            for snapshot in run_snapshots.values()
        )
        run_snapshots = {
            p: replace(snapshot, read_time=last_time) for p, snapshot in run_snapshots.items()
        }
    program = load_program(directory)
    if program is not None and ProcessLayout.from_program(program) != layout:
        program = None
    return PostMortem(
        directory, run_snapshots, program, read_verdict(directory, newest[BlackBoxField.RUN_ID])
    )


def load_program(directory: Path) -> Program | None:
    """Load the program that the processes run. Return None if no valid program is saved.

    Args:
        directory: The directory of the black boxes.
    """
    from schedir.ir.text_format import from_text

    try:
        return from_text(read_text(directory / PROGRAM_FILE))
    except SchedirError:
        return None


def write_verdict(directory: Path, run: int, text: str) -> None:
    """Save the last message of a launcher for later reports.

    If the directory does not exist, nothing is saved.

    Args:
        directory: The directory of the black boxes.
        run: The number of the run.
        text: The message.
    """
    with suppress(OSError):
        if directory.is_dir():
            (directory / VERDICT_FILE).write_text(f"{run}\n{text}")


def read_verdict(directory: Path, run: int) -> str:
    """Return the message of `write_verdict` for this run, or "" if there is none.

    Args:
        directory: The directory of the black boxes.
        run: The number of the run.
    """
    for name in (VERDICT_FILE, FORMER_VERDICT_FILE):
        with suppress(UsageError), open_regular_file(directory / name) as file:
            head, _, text = file.read(2**16).decode(errors="replace").partition("\n")
            if head == str(run):
                return text
    return ""
