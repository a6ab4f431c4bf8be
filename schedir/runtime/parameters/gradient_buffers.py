"""Flat gradient buffers of a stage. Every `.grad` is a view of such a buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor, nn

from schedir.errors import ModelError
from schedir.runtime.parameters.buckets import UNSHARDED, Bucket, ShardSpec, make_buckets

GradientViews = list[tuple[nn.Parameter, Tensor]]
CopyLookup = Callable[[nn.Parameter], Iterable[nn.Parameter]]


class GradientBuffers:
    """The gradient buffers of a stage, one for each bucket of parameters.

    Backward passes accumulate into the buffers, so a reduction is one call for each buffer. The
    gradients of a bucket have one dtype: the dtype of the parameters, or their `grad_dtype` if it
    is set. A stage without trained parameters has no buffer.

    Args:
        module: The stage.
        max_bucket_bytes: The largest size of a buffer, in bytes. Only a buffer with a single
            parameter may be larger. With None the stage has no buffers: autograd allocates each
            `.grad`, and accumulates into it.
        shard_spec: The number of replicas, the index of this replica, and the ZeRO level.
        tied: The parameters that are tied to parameters of other stages.

    Attributes:
        flat: The buffer of each bucket.
        views: For each bucket, pairs of a parameter and the view of the buffer that is its
            gradient.
        reduced_flat: For each bucket, the gradients after the reduction. With ZeRO these are only
            this replica's shard. From level 2 on they have separate memory, and `flat` has memory
            only from `allocate` to `release`.
        shard_views: Parameter -> its reduced gradient, as one view per shard. With ZeRO, only the
            shard of this replica.
        is_allocated: True if gradients may be accumulated into the buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        max_bucket_bytes: float | None = math.inf,
        shard_spec: ShardSpec = UNSHARDED,
        tied: Collection[nn.Parameter] = (),
    ) -> None:
        self.module = module
        self.names: dict[nn.Parameter, str] = {
            p: name for name, p in module.named_parameters() if p.requires_grad
        }
        self.parameters: list[nn.Parameter] = [*self.names]
        is_shared = shard_spec != UNSHARDED
        self.is_grad_sharded: bool = shard_spec.shards_state("grads")
        self.buckets: list[Bucket] = []
        if max_bucket_bytes is not None:
            bucket_options = (shard_spec, tied if is_shared else ())
            self.buckets = make_buckets(
                self.parameters, max_bucket_bytes, *bucket_options, aligned=is_shared
            )
        self.flat: list[Tensor] = [
            torch.zeros(b.numel, dtype=b.grad_dtype, device=b.device) for b in self.buckets
        ]
        # Gradients of tied weights stay contiguous, because stages add them element by element.
        tied_ids = {id(p) for p in tied}
        self.views: list[GradientViews] = [
            [
                (p, view if is_shared or id(p) in tied_ids else _match_memory_order(p, view))
                for p, view in zip(b.parameters, b.views(flat), strict=True)
            ]
            for b, flat in zip(self.buckets, self.flat, strict=True)
        ]
        self.bound_views: list[tuple[nn.Parameter, Tensor]] = [
            bound for views in self.views for bound in views
        ]
        self.view_offsets: list[int] = self._find_view_offsets()
        self.reduced_flat: list[Tensor] = self.flat
        if shard_spec.zero:
            shards = [b.get_shard(flat) for b, flat in zip(self.buckets, self.flat, strict=True)]
            self.reduced_flat = [*map(torch.zeros_like, shards)] if self.is_grad_sharded else shards
        self.shard_views: dict[nn.Parameter, list[Tensor]] = {}
        for b, reduced in zip(self.buckets, self.reduced_flat, strict=True):
            views_by_shard = [
                b.split_shard(reduced if shard_spec.zero else b.get_shard(reduced, k), k)
                for k in b.shard_spec.shard_indices
            ]
            views_by_parameter = map(list, zip(*views_by_shard, strict=True))
            self.shard_views |= zip(b.parameters, views_by_parameter, strict=True)
        self.is_allocated: bool = not self.is_grad_sharded
        for k in range(len(self.flat)) if self.is_grad_sharded else ():
            self.release(k)
        self.zero()

    def scale(self, factor: float | Tensor) -> None:
        """Multiply the reduced gradients by a factor.

        Args:
            factor: A number or a 0-dim tensor, see `scale_buffer`.
        """
        for flat in self.reduced_flat:
            scale_buffer(flat, factor)

    def collect(self, index: int, find_copies: CopyLookup) -> None:
        """Copy gradients into the buffer of a bucket if a hook has replaced `.grad`.

        Each view of the buffer becomes the `.grad` of its parameter and of the copies again.

        Args:
            index: The index of the bucket.
            find_copies: Returns the other Parameters that accumulate into the same gradient.
        """
        for p, view in self.views[index]:
            for parameter in (p, *find_copies(p)):
                if parameter.grad is not view:
                    with torch.no_grad():
                        view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
                    parameter.grad = view

    def zero(self, location: str = "") -> None:
        """Set all gradients to zero before an update, and restore views that `zero_grad` removed.

        From ZeRO level 2 on, the method only restores the views. `allocate` sets the buffers to
        zero.

        Args:
            location: The words after the name of a parameter in the error, such as " of stage 0".

        Raises:
            ModelError: A gradient was moved out of its buffer.
        """
        if (offsets := self._find_view_offsets()) != self.view_offsets:
            moved_index = next(
                k for k, offset in enumerate(offsets) if offset != self.view_offsets[k]
            )
            name = self.names[self.bound_views[moved_index][0]]
            raise ModelError(
                f"the gradient of {name}{location} was moved or has another type, for example "
                "after the `to` method of its module",
                hint="create the executor after the last such change",
            )
        self.bind_gradients()
        if not self.is_grad_sharded:
            for flat in self.flat:
                flat.zero_()

    def allocate(self) -> None:
        """Allocate the memory of the buffers again, and set it to zero."""
        for flat in self.flat:
            flat.untyped_storage().resize_(flat.nbytes)
            flat.zero_()
        self.is_allocated = True

    def release(self, index: int) -> None:
        """Free the memory of a buffer after its reduction.

        Args:
            index: The index of the bucket.
        """
        self.flat[index].untyped_storage().resize_(0)

    def bind_gradients(self) -> None:
        """Set every `.grad` to its view of a buffer."""
        for p, view in self.bound_views:
            p.grad = view

    def _find_view_offsets(self) -> list[int]:
        """Return the byte offset of each view in its buffer, to find gradients that were moved."""
        offsets: list[int] = []
        for flat, views in zip(self.flat, self.views, strict=True):
            start = flat.data_ptr()
            offsets += [view.data_ptr() - start if view.numel() else 0 for _, view in views]
        return offsets


