"""Refuse reads and writes of weights between steps while an update is not validated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from schedir.errors import ModelError
from schedir.runtime.model_checks.tensor_fingerprint import compute_checksums, get_write_traces
from schedir.runtime.parameters.mixed_precision import LossScale, OptimizerLike, unwrap_optimizer

VALIDATE_HINT: Final = (
    "executor.settle(), on all ranks, before anybody looks at weights or writes to them"
)
_UNVALIDATED_MESSAGE: Final = "the last update is not validated yet, and may have to be made again"


class UnvalidatedUpdateGuard:
    """Between steps: refuses what would look at an update that is not validated, or lose it.

    Who looks is a module that has weights, alone or within whatever model, or the optimizer.  What
    may not be written to is what an update changes: weights, the optimizer's state and a loss
    scale; and what the optimizer steps.  Its options may.  What is written through `data` leaves no
    trace: if the host `compares_values`, sums of bits tell of it.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: OptimizerLike | None,
        loss_scale: LossScale | None,
        *,
        compares_values: bool,
    ) -> None:
        self.modules, self.optimizer, self.loss_scale = modules, optimizer, loss_scale
        self.compares_values = compares_values
        inner = unwrap_optimizer(optimizer)
        whole = dict.fromkeys(modules)
        parts = [
            m
            for module in modules
            for m in module.modules()
            if any(p is not None and p.requires_grad for p in m._parameters.values())
        ]
        self.hooks: list[Any] = []
        for m in whole | dict.fromkeys(parts):
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
        self.entries, self.traces = self._list_entries(), self._collect_traces()

    def lift(self) -> None:
        """Let everybody look again.  Raises ModelError if somebody has written meanwhile."""
        if [*map(id, self._list_entries())] != [*map(id, self.entries)]:
            raise ModelError(
                f"the optimizer has another state or other parameters than when it stepped: "
                f"{_UNVALIDATED_MESSAGE}",
                hint=VALIDATE_HINT,
            )
        now = self._collect_traces()
        for k, what in enumerate(("weights were", "the optimizer's state or loss scale was")):
            if now[k] != self.traces[k]:
                raise ModelError(
                    f"{what} written to between two steps: {_UNVALIDATED_MESSAGE}",
                    hint=VALIDATE_HINT,
                )
        for hook in self.hooks:
            hook.remove()

    def _list_entries(self) -> list[object]:
        """What there is in an optimizer's state, and what it steps.  Kept, so that no other object
        gets the address of one."""
        inner = unwrap_optimizer(self.optimizer)
        if inner is None:
            return []
        found: list[object] = [inner.state]
        for key, own in inner.state.items():
            found += [key, own, *own, *own.values()] if isinstance(own, dict) else [key, own]
        for group in inner.param_groups:
            found += [group, *group["params"]]
        return found

    def _collect_traces(self) -> list[list[object]]:
        """Of weights, and of what else an update changes: where each is, and what was written."""
        inner = unwrap_optimizer(self.optimizer)
        state: list[Any] = [] if inner is None else [[*inner.state.values()]]
        if inner is not None:
            state += [group["params"] for group in inner.param_groups]
        if self.loss_scale is not None:
            state += [self.loss_scale.value, self.loss_scale.good_steps]
        weights = dict.fromkeys(p for module in self.modules for p in module.parameters())
        others = dict.fromkeys(t for t in tree_leaves(state) if isinstance(t, Tensor))
        both = [*weights], [t for t in others if t not in weights]
        return [
            [*get_write_traces(each), *(compute_checksums(each) if self.compares_values else ())]
            for each in both
        ]


def list_optimizer_tables(optimizer: OptimizerLike | None) -> list[dict[Any, Any]]:
    """What an optimizer keeps its state and its options in."""
    inner = unwrap_optimizer(optimizer)
    if inner is None:
        return []
    return [inner.state, *inner.state.values(), *inner.param_groups]


def _refuse(*_: object) -> None:
    raise ModelError(_UNVALIDATED_MESSAGE, hint=VALIDATE_HINT)
