"""Find hooks on autograd nodes, which no public function of torch lists.

`node.register_hook` and `node.register_prehook` return a handle that refers to the dictionary of
all Python hooks of that kind on the node. Registering a hook and removing it again therefore shows
the others. Hooks that were registered from C++, as by DistributedDataParallel, are not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import graph
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

_handles_made_here = 0
_leaves_without_hooks: dict[int, int] = {}  # id of a leaf tensor: `registrations()` at that time


def registrations() -> int:
    """Return a number that grows whenever a hook of any kind is registered in this process.

    Hooks of modules, tensors and autograd nodes all count. Those that this module registers do not.
    """
    return RemovableHandle.next_id - _handles_made_here


def has_hooks(node: Node) -> bool:
    """Return whether a Python hook or pre-hook was registered on an autograd node.

    A tensor's hooks (`Tensor.register_hook`) belong to the tensor and are not found here. Hooks
    of `observe` do not count.
    """
    return any(map(_has_others, (node.register_hook, node.register_prehook)))


def observe(node: Node, hook: Callable[..., None]) -> RemovableHandle:
    """Register a hook on an autograd node that changes no gradient, so that `has_hooks` ignores it.

    Args:
        node: The node whose run calls the hook.
        hook: A function that ignores or only reads the gradients that it is given.

    Returns:
        The handle that removes the hook.
    """
    global _handles_made_here
    _handles_made_here += 1
    return node.register_hook(_Observer(hook))


@dataclass(frozen=True)
class _Observer:
    hook: Callable[..., None]

    def __call__(self, *gradients: object) -> None:
        self.hook(*gradients)


def _has_others(register: Any) -> bool:
    global _handles_made_here
    handle = register(_no_hook)
    _handles_made_here += 1
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return any(not isinstance(hook, _Observer) for hook in hooks.values())


def _no_hook(*_: object) -> None:
    """Do nothing."""


def leaf_has_hooks(leaf: Tensor, node: Node) -> bool:
    """Return whether the node that accumulates the gradient of `leaf` has Python hooks.

    As long as no hook is registered anywhere, the answer "no" is remembered: to look takes
    several microseconds, and this is asked for each weight in each backward.
    """
    now = registrations()
    if _leaves_without_hooks.get(id(leaf)) == now:
        return False
    found = has_hooks(node)
    if not found:
        _leaves_without_hooks[id(leaf)] = now
    return found


def has_node_hooks(leaf: Tensor) -> bool:
    """Return whether a leaf has hooks that only a gradient of this very tensor calls.

    These are hooks of its autograd node, and those of `register_multi_grad_hook`, which count the
    gradients of several tensors.
    """
    hooks = (leaf._backward_hooks or {}).values()
    files = [getattr(getattr(h, "__code__", None), "co_filename", "") for h in hooks]
    return graph.__file__ in files or leaf_has_hooks(leaf, get_gradient_edge(leaf).node)


def can_wait(weight: Tensor) -> bool:
    """Whether a gradient may be left for later: only a leaf that is trained collects its own, and
    hooks see none but autograd's.
    """
    hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return weight.is_leaf and weight.requires_grad and not hooks
