"""Reference: the same stages in one process, without a schedule.

What every schedule must reproduce.  An ascending one does, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from schedir.runtime.gradients import Gradients
from schedir.runtime.rank import Loss, Microbatches


def reference(
    stages: Sequence[nn.Module],
    inputs: Microbatches,
    targets: Microbatches,
    *,
    loss: Loss,
    scale: float = 1.0,
) -> Tensor:
    """The gradients of `scale` times the sum of losses, left in `.grad`; returns that sum.

    Microbatches one by one in order, each forward and backward through all stages; then the
    gradients are scaled, then the two copies of a tied weight added, first plus last, once.
    """
    gradients = [Gradients(stage) for stage in stages]
    total = torch.zeros(())
    for x, target in zip(inputs, targets, strict=True):
        saved: list[tuple[Tensor, Tensor]] = []
        for k, stage in enumerate(stages):
            y = stage(x)
            if k == len(stages) - 1:
                y = loss(y, target)
            saved.append((x, y))
            x = y.detach().requires_grad_()
        total = total + saved[-1][1].detach()
        dy: Tensor | None = None
        for x, y in reversed(saved):
            if y.requires_grad:  # a first stage may have nothing to train
                torch.autograd.backward(y, dy)
            dy = x.grad
    for gradient in gradients:
        gradient.scale(scale)
    first, last = (getattr(s, "tied_weight", None) for s in (stages[0], stages[-1]))
    if len(stages) > 1 and first is not None and last is not None:
        last.grad.copy_(first.grad.add_(last.grad))
    return total
