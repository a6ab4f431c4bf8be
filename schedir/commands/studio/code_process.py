"""Run the code of the editor in a process with limits of time and memory.

`python -m schedir.commands.studio.code_process` reads a state as one line of JSON. The process
writes the text of the draft, or an error, as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from inspect import signature
from pathlib import Path
from traceback import extract_tb
from types import FunctionType
from typing import Any, Final

from schedir.commands.studio.state import CodeError, StudioState, make_state_request
from schedir.errors import SchedirError, describe_exception
from schedir.io.source_loader import Source
from schedir.ir.input_trust import input_limits
from schedir.ir.text_format import to_text
from schedir.schedules.schedule_expansion import expand_schedule

MAX_SECONDS: Final = 5.0
MAX_BYTES: Final = 10**9
_FILE: Final = "schedule.py"  # The file name of the code in tracebacks.


class CodeRunner:
    """Runs code in processes, one for each run. The next process is started in advance.

    Args:
        max_instructions: The largest number of instructions of a schedule.
        max_seconds: The longest time of a run, in seconds.
    """

    def __init__(self, max_instructions: int, max_seconds: float = MAX_SECONDS) -> None:
        self._max_instructions = max_instructions
        self._max_seconds = max_seconds
        self._lock = threading.Lock()
        self._processes = {self._start()}
        self._is_closed = False

    def expand(self, state: StudioState) -> str:
        """Run the code of a state in a process, and return the text of its draft.

        Args:
            state: The state.

        Raises:
            CodeError: The code is wrong, or exceeds a limit.
        """
        question = state.to_json() | {"max_instructions": self._max_instructions}
        with self._lock:
            if self._is_closed:
                raise _make_stop_error()
            process = self._processes.pop()
            self._processes |= {process, self._start()}
            try:
                answer = _communicate(process, json.dumps(question), self._max_seconds)
            except CodeError:
                if self._is_closed:
                    raise _make_stop_error() from None
                raise
            finally:
                _kill(process)
                self._processes.discard(process)
            if "error" in answer:
                raise CodeError(answer["error"], line=answer["line"], hint=answer["hint"])
            return str(answer["text"])

    def close(self) -> None:
        """End all processes."""
        self._is_closed = True
        for process in [*self._processes]:
            _send_kill(process)  # A run in another thread then ends and releases the lock.
        with self._lock:
            for process in self._processes:
                _kill(process)

    @staticmethod
    def _start() -> subprocess.Popen[bytes]:
        folder = str(Path(__file__).resolve().parents[3])
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        return subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | threads | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C reaches only the studio, which ends this process.
        )


def _communicate(
    process: subprocess.Popen[bytes], question: str, max_seconds: float
) -> dict[str, Any]:
    """Send a question to a process, and return its answer.

    Raise `CodeError` if there is no valid answer within `max_seconds`.
    """
    try:
        assert process.stdout is not None
        process.stdout.readline()  # Wait until the process is ready. The limit excludes its start.
        output, _ = process.communicate(f"{question}\n".encode(), max_seconds)
    except subprocess.TimeoutExpired:
        fact = f"the code did not finish within {max_seconds:g} s, and was stopped"
        raise CodeError(fact, hint="does each loop end?") from None
    try:
        answer = json.loads(output)
    except ValueError:
        raise CodeError(
            f"the process that ran the code ended with exit status {process.wait(1)} and returned "
            "no schedule"
        ) from None
    return answer if isinstance(answer, dict) else {}


def _make_stop_error() -> CodeError:
    return CodeError("the studio has stopped", hint="schedir studio starts it again")


def _send_kill(process: subprocess.Popen[bytes]) -> None:
    """Send a signal that ends a process and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all processes that it started, and close its pipes."""
    _send_kill(process)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


# ---------------------------------------------------------------- in the process


def expand_code(state: StudioState) -> str:
    """Run the code of a state in this process, and return the text of its draft.

    Args:
        state: The state.

    Raises:
        CodeError: The code is wrong.
    """
    try:
        function = _load_function(state)
        source = Source.from_loaded(function, function.__name__)
        return to_text(expand_schedule(function, make_state_request(state, source).shape))
    except CodeError:
        raise
    except SchedirError as error:
        line = _find_line(error)
        raise CodeError(error.fact, line=line, hint=error.hint) from error
    except BaseException as error:  # This includes SystemExit.
        raise CodeError(describe_exception(error), line=_find_line(error)) from error


def _load_function(state: StudioState) -> FunctionType:
    """Execute the code, and return its schedule function under its name in the code.

    If the state names no function, the schedule function is the last function with three or more
    parameters.
    """
    namespace: dict[str, Any] = {"__name__": "schedule", "__file__": _FILE}
    exec(compile(state.code, _FILE, "exec"), namespace)
    functions = {
        name: value
        for name, value in namespace.items()
        if isinstance(value, FunctionType) and value.__code__.co_filename == _FILE
    }
    if state.function:
        functions = (
            {state.function: functions[state.function]} if (state.function in functions) else {}
        )
    takes_shape = [name for name, each in functions.items() if len(signature(each).parameters) >= 3]
    if not takes_shape:
        name = state.function or "schedule"
        raise CodeError(
            f"the code has no function {name}(rank, ranks, microbatches)",
            hint=f"def {name}(rank, ranks, microbatches): return microbatches * (F + B)",
        )
    function = functions[takes_shape[-1]]
    function.__name__ = takes_shape[-1]  # The name of a lambda would be "<lambda>".
    return function


def _find_line(error: BaseException) -> int:
    """Return the line number in the code at which an error was raised, or 0."""
    cause: BaseException | None = error
    line = 0
    while cause is not None:
        if isinstance(cause, SyntaxError) and cause.filename == _FILE:
            line = cause.lineno or line
        lines = [f.lineno for f in extract_tb(cause.__traceback__) if f.filename == _FILE]
        line = (lines[-1] or line) if lines else line
        cause = cause.__cause__
    return line


def main() -> None:
    """Answer one question from standard input."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Output of the code must not mix with the answer.
    print("ready", file=output, flush=True)
    question = json.loads(sys.stdin.readline() or "null")
    if question is None:  # The studio has ended.
        return
    max_instructions = question.pop("max_instructions")
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    seconds = int(MAX_SECONDS) + 1  # This limit ends the process even if the studio has ended.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    answer: dict[str, Any]
    try:
        with (
            input_limits(max_instructions=max_instructions),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            answer = {"text": expand_code(StudioState.from_json(question))}
    except SchedirError as error:
        line = error.line if isinstance(error, CodeError) else 0
        answer = {"error": error.fact, "line": line, "hint": error.hint}
    output.write(json.dumps(answer))
    output.flush()
    os._exit(0)  # Threads of the code must not keep the process alive.


if __name__ == "__main__":
    main()
