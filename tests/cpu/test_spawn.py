"""The helper that runs ranks: it must fail as loudly as it works quietly."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

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
