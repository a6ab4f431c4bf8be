"""Detect activation checkpoints, and hooks that a split backward calls too often or never.

In the autograd graph, paths from weights and paths from inputs meet at join nodes (see
`backward_split`). The first half of a split backward runs the join nodes, and the second half
starts at them. So both halves call a hook on the outputs of these nodes, and a hook that changes a
gradient changes it twice. A hook on a parameter receives the gradient of one group of weights at a
time. Post-accumulate-grad hooks are never called.

The W of each group of weights would also recompute the activations of a checkpoint. A selective
checkpoint refuses a second backward.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch.utils.checkpoint as checkpoints
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from schedir.runtime.autograd.node_hook_detection import (
    can_defer_gradient,
    count_registrations,
    node_has_hooks,
)


class _Counter:
    """Counts retained gradients, the hooks of FSDP, and forwards of activation checkpoints.

    `count_registrations` does not count retained gradients. It counts the hooks of FSDP, which
    `hook_count` subtracts.
    """

    fsdp_hooks = 0
    retained_gradients = 0
    checkpoints = 0
    is_installed = False


def install_hook_counters() -> None:
    """Wrap methods of torch to count their calls for `hook_count` and `checkpoint_count`.

    torch keeps no list of retained gradients and no list of checkpoints, so the wrapped methods
    count them. The wrapped `register_hook` counts the hooks that `fully_shard` registers. A process
    wraps the methods once.
    """
    if _Counter.is_installed:
        return
    _Counter.is_installed = True
    register_hook: Any = Tensor.register_hook
    retain_grad: Any = Tensor.retain_grad

    @wraps(register_hook)
    def counted_register_hook(self: Tensor, hook: Any) -> Any:
        if isinstance(getattr(hook, "__self__", None), FSDPState):
            _Counter.fsdp_hooks += 1
        return register_hook(self, hook)

    @wraps(retain_grad)
    def counted_retain_grad(self: Tensor) -> None:
        _Counter.retained_gradients += 1
        retain_grad(self)

    Tensor.register_hook = counted_register_hook  # type: ignore[method-assign]
    Tensor.retain_grad = counted_retain_grad  # type: ignore[assignment, method-assign]
    # A non-reentrant checkpoint creates `_checkpoint_hook` for its forward. A reentrant one calls
    # `CheckpointFunction.forward`.
    for owner, name in ((checkpoints._checkpoint_hook, "__init__"), (_Reentrant, "forward")):
        setattr(owner, name, _count_checkpoints(vars(owner)[name]))


_Reentrant: Any = checkpoints.CheckpointFunction


def _count_checkpoints(method: Any) -> Any:
    """Return a method, static or not, that counts its calls in `_Counter.checkpoints`."""
    run = getattr(method, "__func__", method)

    @wraps(run)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _Counter.checkpoints += 1
        return run(*args, **kwargs)

    return staticmethod(counted) if isinstance(method, staticmethod) else counted


def checkpoint_count() -> int:
    """Return a number that grows with each forward of an activation checkpoint of torch."""
    return _Counter.checkpoints


def hook_count() -> int:
    """Return a number that grows with each registered hook and each retained gradient.

    The hooks with which `fully_shard` gathers parameters are not counted, because torch may call
    them twice without harm.
    """
    return count_registrations() - _Counter.fsdp_hooks + _Counter.retained_gradients


def has_parameter_hooks(module: nn.Module) -> bool:
    """Return whether a trained parameter, or the node that accumulates its gradient, has hooks.

    Args:
        module: The module of a stage.
    """
    return any(
        not can_defer_gradient(p) or node_has_hooks(get_gradient_edge(p).node)
        for p in module.parameters()
        if p.requires_grad
    )
