"""Read the black boxes of a run from outside, during the run or after it.

The same as its processes and its launcher say of it when its timeout is over; only that it may go
on, or that all of it may have been ended at once, and then nobody is to blame.
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
    FOLDER,
    PROGRAM,
    SINCE,
    VERDICT,
    BlackBoxField,
    BlackBoxSnapshot,
    ProcessPhase,
    boxes,
    place,
)
from schedir.io.files import opened, path_of, read_text
from schedir.ir.program import Program

MOST: Final = 2**20  # processes of a run
MOVES: Final = 1.0  # seconds in which a process has begun something, if a run goes on
TOGETHER: Final = 0.5  # seconds in which processes end that are ended by one


@dataclass(frozen=True)
class PostMortem:
    """The boxes of one run, and its program and the words of its launcher, if they are there."""

    folder: Path
    seen: Mapping[int, BlackBoxSnapshot]
    program: Program | None = None
    verdict: str = ""

    @cached_property
    def standstill(self) -> StalledRun:
        """Who waits for whom; processes without a box may be on other machines."""
        return StalledRun(self.seen, self.shape, self.program)

    @property
    def shape(self) -> ProcessLayout:
        """How many processes there are, and how."""
        return ProcessLayout.of_box(next(iter(self.seen.values())))

    @property
    def absent(self) -> list[int]:
        """Processes that have no box here."""
        one = next(iter(self.seen.values()))
        return [p for p in range(one[BlackBoxField.WORLD]) if p not in self.seen]

    @cached_property
    def stood(self) -> float:
        """For how many seconds no process has begun anything."""
        alive = [one for one in self.seen.values() if one.state in ("runs", "unknown")]
        return min((one.seconds for one in alive), default=0.0)

    @cached_property
    def cause(self) -> StallCause | None:
        """Who keeps the others, or has ended them; None of a run that goes on, or that somebody has
        ended as a whole."""
        own = [one for one in self.seen.values() if one.state != "unknown"]
        beats = [one[BlackBoxField.BEAT] for one in own if one.is_dead]
        if len(beats) == len(self.seen) > 1 and max(beats) - min(beats) < TOGETHER * 1e9:
            return None
        name = "" if self.program is None else f"{self.program.name}: "
        found = self.standstill.blame()
        if found is None or found.kind in (StallKind.SAID, StallKind.DIED):
            return found
        if found.kind is StallKind.BUSY and self.stood < MOVES:
            return None
        return self.standstill.blame(f"{name}nothing has moved for {self.stood:.1f} s")

    @property
    def said(self) -> str:
        """What the launcher has said, or whoever gave up first; "" where nobody has."""
        spoke = [one for one in self.seen.values() if one.gave_up and one.said]
        first = min(spoke, key=lambda one: one[BlackBoxField.FAILED], default=None)
        return self.verdict or ("" if first is None else first.said)

    def lines(self) -> Iterator[str]:
        """The answer, then where each process stands."""
        cause, still = self.cause, self.standstill
        if self.said:
            yield from self.said.splitlines()
            if "\n  process" in self.said:
                return
        elif cause is not None:
            yield from str(cause).splitlines()
        else:
            yield self._nobody()
        if self.said or cause is None:
            yield from (f"  {line}" for line in still.lines())
        if self.absent:
            many = ", ".join(map(str, self.absent[:16])) + ", ..." * (len(self.absent) > 16)
            yield f"no box here of {len(self.absent)} processes: {many}"
        if any(one.state == "unknown" for one in self.seen.values()):
            yield ("these are of another machine, or of before this one was started: whether the "
                   "processes live is not known")  # fmt: skip

    def _nobody(self) -> str:
        every = self.seen.values()
        many = f"all {len(every)} processes" if len(every) > 1 else "the process"
        if all(one.state == "gone" for one in every):
            ago = (
                max(one.now for one in every) - max(one[BlackBoxField.BEAT] for one in every)
            ) / 1e9
            return f"nobody is to blame: {many} ended at once, {ago:.1f} s ago"
        if self.stood < MOVES:
            return f"the run goes on: something has begun {self.stood:.2f} s ago"
        return f"nothing has moved for {self.stood:.1f} s, and each process waits for another"

    def facts(self) -> dict[str, Any]:
        """The same for a program to read."""
        still, cause = self.standstill, self.cause
        return {
            "processes": [
                {
                    "process": process,
                    "name": still.shape.name(process),
                    "state": one.state,
                    "ended_well": bool(one[BlackBoxField.ENDED]),
                    "phase": one.phase.name.lower(),
                    "step": one[BlackBoxField.DEVICE] or one[BlackBoxField.STEP],
                    "at": one.at if one.phase is ProcessPhase.STEP else None,
                    "where": still.where(process),
                    "seconds": one.seconds,
                    "waits": [wait._asdict() for wait in still.waits[process]],
                    "said": one.said,
                }
                for process, one in self.seen.items()
            ],
            "no_box": self.absent,
            "cause": None if cause is None else {
                "process": cause.process,
                "kind": cause.kind.name.lower(),
                "sure": cause.sure,
            },
        }  # fmt: skip


def read(given: str) -> PostMortem | None:
    """The boxes of the newest run in a folder, or in the one for them in it; None where there are
    none.  Raises UsageError for what no run has written."""
    for folder in (path_of(given) / FOLDER, path_of(given)):
        if os.path.isdir(folder) and (all_of := boxes(folder)):
            return _left(folder, all_of)
    return None


def _left(folder: Path, all_of: Mapping[int, BlackBoxSnapshot]) -> PostMortem:
    here = {p: one for p, one in all_of.items() if one[BlackBoxField.PLACE] == place()}
    newest = max((here or all_of).values(), key=lambda one: one[BlackBoxField.BORN])
    ticks = os.sysconf("SC_CLK_TCK")
    began = newest[BlackBoxField.BORN] / ticks * 1e9

    def belongs(one: BlackBoxSnapshot) -> bool:
        """Whether it is of the newest's run, which may have several starters."""
        told = [
            one[w] == newest[w]
            for w in (BlackBoxField.PLACE, BlackBoxField.WORLD, BlackBoxField.TP, BlackBoxField.DP)
        ]
        return all(told) and (
            one[BlackBoxField.RUN] == newest[BlackBoxField.RUN] or one[BlackBoxField.BEAT] > began
        )

    seen = {p: one for p, one in sorted(all_of.items()) if belongs(one)}
    world = newest[BlackBoxField.WORLD]
    shape = ProcessLayout.of_box(newest)
    if not (len(seen) <= world <= MOST and shape.ranks * shape.tp * shape.dp == world
            and 0 <= min(seen) <= max(seen) < world):  # fmt: skip
        raise UsageError(f"the boxes in {folder} are of no run of {world} processes")
    if not here:  # another clock: it stopped with the last of them
        last = max(
            max(one[w] for w in (BlackBoxField.BEAT, BlackBoxField.ENTERED, SINCE))
            for one in seen.values()
        )
        seen = {p: replace(one, now=last) for p, one in seen.items()}
    program = program_of(folder)
    if program is not None and ProcessLayout.of(program) != shape:
        program = None
    return PostMortem(folder, seen, program, verdict_of(folder, newest[BlackBoxField.RUN]))


def program_of(folder: Path) -> Program | None:
    """What the processes run, if one has left it beside their boxes."""
    from schedir.ir.text_format import from_text

    try:
        return from_text(read_text(folder / PROGRAM))
    except SchedirError:
        return None


def leave_verdict(folder: Path, run: int, text: str) -> None:
    """Leave what a launcher has said of the end of its run, for who reads the boxes later."""
    with suppress(OSError):
        if folder.is_dir():
            (folder / VERDICT).write_text(f"{run}\n{text}")


def verdict_of(folder: Path, run: int) -> str:
    """What `leave_verdict` has left of this run, "" where it has not."""
    try:
        with opened(folder / VERDICT) as file:
            head, _, text = file.read(2**16).decode(errors="replace").partition("\n")
    except UsageError:
        return ""
    return text if head == str(run) else ""
