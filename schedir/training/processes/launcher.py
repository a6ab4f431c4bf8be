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
from schedir.hang_diagnosis.post_mortem import load_program, write_verdict
from schedir.hang_diagnosis.stall_cause import ProcessLayout, StalledRun
from schedir.io.black_box import (
    BLACK_BOX_DIRECTORY,
    PROGRAM_FILE,
    VERDICT_FILE,
    BlackBoxField,
    BlackBoxSnapshot,
    compute_run_id,
    read_black_boxes,
)
from schedir.training.processes.process_exit import (
    EXIT_GRACE,
    EXIT_TIMEOUT,
    LAUNCHER_PID_VARIABLE,
    TERMINATED_EXIT_CODE,
)

MAX_PROCESSES: Final = 256  # processes that one machine is asked to start
MAX_OUTPUT_BYTES: Final = 2**20  # of what a process prints that are passed on
MAX_LINE_BYTES: Final = 2**13  # of a line
REFUSED_EXIT_CODE: Final = 2  # the exit code of a process that says so


class FailedExit(NamedTuple):
    """How the first process to fail has ended, and the boxes of all at that moment."""

    process: int
    code: int
    black_boxes: Mapping[int, BlackBoxSnapshot]


def launch(
    arguments: Sequence[str], layout: ProcessLayout, output_dir: str, grace: float | None = None
) -> int:
    """Run `python -m schedir ARGUMENTS` in so many processes, as torchrun would.

    They find RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.  What process 0 prints
    is passed on as it is; what others print, and standard error, line by line, with the number of
    the process in front, up to `MAX_OUTPUT_BYTES` of each.  When one fails, what it has to say is
    said, or how it ended and where that was; the others are ended, and 1 is returned, or 2 where it
    said that something is refused.  With a `grace` a SIGTERM is passed on, and as many seconds
    later they are to have ended; with a second one they end at once.

    Raises UsageError for more processes than `MAX_PROCESSES`.
    """
    world = layout.ranks * layout.tp * layout.dp
    if world > MAX_PROCESSES:
        raise UsageError(
            f"{world} processes are more than the {MAX_PROCESSES} that are started on one machine",
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
        LAUNCHER_PID_VARIABLE: str(os.getpid()),
    }
    folder = Path(output_dir, BLACK_BOX_DIRECTORY)
    _remove_leftovers(folder)
    end: FailedExit | None = None
    processes: list[subprocess.Popen[bytes]] = []
    readers: list[Thread] = []
    passing = _SignalForwarding(processes, grace)
    try:
        passing.install()
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
            readers += _start_forwarding(number, process)
        passing.forward_pending()
        end = _wait_for_failure(processes, folder, compute_run_id(os.getpid(), environment))
        if passing.has_received_signal and end.code == TERMINATED_EXIT_CODE:
            passing.wait()  # each ends by itself
    finally:
        passing.restore()
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        for reader in readers:  # what they started may live on, and hold a pipe open
            reader.join(EXIT_TIMEOUT)
        read = not any(reader.is_alive() for reader in readers)
        for process in processes:
            for pipe in (process.stdin, *((process.stdout, process.stderr) if read else ())):
                if pipe is not None:
                    pipe.close()
        del store
        if end is None:  # a person has ended all: nobody is to blame
            _remove_leftovers(folder)
    if not end.code and end.process < 0:
        _remove_leftovers(folder)
        return 0
    run = compute_run_id(os.getpid(), environment)
    after = read_black_boxes(folder, run)
    said, code = _describe_failure(end, after, layout, folder)
    print(said, file=sys.stderr)
    if passing.has_received_signal and end.code in (
        TERMINATED_EXIT_CODE,
        -signal.SIGTERM,
    ):  # the latter had nothing to save yet
        _remove_leftovers(folder)
        return TERMINATED_EXIT_CODE
    if code == REFUSED_EXIT_CODE:  # which has been said, and nothing else happened
        _remove_leftovers(folder)
    else:
        write_verdict(folder, run, said)
    return code


_KILL_DELAY: Final = (
    5.0  # seconds, after which processes are ended that do not do so past their grace
)


