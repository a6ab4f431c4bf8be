"""Tests of the test helper that runs a function on several ranks, and of its errors."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from schedir.errors import CheckpointError
from schedir.io.black_box import read_process_state
from schedir.transports import local_processes
from schedir.transports.local_processes import run_processes as run_in
from tests.cpu.gloo_processes import CONTEXT, RankError, run, run_fresh
from tests.cpu.train_command import wait_until


def sum_over_ranks(rank: int, start: torch.Tensor) -> torch.Tensor:
    x = start + rank
    dist.all_reduce(x)
    return x


def fail_on(rank: int, bad: int) -> None:
    if rank == bad:
        raise ValueError("the cause")
    dist.all_reduce(torch.zeros(1))


def die_on(rank: int, bad: int) -> None:
    if rank == bad:
        os._exit(3)
    dist.all_reduce(torch.zeros(1))


def hang_on(rank: int, bad: int) -> None:
    if rank == bad:
        time.sleep(1000)


def test_results_are_ordered_by_rank() -> None:
    sums = run(sum_over_ranks, 3, torch.ones(2))
    assert [x.tolist() for x in sums] == [[6.0, 6.0]] * 3


@pytest.mark.parametrize("how", [run, run_fresh])
def test_failure_shows_its_traceback_first_and_ends_other_ranks(how: Any) -> None:
    with pytest.raises(RankError) as error:
        how(fail_on, 2, 1)
    assert "the cause" in error.value.tracebacks[1]
    assert next(iter(error.value.tracebacks)) == 1


def test_dead_rank_is_reported() -> None:
    with pytest.raises(RankError) as error:
        run(die_on, 2, 0)
    assert "died" in error.value.tracebacks[0]


def test_hang_report_shows_stack() -> None:
    run(
        sum_over_ranks, 2, torch.ones(2)
    )  # otherwise the limit would include the start of processes
    with pytest.raises(RankError) as error:
        run(hang_on, 2, 1, limit=4)
    assert "in hang_on" in error.value.tracebacks[1]


@pytest.mark.parametrize(("limit", "shown"), [(3, "in hang_on"), (1, "did not end within 1 s")])
def test_limit_includes_slow_start(monkeypatch: pytest.MonkeyPatch, limit: int, shown: str) -> None:
    """The stack is written before the limit, even if the start took a part of the time."""
    monkeypatch.setattr(local_processes, "set_up_child", lambda: time.sleep(2))
    with pytest.raises(RankError) as error:
        run_in(hang_on, 1, 0, context=multiprocessing.get_context("fork"), timeout=limit)
    assert error.value.hung_ranks == (0,) and shown in error.value.tracebacks[0]


CHANGES: dict[str, Callable[[], object]] = {
    "a function": lambda: setattr(dist, "all_reduce", fail_on),
    "a method": lambda: setattr(CheckpointError, "describe", fail_on),
    "a constant": lambda: setattr(local_processes, "GRACE_SECONDS", 2.0),
    "the environment": lambda: os.environ.update(SCHEDIR_TEST="1"),
    "a signal": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "a thread": lambda: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start(),
}


def change_process(rank: int, what: str) -> int:
    if what:
        CHANGES[what]()
    return os.getpid()


@pytest.mark.parametrize("what", ["", *CHANGES])
def test_unchanged_processes_are_reused(what: str) -> None:
    first = run(change_process, 1, what)
    assert (run(change_process, 1, "") == first) == (what == "")
    assert run(sum_over_ranks, 1, torch.ones(1))[0] == 1


def draw_random_number(rank: int) -> float:
    return float(torch.rand(()))


def test_each_call_is_seeded_and_fresh_processes_are_new() -> None:
    assert run(draw_random_number, 1) == run(draw_random_number, 1)
    assert run_fresh(change_process, 1, "") != run(change_process, 1, "")


def run_parent(folder: Path) -> None:
    run_in(block_rank, 2, folder, context=multiprocessing.get_context("fork"))


def block_rank(rank: int, folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    if rank:
        dist.all_reduce(torch.zeros(1))
    time.sleep(1000)


def test_ranks_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """Nothing else would end the ranks."""
    parent_process = CONTEXT.Process(target=run_parent, args=(tmp_path,))
    parent_process.start()
    wait_until(lambda: len([*tmp_path.iterdir()]) == 2)
    parent_process.kill()
    parent_process.join()
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    wait_until(
        lambda: not any(read_process_state(rank, 0) in ("runs", "stopped") for rank in ranks)
    )


def collect_garbage(rank: int) -> bool:
    return gc.collect() >= 0


def test_fork_does_not_collect_garbage_of_its_parent(tmp_path: Path) -> None:
    """Collecting a process group would end threads, which a fork does not have."""
    gc.collect()
    gc.disable()
    try:
        store = FileStore(f"{tmp_path}/store", 1)
        group = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=9))
        cycle = SimpleNamespace(group=group)
        cycle.own = cycle
        del cycle, group
        assert (
            run_in(collect_garbage, 2, context=multiprocessing.get_context("fork"), timeout=20)
            == [True] * 2
        )
    finally:
        gc.enable()
