"""Start the processes of a run on this machine, forward their output, and end them together.

The launcher reads and writes only files in the directory of the black boxes, which is in the output
directory. If the launcher ends for any reason, the processes end, too.
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
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

from schedir.errors import UsageError
from schedir.hang_diagnosis.post_mortem import load_program, write_verdict
from schedir.hang_diagnosis.stall_cause import ProcessLayout, StalledRun
from schedir.io.black_box import (
    BLACK_BOX_DIRECTORY,
    FORMER_VERDICT_FILE,
    PROGRAM_FILE,
    VERDICT_FILE,
    BlackBoxField,
    BlackBoxSnapshot,
    compute_run_id,
    read_black_boxes,
)
from schedir.training.processes.graceful_stop import TERMINATED_EXIT_CODE
from schedir.training.processes.process_exit import (
    EXIT_GRACE,
    EXIT_TIMEOUT,
    LAUNCHER_PID_VARIABLE,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

MAX_PROCESSES: Final = 256  # Larger runs need several machines, so torchrun must start them.
MAX_OUTPUT_BYTES: Final = 2**20  # The launcher forwards at most this many bytes of a process.
MAX_LINE_BYTES: Final = 2**13  # Bytes. Longer lines are split.
REFUSED_EXIT_CODE: Final = 2  # The exit code of a process that refuses the configuration.


class FailedExit(NamedTuple):
    """The exit of the first process that failed.

    Args:
        process: The global rank of the process, or -1 if no process failed.
        code: The exit code of the process. A negative code is the number of a signal.
        black_boxes: The black boxes of all processes when the failed process exited.
    """

    process: int
    code: int
    black_boxes: Mapping[int, BlackBoxSnapshot]


def launch(
    arguments: Sequence[str], layout: ProcessLayout, output_dir: str, grace: float | None = None
) -> int:
    """Run `python -m schedir ARGUMENTS` in all processes of a run, as torchrun would.

    The environment of each process has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    The standard output of process 0 is forwarded unchanged. All other output is forwarded line by
    line, with the global rank of the process in front, up to `MAX_OUTPUT_BYTES` per process.

    When a process fails, the launcher prints the reason that the process reported. If the process
    reported no reason, the launcher prints the exit code or signal of the process, and its
    position. The launcher then kills the other processes.

    Args:
        arguments: The arguments of schedir.
        layout: The numbers of ranks, tensor-parallel ranks and replicas.
        output_dir: The output directory, for the black boxes.
        grace: The seconds in which the processes must exit after a SIGTERM. The launcher forwards
            the first SIGTERM to the processes. A second SIGTERM ends them immediately. With None,
            the first SIGTERM ends them immediately.

    Returns:
        The exit code: 0 if all processes succeeded, 1 if a process failed, 2 if a process refused
        the configuration, or 143 after SIGTERM.

    Raises:
        UsageError: There are more processes than `MAX_PROCESSES`.
    """
    world = layout.ranks * layout.tp * layout.dp
    if world > MAX_PROCESSES:
        raise UsageError(
            f"{world} processes are more than {MAX_PROCESSES}, the most that schedir train starts",
            hint="start them with torchrun",
        )
    store, port = _open_store()
    environment = _make_environment(world, port)
    folder = Path(output_dir, BLACK_BOX_DIRECTORY)
    _remove_leftovers(folder)
    failure: FailedExit | None = None
    processes: list[subprocess.Popen[bytes]] = []
    readers: list[Thread] = []
    signal_forwarding = _SignalForwarding(processes, grace)
    try:
        signal_forwarding.install()
        for number in range(world):
            process = _start_process(number, arguments, environment)
            processes.append(process)
            readers += _start_forwarding(number, process)
        signal_forwarding.forward_pending()
        failure = _wait_for_failure(processes, folder, compute_run_id(os.getpid(), environment))
        if signal_forwarding.has_received_signal and failure.code == TERMINATED_EXIT_CODE:
            signal_forwarding.wait()  # All processes are about to exit.
    finally:
        signal_forwarding.restore()
        _end_processes(processes, readers)
        del store
        if failure is None:  # The user has interrupted the run, so no process failed.
            _remove_leftovers(folder)
    if not failure.code and failure.process < 0:
        _remove_leftovers(folder)
        return 0
    run = compute_run_id(os.getpid(), environment)
    was_terminated = signal_forwarding.has_received_signal
    return _report_failure(failure, layout, folder, run, was_terminated=was_terminated)


def _report_failure(
    failure: FailedExit, layout: ProcessLayout, folder: Path, run: int, *, was_terminated: bool
) -> int:
    """Print why a run failed, save the message for later readers, and return the exit code."""
    black_boxes = read_black_boxes(folder, run)
    message, code = _describe_failure(failure, black_boxes, layout, folder)
    print(message, file=sys.stderr)
    # If SIGTERM killed a process, the process had nothing to save yet.
    if was_terminated and failure.code in (TERMINATED_EXIT_CODE, -signal.SIGTERM):
        _remove_leftovers(folder)
        return TERMINATED_EXIT_CODE
    if code == REFUSED_EXIT_CODE:  # The message is complete without the black boxes.
        _remove_leftovers(folder)
    else:
        write_verdict(folder, run, message)
    return code


def _open_store() -> tuple[TCPStore, int]:
    """Return the rendezvous store of the run, which is in this process, and its port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # This process holds the port from the start, so that no other process can take the port.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def _make_environment(world: int, port: int) -> dict[str, str]:
    """Return the environment variables that are equal in all processes."""
    return os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # All processes are clients of the store.
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "PYTHONUNBUFFERED": "1",
        LAUNCHER_PID_VARIABLE: str(os.getpid()),
    }


