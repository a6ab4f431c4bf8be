"""Groups: process groups of torch, those that have no process in common by one call.

In a run of 1,024 processes there are thousands of groups, and a process is in about ten.  So each
process asks only for its own: the rows of one kind (all tensor-parallel groups, the ends of edges
that do not touch) are made at once, each process making the row in which it is.  All processes
call `make` for the same rows in the same order.

Over NCCL that is one ncclCommSplit of the default group's communicator, whose colour torch takes
from the row; it needs the default group connected and bound to its device.  `dist.split_group`
would say the same in one call, but up to torch 2.13 it hands NCCL's options to Gloo where the
default group has both, and it is called experimental.  `dist.new_group` with all rows, one after
the other, is a split of all processes for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

Row = Sequence[int]


def make(
    rows: Iterable[Row],
    *,
    timeout: timedelta | None = None,
    backend: str | None = None,
    options: Callable[[], Any] = lambda: None,
) -> Any:
    """The group of the row in which this process is, or None if it is in none.

    `rows` are processes in ascending order, and none is in two of them.  `timeout`, `backend` and
    what `options` makes are as for `torch.distributed.new_group`.  Every process must call this.
    """
    rank, own = dist.get_rank(), None
    for some in _colours(rows):
        row = next((row for row in some if rank in row), None)
        if row is None:
            _take_no_part()
            continue
        own = dist.new_group(
            list(row),
            timeout=timeout,
            backend=backend,
            pg_options=options(),
            use_local_synchronization=True,  # only members meet
        )
    return own


def _colours(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows, apart where torch would give two the same colour, and NCCL make them one."""
    splits: list[dict[int, Row]] = []
    for row in rows:
        colour = c10d._process_group_color(list(row))
        split = next((split for split in splits if colour not in split), None)
        if split is None:
            splits.append(split := {})
        split[colour] = row
    return [[*split.values()] for split in splits]


def _take_no_part() -> None:
    """Of a process that is in no row: a communicator is split by all that are in it, and torch
    names a group after its row and the number of groups that the process has."""
    world: Any = dist.group.WORLD
    if world.bound_device_id is not None:
        world._get_backend(world.bound_device_id).perform_nocolor_split(world.bound_device_id)
    _alone()


def _alone() -> None:
    """Make a group that nobody uses."""
    dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def count() -> int:
    """How many groups this process has."""
    return len(c10d._world.pg_names)


def level(counts: Iterable[int]) -> None:
    """Have as many groups as the process that has most, of which `counts` tells: torch would give
    one group another name in each process otherwise, and its members would not find each other."""
    for _ in range(count(), max(counts)):
        _alone()
