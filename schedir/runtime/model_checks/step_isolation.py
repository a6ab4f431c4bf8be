"""Refuse optimizers for which one step per stage differs from one step of all stages.

If the optimizer state is on the host, the optimizer steps the stages of a rank one after the other.
These steps are equal to one step of all stages if each step changes only the parameters and the
state of its stage. torch's own optimizers change nothing else. For other optimizers, this module
checks the changes after each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Number
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from schedir.errors import ModelError
from schedir.runtime.model_checks.memory_overlap import find_overlaps
from schedir.runtime.model_checks.tensor_fingerprint import get_versions
from schedir.runtime.parameters.optimizer_inspection import is_torch_optimizer

ON_DEVICE_HINT: Final = "compile(..., optimizer_placement='device')"
# `_list_attributes` leaves these out. The first two are checked separately, and the third does not
# change.
_STATE_ATTRIBUTES: Final = ("param_groups", "state", "defaults")
_Entry = tuple[str, object]  # description for errors, value


def make_offload_error(fact: str, hint: str = ON_DEVICE_HINT, program: str = "") -> ModelError:
    """Return the error for an optimizer whose state must stay on the device.

    Args:
        fact: The reason.
        hint: The remedy.
        program: The name of the program.
    """
    return ModelError(f"optimizer_placement must be 'device': {fact}", program=program, hint=hint)


class StepIsolation:
    """Verifies that the steps of an optimizer for different stages do not depend on each other.

    Args:
        inner: The optimizer. torch's own optimizers are not checked.
        replaces_parameters: True if the optimizer updates copies of the parameters on the host, as
            a CPU optimizer does.
    """

    def __init__(self, inner: Any, *, replaces_parameters: bool) -> None:
        self.inner = inner
        self.replaces_parameters = replaces_parameters
        self.name = type(inner).__name__
        # Key of `_collect_entries` -> the stage whose step has changed this entry.
        self.changing_stages: dict[object, int] = {}
        # State tensor -> its stage.
        self.state_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def require_no_references(self, *, stages: int) -> None:
        """Check that the optimizer refers to parameters only in its groups.

        Args:
            stages: The number of stages on the rank.

        Raises:
            ModelError: An attribute of the optimizer contains another optimizer, or a parameter. A
                parameter is allowed if there is only one stage and `replaces_parameters` is False.
        """
        if is_torch_optimizer(self.inner):
            return
        for inner_optimizer in _find_inner_optimizers(self.inner):
            raise make_offload_error(
                f"{self.name} contains another optimizer, {type(inner_optimizer).__name__}, with "
                "its own state"
            )
        if stages < 2 and not self.replaces_parameters:
            return
        stepped_ids = {id(p) for group in self.inner.param_groups for p in group["params"]}
        for name, value in _list_attributes(self.inner):
            keys = _list_nested_keys(value) if self.replaces_parameters else ()
            if any(id(leaf) in stepped_ids for leaf in (*tree_leaves(value), *keys)):
                raise make_offload_error(
                    f"{self.name} has parameters in its attribute {name!r}, but the step of one "
                    "stage must find parameters in param_groups only"
                )

    @contextmanager
    def watch_step(self, stage: int) -> Iterator[None]:
        """Check the optimizer step of a stage, which runs within this context.

        Args:
            stage: The number of the stage.

        Raises:
            ModelError: The step changes the set of parameters. Or the steps of two stages change
                the same number or tensor outside of the state of parameters.
        """
        if is_torch_optimizer(self.inner):
            yield
            return
        groups = _list_parameter_ids(self.inner)
        before = _collect_entries(self.inner)
        yield
        if _list_parameter_ids(self.inner) != groups:
            raise make_offload_error(f"a step of {self.name} changes its list of parameters")
        after = _collect_entries(self.inner)
        for key in before.keys() | after.keys():
            label = (after.get(key) or before[key])[0]
            old_value = before[key][1] if key in before else None
            new_value = after[key][1] if key in after else None
            if _is_unchanged(old_value, new_value):
                continue
            if self.changing_stages.setdefault(key, stage) != stage:
                is_traced = any(isinstance(x, _TensorTrace) for x in (old_value, new_value))
                values_text = "" if is_traced else f", from {old_value} to {new_value}"
                raise make_offload_error(
                    f"a step of {self.name} changes {label}{values_text}, and the step of each "
                    "stage would change it again"
                )

    def require_separate_memory(
        self, state: Sequence[Tensor], parameters: Iterable[Tensor], stage: int
    ) -> None:
        """Check that each state tensor of a stage has separate memory, before the state is moved.

        After the move, a write to one of two tensors that shared memory would be missing in the
        other tensor.

        Args:
            state: The state tensors of the stage.
            parameters: The parameters on the device. They and their gradients are not moved.
            stage: The number of the stage.

        Raises:
            ModelError: A state tensor also belongs to another stage, or shares memory with another
                tensor.
        """
        if is_torch_optimizer(self.inner):
            return
        for t in state:
            if (other_stage := self.state_owners.setdefault(t, stage)) != stage:
                raise make_offload_error(
                    f"{self.name} keeps one state tensor for stages {other_stage} and {stage}"
                )
        if state_shares_memory(self.inner, state, parameters):
            raise make_offload_error(
                f"{self.name} keeps a state tensor of stage {stage} in memory that it shares with "
                "another state, a parameter, a gradient or an attribute",
                hint=f"state = tensor.clone(), or {ON_DEVICE_HINT}",
            )


def require_no_step_overlap(parameters: Mapping[Tensor, str]) -> None:
    """Check that no two parameters of an optimizer share memory.

    The optimizer steps each stage separately, and on the host each parameter has separate memory.

    Args:
        parameters: The parameters that the optimizer steps, with their names.

    Raises:
        ModelError: Two parameters have an element in the same memory.
    """
    tensors, names = [*parameters], [*parameters.values()]
    for k, n in sorted(find_overlaps(tensors)):
        raise make_offload_error(
            f"the optimizer steps {names[k]} and {names[n]}, which share memory",
            f"use one Parameter (stage.b = stage.a), or {ON_DEVICE_HINT}",
        )


def state_shares_memory(inner: Any, state: Sequence[Tensor], parameters: Iterable[Tensor]) -> bool:
    """Return whether a state tensor of an optimizer shares memory with another tensor.

    Args:
        inner: The optimizer. The state tensors are compared with the tensors in its attributes.
        state: The state tensors. They are also compared with each other.
        parameters: Parameters. The state tensors are compared with them and with their gradients.
    """
    used_tensors = [t for p in parameters for t in (p, p.grad) if t is not None]
    if not {*map(id, state)}.isdisjoint(map(id, used_tensors)):
        return True
    attributes = (t for _, value in _list_attributes(inner) for t in tree_leaves(value))
    tensors = [*state, *used_tensors, *(t for t in attributes if isinstance(t, Tensor))]
    return any(k < len(state) for k, _ in find_overlaps(tensors))


class _TensorTrace:
    """A tensor with several elements, and its version counter."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, (self.version,) = tensor, get_versions([tensor])


