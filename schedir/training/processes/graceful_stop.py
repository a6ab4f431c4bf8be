"""Stop the processes of a run after SIGTERM: agree on the last step, and exit when it is saved.

The watchdog receives the signal, and requests the stop. After the last step, the trainer saves the
state and raises `TerminationNotice`.

The agreement costs no time within a step. Each process has a thread that waits at the rendezvous
store for a stop request. After a request, each process writes to the store the last step that it
has begun. The process begins no other step until all processes have written their last steps. All
processes then finish the largest of these steps, because a process within that step needs all other
processes.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from datetime import timedelta
from threading import Condition, Thread
from time import monotonic
from typing import Final, NoReturn

from schedir.io.black_box import BlackBoxField
from schedir.training.processes.process_exit import (
    get_current_member,
    is_launched,
    make_store_key,
)
from schedir.training.processes.rendezvous_store import connect_store

TERMINATED_EXIT_CODE: Final = 128 + signal.SIGTERM  # The exit code of a run after SIGTERM.
STORE_TIMEOUT: Final = 60.0  # Seconds to connect to the store.
_FOREVER: Final = timedelta(days=3650)


class TerminationNotice(Exception):
    """Raised to end a run after SIGTERM.

    Args:
        saved: A text with the step that is saved.
    """

    def __init__(self, saved: str) -> None:
        super().__init__(f"received SIGTERM: {saved}")


class GracefulStop:
    """Ends one process of a run after SIGTERM. All processes end after the same step.

    Args:
        process: The global rank of this process.
        processes: The number of processes.

    Attributes:
        last_begun_step: The last step that this process has begun, from 1.
        signal_time: The time by `time.monotonic` when this process requested the stop. None before.
        notice_time: The time by `time.monotonic` when this process received a stop request. None
            before.
        last_step: The step after which all processes stop. None before they agree.
    """

    def __init__(self, process: int, processes: int) -> None:
        self.process = process
        self.processes = processes
        self.last_begun_step = 0
        self.signal_time: float | None = None
        self.notice_time: float | None = None
        self.last_step: int | None = None
        self.condition = Condition()
        if processes > 1:
            Thread(target=self._listen, name="stop", daemon=True).start()

    def try_begin_step(self, step: int) -> bool:
        """Return True and begin a step, or return False if the processes stop before this step.

        After a stop request, this method waits until the processes agree on the last step.

        Args:
            step: The step, from 1.
        """
        with self.condition:
            while self.notice_time is not None and self.last_step is None:
                self.condition.wait()
            if self.last_step is not None and step > self.last_step:
                return False
            self.last_begun_step = step
            return True

    def is_grace_over(self, grace: float) -> bool:
        """Return whether the stop was requested more than `grace` seconds ago.

        Args:
            grace: The time to finish and save a step, in seconds.
        """
        stop_times = [time for time in (self.signal_time, self.notice_time) if time is not None]
        return bool(stop_times) and monotonic() - min(stop_times) > grace

    def request_stop(self) -> None:
        """Request that all processes stop, and return immediately."""
        self.signal_time = monotonic()
        if self.processes == 1:
            with self.condition:
                self.notice_time = monotonic()
                self.last_step = self.last_begun_step
                self.condition.notify_all()
        else:
            Thread(target=self._send_request, daemon=True).start()

    def _send_request(self) -> None:
        # If the process with the store has exited, no request is sent. The other processes then
        # exit because that process is missing.
        with suppress(Exception):
            connect_store(STORE_TIMEOUT).set(make_store_key("stop request"), b"")

    def _listen(self) -> None:
        with suppress(Exception):
            # This thread needs a separate connection, because `wait` blocks all other calls on the
            # same connection.
            store = connect_store(STORE_TIMEOUT)
            store.wait([make_store_key("stop request")], _FOREVER)
            with self.condition:
                self.notice_time, begun_step = monotonic(), self.last_begun_step
            store.set(make_store_key(f"begun by {self.process}"), str(begun_step))
            if self.process == 0:
                keys = [make_store_key(f"begun by {k}") for k in range(self.processes)]
                store.wait(keys, _FOREVER)
                store.set(make_store_key("last step"), str(max(map(int, store.multi_get(keys)))))
            store.wait([make_store_key("last step")], _FOREVER)
            with self.condition:
                self.last_step = int(store.get(make_store_key("last step")))
                self.condition.notify_all()


def exit_after_termination(reason: str) -> NoReturn:
    """End this process after SIGTERM, when the last step is saved.

    Args:
        reason: The text that process 0 reports.
    """
    member = get_current_member()
    if member is not None and is_launched():
        member.black_box.values[BlackBoxField.HAS_ENDED] = 1
        member.black_box.report_failure(reason if member.process == 0 else "", TERMINATED_EXIT_CODE)
    elif member is not None:
        member.finish()
    if not is_launched() and os.environ.get("RANK", "0") == "0":
        print(reason, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(TERMINATED_EXIT_CODE)
