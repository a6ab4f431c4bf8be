"""Inspect an optimizer: its class, its inner optimizers, its hooks and its options."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_leaves

from schedir.runtime.parameters.mixed_precision import MainOptimizer


class OptimizerLike(Protocol):
    """The interface that an optimizer must have."""

    def step(self) -> object:
        """Update the parameters by their gradients."""
        ...


def unwrap_optimizer(optimizer: object) -> Any:
    """Return the inner optimizer of a MainOptimizer, and any other optimizer unchanged.

    Args:
        optimizer: The optimizer.
    """
    return optimizer.inner if isinstance(optimizer, MainOptimizer) else optimizer


def map_main_parameters(optimizer: object) -> dict[Any, Any]:
    """Return a dict: main parameter -> parameter, which is empty without a MainOptimizer.

    Args:
        optimizer: The optimizer.
    """
    if not isinstance(optimizer, MainOptimizer):
        return {}
    return dict(zip(optimizer.main_parameters, optimizer.parameters, strict=True))


def list_stepped_parameters(optimizer: object) -> list[Any]:
    """Return the parameters in the groups of an optimizer, or [] if it has no groups.

    Args:
        optimizer: The optimizer. For a MainOptimizer, the result has the main parameters.
    """
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def find_optimizers(optimizer: object) -> list[Any]:
    """Return an optimizer and the optimizers that it wraps.

    Args:
        optimizer: An optimizer, or an object with optimizers in its attributes.

    Returns:
        A list with `optimizer` as first entry. If `optimizer` is an object of another library, the
        torch optimizers and MainOptimizers in its attributes follow.
    """
    optimizer_types = (torch.optim.Optimizer, MainOptimizer)
    if isinstance(optimizer, optimizer_types):
        return [optimizer]
    attribute_values = tree_leaves([*getattr(optimizer, "__dict__", {}).values()])
    return [optimizer, *(value for value in attribute_values if isinstance(value, optimizer_types))]


def has_known_effects(optimizer: object) -> bool:
    """Return whether a step changes only tensors that schedir can save and restore.

    This is the case for an optimizer of torch, and for a MainOptimizer with such an optimizer, if
    the step has no hooks.

    Args:
        optimizer: The optimizer.
    """
    is_subclass = isinstance(optimizer, MainOptimizer) and type(optimizer) is not MainOptimizer
    inner = unwrap_optimizer(optimizer)
    return not is_subclass and is_torch_optimizer(inner) and not has_step_hooks(inner)


def is_torch_optimizer(optimizer: object) -> bool:
    """Return whether torch defines the class and the `step` of an optimizer.

    The result is False for a subclass that is defined outside of torch, and for an optimizer with a
    replaced `step`. The wrapper that a learning-rate scheduler puts around `step` is allowed.

    Args:
        optimizer: The optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    # Append a dot, because the module of some classes is torch.optim itself.
    is_of_torch = f"{type(optimizer).__module__}.".startswith("torch.optim.")
    replaced_step = vars(optimizer).get("step")
    return is_of_torch and (replaced_step is None or hasattr(replaced_step, "_wrapped_by_lr_sched"))


def has_step_hooks(optimizer: object) -> bool:
    """Return whether the step of an optimizer has hooks, including hooks for all optimizers.

    Args:
        optimizer: The optimizer.
    """
    hook_names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    global_hooks = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    return bool(global_hooks) or any(getattr(optimizer, name, None) for name in hook_names)


def describe_options(optimizer: object) -> dict[Tensor, str]:
    """Describe, for each parameter, the type of its optimizer and the options of its group.

    Args:
        optimizer: The optimizer. An optimizer without `param_groups` gives an empty dict.

    Returns:
        Parameter -> description. For a MainOptimizer the keys are the 16-bit parameters.
    """
    inner = unwrap_optimizer(optimizer)
    parameter_of_main = map_main_parameters(optimizer)
    descriptions: dict[Tensor, str] = {}
    for group in getattr(inner, "param_groups", ()):
        options = (f"{k} {group[k]}" for k in getattr(inner, "defaults", {}) if group.get(k))
        text = f"{type(inner).__name__} with {', '.join(options)}"
        descriptions |= {parameter_of_main.get(p, p): text for p in group["params"]}
    return descriptions
