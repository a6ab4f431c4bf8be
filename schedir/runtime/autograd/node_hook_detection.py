"""Find hooks on autograd nodes, because torch has no public function that lists them.

`node.register_hook` and `node.register_prehook` return a handle that refers to the dictionary of
all Python hooks or pre-hooks of the node. So this module registers a hook, reads the dictionary,
and removes the hook. It does not find hooks that C++ code registers, such as the hooks of
DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import graph
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

_observer_handle_count = 0
# `id` of a leaf tensor -> result of `count_registrations` when its node last had no hooks.
_leaves_without_hooks: dict[int, int] = {}


def count_registrations() -> int:
    """Return a number that grows whenever code registers a hook in this process.

    The number counts hooks of modules, tensors and autograd nodes, but not the hooks of this
    module. If two calls return the same number, no hook was registered in between.
    """
    return RemovableHandle.next_id - _observer_handle_count


def node_has_hooks(node: Node) -> bool:
    """Return whether a Python hook or pre-hook is registered on an autograd node.

    The function does not find hooks of tensors (`Tensor.register_hook`), and ignores hooks of
    `register_observer`.

    Args:
        node: The autograd node.
    """
    return any(map(_has_other_hooks, (node.register_hook, node.register_prehook)))


def register_observer(node: Node, hook: Callable[..., None]) -> RemovableHandle:
    """Register a hook that changes no gradient. `node_has_hooks` ignores such hooks.

    Args:
        node: The autograd node.
        hook: A function that only reads its arguments, the gradients, and returns None.

    Returns:
        The handle that removes the hook.
    """
    global _observer_handle_count
    _observer_handle_count += 1
    return node.register_hook(_Observer(hook))


@dataclass(frozen=True)
class _Observer:
    """A hook of `register_observer`. The type distinguishes it from other hooks."""

    hook: Callable[..., None]

    def __call__(self, *gradients: object) -> None:
        self.hook(*gradients)


def _has_other_hooks(register: Any) -> bool:
    """Return whether a node has hooks, or pre-hooks, that this module did not register."""
    global _observer_handle_count
    handle = register(_no_hook)
    _observer_handle_count += 1
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return any(not isinstance(hook, _Observer) for hook in hooks.values())


def _no_hook(*_: object) -> None:
    """Do nothing."""


def leaf_has_hooks(leaf: Tensor, node: Node) -> bool:
    """Return whether the node that accumulates the gradient of a leaf has Python hooks.

    The answer False is cached until any hook is registered in the process. Without the cache, each
    weight would cost several microseconds in each backward.

    Args:
        leaf: A leaf tensor.
        node: The node that accumulates the gradient of the leaf.
    """
    registrations = count_registrations()
    if _leaves_without_hooks.get(id(leaf)) == registrations:
        return False
    has_hooks = node_has_hooks(node)
    if not has_hooks:
        _leaves_without_hooks[id(leaf)] = registrations
    return has_hooks


def has_node_hooks(leaf: Tensor) -> bool:
    """Return whether a leaf has hooks that would not run for a copy of the leaf.

    These are hooks on its autograd node, and hooks of `register_multi_grad_hook`, which wait for
    the gradients of several tensors.

    Args:
        leaf: A leaf tensor that requires a gradient.
    """
    hooks = (leaf._backward_hooks or {}).values()
    # Hooks of register_multi_grad_hook are functions that torch.autograd.graph defines.
    files = [getattr(getattr(hook, "__code__", None), "co_filename", "") for hook in hooks]
    return graph.__file__ in files or leaf_has_hooks(leaf, get_gradient_edge(leaf).node)


def can_defer_gradient(weight: Tensor) -> bool:
    """Return whether W (BackwardWeight) may compute a weight's gradient instead of autograd.

    The weight must be a trained leaf, because only leaves accumulate gradients. It must have no
    tensor hooks, because hooks get only the gradients that autograd computes. `leaf_has_hooks`
    checks for hooks on its autograd node.

    Args:
        weight: A parameter, or a tensor that is used as a weight.
    """
    hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return weight.is_leaf and weight.requires_grad and not hooks
