"""Agree on the step after which the processes of a run stop.

Steps pay nothing for it.  Each process has a thread that waits at the store where they meet, until
one says there that it was told to end.  Then none begins another step; each says how many it has
begun, and all finish the most of these: who is within that step needs the others, who may stand
before it.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from threading import Condition, Thread
from time import monotonic
from typing import Final

from schedir.training.processes.process_exit import make_store_key
from schedir.training.processes.rendezvous_store import connect_store

STORE_TIMEOUT: Final = 60.0  # seconds
_FOREVER: Final = timedelta(days=3650)


class GracefulStop:
    """When process `process` of `processes` is to end.

    `notice_time` is when it has heard that one was told to, by `time.monotonic`, and `last_step`
    the step after which all end, when they have agreed.
    """

    def __init__(self, process: int, processes: int) -> None:
        self.process, self.processes = process, processes
        self.last_begun_step = 0
        self.signal_time: float | None = None  # when this process was told
        self.notice_time: float | None = None
        self.last_step: int | None = None
        self.condition = Condition()
        if processes > 1:
            Thread(target=self._listen, name="stop", daemon=True).start()

    def try_begin_step(self, step: int) -> bool:
        """Whether this process is to make a step (from 1), which then has begun.

        Once one was told to end, it waits here until all know after which step they do.
        """
        with self.condition:
            while self.notice_time is not None and self.last_step is None:
                self.condition.wait()
            if self.last_step is not None and step > self.last_step:
                return False
            self.last_begun_step = step
            return True

    def is_grace_over(self, grace: float) -> bool:
        """Whether it is longer than so many seconds ago that this one knows of it."""
        since = [at for at in (self.signal_time, self.notice_time) if at is not None]
        return bool(since) and monotonic() - min(since) > grace

    def request_stop(self) -> None:
        """Let all processes end; returns at once."""
        self.signal_time = monotonic()
        if self.processes == 1:
            with self.condition:
                self.notice_time, self.last_step = monotonic(), self.last_begun_step
                self.condition.notify_all()
        else:
            Thread(target=self._send_request, daemon=True).start()

    def _send_request(self) -> None:
        with suppress(Exception):  # the store has gone with who had it: then all end, late
            connect_store(STORE_TIMEOUT).set(make_store_key("told to end"), b"")

    def _listen(self) -> None:
        with suppress(Exception):
            store = connect_store(STORE_TIMEOUT)  # of its own: another call would wait for this one
            store.wait([make_store_key("told to end")], _FOREVER)
            with self.condition:
                self.notice_time, begun = monotonic(), self.last_begun_step
            store.set(make_store_key(f"begun by {self.process}"), str(begun))
            if self.process == 0:
                keys = [make_store_key(f"begun by {k}") for k in range(self.processes)]
                store.wait(keys, _FOREVER)
                store.set(make_store_key("last step"), str(max(map(int, store.multi_get(keys)))))
            store.wait([make_store_key("last step")], _FOREVER)
            with self.condition:
                self.last_step = int(store.get(make_store_key("last step")))
                self.condition.notify_all()
