"""Black box: a small memory-mapped file with the progress of a process, which outlives the process.

A file of `FILE_SIZE` bytes in the folder `read_black_boxes` of a run's output, one for each
process, which maps it into its memory: what it writes there is seen by everybody on its machine,
and stays when it is killed.  It is 64-bit words, each with one writer (`BlackBoxField`), then two
texts.  Times are those of CLOCK_MONOTONIC, in nanoseconds: all processes of a machine have the
same.

The dispatch loop writes two words for an instruction: which one it has begun, by its index in the
Stream, and when.  A host runs its Stream in order, so that is where it stands on every lane: of a
lane it has begun what is not behind that index, and ended what is before it.  A GPU is elsewhere:
of it the words from `FIRST_LANE_FIELD` on say, for each lane, the first instruction that has not
ended.
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
from typing import Final, Literal, get_args
from zlib import crc32

from schedir.errors import UsageError
from schedir.io.files import open_regular_file
from schedir.ir.isa.opcodes import Lane

BLACK_BOX_DIRECTORY: Final = "boxes"  # in the output folder of a run
PROGRAM_FILE: Final = "program.sched"  # in the folder of boxes: what is run
VERDICT_FILE: Final = "said"  # there, too: of which run, and what its launcher has said of its end
FILE_SIZE: Final = 16384
FILE_FORMAT: Final = 0x5343_4845_4402  # the form of the file, and its version
NOTE_OFFSET: Final = 1024  # where the texts begin; each has its length in front
REASON_OFFSET: Final = 2048

POSITION_FIELD: Final = 16  # of the dispatch loop, in a cache line of their own
POSITION_TIME_FIELD: Final = 17
FIRST_LANE_FIELD: Final = 40


class BlackBoxField(IntEnum):
    """Where a number is.

    `RUN_ID` is the same for the processes of one run on one machine, `NAMESPACE_ID` for those that
    see each other's numbers, `START_TIME` when the process began, as the system counts.  Of the
    `WORLD_SIZE` processes
    `TP` are a tensor-parallel group, and there are `DP` replicas.  `PHASE_COUNT` counts the phases
    that were entered: all processes enter the same ones.  `STEP` counts from 1.  `HEARTBEAT` is
    when the watchdog was last awake; `IS_WAITING`, 1 or 0, whether it has then found the process in
    a collective or at a message.  `FAILURE_TIME` is when the process gave up, `EXIT_CODE` with
    which exit code,
    `HAS_ENDED` 1 if it came to its end; `KILLED_PROCESS` the process, plus 1, that it ends because
    it keeps the others.
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
    DEVICE_STEP = 39  # the step that a GPU is in, 0 where there is none


class ProcessPhase(IntEnum):
    """What a process is at, as a number in its box, and in `description`."""

    description: str

    def __new__(cls, number: int, description: str = "") -> ProcessPhase:
        phase = int.__new__(cls, number)
        phase._value_, phase.description = number, description
        return phase

    START = 0, "in set-up, at its start"
    RENDEZVOUS = 1, "in set-up, finding the others"
    SET_UP = 2, "in set-up, making model and executor"
    DATA_WAIT = 3, "waiting for the data of step {step}"
    STEP = 4, "in step {step}"
    REPORT = 5, "bringing together the numbers of step {step}"
    SAVE = 6, "saving step {step}"
    RESULTS = 7, "writing results"
    DONE = 8, "at its end"
    EVALUATE = 9, "evaluating after step {step}"


