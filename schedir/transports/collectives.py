"""The kinds of collectives, between virtual ranks of one process and in a process group.

To add a kind, add an entry to `COLLECTIVES` and its name to `CollectiveName`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

CollectiveName = Literal["all_reduce", "all_gather", "reduce_scatter"]
# The members of a collective. "dp" and "params" are the replicas of a stage, for gradients and for
# weights. "model" has all processes of one replica of the model. "tp" has the tensor-parallel
# ranks. "ep" and "ep_counts" are the expert-parallel group, for tokens and for numbers of tokens.
# "expert_dp" and "expert_params" are the replicas with the same experts. A tuple has the pipeline
# ranks that share a stage or a tied weight.
GroupName = Literal["dp", "params", "model", "tp", "ep", "ep_counts", "expert_dp", "expert_params"]
GroupKey = GroupName | tuple[int, ...]


class AllToAll(NamedTuple):
    """The all-to-all of one rank: how many elements it exchanges with each member of the group.

    Attributes:
        sent: The number of elements that this rank sends to each member, in the order of ranks.
        received: The number of elements that this rank receives from each member, in the order of
            ranks.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]


# The name of a kind of collective, or the sizes of an all-to-all.
Collective = CollectiveName | AllToAll


class CollectiveKind(NamedTuple):
    """A kind of collective.

    Attributes:
        compute_outputs: Returns the output of each member for the inputs of all members. Inputs and
            outputs are in the order of ranks. Virtual ranks of one process use this function.
        start: Starts the collective in a process group of torch.distributed. Its arguments are the
            group, the output tensor, the input tensor, and whether the collective is asynchronous.
            For an asynchronous collective, `start` returns a Work. Otherwise NCCL issues the
            collective to the current stream, and there is no Work.
    """

    compute_outputs: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    start: Callable[[Any, Tensor, Tensor, bool], Any]


def _sum_in_rank_order(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors, added in their order, so that the sum is the same in each run."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _all_reduce(group: Any, output_tensor: Tensor, input_tensor: Tensor, is_async: bool) -> Any:
    if output_tensor is not input_tensor:
        output_tensor.copy_(input_tensor)
    return dist.all_reduce(output_tensor, group=group, async_op=is_async)


def _set_async(options: Any, is_async: bool) -> Any:
    options.asyncOp = is_async
    return options


def _view_as_real(flat: Tensor) -> Tensor:
    """View complex numbers as real numbers, because not every backend supports complex types."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


# "all_gather" and "reduce_scatter" call methods of the group, because torch.distributed renames
# these functions between versions.
COLLECTIVES: Final[dict[CollectiveName, CollectiveKind]] = {
    "all_reduce": CollectiveKind(
        lambda inputs: [_sum_in_rank_order(inputs)] * len(inputs),
        _all_reduce,
    ),
    "all_gather": CollectiveKind(
        lambda inputs: [torch.cat([*inputs])] * len(inputs),
        lambda group, output_tensor, input_tensor, is_async: group._allgather_base(
            _view_as_real(output_tensor),
            _view_as_real(input_tensor),
            _set_async(AllgatherOptions(), is_async),
        ),
    ),
    "reduce_scatter": CollectiveKind(
        lambda inputs: _sum_in_rank_order(inputs).chunk(len(inputs)),
        lambda group, output_tensor, input_tensor, is_async: group._reduce_scatter_base(
            _view_as_real(output_tensor),
            _view_as_real(input_tensor),
            _set_async(ReduceScatterOptions(), is_async),
        ),
    ),
}


def start_in_group(
    kind: Collective, group: Any, output_tensor: Tensor, input_tensor: Tensor, *, is_async: bool
) -> Any:
    """Start a collective in a process group of torch.distributed.

    Args:
        kind: The collective.
        group: The process group.
        output_tensor: The output, see `Transport.start_collective`.
        input_tensor: The input.
        is_async: See `CollectiveKind.start`.

    Returns:
        A Work if the collective is asynchronous.
    """
    if not isinstance(kind, AllToAll):
        return COLLECTIVES[kind].start(group, output_tensor, input_tensor, is_async)
    sizes = [*kind.received], [*kind.sent]
    return dist.all_to_all_single(output_tensor, input_tensor, *sizes, group, async_op=is_async)


# ------------------------------------------------------------ between virtual ranks


@dataclass(eq=False)
class CollectiveMember:
    """The call of a collective by one rank.

    Args:
        kind: The collective.
        output_tensor: The tensor that receives this rank's output.
        input_tensor: This rank's input.
    """

    kind: Collective
    output_tensor: Tensor
    input_tensor: Tensor


def run_collective(members: Sequence[CollectiveMember]) -> None:
    """Run a collective for all of its members.

    Args:
        members: The calls of the members, in the order of ranks. All have the same kind.
    """
    kind = members[0].kind
    assert not isinstance(kind, AllToAll), "virtual ranks have no expert parallelism"
    assert all(member.kind == kind for member in members), (
        "a group runs one kind of collective at a time"
    )
    results = COLLECTIVES[kind].compute_outputs([member.input_tensor for member in members])
    for member, result in zip(members, results, strict=True):
        member.output_tensor.copy_(result)
