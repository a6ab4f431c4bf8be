"""Create process groups of torch, disjoint ones in one call.

In a run of 1,024 processes there are thousands of groups, and a process is in about ten.  So each
process asks only for its own: the rows of one kind (all tensor-parallel groups, the ends of edges
that do not touch) are made at once, each process making the row in which it is.  All processes
call `make_group` for the same rows in the same order.

Over NCCL that is one ncclCommSplit of the default group's communicator, whose colour torch takes
from the row; it needs the default group connected and bound to its device.  `dist.split_group`
would say the same in one call, but up to torch 2.13 it hands NCCL's options to Gloo where the
default group has both, and it is called experimental.  `dist.new_group` with all rows, one after
the other, is a split of all processes for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

GroupRow = Sequence[int]
_T = TypeVar("_T")

WATCHDOG_MARGIN: Final = (
    600.0  # seconds that NCCL's watchdog is more patient; torch's own default for it
)
BYTES_PER_CTA: Final = 2 << 20  # bytes of a message for one multiprocessor
DEFAULT_CTAS: Final = 4  # multiprocessors of an edge whose messages are not known
MAX_CTAS: Final = 16  # and of any

_created_groups = 0  # how many times this process has made groups


def partition_disjoint(
    items: Iterable[_T], get_members: Callable[[_T], Set[int]]
) -> list[list[_T]]:
    """What has members, together where no two have one in common: a colouring, first fit.

    A member of n is in n of them, and of things with two members there are at most 2n - 1 for the
    most that one is in.
    """
    colours: list[tuple[list[_T], set[int]]] = []
    for one in items:
        own = get_members(one)
        free = next((colour for colour in colours if colour[1].isdisjoint(own)), None)
        if free is None:
            colours.append(free := ([], set()))
        free[0].append(one)
        free[1].update(own)
    return [some for some, _ in colours]


def make_group(
    rows: Iterable[GroupRow],
    timeout: float | None = None,
    device: torch.device | str = "cpu",
    max_ctas: int = 0,
) -> Any:
    """The group of the row in which this process is, or None if it is in none.

    `rows` are processes in ascending order, and none is in two of them.  `timeout` is how many
    seconds they wait for each other, as torch has it unless told.  On a GPU a group is NCCL's, and
    takes at most `max_ctas` multiprocessors if told.  Every process must call this.
    """
    global _created_groups
    rank, own = dist.get_rank(), None
    for some in _partition_by_color(rows):
        _created_groups += 1
        row = next((row for row in some if rank in row), None)
        if row is None:
            _split_without_color(device)
        else:
            on_cpu = torch.device(device).type == "cpu"
            own = _create_group(
                row, **(_gloo_options(timeout) if on_cpu else _nccl_options(timeout, max_ctas))
            )
    return own


def get_host_timeout(group: Any = None) -> float | None:
    """For how many seconds the processes of a group, or all, wait for each other on the host, if it
    says so."""
    some: Any = group or dist.group.WORLD
    if "cpu" not in {device.type for device in some._device_types}:
        return None
    options = getattr(some._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None)
    return None if timeout is None else float(timeout.total_seconds())


def _create_group(row: GroupRow, **options: Any) -> Any:
    """The group of a row; only its members meet."""
    name = f"schedir-{_created_groups}-{row[0]}"
    with _use_group_name(name):
        group = dist.new_group([*row], use_local_synchronization=True, **options)
    assert group.group_name == name, "members find each other by it"
    return group


@contextmanager
def _use_group_name(name: str) -> Iterator[None]:
    """Within this, torch gives a group that name."""
    torch_: Any = c10d
    by_torch = torch_._process_group_name
    torch_._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        torch_._process_group_name = by_torch


def _gloo_options(timeout: float | None) -> dict[str, Any]:
    how: dict[str, Any] = {"timeout": None if timeout is None else timedelta(seconds=timeout)}
    if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        how["backend"] = "gloo"  # and not NCCL as well, as the default group has
    return how


def _nccl_options(timeout: float | None, max_ctas: int) -> dict[str, Any]:
    """What `new_group` is told of a communicator, whose kernels must not wait behind what computes,
    nor starve it."""
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.split_share = 0  # else groups would run one after the other
    if max_ctas:
        options.config.min_ctas, options.config.max_ctas = 1, max_ctas
    # NCCL's watchdog, which ends a process, counts from when a message is issued, and a receive may
    # be a step ahead.  So ours, which says what hangs, comes first.
    how = _gloo_options(None if timeout is None else timeout + WATCHDOG_MARGIN)
    if how["timeout"] is not None:
        options._timeout = how["timeout"]  # as the group's, or torch warns
    return how | {"backend": "nccl", "pg_options": options}


def choose_max_ctas(message_bytes: int) -> int:
    """How many multiprocessors an edge takes whose messages have so many bytes; 0 is not known.

    NCCL lets a message have at least half of the channels that a communicator of two ranks may
    have, however small it is (2.30, scheduleP2pTasksToPlan); a channel is a multiprocessor, which
    the computation does not have while a receive waits.  One moves about what an NVLink does,
    20.6 GB/s of an H100's (SM90_NVLINK_BW in its topo.h).  So there is one for each 2 MiB, 0.1 ms,
    as a power of two from 2 to 16.  Not measured yet.
    """
    if not message_bytes:
        return DEFAULT_CTAS
    return min(MAX_CTAS, max(2, 1 << (-(-message_bytes // BYTES_PER_CTA) - 1).bit_length()))


def _partition_by_color(rows: Iterable[GroupRow]) -> list[list[GroupRow]]:
    """The rows, apart where torch would give two the same colour, and NCCL make them one."""
    splits: list[dict[int, GroupRow]] = []
    for row in rows:
        colour = c10d._process_group_color(list(row))
        split = next((split for split in splits if colour not in split), None)
        if split is None:
            splits.append(split := {})
        split[colour] = row
    return [[*split.values()] for split in splits]


def _split_without_color(device: torch.device | str) -> None:
    """Of a process that is in no row: a communicator is split by all that are in it.

    It makes a group that nobody uses, so that all have as many: by that number torch names those
    that users make in the same way.
    """
    world: Any = dist.group.WORLD
    if torch.device(device).type != "cpu" and world.bound_device_id is not None:
        world._get_backend(world.bound_device_id).perform_nocolor_split(world.bound_device_id)
    _create_group([dist.get_rank()], backend="gloo")


def count_created_groups() -> int:
    """How many times this process has made groups."""
    return _created_groups


def align_group_count(counts: Iterable[int]) -> None:
    """Count on from the most of what `count_created_groups` has told of each process, which may
    have failed in another place."""
    global _created_groups
    _created_groups = max(counts)
