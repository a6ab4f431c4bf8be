"""Run commands one after the other in a process with little memory and time, for hostile input.

A command that needs more processor time than 25 million steps of a loop, or more than 200 MB, ends
with an error that is not a refusal. The loop makes the limit independent of the machine: it is
about two seconds on a processor of 2023.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import NamedTuple

LOOP_STEPS, MEASURED_STEPS = 25_000_000, 500_000
BYTES = 200 * 10**6
HANGS = 60  # the limit in seconds for a command that waits forever
ROOT = Path(__file__).parents[1]


class CommandResult(NamedTuple):
    """The exit code of a command, and its standard error."""

    code: int
    text: str


class _TooLong(BaseException):
    """Raised within a command that takes too long."""


def run_limited(commands: Sequence[Sequence[str]], cwd: Path) -> list[CommandResult]:
    """Run some commands in a process of their own, and return the result of each."""
    server = _start_server()
    assert server.stdin is not None and server.stdout is not None
    print(json.dumps([str(cwd), commands]), file=server.stdin, flush=True)
    line = server.stdout.readline()
    assert line.strip(), "the process of the commands ended without results"
    return [CommandResult(*each) for each in json.loads(line)]


@cache
def _start_server() -> subprocess.Popen[str]:
    """Start a process that imports schedir once. It ends when this process ends."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
    server = subprocess.Popen(
        [sys.executable, "-c", f"{code}from tests.limited_process import main; main()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(server.communicate)  # the server ends at the end of its standard input
    return server


def main() -> None:
    """Run the commands of each line of standard input in a fork of this process."""
    from schedir import __main__ as command

    for name in ("check", "import", "where", "train"):  # their imports do not count
        _run(command.main, [name, "no-such-file.toml"])
    seconds = _loop_seconds() * LOOP_STEPS / MEASURED_STEPS
    for line in sys.stdin:
        cwd, commands = json.loads(line)
        if (child := os.fork()) == 0:
            os.chdir(cwd)
            print(json.dumps(_run_all(command.main, commands, seconds)), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            print(flush=True)


def _run_all(main: object, commands: list[list[str]], seconds: float) -> list[tuple[int, str]]:
    """Run commands in this process, each with at most this processor time."""
    resource.setrlimit(resource.RLIMIT_DATA, (_data() + BYTES,) * 2)
    signal.signal(signal.SIGVTALRM, _too_long)
    signal.signal(signal.SIGALRM, _too_long)
    said = []
    for argv in commands:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        signal.alarm(HANGS)
        said.append(_run(main, argv))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.alarm(0)
    return said


def _run(main: object, argv: list[str]) -> tuple[int, str]:
    errors = io.StringIO()
    with redirect_stderr(errors), redirect_stdout(io.StringIO()):
        try:
            code = main(argv)  # type: ignore[operator]
        except _TooLong:
            return -1, f"it took too long\n{errors.getvalue()}"
    return code, errors.getvalue()


def _loop_seconds() -> float:
    """Return the processor time of `MEASURED_STEPS` steps of a loop, the median of five runs."""
    seconds = []
    for _ in range(5):
        start = time.process_time()
        total = 0
        for step in range(MEASURED_STEPS):
            total += step % 7
        seconds.append(time.process_time() - start)
    return sorted(seconds)[2]


def _too_long(*_: object) -> None:
    raise _TooLong


def _data() -> int:
    """Return the present bytes of the process, as RLIMIT_DATA counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
