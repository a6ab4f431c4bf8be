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

MAX_PROCESSES: Final = 2**20  # the most processes of a run
# A run makes progress if an instruction began less than this time ago.
PROGRESS_SECONDS: Final = 1.0
SAME_END_SECONDS: Final = 0.5  # Processes that end within this time were stopped together.


@dataclass(frozen=True)
class PostMortem:
    """The black boxes of one run.

    Args:
        directory: The directory of the black boxes.
        snapshots: The contents of the black boxes, by process. There is at least one.
        program: The program of the run, if it was saved there.
        verdict: The last message of the launcher, or "".
    """

    directory: Path
    snapshots: Mapping[int, BlackBoxSnapshot]
    program: Program | None = None
    verdict: str = ""

    @cached_property
    def stalled_run(self) -> StalledRun:
        """The waits between the processes that have a black box here."""
        return StalledRun(self.snapshots, self.layout, self.program)

    @property
    def layout(self) -> ProcessLayout:
        """The number of processes along each dimension of the process mesh."""
        return ProcessLayout.from_snapshot(next(iter(self.snapshots.values())))

    @property
    def processes_without_box(self) -> list[int]:
        """The processes that have no black box in this directory."""
        one = next(iter(self.snapshots.values()))
        return [p for p in range(one[BlackBoxField.WORLD_SIZE]) if p not in self.snapshots]

    @cached_property
    def stalled_seconds(self) -> float:
        """The seconds since a running process last began an instruction or a phase."""
        alive = [one for one in self.snapshots.values() if one.state in ("runs", "unknown")]
        return min((one.seconds_at_position for one in alive), default=0.0)

    @cached_property
    def cause(self) -> StallCause | None:
        """The process that delays the other processes or caused their end, or None.

        It is None if the run makes progress, or if all processes were stopped at the same time.
        """
        visible = [one for one in self.snapshots.values() if one.state != "unknown"]
        beats = [one[BlackBoxField.HEARTBEAT] for one in visible if one.is_dead]
        if (
            len(beats) == len(self.snapshots) > 1
            and max(beats) - min(beats) < SAME_END_SECONDS * 1e9
        ):
            return None
        name = "" if self.program is None else f"{self.program.name}: "
        found = self.stalled_run.find_cause()
        if found is None or found.kind in (StallKind.FAILED, StallKind.DIED):
            return found
        if found.kind is StallKind.BUSY and self.stalled_seconds < PROGRESS_SECONDS:
            return None
        return self.stalled_run.find_cause(
            f"{name}no process has made progress for {self.stalled_seconds:.1f} s"
        )

    @property
    def message(self) -> str:
        """The message of the launcher, or else of the process that failed first, or ""."""
        failed = [one for one in self.snapshots.values() if one.has_failed and one.reason]
        first = min(failed, key=lambda one: one[BlackBoxField.FAILURE_TIME], default=None)
        return self.verdict or ("" if first is None else first.reason)

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of a report: the cause, and then where each process is."""
        cause, still = self.cause, self.stalled_run
        if self.message:
            yield from self.message.splitlines()
            if "\n  process" in self.message:
                return
        elif cause is not None:
            yield from str(cause).splitlines()
        else:
            yield self._describe_no_cause()
        if self.message or cause is None:
            yield from (f"  {line}" for line in still.describe_processes())
        if self.processes_without_box:
            many = ", ".join(map(str, self.processes_without_box[:16])) + ", ..." * (
                len(self.processes_without_box) > 16
            )
            yield f"no black box here of {len(self.processes_without_box)} processes: {many}"
        if any(one.state == "unknown" for one in self.snapshots.values()):
            yield ("these processes ran on another machine, or before this machine was started: "
                   "schedir cannot determine if they still run")  # fmt: skip

    def _describe_no_cause(self) -> str:
        every = self.snapshots.values()
        many = f"all {len(every)} processes" if len(every) > 1 else "the process"
        if all(one.state == "gone" for one in every):
            ago = (
                max(one.read_time for one in every)
                - max(one[BlackBoxField.HEARTBEAT] for one in every)
            ) / 1e9
            return f"no process is the cause: {many} ended at once, {ago:.1f} s ago"
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
        still, cause = self.stalled_run, self.cause
        return {
            "processes": [
                {
                    "process": process,
                    "name": still.layout.name_process(process),
                    "state": one.state,
                    "has_ended": bool(one[BlackBoxField.HAS_ENDED]),
                    "phase": one.phase.name.lower(),
                    "step": one[BlackBoxField.DEVICE_STEP] or one[BlackBoxField.STEP],
                    "position": one.position if one.phase is ProcessPhase.STEP else None,
                    "location": still.describe_location(process),
                    "seconds_at_position": one.seconds_at_position,
                    "waits": [
                        {
                            "process": wait.process,
                            "awaited_process": wait.awaited_process,
                            "instruction": wait.instr,
                        }
                        for wait in still.waits_of[process]
                    ],
                    "failure_reason": one.reason,
                }
                for process, one in self.snapshots.items()
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
        path: The directory of the black boxes, or the directory that contains it.

    Returns:
        The black boxes, or None if there are none.

    Raises:
        UsageError: The boxes are damaged, or do not belong to one run.
    """
    for folder in (require_path(path) / BLACK_BOX_DIRECTORY, require_path(path)):
        if os.path.isdir(folder) and (all_of := read_black_boxes(folder)):
            return _make_post_mortem(folder, all_of)
    return None