def scale_buffer(flat: Tensor, factor: float | Tensor) -> None:
    """Multiply a buffer by a factor, in place.

    Args:
        flat: The buffer.
        factor: A number or a 0-dim tensor. A tensor is not rounded to the dtype of a 16-bit buffer,
            so it has the same effect as a number.
    """
    if isinstance(factor, Tensor) and flat.dtype.itemsize < 4:
        flat.copy_(flat.float() * factor)  # torch would round the factor to 16 bits
    else:
        flat.mul_(factor)


def poison_if_nan(flat: Tensor, indicator: Tensor) -> None:
    """Set the first element of a buffer to NaN if an indicator is NaN.

    The host does not wait.

    Args:
        flat: The buffer.
        indicator: A 0-dim tensor, NaN or 0. If it is 0, the buffer stays unchanged.
    """
    flat[:1].mul_(indicator + 1.0)


def compute_sum_of_squares(gradients: Iterable[Tensor]) -> Tensor | None:
    """Return the sum of the squares of all elements of tensors.

    The norm of each tensor is computed in float64. On a GPU no copy in float64 is made.

    Args:
        gradients: The tensors.

    Returns:
        A 0-dim float64 tensor, or None if there are no elements.
    """
    # On a GPU, one kernel computes the norms of many tensors of one dtype.
    tensors_by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for g in gradients:
        real = torch.view_as_real(g) if g.is_complex() else g
        if real.numel():
            tensors_by_dtype.setdefault(real.dtype, []).append(real)
    norms: list[Tensor] = []
    for tensors in tensors_by_dtype.values():
        norms += torch._foreach_norm(tensors, 2, dtype=torch.float64)
    return torch.stack(norms).square().sum() if norms else None


def is_tp_sharded(parameter: Tensor) -> bool:
    """Return whether each tensor-parallel rank has a slice of a parameter.

    The attribute `shard_dim` of a slice is the dimension in which the parameter is split.

    Args:
        parameter: The parameter.
    """
    return getattr(parameter, "shard_dim", None) is not None


def _match_memory_order(p: Tensor, view: Tensor) -> Tensor:
    """Return a view of a gradient with its dimensions in the memory order of the parameter.

    autograd allocates gradients in this order, and fused optimizers require it. If the memory of
    the parameter has gaps, the view is returned unchanged.
    """
    order = sorted(range(p.dim()), key=p.stride, reverse=True)
    if p.is_contiguous() or not p.permute(order).is_contiguous():
        return view
    inverse = sorted(range(p.dim()), key=order.__getitem__)
    return view.view([p.shape[dim] for dim in order]).permute(inverse)
