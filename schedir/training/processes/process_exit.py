"""End a process of a run, and report once why the run ended.

Who gives up writes why into its black box; where that is another's fault, the boxes of all say
whose (`hang_diagnosis/stall_cause.py`).  One process speaks: under `launch` that is the launcher,
and else the first to give up, as the store knows where the processes meet.  Whoever keeps the
others, stopped or never coming back, is ended by the one that says so: so whoever has started the
processes sees the guilty one end first, and not an innocent one.
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

EXIT_TIMEOUT: Final = 1.0  # seconds in which a process that has closed its connections ends
EXIT_GRACE: Final = 5.0  # seconds in which the first one to give up ends the others
TERMINATED_EXIT_CODE: Final = 128 + signal.SIGTERM  # the exit code of a run that was told to end
LAUNCHER_PID_VARIABLE: Final = "SCHEDIR_LAUNCHED"  # the number of the process that is `launch`
_PR_SET_PDEATHSIG: Final = 1


class RunMember:
    """This process among those of its run: its box, and those of the others.

    `program` is None until it is known, in set-up; `has_lost_peers` says that the process has given
    up because others have not come, and is no longer where its box says.
    """

    def __init__(self, output_dir: str | Path, layout: ProcessLayout, process: int) -> None:
        self.directory, self.layout, self.process = (
            Path(output_dir, BLACK_BOX_DIRECTORY),
            layout,
            process,
        )
        self.world_size = layout.ranks * layout.tp * layout.dp
        path, tp, dp = self.directory / str(process), layout.tp, layout.dp
        self.black_box = BlackBox(path, process=process, world=self.world_size, tp=tp, dp=dp)
        self.program: Program | None = None
        self.has_lost_peers = False
        self.known_processes: set[int] = set()  # whose boxes were seen
        self.run_id = compute_run_id(os.getppid())
        here = os.environ.get("LOCAL_WORLD_SIZE", "")
        self.is_single_machine = is_launched() or here == str(self.world_size)

    @property
    def name(self) -> str:
        """As every message names it."""
        return self.layout.name_process(self.process)

    @property
    def is_current_process(self) -> bool:
        """Whether it is this process, and not one that forked this."""
        return self.black_box.values[BlackBoxField.PID] == os.getpid()

    def set_program(self, program: Program) -> None:
        """Know what is run, and leave it for who reads the boxes."""
        from schedir.ir.text_format import to_text

        self.program = program
        if os.environ.get("LOCAL_RANK", "0") == "0":
            with suppress(OSError):
                (self.directory / PROGRAM_FILE).write_text(to_text(program))

    def collect_black_boxes(self) -> dict[int, BlackBoxSnapshot]:
        """The boxes on this machine."""
        found = read_black_boxes(self.directory, self.run_id)
        self.known_processes |= found.keys()
        return found

    def inspect_stall(self) -> StalledRun:
        """Who waits for whom now, on all machines."""
        seen = self.collect_black_boxes()
        missing, unheard = list[int](), list[int]()
        if len(seen) < self.world_size:
            absent = [
                p for p in range(self.world_size) if p not in seen and p not in self.known_processes
            ]
            if self.is_single_machine:
                missing = absent
            elif absent:
                with suppress(Exception):  # there is no store, or it has gone with who had it
                    seen |= exchange_black_boxes(connect_store(EXIT_TIMEOUT), seen, absent)
                unheard = [p for p in absent if p not in seen]
        return StalledRun(seen, self.layout, self.program, missing, unheard)

    def describe_position(self) -> str:
        """What this process is at."""
        standstill = StalledRun(self.collect_black_boxes(), self.layout, self.program)
        return (
            standstill.describe_location(self.process)
            if self.process in standstill.snapshots
            else ""
        )

    def finish(self) -> None:
        """All has ended well: nothing is left of the box."""
        self.black_box.values[BlackBoxField.HAS_ENDED] = 1
        self.black_box.remove()
        with suppress(OSError):
            if os.environ.get("LOCAL_RANK", "0") == "0":
                (self.directory / PROGRAM_FILE).unlink(missing_ok=True)
            self.directory.rmdir()  # by whoever is the last


class TerminationNotice(Exception):
    """The processes were told to end, and have: `saved` says of which step there is what."""

    def __init__(self, saved: str) -> None:
        super().__init__(f"was told to end (SIGTERM): {saved}")


_CURRENT_MEMBER: list[RunMember] = []  # this process, if it is one of several


def get_current_member() -> RunMember | None:
    """This process among those of its run, if it is one."""
    return _CURRENT_MEMBER[0] if _CURRENT_MEMBER else None


def join_run(member: RunMember) -> None:
    """Be a process of a run from now on."""
    _CURRENT_MEMBER[:] = [member]


def is_launched() -> bool:
    """Whether `launch` has started this process, and says how it ends."""
    return LAUNCHER_PID_VARIABLE in os.environ


_REPORT_LOCK = Lock()  # for the thread that gives up first
_TERMINATION_EVENT = Event()  # that this process is to end


def exit_with_error(
    reason: str | None, code: int = 1, *, is_peer_failure: bool = False
) -> NoReturn:
    """End this process at once: a tidy end would close connections first, and others seem to fail.

    Nothing is said without a `reason`: it is for another process to say.  `is_peer_failure` is what
    fails because others have gone or have not come: then it is said whose fault that is.
    """
    own = get_current_member()
    if (
        own is not None and not own.is_current_process
    ):  # a person's code has forked it: it has no box
        if reason is not None:
            print(f"a child of {own.name}: {reason}", file=sys.stderr, flush=True)
        os._exit(code)
    _REPORT_LOCK.acquire()  # for good
    if own is None:
        if reason is not None and _is_first_failure():
            print(f"process {os.environ.get('RANK', '0')}: {reason}", file=sys.stderr, flush=True)
        else:
            time.sleep(EXIT_GRACE)
        os._exit(code)
    found: StallCause | None = None
    if is_peer_failure:
        own.has_lost_peers, own.black_box.values[BlackBoxField.IS_WAITING] = True, 1
        found = _find_cause(own, reason or "")
    if found is not None and found.process != own.process:
        reason = _describe_cause(own, found)
    elif found is not None and found.kind is not StallKind.SAID:
        reason = str(found)
    elif reason is not None:
        reason = f"{own.name}: {reason}"
    report_and_exit(own, reason, code, found)


def stop_waiting() -> None:
    """Wait for nobody any more."""
    _TERMINATION_EVENT.set()


def exit_with_cause(member: RunMember, cause: StallCause, code: int = 1) -> NoReturn:
    """End this process, for the one that keeps it."""
    _REPORT_LOCK.acquire()
    report_and_exit(member, _describe_cause(member, cause), code, cause)


def _describe_cause(member: RunMember, cause: StallCause) -> str | None:
    """What is to be said of another process, None where that has said it to the same people."""
    if cause.kind is not StallKind.SAID:
        return str(cause)
    return None if cause.process in member.known_processes else cause.message


def report_and_exit(
    member: RunMember, text: str | None, code: int, cause: StallCause | None
) -> NoReturn:
    """Say a text, unless somebody has said one; end who is to blame, and this process."""
    member.black_box.report_failure(text or "", code)
    is_read = is_launched() and member.black_box.has_file
    speaks = text is not None and (is_read or _is_first_failure())
    if speaks and not is_read:
        print(text, file=sys.stderr, flush=True)
    guilty = cause is not None and cause.process != member.process
    is_here = (
        cause is None or cause.process in member.known_processes or cause.kind is StallKind.MISSING
    )
    if cause is not None and guilty and is_here and cause.is_certain:
        _kill_culprit(member, cause)
    if text is not None and guilty and not is_here:
        _write_agent_error(text)
    if not speaks or (guilty and is_here):
        _TERMINATION_EVENT.wait(EXIT_GRACE)
    os._exit(code)


def _write_agent_error(text: str) -> None:
    """Let torchrun have a text beside the process that it calls the root cause, where that is on
    another machine: the agent of each knows its own processes only."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        told = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": told}))


