"""End a process of a run, and report once why the run ended.

A process that fails writes the reason into its black box. If another process is the cause, the
black boxes of all processes show which process it is (`hang_diagnosis/stall_cause.py`). Under
`launch`, only the launcher prints the reason. Otherwise, only the first failed process of each
torchrun agent prints the reason. The rendezvous store decides which process is the first.

A process that is stopped or busy can block all other processes. The process that reports the
blocking process also kills it, if both are on one machine. So the launcher or torchrun receives the
exit of the blocking process first.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, Thread, current_thread, main_thread
from types import FrameType
from typing import Any, Final, NoReturn

from schedir.hang_diagnosis.stall_cause import ProcessLayout, StallCause, StalledRun, StallKind
from schedir.io.black_box import (
    BLACK_BOX_DIRECTORY,
    PROGRAM_FILE,
    BlackBox,
    BlackBoxField,
    BlackBoxSnapshot,
    compute_run_id,
    read_black_boxes,
)
from schedir.ir.program import Program
from schedir.training.processes.rendezvous_store import connect_store

EXIT_TIMEOUT: Final = 1.0  # Seconds within which a process exits after its connections close.
# After the first failure, other failed processes wait this many seconds before they exit. So the
# first failed process exits first.
EXIT_GRACE: Final = 5.0
LAUNCHER_PID_VARIABLE: Final = "SCHEDIR_LAUNCHED"  # Its value is the process id of `launch`.
_PR_SET_PDEATHSIG: Final = 1  # From linux/prctl.h.


class RunMember:
    """This process as a member of its run, with access to the black boxes of the run.

    Args:
        output_dir: The output directory of the run.
        layout: The numbers of ranks, tensor-parallel ranks and replicas.
        process: The global rank of this process.

    Attributes:
        black_box: The black box of this process.
        program: The program of the run. None during the set-up.
        has_lost_peers: True if this process failed because other processes exited or did not
            arrive. The position in the black box of this process is then out of date.
        known_processes: The processes whose black boxes were read.
        is_single_machine: True if all processes run on this machine.
    """

    def __init__(self, output_dir: str | Path, layout: ProcessLayout, process: int) -> None:
        self.directory = Path(output_dir, BLACK_BOX_DIRECTORY)
        self.layout = layout
        self.process = process
        self.world_size = layout.ranks * layout.tp * layout.dp
        path, tp, dp = self.directory / str(process), layout.tp, layout.dp
        self.black_box = BlackBox(path, process=process, world=self.world_size, tp=tp, dp=dp)
        self.program: Program | None = None
        self.has_lost_peers = False
        self.known_processes: set[int] = set()
        self.run_id = compute_run_id(os.getppid())
        local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
        self.is_single_machine = is_launched() or local_world_size == str(self.world_size)

    @property
    def name(self) -> str:
        """Return the name of this process in messages."""
        return self.layout.name_process(self.process)

    @property
    def is_current_process(self) -> bool:
        """Return whether this process joined the run, and is not a fork of the process that did."""
        return self.black_box.values[BlackBoxField.PID] == os.getpid()

    def set_program(self, program: Program) -> None:
        """Set the program, and write the program to the directory for readers of the black boxes.

        Args:
            program: The program of the run.
        """
        from schedir.ir.text_format import to_text

        self.program = program
        if os.environ.get("LOCAL_RANK", "0") == "0":
            with suppress(OSError):
                (self.directory / PROGRAM_FILE).write_text(to_text(program))

    def collect_black_boxes(self) -> dict[int, BlackBoxSnapshot]:
        """Return the black boxes on this machine, by process."""
        black_boxes = read_black_boxes(self.directory, self.run_id)
        self.known_processes |= black_boxes.keys()
        return black_boxes

    def inspect_stall(self) -> StalledRun:
        """Return the state of the processes on all machines: which process waits for which."""
        black_boxes = self.collect_black_boxes()
        missing, unheard = list[int](), list[int]()
        if len(black_boxes) < self.world_size:
            absent = [
                p
                for p in range(self.world_size)
                if p not in black_boxes and p not in self.known_processes
            ]
            if self.is_single_machine:
                missing = absent
            elif absent:
                # There may be no store, or its process may have exited.
                with suppress(Exception):
                    black_boxes |= exchange_black_boxes(
                        connect_store(EXIT_TIMEOUT), black_boxes, absent
                    )
                unheard = [p for p in absent if p not in black_boxes]
        return StalledRun(black_boxes, self.layout, self.program, missing, unheard)

    def describe_position(self) -> str:
        """Return a text with the position of this process, or "" if it has no black box."""
        run = StalledRun(self.collect_black_boxes(), self.layout, self.program)
        return run.describe_location(self.process) if self.process in run.snapshots else ""

    def finish(self) -> None:
        """Mark the end of this process, and remove its black box."""
        self.black_box.values[BlackBoxField.HAS_ENDED] = 1
        self.black_box.remove()
        with suppress(OSError):
            if os.environ.get("LOCAL_RANK", "0") == "0":
                (self.directory / PROGRAM_FILE).unlink(missing_ok=True)
            self.directory.rmdir()  # This fails in all processes but the last one.


_CURRENT_MEMBER: list[RunMember] = []  # The list has one element if the run has several processes.


def get_current_member() -> RunMember | None:
    """Return this process as a member of its run, or None if the run has only one process."""
    return _CURRENT_MEMBER[0] if _CURRENT_MEMBER else None


def join_run(member: RunMember) -> None:
    """Make this process a member of a run.

    Args:
        member: The member.
    """
    _CURRENT_MEMBER[:] = [member]


def is_launched() -> bool:
    """Return whether `launch` started this process. If so, `launch` reports why it ended."""
    return LAUNCHER_PID_VARIABLE in os.environ


_REPORT_LOCK = Lock()  # The first thread that fails acquires the lock, and never releases it.
_TERMINATION_EVENT = Event()  # Set if this process must exit without waiting for others.


def exit_with_error(
    reason: str | None, code: int = 1, *, is_peer_failure: bool = False
) -> NoReturn:
    """Report an error, and end this process immediately.

    A normal exit would first close connections. Other processes would then fail too, and one of
    them could be reported as the cause.

    Args:
        reason: The reason. If None, nothing is printed, because another process reports the error.
        code: The exit code.
        is_peer_failure: True if the error occurred because other processes exited or did not
            arrive. The report then names the process that is the cause.
    """
    member = get_current_member()
    # A process that user code has forked has no black box.
    if member is not None and not member.is_current_process:
        if reason is not None:
            print(f"a child of {member.name}: {reason}", file=sys.stderr, flush=True)
        os._exit(code)
    _REPORT_LOCK.acquire()  # The lock is never released.
    if member is None:
        if reason is not None and _is_first_failure():
            print(f"process {os.environ.get('RANK', '0')}: {reason}", file=sys.stderr, flush=True)
        else:
            time.sleep(EXIT_GRACE)
        os._exit(code)
    cause: StallCause | None = None
    if is_peer_failure:
        member.has_lost_peers, member.black_box.values[BlackBoxField.IS_WAITING] = True, 1
        cause = _find_cause(member, reason or "")
    if cause is not None and cause.process != member.process:
        reason = _describe_cause(member, cause)
    elif cause is not None and cause.kind is not StallKind.FAILED:
        reason = str(cause)
    elif reason is not None:
        reason = f"{member.name}: {reason}"
    report_and_exit(member, reason, code, cause)


def stop_waiting() -> None:
    """Let this process exit without waiting for other processes."""
    _TERMINATION_EVENT.set()


def exit_with_cause(member: RunMember, cause: StallCause, code: int = 1) -> NoReturn:
    """Report that another process is the cause of a failure, and end this process.

    Args:
        member: This process.
        cause: The process that is the cause, and the reason.
        code: The exit code.
    """
    _REPORT_LOCK.acquire()
    report_and_exit(member, _describe_cause(member, cause), code, cause)


def _describe_cause(member: RunMember, cause: StallCause) -> str | None:
    """Return the text that reports a cause, or None if a process on this machine reports it."""
    if cause.kind is not StallKind.FAILED:
        return str(cause)
    return None if cause.process in member.known_processes else cause.message


def report_and_exit(
    member: RunMember, text: str | None, code: int, cause: StallCause | None
) -> NoReturn:
    """Print a text if no other process has printed one, kill the blocking process, and exit.

    Args:
        member: This process.
        text: The text, or None to print nothing.
        code: The exit code.
        cause: The process that is the cause, or None if the cause is unknown. Only a process on
            this machine is killed, and only if it is certainly the cause.
    """
    member.black_box.report_failure(text or "", code)
    is_read = is_launched() and member.black_box.has_file
    reports = text is not None and (is_read or _is_first_failure())
    if reports and not is_read:
        print(text, file=sys.stderr, flush=True)
    is_other_process = cause is not None and cause.process != member.process
    is_local = (
        cause is None or cause.process in member.known_processes or cause.kind is StallKind.MISSING
    )
    if cause is not None and is_other_process and is_local and cause.is_certain:
        _kill_culprit(member, cause)
    if text is not None and is_other_process and not is_local:
        _write_agent_error(text)
    if not reports or (is_other_process and is_local):
        _TERMINATION_EVENT.wait(EXIT_GRACE)
    os._exit(code)


def _write_agent_error(text: str) -> None:
    """Write a text to the error file of torchrun, which prints the file of the first failure.

    This is needed if the cause is a process on another machine. The torchrun agent of this machine
    reads only the error files of processes on this machine.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}))


