"""Find the process that holds up a run, from the black boxes of its processes.

Each process stands at an instruction: it has begun it, and all before it on its rank.  It waits
for others if what the instruction needs is not there: a message whose sender has not come to its
send, a collective to which a member has not come.  Going from who waits to who is waited for, along
the dependency graph, one comes to who waits for nobody: it has died or is stopped, or does not come
out of what it does.  Who noticed first says nothing.

Outside of steps all processes go through the same phases: who is in an earlier one is waited for.
Inside an instruction, tensor-parallel processes wait for each other, and there the note in a box
tells who is in a collective and who is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from schedir.analysis.dependency_graph import Graph
from schedir.io.black_box import BlackBoxField, BlackBoxSnapshot, ProcessPhase
from schedir.ir.instruction_index import NONE
from schedir.ir.isa.instructions import ROWS, SENDS, TRANSFERS, Instr, Lane
from schedir.ir.pipeline.process_mesh import mesh_of, process_name
from schedir.ir.program import Program

SHOWN: Final = 16  # processes that are told one by one
SLOW: Final = 0.5  # of the time that others wait: who has moved since may do so again
ASLEEP: Final = 1.5  # seconds without a sign of a watchdog that is awake ten times in one


class StallKind(IntEnum):
    """What is the matter with a process that waits for nobody, the surest first."""

    SAID = 0
    DIED = 1
    STOPPED = 2
    MISSING = 3
    BUSY = 4
    UNHEARD = 5


class ProcessLayout(NamedTuple):
    """How many processes there are, and how: in a pipeline, a tensor-parallel group, replicas."""

    ranks: int
    tp: int
    dp: int

    @classmethod
    def of(cls, program: Program) -> ProcessLayout:
        """That of a program."""
        return cls(program.shape.ranks, program.tp, program.dp)

    @classmethod
    def of_box(cls, seen: BlackBoxSnapshot) -> ProcessLayout:
        """That of the run of a process."""
        tp, dp = max(seen[BlackBoxField.TP], 1), max(seen[BlackBoxField.DP], 1)
        return cls(max(seen[BlackBoxField.WORLD] // (tp * dp), 1), tp, dp)

    def name(self, process: int) -> str:
        """A process as every message names it."""
        return process_name(process, *self)


class WaitingProcess(NamedTuple):
    """A process that waits for another, and for which instruction there, if that is known."""

    process: int
    on: int
    instr: str = ""


class StallCause(NamedTuple):
    """Who keeps the others: the process, what is the matter with it, and all that wait.

    `sure` is False where another may as well be the cause; `said` is what the process has said.
    """

    process: int
    kind: StallKind
    fact: str
    sure: bool
    lines: tuple[str, ...]
    said: str = ""

    def __str__(self) -> str:
        return "\n".join([self.fact, *(f"  {line}" for line in self.lines)])


class StalledRun:
    """Processes of a run by their boxes, and the program that they run, if it is known.

    `missing` are processes of this machine that have left no box, `unheard` those of others of
    which nothing is known: they may have gone with all that could tell of them.
    """

    def __init__(
        self,
        seen: Mapping[int, BlackBoxSnapshot],
        shape: ProcessLayout,
        program: Program | None = None,
        missing: Sequence[int] = (),
        unheard: Sequence[int] = (),
    ) -> None:
        self.seen, self.shape, self.program = dict(sorted(seen.items())), shape, program
        self.missing, self.unheard = (*missing,), (*unheard,)
        self.mesh = mesh_of(shape.ranks, shape.tp, shape.dp)
        self.graph = None if program is None else Graph.of(program, "per_edge")
        self.waits = {process: self._waits(process) for process in self.seen}
        self.waited = {wait.on for waits in self.waits.values() for wait in waits}

    # ------------------------------------------------------------ who waits for whom

    def _place(self, process: int) -> tuple[int, int, int]:
        replica, rank, slice_ = np.unravel_index(process, self.mesh.shape)
        return int(replica), int(rank), int(slice_)

    def _instr(self, process: int) -> tuple[int, Instr] | None:
        """Where a process stands in its Stream, if it does."""
        one = self.seen[process]
        if self.program is None or one.phase is not ProcessPhase.STEP:
            return None
        stream, at = self.program.streams[self._place(process)[1]], one.at
        return (at, stream[at]) if 0 <= at < len(stream) else None

    def _waits(self, process: int) -> list[WaitingProcess]:
        own = self.seen[process]
        if own.state in ("gone", "stopped") or own.gave_up:
            return []
        return [*self._by_graph(process)] or [*self._by_phase(process)]

    def _by_graph(self, process: int) -> Iterator[WaitingProcess]:
        """What the instruction needs at which a process stands, that is not there."""
        own, graph = self.seen[process], self.graph
        if graph is None or self.program is None or own.phase is not ProcessPhase.STEP:
            return
        lo, hi = self.program.offsets[self._place(process)[1] :][:2].tolist()
        at = lo + max(own.at, 0)
        if at < hi:
            needs = {int(n) for n in graph.waits[:, at] if n != NONE}
            if graph.index.op[at] in SENDS:  # into memory that is free when a step has ended
                for member, there in self._meets(process, at):
                    other = self.seen.get(member)
                    if other is not None and other[BlackBoxField.TURN] < own[BlackBoxField.TURN]:
                        yield WaitingProcess(process, member, self._name(there))
        else:  # what it has sent is on its way
            needs = {k for k in range(lo, hi) if graph.index.op[k] in SENDS}
        for need in sorted(needs):
            for member, there in self._meets(process, need):
                if not self._has_come(member, there, own[BlackBoxField.TURN]):
                    yield WaitingProcess(process, member, self._name(there))

    def _meets(self, process: int, at: int) -> Iterator[tuple[int, int]]:
        """Who else has a part in what a process has begun, and where in the program that is."""
        graph = self.graph
        assert graph is not None
        replica, rank, slice_ = self._place(process)
        row = ROWS[graph.index.op[at]]
        if row.op in TRANSFERS:
            there = int(graph.partner[at])
            if there != NONE:
                yield int(self.mesh[replica, graph.index.rank[there], slice_]), there
        elif row.group:
            members = next(m for m in graph.collective_groups if at in m)
            slices = range(self.shape.tp) if row.group == "model" else [slice_]
            for there in members.tolist():
                for other in slices:
                    yield int(self.mesh[replica, graph.index.rank[there], other]), there
        elif row.lane is Lane.TP:
            yield from ((int(other), at) for other in self.mesh[replica, rank])
        elif row.lane in (Lane.DP, Lane.PARAMS):
            yield from ((int(other), at) for other in self.mesh[:, rank, slice_])

    def _has_come(self, process: int, at: int, turn: int) -> bool:
        """Whether a process has passed an instruction, in the step of a turn."""
        if (one := self.seen.get(process)) is None:
            return process not in (*self.missing, *self.unheard)
        if one[BlackBoxField.TURN] != turn:
            return one[BlackBoxField.TURN] > turn
        assert self.graph is not None
        _, index, instr = self.graph.index.locate(at)
        return one.head(ROWS[instr.op].lane) > index

    def _by_phase(self, process: int) -> Iterator[WaitingProcess]:
        """Who is behind a process that may be in a collective with it, or not in that."""
        own = self.seen[process]
        replica, rank, _ = self._place(process)
        in_step = own.phase is ProcessPhase.STEP and self._instr(process) is not None
        near = [int(p) for p in self.mesh[replica, rank]] if in_step else [*self.seen]
        waits = bool(own[BlackBoxField.WAITS])
        for other in near:
            one = self.seen.get(other)
            if one is None or other == process:
                continue
            behind = (one[BlackBoxField.TURN], one.at) < (own[BlackBoxField.TURN], own.at)
            same = (
                one[BlackBoxField.TURN] == own[BlackBoxField.TURN] and not one[BlackBoxField.WAITS]
            )
            if waits and (behind or same):
                yield WaitingProcess(process, other)
        if waits and not in_step:
            yield from (WaitingProcess(process, other) for other in (*self.missing, *self.unheard))

    def _name(self, at: int) -> str:
        assert self.graph is not None
        _, index, instr = self.graph.index.locate(at)
        return f"#{index} {instr}"

    # ------------------------------------------------------------ who is to blame

    def kind(self, process: int) -> StallKind:
        """What is the matter with a process, if it waits for nobody."""
        if process not in self.seen:
            return StallKind.UNHEARD if process in self.unheard else StallKind.MISSING
        one = self.seen[process]
        if one.gave_up and one.said:
            return StallKind.SAID
        if one.is_dead:
            return StallKind.DIED
        return StallKind.STOPPED if one.state == "stopped" else StallKind.BUSY

    def roots(self) -> list[int]:
        """The processes that wait for nobody, and have not gone because of others."""
        found = [
            p for p, waits in self.waits.items()
            if not waits and not (self.kind(p) is StallKind.BUSY and self._is_over(p))
        ]  # fmt: skip
        return [*found, *self.missing, *(p for p in self.unheard if p in self.waited)]

    def _is_over(self, process: int) -> bool:
        one = self.seen[process]
        return one.gave_up or bool(one[BlackBoxField.ENDED]) or one.state == "gone"

    def blame(self, why: str = "") -> StallCause | None:
        """Who keeps the others, for a reader who was told `why` it is asked; None if nobody does.

        Of several it is the one of which most is known, then who is furthest behind.
        """
        roots = self.roots()
        if not roots:
            return None
        roots.sort(key=self._order)
        first, kind = roots[0], self.kind(roots[0])
        alike = [p for p in roots if self._order(p)[:2] == self._order(first)[:2]]
        sure = len(alike) == 1 or kind < StallKind.MISSING
        fact = f"{why}: " if why else ""
        fact += f"{self.shape.name(first)} {self._matter(first, kind)}"
        if not sure:
            fact += f"; or it may be {', '.join(self.shape.name(p) for p in alike[1:4])}"
        said = self.seen[first].said if first in self.seen else ""
        return StallCause(first, kind, fact, sure, (*self.lines(first),), said)

    def _order(self, process: int) -> tuple[int, bool, int, int, float]:
        one, kind = self.seen.get(process), self.kind(process)
        if one is None:
            return kind, process not in self.waited, 0, 0, 0.0
        if kind in (StallKind.SAID, StallKind.DIED):  # who did first
            when = BlackBoxField.FAILED if kind is StallKind.SAID else BlackBoxField.BEAT
            return kind, False, 0, 0, one[when] - one.now
        turn = one[BlackBoxField.TURN] + bool(one[BlackBoxField.WAITS])
        return kind, process not in self.waited, turn, one.at, -one.seconds

    def _matter(self, process: int, kind: StallKind) -> str:
        if kind is StallKind.MISSING:
            return "has not begun: it has left no black box"
        if kind is StallKind.UNHEARD:
            return "is waited for, and nothing is heard of it from its machine"
        one, where = self.seen[process], self.where(process)
        if kind is StallKind.SAID:
            return f"has given up, {where}"
        if kind is StallKind.DIED:
            return f"has died without a word, {where}"
        if kind is StallKind.STOPPED:
            return f"is stopped, {where}, for {one.seconds:.1f} s"
        slow = "is slow, or has only just come to stand"
        does = slow if self.moves(process) else "does not go on"
        if one.silent > ASLEEP and one.phase > ProcessPhase.START:
            does += " (and lets no Python run)"
        return f"waits for nobody, and {does}: {where}, for {one.seconds:.1f} s"

    def moves(self, process: int) -> bool:
        """Whether a process at work has moved while others waited for it: it may be only slow."""
        if self.kind(process) is not StallKind.BUSY:
            return False
        waits = (wait for own in self.waits.values() for wait in own if wait.on == process)
        waited = max((self.seen[wait.process].seconds for wait in waits), default=0.0)
        return self.seen[process].seconds < SLOW * waited

    def _doing(self, process: int) -> str:
        """What a process is at."""
        one, found = self.seen[process], self._instr(process)
        return one.doing if found is None else f"{one.doing} at #{found[0]} {found[1]}"

    def where(self, process: int) -> str:
        """What a process is at, and where in the code."""
        one, text = self.seen[process], self._doing(process)
        if self.program is None and one.phase is ProcessPhase.STEP:
            text += f" at #{one.at}"
        return f"{text}, {one.note}" if one.note else text

    def lines(self, but: int = -1) -> list[str]:
        """All processes but one, and for whom they wait."""
        rest = [p for p in self.seen if p != but]
        names = {p: self.shape.name(p) for p in rest[:SHOWN]}
        width = max(map(len, names.values()), default=0)
        lines = [f"{name:<{width}}  {self._stands(process)}" for process, name in names.items()]
        return lines + [f"... and {len(rest) - SHOWN} more processes"] * (len(rest) > SHOWN)

    def _stands(self, process: int) -> str:
        text, kind, waits = self._doing(process), self.kind(process), self.waits[process]
        if kind is StallKind.DIED:
            return f"{text}, has died"
        if kind is StallKind.STOPPED:
            return f"{text}, is stopped"
        if self._is_over(process):
            return f"{text}, has {'given up' if self.seen[process].gave_up else 'ended'}"
        if not waits:
            return text
        many = [*dict.fromkeys(wait.on for wait in waits)]
        for_whom = " and ".join(f"process {p}" for p in many[:4]) + " and more" * (len(many) > 4)
        what = next((f" to come to {wait.instr}" for wait in waits if wait.instr), "")
        return f"{text}, waits for {for_whom}{what}"
