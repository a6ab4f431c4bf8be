"""Check the arguments of a step before its first message."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
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


def find_missing_input(stages: Iterable[Any], arguments: Iterable[object]) -> str:
    """Return an error if the first stage needs inputs, but a step has none.

    Args:
        stages: The PipelineStages of this rank.
        arguments: All arguments of the step, and all given lists of microbatches.

    Returns:
        One sentence, or an empty string.
    """
    first_stage = next((stage for stage in stages if stage.is_first), None)
    if first_stage is None or any(argument is not None for argument in arguments):
        return ""
    parameters = inspect.signature(first_stage.submod.forward).parameters.values()
    if not any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in parameters
    ):
        return ""
    return "step got no inputs, but this rank has stage 0, which needs them"


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
    given_lists = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
    for name, values in given_lists.items():
        if values is not None and not isinstance(values, list):
            return f"{name} must be a list, not {describe(values)}"
        if isinstance(values, list) and len(values) != n_microbatches:
            return f"{name} must have {n_microbatches} microbatches, not {len(values)}"
    for name, values, types in (
        ("arg_mbs", arg_mbs, (tuple, list)),
        ("kwarg_mbs", kwarg_mbs, (Mapping,)),
    ):
        for mb, microbatch in enumerate(values if isinstance(values, Sequence) else ()):
            if not isinstance(microbatch, types):
                kind_name = "tuple" if name == "arg_mbs" else "mapping"
                return (
                    f"{name} must have a {kind_name} per microbatch, but {name}[{mb}] is "
                    f"{describe(microbatch)}"
                )
    if losses is not None and not isinstance(losses, list):
        return f"losses must be a list, not {describe(losses)}"
    if needs_target and target_mbs is None:
        return "target is missing: loss_fn needs it, as in step(x, target=y)" + _find_other_name(
            kwarg_mbs
        )
    return ""


def _find_other_name(kwarg_mbs: object) -> str:
    """Return the end of a sentence if a keyword of the stages is similar to "target"."""
    keywords = kwarg_mbs[0] if isinstance(kwarg_mbs, list) and kwarg_mbs else {}
    if not (names := get_close_matches("target", [*keywords], 1)):
        return ""
    return f"; the stages get the keyword {names[0]!r}"
