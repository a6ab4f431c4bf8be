"""Find the process that caused a hang, from the black boxes of the processes.

Each process has begun its current instruction and all earlier instructions of its rank. The process
waits for another process if the instruction needs a message that was not sent yet, or a collective
that another member has not reached. The analysis follows these waits along the dependency graph.
The waits end at a process that does not wait for another process. This process has died, is
stopped, or does not finish its current action. It does not matter which process detected the hang
first.

Outside of steps, all processes enter the same phases in the same order. A process waits for the
processes that are still in an earlier phase. Tensor-parallel processes also wait for each other in
collectives inside an instruction. The black box of a process shows whether it is in such a
collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from schedir.analysis.dependency_graph import Graph
from schedir.io.black_box import BlackBoxField, BlackBoxSnapshot, ProcessPhase
from schedir.ir.instruction_index import NO_POSITION
from schedir.ir.isa.instructions import (
    EP_COLLECTIVE_OPS,
    INSTRUCTIONS,
    SEND_OPS,
    TRANSFER_OPS,
    Instr,
    Lane,
)
from schedir.ir.pipeline.process_mesh import describe_process, make_process_mesh
from schedir.ir.program import Program

MAX_SHOWN: Final = 16  # A report lists at most this number of processes.
# A report calls a process slow instead of stuck if the process reached its position a short time
# ago. The time is short if it is less than this share of the time for which other processes have
# waited for the process.
SLOW_SHARE: Final = 0.5
# After this number of seconds without a heartbeat, a report says that a process runs no Python
# code. The watchdog writes ten heartbeats per second.
SILENT_SECONDS: Final = 1.5


class StallKind(IntEnum):
    """The state of a process that does not wait for another process.

    The states are in the order of certainty: a process that has failed is most certainly the cause
    of a hang.

    - FAILED: The process failed with a message.
    - DIED: The process died without a message.
    - STOPPED: The process is stopped, for example by a signal.
    - MISSING: The process has no black box on this machine.
    - BUSY: The process runs.
    - UNREACHABLE: The process runs on another machine, which has sent no information about it.
    """

    FAILED = 0
    DIED = 1
    STOPPED = 2
    MISSING = 3
    BUSY = 4
    UNREACHABLE = 5


class ProcessLayout(NamedTuple):
    """The number of processes along each dimension of the process mesh.

    Attributes:
        ranks: The number of pipeline ranks.
        tp: The tensor-parallel size.
        dp: The number of replicas.
    """

    ranks: int
    tp: int
    dp: int

    @classmethod
    def from_program(cls, program: Program) -> ProcessLayout:
        """Return the layout that a program needs.

        Args:
            program: The program.
        """
        return cls(program.shape.ranks, program.tp, program.dp)

    @classmethod
    def from_snapshot(cls, snapshot: BlackBoxSnapshot) -> ProcessLayout:
        """Return the layout of the run of a process.

        Args:
            snapshot: The contents of the black box of the process.
        """
        tp = max(snapshot[BlackBoxField.TP], 1)
        dp = max(snapshot[BlackBoxField.DP], 1)
        return cls(max(snapshot[BlackBoxField.WORLD_SIZE] // (tp * dp), 1), tp, dp)

    def name_process(self, process: int) -> str:
        """Return the name of a process in messages.

        Args:
            process: The number of the process.
        """
        return describe_process(process, *self)


class WaitingProcess(NamedTuple):
    """A process that waits for another process.

    Attributes:
        process: The process that waits.
        awaited_process: The process that it waits for.
        instr: The instruction that the awaited process must reach, or "" if it is unknown.
    """

    process: int
    awaited_process: int
    instr: str = ""


class StallCause(NamedTuple):
    """The process that delays the other processes.

    Attributes:
        process: The process.
        kind: The state of the process.
        fact: A sentence that describes the process and its state.
        is_certain: False if another process is an equally likely cause.
        lines: A line about each other process.
        message: The message with which the process failed, or "".
    """

    process: int
    kind: StallKind
    fact: str
    is_certain: bool
    lines: tuple[str, ...]
    message: str = ""

    def __str__(self) -> str:
        return "\n".join([self.fact, *(f"  {line}" for line in self.lines)])


class StalledRun:
    """The processes of a run, with the contents of their black boxes.

    Args:
        snapshots: The contents of the black boxes, by process.
        layout: The number of processes along each dimension of the mesh.
        program: The program that the processes run, or None if it is not available.
        missing: Processes of this machine without a black box.
        unreachable: Processes of other machines without information. Their machines may have
            failed.

    Attributes:
        waits_of: The waits of each process, by process.
        awaited: The processes for which others wait.
    """

    def __init__(
        self,
        snapshots: Mapping[int, BlackBoxSnapshot],
        layout: ProcessLayout,
        program: Program | None = None,
        missing: Sequence[int] = (),
        unreachable: Sequence[int] = (),
    ) -> None:
        self.snapshots = dict(sorted(snapshots.items()))
        self.layout = layout
        self.program = program
        self.missing = (*missing,)
        self.unreachable = (*unreachable,)
        self.mesh = make_process_mesh(layout.ranks, layout.tp, layout.dp)
        self.graph = None if program is None else Graph.from_program(program, "per_edge")
        self.waits_of = {process: self._find_waits(process) for process in self.snapshots}
        self.awaited = {wait.awaited_process for waits in self.waits_of.values() for wait in waits}

    # ------------------------------------------------------------ waits

    def _coordinates_of(self, process: int) -> tuple[int, int, int]:
        replica, rank, slice_ = np.unravel_index(process, self.mesh.shape)
        return int(replica), int(rank), int(slice_)

    def _current_instruction(self, process: int) -> tuple[int, Instr] | None:
        """Return (index in Stream, current instruction) of a process, or None outside of a step."""
        snapshot = self.snapshots[process]
        if self.program is None or snapshot.phase is not ProcessPhase.STEP:
            return None
        stream, position = self.program.streams[self._coordinates_of(process)[1]], snapshot.position
        return (position, stream[position]) if 0 <= position < len(stream) else None

    def _find_waits(self, process: int) -> list[WaitingProcess]:
        snapshot = self.snapshots[process]
        if snapshot.state in ("gone", "stopped") or snapshot.has_failed:
            return []
        return [*self._find_graph_waits(process)] or [*self._find_phase_waits(process)]

    def _find_graph_waits(self, process: int) -> Iterator[WaitingProcess]:
        """Yield the waits of a process for inputs of its current instruction."""
        snapshot, graph = self.snapshots[process], self.graph
        if graph is None or self.program is None or snapshot.phase is not ProcessPhase.STEP:
            return
        lo, hi = self.program.offsets[self._coordinates_of(process)[1] :][:2].tolist()
        position = lo + max(snapshot.position, 0)
        if position < hi:
            needed_positions = {int(n) for n in graph.local_waits[:, position] if n != NO_POSITION}
            # In a dispatch, the host waits for the numbers of tokens that the members of the
            # expert-parallel group will send.
            if graph.index.op[position] in EP_COLLECTIVE_OPS:
                for member, member_position in self._find_participants(process, position):
                    if not self._has_passed(
                        member, member_position - 1, snapshot[BlackBoxField.PHASE_COUNT]
                    ):
                        yield WaitingProcess(
                            process, member, self._name_instruction(member_position)
                        )
            if graph.index.op[position] in SEND_OPS:
                for member, member_position in self._find_participants(process, position):
                    if self._blocks_send(member, snapshot):
                        yield WaitingProcess(
                            process, member, self._name_instruction(member_position)
                        )
        else:  # At the end of a step, a process waits until its messages are received.
            needed_positions = {k for k in range(lo, hi) if graph.index.op[k] in SEND_OPS}
        for needed_position in sorted(needed_positions):
            for member, member_position in self._find_participants(process, needed_position):
                if not self._has_passed(
                    member, member_position, snapshot[BlackBoxField.PHASE_COUNT]
                ):
                    yield WaitingProcess(process, member, self._name_instruction(member_position))

    def _blocks_send(self, receiver: int, sender: BlackBoxSnapshot) -> bool:
        """Return whether a send waits because its receiver is not ready."""
        receiver_snapshot = self.snapshots.get(receiver)
        if receiver_snapshot is not None:
            # A receive buffer is free only after its rank has ended the previous step.
            return receiver_snapshot[BlackBoxField.PHASE_COUNT] < sender[BlackBoxField.PHASE_COUNT]
        # A send to a process that has ended fails. The sender then sets IS_WAITING.
        is_absent = receiver in (*self.missing, *self.unreachable)
        return is_absent and bool(sender[BlackBoxField.IS_WAITING])

    def _find_participants(self, process: int, position: int) -> Iterator[tuple[int, int]]:
        """Yield (process, position) for each process that takes part in an instruction.

        For a transfer, this is the process on the other side. For a collective, these are all
        members, including `process`. The position is that of the instruction that this other
        process or member runs.
        """
        graph = self.graph
        assert graph is not None
        replica, rank, slice_ = self._coordinates_of(process)
        row = INSTRUCTIONS[graph.index.op[position]]
        if row.op in TRANSFER_OPS:
            member_position = int(graph.partner[position])
            if member_position != NO_POSITION:
                yield (
                    int(self.mesh[replica, graph.index.rank[member_position], slice_]),
                    member_position,
                )
        elif row.group:
            members = next(m for m in graph.collective_groups if position in m)
            slices = range(self.layout.tp) if row.group == "model" else [slice_]
            for member_position in members.tolist():
                for other_slice in slices:
                    yield (
                        int(self.mesh[replica, graph.index.rank[member_position], other_slice]),
                        member_position,
                    )
        elif row.lane is Lane.TP:
            yield from ((int(participant), position) for participant in self.mesh[replica, rank])
        elif row.lane is Lane.EP and self.program is not None:
            first_replica, ep = replica - replica % self.program.ep, self.program.ep
            yield from (
                (int(participant), position)
                for participant in self.mesh[first_replica : first_replica + ep, rank, slice_]
            )
        elif row.lane in (Lane.DP, Lane.PARAMS):
            yield from ((int(participant), position) for participant in self.mesh[:, rank, slice_])

    def _has_passed(self, process: int, position: int, occurrence: int) -> bool:
        """Return whether a process has passed an instruction in a phase.

        `occurrence` is the number of the phase, as in `BlackBoxField.PHASE_COUNT`.
        """
        if (snapshot := self.snapshots.get(process)) is None:
            return process not in (*self.missing, *self.unreachable)
        if snapshot[BlackBoxField.PHASE_COUNT] != occurrence:
            return snapshot[BlackBoxField.PHASE_COUNT] > occurrence
        assert self.graph is not None
        _, index, instr = self.graph.index.locate(position)
        return snapshot.find_lane_position(INSTRUCTIONS[instr.op].lane) > index

    def _find_phase_waits(self, process: int) -> Iterator[WaitingProcess]:
        """Yield the waits for processes that are in an earlier phase, or outside the collective."""
        snapshot = self.snapshots[process]
        replica, rank, _ = self._coordinates_of(process)
        is_in_step = (
            snapshot.phase is ProcessPhase.STEP and self._current_instruction(process) is not None
        )
        candidates = [int(p) for p in self.mesh[replica, rank]] if is_in_step else [*self.snapshots]
        is_waiting = bool(snapshot[BlackBoxField.IS_WAITING])
        for other_process in candidates:
            other_snapshot = self.snapshots.get(other_process)
            if other_snapshot is None or other_process == process:
                continue
            is_behind = (other_snapshot[BlackBoxField.PHASE_COUNT], other_snapshot.position) < (
                snapshot[BlackBoxField.PHASE_COUNT],
                snapshot.position,
            )
            is_in_same_phase = (
                other_snapshot[BlackBoxField.PHASE_COUNT] == snapshot[BlackBoxField.PHASE_COUNT]
                and not other_snapshot[BlackBoxField.IS_WAITING]
            )
            if is_waiting and (is_behind or is_in_same_phase):
                yield WaitingProcess(process, other_process)
        if is_waiting and not is_in_step:
            yield from (
                WaitingProcess(process, other_process)
                for other_process in (*self.missing, *self.unreachable)
            )

    def _name_instruction(self, position: int) -> str:
        assert self.graph is not None
        _, index, instr = self.graph.index.locate(position)
        return f"#{index} {instr}"

    # ------------------------------------------------------------ the cause

    def classify(self, process: int) -> StallKind:
        """Return the state of a process, on the assumption that it does not wait for another one.

        Args:
            process: The process.
        """
        if process not in self.snapshots:
            return StallKind.UNREACHABLE if process in self.unreachable else StallKind.MISSING
        snapshot = self.snapshots[process]
        if snapshot.has_failed and snapshot.reason:
            return StallKind.FAILED
        if snapshot.is_dead:
            return StallKind.DIED
        return StallKind.STOPPED if snapshot.state == "stopped" else StallKind.BUSY

    def find_roots(self) -> list[int]:
        """Return the processes that do not wait for others, and did not end because of others."""
        roots = [
            p for p, waits in self.waits_of.items()
            if not waits and not (self.classify(p) is StallKind.BUSY and self._has_ended(p))
        ]  # fmt: skip
        return [*roots, *self.missing, *(p for p in self.unreachable if p in self.awaited)]

    def _has_ended(self, process: int) -> bool:
        snapshot = self.snapshots[process]
        return (
            snapshot.has_failed
            or bool(snapshot[BlackBoxField.HAS_ENDED])
            or snapshot.state == "gone"
        )

    def find_cause(self, reason: str = "") -> StallCause | None:
        """Return the process that delays the other processes, or None if there is none.

        If there are several such processes, return the one with the most certain state. Among
        processes that failed or died, return the first. Among processes with another state, prefer
        those for which others wait, and return the one with the least progress.

        Args:
            reason: The beginning of the text in `StallCause.fact`, such as the reason for the
                diagnosis.
        """
        roots = self.find_roots()
        if not roots:
            return None
        roots.sort(key=self._sort_key)
        process, kind = roots[0], self.classify(roots[0])
        candidates = [p for p in roots if self._sort_key(p)[:2] == self._sort_key(process)[:2]]
        is_certain = len(candidates) == 1 or kind < StallKind.MISSING
        fact = f"{reason}: " if reason else ""
        fact += f"{self.layout.name_process(process)} {self._describe_problem(process, kind)}"
        if not is_certain:
            fact += (
                "; the cause may also be "
                f"{', '.join(self.layout.name_process(p) for p in candidates[1:4])}"
            )
        message = self.snapshots[process].reason if process in self.snapshots else ""
        return StallCause(
            process, kind, fact, is_certain, (*self.describe_processes(process),), message
        )

    def _sort_key(self, process: int) -> tuple[int, bool, int, int, float]:
        snapshot = self.snapshots.get(process)
        kind = self.classify(process)
        if snapshot is None:
            return kind, process not in self.awaited, 0, 0, 0.0
        # The process that failed first is the cause. If no process has failed, the process that
        # died first is the cause.
        if kind in (StallKind.FAILED, StallKind.DIED):
            time_field = (
                BlackBoxField.FAILURE_TIME if kind is StallKind.FAILED else BlackBoxField.HEARTBEAT
            )
            return kind, False, 0, 0, snapshot[time_field] - snapshot.read_time
        phase = snapshot[BlackBoxField.PHASE_COUNT] + bool(snapshot[BlackBoxField.IS_WAITING])
        return (
            kind,
            process not in self.awaited,
            phase,
            snapshot.position,
            -snapshot.seconds_at_position,
        )

    def _describe_problem(self, process: int, kind: StallKind) -> str:
        if kind is StallKind.MISSING:
            return "has not started: it has no black box"
        if kind is StallKind.UNREACHABLE:
            return "has sent no information from its machine, and other processes wait for it"
        snapshot, location = self.snapshots[process], self.describe_location(process)
        if kind is StallKind.FAILED:
            return f"has failed, {location}"
        if kind is StallKind.DIED:
            return f"has died without a message, {location}"
        if kind is StallKind.STOPPED:
            return f"is stopped, {location}, for {snapshot.seconds_at_position:.1f} s"
        slow_text = "is slow, or has stopped a short time ago"
        activity = slow_text if self.is_slow(process) else "makes no progress"
        if snapshot.heartbeat_age > SILENT_SECONDS and snapshot.phase > ProcessPhase.START:
            activity += " (and runs no Python code)"
        return (
            f"waits for no process, and {activity}: {location}, for "
            f"{snapshot.seconds_at_position:.1f} s"
        )

    def is_slow(self, process: int) -> bool:
        """Return whether a running process has made progress while others waited for it.

        Such a process may be slow instead of stuck.

        Args:
            process: The process.
        """
        if self.classify(process) is not StallKind.BUSY:
            return False
        waits = (
            wait
            for process_waits in self.waits_of.values()
            for wait in process_waits
            if wait.awaited_process == process
        )
        waiting_seconds = max(
            (self.snapshots[wait.process].seconds_at_position for wait in waits), default=0.0
        )
        return self.snapshots[process].seconds_at_position < SLOW_SHARE * waiting_seconds

    def _describe_activity(self, process: int) -> str:
        snapshot, current_instr = self.snapshots[process], self._current_instruction(process)
        return (
            snapshot.activity
            if current_instr is None
            else f"{snapshot.activity} at #{current_instr[0]} {current_instr[1]}"
        )

    def describe_location(self, process: int) -> str:
        """Describe the current phase and instruction of a process, and the place in the code.

        Args:
            process: The process.
        """
        snapshot, text = self.snapshots[process], self._describe_activity(process)
        if self.program is None and snapshot.phase is ProcessPhase.STEP:
            text += f" at #{snapshot.position}"
        return f"{text}, {snapshot.note}" if snapshot.note else text

    def describe_processes(self, excluded: int = -1) -> list[str]:
        """Describe the state of each process, and the processes that it waits for.

        Args:
            excluded: A process to omit. By default there is none.

        Returns:
            The lines of the description.
        """
        processes = [p for p in self.snapshots if p != excluded]
        names = {p: self.layout.name_process(p) for p in processes[:MAX_SHOWN]}
        width = max(map(len, names.values()), default=0)
        lines = [
            f"{name:<{width}}  {self._describe_state(process)}" for process, name in names.items()
        ]
        return lines + [f"... and {len(processes) - MAX_SHOWN} more processes"] * (
            len(processes) > MAX_SHOWN
        )

    def _describe_state(self, process: int) -> str:
        text = self._describe_activity(process)
        kind = self.classify(process)
        waits = self.waits_of[process]
        if kind is StallKind.DIED:
            return f"{text}, has died"
        if kind is StallKind.STOPPED:
            return f"{text}, is stopped"
        if self._has_ended(process):
            return f"{text}, has {'failed' if self.snapshots[process].has_failed else 'ended'}"
        if not waits:
            return text
        awaited_processes = [*dict.fromkeys(wait.awaited_process for wait in waits)]
        awaited_text = " and ".join(f"process {p}" for p in awaited_processes[:4]) + " and more" * (
            len(awaited_processes) > 4
        )
        instr_text = next((f" to reach {wait.instr}" for wait in waits if wait.instr), "")
        return f"{text}, waits for {awaited_text}{instr_text}"
