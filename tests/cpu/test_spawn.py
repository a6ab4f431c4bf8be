"""The helper that runs ranks: it must fail as loudly as it works quietly."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from schedir.testing.processes import run as run_in
from tests.cpu.spawn import RankError, run


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
            run_in(collect, 2, context=multiprocessing.get_context("fork"), limit=20) == [True] * 2
        )
    finally:
        gc.enable()
