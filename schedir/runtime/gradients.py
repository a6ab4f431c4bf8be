"""Gradients: a stage's flat static buffers, of which every `.grad` is a view."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Gradients:
    """The gradients of a stage: `flat` has a buffer for each type of its parameters' gradients.

    That is a parameter's own type, or its `grad_dtype` where it has been set.
    Backward passes accumulate into the views, so a reduction is one call on each buffer.
    A stage without parameters, or whose parameters are all frozen, has no buffer.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for p in self.parameters:
            kinds.setdefault((p.grad_dtype or p.dtype, p.device), []).append(p)
        self.flat: list[Tensor] = []
        self.bound: list[tuple[nn.Parameter, Tensor]] = []
        for (dtype, device), alike in kinds.items():
            sizes = [p.numel() for p in alike]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
            self.flat.append(flat)
            parts = zip(alike, flat.split(sizes), strict=True)
            self.bound += [(p, part.view_as(p)) for p, part in parts]
        self.zero()

    def scale(self, by: float | Tensor) -> None:
        """Multiply every gradient; a 0-dim tensor counts as a number does."""
        for flat in self.flat:
            if isinstance(by, Tensor) and flat.dtype.itemsize < 4:
                flat.copy_(flat.float() * by)  # which else would be rounded to their type first
            else:
                flat.mul_(by)

    def spoil(self, by: Tensor) -> None:
        """Let one number be NaN if `by`, 0-dim, is, and leave all as they are if it is zero."""
        for flat in self.flat[:1]:
            flat[:1].mul_(by + 1.0)

    def zero(self) -> None:
        """Forget everything, before a step; an optimizer's zero_grad may have unbound the views."""
        for flat in self.flat:
            flat.zero_()
        for p, view in self.bound:
            p.grad = view


def is_sharded(parameter: Tensor) -> bool:
    """Whether tensor-parallel ranks hold slices of it; else each holds it whole.

    A parameter that is a slice says along which dimension in `shard_dim`.
    """
    return getattr(parameter, "shard_dim", None) is not None
