"""Skip the step of an optimizer if a gradient is infinite or NaN."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from schedir.runtime.parameters.optimizer_inspection import (
    OptimizerLike,
    has_known_effects,
    unwrap_optimizer,
)


def step_if_finite(finite: Tensor, optimizer: OptimizerLike) -> None:
    """Step an optimizer if all gradients are finite. Otherwise change nothing.

    A fused optimizer of torch reads the condition on the device. For any other optimizer, and for
    an optimizer with hooks on its step, the host reads the condition. The host then waits for the
    GPU, if the condition is on a GPU.

    Args:
        finite: The condition, 0-dim bool.
        optimizer: The optimizer.
    """
    inner = unwrap_optimizer(optimizer)
    if not has_gated_step(optimizer) or not ensure_momentum(inner):
        if finite:
            optimizer.step()
        return
    inner.found_inf = finite.logical_not().float()
    try:
        optimizer.step()
    finally:
        del inner.found_inf


def are_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether all elements of tensors are finite, as a 0-dim bool tensor on their device.

    Args:
        tensors: The tensors. If they have no elements, the result is True on the CPU.
    """
    # Begin with None, because the copy of a host tensor to a GPU would block.
    finite: Tensor | None = None
    for flat in tensors:
        if flat.numel():
            extremes = torch.aminmax(torch.view_as_real(flat) if flat.is_complex() else flat)
            is_flat_finite = extremes.min.isfinite() & extremes.max.isfinite()
            finite = is_flat_finite if finite is None else finite & is_flat_finite
    return torch.tensor(True) if finite is None else finite


def has_gated_step(optimizer: object) -> bool:
    """Return whether a tensor on the device, `found_inf`, can make an optimizer skip its step.

    torch.amp.GradScaler uses such steps, too. The result is False for a subclass of torch's
    optimizers and for a step with hooks: their code would run even if the step is skipped.

    Args:
        optimizer: The optimizer.
    """
    supports_scaling = getattr(unwrap_optimizer(optimizer), "_step_supports_amp_scaling", False)
    return supports_scaling is True and has_known_effects(optimizer)


def ensure_momentum(optimizer: Any) -> bool:
    """Create missing momentum buffers of SGD, and return whether the optimizer can skip a step.

    A fused SGD creates its momentum in its first step. If that step is skipped, the memory stays
    uninitialised. Without dampening the first step is equal to a step from momentum 0, so this
    function creates zeros. With dampening the two steps differ, so the function creates nothing and
    returns False.

    Args:
        optimizer: An optimizer of torch.
    """
    missing = [
        (group, p)
        for group in optimizer.param_groups
        if group.get("momentum")
        for p in group["params"]
        if p.requires_grad and optimizer.state.get(p, {}).get("momentum_buffer") is None
    ]
    if any(group.get("dampening") for group, _ in missing):
        return False
    for _, p in missing:
        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p if p.grad is None else p.grad)
    return True