def _kill_culprit(member: RunMember, cause: StallCause) -> None:
    """Kill a process of this machine that is stopped or busy, and so blocks other processes."""
    # The process may have ended since `cause` was found, so this function reads its state again.
    snapshot = member.collect_black_boxes().get(cause.process)
    is_blocking = snapshot is not None and cause.kind in (StallKind.STOPPED, StallKind.BUSY)
    if is_blocking and snapshot is not None and snapshot.state in ("runs", "stopped"):
        member.black_box.values[BlackBoxField.KILLED_PROCESS] = cause.process + 1
        with suppress(OSError):
            os.kill(snapshot[BlackBoxField.PID], signal.SIGKILL)


def _find_cause(member: RunMember, reason: str) -> StallCause | None:
    """Return the process for which this process waits.

    A process closes its connections before it exits. So this function retries for `EXIT_TIMEOUT`
    seconds, until the black boxes show which process has exited. A failure or a death explains
    itself. For other states, the text of the cause begins with the reason.
    """
    deadline = time.monotonic() + EXIT_TIMEOUT
    reason = reason.partition("\n")[0]
    while True:
        stalled_run = member.inspect_stall()
        cause = stalled_run.find_cause()
        if cause is not None and cause.kind < StallKind.STOPPED:
            return cause
        is_stopped = cause is not None and cause.kind is StallKind.STOPPED
        if is_stopped or time.monotonic() > deadline:
            return stalled_run.find_cause(reason)
        time.sleep(0.02)


