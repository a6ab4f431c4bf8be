"""Start the processes of a run on this machine, forward their output, and end them together.

Nothing lies in a folder meanwhile but their black boxes, in that of the run's output; and whatever
ends this process ends them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread, Timer, current_thread, main_thread
from typing import IO, Any, Final, NamedTuple

from schedir.errors import UsageError
from schedir.hang_diagnosis.post_mortem import leave_verdict, program_of
from schedir.hang_diagnosis.stall_cause import ProcessLayout, StalledRun
from schedir.io.black_box import (
    FOLDER,
    PROGRAM,
    VERDICT,
    BlackBoxField,
    BlackBoxSnapshot,
    boxes,
    run_of,
)
from schedir.training.processes.process_exit import GRACE, LAUNCHED, MOMENT, TOLD

MOST: Final = 256  # processes that one machine is asked to start
BYTES: Final = 2**20  # of what a process prints that are passed on
LONGEST: Final = 2**13  # of a line
REFUSED: Final = 2  # the exit code of a process that says so


class FailedExit(NamedTuple):
    """How the first process to fail has ended, and the boxes of all at that moment."""

    process: int
    code: int
    seen: Mapping[int, BlackBoxSnapshot]


def launch(
    arguments: Sequence[str], shape: ProcessLayout, output: str, grace: float | None = None
) -> int:
    """Run `python -m schedir ARGUMENTS` in so many processes, as torchrun would.

    They find RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.  What process 0 prints
    is passed on as it is; what others print, and standard error, line by line, with the number of
    the process in front, up to `BYTES` of each.  When one fails, what it has to say is said, or how
    it ended and where that was; the others are ended, and 1 is returned, or 2 where it said that
    something is refused.  With a `grace` a SIGTERM is passed on, and as many seconds later they are
    to have ended; with a second one they end at once.

    Raises UsageError for more processes than `MOST`.
    """
    world = shape.ranks * shape.tp * shape.dp
    if world > MOST:
        raise UsageError(
            f"{world} processes are more than the {MOST} that are started on one machine",
            hint="start them with torchrun",
        )
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # The processes meet in this one, at a port that is taken from the start.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # all processes are clients of the store
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "PYTHONUNBUFFERED": "1",
        LAUNCHED: str(os.getpid()),
    }
    folder = Path(output, FOLDER)
    _forget(folder)
    end: FailedExit | None = None
    processes: list[subprocess.Popen[bytes]] = []
    readers: list[Thread] = []
    passing = _SignalForwarding(processes, grace)
    try:
        passing.begin()
        for number in range(world):
            process = subprocess.Popen(
                [sys.executable, "-m", "schedir", *arguments],
                stdin=subprocess.PIPE,  # ends when this process does
                stdout=subprocess.PIPE if number else None,
                stderr=subprocess.PIPE,
                env=environment | {"RANK": str(number), "LOCAL_RANK": str(number)},
                start_new_session=True,  # Ctrl-C is for this process alone
            )
            processes.append(process)
            readers += _passing_on(number, process)
        passing.all_started()
        end = _first_failure(processes, folder, run_of(os.getpid(), environment))
        if passing.told and end.code == TOLD:
            passing.wait()  # each ends by itself
    finally:
        passing.end()
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        for reader in readers:  # what they started may live on, and hold a pipe open
            reader.join(MOMENT)
        read = not any(reader.is_alive() for reader in readers)
        for process in processes:
            for pipe in (process.stdin, *((process.stdout, process.stderr) if read else ())):
                if pipe is not None:
                    pipe.close()
        del store
        if end is None:  # a person has ended all: nobody is to blame
            _forget(folder)
    if not end.code and end.process < 0:
        _forget(folder)
        return 0
    run = run_of(os.getpid(), environment)
    after = boxes(folder, run)
    said, code = _said(end, after, shape, folder)
    print(said, file=sys.stderr)
    if passing.told and end.code in (TOLD, -signal.SIGTERM):  # the latter had nothing to save yet
        _forget(folder)
        return TOLD
    if code == REFUSED:  # which has been said, and nothing else happened
        _forget(folder)
    else:
        leave_verdict(folder, run, said)
    return code


_LONGER: Final = 5.0  # seconds, after which processes are ended that do not do so past their grace


class _SignalForwarding:
    """SIGTERM, passed on to processes; without a `grace` it ends this one, and so them."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], grace: float | None) -> None:
        self.processes, self.grace, self.told = processes, grace, False
        self.before: Any = None
        self.over: Timer | None = None

    def begin(self) -> None:
        if self.grace is not None and current_thread() is main_thread():
            self.before = signal.signal(signal.SIGTERM, self._told)

    def _told(self, number: int, frame: object) -> None:
        if self.told or self.grace is None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.told = True
        self.over = Timer(self.grace + _LONGER, self._kill)
        self.over.daemon = True
        self.over.start()
        self.all_started()

    def all_started(self) -> None:
        """Tell those, too, that were started meanwhile."""
        if self.told:
            for process in self.processes:
                process.terminate()

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()

    def wait(self) -> None:
        """Return when all have ended, which they are about to."""
        with suppress(subprocess.TimeoutExpired):
            for process in self.processes:
                process.wait(GRACE)

    def end(self) -> None:
        if self.over is not None:
            self.over.cancel()
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)


