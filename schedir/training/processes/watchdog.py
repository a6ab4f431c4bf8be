"""Watchdog: a thread that detects a hang from the black boxes of all processes.

It is awake ten times in a second, and at once when a process of its machine ends or this one is
told to end.  Where nothing moves in the steps of a run, the boxes say who keeps it.
"""

from __future__ import annotations

import linecache
import os
import re
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Thread, current_thread, main_thread
from time import monotonic, monotonic_ns
from types import FrameType
from typing import Any, Final

import torch

from schedir.errors import ExecutionError, InstructionSite
from schedir.hang_diagnosis.stall_cause import StallCause, StallKind
from schedir.io.black_box import AT, LANES, SINCE, BlackBoxField, ProcessPhase
from schedir.ir.isa.instructions import ROWS, Lane
from schedir.runtime.executor import Executor
from schedir.runtime.recording.gpu_progress import GpuProgress, StepProgress, waits_for
from schedir.training.processes.graceful_stop import GracefulStop
from schedir.training.processes.process_exit import (
    RunMember,
    accuse,
    crash,
    is_launched,
    told_to_end,
)

ANSWER: Final = 1.0  # seconds in which a GPU tells what has ended
TICK: Final = 0.1  # seconds
LOOK: Final = 1.0  # seconds from one look for who is stopped to the next, in a long save
SAME: Final = 2.0  # seconds in which two SIGTERMs are one, of a batch system and of torchrun
QUIET: Final = 0.3  # seconds without movement, after which the place in the code is noted

_OURS: Final = str(__file__).rpartition("training")[0]
_TORCHS: Final = str(torch.__file__).rpartition("__init__")[0]
_WAITING: Final = re.compile(
    r"\bwait\(|_take\(|\brecv\(|accept\(|barrier\(|all_reduce\(|all_gather|\.result\(\)|_take\("
)


