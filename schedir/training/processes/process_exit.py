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
    FOLDER,
    PROGRAM,
    BlackBox,
    BlackBoxField,
    BlackBoxSnapshot,
    boxes,
    run_of,
)
from schedir.ir.program import Program
from schedir.training.processes.rendezvous_store import connected

MOMENT: Final = 1.0  # seconds in which a process that has closed its connections ends
GRACE: Final = 5.0  # seconds in which the first one to give up ends the others
TOLD: Final = 128 + signal.SIGTERM  # the exit code of a run that was told to end
LAUNCHED: Final = "SCHEDIR_LAUNCHED"  # the number of the process that is `launch`
_PR_SET_PDEATHSIG: Final = 1


class RunMember:
    """This process among those of its run: its box, and those of the others.

    `program` is None until it is known, in set-up; `late` says that the process has given up
    because others have not come, and is no longer where its box says.
    """

    def __init__(self, output: str | Path, shape: ProcessLayout, process: int) -> None:
        self.folder, self.shape, self.process = Path(output, FOLDER), shape, process
        self.world = shape.ranks * shape.tp * shape.dp
        path, tp, dp = self.folder / str(process), shape.tp, shape.dp
        self.box = BlackBox(path, process=process, world=self.world, tp=tp, dp=dp)
        self.program: Program | None = None
        self.late = False
        self.known: set[int] = set()  # whose boxes were seen
        self.run = run_of(os.getppid())
        here = os.environ.get("LOCAL_WORLD_SIZE", "")
        self.all_here = is_launched() or here == str(self.world)

    @property
    def name(self) -> str:
        """As every message names it."""
        return self.shape.name(self.process)

    @property
    def is_this(self) -> bool:
        """Whether it is this process, and not one that forked this."""
        return self.box.words[BlackBoxField.PID] == os.getpid()

    def runs(self, program: Program) -> None:
        """Know what is run, and leave it for who reads the boxes."""
        from schedir.ir.text_format import to_text

        self.program = program
        if os.environ.get("LOCAL_RANK", "0") == "0":
            with suppress(OSError):
                (self.folder / PROGRAM).write_text(to_text(program))

    def seen(self) -> dict[int, BlackBoxSnapshot]:
        """The boxes on this machine."""
        found = boxes(self.folder, self.run)
        self.known |= found.keys()
        return found

    def standstill(self) -> StalledRun:
        """Who waits for whom now, on all machines."""
        seen = self.seen()
        missing, unheard = list[int](), list[int]()
        if len(seen) < self.world:
            absent = [p for p in range(self.world) if p not in seen and p not in self.known]
            if self.all_here:
                missing = absent
            elif absent:
                with suppress(Exception):  # there is no store, or it has gone with who had it
                    seen |= exchanged(connected(MOMENT), seen, absent)
                unheard = [p for p in absent if p not in seen]
        return StalledRun(seen, self.shape, self.program, missing, unheard)

    def where(self) -> str:
        """What this process is at."""
        standstill = StalledRun(self.seen(), self.shape, self.program)
        return standstill.where(self.process) if self.process in standstill.seen else ""

    def done(self) -> None:
        """All has ended well: nothing is left of the box."""
        self.box.words[BlackBoxField.ENDED] = 1
        self.box.remove()
        with suppress(OSError):
            if os.environ.get("LOCAL_RANK", "0") == "0":
                (self.folder / PROGRAM).unlink(missing_ok=True)
            self.folder.rmdir()  # by whoever is the last


class TerminationNotice(Exception):
    """The processes were told to end, and have: `saved` says of which step there is what."""

    def __init__(self, saved: str) -> None:
        super().__init__(f"was told to end (SIGTERM): {saved}")


_SELF: list[RunMember] = []  # this process, if it is one of several


def member() -> RunMember | None:
    """This process among those of its run, if it is one."""
    return _SELF[0] if _SELF else None


def join(member: RunMember) -> None:
    """Be a process of a run from now on."""
    _SELF[:] = [member]


def is_launched() -> bool:
    """Whether `launch` has started this process, and says how it ends."""
    return LAUNCHED in os.environ


_SPEAKING = Lock()  # for the thread that gives up first
_TOLD = Event()  # that this process is to end


def crash(why: str | None, code: int = 1, *, late: bool = False) -> NoReturn:
    """End this process at once: a tidy end would close connections first, and others seem to fail.

    Nothing is said without a `why`: it is for another process to say.  `late` is what fails because
    others have gone or have not come: then it is said whose fault that is.
    """
    own = member()
    if own is not None and not own.is_this:  # a person's code has forked it: it has no box
        if why is not None:
            print(f"a child of {own.name}: {why}", file=sys.stderr, flush=True)
        os._exit(code)
    _SPEAKING.acquire()  # for good
    if own is None:
        if why is not None and _is_first():
            print(f"process {os.environ.get('RANK', '0')}: {why}", file=sys.stderr, flush=True)
        else:
            time.sleep(GRACE)
        os._exit(code)
    found: StallCause | None = None
    if late:
        own.late, own.box.words[BlackBoxField.WAITS] = True, 1
        found = _whose_fault(own, why or "")
    if found is not None and found.process != own.process:
        why = _words(own, found)
    elif found is not None and found.kind is not StallKind.SAID:
        why = str(found)
    elif why is not None:
        why = f"{own.name}: {why}"
    give_up(own, why, code, found)


