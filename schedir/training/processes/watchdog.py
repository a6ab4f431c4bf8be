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
from schedir.io.black_box import (
    FIRST_LANE_FIELD,
    POSITION_FIELD,
    POSITION_TIME_FIELD,
    BlackBoxField,
    ProcessPhase,
)
from schedir.ir.isa.instructions import INSTRUCTIONS, Lane
from schedir.runtime.executor import Executor
from schedir.runtime.recording.gpu_progress import GpuProgress, StepProgress, describe_wait
from schedir.training.processes.graceful_stop import GracefulStop
from schedir.training.processes.process_exit import (
    RunMember,
    exit_with_cause,
    exit_with_error,
    is_launched,
    stop_waiting,
)

GPU_ANSWER_TIMEOUT: Final = 1.0  # seconds in which a GPU tells what has ended
POLL_INTERVAL: Final = 0.1  # seconds
SAVE_CHECK_INTERVAL: Final = (
    1.0  # seconds from one look for who is stopped to the next, in a long save
)
SAME_SIGNAL_SECONDS: Final = (
    2.0  # seconds in which two SIGTERMs are one, of a batch system and of torchrun
)
QUIET_SECONDS: Final = 0.3  # seconds without movement, after which the place in the code is noted

_SCHEDIR_PATH: Final = str(__file__).rpartition("training")[0]
_TORCH_PATH: Final = str(torch.__file__).rpartition("__init__")[0]
_WAIT_PATTERN: Final = re.compile(
    r"\bwait\(|_take\(|\brecv\(|accept\(|barrier\(|all_reduce\(|all_gather|\.result\(\)|_take\("
)