class _SignalForwarding:
    """SIGTERM, passed on to processes; without a `grace` it ends this one, and so them."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], grace: float | None) -> None:
        self.processes, self.grace, self.has_received_signal = processes, grace, False
        self.previous_handler: Any = None
        self.kill_timer: Timer | None = None

    def install(self) -> None:
        if self.grace is not None and current_thread() is main_thread():
            self.previous_handler = signal.signal(signal.SIGTERM, self._handle_signal)

    def _handle_signal(self, number: int, frame: object) -> None:
        if self.has_received_signal or self.grace is None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.has_received_signal = True
        self.kill_timer = Timer(self.grace + _KILL_DELAY, self._kill)
        self.kill_timer.daemon = True
        self.kill_timer.start()
        self.forward_pending()

    def forward_pending(self) -> None:
        """Tell those, too, that were started meanwhile."""
        if self.has_received_signal:
            for process in self.processes:
                process.terminate()

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()

    def wait(self) -> None:
        """Return when all have ended, which they are about to."""
        with suppress(subprocess.TimeoutExpired):
            for process in self.processes:
                process.wait(EXIT_GRACE)

    def restore(self) -> None:
        if self.kill_timer is not None:
            self.kill_timer.cancel()
        if self.previous_handler is not None:
            signal.signal(signal.SIGTERM, self.previous_handler)


def _wait_for_failure(
    processes: Sequence[subprocess.Popen[bytes]], directory: Path, run_id: int
) -> FailedExit:
    """The first process to fail, or to end with 0 and before its end; number -1 when none has."""
    ended: SimpleQueue[tuple[int, int]] = SimpleQueue()

    def watch(number: int, process: subprocess.Popen[bytes]) -> None:
        ended.put((number, process.wait()))

    for number, process in enumerate(processes):
        Thread(target=watch, args=(number, process), daemon=True).start()
    for _ in processes:
        number, code = ended.get()
        seen = read_black_boxes(directory, run_id)
        # Who has ended well has taken its box with it.
        if code or (number in seen and not seen[number][BlackBoxField.HAS_ENDED]):
            return FailedExit(number, code, seen)
    return FailedExit(-1, 0, {})


def _describe_failure(
    failure: FailedExit,
    black_boxes: Mapping[int, BlackBoxSnapshot],
    layout: ProcessLayout,
    directory: Path,
) -> tuple[str, int]:
    """What is said of a run that has failed, and the exit code.

    Who has ended another has said why; else it is the word of the one that ended, and where that
    has none, how it ended.
    """
    accusers = [
        one
        for one in black_boxes.values()
        if one[BlackBoxField.KILLED_PROCESS] == failure.process + 1
    ]
    own = black_boxes.get(failure.process)
    speakers = [*accusers, *([own] if own is not None else [])]
    if own is not None and own.has_failed and not own.reason:  # because of others
        speakers += sorted(black_boxes.values(), key=lambda one: one[BlackBoxField.FAILURE_TIME])
    for one in speakers:
        if one.has_failed and one.reason:
            return one.reason, one[BlackBoxField.EXIT_CODE] or 1
    how = f"ended with exit code {failure.code}"
    if failure.code < 0:
        how = f"was ended by signal {-failure.code} ({signal.strsignal(-failure.code)})"
    where = "before it had begun" if directory.exists() else "and its black box has gone"
    if failure.process in failure.black_boxes:
        where = StalledRun(failure.black_boxes, layout, load_program(directory)).describe_location(
            failure.process
        )
    code = (
        REFUSED_EXIT_CODE
        if failure.code == REFUSED_EXIT_CODE and failure.process not in failure.black_boxes
        else 1
    )
    return f"{layout.name_process(failure.process)} {how}, {where}; the others were stopped", code


def _remove_leftovers(directory: Path) -> None:
    """Remove what a run before this one has left, or this one, all done."""
    for path in [*directory.glob("[0-9]*"), directory / PROGRAM_FILE, directory / VERDICT_FILE]:
        path.unlink(missing_ok=True)
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()


_PRINT_LOCK = Lock()


def _start_forwarding(number: int, process: subprocess.Popen[bytes]) -> list[Thread]:
    """Threads that pass on what a process prints, as it comes."""
    left = [MAX_OUTPUT_BYTES]

    def pass_on(pipe: IO[bytes], to: IO[bytes]) -> None:
        while line := pipe.readline(MAX_LINE_BYTES):
            left[0] -= len(line)
            if left[0] < 0:
                if left[0] + len(line) >= 0:
                    line = f"... more than {MAX_OUTPUT_BYTES} bytes: the rest is left out".encode()
                else:
                    continue
            with _PRINT_LOCK:
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
