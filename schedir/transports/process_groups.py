"""Create process groups of torch, several disjoint groups in one call.

A run of 1,024 processes has thousands of groups, and each process is in about ten of them. So each
process creates only its own groups. One call of `make_group` creates a set of disjoint groups, such
as all tensor-parallel groups. Each process creates the group of the row that contains it. All
processes call `make_group` with the same rows in the same order.

Over NCCL a call is one ncclCommSplit of the communicator of the default group. torch computes the
color for ncclCommSplit from the row. The default group must be connected and bound to its device.

torch has two alternatives. `dist.split_group` also creates a set of disjoint groups in one call.
But up to torch 2.13 this function is experimental, and passes NCCL options to Gloo if the default
group has both backends.
`dist.new_group` for all rows, one after the other, splits the communicator once for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from schedir.analysis.progress_models import ProgressModel

GroupRow = Sequence[int]
_T = TypeVar("_T")

# NCCL's watchdog waits this many seconds longer than schedir's watchdog. The value is torch's
# default timeout for NCCL.
WATCHDOG_MARGIN: Final = 600.0
BYTES_PER_CTA: Final = 2 << 20  # bytes of a message per multiprocessor, see choose_max_ctas
DEFAULT_CTAS: Final = 4  # multiprocessors of an edge if the size of its messages is unknown
MAX_CTAS: Final = 16  # the largest number of multiprocessors of an edge

_created_groups = 0  # the number of groups that this process has created


def partition_disjoint(
    items: Iterable[_T], get_members: Callable[[_T], Set[int]]
) -> list[list[_T]]:
    """Partition items into lists in which no two items have a member in common.

    The algorithm is a first-fit colouring. If each item has two members, and the most frequent
    member is in n items, there are at least n and at most 2n - 1 lists.

    Args:
        items: The items.
        get_members: Returns the members of an item.
    """
    colours: list[tuple[list[_T], set[int]]] = []
    for item in items:
        members = get_members(item)
        free_colour = next((colour for colour in colours if colour[1].isdisjoint(members)), None)
        if free_colour is None:
            colours.append(free_colour := ([], set()))
        free_colour[0].append(item)
        free_colour[1].update(members)
    return [colour_items for colour_items, _ in colours]


def make_group(
    rows: Iterable[GroupRow],
    timeout: float | None = None,
    device: torch.device | str = "cpu",
    max_ctas: int = 0,
) -> Any:
    """Create a group for each row of processes, and return the group that contains this process.

    Every process must call this, with the same rows. The groups are Gloo groups for a CPU, and NCCL
    groups for a GPU.

    Args:
        rows: The processes of each group, in ascending order. No process is in two rows.
        timeout: The time that the processes of a group wait for each other, in seconds. NCCL groups
            wait `WATCHDOG_MARGIN` longer. By default torch's timeout.
        device: The device of the tensors.
        max_ctas: The largest number of multiprocessors that an NCCL group uses, or 0 for NCCL's
            default.

    Returns:
        The group, or None if no row contains this process.
    """
    global _created_groups
    rank, group = dist.get_rank(), None
    for color_rows in _partition_by_color(rows):
        _created_groups += 1
        row = next((row for row in color_rows if rank in row), None)
        if row is None:
            _split_without_color(device)
        else:
            on_cpu = torch.device(device).type == "cpu"
            group = _create_group(
                row, **(_gloo_options(timeout) if on_cpu else _nccl_options(timeout, max_ctas))
            )
    return group


def get_backend_name(group: Any, device: torch.device) -> str:
    """Return the name of a group's backend for a device, such as "gloo", or "" if it is missing.

    Args:
        group: The process group.
        device: The device of the tensors.
    """
    try:
        return str(group._get_backend(torch.device(device.type)).name()).lower()
    except RuntimeError:
        return ""


def get_nccl_progress_model(group: Any) -> ProgressModel:
    """Return the progress model of unbatched messages in an NCCL group.

    If the group is bound to a device, the messages use the communicator of the group
    ("per_device"). Otherwise torch creates a communicator for each pair of ranks at their first
    message ("torch_lazy").

    Args:
        group: The process group.
    """
    return "torch_lazy" if getattr(group, "bound_device_id", None) is None else "per_device"


def get_host_timeout(group: Any = None) -> float | None:
    """Return the timeout of a group on the host, in seconds.

    Args:
        group: The process group. By default the group of all processes.

    Returns:
        The timeout, or None if the group has no CPU backend or its backend reports no timeout.
    """
    process_group: Any = group or dist.group.WORLD
    if "cpu" not in {device.type for device in process_group._device_types}:
        return None
    options = getattr(process_group._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None)
    return None if timeout is None else float(timeout.total_seconds())


def _create_group(row: GroupRow, **options: Any) -> Any:
    """Create the group of a row. Only the processes of the row call this."""
    name = f"schedir-{_created_groups}-{row[0]}"
    with _use_group_name(name):
        group = dist.new_group([*row], use_local_synchronization=True, **options)
    assert group.group_name == name, "the members find the group by its name"
    return group


@contextmanager
def _use_group_name(name: str) -> Iterator[None]:
    """Let torch use the given name for new groups within this context."""
    torch_: Any = c10d
    get_torch_name = torch_._process_group_name
    torch_._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        torch_._process_group_name = get_torch_name


def _gloo_options(timeout: float | None) -> dict[str, Any]:
    options: dict[str, Any] = {"timeout": None if timeout is None else timedelta(seconds=timeout)}
    if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        options["backend"] = "gloo"  # The default group also has NCCL, and new groups inherit it.
    return options


def _nccl_options(timeout: float | None, max_ctas: int) -> dict[str, Any]:
    """Return the arguments of `new_group` for an NCCL group.

    The kernels of the group must not wait for compute kernels, and must not use too many
    multiprocessors.
    """
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.split_share = 0  # with shared resources, groups would run one after the other
    if max_ctas:
        options.config.min_ctas = 1
        options.config.max_ctas = max_ctas
    # NCCL's watchdog ends the process. Its timeout begins when a message is issued, and a receive
    # may be issued a step early. With the margin, schedir's watchdog reports the cause earlier than
    # NCCL's watchdog ends the process.
    arguments = _gloo_options(None if timeout is None else timeout + WATCHDOG_MARGIN)
    if arguments["timeout"] is not None:
        # torch warns if the two timeouts differ.
        options._timeout = arguments["timeout"]
    return arguments | {"backend": "nccl", "pg_options": options}


def choose_max_ctas(message_bytes: int) -> int:
    """Return the largest number of multiprocessors for an edge with messages of a given size.

    NCCL gives a message at least half of the channels that a communicator of two ranks may use,
    however small the message is (NCCL 2.30, scheduleP2pTasksToPlan). A channel occupies a
    multiprocessor, which compute kernels cannot use while a receive waits. One channel has about
    the bandwidth of an NVLink, 20.6 GB/s on an H100 (SM90_NVLINK_BW in NCCL's topo.h), so it sends
    2 MiB in 0.1 ms. A message gets one channel for each 2 MiB. These numbers are not measured yet.

    Args:
        message_bytes: The size of the largest message, in bytes, or 0 if it is unknown.

    Returns:
        A power of two from 2 to 16, or 4 if the size is unknown.
    """
    if not message_bytes:
        return DEFAULT_CTAS
    return min(MAX_CTAS, max(2, 1 << (-(-message_bytes // BYTES_PER_CTA) - 1).bit_length()))


def _partition_by_color(rows: Iterable[GroupRow]) -> list[list[GroupRow]]:
    """Partition rows so that torch gives different colors to the rows of a list.

    NCCL would merge two rows of the same color.
    """
    splits: list[dict[int, GroupRow]] = []
    for row in rows:
        colour = c10d._process_group_color(list(row))
        split = next((split for split in splits if colour not in split), None)
        if split is None:
            splits.append(split := {})
        split[colour] = row
    return [[*split.values()] for split in splits]


def _split_without_color(device: torch.device | str) -> None:
    """Take part in a split as a process that is in no row, because all processes must take part.

    The process also creates an unused group. The names that torch gives to groups depend on the
    number of earlier groups, so all processes must create the same number of groups.
    """
    world: Any = dist.group.WORLD
    if torch.device(device).type != "cpu" and world.bound_device_id is not None:
        world._get_backend(world.bound_device_id).perform_nocolor_split(world.bound_device_id)
    _create_group([dist.get_rank()], backend="gloo")


def count_created_groups() -> int:
    """Return the number of groups that this process has created."""
    return _created_groups


def align_group_count(counts: Iterable[int]) -> None:
    """Set this process's number of created groups to the largest number of all processes.

    The numbers may differ after errors in some processes.

    Args:
        counts: The values of `count_created_groups` of all processes.
    """
    global _created_groups
    _created_groups = max(counts)