class Watchdog:
    """The thread that watches a process and its peers.

    `timeout` is how many seconds nothing may move within a step.  Told to end (SIGTERM), a process
    does so at once; or, while a run with a `graceful_stop` steps, when it has saved, for which it
    has
    `grace` seconds.  When it is told again, it ends.
    """

    def __init__(
        self,
        member: RunMember,
        timeout: float,
        graceful_stop: GracefulStop | None = None,
        grace: float = 0.0,
    ) -> None:
        self.member, self.timeout, self.graceful_stop, self.grace = (
            member,
            timeout,
            graceful_stop,
            grace,
        )
        self.box_values = member.black_box.values
        self.executor: Executor | None = None
        self.gpu: _Device | None = None
        self.peer_pidfds: dict[int, int] = {}  # pidfds, of which process each is
        self.exit_thread: Thread | None = None
        self.last_save_check = 0  # for processes that are stopped
        self.is_stopped = False
        self.signal_pipe, tell = os.pipe()
        os.set_blocking(tell, False)
        self.previous_handlers: tuple[int, Any] | None = (
            None  # what was there before, to be put back
        )
        if is_rank_main_thread() or (
            graceful_stop is not None and current_thread() is main_thread()
        ):
            before = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
            self.previous_handlers = before, signal.signal(signal.SIGTERM, _ignore_signal)
        self.thread = Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.is_stopped = (
            not is_rank_main_thread()
        )  # of a process of its own it is needed to the end
        if self.is_stopped and self.previous_handlers is not None:
            signal.set_wakeup_fd(self.previous_handlers[0])
            signal.signal(signal.SIGTERM, self.previous_handlers[1])

    @contextmanager
    def watch(self, executor: Executor) -> Iterator[None]:
        """Within this, crash if nothing moves for a while, and say who keeps the others."""
        executor.progress = self.box_values
        self.member.set_program(executor.program)
        if executor.state.device.type == "cuda":
            self.gpu = _Device(GpuProgress(executor), executor.state.device)
        self.executor = executor
        try:
            yield
        finally:
            self.executor = self.gpu = None

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self.signal_pipe, select.POLLIN)
        stood: object = None
        since = noted_since = monotonic_ns()
        noted, unmet = 0, True
        while not self.is_stopped:
            for descriptor, _ in poll.poll(POLL_INTERVAL * 1000):
                if descriptor == self.signal_pipe:
                    for _ in range(os.read(self.signal_pipe, 64).count(signal.SIGTERM)):
                        self._handle_termination()
                    continue
                poll.unregister(descriptor)
                os.close(descriptor)
                self._handle_peer_exit(self.peer_pidfds.pop(descriptor))
            now = monotonic_ns()
            self.box_values[BlackBoxField.HEARTBEAT] = now
            if self.graceful_stop is not None and self.graceful_stop.is_grace_over(self.grace):
                exit_with_error(
                    f"was told to end (SIGTERM), and has not saved in {self.grace:g} s, "
                    f"{self.member.describe_position()}",
                    128 + signal.SIGTERM,
                )
            if unmet:
                unmet = self._register_peers(poll)
            stands = self._get_progress()
            if stands != stood:
                stood, since = stands, now
                if noted:
                    self.member.black_box.write_note("")
                noted = 0
                self.box_values[BlackBoxField.IS_WAITING] = self.member.has_lost_peers
            elif now - since > QUIET_SECONDS * 1e9:
                before, noted = noted, self._note_location(noted)
                noted_since = now if noted != before else noted_since
            if self.box_values[BlackBoxField.PHASE] == ProcessPhase.SAVE:
                stood_for = 0  # it takes what disks take
                if (
                    now - since > self.timeout * 1e9
                    and now - self.last_save_check > SAVE_CHECK_INTERVAL * 1e9
                ):
                    self.last_save_check = now
                    self._handle_stall(is_saving=True)
            elif self.executor is not None:
                stood_for = now - since
            else:  # in set-up, who waits for others may be told, and who is at work not
                sets_up = (
                    self.box_values[BlackBoxField.IS_WAITING]
                    and self.box_values[BlackBoxField.PHASE] < ProcessPhase.DATA_WAIT
                )
                stood_for = now - noted_since if sets_up else 0
            if stood_for > self.timeout * 1e9 and not self._is_exiting():
                self._handle_stall()

    def _get_progress(self) -> object:
        words = self.box_values
        if self.gpu is not None:
            self.gpu.write_progress(words)
        watched = self.executor is not None  # how long it has set up is then no stand
        lanes = [*words[FIRST_LANE_FIELD : FIRST_LANE_FIELD + len(Lane)]]
        return (
            watched,
            words[BlackBoxField.PHASE_COUNT],
            words[POSITION_FIELD],
            words[POSITION_TIME_FIELD],
            lanes,
        )

    def _register_peers(self, poll: select.poll) -> bool:
        """Know when peers of this machine end; whether there are more to come."""
        if not hasattr(os, "pidfd_open"):
            return False
        for process, seen in self.member.collect_black_boxes().items():
            if process in self.peer_pidfds.values() or process == self.member.process:
                continue
            try:
                descriptor = os.pidfd_open(seen[BlackBoxField.PID])
            except OSError:  # it has gone
                continue
            self.peer_pidfds[descriptor] = process
            poll.register(descriptor, select.POLLIN)
        return (
            len(self.peer_pidfds) < self.member.world_size - 1
            and self.box_values[BlackBoxField.PHASE] < ProcessPhase.DATA_WAIT
        )

    def _handle_peer_exit(self, process: int) -> None:
        """A peer has ended: if nobody has said why, and nobody will, say it."""
        if is_launched():  # then `launch` does, who knows how
            return
        standstill = self.member.inspect_stall()
        seen = standstill.snapshots.get(process)
        if seen is not None and seen.is_dead:
            found = standstill.find_cause()
            if found is not None and found.kind is StallKind.DIED:
                self._start_exit(found)

    def _handle_termination(self) -> None:
        """torchrun ends all when one has failed; who that was it says by a number alone."""
        code, standstill = 128 + signal.SIGTERM, self.member.inspect_stall()
        found = standstill.find_cause()
        failed = found is not None and found.kind in (
            StallKind.DIED,
            StallKind.SAID,
            StallKind.MISSING,
        )
        stop = self.graceful_stop if self.executor is not None else None
        if stop is not None and not failed and self.exit_thread is None:
            if stop.signal_time is None:
                stop.request_stop()
                return
            if monotonic() - stop.signal_time < SAME_SIGNAL_SECONDS:
                return
        stop_waiting()
        if self._is_exiting():  # it has waited for that
            return
        why = f"was told to end (SIGTERM), {standstill.describe_location(self.member.process)}"
        if found is not None and found.kind is StallKind.DIED:
            exit_with_cause(self.member, found)
        if found is not None and found.kind is StallKind.MISSING:
            fact = f"{found.fact}; {self.member.name} {why}"
            exit_with_cause(self.member, found._replace(fact=fact), code)
        exit_with_error(None if found is not None and found.kind is StallKind.SAID else why, code)

    def _handle_stall(self, is_saving: bool = False) -> None:
        """Accuse who keeps this process; while it saves, only who was stopped all the time."""
        executor, device, stands = self.executor, self.gpu, self.member.inspect_stall()
        name = "" if executor is None else f"{executor.program.name}: "
        fact = f"{name}nothing has moved for {self.timeout:g} s"
        found = stands.find_cause(fact)
        if is_saving and found is not None:
            stopped = found.kind is StallKind.STOPPED
            found = (
                found
                if stopped and stands.snapshots[found.process].heartbeat_age > self.timeout
                else None
            )
        elif executor is not None and not is_saving:
            if found is not None and stands.is_slow(found.process):
                found = stands.find_cause(
                    f"{name}{self.member.name} has waited for {self.timeout:g} s"
                )
            step, known = (
                self.box_values[BlackBoxField.STEP],
                None if device is None else device.last_step,
            )
            progress = None if device is None else device.progress
            heads = make_stall_error(fact, executor, step, progress, known)
            if found is None:
                exit_with_error(str(heads))
            if known is not None:  # what is under way on this GPU, on all lanes
                found = found._replace(
                    lines=(*found.lines, "on its own GPU:", *heads.format_lines())
                )
        if found is not None:
            self._start_exit(found)

    def _start_exit(self, cause: StallCause) -> None:
        """Accuse, by a thread that may wait: this one is to hear when it is told to end."""
        if not self._is_exiting():
            self.exit_thread = Thread(
                target=exit_with_cause, args=(self.member, cause), daemon=True
            )
            self.exit_thread.start()

    def _is_exiting(self) -> bool:
        return self.exit_thread is not None and self.exit_thread.is_alive()

    def _note_location(self, noted: int) -> int:
        """Note where the main thread stands in the code, and whether it waits for others there."""
        frame = sys._current_frames().get(main_thread().ident or 0)
        if frame is None or self.member.has_lost_peers:
            return noted
        key = id(frame) ^ frame.f_lasti << 1 | 1
        if key != noted:
            self.box_values[BlackBoxField.IS_WAITING] = is_waiting(frame)
            self.member.black_box.write_note(find_user_location(frame))
        return key


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """The watchdog reads of a signal from its pipe."""


