"""Memory-mapped files with the progress of each process. A file remains when its process dies.

The output folder of a run has a folder `BLACK_BOX_DIRECTORY` with one file for each process. The
process maps its file into memory. Every process of the machine can read a value as soon as it is
written.

A file has `FILE_SIZE` bytes: 64-bit words (`BlackBoxField`), a note, and the reason of a failure.
The main thread, the watchdog thread, and a thread that the watchdog starts for a failure write to
the file. A lock in `process_exit` ensures that only one of them reports a failure. Times are those
of CLOCK_MONOTONIC in nanoseconds, which all processes of a machine share.

For each instruction, the dispatch loop writes two words: the index of the instruction in the
Stream, and its start time. Without a GPU, a host runs its Stream in order. So this index is the
position of every lane: no later instruction has begun. Earlier computes have ended, but earlier
transfers and collectives may still be in progress.

A GPU runs instructions later than its host issues them. The words from `FIRST_LANE_FIELD` on have,
for each lane of a GPU, the index of the first instruction that has not ended.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from time import monotonic_ns
from typing import Final, Literal, cast, get_args
from zlib import crc32

from schedir.errors import UsageError
from schedir.io.files import open_regular_file
from schedir.ir.isa.opcodes import Lane

# The name of the folder of the black boxes, and the names of two other files in this folder. The
# first file has the program of the run. The second has the id of the run and the launcher's last
# message.
BLACK_BOX_DIRECTORY: Final = "boxes"
PROGRAM_FILE: Final = "program.sched"
VERDICT_FILE: Final = "launcher_message"
FORMER_VERDICT_FILE: Final = "said"  # Older versions wrote the last message to this file.
FILE_SIZE: Final = 16384  # In bytes.
FILE_FORMAT: Final = 0x5343_4845_4402  # Identifies the format and its version.
# Bytes from the start of the file to each text. A text begins with its length, in 8 bytes.
NOTE_OFFSET: Final = 1024
REASON_OFFSET: Final = 2048

# Indices of words. The dispatch loop writes the two POSITION words often, so they have their own
# cache line.
POSITION_FIELD: Final = 16
POSITION_TIME_FIELD: Final = 17
FIRST_LANE_FIELD: Final = 40


class BlackBoxField(IntEnum):
    """Index of a 64-bit word in a black box.

    A word is 0 until it is written.

    Attributes:
        FORMAT: `FILE_FORMAT`. It is written last, when all words of the process are set.
        RUN_ID: The same number for all processes of a run on one machine (`compute_run_id`).
        NAMESPACE_ID: The same number for all processes that can see each other's PIDs
            (`compute_namespace_id`).
        PROCESS: The number of the process in the run, from 0.
        WORLD_SIZE: The number of processes of the run.
        PID: The process id.
        START_TIME: The start time of the process, in clock ticks since the machine booted.
        TP: The tensor-parallel size.
        PHASE: The current `ProcessPhase`.
        PHASE_COUNT: The number of phases that the process has entered. All processes enter the same
            phases.
        PHASE_TIME: The time when the process entered the current phase.
        STEP: The current step, from 1.
        DP: The number of replicas.
        POSITION: The index in the Stream of the last instruction that the host has begun. After all
            instructions have returned, this word is the number of instructions.
        POSITION_TIME: The time when the host began this instruction.
        HEARTBEAT: The time when the watchdog last ran.
        IS_WAITING: 1 if the process waits for other processes, or has lost the connection to one,
            else 0.
        FAILURE_TIME: The time when the process reported a failure, 0 if it reported none.
        EXIT_CODE: The exit code of the failure.
        HAS_ENDED: 1 if the process ended as planned.
        KILLED_PROCESS: The number, plus 1, of a process that this process killed because others
            waited for it.
        DEVICE_STEP: The step that the GPU runs. 0 if the step is unknown, or if there is no GPU.
    """

    FORMAT = 0
    RUN_ID = 1
    NAMESPACE_ID = 2
    PROCESS = 3
    WORLD_SIZE = 4
    PID = 5
    START_TIME = 6
    TP = 7
    PHASE = 8
    PHASE_COUNT = 9
    PHASE_TIME = 10
    STEP = 11
    DP = 12
    POSITION = POSITION_FIELD
    POSITION_TIME = POSITION_TIME_FIELD
    HEARTBEAT = 24
    IS_WAITING = 25
    FAILURE_TIME = 26
    EXIT_CODE = 27
    HAS_ENDED = 28
    KILLED_PROCESS = 29
    DEVICE_STEP = 39


class ProcessPhase(IntEnum):
    """The phase of a process, as a number with a text.

    Attributes:
        description: The phase as a message describes it. `{step}` is a placeholder for the step.
    """

    description: str

    def __new__(cls, number: int, description: str = "") -> ProcessPhase:
        """Create a member from its number and its description."""
        phase = int.__new__(cls, number)
        phase._value_ = number
        phase.description = description
        return phase

    START = 0, "in set-up, at its start"
    RENDEZVOUS = 1, "in set-up, connecting to the other processes"
    SET_UP = 2, "in set-up, creating the model and the executor"
    DATA_WAIT = 3, "waiting for the data of step {step}"
    STEP = 4, "in step {step}"
    REPORT = 5, "gathering the results of step {step}"
    SAVE = 6, "saving step {step}"
    RESULTS = 7, "writing results"
    DONE = 8, "at its end"
    EVALUATE = 9, "evaluating after step {step}"


class BlackBox:
    """The black box to which the current process writes.

    If the file cannot be created, the black box uses anonymous memory, which no other process can
    read.

    Args:
        path: The file. An older file at this path is replaced. None uses anonymous memory.
        process: The number of the process in the run.
        world: The number of processes of the run.
        tp: The tensor-parallel size.
        dp: The number of replicas.

    Attributes:
        path: The file, or None.
        memory: The mapped memory, `FILE_SIZE` bytes.
        values: The memory as signed 64-bit words, which `BlackBoxField` indexes.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        process: int = 0,
        world: int = 1,
        tp: int = 1,
        dp: int = 1,
    ) -> None:
        self.path = path
        self.memory = _map_memory(path)
        self.values = memoryview(self.memory).cast("q")
        pid = os.getpid()
        self.values[BlackBoxField.RUN_ID] = compute_run_id(os.getppid())
        self.values[BlackBoxField.NAMESPACE_ID] = compute_namespace_id()
        self.values[BlackBoxField.PROCESS] = process
        self.values[BlackBoxField.WORLD_SIZE] = world
        self.values[BlackBoxField.TP] = tp
        self.values[BlackBoxField.DP] = dp
        self.values[BlackBoxField.PID] = pid
        self.values[BlackBoxField.START_TIME] = _read_start_time(pid)
        self.values[BlackBoxField.PHASE_TIME] = self.values[BlackBoxField.HEARTBEAT] = (
            monotonic_ns()
        )
        self.values[BlackBoxField.FORMAT] = FILE_FORMAT

    def enter_phase(self, phase: ProcessPhase, step: int = 0) -> None:
        """Record that the process enters a phase, and set its position to 0.

        Args:
            phase: The phase.
            step: The step, from 1. 0 outside of steps.
        """
        words = self.values
        words[BlackBoxField.STEP] = step
        words[BlackBoxField.PHASE] = phase
        words[POSITION_FIELD] = 0
        words[BlackBoxField.PHASE_TIME] = words[POSITION_TIME_FIELD] = monotonic_ns()
        words[BlackBoxField.PHASE_COUNT] += 1

    def write_note(self, text: str) -> None:
        """Write the location in the code at which the process is.

        Args:
            text: The location. A text that is too long for the file is cut. "" removes the note.
        """
        self._write_text(NOTE_OFFSET, REASON_OFFSET, text)

    def report_failure(self, text: str, code: int) -> None:
        """Record that the process fails, with the reason and the exit code.

        Args:
            text: The reason, or "" if another process reports it.
            code: The exit code.
        """
        self._write_text(REASON_OFFSET, FILE_SIZE, text)
        self.values[BlackBoxField.EXIT_CODE] = code
        self.values[BlackBoxField.FAILURE_TIME] = monotonic_ns()

    def _write_text(self, begin: int, end: int, text: str) -> None:
        data = text.encode(errors="replace")[: end - begin - 8]
        # The length is 0 while the text changes, so that a reader does not get half of a text.
        self.values[begin // 8] = 0
        self.memory[begin + 8 : begin + 8 + len(data)] = data
        self.values[begin // 8] = len(data)

    @property
    def has_file(self) -> bool:
        """Return whether the file exists, so that other processes can read it.

        The file may not exist because it could not be created, or because it was removed.
        """
        return self.path is not None and self.path.exists()

    def remove(self) -> None:
        """Remove the file. The mapped memory remains valid."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _map_memory(path: Path | None) -> mmap.mmap:
    """Map a new file that only its owner can read, or anonymous memory if that fails."""
    if path is None:
        return mmap.mmap(-1, FILE_SIZE)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return mmap.mmap(-1, FILE_SIZE)
    try:
        # Writing zeros allocates the disk space now. Otherwise, if the disk is full later, a store
        # to a page without disk space kills the process (SIGBUS).
        if os.write(file, bytes(FILE_SIZE)) == FILE_SIZE:
            return mmap.mmap(file, FILE_SIZE)
    except OSError:
        pass
    finally:
        os.close(file)
    path.unlink(missing_ok=True)
    return mmap.mmap(-1, FILE_SIZE)


# ---------------------------------------------------------------- reading

ProcessState = Literal["runs", "stopped", "gone", "unknown"]


@dataclass(frozen=True)
class BlackBoxSnapshot:
    """A copy of a black box, and the state of its process at the time of the copy.

    `snapshot[field]` is the value of a `BlackBoxField`.

    Args:
        data: The bytes of the file.
        read_time: The time of the copy, in nanoseconds of CLOCK_MONOTONIC.
        state: "runs", "stopped" (by a signal or a debugger), "gone", or "unknown" if the process is
            in another PID namespace.
    """

    data: bytes
    read_time: int
    state: ProcessState

    def __getitem__(self, field: int) -> int:
        return int.from_bytes(self.data[field * 8 : field * 8 + 8], "little", signed=True)

    @property
    def process(self) -> int:
        """The number of the process in its run."""
        return self[BlackBoxField.PROCESS]

    @property
    def phase(self) -> ProcessPhase:
        """The phase of the process. Numbers above the largest phase mean the largest phase."""
        return ProcessPhase(min(max(self[BlackBoxField.PHASE], 0), max(ProcessPhase)))

    @property
    def note(self) -> str:
        """The location in the code at which the process is stuck, "" if it makes progress."""
        return self._read_text(NOTE_OFFSET, REASON_OFFSET)

    @property
    def reason(self) -> str:
        """The reason of the failure, "" if there is none or if another process reports it."""
        return self._read_text(REASON_OFFSET, FILE_SIZE)

    @property
    def has_failed(self) -> bool:
        """Return whether the process reported its failure or the failure of another process."""
        return bool(self[BlackBoxField.FAILURE_TIME])

    @property
    def is_dead(self) -> bool:
        """Return whether the process ended early, and did not report a failure."""
        return self.state == "gone" and not self.has_failed and not self[BlackBoxField.HAS_ENDED]

    @property
    def seconds_at_position(self) -> float:
        """The seconds since the process began its current instruction or phase."""
        return (
            max(self.read_time - max(self[POSITION_TIME_FIELD], self[BlackBoxField.PHASE_TIME]), 0)
            / 1e9
        )

    @property
    def heartbeat_age(self) -> float:
        """The seconds since the watchdog of the process last ran."""
        return max(self.read_time - self[BlackBoxField.HEARTBEAT], 0) / 1e9

    def find_lane_position(self, lane: Lane) -> int:
        """Return the position of a lane: the index of an instruction in the Stream.

        With a GPU, it is the lane's first instruction that has not ended. Without a GPU, all lanes
        have the position of the host: the last instruction that the host has begun.

        Args:
            lane: The lane.
        """
        return (
            self[FIRST_LANE_FIELD + lane]
            if self[BlackBoxField.DEVICE_STEP]
            else self[POSITION_FIELD]
        )

    @property
    def position(self) -> int:
        """The smallest position of the lanes: the index of an instruction in the Stream.

        `find_lane_position` defines the position of a lane.
        """
        return min(map(self.find_lane_position, Lane))

    @property
    def activity(self) -> str:
        """The description of the phase, with the number of the step."""
        return self.phase.description.format(
            step=self[BlackBoxField.DEVICE_STEP] or self[BlackBoxField.STEP]
        )

    def _read_text(self, begin: int, end: int) -> str:
        length = min(max(self[begin // 8], 0), end - begin - 8)
        return self.data[begin + 8 : begin + 8 + length].decode(errors="replace")

    def to_bytes(self) -> bytes:
        """Return the snapshot as bytes for another machine.

        The bytes contain `read_time`, because the clock of another machine differs.
        """
        return f"{self.read_time} {self.state}\n".encode() + self.data

    @classmethod
    def from_bytes(cls, message: bytes) -> BlackBoxSnapshot | None:
        """Return the snapshot that `to_bytes` encoded.

        Args:
            message: The bytes.

        Returns:
            The snapshot, or None if `message` is not an encoded snapshot of this format.
        """
        header, _, data = message.partition(b"\n")
        read_time, _, state = header.decode(errors="replace").partition(" ")
        is_known = state in get_args(ProcessState)
        if not re.fullmatch("[0-9]{1,19}", read_time) or len(data) != FILE_SIZE or not is_known:
            return None
        snapshot = cls(data, int(read_time), cast(ProcessState, state))
        return snapshot if snapshot[BlackBoxField.FORMAT] == FILE_FORMAT else None


def read_black_box(path: Path) -> BlackBoxSnapshot | None:
    """Read a black box and the state of its process.

    Args:
        path: The file of the black box.

    Returns:
        The snapshot, or None if the file does not exist or is not a black box of this format. The
        state is "unknown" if the process is in another PID namespace.
    """
    try:
        with open_regular_file(path) as file:
            data = file.read(FILE_SIZE + 1)
    except UsageError:
        return None
    snapshot = BlackBoxSnapshot(data, monotonic_ns(), "unknown")
    if len(data) != FILE_SIZE or snapshot[BlackBoxField.FORMAT] != FILE_FORMAT:
        return None
    if snapshot[BlackBoxField.NAMESPACE_ID] != compute_namespace_id():
        return snapshot
    return BlackBoxSnapshot(
        data,
        snapshot.read_time,
        read_process_state(snapshot[BlackBoxField.PID], snapshot[BlackBoxField.START_TIME]),
    )


def read_black_boxes(directory: Path, run_id: int | None = None) -> dict[int, BlackBoxSnapshot]:
    """Read the black boxes in a folder.

    Args:
        directory: The folder. Files with names that begin with a digit are read.
        run_id: If given, only black boxes of this run and of this PID namespace are returned.

    Returns:
        The snapshots by the number of the process.
    """
    snapshots = [
        snapshot
        for path in directory.glob("[0-9]*")
        if (snapshot := read_black_box(path)) is not None
    ]
    if run_id is not None:
        snapshots = [
            snapshot
            for snapshot in snapshots
            if (snapshot[BlackBoxField.RUN_ID], snapshot[BlackBoxField.NAMESPACE_ID])
            == (run_id, compute_namespace_id())
        ]
    return {snapshot.process: snapshot for snapshot in snapshots}


def compute_run_id(parent: int, environment: Mapping[str, str] = os.environ) -> int:
    """Compute a number that is the same for all processes of a run on this machine.

    Args:
        parent: The PID of the process that started the processes of the run.
        environment: The environment variables of the processes. The address of the rendezvous and
            the torchelastic ids are used.
    """
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return crc32(" ".join([str(parent), *(environment.get(n, "") for n in names)]).encode())


def compute_namespace_id() -> int:
    """Compute a number that is the same for all processes that can see each other's PIDs.

    Returns:
        A checksum of the boot id and of the PID namespace, 0 if the system has no /proc.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
        return crc32(f"{boot_id} {os.readlink('/proc/self/ns/pid')}".encode())
    except OSError:
        return 0


def read_process_state(pid: int, start_time: int) -> ProcessState:
    """Return the state of a process, as the system reports it.

    Args:
        pid: The PID.
        start_time: The start time of the process in clock ticks since boot. A process with another
            start time has reused the PID. 0 skips this check.

    Returns:
        "runs", "stopped", "gone" (also for a zombie), or "unknown" if the system has no /proc.
    """
    fields = _read_stat(pid)
    if fields is None:
        return "gone" if Path("/proc/self/stat").exists() else "unknown"
    if fields[0] in "ZX" or (start_time and int(fields[19]) != start_time):
        return "gone"
    return "stopped" if fields[0] in "Tt" else "runs"


def _read_start_time(pid: int) -> int:
    fields = _read_stat(pid)
    return 0 if fields is None else int(fields[19])


def _read_stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