def _kill_culprit(member: RunMember, cause: StallCause) -> None:
    """End a process of this machine that keeps the others."""
    seen = member.collect_black_boxes().get(
        cause.process
    )  # of which the system has said just now how it is
    kept = seen is not None and cause.kind in (StallKind.STOPPED, StallKind.BUSY)
    if kept and seen is not None and seen.state in ("runs", "stopped"):
        member.black_box.values[BlackBoxField.KILLED_PROCESS] = cause.process + 1
        with suppress(OSError):
            os.kill(seen[BlackBoxField.PID], signal.SIGKILL)


def _find_cause(member: RunMember, reason: str) -> StallCause | None:
    """Who keeps this process, given a moment: connections close before processes have ended."""
    over = time.monotonic() + EXIT_TIMEOUT
    reason = reason.partition("\n")[0]
    while True:
        found = member.inspect_stall().find_cause()
        if found is not None and found.kind < StallKind.MISSING:
            return found
        if time.monotonic() > over:
            return member.inspect_stall().find_cause(reason)
        time.sleep(0.02)


def make_store_key(name: str) -> str:
    """What a fact of this attempt is called at the store."""
    return f"schedir {name} in attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _is_first_failure() -> bool:
    """Whether no other process that torchrun has started here has given up, as far as the store
    knows."""
    if "MASTER_PORT" not in os.environ:
        return True
    try:
        node = os.environ.get("GROUP_RANK", "0")
        return bool(connect_store(EXIT_TIMEOUT).add(make_store_key(f"failed on {node}"), 1) == 1)
    except ImportError:  # what is wrong here others do not have
        return True
    except Exception:  # it is gone, or not yet there: let one of each machine speak
        return os.environ.get("LOCAL_RANK", "0") == "0"


