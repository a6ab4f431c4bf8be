"""Tests of lanes, which run work in order after given events, and report times and errors."""

from __future__ import annotations

import gc
import threading
from threading import Event
from time import perf_counter, sleep
from typing import Any

import pytest
import torch

from schedir.ir.isa.instructions import Lane
from schedir.runtime.offload.copy_lanes import CopyLanes
from tests.cpu import virtual_gpu

CPU = torch.device("cpu")


def test_a_lane_is_in_order_and_waits_for_others() -> None:
    lanes, came, open_ = CopyLanes(CPU), list[str](), Event()

    def held() -> None:
        open_.wait()
        came.append("offload")

    first = lanes.start(Lane.D2H, held)
    second = lanes.start(Lane.H2D, lambda: came.append("reload"), after_jobs=[first])
    third = lanes.start(Lane.H2D, lambda: came.append("next"))
    beside = lanes.start(Lane.DISK, lambda: came.append("disk"))
    beside.wait()
    assert came == ["disk"] and not first.is_done and not second.is_done
    open_.set()
    third.wait()
    third.wait()  # any number of waits is allowed
    assert came == ["disk", "offload", "reload", "next"] and third.is_done
    assert torch.is_grad_enabled()


def test_what_fails_is_raised_by_all_that_come_after_it() -> None:
    lanes = CopyLanes(CPU)
    first = lanes.start(Lane.DISK, lambda: 1 / 0)
    second = lanes.start(Lane.H2D, lambda: None, after_jobs=[first])
    other = lanes.start(Lane.H2D, lambda: None)
    other.wait()
    for job in (first, second, second):
        with pytest.raises(ZeroDivisionError):
            job.wait()


def test_a_slow_lane_takes_its_time() -> None:
    lanes = CopyLanes(CPU)
    lanes.bandwidth[Lane.D2H] = 1e6
    began = perf_counter()
    lanes.start(Lane.D2H, lambda: None, 20_000).wait()
    assert perf_counter() - began >= 0.02


def test_threads_go_when_nobody_can_start_anything() -> None:
    lanes = CopyLanes(CPU)
    lanes.start(Lane.D2H, lambda: None).wait()
    name = "lane D2H"
    mine = [thread for thread in threading.enumerate() if thread.name == name]
    del lanes
    gc.collect()
    until = perf_counter() + 5
    while any(thread.is_alive() for thread in mine[-1:]) and perf_counter() < until:
        sleep(0.001)
    assert mine and not mine[-1].is_alive()


def test_on_a_gpu_a_lane_is_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on a lane follows earlier compute and given events, and the host never waits."""
    gpu = virtual_gpu.install(monkeypatch)
    gpu.host_may_wait = False
    lanes = CopyLanes(torch.device("cuda"))
    gpu.work(3)
    out = lanes.start(Lane.D2H, lambda: gpu.work(5))
    gpu.work(1)
    back = lanes.start(Lane.H2D, lambda: gpu.work(2), after_jobs=[out])
    assert gpu.stream.now == 4 and not out.is_done
    streams: Any = lanes.streams
    assert [streams[lane].now for lane in (Lane.D2H, Lane.H2D)] == [8, 10]
    out.wait()
    assert gpu.stream.now == 8
    back.wait()
    assert gpu.stream.now == 10
    gpu.host = 10.0
    assert out.is_done and back.is_done