class Watchdog:
    """The thread that watches a process and its peers.

    `most` is how many seconds nothing may move within a step.  Told to end (SIGTERM), a process
    does so at once; or, while a run with a `stop` steps, when it has saved, for which it has
    `grace` seconds.  When it is told again, it ends.
    """

    def __init__(
        self, own: RunMember, most: float, stop: GracefulStop | None = None, grace: float = 0.0
    ) -> None:
        self.own, self.most, self.stop, self.grace = own, most, stop, grace
        self.words = own.box.words
        self.executor: Executor | None = None
        self.device: _Device | None = None
        self.peers: dict[int, int] = {}  # pidfds, of which process each is
        self.accuser: Thread | None = None
        self.looked = 0  # for processes that are stopped
        self.over = False
        self.told, tell = os.pipe()
        os.set_blocking(tell, False)
        self.had: tuple[int, Any] | None = None  # what was there before, to be put back
        if is_main_of_its_own() or (stop is not None and current_thread() is main_thread()):
            before = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
            self.had = before, signal.signal(signal.SIGTERM, _only_tell)
        self.thread = Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over = not is_main_of_its_own()  # of a process of its own it is needed to the end
        if self.over and self.had is not None:
            signal.set_wakeup_fd(self.had[0])
            signal.signal(signal.SIGTERM, self.had[1])

    @contextmanager
    def watching(self, executor: Executor) -> Iterator[None]:
        """Within this, crash if nothing moves for a while, and say who keeps the others."""
        executor.at = self.words
        self.own.runs(executor.program)
        if executor.state.device.type == "cuda":
            self.device = _Device(GpuProgress(executor), executor.state.device)
        self.executor = executor
        try:
            yield
        finally:
            self.executor = self.device = None

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self.told, select.POLLIN)
        stood: object = None
        since = noted_since = monotonic_ns()
        noted, unmet = 0, True
        while not self.over:
            for descriptor, _ in poll.poll(TICK * 1000):
                if descriptor == self.told:
                    for _ in range(os.read(self.told, 64).count(signal.SIGTERM)):
                        self._told_to_end()
                    continue
                poll.unregister(descriptor)
                os.close(descriptor)
                self._has_ended(self.peers.pop(descriptor))
            now = monotonic_ns()
            self.words[BlackBoxField.BEAT] = now
            if self.stop is not None and self.stop.is_late(self.grace):
                crash(
                    f"was told to end (SIGTERM), and has not saved in {self.grace:g} s, "
                    f"{self.own.where()}",
                    128 + signal.SIGTERM,
                )
            if unmet:
                unmet = self._meet(poll)
            stands = self._stands()
            if stands != stood:
                stood, since = stands, now
                if noted:
                    self.own.box.note("")
                noted = 0
                self.words[BlackBoxField.WAITS] = self.own.late
            elif now - since > QUIET * 1e9:
                before, noted = noted, self._note(noted)
                noted_since = now if noted != before else noted_since
            if self.words[BlackBoxField.PHASE] == ProcessPhase.SAVE:
                stood_for = 0  # it takes what disks take
                if now - since > self.most * 1e9 and now - self.looked > LOOK * 1e9:
                    self.looked = now
                    self._stalled(saves=True)
            elif self.executor is not None:
                stood_for = now - since
            else:  # in set-up, who waits for others may be told, and who is at work not
                sets_up = (
                    self.words[BlackBoxField.WAITS]
                    and self.words[BlackBoxField.PHASE] < ProcessPhase.DATA
                )
                stood_for = now - noted_since if sets_up else 0
            if stood_for > self.most * 1e9 and not self._accuses():
                self._stalled()

    def _stands(self) -> object:
        words = self.words
        if self.device is not None:
            self.device.note(words)
        watched = self.executor is not None  # how long it has set up is then no stand
        lanes = [*words[LANES : LANES + len(Lane)]]
        return watched, words[BlackBoxField.TURN], words[AT], words[SINCE], lanes

    def _meet(self, poll: select.poll) -> bool:
        """Know when peers of this machine end; whether there are more to come."""
        if not hasattr(os, "pidfd_open"):
            return False
        for process, seen in self.own.seen().items():
            if process in self.peers.values() or process == self.own.process:
                continue
            try:
                descriptor = os.pidfd_open(seen[BlackBoxField.PID])
            except OSError:  # it has gone
                continue
            self.peers[descriptor] = process
            poll.register(descriptor, select.POLLIN)
        return (
            len(self.peers) < self.own.world - 1
            and self.words[BlackBoxField.PHASE] < ProcessPhase.DATA
        )

    def _has_ended(self, process: int) -> None:
        """A peer has ended: if nobody has said why, and nobody will, say it."""
        if is_launched():  # then `launch` does, who knows how
            return
        standstill = self.own.standstill()
        seen = standstill.seen.get(process)
        if seen is not None and seen.is_dead:
            found = standstill.blame()
            if found is not None and found.kind is StallKind.DIED:
                self._accuse(found)

    def _told_to_end(self) -> None:
        """torchrun ends all when one has failed; who that was it says by a number alone."""
        code, standstill = 128 + signal.SIGTERM, self.own.standstill()
        found = standstill.blame()
        failed = found is not None and found.kind in (
            StallKind.DIED,
            StallKind.SAID,
            StallKind.MISSING,
        )
        stop = self.stop if self.executor is not None else None
        if stop is not None and not failed and self.accuser is None:
            if stop.since is None:
                stop.tell()
                return
            if monotonic() - stop.since < SAME:
                return
        told_to_end()
        if self._accuses():  # it has waited for that
            return
        why = f"was told to end (SIGTERM), {standstill.where(self.own.process)}"
        if found is not None and found.kind is StallKind.DIED:
            accuse(self.own, found)
        if found is not None and found.kind is StallKind.MISSING:
            fact = f"{found.fact}; {self.own.name} {why}"
            accuse(self.own, found._replace(fact=fact), code)
        crash(None if found is not None and found.kind is StallKind.SAID else why, code)

    def _stalled(self, saves: bool = False) -> None:
        """Accuse who keeps this process; while it saves, only who was stopped all the time."""
        executor, device, stands = self.executor, self.device, self.own.standstill()
        name = "" if executor is None else f"{executor.program.name}: "
        fact = f"{name}nothing has moved for {self.most:g} s"
        found = stands.blame(fact)
        if saves and found is not None:
            stopped = found.kind is StallKind.STOPPED
            found = found if stopped and stands.seen[found.process].silent > self.most else None
        elif executor is not None and not saves:
            if found is not None and stands.moves(found.process):
                found = stands.blame(f"{name}{self.own.name} has waited for {self.most:g} s")
            step, known = self.words[BlackBoxField.STEP], None if device is None else device.known
            progress = None if device is None else device.progress
            heads = standstill(fact, executor, step, progress, known)
            if found is None:
                crash(str(heads))
            if known is not None:  # what is under way on this GPU, on all lanes
                found = found._replace(lines=(*found.lines, "on its own GPU:", *heads.lines()))
        if found is not None:
            self._accuse(found)

    def _accuse(self, found: StallCause) -> None:
        """Accuse, by a thread that may wait: this one is to hear when it is told to end."""
        if not self._accuses():
            self.accuser = Thread(target=accuse, args=(self.own, found), daemon=True)
            self.accuser.start()

    def _accuses(self) -> bool:
        return self.accuser is not None and self.accuser.is_alive()

    def _note(self, noted: int) -> int:
        """Note where the main thread stands in the code, and whether it waits for others there."""
        frame = sys._current_frames().get(main_thread().ident or 0)
        if frame is None or self.own.late:
            return noted
        key = id(frame) ^ frame.f_lasti << 1 | 1
        if key != noted:
            self.words[BlackBoxField.WAITS] = waits(frame)
            self.own.box.note(place_of(frame))
        return key