def _mask_sigterm(mask_action: int) -> None:
    """Hold SIGTERM back while a person's code forks, or hold it no more."""
    if signal.getsignal(signal.SIGTERM) is _ignore_signal:
        signal.pthread_sigmask(mask_action, [signal.SIGTERM])


def _reset_signals_in_child() -> None:
    """A child that a person's code has forked has the pipe, too: what ends the child is not said
    there."""
    if signal.getsignal(signal.SIGTERM) is _ignore_signal:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


os.register_at_fork(
    before=partial(_mask_sigterm, signal.SIG_BLOCK),
    after_in_parent=partial(_mask_sigterm, signal.SIG_UNBLOCK),
    after_in_child=_reset_signals_in_child,
)


def is_rank_main_thread() -> bool:
    """Whether this is a process that somebody has started as one of several, in its main thread."""
    return "RANK" in os.environ and current_thread() is main_thread()


def is_waiting(frame: FrameType) -> bool:
    """Whether a thread stands in a collective, or at a message."""
    file = frame.f_code.co_filename
    if f"{_TORCH_PATH}distributed" in file:
        return True
    line = linecache.getline(file, frame.f_lineno or 0)
    return file.startswith(_SCHEDIR_PATH) and _WAIT_PATTERN.search(line) is not None


def find_user_location(frame: FrameType | None) -> str:
    """The innermost place of a thread that is in nobody's library but a person's own code; ""
    where there is none."""
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        library = file.startswith((_SCHEDIR_PATH, _TORCH_PATH, sys.prefix, sys.base_prefix, "<"))
        if not library and "/lib/python" not in file:
            return f"{os.path.basename(file)}:{frame.f_lineno or 0} in {code.co_name}"
        frame = frame.f_back
    return ""


def make_stall_error(
    fact: str,
    executor: Executor,
    step: int,
    progress: GpuProgress | None,
    gpu_step: StepProgress | None,
) -> ExecutionError:
    """The error of a run that stands in a step (from 1), for the reason that `fact` says.

    Of a GPU, as it is `gpu_step`, the first site is the first instruction of the Stream that has
    not ended though all that it needs of its own rank has; those follow that are under way beside
    it, on other lanes.  Else the site is where the host is.
    """
    now = executor.current_runner
    stream, program, notes = now.state.stream, now.program, dict[int, str]()
    gpu_step = gpu_step if now is executor else None
    if progress is not None and gpu_step is not None:
        notes = {
            k: f"in step {gpu_step.step}, {describe_wait(program, stream[k])}"
            for k in progress.find_running(gpu_step)
        }
    notes = notes or {now.position: f"in step {step}"}
    sites = [InstructionSite(executor.rank, k, stream[k], note) for k, note in notes.items()]
    return ExecutionError(fact, program=program.name, sites=sites)


class _Device:
    """A GPU's progress, asked by a thread that may get no answer: while the host waits in the
    driver, as for memory, the driver may answer nobody."""

    def __init__(self, progress: GpuProgress, device: torch.device) -> None:
        self.progress, self.device = progress, device
        self.query_thread: Thread | None = None
        self.last_step: StepProgress | None = None

    def query_step(self) -> StepProgress | None:
        """As the GPU has last answered."""
        if self.query_thread is None or not self.query_thread.is_alive():
            self.query_thread = Thread(target=self._query, daemon=True)
            self.query_thread.start()
        self.query_thread.join(GPU_ANSWER_TIMEOUT)
        return self.last_step

    def _query(self) -> None:
        with suppress(RuntimeError):  # of a GPU that has failed, whose error the host will meet
            torch.cuda.set_device(self.device)
            self.last_step = self.progress.get_progress()

    def write_progress(self, values: memoryview[int]) -> None:
        """Note in the box of the process how far it is, as it has last answered."""
        known, stream = self.query_step(), self.progress.executor.state.stream
        for lane in Lane:
            opens = () if known is None else known.unfinished
            mine = (k for k in opens if INSTRUCTIONS[stream[k].op].lane is lane)
            values[FIRST_LANE_FIELD + lane] = next(mine, len(stream))
        values[BlackBoxField.DEVICE_STEP] = 0 if known is None else known.step
