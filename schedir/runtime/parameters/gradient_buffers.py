"""Flat gradient buffers of a stage.  Every `.grad` is a view of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Final

import torch
from torch import Tensor, nn

from schedir.errors import ModelError
from schedir.runtime.parameters.buckets import Bucket, ShardSpec, buckets_of

Views = list[tuple[nn.Parameter, Tensor]]
Copies = Callable[[nn.Parameter], Iterable[nn.Parameter]]
_ALONE: Final = ShardSpec()


class GradientBuffers:
    """The gradients of a stage: each of `flat` is a buffer for the parameters of one bucket.

    They have one type: a parameter's own, or its `grad_dtype` where it has been set.  A bucket has
    at most `most` bytes, unless one parameter has more.  `views` are the parameters of each, with
    their gradients.  Backward passes accumulate into these, so a reduction is one call on each
    buffer.  `kept` is what is left of each when it is reduced, and `pieces` are the gradients then,
    by part and parameter: of all parts, or, where each replica keeps a part of the sum, of its own.

    From level 2 of ZeRO on `kept` is memory of its own, and buffers are there from `make` until
    they are `let_go` one by one; `made` says that what is there may be added to.

    A stage without parameters, or whose parameters are all frozen, has no buffer.  With `most`
    None no stage has one: each `.grad` is autograd's own, and is added to as that does.
    """

    def __init__(
        self,
        module: nn.Module,
        most: float | None = math.inf,
        share: ShardSpec = _ALONE,
        tied: Collection[nn.Parameter] = (),
    ) -> None:
        self.module = module
        self.names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        self.parameters = [*self.names]
        shared, self.cut = share != _ALONE, share.cuts("grads")
        self.buckets: list[Bucket] = []
        if most is not None:
            how = (share.replicas, tied if shared else ())
            self.buckets = buckets_of(self.parameters, most, *how, aligned=shared)
        self.flat = [
            torch.zeros(b.numel, dtype=b.grad_dtype, device=b.device) for b in self.buckets
        ]
        apart = {id(p) for p in tied}  # which others sum, number by number
        self.views: list[Views] = [
            [
                (p, view if shared or id(p) in apart else _in_order_of(p, view))
                for p, view in zip(b.parameters, b.views(flat), strict=True)
            ]
            for b, flat in zip(self.buckets, self.flat, strict=True)
        ]
        self.bound = [bound for views in self.views for bound in views]
        self.places = self._places()
        self.kept = self.flat
        if share.zero:
            own = [
                b.part(flat, share.replica) for b, flat in zip(self.buckets, self.flat, strict=True)
            ]
            self.kept = [*map(torch.zeros_like, own)] if self.cut else own
        self.pieces: dict[int, dict[nn.Parameter, Tensor]] = {
            k: {
                p: piece
                for b, kept in zip(self.buckets, self.kept, strict=True)
                for p, piece in zip(
                    b.parameters,
                    b.pieces(kept if share.zero else b.part(kept, k), k),
                    strict=True,
                )
            }
            for k in share.parts
        }
        self.made = not self.cut
        for k in range(len(self.flat)) if self.cut else ():
            self.let_go(k)
        self.zero()

    def scale(self, by: float | Tensor) -> None:
        """Multiply every gradient that is kept; a 0-dim tensor counts as a number does."""
        for flat in self.kept:
            scale(flat, by)

    def collect(self, k: int, copies: Copies) -> None:
        """Take into a buffer what has been put in the place of its views, as by a hook that does
        `p.grad = ...`; of a parameter and its `copies`, whose gradients are one."""
        for p, view in self.views[k]:
            for one in (p, *copies(p)):
                if one.grad is not view:
                    with torch.no_grad():
                        view.zero_() if one.grad is None else view.copy_(one.grad)
                    one.grad = view

    def zero(self) -> None:
        """Set all gradients to zero before a step, and bind views that `zero_grad` has unbound.

        Raises ModelError if a view is in its buffer no more.
        """
        if (places := self._places()) != self.places:
            moved = next(k for k, place in enumerate(places) if place != self.places[k])
            name = self.names[self.bound[moved][0]]
            raise ModelError(
                f"the gradient of {name} has been moved, as by a `to` of its module",
                hint="make the executor after the last such change",
            )
        self.bind()
        if not self.cut:
            for flat in self.flat:
                flat.zero_()

    def make(self) -> None:
        """Let there be buffers again, of zeros."""
        for flat in self.flat:
            flat.untyped_storage().resize_(flat.nbytes)
            flat.zero_()
        self.made = True

    def let_go(self, k: int) -> None:
        """Let a buffer go, of which everything is kept that will be asked for."""
        self.flat[k].untyped_storage().resize_(0)

    def bind(self) -> None:
        """Let every `.grad` be its view again."""
        for p, view in self.bound:
            p.grad = view

    def _places(self) -> list[int]:
        """Where each view is in its buffer; a module that is moved takes its gradients along."""
        places: list[int] = []
        for flat, views in zip(self.flat, self.views, strict=True):
            first = flat.data_ptr()
            places += [view.data_ptr() - first if view.numel() else 0 for _, view in views]
        return places


def scale(flat: Tensor, by: float | Tensor) -> None:
    """Multiply a buffer; a 0-dim tensor counts as a number does."""
    if isinstance(by, Tensor) and flat.dtype.itemsize < 4:
        flat.copy_(flat.float() * by)  # which else would be rounded to their type first
    else:
        flat.mul_(by)


def spoil(flat: Tensor, by: Tensor) -> None:
    """Let one number be NaN if `by`, 0-dim, is, and leave all as they are if it is zero."""
    flat[:1].mul_(by + 1.0)


def sum_of_squares(gradients: Iterable[Tensor]) -> Tensor | None:
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


def is_sharded(parameter: Tensor) -> bool:
    """Whether tensor-parallel ranks hold slices of it; else each holds it whole.

    A parameter that is a slice says along which dimension in `shard_dim`.
    """
    return getattr(parameter, "shard_dim", None) is not None


def _in_order_of(p: Tensor, view: Tensor) -> Tensor:
    """The memory of a gradient in the order in which a parameter's numbers lie, if there are no
    gaps: as autograd would make it, and as fused optimizers take it to be."""
    order = sorted(range(p.dim()), key=p.stride, reverse=True)
    if p.is_contiguous() or not p.permute(order).is_contiguous():
        return view
    back = sorted(range(p.dim()), key=order.__getitem__)
    return view.view([p.shape[dim] for dim in order]).permute(back)