def _list_attributes(inner: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each attribute of an optimizer except groups, state and defaults."""
    for name, value in vars(inner).items():
        if name not in _STATE_ATTRIBUTES:
            yield name, value


def _find_inner_optimizers(inner: Any) -> list[Any]:
    leaves = (x for _, value in _list_attributes(inner) for x in tree_leaves(value))
    return [x for x in leaves if isinstance(x, torch.optim.Optimizer) and x is not inner]


def _list_nested_keys(value: object) -> Iterator[object]:
    """Yield the keys of a dictionary and of the dictionaries in it."""
    if isinstance(value, Mapping):
        for key, nested_value in value.items():
            yield key
            yield from _list_nested_keys(nested_value)


def _list_parameter_ids(inner: Any) -> list[list[int]]:
    """Return the ids of an optimizer's parameters, as one list per group."""
    return [[id(p) for p in group["params"]] for group in inner.param_groups]


def _collect_entries(inner: Any) -> dict[object, _Entry]:
    """Return a dict: key -> entry, for the numbers and tensors outside of parameter state."""
    entries: dict[object, _Entry] = {}
    for group in inner.param_groups:
        for k, v in group.items():
            if k != "params":
                entries |= _collect_leaves(v, f"{k!r} of a parameter group", (id(group), k))
    for name, v in _list_attributes(inner):
        entries |= _collect_leaves(v, f"its {name!r}", ("", name))
    for key, v in inner.state.items():
        if not isinstance(key, Tensor):
            entries |= _collect_leaves(v, f"its state of {key!r}", ("state", key))
    return entries


def _collect_leaves(value: object, label: str, key: tuple[object, ...]) -> dict[object, _Entry]:
    """Return a dict: key -> entry, for the numbers, tensors and lengths of lists in a value."""
    if isinstance(value, Tensor):
        is_single = value.numel() == 1 and not value.is_meta
        return {key: (label, value.item() if is_single else _TensorTrace(value))}
    # A bool is also a Number, but no counter of steps.
    if isinstance(value, Number) and not isinstance(value, bool):
        return {key: (label, value)}
    entries: dict[object, _Entry] = {}
    if isinstance(value, Mapping):
        for k, v in value.items():
            entries |= _collect_leaves(v, label, (*key, id(k) if isinstance(k, Tensor) else k))
    elif isinstance(value, list | tuple):
        entries[*key, "length"] = (f"the length of {label}", len(value))
        for k, v in enumerate(value):
            entries |= _collect_leaves(v, label, (*key, k))
    return entries


def _is_unchanged(before: object, after: object) -> bool:
    """Return whether an entry is unchanged. Two NaNs count as equal."""
    if isinstance(before, _TensorTrace) and isinstance(after, _TensorTrace):
        return before.tensor is after.tensor and before.version == after.version
    return before is after or bool(before == after) or bool(before != before and after != after)
