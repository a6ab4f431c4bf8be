"""Refuse to save runs whose state a checkpoint cannot represent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from schedir.checkpoints.local_state import LocalState
from schedir.errors import CheckpointError
from schedir.runtime.checkpoint_state import RankCheckpointState
from schedir.runtime.parameters.mixed_precision import MainOptimizer
from schedir.runtime.parameters.optimizer_inspection import (
    find_optimizers,
    is_torch_optimizer,
    unwrap_optimizer,
)


def require_savable(rank: RankCheckpointState) -> None:
    """Raise an error if a rank has state that is not a plain tensor.

    Args:
        rank: The state of the rank.

    Raises:
        CheckpointError: A module overrides `get_extra_state`, a parameter is a tensor subclass or
            is on the meta device, or schedir cannot determine whether the optimizer is elementwise.
    """
    for s, stage in rank.stages.items():
        for name, module in stage.module.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                raise CheckpointError(
                    f"{name or 'the module'} of stage {s} has state that is not a tensor "
                    f"({type(module).__name__}.get_extra_state)",
                    hint="register the state as a buffer",
                )
        for name, p in stage.module.named_parameters():
            if type(p.data) is not Tensor:
                raise CheckpointError(
                    f"{name} of stage {s} is a {type(p.data).__name__}, not a plain tensor"
                )
            if p.is_meta:
                raise CheckpointError(
                    f"{name} of stage {s} is on the meta device, and has no values",
                    hint="call module.to_empty(device=...), and initialize the weights",
                )
    _require_known_optimizer(rank.optimizer)


def _require_known_optimizer(optimizer: Any) -> None:
    """Raise CheckpointError for an optimizer that may have state of an unknown form."""
    hint = "use an optimizer of torch, or a MainOptimizer of one"
    for part in () if optimizer is None else find_optimizers(optimizer):
        inner = unwrap_optimizer(part)
        name = type(inner).__name__
        if not hasattr(inner, "param_groups"):
            leaves = [
                leaf
                for leaf in tree_leaves([*getattr(inner, "__dict__", {None: None}).values()])
                if not (hasattr(leaf, "param_groups") or isinstance(leaf, MainOptimizer))
            ]
            if leaves:
                raise CheckpointError(
                    f"schedir cannot save the state of the optimizer {name}, which has no "
                    "param_groups",
                    hint=hint,
                )
        elif not (is_torch_optimizer(inner) or getattr(inner, "elementwise", False)):
            raise CheckpointError(
                f"schedir cannot determine whether the optimizer {name} is elementwise",
                hint="if the optimizer is elementwise and has no state in its groups, set "
                f"{name}.elementwise = True",
            )


def require_sliceable_state(optimizer: Any, local_state: LocalState) -> None:
    """Raise an error if the state of an optimizer cannot be sliced in the same way as its weights.

    Each state must be a tensor with the shape of the weight, a scalar tensor, or None.

    Args:
        optimizer: The optimizer of a rank, or None.
        local_state: The weights of the rank.

    Raises:
        CheckpointError: A state has another form, the key of a state is not a string or contains a
            "/", or the optimizer steps a parameter that no stage has.
    """
    weights_by_id = {
        id(weight.optimized_tensor): weight
        for weight in local_state.weights
        if weight.optimizer is not None
    }
    for part in () if optimizer is None else find_optimizers(optimizer):
        inner = unwrap_optimizer(part)
        name = type(inner).__name__
        for p in _iterate_trained_params(inner):
            if id(p) not in weights_by_id:
                raise CheckpointError(
                    f"{name} steps a parameter of shape {list(p.shape)} that no stage has"
                )
        for p, state in getattr(inner, "state", {}).items():
            if id(p) not in weights_by_id and state:
                raise CheckpointError(
                    f"{name} has the state {', '.join(state)} of a parameter that no stage has"
                )
            for key, value in state.items():
                weight_name = weights_by_id[id(p)].name
                if not isinstance(key, str) or "/" in key:
                    raise CheckpointError(
                        f"{name} has the state {key!r:.60} of {weight_name}, but the name of "
                        "an optimizer state must be text without /"
                    )
                is_sliceable = isinstance(value, Tensor) and (
                    not value.dim() or value.shape == p.shape
                )
                if value is not None and not is_sliceable:
                    shape_text = (
                        f"shape {[*value.shape]}" if isinstance(value, Tensor) else "no shape"
                    )
                    raise CheckpointError(
                        f"the state {key} of {weight_name} in {name} has {shape_text}; a state "
                        f"must be a number or have the shape of the weight, {list(p.shape)}"
                    )


def _iterate_trained_params(optimizer: Any) -> Iterator[Tensor]:
    for group in getattr(optimizer, "param_groups", ()):
        yield from (p for p in group["params"] if p.requires_grad)
