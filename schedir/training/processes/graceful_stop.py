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

from schedir.training.processes.process_exit import key
from schedir.training.processes.rendezvous_store import connected

PATIENCE: Final = 60.0  # seconds
_ALWAYS: Final = timedelta(days=3650)


class GracefulStop:
    """When process `process` of `processes` is to end.

    `told` is when it has heard that one was told to, by `time.monotonic`, and `last` the step after
    which all end, when they have agreed.
    """

    def __init__(self, process: int, processes: int) -> None:
        self.process, self.processes = process, processes
        self.begun = 0
        self.since: float | None = None  # when this process was told
        self.told: float | None = None
        self.last: int | None = None
        self.changed = Condition()
        if processes > 1:
            Thread(target=self._listen, name="stop", daemon=True).start()

    def begins(self, step: int) -> bool:
        """Whether this process is to make a step (from 1), which then has begun.

        Once one was told to end, it waits here until all know after which step they do.
        """
        with self.changed:
            while self.told is not None and self.last is None:
                self.changed.wait()
            if self.last is not None and step > self.last:
                return False
            self.begun = step
            return True

    def is_late(self, grace: float) -> bool:
        """Whether it is longer than so many seconds ago that this one knows of it."""
        since = [at for at in (self.since, self.told) if at is not None]
        return bool(since) and monotonic() - min(since) > grace

    def tell(self) -> None:
        """Let all processes end; returns at once."""
        self.since = monotonic()
        if self.processes == 1:
            with self.changed:
                self.told, self.last = monotonic(), self.begun
                self.changed.notify_all()
        else:
            Thread(target=self._tell, daemon=True).start()

    def _tell(self) -> None:
        with suppress(Exception):  # the store has gone with who had it: then all end, late
            connected(PATIENCE).set(key("told to end"), b"")

    def _listen(self) -> None:
        with suppress(Exception):
            store = connected(PATIENCE)  # of its own: another call would wait for this one
            store.wait([key("told to end")], _ALWAYS)
            with self.changed:
                self.told, begun = monotonic(), self.begun
            store.set(key(f"begun by {self.process}"), str(begun))
            if self.process == 0:
                keys = [key(f"begun by {k}") for k in range(self.processes)]
                store.wait(keys, _ALWAYS)
                store.set(key("last step"), str(max(map(int, store.multi_get(keys)))))
            store.wait([key("last step")], _ALWAYS)
            with self.changed:
                self.last = int(store.get(key("last step")))
                self.changed.notify_all()
