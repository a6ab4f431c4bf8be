"""Gradients: a stage's flat static buffers, of which every `.grad` is a view."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from schedir.errors import ModelError

Views = list[tuple[nn.Parameter, Tensor]]
Copies = Callable[[nn.Parameter], Iterable[nn.Parameter]]


class Gradients:
    """The gradients of a stage: each of `flat` is a buffer for parameters whose type is one.

    That is a parameter's own type, or its `grad_dtype` where it has been set.  Of a type there is
    one buffer, or several of at most `most` bytes, unless one parameter has more; in the order of
    parameters, cut from the last on.  `views` are the parameters of each, with their gradients.

    Backward passes accumulate into the views, so a reduction is one call on each buffer.
    A stage without parameters, or whose parameters are all frozen, has no buffer.  With `most`
    None no stage has one: each `.grad` is autograd's own, and is added to as that does.
    """

    def __init__(self, module: nn.Module, most: float | None = math.inf) -> None:
        self.names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        self.parameters = [*self.names]
        kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for p in () if most is None else self.parameters:
            kinds.setdefault((p.grad_dtype or p.dtype, p.device), []).append(p)
        self.flat: list[Tensor] = []
        self.views: list[Views] = []
        for (dtype, device), alike in kinds.items():
            for own in _cut(alike, dtype.itemsize, most or 0):
                sizes = [p.numel() for p in own]
                flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
                self.flat.append(flat)
                parts = zip(own, flat.split(sizes), strict=True)
                self.views.append([(p, part.view_as(p)) for p, part in parts])
        self.bound = [bound for views in self.views for bound in views]
        self.places = self._places()
        self.zero()

    def scale(self, by: float | Tensor) -> None:
        """Multiply every gradient; a 0-dim tensor counts as a number does."""
        for flat in self.flat:
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
        """Forget everything, before a step; an optimizer's zero_grad may have unbound the views.

        Raises ModelError if a view is in its buffer no more.
        """
        if (places := self._places()) != self.places:
            moved = next(k for k, place in enumerate(places) if place != self.places[k])
            name = self.names[self.bound[moved][0]]
            raise ModelError(
                f"the gradient of {name} has been moved, as by a `to` of its module",
                hint="make the executor after the last such change",
            )
        for flat in self.flat:
            flat.zero_()
        self.bind()

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


def _cut(parameters: list[nn.Parameter], itemsize: int, most: float) -> list[list[nn.Parameter]]:
    """Runs of parameters, in their order, whose gradients have at most so many bytes."""
    runs: list[list[nn.Parameter]] = []
    room = 0.0
    for p in reversed(parameters):
        size = p.numel() * itemsize
        if not runs or size > room:
            runs.append([])
            room = most
        runs[-1].append(p)
        room = max(room - size, 0)
    return [run[::-1] for run in reversed(runs)]


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
