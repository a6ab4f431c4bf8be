"""Find the hooks that the two halves of torch's split backward would not call as a full one does.

torch's second half starts at the autograd nodes where weights and inputs join, and the first half
has passed these nodes. So a hook on their outputs is called twice, and one that changes the
gradient changes it twice. Hooks on parameters see the gradient of one group of weights at a time,
and post-accumulate-grad hooks are never called.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from schedir.runtime.autograd_hooks import has_hooks, registrations


class _Counter:
    """Counts what `registrations` does not count, or counts too much."""

    fsdp_hooks = 0
    retained_gradients = 0
    is_installed = False


def count_tensor_hooks() -> None:
    """Let `hooks_so_far` count, from now on, what each tensor's methods register.

    This wraps `Tensor.register_hook` and `Tensor.retain_grad`, once in a process: a retained
    gradient is a hook that torch lists nowhere, and only the method sees whose hook it is.
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


def hooks_so_far() -> int:
    """Return a number that grows with each hook that is registered, and each retained gradient.

    The hooks by which `fully_shard` gathers parameters do not count: they may be called twice.
    """
    return registrations() - _Counter.fsdp_hooks + _Counter.retained_gradients


def has_parameter_hooks(module: nn.Module) -> bool:
    """Return whether a trained parameter, or the node that accumulates its gradient, has hooks."""
    return any(
        bool(p._backward_hooks or p._post_accumulate_grad_hooks)
        or has_hooks(get_gradient_edge(p).node)
        for p in module.parameters()
        if p.requires_grad
    )
