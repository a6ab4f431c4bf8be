"""Create copies of Parameters for forwards and backwards, with the hooks of the originals."""

from __future__ import annotations

from torch import Tensor, nn

from schedir.errors import ModelError
from schedir.runtime.autograd.node_hook_detection import has_node_hooks


def make_parameter_like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """Create a Parameter with given data, and with the hooks and attributes of another Parameter.

    Args:
        parameter: The other Parameter. The new Parameter also gets its `grad_dtype`.
        data: The data of the new Parameter.
    """
    other = nn.Parameter(data)
    share_hooks(other, parameter)
    vars(other).update(vars(parameter))
    other.grad_dtype = parameter.grad_dtype
    return other


def share_hooks(other: nn.Parameter, parameter: nn.Parameter) -> None:
    """Give a Parameter the gradient hooks of another Parameter, also hooks that are added later.

    Args:
        other: The Parameter that gets the hooks.
        parameter: The Parameter that has the hooks.
    """
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(other, hooks) is not getattr(parameter, hooks):
            setattr(other, hooks, getattr(parameter, hooks))


def require_no_node_hooks(parameter: nn.Parameter, name: str) -> None:
    """Check that a trained Parameter has no hooks that its copies would not call.

    Args:
        parameter: The Parameter that is copied.
        name: The names of the Parameter and of its stage.

    Raises:
        ModelError: The Parameter has a hook on its autograd node, or one of
            `register_multi_grad_hook`.
    """
    if has_node_hooks(parameter):
        raise ModelError(
            f"{name} has a hook on its autograd node or a hook of register_multi_grad_hook, but "
            "the program computes with copies of the weight, which would not call the hook",
            hint="use weight.register_hook, or a schedule with one update and one rank per stage",
        )