def told_to_end() -> None:
    """Wait for nobody any more."""
    _TOLD.set()


def accuse(own: RunMember, found: StallCause, code: int = 1) -> NoReturn:
    """End this process, for the one that keeps it."""
    _SPEAKING.acquire()
    give_up(own, _words(own, found), code, found)


def _words(own: RunMember, found: StallCause) -> str | None:
    """What is to be said of another process, None where that has said it to the same people."""
    if found.kind is not StallKind.SAID:
        return str(found)
    return None if found.process in own.known else found.said


def give_up(own: RunMember, text: str | None, code: int, found: StallCause | None) -> NoReturn:
    """Say a text, unless somebody has said one; end who is to blame, and this process."""
    own.box.say(text or "", code)
    is_read = is_launched() and own.box.is_there
    speaks = text is not None and (is_read or _is_first())
    if speaks and not is_read:
        print(text, file=sys.stderr, flush=True)
    guilty = found is not None and found.process != own.process
    is_here = found is None or found.process in own.known or found.kind is StallKind.MISSING
    if found is not None and guilty and is_here and found.sure:
        _end(own, found)
    if text is not None and guilty and not is_here:
        _tell_agent(text)
    if not speaks or (guilty and is_here):
        _TOLD.wait(GRACE)
    os._exit(code)


def _tell_agent(text: str) -> None:
    """Let torchrun have a text beside the process that it calls the root cause, where that is on
    another machine: the agent of each knows its own processes only."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        told = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": told}))


def _end(own: RunMember, found: StallCause) -> None:
    """End a process of this machine that keeps the others."""
    seen = own.seen().get(found.process)  # of which the system has said just now how it is
    kept = seen is not None and found.kind in (StallKind.STOPPED, StallKind.BUSY)
    if kept and seen is not None and seen.state in ("runs", "stopped"):
        own.box.words[BlackBoxField.KILLS] = found.process + 1
        with suppress(OSError):
            os.kill(seen[BlackBoxField.PID], signal.SIGKILL)


def _whose_fault(own: RunMember, why: str) -> StallCause | None:
    """Who keeps this process, given a moment: connections close before processes have ended."""
    over = time.monotonic() + MOMENT
    why = why.partition("\n")[0]
    while True:
        found = own.standstill().blame()
        if found is not None and found.kind < StallKind.MISSING:
            return found
        if time.monotonic() > over:
            return own.standstill().blame(why)
        time.sleep(0.02)


def key(what: str) -> str:
    """What a fact of this attempt is called at the store."""
    return f"schedir {what} in attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _is_first() -> bool:
    """Whether no other process that torchrun has started here has given up, as far as the store
    knows."""
    if "MASTER_PORT" not in os.environ:
        return True
    try:
        node = os.environ.get("GROUP_RANK", "0")
        return bool(connected(MOMENT).add(key(f"failed on {node}"), 1) == 1)
    except ImportError:  # what is wrong here others do not have
        return True
    except Exception:  # it is gone, or not yet there: let one of each machine speak
        return os.environ.get("LOCAL_RANK", "0") == "0"


def exchanged(
    store: Any, own: dict[int, BlackBoxSnapshot], absent: list[int], most: float = MOMENT
) -> dict[int, BlackBoxSnapshot]:
    """The boxes of processes elsewhere, which a store has; it is told of our own ones.

    Those that nobody has brought in `most` seconds are left out.
    """
    for process, seen in own.items():
        store.set(key(f"box of {process}"), seen.packed())
    found: dict[int, BlackBoxSnapshot] = {}
    over = time.monotonic() + most
    while len(found) < len(absent) and time.monotonic() < over:
        for process in absent:
            where = key(f"box of {process}")
            if process not in found and store.check([where]):
                other = BlackBoxSnapshot.unpacked(store.get(where))
                found |= {} if other is None else {process: other}
        time.sleep(0.02)
    return found


@contextmanager
def unwound() -> Iterator[None]:
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
        if is_launched() and os.getppid() != int(os.environ[LAUNCHED]):
            os._exit(1)  # it went before that
    elif is_launched():  # its end closes our standard input

        def watch() -> None:
            os.read(0, 1)
            os._exit(1)

        Thread(target=watch, daemon=True).start()


def end_as_told(why: str, code: int) -> NoReturn:
    """End this process as it was told to, all saved: process 0 says so, and waits for nobody."""
    own = member()
    if own is not None and is_launched():
        own.box.words[BlackBoxField.ENDED] = 1
        own.box.say(why if own.process == 0 else "", code)
    elif own is not None:
        own.done()
    if not is_launched() and os.environ.get("RANK", "0") == "0":
        print(why, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


def leave() -> NoReturn:
    """End this process, all done.

    At once, too: while an interpreter is taken down, threads of torch that still run now and
    then abort it ("terminate called without an active exception"; seen in 1 run of 62).
    """
    if (own := member()) is not None and own.is_this:
        own.done()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