def make_store_key(name: str) -> str:
    """Return the key of an entry in the rendezvous store, for this attempt of torchrun.

    Args:
        name: The name of the entry.
    """
    return f"schedir {name} in attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _is_first_failure() -> bool:
    """Return whether no other process of this torchrun agent has failed before."""
    if "MASTER_PORT" not in os.environ:
        return True
    try:
        node = os.environ.get("GROUP_RANK", "0")
        return bool(connect_store(EXIT_TIMEOUT).add(make_store_key(f"failed on {node}"), 1) == 1)
    except (ImportError, MemoryError):
        # This process cannot use the store, because it lacks torch or memory. Other processes do
        # not report its error.
        return True
    except Exception as error:
        # Python raises a RuntimeError if there is no memory for the thread of `connect_store`.
        lacks_memory = type(error) is RuntimeError
        # If there is no store, one process of each machine reports.
        return lacks_memory or os.environ.get("LOCAL_RANK", "0") == "0"


def exchange_black_boxes(
    store: Any,
    local_boxes: dict[int, BlackBoxSnapshot],
    absent: list[int],
    timeout: float = EXIT_TIMEOUT,
) -> dict[int, BlackBoxSnapshot]:
    """Write the black boxes of this machine to a store, and read the boxes of other machines.

    Args:
        store: The rendezvous store.
        local_boxes: The black boxes of this machine, by process.
        absent: The processes without a black box on this machine.
        timeout: The seconds to wait for the black boxes of other machines.

    Returns:
        The black boxes of other machines that arrived before the timeout, by process.
    """
    for process, snapshot in local_boxes.items():
        store.set(make_store_key(f"box of {process}"), snapshot.to_bytes())
    remote_boxes: dict[int, BlackBoxSnapshot] = {}
    deadline = time.monotonic() + timeout
    while len(remote_boxes) < len(absent) and time.monotonic() < deadline:
        for process in absent:
            key = make_store_key(f"box of {process}")
            if process not in remote_boxes and store.check([key]):
                peer_box = BlackBoxSnapshot.from_bytes(store.get(key))
                remote_boxes |= {} if peer_box is None else {process: peer_box}
        time.sleep(0.02)
    return remote_boxes


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Handle SIGHUP and SIGQUIT like Ctrl-C while the context is active.

    The code in the context can then clean up. After the context, the signal ends this process as
    usual.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:  # A second interrupt would disturb the clean-up.
            raise KeyboardInterrupt

    previous_handlers: dict[int, Any] = {}
    if current_thread() is main_thread():
        for signal_number in (signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(signal_number) is signal.SIG_DFL:  # nohup ignores SIGHUP.
                previous_handlers[signal_number] = signal.signal(signal_number, handle)
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        if received:
            os.kill(os.getpid(), received[0])


def end_with_parent() -> None:
    """End this process when its launcher ends: `launch` or torchrun."""
    if not is_launched() and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if is_launched() and os.getppid() != int(os.environ[LAUNCHER_PID_VARIABLE]):
            os._exit(1)  # The launcher ended before the call of `prctl`.
    elif is_launched():  # The end of the launcher closes the standard input.

        def watch() -> None:
            os.read(0, 1)
            os._exit(1)

        Thread(target=watch, daemon=True).start()


def exit_cleanly() -> NoReturn:
    """End this process immediately, with exit code 0.

    A normal exit tears down the interpreter. Threads of torch that still run then sometimes abort
    the process ("terminate called without an active exception", in 1 of 62 runs).
    """
    if (member := get_current_member()) is not None and member.is_current_process:
        member.finish()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
