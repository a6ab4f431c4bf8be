"""The kinds of collectives, in one process and in a process group.

A new kind is one entry of `COLLECTIVES`, with its name in `Kind`.
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

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]
# The replicas of a stage, for gradients and for weights; all that hold a part of one replica of the
# model; the tensor-parallel ranks; or pipeline ranks, as those that hold a stage, or a tied weight.
Group = Literal["dp", "params", "model", "tp"] | tuple[int, ...]


class CollectiveKind(NamedTuple):
    """A kind of collective.

    `results` says what each member gets of what all bring, both in the order of ranks.  `start`
    asks a group of torch.distributed for it, of (group, out, own, aside), and returns a Work; over
    NCCL it is not `aside` on the current stream, and there is no Work.
    """

    results: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    start: Callable[[Any, Tensor, Tensor, bool], Any]


def _sum(own: Sequence[Tensor]) -> Tensor:
    """The sum, the first first."""
    total = own[0].clone()
    for other in own[1:]:
        total += other
    return total


def _all_reduce(group: Any, out: Tensor, own: Tensor, aside: bool) -> Any:
    if out is not own:
        out.copy_(own)
    return dist.all_reduce(out, group=group, async_op=aside)


def _aside(options: Any, aside: bool) -> Any:
    options.asyncOp = aside
    return options


def _real(flat: Tensor) -> Tensor:
    """Complex numbers as twice as many real ones: not every backend has them."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


# The group's own methods, where the names in torch.distributed change from version to version.
COLLECTIVES: Final[dict[Kind, CollectiveKind]] = {
    "all_reduce": CollectiveKind(
        lambda own: [_sum(own)] * len(own),
        _all_reduce,
    ),
    "all_gather": CollectiveKind(
        lambda own: [torch.cat([*own])] * len(own),
        lambda group, out, own, aside: group._allgather_base(
            _real(out), _real(own), _aside(AllgatherOptions(), aside)
        ),
    ),
    "reduce_scatter": CollectiveKind(
        lambda own: _sum(own).chunk(len(own)),
        lambda group, out, own, aside: group._reduce_scatter_base(
            _real(out), _real(own), _aside(ReduceScatterOptions(), aside)
        ),
    ),
}


# ------------------------------------------------------------ between virtual ranks


@dataclass(eq=False)
class CollectiveMember:
    """A rank's part in a collective, as Transport.collective."""

    kind: Kind
    out: Tensor
    own: Tensor


P = TypeVar("P", bound=CollectiveMember)


def meet(parts: Sequence[CollectiveMember]) -> None:
    """Do a collective for all its members, whose parts are in the order of ranks."""
    kind = parts[0].kind
    assert all(part.kind == kind for part in parts), "a group meets for one thing at a time"
    results = COLLECTIVES[kind].results([part.own for part in parts])
    for part, result in zip(parts, results, strict=True):
        part.out.copy_(result)


class PendingCollectives(Generic[P]):
    """Collectives that some members have come to; a member may come to several before others."""

    def __init__(self) -> None:
        self.came: dict[tuple[Group, int], deque[P]] = defaultdict(deque)

    def come(self, group: Group, rank: int, members: list[int], part: P) -> list[P]:
        """To the last to come, the part of each member, by rank; to others nothing."""
        self.came[group, rank].append(part)
        waiting = [self.came[group, member] for member in members]
        return [first.popleft() for first in waiting] if all(waiting) else []
