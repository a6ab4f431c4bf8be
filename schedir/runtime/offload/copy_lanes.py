"""Lanes of a rank besides compute: copies to and from the host and disk, and host compute.

A job on a lane runs after all earlier jobs of the lane, and after the jobs in `after_jobs`. On a
CPU a lane is a thread. On a GPU it is a CUDA stream, and the host does not wait for it. The disk
lane and the host lane are always threads. If a copy on a stream depends on a job of a thread, the
host waits for this job before it issues the copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from threading import Event, Thread
from time import perf_counter, sleep
from typing import Any, Final

import torch

from schedir.ir.isa.instructions import Lane
from schedir.runtime.rank_resources import RankResources, RankService

_THREAD_LANES: Final = (Lane.DISK, Lane.HOST)


# Records, on the lane, that a job begins (False) or has ended (True).
LaneObserver = Callable[[bool], None]


class CopyLanes(RankService):
    """The lanes of a rank. Each lane is created at its first use.

    The attribute `bandwidth` is for tests on CPUs: lane -> bytes per second. A job on a lane with a
    bandwidth takes at least the time that its bytes need at this bandwidth.

    Args:
        resources: The resources of the rank.
    """

    def __init__(self, resources: RankResources) -> None:
        self.device: torch.device = resources.device
        self.uses_streams = self.device.type == "cuda"
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
        """Start a job on a lane.

        Args:
            lane: The lane.
            run: The function to run. It runs with torch's gradient mode off. If the lane is a CUDA
                stream, this method calls the function immediately, with this stream as the current
                stream. Copies in this function must be `non_blocking`. The stream first waits for
                the current computation.
            nbytes: The bytes that the job copies.
            after_jobs: Jobs that must end before this job begins.
            observer: Records the start and the end of the job.

        Returns:
            The job.
        """
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


class _ThreadJob:
    """A job that a thread runs. Torch releases the interpreter lock while it copies."""

    def __init__(
        self,
        run: Callable[[], object],
        after_jobs: list[LaneJob],
        observer: LaneObserver | None,
        seconds: float,
    ) -> None:
        self.pending_call: tuple[Any, ...] | None = (run, after_jobs, observer)
        self.seconds = seconds
        self.done_event = Event()
        self.error: BaseException | None = None

    def work(self) -> None:
        """Run the job, in the thread of the lane."""
        assert self.pending_call is not None
        run, after_jobs, observer = self.pending_call
        try:
            for job in after_jobs:
                job.finish()
            begin_time = perf_counter()
            if observer is not None:
                observer(False)
            with torch.no_grad():
                run()
            if (remaining_seconds := begin_time + self.seconds - perf_counter()) > 0:
                sleep(remaining_seconds)
            if observer is not None:
                observer(True)
        except BaseException as error:  # `wait` raises it.
            self.error = error
        self.pending_call = None  # a reference to the job must not keep tensors alive
        del run, after_jobs, observer
        self.done_event.set()

    def wait(self) -> None:
        """Wait on the host until the job has ended. If the job failed, raise its error.

        This method may be called several times.
        """
        self.done_event.wait()
        if self.error is not None:
            raise self.error

    finish = wait

    @property
    def is_done(self) -> bool:
        """Return whether the job has ended. Do not wait for it."""
        return self.done_event.is_set()


def _run_jobs(queue: SimpleQueue[_ThreadJob | None]) -> None:
    """Run the jobs of a lane in order, until the queue returns None."""
    while (job := queue.get()) is not None:
        job.work()
        del job


class _StreamJob:
    """A job that the constructor issues to a stream."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        run: Callable[[], object],
        after_jobs: Iterable[LaneJob],
        observer: LaneObserver | None,
    ) -> None:
        # Record this event on the compute stream, before the lane's stream becomes current.
        ready_event = torch.cuda.Event()
        ready_event.record(torch.cuda.current_stream())
        self.event = torch.cuda.Event()
        with torch.cuda.stream(stream), torch.no_grad():
            stream.wait_event(ready_event)
            for job in after_jobs:
                job.wait()
            if observer is not None:
                observer(False)
            run()
            if observer is not None:
                observer(True)
            self.event.record(stream)

    def wait(self) -> None:
        """Make the following computation of the current stream wait for the job."""
        torch.cuda.current_stream().wait_event(self.event)

    def finish(self) -> None:
        """Wait on the host until the job has ended."""
        self.event.synchronize()

    @property
    def is_done(self) -> bool:
        """Return whether the job has ended. Do not wait for it."""
        return bool(self.event.query())


LaneJob = _ThreadJob | _StreamJob
