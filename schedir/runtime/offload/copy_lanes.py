"""Lanes of a rank beside compute: copies to and from the host, the disk, and host compute.

What is started on a lane runs when all before it on that lane has, and what else it is told to come
after.  On a CPU a lane is a thread; on a GPU it is a stream, for which the host does not wait.  The
disk's and the host's are threads in any case, and a copy that comes after one of these waits for it
on the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from threading import Event, Thread
from time import perf_counter, sleep
from typing import Any, Final, Protocol

import torch

from schedir.ir.isa.instructions import Lane

_THREAD_LANES: Final = (Lane.DISK, Lane.HOST)


class LaneObserver(Protocol):
    """Who is told, on the lane, when something begins there and when it ends."""

    def on_begin(self) -> None: ...
    def on_end(self) -> None: ...


class LaneJob:
    """Something that was started on a lane."""

    def wait(self) -> None:
        """Let what is computed from here on come after it: on a CPU the host waits, on a GPU the
        current stream.  As often as one likes; raises whatever it has raised."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait on the host until it has ended.  Raises as `wait`."""
        raise NotImplementedError

    @property
    def is_done(self) -> bool:
        """Whether it has; nobody waits."""
        raise NotImplementedError


class CopyLanes:
    """The lanes of a rank, each made when it is first used.

    `bandwidth` is for tests on CPUs: what is started on such a lane takes at least the time that
    its bytes take at so many a second.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.uses_streams = device, device.type == "cuda"
        self.bandwidth: dict[Lane, float] = {}
        self.threads: dict[Lane, SimpleQueue[_ThreadJob | None]] = {}
        self.streams: dict[Lane, torch.cuda.Stream] = {}

    def start(
        self,
        lane: Lane,
        run: Callable[[], object],
        nbytes: int = 0,
        after_jobs: Iterable[LaneJob] = (),
        observer: LaneObserver | None = None,
    ) -> LaneJob:
        """Start something on a lane: `run`, which copies so many bytes, without gradients; on a
        GPU with `non_blocking`, on the lane's stream, where it comes after what was computed."""
        if self.uses_streams and lane not in _THREAD_LANES:
            if lane not in self.streams:
                self.streams[lane] = torch.cuda.Stream(self.device, priority=-1)
            return _StreamJob(self.streams[lane], run, after_jobs, observer)
        if lane not in self.threads:
            queue = self.threads[lane] = SimpleQueue()
            Thread(target=_run_jobs, args=(queue,), name=f"lane {lane.name}", daemon=True).start()
            weakref.finalize(self, queue.put, None)
        seconds = nbytes / self.bandwidth[lane] if lane in self.bandwidth else 0.0
        job = _ThreadJob(run, [*after_jobs], observer, seconds)
        self.threads[lane].put(job)
        return job


class _ThreadJob(LaneJob):
    """A job of a thread; torch lets others run while it copies."""

    def __init__(
        self,
        run: Callable[[], object],
        after_jobs: list[LaneJob],
        observer: LaneObserver | None,
        seconds: float,
    ) -> None:
        self.pending_call: tuple[Any, ...] | None = (run, after_jobs, observer)
        self.seconds, self.done_event = seconds, Event()
        self.error: BaseException | None = None

    def work(self) -> None:
        """Run it: in the thread."""
        assert self.pending_call is not None
        run, after, marks = self.pending_call
        try:
            for one in after:
                one.finish()
            began = perf_counter()
            if marks is not None:
                marks.on_begin()
            with torch.no_grad():
                run()
            if (left := began + self.seconds - perf_counter()) > 0:
                sleep(left)
            if marks is not None:
                marks.on_end()
        except BaseException as error:  # whoever waits raises it
            self.error = error
        self.pending_call = None  # whoever keeps the job does not keep what it has copied
        del run, after, marks
        self.done_event.set()

    def wait(self) -> None:
        self.done_event.wait()
        if self.error is not None:
            raise self.error

    finish = wait

    @property
    def is_done(self) -> bool:
        return self.done_event.is_set()


def _run_jobs(queue: SimpleQueue[_ThreadJob | None]) -> None:
    """Run what is started, in order, until nobody can start anything more."""
    while (job := queue.get()) is not None:
        job.work()
        del job


class _StreamJob(LaneJob):
    """A job of a stream."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        run: Callable[[], object],
        after_jobs: Iterable[LaneJob],
        observer: LaneObserver | None,
    ) -> None:
        # Of the stream that computes, and of no other: it is noted before the lane is entered.
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream())
        self.event = torch.cuda.Event()
        with torch.cuda.stream(stream), torch.no_grad():
            stream.wait_event(ready)
            for one in after_jobs:
                one.wait()
            if observer is not None:
                observer.on_begin()
            run()
            if observer is not None:
                observer.on_end()
            self.event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)

    def finish(self) -> None:
        self.event.synchronize()

    @property
    def is_done(self) -> bool:
        return bool(self.event.query())
