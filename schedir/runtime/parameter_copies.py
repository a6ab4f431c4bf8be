"""Parameter copies: Parameters that stand in for another one, with its hooks and attributes."""

from __future__ import annotations

from torch import Tensor, nn

from schedir.errors import ModelError
from schedir.runtime.autograd_hooks import has_node_hooks


def like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A Parameter of this data, otherwise like another: its shards, hooks, its gradient's type."""
    other = nn.Parameter(data)
    share_hooks(other, parameter)
    vars(other).update(vars(parameter))
    other.grad_dtype = parameter.grad_dtype
    return other


def share_hooks(other: nn.Parameter, parameter: nn.Parameter) -> None:
    """Let the hooks on one Parameter's gradient be called for another's, too."""
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(other, hooks) is not getattr(parameter, hooks):
            setattr(other, hooks, getattr(parameter, hooks))


def expect_no_node_hooks(parameter: nn.Parameter, name: str) -> None:
    """Refuse hooks that would not be called for the copies of a trained Parameter.

    Args:
        parameter: The Parameter that is copied.
        name: Its name, and that of its stage.

    Raises:
        ModelError: It has a hook on its autograd node, or one of `register_multi_grad_hook`.
    """
    if has_node_hooks(parameter):
        raise ModelError(
            f"{name} has a hook on its autograd node, or one of register_multi_grad_hook, and the "
            "program computes with copies of it, too",
            hint="weight.register_hook, or a schedule of one update and one holder of each stage",
        )
