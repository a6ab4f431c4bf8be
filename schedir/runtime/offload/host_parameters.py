"""The parameters and gradients of a stage in host memory, for optimizer steps on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from schedir.runtime.offload.copy_lanes import LaneJob
from schedir.runtime.parameters.parameter_copies import make_parameter_like
from schedir.runtime.stage_state import StageState

_HOST: Final = torch.device("cpu")


class GradCheck(NamedTuple):
    """The result of an update's gradient check, which the host may read after `jobs`.

    Attributes:
        finite: True if all gradients are finite, 0-dim bool.
        grad_factor: The factor of gradient clipping, 0-dim. None without clipping.
        jobs: The copy to the host. Empty on a CPU.
    """

    finite: Tensor
    grad_factor: Tensor | None
    jobs: Sequence[LaneJob]


class HostParameters:
    """The parameters and gradient buffers of a stage in host memory.

    The optimizer does not step a parameter without a gradient. Such a parameter has no copy on the
    host.

    Attributes:
        host_copies: Parameter on the device -> parameter on the host.
        flat_pairs: Pairs of a gradient buffer on the host and the same buffer on the device.
        device_weights: Parameter on the device -> the tensor on the device that has its values.
            With ZeRO, this tensor is the replica's shard.
    """

    def __init__(
        self,
        stage: StageState,
        parameters: Sequence[nn.Parameter],
        all_host_copies: dict[nn.Parameter, nn.Parameter],
    ) -> None:
        gradients = stage.gradients
        pinned = any(buffer.device.type == "cuda" for buffer in gradients.reduced_flat[:1])
        self.flat_pairs = [
            (allocate_like(buffer, _HOST, pinned=pinned), buffer)
            for buffer in gradients.reduced_flat
        ]
        views = dict(gradients.bound_views)
        if stage.sharded_parameters.is_sharded:
            views = {p: view for p, (view,) in gradients.shard_views.items()}
        self.stage = stage
        self.parameters = [p for p in parameters if p in views]
        self.refresh_weights()
        self.host_copies: dict[nn.Parameter, nn.Parameter] = {}
        self.host_memory: dict[nn.Parameter, Tensor] = {}  # keys as in `host_copies`
        self.host_gradients: dict[nn.Parameter, Tensor] = {}  # key: parameter on the host
        for p, weights in self.device_weights.items():
            if p not in all_host_copies or not has_same_shape_and_dtype(
                all_host_copies[p], weights
            ):
                all_host_copies[p] = make_parameter_like(
                    p, allocate_like(weights, _HOST, pinned=pinned)
                )
            self.host_copies[p] = host_copy = all_host_copies[p]
            self.host_memory[p], view = host_copy.detach(), views[p]
            if view.numel():
                (flat,) = (
                    host for host, buffer in self.flat_pairs
                    if buffer.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
                    and buffer.dtype == view.dtype
                    and 0 <= view.storage_offset() - buffer.storage_offset() < buffer.numel()
                )  # fmt: skip
                (buffer,) = (buffer for host, buffer in self.flat_pairs if host is flat)
                offset = view.storage_offset() - buffer.storage_offset()
                self.host_gradients[host_copy] = flat.as_strided(view.shape, view.stride(), offset)
            elif not stage.sharded_parameters.is_sharded:  # an empty shard has no gradient
                self.host_gradients[host_copy] = allocate_like(view, _HOST)
        self.was_stepped = True  # if False, weights are not copied back

    def refresh_weights(self) -> None:
        """Find the weights on the device again: users may have set `data` of a parameter."""
        shards = self.stage.parameter_shards
        self.device_weights = {p: shards.get(p, p.detach()) for p in self.parameters}

    def count_bytes(self) -> int:
        """Return the bytes of weights and gradients that a step reads."""
        return sum(t.nbytes for t in self.list_host_tensors())

    def list_host_tensors(self) -> list[Tensor]:
        """Return the tensors in host memory."""
        return [*(host for host, _ in self.flat_pairs), *self.host_memory.values()]

    def list_weight_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return the memory of each weight on the device and on the host."""
        return [
            (self.device_weights[p], host_copy.detach())
            for p, host_copy in self.host_copies.items()
        ]

    def list_versions(self) -> list[int]:
        """Return the version counters of the host parameters."""
        return [host_copy._version for host_copy in self.host_copies.values()]

    def bind_gradients(self) -> None:
        """Set the `grad` of host parameters again, because a step may have replaced it."""
        for host_copy, gradient in self.host_gradients.items():
            host_copy.grad = gradient

    def find_moved_parameter(self) -> nn.Parameter | None:
        """Return a parameter whose `data` on the device moved since `refresh_weights`, or None."""
        if self.stage.sharded_parameters.is_sharded:  # ShardedParameters checks its weights.
            return None
        for p, weights in self.device_weights.items():
            if p.data_ptr() != weights.data_ptr():
                return p
        return None

    def find_replaced_parameter(self) -> nn.Parameter | None:
        """Return a parameter whose `data` on the host moved to other memory, or None."""
        for p, host_copy in self.host_copies.items():
            expected, actual = self.host_memory[p], host_copy.detach()
            if not (
                has_same_shape_and_dtype(expected, actual) and expected.stride() == actual.stride()
            ):
                return p
            if expected.data_ptr() != actual.data_ptr():
                return p
        return None


@torch.no_grad()
def allocate_like(t: Tensor, device: torch.device, *, pinned: bool = False) -> Tensor:
    """Return uninitialised memory on a device, with the shape, dtype and strides of a tensor.

    Args:
        t: The tensor.
        device: The device of the new memory.
        pinned: True to pin the memory, if it is host memory.
    """
    return torch.empty_like(t, device=device, pin_memory=pinned, requires_grad=False)


def has_same_shape_and_dtype(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape and dtype."""
    return one.shape == other.shape and one.dtype == other.dtype
