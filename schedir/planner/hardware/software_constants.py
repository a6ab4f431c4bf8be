"""Constants of kernels and libraries in the planner's estimates, with bounds and sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from schedir.errors import UsageError, describe, to_float


class SoftwareConstant(NamedTuple):
    """A constant with its meaning, bounds and source.

    Attributes:
        name: The name of its field in `SoftwareConstants`.
        value: The value.
        meaning: A description with the unit.
        min_value: The lower bound of the value.
        max_value: The upper bound of the value.
        source: The paper, manual or measurement that gives the default value.
    """

    name: str
    value: float
    meaning: str
    min_value: float
    max_value: float
    source: str


def _constant_field(
    value: float, meaning: str, min_value: float, max_value: float, source: str
) -> Any:
    return field(
        default=value, metadata=dict(meaning=meaning, bounds=(min_value, max_value), source=source)
    )


@dataclass(frozen=True)
class SoftwareConstants:
    """Constants of the training software. The constants of the machine are in `Cluster`.

    Args:
        tile_rows: The number of rows of the tile of a matrix product that a multiprocessor
            computes.
        tile_columns: The number of columns of this tile. Rows and columns are exchanged if
            this reduces the number of tiles.
        max_splits: The largest number of splits of the inner dimension of a product.
        speed_share: The share of `Cluster.flops` and of `Cluster.hbm_bandwidth` that the kernels of
            the software reach.
        fp8_speedup: The factor by which products with the weights of layers are faster than in 16
            bits, if they are computed in FP8. Use 1 for training in 16 bits or in FP4.
        fp4_speedup: The same factor, if these products are computed in FP4. Only one of the two
            factors may be above 1.
        kernels_per_op: The number of kernels that the software launches for each kernel that the
            planner counts.
        loss_share: Bytes that the loss reads and writes, divided by the bytes for the loss of
            Megatron-LM.
        tensors_per_layer: The number of weight tensors of a layer. The terms of `shard_copy_us` and
            `bucket_params` use it.
        shard_copy_us: Microseconds to copy a replica's shard of one tensor. With ZeRO, this time is
            added to the gather of the weights, once per tensor and replica.
        bucket_params: Parameters of a bucket. Without ZeRO, each bucket of gradients has a separate
            all-reduce, and no tensor is divided. 0 means one bucket per stage.
        crossing_us: Microseconds that each tensor-parallel collective adds to the time of the host,
            per rank of the group, if consecutive stages are on different nodes.
        flash_forward_efficiency: The share of `Cluster.flops` that the flash attention forward
            reaches.
        flash_backward_efficiency: The share of `Cluster.flops` that the flash attention backward
            reaches.
        scores_bandwidth_share: The share of `Cluster.hbm_bandwidth` that softmax and dropout of
            attention scores reach.
        tensor_overlap_share: The share of a tensor-parallel collective that is hidden if it
            overlaps with the product of a weight gradient.
        recompute_ahead: The share of the recomputation that can run before the gradient arrives, in
            an instruction of its own. The backward runs the rest.
        reduction_overlap_share: The share of the reduction of a stage's gradients over replicas
            that can overlap with the last backward of the stage. The gradient of the embedding is
            complete only after the backward, so its reduction does not overlap.
        all_reduce_overlap_share: For plans without ZeRO, this share replaces
            `reduction_overlap_share` if it is larger.
        accumulation_bytes: If separate kernels add the gradient of a microbatch to the gradient
            buffer: the bytes that they read and write per parameter.
        mask_bytes: Bytes of the mask that a dropout saves for each of its elements. Use 0 for
            training without dropout.
        gate_bytes: Bytes of additional saved tensors of a gated feed-forward network, for each
            token and hidden unit of the network.
        logit_bytes: Bytes of the saved tensors of the loss, for each logit of the last stage.
        gathered_bytes: Bytes of unsharded tensors that a layer saves for each token and hidden
            unit, although sequence parallelism shards its input.
        unsharded_bytes: With ZeRO 1, bytes of additional unsharded buffers for each parameter.
        allocator_share: Bytes that the allocator wastes, as a share of the bytes of tensors.
        reserved_bytes: Bytes of a process without its tensors: GPU context, kernels, and buffers of
            collectives.

    Raises:
        UsageError: A value is not within its bounds, or both speedups are above 1.

    Example:
        >>> from schedir.planner import SoftwareConstants
        >>> for one in SoftwareConstants().list_constants():
        ...     if one.name == "tensor_overlap_share":
        ...         print(one.value, "of", one.min_value, "to", one.max_value)
        0.67 of 0.0 to 1.0
    """

    tile_rows: float = _constant_field(
        128, "rows of the tile of a matrix product that a multiprocessor computes", 64, 256,
        "NVIDIA, Matrix Multiplication Background User's Guide: 256x128 and 128x256 are largest",
    )  # fmt: skip
    tile_columns: float = _constant_field(
        256, "columns of this tile, or its rows if that needs fewer tiles", 64, 256, "the same",
    )  # fmt: skip
    max_splits: float = _constant_field(
        8, "largest number of splits of the inner dimension of a product", 1, 32,
        "arXiv 2301.03598, section 3.2: fixed split",
    )  # fmt: skip
    speed_share: float = _constant_field(
        1.0, "share of the cluster's compute speed that the software reaches", 0.2, 1.0,
        "1: the speeds of a cluster are those that Megatron-LM reaches",
    )  # fmt: skip
    fp8_speedup: float = _constant_field(
        1.0, "factor by which products with the weights of layers are faster than in 16 bits", 1.0,
        4.0, "1: 16 bits",
    )  # fmt: skip
    fp4_speedup: float = _constant_field(
        1.0, "the same factor for products in FP4", 1.0, 8.0, "1: 16 bits",
    )  # fmt: skip
    kernels_per_op: float = _constant_field(
        1.0, "kernels that the software launches for each that the planner counts", 0.2, 20.0,
        "1: the planner counts the kernels of Megatron-LM",
    )  # fmt: skip
    loss_share: float = _constant_field(
        1.0, "bytes that the loss reads and writes, as a share of those of Megatron-LM", 0.1, 2.0,
        "1: list_head_ops counts the kernels of Megatron-LM",
    )  # fmt: skip
    tensors_per_layer: float = _constant_field(
        0.0, "weights of a layer that the software copies or reduces one by one", 0.0, 20.0,
        "0 in Megatron-LM, which gathers and reduces contiguous buffers",
    )  # fmt: skip
    shard_copy_us: float = _constant_field(
        0.0, "microseconds to copy the shard of one replica of one tensor that ZeRO gathers", 0.0,
        100.0, "0 in Megatron-LM, whose gathers write to the weights",
    )  # fmt: skip
    bucket_params: float = _constant_field(
        0.0, "parameters of a bucket of gradients with an all-reduce of its own; 0 is one bucket "
        "per stage", 0.0, 1e12,
        "0 in Megatron-LM as of arXiv 2104.04473",
    )  # fmt: skip
    crossing_us: float = _constant_field(
        0.0, "microseconds of the host per rank of a tensor-parallel group for each of its "
        "collectives, if boundaries of stages cross nodes", 0.0, 1000.0,
        "0 in Megatron-LM",
    )  # fmt: skip
    flash_forward_efficiency: float = _constant_field(
        0.90, "share of the reached flops that the flash attention forward reaches",
        0.5, 1.0,
        "arXiv 2307.08691, section 4.1: 73 % of an A100's peak, where products reach 81 %",
    )  # fmt: skip
    flash_backward_efficiency: float = _constant_field(
        0.78, "share of the reached flops that the flash attention backward reaches",
        0.4, 1.0, "the same: 63 %",
    )  # fmt: skip
    scores_bandwidth_share: float = _constant_field(
        0.73, "share of the reached bytes per second that softmax and dropout of scores reach",
        0.4, 1.0,
        "arXiv 2205.05198, Table 4: recomputing the core of attention takes 1.3 ms, and its "
        "products take 0.34 ms; random numbers and row maxima cost more than bytes",
    )  # fmt: skip
    tensor_overlap_share: float = _constant_field(
        0.67, "share of a tensor-parallel sum that is hidden if it overlaps with the product of a "
        "weight gradient; the rest slows the product down", 0.0, 1.0,
        "fitted to the five backwards of arXiv 2205.05198, Table 4: its software overlaps them; "
        "0 for software that does not",
    )  # fmt: skip
    recompute_ahead: float = _constant_field(
        0.0, "share of recomputation that is an instruction of its own and may run before the "
        "gradient arrives; the rest is part of the backward", 0.0, 1.0,
        "0 in Megatron-LM and torch.utils.checkpoint; 1 in schedir's programs "
        "(docs/how-to/fit-in-memory.md)",
    )  # fmt: skip
    reduction_overlap_share: float = _constant_field(
        0.0, "share of the reduction of a stage's gradients over replicas that the last backward "
        "of the stage can hide", 0.0, 1.0,
        "0 in Megatron-LM as of arXiv 2104.04473; up to 1 if each bucket is reduced early "
        "(arXiv 2006.15704, section 3.2.3)",
    )  # fmt: skip
    all_reduce_overlap_share: float = _constant_field(
        0.0, "share of the reduction of a stage's gradients over replicas that the last backward "
        "of the stage can hide in plans without ZeRO", 0.0, 1.0,
        "0 in Megatron-LM as of arXiv 2104.04473; 1 for DistributedDataParallel of torch, which "
        "reduces buckets during the backward (arXiv 2006.15704, section 3.2.3)",
    )  # fmt: skip
    accumulation_bytes: float = _constant_field(
        0.0, "bytes for each parameter that separate kernels read and write to add the gradient of "
        "a microbatch to the gradient buffer", 0.0, 20.0,
        "0 in Megatron-LM, whose products add to the buffer (gradient accumulation fusion)",
    )  # fmt: skip
    mask_bytes: float = _constant_field(
        1.0, "bytes of the mask that a dropout saves for each of its elements", 0.0, 1.0,
        "arXiv 2205.05198, section 4.1: one byte",
    )  # fmt: skip
    gate_bytes: float = _constant_field(
        0.0, "bytes of additional saved tensors of a gated network, for each token and unit of its "
        "width", 0.0, 8.0,
        "0 in Megatron-LM: its fused kernel of gate and product saves only the input "
        "(fused_bias_swiglu.py)",
    )  # fmt: skip
    logit_bytes: float = _constant_field(
        4.0, "bytes of the saved tensors of the loss, for each logit", 0.0, 20.0,
        "arXiv 2205.05198, section 4.3: the logits in 32 bits",
    )  # fmt: skip
    gathered_bytes: float = _constant_field(
        0.0, "bytes for each token and hidden unit that a layer saves unsharded, although sequence "
        "parallelism shards its input", 0.0, 12.0,
        "0: arXiv 2205.05198, section 4.2.2, gathers inputs again",
    )  # fmt: skip
    unsharded_bytes: float = _constant_field(
        0.0, "bytes per parameter of buffers that ZeRO 1 has besides its states", 0.0, 8.0,
        "0 in arXiv 1910.02054",
    )  # fmt: skip
    allocator_share: float = _constant_field(
        0.03, "bytes that the allocator wastes, as a share of the bytes of tensors", 0.0, 0.5,
        "arXiv 1910.02054, section 3.2: memory fragments; blocks of caching allocators are rounded "
        "up, large ones to 2 MiB",
    )  # fmt: skip
    reserved_bytes: float = _constant_field(
        1e9, "bytes of a process without its tensors: GPU context, kernels, and buffers of "
        "collectives", 0.0, 4e9,
        "NCCL's user guide: NCCL_BUFFSIZE, 4 MiB for each channel and peer; CUDA's context",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for f in fields(self):
            lower, upper = f.metadata["bounds"]
            value = to_float(getattr(self, f.name))
            if value is None or not lower <= value <= upper:
                raise UsageError(
                    f"constants: {f.name} ({f.metadata['meaning']}) must be from {lower:g} to "
                    f"{upper:g}, not {describe(getattr(self, f.name))}",
                    fields=[f.name],
                )
            object.__setattr__(self, f.name, value)
        if min(self.fp8_speedup, self.fp4_speedup) > 1:
            raise UsageError(
                f"constants: fp8_speedup is {self.fp8_speedup:g} and fp4_speedup is "
                f"{self.fp4_speedup:g}, but a product is computed either in FP8 or in FP4",
                fields=["fp8_speedup", "fp4_speedup"],
            )

    def get_reduction_overlap(self, zero: Any) -> Any:
        """Return the share of reductions that the last backward can hide.

        Args:
            zero: The ZeRO level, as a number or an array.
        """
        without_zero = max(self.reduction_overlap_share, self.all_reduce_overlap_share)
        return np.where(np.asarray(zero) > 0, self.reduction_overlap_share, without_zero)

    def count_buckets(self, params: Any, layers: Any) -> Any:
        """Return the number of buckets in which replicas reduce gradients without ZeRO.

        Args:
            params: The number of parameters of a GPU, as a number or an array.
            layers: The number of layers of the GPU.
        """
        if not self.bucket_params:
            return np.ones(np.shape(params))
        buckets = np.ceil(np.asarray(params) / self.bucket_params)
        if self.tensors_per_layer:
            buckets = np.minimum(buckets, self.tensors_per_layer * layers + 1)  # The embedding.
        return np.maximum(buckets, 1)

    @property
    def low_precision_speedup(self) -> float:
        """The factor by which products with the weights of layers are faster than in 16 bits."""
        return max(self.fp8_speedup, self.fp4_speedup)

    @property
    def tile_sides(self) -> tuple[float, float]:
        """The shorter and the longer side of a tile, in elements."""
        return min(self.tile_rows, self.tile_columns), max(self.tile_rows, self.tile_columns)

    def list_constants(self) -> Iterator[SoftwareConstant]:
        """Yield all constants with their meanings, bounds and sources."""
        for f in fields(self):
            meta = f.metadata
            lower, upper = meta["bounds"]
            value = getattr(self, f.name)
            yield SoftwareConstant(f.name, value, meta["meaning"], lower, upper, meta["source"])
