"""Check the arguments of a step before its first message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_leaves

from schedir.errors import describe


def find_indivisible_tensor(named_values: Mapping[str, Any], n_microbatches: int) -> str:
    """Return an error about the first tensor of a batch that cannot be split evenly.

    torch splits such a batch into microbatches of unequal sizes.

    Args:
        named_values: The arguments that are split along their first dimension, by name.
        n_microbatches: Number of microbatches.

    Returns:
        One sentence, or an empty string if all microbatches get equal shapes.
    """
    for name, value in named_values.items():
        for tensor in tree_leaves(value, is_leaf=lambda leaf: isinstance(leaf, BlockMask)):
            if isinstance(tensor, Tensor) and tensor.dim() and tensor.size(0) % n_microbatches:
                return (
                    f"{name} has {tensor.size(0)} samples, which n_microbatches={n_microbatches} "
                    "does not divide, but all microbatches must have the same shape"
                )
    return ""


def find_microbatch_error(
    n_microbatches: int,
    arg_mbs: object,
    kwarg_mbs: object,
    target_mbs: object,
    losses: object,
    *,
    needs_target: bool,
) -> str:
    """Return the first error in the microbatches of a step.

    Args:
        n_microbatches: Number of microbatches.
        arg_mbs: A tuple of arguments for each microbatch, or None.
        kwarg_mbs: A mapping of keywords for each microbatch, or None.
        target_mbs: A target for each microbatch, or None.
        losses: A list for the losses, or None.
        needs_target: True if this rank computes the loss in this step.

    Returns:
        One sentence, or an empty string.
    """
    argument_lists = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
    for name, value in argument_lists.items():
        if value is not None and not isinstance(value, list):
            return f"{name} must be a list, not {describe(value)}"
        if isinstance(value, list) and len(value) != n_microbatches:
            return f"{name} must have {n_microbatches} microbatches, not {len(value)}"
    for name, value, kinds in (
        ("arg_mbs", arg_mbs, (tuple, list)),
        ("kwarg_mbs", kwarg_mbs, (Mapping,)),
    ):
        for mb, mb_arguments in enumerate(value if isinstance(value, Sequence) else ()):
            if not isinstance(mb_arguments, kinds):
                kind_name = "tuple" if name == "arg_mbs" else "mapping"
                return (
                    f"{name} must have a {kind_name} per microbatch, but {name}[{mb}] is "
                    f"{describe(mb_arguments)}"
                )
    if losses is not None and not isinstance(losses, list):
        return f"losses must be a list, not {describe(losses)}"
    if needs_target and target_mbs is None:
        return "target is missing: loss_fn needs it"
    return ""