def _make_post_mortem(directory: Path, all_snapshots: Mapping[int, BlackBoxSnapshot]) -> PostMortem:
    here = {
        p: one
        for p, one in all_snapshots.items()
        if one[BlackBoxField.NAMESPACE_ID] == compute_namespace_id()
    }
    newest = max((here or all_snapshots).values(), key=lambda one: one[BlackBoxField.START_TIME])
    ticks = os.sysconf("SC_CLK_TCK")
    began = newest[BlackBoxField.START_TIME] / ticks * 1e9

    def belongs(one: BlackBoxSnapshot) -> bool:
        """Return whether a black box is of the newest run, which may have several launchers."""
        is_equal = [
            one[w] == newest[w]
            for w in (
                BlackBoxField.NAMESPACE_ID,
                BlackBoxField.WORLD_SIZE,
                BlackBoxField.TP,
                BlackBoxField.DP,
            )
        ]
        return all(is_equal) and (
            one[BlackBoxField.RUN_ID] == newest[BlackBoxField.RUN_ID]
            or one[BlackBoxField.HEARTBEAT] > began
        )

    seen = {p: one for p, one in sorted(all_snapshots.items()) if belongs(one)}
    world = newest[BlackBoxField.WORLD_SIZE]
    shape = ProcessLayout.from_snapshot(newest)
    if not (len(seen) <= world <= MAX_PROCESSES and shape.ranks * shape.tp * shape.dp == world
            and 0 <= min(seen) <= max(seen) < world):  # fmt: skip
        raise UsageError(
            f"the black boxes in {directory} contradict each other: they do not belong to one run "
            f"of {world} processes"
        )
    # Another machine has another clock. So the last time in the boxes is used as the reading time.
    if not here:
        last = max(
            max(
                one[w]
                for w in (BlackBoxField.HEARTBEAT, BlackBoxField.PHASE_TIME, POSITION_TIME_FIELD)
            )
            for one in seen.values()
        )
        seen = {p: replace(one, read_time=last) for p, one in seen.items()}
    program = load_program(directory)
    if program is not None and ProcessLayout.from_program(program) != shape:
        program = None
    return PostMortem(
        directory, seen, program, read_verdict(directory, newest[BlackBoxField.RUN_ID])
    )


def load_program(directory: Path) -> Program | None:
    """Load the program that the processes run, or None if it was not saved or is not valid.

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