def _start_process(
    number: int, arguments: Sequence[str], environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "schedir", *arguments],
        stdin=subprocess.PIPE,  # The pipe closes when this process ends. See `end_with_parent`.
        stdout=subprocess.PIPE if number else None,
        stderr=subprocess.PIPE,
        env=environment | {"RANK": str(number), "LOCAL_RANK": str(number)},
        start_new_session=True,  # Ctrl-C must interrupt this process only.
    )


def _end_processes(processes: Sequence[subprocess.Popen[bytes]], readers: Sequence[Thread]) -> None:
    """Kill all processes, wait for the rest of their output, and close their pipes."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    for reader in readers:  # A child of a process may still run, and keep the pipe open.
        reader.join(EXIT_TIMEOUT)
    read = not any(reader.is_alive() for reader in readers)
    for process in processes:
        for pipe in (process.stdin, *((process.stdout, process.stderr) if read else ())):
            if pipe is not None:
                pipe.close()


# Seconds after the grace time until processes that still run are killed.
_KILL_DELAY: Final = 5.0


class _SignalForwarding:
    """Forwards SIGTERM to the processes of a run.

    Without a `grace`, SIGTERM ends this process. The processes of the run then end, too.
    """

    def __init__(self, processes: list[subprocess.Popen[bytes]], grace: float | None) -> None:
        self.processes = processes
        self.grace = grace
        self.has_received_signal = False
        self.previous_handler: Any = None
        self.kill_timer: Timer | None = None

    def install(self) -> None:
        """Install the handler, if there is a `grace` and this is the main thread."""
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
        """If SIGTERM was received, send it to all processes that have started."""
        if self.has_received_signal:
            for process in self.processes:
                process.terminate()

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()

    def wait(self) -> None:
        """Wait until all processes have exited, or one takes more than `EXIT_GRACE` seconds."""
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
    """Wait until a process fails, or exits with 0 too early, and return its exit.

    If all processes end normally, the `process` of the result is -1.
    """
    ended: SimpleQueue[tuple[int, int]] = SimpleQueue()

    def watch(number: int, process: subprocess.Popen[bytes]) -> None:
        ended.put((number, process.wait()))

    for number, process in enumerate(processes):
        Thread(target=watch, args=(number, process), daemon=True).start()
    for _ in processes:
        number, code = ended.get()
        black_boxes = read_black_boxes(directory, run_id)
        # A process that ended normally has removed its black box.
        if code or (number in black_boxes and not black_boxes[number][BlackBoxField.HAS_ENDED]):
            return FailedExit(number, code, black_boxes)
    return FailedExit(-1, 0, {})


def _describe_failure(
    failure: FailedExit,
    black_boxes: Mapping[int, BlackBoxSnapshot],
    layout: ProcessLayout,
    directory: Path,
) -> tuple[str, int]:
    """Return the error message of a run that failed, and the exit code.

    If another process killed the failed process, the message is the reason that the killer
    reported. Otherwise the message is the reason that the failed process reported. If the failed
    process reported no reason, the message has its exit code or signal.
    """
    killers = [
        black_box
        for black_box in black_boxes.values()
        if black_box[BlackBoxField.KILLED_PROCESS] == failure.process + 1
    ]
    failed_box = black_boxes.get(failure.process)
    candidates = [*killers, *([failed_box] if failed_box is not None else [])]
    # A process that failed without a reason failed because of another process.
    if failed_box is not None and failed_box.has_failed and not failed_box.reason:
        candidates += sorted(
            black_boxes.values(), key=lambda black_box: black_box[BlackBoxField.FAILURE_TIME]
        )
    for black_box in candidates:
        if black_box.has_failed and black_box.reason:
            return black_box.reason, black_box[BlackBoxField.EXIT_CODE] or 1
    exit_text = f"exited with code {failure.code}"
    if failure.code < 0:
        exit_text = f"was killed by signal {-failure.code} ({signal.strsignal(-failure.code)})"
    location = "before it joined the run" if directory.exists() else "and its black box is missing"
    if failure.process in failure.black_boxes:
        location = StalledRun(
            failure.black_boxes, layout, load_program(directory)
        ).describe_location(failure.process)
    code = (
        REFUSED_EXIT_CODE
        if failure.code == REFUSED_EXIT_CODE and failure.process not in failure.black_boxes
        else 1
    )
    return (
        f"{layout.name_process(failure.process)} {exit_text}, {location}; the other processes were "
        "stopped",
        code,
    )


def _remove_leftovers(directory: Path) -> None:
    """Remove the black boxes and other files that this run or an earlier run left."""
    names = (PROGRAM_FILE, VERDICT_FILE, FORMER_VERDICT_FILE)
    for path in [*directory.glob("[0-9]*"), *(directory / name for name in names)]:
        path.unlink(missing_ok=True)
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()


_PRINT_LOCK = Lock()


def _start_forwarding(number: int, process: subprocess.Popen[bytes]) -> list[Thread]:
    """Start the threads that forward the output of a process, line by line."""
    bytes_left = [MAX_OUTPUT_BYTES]

    def pass_on(pipe: IO[bytes], to: IO[bytes]) -> None:
        while line := pipe.readline(MAX_LINE_BYTES):
            bytes_left[0] -= len(line)
            if bytes_left[0] < 0:
                if bytes_left[0] + len(line) >= 0:
                    line = f"... more than {MAX_OUTPUT_BYTES} bytes: the rest is not shown".encode()
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