def _first_failure(
    processes: Sequence[subprocess.Popen[bytes]], folder: Path, run: int
) -> FailedExit:
    """The first process to fail, or to end with 0 and before its end; number -1 when none has."""
    ended: SimpleQueue[tuple[int, int]] = SimpleQueue()

    def watch(number: int, process: subprocess.Popen[bytes]) -> None:
        ended.put((number, process.wait()))

    for number, process in enumerate(processes):
        Thread(target=watch, args=(number, process), daemon=True).start()
    for _ in processes:
        number, code = ended.get()
        seen = boxes(folder, run)
        # Who has ended well has taken its box with it.
        if code or (number in seen and not seen[number][BlackBoxField.ENDED]):
            return FailedExit(number, code, seen)
    return FailedExit(-1, 0, {})


def _said(
    end: FailedExit, after: Mapping[int, BlackBoxSnapshot], shape: ProcessLayout, folder: Path
) -> tuple[str, int]:
    """What is said of a run that has failed, and the exit code.

    Who has ended another has said why; else it is the word of the one that ended, and where that
    has none, how it ended.
    """
    accusers = [one for one in after.values() if one[BlackBoxField.KILLS] == end.process + 1]
    own = after.get(end.process)
    speakers = [*accusers, *([own] if own is not None else [])]
    if own is not None and own.gave_up and not own.said:  # because of others
        speakers += sorted(after.values(), key=lambda one: one[BlackBoxField.FAILED])
    for one in speakers:
        if one.gave_up and one.said:
            return one.said, one[BlackBoxField.CODE] or 1
    how = f"ended with exit code {end.code}"
    if end.code < 0:
        how = f"was ended by signal {-end.code} ({signal.strsignal(-end.code)})"
    where = "before it had begun" if folder.exists() else "and its black box has gone"
    if end.process in end.seen:
        where = StalledRun(end.seen, shape, program_of(folder)).where(end.process)
    code = REFUSED if end.code == REFUSED and end.process not in end.seen else 1
    return f"{shape.name(end.process)} {how}, {where}; the others were stopped", code


def _forget(folder: Path) -> None:
    """Remove what a run before this one has left, or this one, all done."""
    for path in [*folder.glob("[0-9]*"), folder / PROGRAM, folder / VERDICT]:
        path.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


_PRINTING = Lock()


def _passing_on(number: int, process: subprocess.Popen[bytes]) -> list[Thread]:
    """Threads that pass on what a process prints, as it comes."""
    left = [BYTES]

    def pass_on(pipe: IO[bytes], to: IO[bytes]) -> None:
        while line := pipe.readline(LONGEST):
            left[0] -= len(line)
            if left[0] < 0:
                if left[0] + len(line) >= 0:
                    line = f"... more than {BYTES} bytes: the rest is left out".encode()
                else:
                    continue
            with _PRINTING:
                to.write(b"[%d] %s" % (number, line if line.endswith(b"\n") else line + b"\n"))
                to.flush()

    pipes = [(process.stdout, sys.stdout), (process.stderr, sys.stderr)]
    threads = [
        Thread(target=pass_on, args=(pipe, to.buffer), daemon=True)
        for pipe, to in pipes
        if pipe is not None
    ]
    for thread in threads:
        thread.start()
    return threads