def exchange_black_boxes(
    store: Any,
    local_boxes: dict[int, BlackBoxSnapshot],
    absent: list[int],
    timeout: float = EXIT_TIMEOUT,
) -> dict[int, BlackBoxSnapshot]:
    """The boxes of processes elsewhere, which a store has; it is told of our own ones.

    Those that nobody has brought in `timeout` seconds are left out.
    """
    for process, seen in local_boxes.items():
        store.set(make_store_key(f"box of {process}"), seen.to_bytes())
    found: dict[int, BlackBoxSnapshot] = {}
    over = time.monotonic() + timeout
    while len(found) < len(absent) and time.monotonic() < over:
        for process in absent:
            where = make_store_key(f"box of {process}")
            if process not in found and store.check([where]):
                other = BlackBoxSnapshot.from_bytes(store.get(where))
                found |= {} if other is None else {process: other}
        time.sleep(0.02)
    return found


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Within this, SIGHUP and SIGQUIT interrupt what is done as Ctrl-C does, so that nothing of it
    is left; afterwards they end this process, as ever."""
    told: list[int] = []

    def tell(number: int, frame: FrameType | None) -> None:
        told.append(number)
        if len(told) == 1:  # the rest would interrupt the end
            raise KeyboardInterrupt

    usual: dict[int, Any] = {}
    if current_thread() is main_thread():
        for each in (signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(each) is signal.SIG_DFL:  # and not under nohup
                usual[each] = signal.signal(each, tell)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        if told:
            os.kill(os.getpid(), told[0])


def end_with_parent() -> None:
    """End as soon as whoever has started this process has gone: `launch`, or torchrun."""
    if not is_launched() and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if is_launched() and os.getppid() != int(os.environ[LAUNCHER_PID_VARIABLE]):
            os._exit(1)  # it went before that
    elif is_launched():  # its end closes our standard input

        def watch() -> None:
            os.read(0, 1)
            os._exit(1)

        Thread(target=watch, daemon=True).start()


def exit_after_termination(reason: str, code: int) -> NoReturn:
    """End this process as it was told to, all saved: process 0 says so, and waits for nobody."""
    own = get_current_member()
    if own is not None and is_launched():
        own.black_box.values[BlackBoxField.HAS_ENDED] = 1
        own.black_box.report_failure(reason if own.process == 0 else "", code)
    elif own is not None:
        own.finish()
    if not is_launched() and os.environ.get("RANK", "0") == "0":
        print(reason, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


def exit_cleanly() -> NoReturn:
    """End this process, all done.

    At once, too: while an interpreter is taken down, threads of torch that still run now and
    then abort it ("terminate called without an active exception"; seen in 1 run of 62).
    """
    if (own := get_current_member()) is not None and own.is_current_process:
        own.finish()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
