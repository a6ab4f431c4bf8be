"""Buckets: several parameters in one flat tensor, which ZeRO splits into shards.

The parameters of a bucket have one dtype. One flat tensor has their gradients. With ZeRO, a second
flat tensor has their weights. Both tensors are then split at the same offsets, into one shard for
each replica. Without ZeRO, gradients have the same buckets, so that results have the same bits at
all ZeRO levels. Some libraries add numbers in an order that depends on their position in a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from schedir.ir.cost.zero_states import SHARDED_FROM_LEVEL
from schedir.transports.collectives import GroupKey

# Bytes of a bucket. A bucket is large enough to use the full rate of a link. The reduction of the
# last bucket does not overlap with computation, so buckets are small enough for a short reduction.
BUCKET_BYTES: Final = 32 * 2**20
CPU_ALIGNMENT: Final = 64  # bytes to which torch aligns memory of a CPU
_EXPERT_GROUPS: Final[dict[str, GroupKey]] = {"dp": "expert_dp", "params": "expert_params"}


class ShardSpec(NamedTuple):
    """The index of this replica, the number of replicas, and the ZeRO level.

    Attributes:
        replicas: The number of replicas.
        replica: The index of this replica, from 0.
        zero: The ZeRO level, from 0 to 3.
    """

    replicas: int = 1
    replica: int = 0
    zero: int = 0

    @property
    def shard_indices(self) -> range:
        """The indices of the shards that this replica keeps after the gradient is reduced."""
        return range(self.replica, self.replica + 1) if self.zero else range(self.replicas)

    def for_tensor(self, tensor: Tensor) -> ShardSpec:
        """Return the spec for the replicas that have the same tensor as this replica.

        Usually all replicas have the tensor. If the tensor belongs to an expert, only every `ep`-th
        replica has it.

        Args:
            tensor: A parameter or buffer.
        """
        _, ep = get_expert_slice(tensor) or (0, 1)
        return self._replace(replicas=max(self.replicas // ep, 1), replica=self.replica // ep)

    def shards_state(self, kind: str) -> bool:
        """Return whether a replica keeps only its shard of a kind of state between steps.

        Args:
            kind: "params", "grads" or "optimizer".
        """
        return self.zero >= SHARDED_FROM_LEVEL[kind]


UNSHARDED: Final = ShardSpec()


def is_summed_over_tp(parameter: Tensor) -> bool:
    """Return whether tensor-parallel ranks must sum the gradients of a parameter.

    Each of these ranks has the full parameter, but computes the gradient from its part of the
    sequence. The attribute `summed_over_tp` of such a parameter is True.

    Args:
        parameter: The parameter.
    """
    return getattr(parameter, "summed_over_tp", None) is True


def get_expert_slice(tensor: Tensor) -> tuple[int, int] | None:
    """Return the slice of a layer's experts to which a tensor belongs.

    Args:
        tensor: A parameter or buffer.

    Returns:
        The attribute `expert_slice` of the tensor: the rank in the expert-parallel group, and the
        size of the group. None if the tensor belongs to no expert.
    """
    return getattr(tensor, "expert_slice", None)


def is_expert(parameter: Tensor) -> bool:
    """Return whether a parameter belongs to an expert.

    With expert parallelism, only some replicas have the parameter. Its gradients are summed over
    these replicas.

    Args:
        parameter: The parameter.
    """
    return get_expert_slice(parameter) is not None


def describe_slice(tensor: Tensor, tp_rank: int) -> str:
    """Describe the slice of a tensor that a process has.

    Args:
        tensor: A parameter or buffer.
        tp_rank: The tensor-parallel rank of the process.
    """
    experts = get_expert_slice(tensor)
    return f"slice {tp_rank}" + (f", experts {experts[0]} of {experts[1]}" if experts else "")


def mark_expert(parameter: Any, ep_rank: int, ep: int) -> None:
    """Mark a parameter as part of an expert: set its attribute `expert_slice`.

    Args:
        parameter: The parameter.
        ep_rank: The rank in the expert-parallel group: the index of the replica modulo `ep`.
        ep: The size of the group. Rank k has the k-th of `ep` equal slices of a layer's experts.
    """
    parameter.expert_slice = (ep_rank, ep)


class Bucket:
    """Parameters that are consecutive in a flat tensor, which is split into shards.

    The end of the tensor is padded, so that all shards have the same length. `numel` is the number
    of elements with padding. `offsets` has the index of each parameter's first element. There is a
    shard for each replica that has these parameters (`shard_spec`).

    Args:
        parameters: The parameters. They have the same dtype, gradient dtype and device.
        shard_spec: The index of this replica, the number of replicas and the ZeRO level.
        aligned: If True, each parameter begins on a cache line, as if it were allocated separately.
            The results of matrix products may depend on the alignment.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], shard_spec: ShardSpec, *, aligned: bool
    ) -> None:
        self.parameters: list[nn.Parameter] = [*parameters]
        self.shard_spec: ShardSpec = shard_spec.for_tensor(parameters[0])
        self.shapes: list[torch.Size] = [p.shape for p in parameters]
        self.dtype: torch.dtype = parameters[0].dtype
        self.device: torch.device = parameters[0].device
        self.grad_dtype: torch.dtype = parameters[0].grad_dtype or self.dtype
        self.offsets: list[int] = []
        alignment, end = max(1, CPU_ALIGNMENT // self.dtype.itemsize) if aligned else 1, 0
        for p in parameters:
            begin = -(-end // alignment) * alignment
            self.offsets.append(begin)
            end = begin + p.numel()
        self.numel: Any | int = -(-end // self.shard_spec.replicas) * self.shard_spec.replicas

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the view of each parameter in a flat tensor, in the shape of the parameter.

        Args:
            flat: A flat tensor of `numel` elements.
        """
        return [
            flat[begin : begin + shape.numel()].view(shape)
            for begin, shape in zip(self.offsets, self.shapes, strict=True)
        ]

    def get_group(self, purpose: Literal["dp", "params"]) -> GroupKey:
        """Return the group of the replicas that have these parameters.

        Args:
            purpose: "dp" for gradients, "params" for weights.
        """
        _, ep = get_expert_slice(self.parameters[0]) or (0, 1)
        return purpose if ep == 1 else _EXPERT_GROUPS[purpose]

    def get_shard(self, flat: Tensor, index: int | None = None) -> Tensor:
        """Return a view of one shard of a flat tensor.

        Args:
            flat: A flat tensor of `numel` elements.
            index: The index of the shard. By default the shard of this replica.
        """
        index = self.shard_spec.replica if index is None else index
        return flat.view(self.shard_spec.replicas, -1)[index]

    def list_shard_ranges(self, index: int | None = None) -> Iterator[tuple[int, int, int]]:
        """Yield, for each parameter, the range of its elements that are in a shard.

        Args:
            index: The index of the shard. By default the shard of this replica.

        Yields:
            The begin and end (excluded) of the range in the parameter, and the offset of the range
            in the shard. The range is empty if no element of the parameter is in the shard.
        """
        index = self.shard_spec.replica if index is None else index
        size = self.numel // self.shard_spec.replicas
        for begin, shape in zip(self.offsets, self.shapes, strict=True):
            low = min(max(index * size - begin, 0), shape.numel())
            high = min(max((index + 1) * size - begin, low), shape.numel())
            yield low, high, begin + low - index * size if high > low else 0

    def split_shard(self, shard: Tensor, index: int | None = None) -> list[Tensor]:
        """Return a view of each parameter's elements in a shard, 1-dim and possibly empty.

        Args:
            shard: The shard, flat.
            index: The index of the shard. By default the shard of this replica.
        """
        return [
            shard[start : start + high - low] for low, high, start in self.list_shard_ranges(index)
        ]


def make_buckets(
    parameters: Sequence[nn.Parameter],
    max_bytes: float = math.inf,
    shard_spec: ShardSpec = UNSHARDED,
    separate_parameters: Collection[nn.Parameter] = (),
    *,
    aligned: bool = False,
) -> list[Bucket]:
    """Distribute parameters over buckets.

    The parameters of a bucket have the same dtype, gradient dtype and device. Parameters of experts
    get separate buckets. Parameters whose gradients are summed over tensor-parallel ranks also get
    separate buckets. Buckets are filled from the last parameter to the first.

    Args:
        parameters: The parameters, in the order of the module.
        max_bytes: The largest size of a bucket's gradients, in bytes. Only a bucket with a single
            parameter may be larger.
        shard_spec: The index of this replica, the number of replicas and the ZeRO level.
        separate_parameters: Parameters that get a bucket each, such as tied weights. The shards of
            a tied weight then have the same elements in all stages with a copy.
        aligned: If True, each parameter begins on a cache line.
    """
    separate_ids = {id(p) for p in separate_parameters}
    parameters_by_key: dict[tuple[object, ...], list[nn.Parameter]] = {}
    for p in parameters:
        bucket_id = id(p) if id(p) in separate_ids else 0
        key = (
            p.dtype,
            p.grad_dtype or p.dtype,
            p.device,
            bucket_id,
            is_summed_over_tp(p),
            is_expert(p),
        )
        parameters_by_key.setdefault(key, []).append(p)
    return [
        Bucket(run, shard_spec, aligned=aligned)
        for (_, dtype, *_), key_parameters in parameters_by_key.items()
        for run in _split_into_runs(
            key_parameters, dtype.itemsize if isinstance(dtype, torch.dtype) else 1, max_bytes
        )
    ]


def _split_into_runs(
    parameters: list[nn.Parameter], itemsize: int, max_bytes: float
) -> list[list[nn.Parameter]]:
    """Split parameters, from last to first, into runs with gradients of at most `max_bytes`."""
    runs: list[list[nn.Parameter]] = []
    free_bytes = 0.0
    for p in reversed(parameters):
        size = p.numel() * itemsize
        if not runs or size > free_bytes:
            runs.append([])
            free_bytes = max_bytes
        runs[-1].append(p)
        free_bytes = max(free_bytes - size, 0)
    return [run[::-1] for run in reversed(runs)]
