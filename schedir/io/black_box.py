"""Black box: a small memory-mapped file with the progress of a process, which outlives the process.

A file of `SIZE` bytes in the folder `boxes` of a run's output, one for each process, which maps it
into its memory: what it writes there is seen by everybody on its machine, and stays when it is
killed.  It is 64-bit words, each with one writer (`BlackBoxField`), then two texts.  Times are
those of CLOCK_MONOTONIC, in nanoseconds: all processes of a machine have the same.

The dispatch loop writes two words for an instruction: which one it has begun, by its index in the
Stream, and when.  A host runs its Stream in order, so that is where it stands on every lane: of a
lane it has begun what is not behind that index, and ended what is before it.  A GPU is elsewhere:
of it the words from `LANES` on say, for each lane, the first instruction that has not ended.
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
from schedir.io.files import opened
from schedir.ir.isa.opcodes import Lane

FOLDER: Final = "boxes"  # in the output folder of a run
PROGRAM: Final = "program.sched"  # in the folder of boxes: what is run
VERDICT: Final = "said"  # there, too: of which run, and what its launcher has said of its end
SIZE: Final = 16384
FORM: Final = 0x5343_4845_4402  # the form of the file, and its version
NOTE: Final = 1024  # where the texts begin; each has its length in front
SAID: Final = 2048

AT: Final = 16  # of the dispatch loop, in a cache line of their own
SINCE: Final = 17
LANES: Final = 40


class BlackBoxField(IntEnum):
    """Where a number is.

    `RUN` is the same for the processes of one run on one machine, `PLACE` for those that see each
    other's numbers, `BORN` when the process began, as the system counts.  Of the `WORLD` processes
    `TP` are a tensor-parallel group, and there are `DP` replicas.  `TURN` counts the phases
    that were entered: all processes enter the same ones.  `STEP` counts from 1.  `BEAT` is when the
    watchdog was last awake; `WAITS`, 1 or 0, whether it has then found the process in a collective
    or at a message.  `FAILED` is when the process gave up, `CODE` with which exit code, `ENDED` 1
    if it came to its end; `KILLS` the process, plus 1, that it ends because it keeps the others.
    """

    FORM = 0
    RUN = 1
    PLACE = 2
    PROCESS = 3
    WORLD = 4
    PID = 5
    BORN = 6
    TP = 7
    PHASE = 8
    TURN = 9
    ENTERED = 10
    STEP = 11
    DP = 12
    AT = AT
    SINCE = SINCE
    BEAT = 24
    WAITS = 25
    FAILED = 26
    CODE = 27
    ENDED = 28
    KILLS = 29
    DEVICE = 39  # the step that a GPU is in, 0 where there is none


class ProcessPhase(IntEnum):
    """What a process is at, as a number in its box, and in `words`."""

    words: str

    def __new__(cls, number: int, words: str = "") -> ProcessPhase:
        phase = int.__new__(cls, number)
        phase._value_, phase.words = number, words
        return phase

    START = 0, "in set-up, at its start"
    MEETING = 1, "in set-up, finding the others"
    SET_UP = 2, "in set-up, making model and executor"
    DATA = 3, "waiting for the data of step {step}"
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
        self.memory = _memory(path)
        self.words = memoryview(self.memory).cast("q")
        own = os.getpid()
        self.words[BlackBoxField.RUN], self.words[BlackBoxField.PLACE] = (
            run_of(os.getppid()),
            place(),
        )
        self.words[BlackBoxField.PROCESS], self.words[BlackBoxField.WORLD] = process, world
        self.words[BlackBoxField.TP], self.words[BlackBoxField.DP] = tp, dp
        self.words[BlackBoxField.PID], self.words[BlackBoxField.BORN] = own, _born(own)
        self.words[BlackBoxField.ENTERED] = self.words[BlackBoxField.BEAT] = monotonic_ns()
        self.words[BlackBoxField.FORM] = FORM

    def enter(self, phase: ProcessPhase, step: int = 0) -> None:
        """Note what the process is at from now on."""
        words = self.words
        words[BlackBoxField.STEP], words[BlackBoxField.PHASE], words[AT] = step, phase, 0
        words[BlackBoxField.ENTERED] = words[SINCE] = monotonic_ns()
        words[BlackBoxField.TURN] += 1

    def note(self, text: str) -> None:
        """Note where in the code the process stands."""
        self._write(NOTE, SAID, text)

    def say(self, text: str, code: int) -> None:
        """Note why the process gives up, "" where that is another's fault."""
        self._write(SAID, SIZE, text)
        self.words[BlackBoxField.CODE] = code
        self.words[BlackBoxField.FAILED] = monotonic_ns()

    def _write(self, begin: int, end: int, text: str) -> None:
        data = text.encode(errors="replace")[: end - begin - 8]
        self.words[begin // 8] = 0
        self.memory[begin + 8 : begin + 8 + len(data)] = data
        self.words[begin // 8] = len(data)

    @property
    def is_there(self) -> bool:
        """Whether others can read it: it may never have had a file, or somebody removed it."""
        return self.path is not None and self.path.exists()

    def remove(self) -> None:
        """Remove the file; the memory stays."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _memory(path: Path | None) -> mmap.mmap:
    """Memory of a new file for its owner alone; of none, where it cannot be made."""
    if path is None:
        return mmap.mmap(-1, SIZE)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return mmap.mmap(-1, SIZE)
    try:
        # Written, so that it has its room: a store to a page that a full disk has no room for ends
        # the process (SIGBUS).
        if os.write(file, bytes(SIZE)) == SIZE:
            return mmap.mmap(file, SIZE)
    except OSError:
        pass
    finally:
        os.close(file)
    path.unlink(missing_ok=True)
    return mmap.mmap(-1, SIZE)


# ---------------------------------------------------------------- reading

State = Literal["runs", "stopped", "gone", "unknown"]


@dataclass(frozen=True)
class BlackBoxSnapshot:
    """A box as it was read at `now`, and how the system saw its process then."""

    data: bytes
    now: int
    state: State

    def __getitem__(self, word: int) -> int:
        return int.from_bytes(self.data[word * 8 : word * 8 + 8], "little", signed=True)

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
        return self._text(NOTE, SAID)

    @property
    def said(self) -> str:
        """Why it has given up."""
        return self._text(SAID, SIZE)

    @property
    def gave_up(self) -> bool:
        """Whether it has, for a reason of its own or of another."""
        return bool(self[BlackBoxField.FAILED])

    @property
    def is_dead(self) -> bool:
        """Whether it has ended, and neither well nor with a word."""
        return self.state == "gone" and not self.gave_up and not self[BlackBoxField.ENDED]

    @property
    def seconds(self) -> float:
        """For how long it has been at what it is at."""
        return max(self.now - max(self[SINCE], self[BlackBoxField.ENTERED]), 0) / 1e9

    @property
    def silent(self) -> float:
        """For how many seconds its watchdog has not been awake."""
        return max(self.now - self[BlackBoxField.BEAT], 0) / 1e9

    def head(self, lane: Lane) -> int:
        """The first instruction of a lane that has not ended, by its index in the Stream."""
        return self[LANES + lane] if self[BlackBoxField.DEVICE] else self[AT]

    @property
    def at(self) -> int:
        """The first instruction that has not ended, by its index in the Stream."""
        return min(map(self.head, Lane))

    @property
    def doing(self) -> str:
        """What it is at, in words."""
        return self.phase.words.format(step=self[BlackBoxField.DEVICE] or self[BlackBoxField.STEP])

    def _text(self, begin: int, end: int) -> str:
        length = min(max(self[begin // 8], 0), end - begin - 8)
        return self.data[begin + 8 : begin + 8 + length].decode(errors="replace")

    def packed(self) -> bytes:
        """As bytes for another machine, which has other clocks."""
        return f"{self.now} {self.state}\n".encode() + self.data

    @classmethod
    def unpacked(cls, packed: bytes) -> BlackBoxSnapshot | None:
        """What `packed` has made; None for anything else."""
        head, _, data = packed.partition(b"\n")
        now, _, state = head.decode(errors="replace").partition(" ")
        if not re.fullmatch("[0-9]{1,19}", now) or len(data) != SIZE:
            return None
        found = (cls(data, int(now), one) for one in get_args(State) if one == state)
        return next((seen for seen in found if seen[BlackBoxField.FORM] == FORM), None)


def look(path: Path) -> BlackBoxSnapshot | None:
    """A box, and its process; None where there is none, or something else."""
    try:
        with opened(path) as file:
            data = file.read(SIZE + 1)
    except UsageError:
        return None
    seen = BlackBoxSnapshot(data, monotonic_ns(), "unknown")
    if len(data) != SIZE or seen[BlackBoxField.FORM] != FORM:
        return None
    if seen[BlackBoxField.PLACE] != place():
        return seen
    return BlackBoxSnapshot(
        data, seen.now, state_of(seen[BlackBoxField.PID], seen[BlackBoxField.BORN])
    )


def boxes(folder: Path, run: int | None = None) -> dict[int, BlackBoxSnapshot]:
    """The boxes in a folder by process; of one run on this machine, if it is told which."""
    found = [seen for path in folder.glob("[0-9]*") if (seen := look(path)) is not None]
    if run is not None:
        found = [
            seen
            for seen in found
            if (seen[BlackBoxField.RUN], seen[BlackBoxField.PLACE]) == (run, place())
        ]
    return {seen.process: seen for seen in found}


def run_of(parent: int, environment: Mapping[str, str] = os.environ) -> int:
    """A number for the run whose processes on this machine somebody has started."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return crc32(" ".join([str(parent), *(environment.get(n, "") for n in names)]).encode())


def place() -> int:
    """A number for those who see each other's process numbers: this boot, and their name space."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return crc32(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode())
    except OSError:
        return 0


def state_of(pid: int, born: int) -> State:
    """How the system sees a process."""
    fields = _stat(pid)
    if fields is None:
        return "gone" if Path("/proc/self/stat").exists() else "unknown"
    if fields[0] in "ZX" or (born and int(fields[19]) != born):
        return "gone"
    return "stopped" if fields[0] in "Tt" else "runs"


def _born(pid: int) -> int:
    fields = _stat(pid)
    return 0 if fields is None else int(fields[19])


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
