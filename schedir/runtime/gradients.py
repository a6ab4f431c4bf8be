"""Gradients: one flat static buffer per stage, of which every `.grad` is a view."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Gradients:
    """The gradient buffer of a stage.

    Backward passes accumulate into the views, so a reduction is one call on `flat`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        total = sum(p.numel() for p in self.parameters)
        like = self.parameters[0] if self.parameters else torch.empty(0)
        self.flat: Tensor = torch.zeros(total, dtype=like.dtype, device=like.device)
        sizes = [p.numel() for p in self.parameters]
        parts = zip(self.flat.split(sizes), self.parameters, strict=True) if sizes else ()
        self.views = [part.view_as(p) for part, p in parts]
        self.zero()

    def zero(self) -> None:
        """Forget everything, before a step; an optimizer's zero_grad may have unbound the views."""
        self.flat.zero_()
        for p, view in zip(self.parameters, self.views, strict=True):
            p.grad = view


def is_sharded(parameter: Tensor) -> bool:
    """Whether tensor-parallel ranks hold slices of it; else each holds it whole.

    A parameter that is a slice says along which dimension in `shard_dim`.
    """
    return getattr(parameter, "shard_dim", None) is not None
