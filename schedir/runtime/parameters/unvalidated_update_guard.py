"""Refuse reads and writes of weights between steps while an update is not validated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from schedir.errors import ModelError
from schedir.runtime.model_checks.tensor_fingerprint import compute_checksums, get_write_traces
from schedir.runtime.parameters.mixed_precision import LossScale
from schedir.runtime.parameters.optimizer_inspection import OptimizerLike, unwrap_optimizer

VALIDATE_HINT: Final = (
    "call executor.validate_last_update() on all ranks before you read or write weights"
)
_UNVALIDATED_MESSAGE: Final = "the last update is not validated yet, and schedir may repeat it"


class UnvalidatedUpdateGuard:
    """Hooks and fingerprints that refuse access to weights while an update is not validated.

    The guarded modules are the stages, and the modules in them that have trained weights. Hooks
    raise ModelError if a guarded module runs a forward, even as a part of another model. Other
    hooks raise ModelError if the state dict of a guarded module or of the optimizer is saved or
    loaded. `lift` finds writes to the state that an update changes: the weights, the optimizer
    state, the loss scale, and the set of parameters that the optimizer steps. The optimizer's
    options may change.

    Version counters show most writes. Checksums also show a write through `data`.

    Args:
        modules: The stages.
        optimizer: The optimizer, or None if the rank has none.
        loss_scale: The loss scale, if the loss is scaled.
        compares_values: If True, the host compares checksums of the values.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: OptimizerLike | None,
        loss_scale: LossScale | None,
        *,
        compares_values: bool,
    ) -> None:
        self.modules = modules
        self.optimizer = optimizer
        self.loss_scale = loss_scale
        self.compares_values = compares_values
        inner = unwrap_optimizer(optimizer)
        stages = dict.fromkeys(modules)
        submodules = [
            m
            for module in modules
            for m in module.modules()
            if any(p is not None and p.requires_grad for p in m._parameters.values())
        ]
        self.hooks: list[Any] = []
        for m in stages | dict.fromkeys(submodules):
            self.hooks += [
                m.register_forward_pre_hook(_refuse),
                m.register_state_dict_pre_hook(_refuse),
                m.register_load_state_dict_pre_hook(_refuse),
            ]
        if inner is not None:
            self.hooks += [
                inner.register_state_dict_pre_hook(_refuse),
                inner.register_load_state_dict_pre_hook(_refuse),
            ]
        self.entries = self._list_entries()
        self.traces = self._collect_traces()

    def lift(self) -> None:
        """Check that the guarded state has not changed, and remove the hooks.

        Raises:
            ModelError: The weights, the optimizer's state or parameters, or the loss scale have
                changed.
        """
        if [*map(id, self._list_entries())] != [*map(id, self.entries)]:
            raise ModelError(
                "the state or the parameters of the optimizer were replaced between two steps: "
                f"{_UNVALIDATED_MESSAGE}",
                hint=VALIDATE_HINT,
            )
        new_traces = self._collect_traces()
        for k, subject in enumerate(("weights were", "the optimizer's state or loss scale was")):
            if new_traces[k] != self.traces[k]:
                raise ModelError(
                    f"{subject} written to between two steps: {_UNVALIDATED_MESSAGE}",
                    hint=VALIDATE_HINT,
                )
        for hook in self.hooks:
            hook.remove()

    def _list_entries(self) -> list[object]:
        """Return the objects in an optimizer's state and groups.

        The caller keeps references to them, so that no new object gets the same address.
        """
        inner = unwrap_optimizer(self.optimizer)
        if inner is None:
            return []
        entries: list[object] = [inner.state]
        for key, state in inner.state.items():
            entries += (
                [key, state, *state, *state.values()] if isinstance(state, dict) else [key, state]
            )
        for group in inner.param_groups:
            entries += [group, *group["params"]]
        return entries

    def _collect_traces(self) -> list[list[object]]:
        """Return addresses, versions and checksums: a list for weights, and one for other state."""
        inner = unwrap_optimizer(self.optimizer)
        state: list[Any] = [] if inner is None else [[*inner.state.values()]]
        if inner is not None:
            state += [group["params"] for group in inner.param_groups]
        if self.loss_scale is not None:
            state += [self.loss_scale.value, self.loss_scale.good_steps]
        weights = dict.fromkeys(p for module in self.modules for p in module.parameters())
        state_tensors = dict.fromkeys(t for t in tree_leaves(state) if isinstance(t, Tensor))
        tensor_groups = [*weights], [t for t in state_tensors if t not in weights]
        return [
            [
                *get_write_traces(tensors),
                *(compute_checksums(tensors) if self.compares_values else ()),
            ]
            for tensors in tensor_groups
        ]


def list_optimizer_tables(optimizer: OptimizerLike | None) -> list[dict[Any, Any]]:
    """Return the dictionaries in which an optimizer has its state and its options.

    Args:
        optimizer: The optimizer, or None for an empty list.
    """
    inner = unwrap_optimizer(optimizer)
    if inner is None:
        return []
    return [inner.state, *inner.state.values(), *inner.param_groups]


def _refuse(*_: object) -> None:
    raise ModelError(_UNVALIDATED_MESSAGE, hint=VALIDATE_HINT)
