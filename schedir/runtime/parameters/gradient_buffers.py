"""Flat gradient buffers of a stage.  Every `.grad` is a view of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Final

import torch
from torch import Tensor, nn

from schedir.errors import ModelError
from schedir.runtime.parameters.buckets import Bucket, ShardSpec, make_buckets

GradientViews = list[tuple[nn.Parameter, Tensor]]
CopyLookup = Callable[[nn.Parameter], Iterable[nn.Parameter]]
_UNSHARDED: Final = ShardSpec()


class GradientBuffers:
    """The gradients of a stage: each of `flat` is a buffer for the parameters of one bucket.

    They have one type: a parameter's own, or its `grad_dtype` where it has been set.  A bucket has
    at most `max_bucket_bytes` bytes, unless one parameter has more.  `views` are the parameters of
    each, with their gradients.  Backward passes accumulate into these, so a reduction is one call
    on each buffer.  `reduced_flat` is what is left of each when it is reduced, and `shard_views`
    are the gradients then, by part and parameter: of all parts, or, where each replica keeps a part
    of the sum, of its own.

    From level 2 of ZeRO on `reduced_flat` is memory of its own, and buffers are there from
    `allocate` until they are `release` one by one; `is_allocated` says that what is there may be
    added to.

    A stage without parameters, or whose parameters are all frozen, has no buffer.  With
    `max_bucket_bytes` None no stage has one: each `.grad` is autograd's own, and is added to as
    that does.
    """

    def __init__(
        self,
        module: nn.Module,
        max_bucket_bytes: float | None = math.inf,
        shard_spec: ShardSpec = _UNSHARDED,
        tied: Collection[nn.Parameter] = (),
    ) -> None:
        self.module = module
        self.names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        self.parameters = [*self.names]
        shared, self.is_grad_sharded = shard_spec != _UNSHARDED, shard_spec.shards_state("grads")
        self.buckets: list[Bucket] = []
        if max_bucket_bytes is not None:
            how = (shard_spec.replicas, tied if shared else ())
            self.buckets = make_buckets(self.parameters, max_bucket_bytes, *how, aligned=shared)
        self.flat = [
            torch.zeros(b.numel, dtype=b.grad_dtype, device=b.device) for b in self.buckets
        ]
        apart = {id(p) for p in tied}  # which others sum, number by number
        self.views: list[GradientViews] = [
            [
                (p, view if shared or id(p) in apart else _match_memory_order(p, view))
                for p, view in zip(b.parameters, b.views(flat), strict=True)
            ]
            for b, flat in zip(self.buckets, self.flat, strict=True)
        ]
        self.bound_views = [bound for views in self.views for bound in views]
        self.view_offsets = self._find_view_offsets()
        self.reduced_flat = self.flat
        if shard_spec.zero:
            own = [
                b.get_shard(flat, shard_spec.replica)
                for b, flat in zip(self.buckets, self.flat, strict=True)
            ]
            self.reduced_flat = [*map(torch.zeros_like, own)] if self.is_grad_sharded else own
        self.shard_views: dict[int, dict[nn.Parameter, Tensor]] = {
            k: {
                p: piece
                for b, kept in zip(self.buckets, self.reduced_flat, strict=True)
                for p, piece in zip(
                    b.parameters,
                    b.split_shard(kept if shard_spec.zero else b.get_shard(kept, k), k),
                    strict=True,
                )
            }
            for k in shard_spec.shard_indices
        }
        self.is_allocated = not self.is_grad_sharded
        for k in range(len(self.flat)) if self.is_grad_sharded else ():
            self.release(k)
        self.zero()

    def scale(self, factor: float | Tensor) -> None:
        """Multiply every gradient that is kept; a 0-dim tensor counts as a number does."""
        for flat in self.reduced_flat:
            scale_buffer(flat, factor)

    def collect(self, index: int, find_copies: CopyLookup) -> None:
        """Take into a buffer what has been put in the place of its views, as by a hook that does
        `p.grad = ...`; of a parameter and its `find_copies`, whose gradients are one."""
        for p, view in self.views[index]:
            for one in (p, *find_copies(p)):
                if one.grad is not view:
                    with torch.no_grad():
                        view.zero_() if one.grad is None else view.copy_(one.grad)
                    one.grad = view

    def zero(self) -> None:
        """Set all gradients to zero before a step, and bind views that `zero_grad` has unbound.

        Raises ModelError if a view is in its buffer no more.
        """
        if (places := self._find_view_offsets()) != self.view_offsets:
            moved = next(k for k, place in enumerate(places) if place != self.view_offsets[k])
            name = self.names[self.bound_views[moved][0]]
            raise ModelError(
                f"the gradient of {name} has been moved, as by a `to` of its module",
                hint="make the executor after the last such change",
            )
        self.bind_gradients()
        if not self.is_grad_sharded:
            for flat in self.flat:
                flat.zero_()

    def allocate(self) -> None:
        """Let there be buffers again, of zeros."""
        for flat in self.flat:
            flat.untyped_storage().resize_(flat.nbytes)
            flat.zero_()
        self.is_allocated = True

    def release(self, index: int) -> None:
        """Let a buffer go, of which everything is kept that will be asked for."""
        self.flat[index].untyped_storage().resize_(0)

    def bind_gradients(self) -> None:
        """Let every `.grad` be its view again."""
        for p, view in self.bound_views:
            p.grad = view

    def _find_view_offsets(self) -> list[int]:
        """Where each view is in its buffer; a module that is moved takes its gradients along."""
        places: list[int] = []
        for flat, views in zip(self.flat, self.views, strict=True):
            first = flat.data_ptr()
            places += [view.data_ptr() - first if view.numel() else 0 for _, view in views]
        return places


def scale_buffer(flat: Tensor, factor: float | Tensor) -> None:
    """Multiply a buffer; a 0-dim tensor counts as a number does."""
    if isinstance(factor, Tensor) and flat.dtype.itemsize < 4:
        flat.copy_(flat.float() * factor)  # which else would be rounded to their type first
    else:
        flat.mul_(factor)


def poison_if_nan(flat: Tensor, indicator: Tensor) -> None:
    """Let one number be NaN if `indicator`, 0-dim, is, and leave all as they are if it is zero."""
    flat[:1].mul_(indicator + 1.0)


def compute_sum_of_squares(gradients: Iterable[Tensor]) -> Tensor | None:
    """The sum of the squares of all numbers: 0-dim float64; None if there are none.

    The norm of each is taken in float64; on a GPU without a copy in that type.
    """
    kinds: dict[torch.dtype, list[Tensor]] = {}  # on a GPU those of one type are taken at once
    for g in gradients:
        real = torch.view_as_real(g) if g.is_complex() else g
        if real.numel():
            kinds.setdefault(real.dtype, []).append(real)
    norms: list[Tensor] = []
    for alike in kinds.values():
        norms += torch._foreach_norm(alike, 2, dtype=torch.float64)
    return torch.stack(norms).square().sum() if norms else None


def is_tp_sharded(parameter: Tensor) -> bool:
    """Whether tensor-parallel ranks hold slices of it; else each holds it whole.

    A parameter that is a slice says along which dimension in `shard_dim`.
    """
    return getattr(parameter, "shard_dim", None) is not None


def _match_memory_order(p: Tensor, view: Tensor) -> Tensor:
    """The memory of a gradient in the order in which a parameter's numbers lie, if there are no
    gaps: as autograd would make it, and as fused optimizers take it to be."""
    order = sorted(range(p.dim()), key=p.stride, reverse=True)
    if p.is_contiguous() or not p.permute(order).is_contiguous():
        return view
    back = sorted(range(p.dim()), key=order.__getitem__)
    return view.view([p.shape[dim] for dim in order]).permute(back)
