"""The watchdog: a thread that detects a hang from the black boxes of all processes.

The watchdog runs ten times per second. It also runs immediately when another process on this
machine exits, or when this process receives SIGTERM. If a step makes no progress, the watchdog
reads the black boxes to find the process that is the cause.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from tempfile import TemporaryFile
from threading import Thread, current_thread, main_thread
from time import monotonic, monotonic_ns
from types import FrameType
from typing import Any, Final, NamedTuple

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
from schedir.training.processes.graceful_stop import TERMINATED_EXIT_CODE, GracefulStop
from schedir.training.processes.process_exit import (
    RunMember,
    exit_with_cause,
    exit_with_error,
    is_launched,
    stop_waiting,
)

GPU_ANSWER_TIMEOUT: Final = 1.0  # Seconds to wait for the progress of a GPU.
POLL_INTERVAL: Final = 0.1  # Seconds between two rounds of the watchdog.
# Seconds between two checks for stopped processes during a long save.
SAVE_CHECK_INTERVAL: Final = 1.0
# Two SIGTERMs within this many seconds count as one, because a batch system and torchrun each send
# one.
SAME_SIGNAL_SECONDS: Final = 2.0
QUIET_SECONDS: Final = 0.3  # Seconds without progress before the position in the code is recorded.

_SCHEDIR_PATH: Final = str(__file__).rpartition("training")[0]
_TORCH_PATH: Final = str(torch.__file__).rpartition("__init__")[0]
_POSITION_PATTERN: Final = re.compile(r'File "(.*)", line (\d+) in (.*)')
_WAIT_PATTERN: Final = re.compile(
    r"\bwait\(|_take\(|\brecv\(|accept\(|barrier\(|all_reduce\(|all_gather|\.result\(\)|_take\("
)


class Watchdog:
    """The thread that monitors this process and its peers.

    After SIGTERM, a process usually exits immediately. If the process has a `graceful_stop` and
    runs steps, it first completes a step and saves a checkpoint. After a second SIGTERM, such a
    process exits immediately, too.

    Args:
        member: This process.
        timeout: The seconds without progress within a step after which the run fails.
        graceful_stop: Ends the run after the same step on all processes. None if the run writes no
            checkpoints.
        grace: The seconds within which the run must save a checkpoint after SIGTERM.
    """

    def __init__(
        self,
        member: RunMember,
        timeout: float,
        graceful_stop: GracefulStop | None = None,
        grace: float = 0.0,
    ) -> None:
        self.member = member
        self.timeout = timeout
        self.graceful_stop = graceful_stop
        self.grace = grace
        self.box_values = member.black_box.values
        self.executor: Executor | None = None
        self.gpu: _Device | None = None
        self.peer_pidfds: dict[int, int] = {}  # pidfd -> the number of the process
        self.exit_thread: Thread | None = None
        self.last_save_check = 0  # The time of CLOCK_MONOTONIC, in nanoseconds.
        self.is_stopped = False
        self.signal_pipe, tell = os.pipe()
        os.set_blocking(tell, False)
        self.previous_handlers: tuple[int, Any] | None = None  # `__exit__` restores them.
        if is_rank_main_thread() or (
            graceful_stop is not None and current_thread() is main_thread()
        ):
            previous_fd = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
            self.previous_handlers = previous_fd, signal.signal(signal.SIGTERM, _ignore_signal)
        self.thread = Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        # If a launcher started this process, the watchdog must run until the process exits.
        self.is_stopped = not is_rank_main_thread()
        if self.is_stopped and self.previous_handlers is not None:
            signal.set_wakeup_fd(self.previous_handlers[0])
            signal.signal(signal.SIGTERM, self.previous_handlers[1])

    @contextmanager
    def watch(self, executor: Executor) -> Iterator[None]:
        """Monitor the steps of an executor while the context is active.

        If no step makes progress for `timeout` seconds, the process reports the cause and exits.

        Args:
            executor: The executor of this rank.
        """
        executor.runner.progress = self.box_values
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
        last_progress: object = None
        progress_time = note_time = monotonic_ns()
        last_note, has_missing_peers = 0, True
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
                    f"received SIGTERM, and has not saved a checkpoint in {self.grace:g} s, "
                    f"{self.member.describe_position()}",
                    TERMINATED_EXIT_CODE,
                )
            if has_missing_peers:
                has_missing_peers = self._register_peers(poll)
            progress = self._get_progress()
            if progress != last_progress:
                last_progress, progress_time = progress, now
                if last_note:
                    self.member.black_box.write_note("")
                last_note = 0
                self.box_values[BlackBoxField.IS_WAITING] = self.member.has_lost_peers
            elif now - progress_time > QUIET_SECONDS * 1e9:
                before, last_note = last_note, self._note_location(last_note)
                note_time = now if last_note != before else note_time
            if self.box_values[BlackBoxField.PHASE] == ProcessPhase.SAVE:
                stalled_for = 0  # A save may take any time.
                if (
                    now - progress_time > self.timeout * 1e9
                    and now - self.last_save_check > SAVE_CHECK_INTERVAL * 1e9
                ):
                    self.last_save_check = now
                    self._handle_stall(is_saving=True)
            elif progress[0]:  # `watch` may have changed `self.executor` meanwhile.
                stalled_for = now - progress_time
            else:  # In set-up, only a process that waits for others counts as stalled.
                is_waiting_in_set_up = (
                    self.box_values[BlackBoxField.IS_WAITING]
                    and self.box_values[BlackBoxField.PHASE] < ProcessPhase.DATA_WAIT
                )
                stalled_for = now - note_time if is_waiting_in_set_up else 0
            if stalled_for > self.timeout * 1e9 and not self._is_exiting():
                self._handle_stall()

    def _get_progress(self) -> tuple[object, ...]:
        """Return whether steps are watched, and values that change with progress."""
        values = self.box_values
        if self.gpu is not None:
            self.gpu.write_progress(values)
        # The begin of `watch` counts as progress, so the timeout does not include the set-up.
        watched = self.executor is not None
        lanes = [*values[FIRST_LANE_FIELD : FIRST_LANE_FIELD + len(Lane)]]
        return (
            watched,
            values[BlackBoxField.PHASE_COUNT],
            values[POSITION_FIELD],
            values[POSITION_TIME_FIELD],
            lanes,
        )

    def _register_peers(self, poll: select.poll) -> bool:
        """Monitor the exit of peers on this machine, and return whether peers are missing."""
        if not hasattr(os, "pidfd_open"):
            return False
        for process, snapshot in self.member.collect_black_boxes().items():
            if process in self.peer_pidfds.values() or process == self.member.process:
                continue
            try:
                descriptor = os.pidfd_open(snapshot[BlackBoxField.PID])
            except OSError:  # The process has exited.
                continue
            self.peer_pidfds[descriptor] = process
            poll.register(descriptor, select.POLLIN)
        return (
            len(self.peer_pidfds) < self.member.world_size - 1
            and self.box_values[BlackBoxField.PHASE] < ProcessPhase.DATA_WAIT
        )

    def _handle_peer_exit(self, process: int) -> None:
        """Report the death of a peer on this machine, if there is no launcher that reports it."""
        if is_launched():  # `launch` reports it, with the exit code.
            return
        standstill = self.member.inspect_stall()
        snapshot = standstill.snapshots.get(process)
        if snapshot is not None and snapshot.is_dead:
            cause = standstill.find_cause()
            if cause is not None and cause.kind is StallKind.DIED:
                self._start_exit(cause)

    def _handle_termination(self) -> None:
        """Handle SIGTERM: request a stop after a saved step, or exit immediately.

        When a process fails, torchrun sends SIGTERM to the other processes, and prints only the
        number of the failed process. So this method reports the failure before the exit.
        """
        code, standstill = TERMINATED_EXIT_CODE, self.member.inspect_stall()
        cause = standstill.find_cause()
        failed = cause is not None and cause.kind in (
            StallKind.DIED,
            StallKind.FAILED,
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
        if self._is_exiting():  # The exit thread no longer waits, and ends this process.
            return
        reason = f"received SIGTERM, {standstill.describe_location(self.member.process)}"
        if cause is not None and cause.kind is StallKind.DIED:
            exit_with_cause(self.member, cause)
        if cause is not None and cause.kind is StallKind.MISSING:
            fact = f"{cause.fact}; {self.member.name} {reason}"
            exit_with_cause(self.member, cause._replace(fact=fact), code)
        exit_with_error(
            None if cause is not None and cause.kind is StallKind.FAILED else reason, code
        )

    def _handle_stall(self, is_saving: bool = False) -> None:
        """Report the process for which this process waits, and exit.

        During a save, only a process that was stopped for the complete timeout is reported.
        """
        executor, device, stalled_run = self.executor, self.gpu, self.member.inspect_stall()
        name = "" if executor is None else f"{executor.program.name}: "
        fact = f"{name}no process has made progress for {self.timeout:g} s"
        cause = stalled_run.find_cause(fact)
        if is_saving and cause is not None:
            stopped = cause.kind is StallKind.STOPPED
            cause = (
                cause
                if stopped and stalled_run.snapshots[cause.process].heartbeat_age > self.timeout
                else None
            )
        elif executor is not None and not is_saving:
            if cause is not None and stalled_run.is_slow(cause.process):
                cause = stalled_run.find_cause(
                    f"{name}{self.member.name} has waited for {self.timeout:g} s"
                )
            step = self.box_values[BlackBoxField.STEP]
            gpu_step = None if device is None else device.last_step
            progress = None if device is None else device.progress
            stall_error = make_stall_error(fact, executor, step, progress, gpu_step)
            if cause is None:
                exit_with_error(str(stall_error))
            if gpu_step is not None:  # Add the instructions that run on this GPU.
                cause = cause._replace(
                    lines=(*cause.lines, "on its GPU:", *stall_error.format_lines())
                )
        if cause is not None:
            self._start_exit(cause)

    def _start_exit(self, cause: StallCause) -> None:
        """Report the cause and exit in another thread. This thread must still handle SIGTERM."""
        if not self._is_exiting():
            self.exit_thread = Thread(
                target=exit_with_cause, args=(self.member, cause), daemon=True
            )
            self.exit_thread.start()

    def _is_exiting(self) -> bool:
        return self.exit_thread is not None and self.exit_thread.is_alive()

    def _note_location(self, last_note: int) -> int:
        """Record the position of the main thread in user code, and whether it waits for others.

        Returns a number that identifies the current position in the code.
        """
        positions = read_stack(main_thread().ident or 0)
        if not positions or self.member.has_lost_peers:
            return last_note
        key = hash(positions) | 1
        if key != last_note:
            self.box_values[BlackBoxField.IS_WAITING] = is_waiting(positions[0])
            self.member.black_box.write_note(find_user_location(positions))
        return key


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """Do nothing: the watchdog reads the signal from its pipe."""


def _mask_sigterm(mask_action: int) -> None:
    """Block or unblock SIGTERM around a fork in user code, if the watchdog handles SIGTERM."""
    if signal.getsignal(signal.SIGTERM) is _ignore_signal:
        signal.pthread_sigmask(mask_action, [signal.SIGTERM])


def _reset_signals_in_child() -> None:
    """Reset SIGTERM in a forked child, which must not write to the pipe of its parent."""
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
    """Return whether this is the main thread of a rank that a launcher started."""
    return "RANK" in os.environ and current_thread() is main_thread()


class CodePosition(NamedTuple):
    """A position in the code that a thread executes.

    Args:
        file: The path of the file.
        line: The number of the line.
        function: The name of the function.
    """

    file: str
    line: int
    function: str


def read_stack(thread: int) -> tuple[CodePosition, ...]:
    """Return the positions of the innermost 100 calls of a thread, the innermost one first.

    The thread may run meanwhile, so this function does not use `sys._current_frames`. In Python
    3.11, `f_back` of a frame of a running thread once returned an object that was no frame.
    faulthandler writes all positions before the thread can run again.

    Args:
        thread: The `ident` of the thread.

    Returns:
        The positions. () if the thread does not exist, or no temporary file can be written.
    """
    try:
        with TemporaryFile("w+", errors="replace") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            text = file.read()
    except OSError:
        return ()
    found = re.search(rf"^(?:Current t|T)hread 0x0*{thread:x}\b.*\n((?:  .*\n)*)", text, re.M)
    lines = _POSITION_PATTERN.findall(found[1]) if found else ()
    return tuple(CodePosition(file, int(line), function) for file, line, function in lines)


def is_waiting(position: CodePosition) -> bool:
    """Return whether a thread waits in a collective or for a message.

    Args:
        position: The innermost position of the thread.
    """
    if f"{_TORCH_PATH}distributed" in position.file:
        return True
    line = linecache.getline(position.file, position.line)
    return position.file.startswith(_SCHEDIR_PATH) and _WAIT_PATTERN.search(line) is not None


def find_user_location(positions: Sequence[CodePosition]) -> str:
    """Return the innermost position of a thread in user code, outside of libraries.

    Args:
        positions: The positions of the thread, the innermost one first.

    Returns:
        A text such as "train.py:12 in main". "" if there is no user code.
    """
    for file, line, function in positions:
        library = file.startswith((_SCHEDIR_PATH, _TORCH_PATH, sys.prefix, sys.base_prefix, "<"))
        if not library and "/lib/python" not in file:
            return f"{os.path.basename(file)}:{line} in {function}"
    return ""


def make_stall_error(
    fact: str,
    executor: Executor,
    step: int,
    progress: GpuProgress | None,
    gpu_step: StepProgress | None,
) -> ExecutionError:
    """Return the error of a run without progress in a step.

    With a GPU, the first site of the error is the first instruction that has not ended although all
    its inputs from this rank are ready. The other sites are instructions that run on other lanes.
    Without a GPU, the site is the position of the host.

    Args:
        fact: The reason, for the message.
        executor: The executor of this rank.
        step: The step that the host executes, from 1.
        progress: The progress of the GPU. None on CPUs.
        gpu_step: The last progress that the GPU reported. None on CPUs.
    """
    runner = executor.current_runner
    stream, program, notes = runner.state.stream, runner.program, dict[int, str]()
    gpu_step = gpu_step if runner is executor.runner else None
    if progress is not None and gpu_step is not None:
        notes = {
            k: f"in step {gpu_step.step}, {describe_wait(program, stream[k])}"
            for k in progress.find_running(gpu_step)
        }
    notes = notes or {runner.position: f"in step {step}"}
    sites = [InstructionSite(executor.rank, k, stream[k], note) for k, note in notes.items()]
    return ExecutionError(fact, program=program.name, sites=sites)


class _Device:
    """The progress of a GPU.

    A separate thread queries the GPU, because a query may block while the host waits in the driver,
    for example for memory.
    """

    def __init__(self, progress: GpuProgress, device: torch.device) -> None:
        self.progress = progress
        self.device = device
        self.query_thread: Thread | None = None
        self.last_step: StepProgress | None = None

    def query_step(self) -> StepProgress | None:
        """Query the GPU, and return its last answer."""
        if self.query_thread is None or not self.query_thread.is_alive():
            self.query_thread = Thread(target=self._query, daemon=True)
            self.query_thread.start()
        self.query_thread.join(GPU_ANSWER_TIMEOUT)
        return self.last_step

    def _query(self) -> None:
        with suppress(RuntimeError):  # If the GPU has failed, the host receives the error, too.
            torch.cuda.set_device(self.device)
            self.last_step = self.progress.get_progress()

    def write_progress(self, values: memoryview[int]) -> None:
        """Write the last answer of the GPU into the black box of the process."""
        gpu_step, stream = self.query_step(), self.progress.executor.state.stream
        for lane in Lane:
            unfinished = () if gpu_step is None else gpu_step.unfinished
            lane_positions = (k for k in unfinished if INSTRUCTIONS[stream[k].op].lane is lane)
            values[FIRST_LANE_FIELD + lane] = next(lane_positions, len(stream))
        values[BlackBoxField.DEVICE_STEP] = 0 if gpu_step is None else gpu_step.step
