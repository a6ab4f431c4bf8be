"""The helper that runs ranks: it must fail as loudly as it works quietly."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from schedir.io.black_box import read_process_state
from schedir.transports.local_processes import run_processes as run_in
from tests.cpu.spawn import CONTEXT, RankError, run


def add_up(rank: int, start: torch.Tensor) -> torch.Tensor:
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


def test_results_come_by_rank() -> None:
    sums = run(add_up, 3, torch.ones(2))
    assert [x.tolist() for x in sums] == [[6.0, 6.0]] * 3


def test_a_failure_shows_its_traceback_first_and_ends_the_others() -> None:
    with pytest.raises(RankError) as error:
        run(fail_on, 3, 1)
    assert "the cause" in error.value.tracebacks[1]
    assert next(iter(error.value.tracebacks)) == 1


def test_a_dead_rank_is_named() -> None:
    with pytest.raises(RankError) as error:
        run(die_on, 2, 0)
    assert "died" in error.value.tracebacks[0]


def test_a_hang_shows_where() -> None:
    with pytest.raises(RankError) as error:
        run(hang_on, 2, 1, limit=4)
    assert "in hang_on" in error.value.tracebacks[1]


def parent(folder: Path) -> None:
    run_in(stand, 2, folder, context=multiprocessing.get_context("fork"))


def stand(rank: int, folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    if rank:
        dist.all_reduce(torch.zeros(1))
    time.sleep(1000)


def test_ranks_end_with_the_process_that_runs_them(tmp_path: Path) -> None:
    """However that ends: nobody else would end them."""
    running = CONTEXT.Process(target=parent, args=(tmp_path,))
    running.start()
    wait_until(lambda: len([*tmp_path.iterdir()]) == 2)
    running.kill()
    running.join()
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    wait_until(
        lambda: not any(read_process_state(rank, 0) in ("runs", "stopped") for rank in ranks)
    )


def wait_until(happens: Callable[[], bool]) -> None:
    over = time.monotonic() + 30
    while not happens():
        assert time.monotonic() < over
        time.sleep(0.02)


def collect(rank: int) -> bool:
    return gc.collect() >= 0


def test_a_fork_does_not_collect_what_its_parent_has_left(tmp_path: Path) -> None:
    """A group that nobody has any more ends threads, which a fork does not have."""
    gc.collect()
    gc.disable()
    try:
        store = FileStore(f"{tmp_path}/store", 1)
        group = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=9))
        cycle = SimpleNamespace(group=group)
        cycle.own = cycle
        del cycle, group
        assert (
            run_in(collect, 2, context=multiprocessing.get_context("fork"), timeout=20)
            == [True] * 2
        )
    finally:
        gc.enable()