class BlackBox:
    """The box of this process, for it to write; without a path it is memory alone."""

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
        own = os.getpid()
        self.values[BlackBoxField.RUN_ID], self.values[BlackBoxField.NAMESPACE_ID] = (
            compute_run_id(os.getppid()),
            compute_namespace_id(),
        )
        self.values[BlackBoxField.PROCESS], self.values[BlackBoxField.WORLD_SIZE] = process, world
        self.values[BlackBoxField.TP], self.values[BlackBoxField.DP] = tp, dp
        self.values[BlackBoxField.PID], self.values[BlackBoxField.START_TIME] = (
            own,
            _read_start_time(own),
        )
        self.values[BlackBoxField.PHASE_TIME] = self.values[BlackBoxField.HEARTBEAT] = (
            monotonic_ns()
        )
        self.values[BlackBoxField.FORMAT] = FILE_FORMAT

    def enter_phase(self, phase: ProcessPhase, step: int = 0) -> None:
        """Note what the process is at from now on."""
        words = self.values
        words[BlackBoxField.STEP], words[BlackBoxField.PHASE], words[POSITION_FIELD] = (
            step,
            phase,
            0,
        )
        words[BlackBoxField.PHASE_TIME] = words[POSITION_TIME_FIELD] = monotonic_ns()
        words[BlackBoxField.PHASE_COUNT] += 1

    def write_note(self, text: str) -> None:
        """Note where in the code the process stands."""
        self._write_text(NOTE_OFFSET, REASON_OFFSET, text)

    def report_failure(self, text: str, code: int) -> None:
        """Note why the process gives up, "" where that is another's fault."""
        self._write_text(REASON_OFFSET, FILE_SIZE, text)
        self.values[BlackBoxField.EXIT_CODE] = code
        self.values[BlackBoxField.FAILURE_TIME] = monotonic_ns()

    def _write_text(self, begin: int, end: int, text: str) -> None:
        data = text.encode(errors="replace")[: end - begin - 8]
        self.values[begin // 8] = 0
        self.memory[begin + 8 : begin + 8 + len(data)] = data
        self.values[begin // 8] = len(data)

    @property
    def has_file(self) -> bool:
        """Whether others can read it: it may never have had a file, or somebody removed it."""
        return self.path is not None and self.path.exists()

    def remove(self) -> None:
        """Remove the file; the memory stays."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _map_memory(path: Path | None) -> mmap.mmap:
    """Memory of a new file for its owner alone; of none, where it cannot be made."""
    if path is None:
        return mmap.mmap(-1, FILE_SIZE)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return mmap.mmap(-1, FILE_SIZE)
    try:
        # Written, so that it has its room: a store to a page that a full disk has no room for ends
        # the process (SIGBUS).
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
    """A box as it was read at `read_time`, and how the system saw its process then."""

    data: bytes
    read_time: int
    state: ProcessState

    def __getitem__(self, field: int) -> int:
        return int.from_bytes(self.data[field * 8 : field * 8 + 8], "little", signed=True)

    @property
    def process(self) -> int:
        """Which process it is, among all."""
        return self[BlackBoxField.PROCESS]

    @property
    def phase(self) -> ProcessPhase:
        """What it is at."""
        return ProcessPhase(min(max(self[BlackBoxField.PHASE], 0), ProcessPhase.DONE))

    @property
    def note(self) -> str:
        """Where in the code it stood when it had not moved for a moment."""
        return self._read_text(NOTE_OFFSET, REASON_OFFSET)

    @property
    def reason(self) -> str:
        """Why it has given up."""
        return self._read_text(REASON_OFFSET, FILE_SIZE)

    @property
    def has_failed(self) -> bool:
        """Whether it has, for a reason of its own or of another."""
        return bool(self[BlackBoxField.FAILURE_TIME])

    @property
    def is_dead(self) -> bool:
        """Whether it has ended, and neither well nor with a word."""
        return self.state == "gone" and not self.has_failed and not self[BlackBoxField.HAS_ENDED]

    @property
    def seconds_at_position(self) -> float:
        """For how long it has been at what it is at."""
        return (
            max(self.read_time - max(self[POSITION_TIME_FIELD], self[BlackBoxField.PHASE_TIME]), 0)
            / 1e9
        )

    @property
    def heartbeat_age(self) -> float:
        """For how many seconds its watchdog has not been awake."""
        return max(self.read_time - self[BlackBoxField.HEARTBEAT], 0) / 1e9

    def find_lane_position(self, lane: Lane) -> int:
        """The first instruction of a lane that has not ended, by its index in the Stream."""
        return (
            self[FIRST_LANE_FIELD + lane]
            if self[BlackBoxField.DEVICE_STEP]
            else self[POSITION_FIELD]
        )

    @property
    def position(self) -> int:
        """The first instruction that has not ended, by its index in the Stream."""
        return min(map(self.find_lane_position, Lane))

    @property
    def activity(self) -> str:
        """What it is at, in words."""
        return self.phase.description.format(
            step=self[BlackBoxField.DEVICE_STEP] or self[BlackBoxField.STEP]
        )

    def _read_text(self, begin: int, end: int) -> str:
        length = min(max(self[begin // 8], 0), end - begin - 8)
        return self.data[begin + 8 : begin + 8 + length].decode(errors="replace")

    def to_bytes(self) -> bytes:
        """As bytes for another machine, which has other clocks."""
        return f"{self.read_time} {self.state}\n".encode() + self.data

    @classmethod
    def from_bytes(cls, message: bytes) -> BlackBoxSnapshot | None:
        """What `message` has made; None for anything else."""
        head, _, data = message.partition(b"\n")
        now, _, state = head.decode(errors="replace").partition(" ")
        if not re.fullmatch("[0-9]{1,19}", now) or len(data) != FILE_SIZE:
            return None
        found = (cls(data, int(now), one) for one in get_args(ProcessState) if one == state)
        return next((seen for seen in found if seen[BlackBoxField.FORMAT] == FILE_FORMAT), None)


def read_black_box(path: Path) -> BlackBoxSnapshot | None:
    """A box, and its process; None where there is none, or something else."""
    try:
        with open_regular_file(path) as file:
            data = file.read(FILE_SIZE + 1)
    except UsageError:
        return None
    seen = BlackBoxSnapshot(data, monotonic_ns(), "unknown")
    if len(data) != FILE_SIZE or seen[BlackBoxField.FORMAT] != FILE_FORMAT:
        return None
    if seen[BlackBoxField.NAMESPACE_ID] != compute_namespace_id():
        return seen
    return BlackBoxSnapshot(
        data,
        seen.read_time,
        read_process_state(seen[BlackBoxField.PID], seen[BlackBoxField.START_TIME]),
    )


def read_black_boxes(directory: Path, run_id: int | None = None) -> dict[int, BlackBoxSnapshot]:
    """The boxes in a folder by process; of one run on this machine, if it is told which."""
    found = [
        seen for path in directory.glob("[0-9]*") if (seen := read_black_box(path)) is not None
    ]
    if run_id is not None:
        found = [
            seen
            for seen in found
            if (seen[BlackBoxField.RUN_ID], seen[BlackBoxField.NAMESPACE_ID])
            == (run_id, compute_namespace_id())
        ]
    return {seen.process: seen for seen in found}


def compute_run_id(parent: int, environment: Mapping[str, str] = os.environ) -> int:
    """A number for the run whose processes on this machine somebody has started."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return crc32(" ".join([str(parent), *(environment.get(n, "") for n in names)]).encode())


def compute_namespace_id() -> int:
    """A number for those who see each other's process numbers: this boot, and their name space."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return crc32(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode())
    except OSError:
        return 0


def read_process_state(pid: int, start_time: int) -> ProcessState:
    """How the system sees a process."""
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
