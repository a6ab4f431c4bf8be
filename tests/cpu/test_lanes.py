"""Tests of copy lanes: they run work in order, after the given events, and report errors."""

from __future__ import annotations

import gc
import threading
from threading import Event
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from schedir.ir.isa.instructions import Lane
from schedir.runtime.offload.copy_lanes import CopyLanes
from tests.cpu import virtual_gpu

CPU = torch.device("cpu")


def _make_lanes(device: torch.device) -> CopyLanes:
    resources: Any = SimpleNamespace(device=device)
    return CopyLanes(resources)


def test_lane_runs_in_order_and_after_other_jobs() -> None:
    lanes, finished, may_run = _make_lanes(CPU), list[str](), Event()

    def wait_and_offload() -> None:
        may_run.wait()
        finished.append("offload")

    first = lanes.start(Lane.D2H, wait_and_offload)
    second = lanes.start(Lane.H2D, lambda: finished.append("reload"), after_jobs=[first])
    third = lanes.start(Lane.H2D, lambda: finished.append("next"))
    disk_job = lanes.start(Lane.DISK, lambda: finished.append("disk"))
    disk_job.wait()
    assert finished == ["disk"] and not first.is_done and not second.is_done
    may_run.set()
    third.wait()
    third.wait()  # any number of waits is allowed
    assert finished == ["disk", "offload", "reload", "next"] and third.is_done
    assert torch.is_grad_enabled()


def test_failed_job_raises_in_dependent_jobs() -> None:
    lanes = _make_lanes(CPU)
    first = lanes.start(Lane.DISK, lambda: 1 / 0)
    second = lanes.start(Lane.H2D, lambda: None, after_jobs=[first])
    independent = lanes.start(Lane.H2D, lambda: None)
    independent.wait()
    for job in (first, second, second):
        with pytest.raises(ZeroDivisionError):
            job.wait()


def test_lane_bandwidth_limits_speed() -> None:
    lanes = _make_lanes(CPU)
    lanes.bandwidth[Lane.D2H] = 1e6
    start = perf_counter()
    lanes.start(Lane.D2H, lambda: None, 20_000).wait()
    assert perf_counter() - start >= 0.02


def test_lane_threads_end_with_their_owner() -> None:
    lanes = _make_lanes(CPU)
    lanes.start(Lane.D2H, lambda: None).wait()
    name = "lane D2H"
    lane_threads = [thread for thread in threading.enumerate() if thread.name == name]
    del lanes
    gc.collect()
    deadline = perf_counter() + 5
    while any(thread.is_alive() for thread in lane_threads[-1:]) and perf_counter() < deadline:
        sleep(0.001)
    assert lane_threads and not lane_threads[-1].is_alive()


def test_lane_is_stream_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on a lane runs after earlier compute and after the given jobs. The host never waits."""
    gpu = virtual_gpu.install_virtual_gpu(monkeypatch)
    gpu.host_may_wait = False
    lanes = _make_lanes(torch.device("cuda"))
    gpu.work(3)
    offload = lanes.start(Lane.D2H, lambda: gpu.work(5))
    gpu.work(1)
    reload = lanes.start(Lane.H2D, lambda: gpu.work(2), after_jobs=[offload])
    assert gpu.stream.now == 4 and not offload.is_done
    streams: Any = lanes.streams
    assert [streams[lane].now for lane in (Lane.D2H, Lane.H2D)] == [8, 10]
    offload.wait()
    assert gpu.stream.now == 8
    reload.wait()
    assert gpu.stream.now == 10
    gpu.host = 10.0
    assert offload.is_done and reload.is_done