def _only_tell(number: int, frame: FrameType | None) -> None:
    """The watchdog reads of a signal from its pipe."""


def _hold(how: int) -> None:
    """Hold SIGTERM back while a person's code forks, or hold it no more."""
    if signal.getsignal(signal.SIGTERM) is _only_tell:
        signal.pthread_sigmask(how, [signal.SIGTERM])


def _let_go() -> None:
    """A child that a person's code has forked has the pipe, too: what ends the child is not said
    there."""
    if signal.getsignal(signal.SIGTERM) is _only_tell:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


os.register_at_fork(
    before=partial(_hold, signal.SIG_BLOCK),
    after_in_parent=partial(_hold, signal.SIG_UNBLOCK),
    after_in_child=_let_go,
)


def is_main_of_its_own() -> bool:
    """Whether this is a process that somebody has started as one of several, in its main thread."""
    return "RANK" in os.environ and current_thread() is main_thread()


def waits(frame: FrameType) -> bool:
    """Whether a thread stands in a collective, or at a message."""
    file = frame.f_code.co_filename
    if f"{_TORCHS}distributed" in file:
        return True
    line = linecache.getline(file, frame.f_lineno or 0)
    return file.startswith(_OURS) and _WAITING.search(line) is not None


def place_of(frame: FrameType | None) -> str:
    """The innermost place of a thread that is in nobody's library but a person's own code; ""
    where there is none."""
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        library = file.startswith((_OURS, _TORCHS, sys.prefix, sys.base_prefix, "<"))
        if not library and "/lib/python" not in file:
            return f"{os.path.basename(file)}:{frame.f_lineno or 0} in {code.co_name}"
        frame = frame.f_back
    return ""


def standstill(
    fact: str,
    executor: Executor,
    step: int,
    progress: GpuProgress | None,
    standing: StepProgress | None,
) -> ExecutionError:
    """The error of a run that stands in a step (from 1), for the reason that `fact` says.

    Of a GPU, as it is `standing`, the first site is the first instruction of the Stream that has
    not ended though all that it needs of its own rank has; those follow that are under way beside
    it, on other lanes.  Else the site is where the host is.
    """
    now = executor.now
    stream, program, notes = now.state.stream, now.program, dict[int, str]()
    standing = standing if now is executor else None
    if progress is not None and standing is not None:
        notes = {
            k: f"in step {standing.step}, {waits_for(program, stream[k])}"
            for k in progress.heads(standing)
        }
    notes = notes or {now.position: f"in step {step}"}
    sites = [InstructionSite(executor.rank, k, stream[k], note) for k, note in notes.items()]
    return ExecutionError(fact, program=program.name, sites=sites)


class _Device:
    """A GPU's progress, asked by a thread that may get no answer: while the host waits in the
    driver, as for memory, the driver may answer nobody."""

    def __init__(self, progress: GpuProgress, device: torch.device) -> None:
        self.progress, self.device = progress, device
        self.asking: Thread | None = None
        self.known: StepProgress | None = None

    def standing(self) -> StepProgress | None:
        """As the GPU has last answered."""
        if self.asking is None or not self.asking.is_alive():
            self.asking = Thread(target=self._ask, daemon=True)
            self.asking.start()
        self.asking.join(ANSWER)
        return self.known

    def _ask(self) -> None:
        with suppress(RuntimeError):  # of a GPU that has failed, whose error the host will meet
            torch.cuda.set_device(self.device)
            self.known = self.progress.standing()

    def note(self, words: memoryview[int]) -> None:
        """Note in the box of the process how far it is, as it has last answered."""
        known, stream = self.standing(), self.progress.executor.state.stream
        for lane in Lane:
            opens = () if known is None else known.open
            mine = (k for k in opens if ROWS[stream[k].op].lane is lane)
            words[LANES + lane] = next(mine, len(stream))
        words[BlackBoxField.DEVICE] = 0 if known is None else known.step
