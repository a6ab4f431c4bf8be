"""The kinds of collectives, in one process and in a process group.

A new kind is one entry of `COLLECTIVES`, with its name in `CollectiveName`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

CollectiveName = Literal["all_reduce", "all_gather", "reduce_scatter"]
# The replicas of a stage, for gradients and for weights; all that hold a part of one replica of the
# model; the tensor-parallel ranks; or pipeline ranks, as those that hold a stage, or a tied weight.
GroupKey = Literal["dp", "params", "model", "tp"] | tuple[int, ...]


class CollectiveKind(NamedTuple):
    """A kind of collective.

    `compute_outputs` says what each member gets of what all bring, both in the order of ranks.
    `start` asks a group of torch.distributed for it, of (group, out, own, aside), and returns a
    Work; over NCCL it is not `is_async` on the current stream, and there is no Work.
    """

    compute_outputs: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    start: Callable[[Any, Tensor, Tensor, bool], Any]


def _sum_in_rank_order(tensors: Sequence[Tensor]) -> Tensor:
    """The sum, the first first."""
    total = tensors[0].clone()
    for other in tensors[1:]:
        total += other
    return total


def _all_reduce(group: Any, output_tensor: Tensor, input_tensor: Tensor, is_async: bool) -> Any:
    if output_tensor is not input_tensor:
        output_tensor.copy_(input_tensor)
    return dist.all_reduce(output_tensor, group=group, async_op=is_async)


def _set_async(options: Any, is_async: bool) -> Any:
    options.asyncOp = is_async
    return options


def _view_as_real(flat: Tensor) -> Tensor:
    """Complex numbers as twice as many real ones: not every backend has them."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


# The group's own methods, where the names in torch.distributed change from version to version.
COLLECTIVES: Final[dict[CollectiveName, CollectiveKind]] = {
    "all_reduce": CollectiveKind(
        lambda own: [_sum_in_rank_order(own)] * len(own),
        _all_reduce,
    ),
    "all_gather": CollectiveKind(
        lambda own: [torch.cat([*own])] * len(own),
        lambda group, out, own, aside: group._allgather_base(
            _view_as_real(out), _view_as_real(own), _set_async(AllgatherOptions(), aside)
        ),
    ),
    "reduce_scatter": CollectiveKind(
        lambda own: _sum_in_rank_order(own).chunk(len(own)),
        lambda group, out, own, aside: group._reduce_scatter_base(
            _view_as_real(out), _view_as_real(own), _set_async(ReduceScatterOptions(), aside)
        ),
    ),
}


# ------------------------------------------------------------ between virtual ranks


@dataclass(eq=False)
class CollectiveMember:
    """A rank's part in a collective, as Transport.collective."""

    kind: CollectiveName
    output_tensor: Tensor
    input_tensor: Tensor


P = TypeVar("P", bound=CollectiveMember)


def run_collective(members: Sequence[CollectiveMember]) -> None:
    """Do a collective for all its members, whose parts are in the order of ranks."""
    kind = members[0].kind
    assert all(part.kind == kind for part in members), "a group meets for one thing at a time"
    results = COLLECTIVES[kind].compute_outputs([part.input_tensor for part in members])
    for part, result in zip(members, results, strict=True):
        part.output_tensor.copy_(result)


class PendingCollectives(Generic[P]):
    """Collectives that some members have come to; a member may come to several before others."""

    def __init__(self) -> None:
        self.arrived: dict[tuple[GroupKey, int], deque[P]] = defaultdict(deque)

    def arrive(self, group: GroupKey, rank: int, member_ranks: list[int], arriving: P) -> list[P]:
        """To the last to come, the part of each member, by rank; to others nothing."""
        self.arrived[group, rank].append(arriving)
        waiting = [self.arrived[group, member] for member in member_ranks]
        return [first.popleft() for first in waiting] if all(waiting) else []
