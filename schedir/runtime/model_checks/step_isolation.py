"""Refuse optimizers for which one step per stage differs from one step of all stages.

With states on the host an optimizer steps the stages of a rank one after the other.  That is the
same as one step of all stages if a step changes only the parameters and the state of its own
stage.  An optimizer of torch's own does so.  What any other changes is verified after each step.
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
from schedir.runtime.parameters.mixed_precision import is_torch_optimizer

ON_DEVICE_HINT: Final = "compile(..., optimizer_placement='device')"
_STATE_ATTRIBUTES: Final = (
    "param_groups",
    "state",
    "defaults",
)  # attributes that are moved, or fixed
_Entry = tuple[str, object]  # what it is, for people to read, and its value


def make_offload_error(fact: str, hint: str = ON_DEVICE_HINT, program: str = "") -> ModelError:
    """Return the error for an optimizer whose states cannot leave the device."""
    return ModelError(
        f"the optimizer's states are not on the device, and {fact}", program=program, hint=hint
    )


class StepIsolation:
    """Verifies that the steps of an optimizer for different stages do not depend on each other.

    Args:
        inner: the optimizer; if it is one of torch's own, nothing is verified.
        replaces_parameters: whether a step gets other parameters in place of those of the device.
    """

    def __init__(self, inner: Any, *, replaces_parameters: bool) -> None:
        self.inner, self.replaces_parameters = inner, replaces_parameters
        self.name = type(inner).__name__
        self.changing_stages: dict[object, int] = {}  # the stage whose step has changed an entry
        self.state_owners: WeakTensorKeyDictionary = (
            WeakTensorKeyDictionary()
        )  # the stage of a state

    def require_no_references(self, *, stages: int) -> None:
        """Raise ModelError if the optimizer may step parameters outside its own groups.

        That is another optimizer in an attribute, and a parameter in an attribute if there are
        several `stages`, or if steps get other parameters.
        """
        if is_torch_optimizer(self.inner):
            return
        for other in _find_inner_optimizers(self.inner):
            raise make_offload_error(
                f"{self.name} contains another optimizer, {type(other).__name__}, which has states "
                "of its own"
            )
        if stages < 2 and not self.replaces_parameters:
            return
        steps = {id(p) for group in self.inner.param_groups for p in group["params"]}
        for name, value in _list_attributes(self.inner):
            keys = _list_nested_keys(value) if self.replaces_parameters else ()
            if any(id(one) in steps for one in (*tree_leaves(value), *keys)):
                raise make_offload_error(
                    f"{self.name} has parameters in its attribute {name!r}: a step of one stage "
                    "must find them in param_groups alone"
                )

    @contextmanager
    def watch_step(self, stage: int) -> Iterator[None]:
        """Verify a step of a stage.

        Raises ModelError if it changes which parameters the optimizer has, or a number, or a
        tensor beside the state of parameters, that the step of another stage has changed, too.
        """
        if is_torch_optimizer(self.inner):
            yield
            return
        groups, before = _list_parameter_ids(self.inner), _collect_entries(self.inner)
        yield
        if _list_parameter_ids(self.inner) != groups:
            raise make_offload_error(f"a step of {self.name} changes which parameters it has")
        after = _collect_entries(self.inner)
        for key in before.keys() | after.keys():
            what = (after.get(key) or before[key])[0]
            was, now = (each[key][1] if key in each else None for each in (before, after))
            if not _is_unchanged(was, now) and self.changing_stages.setdefault(key, stage) != stage:
                traced = isinstance(was, _TensorTrace) or isinstance(now, _TensorTrace)
                values = "" if traced else f", from {was} to {now}"
                raise make_offload_error(
                    f"a step of {self.name} changes {what}{values}: it would for each stage"
                )

    def require_separate_memory(
        self, state: Sequence[Tensor], parameters: Iterable[Tensor], stage: int
    ) -> None:
        """Raise ModelError if a stage's state, which is about to be moved, shares memory.

        A write to the one would then be missing in the other.  `parameters` are those of the
        device: their memory, and that of their gradients, is not moved.
        """
        if is_torch_optimizer(self.inner):
            return
        for t in state:
            if (other := self.state_owners.setdefault(t, stage)) != stage:
                raise make_offload_error(
                    f"{self.name} keeps one tensor for stages {other} and {stage}"
                )
        if state_shares_memory(self.inner, state, parameters):
            raise make_offload_error(
                f"{self.name} keeps a tensor for stage {stage} in memory that it shares with "
                "another state, a parameter, a gradient or an attribute",
                hint=f"state = tensor.clone(), or {ON_DEVICE_HINT}",
            )


def require_no_step_overlap(parameters: Mapping[Tensor, str]) -> None:
    """Raise ModelError for two parameters in one memory, of those that an optimizer steps.

    `parameters` has their names.  The optimizer steps each stage by itself, and where states is
    "cpu" with memory of its own for each parameter.
    """
    each, names = [*parameters], [*parameters.values()]
    for one, other in sorted(find_overlaps(each)):
        raise make_offload_error(
            f"it steps {names[one]} and {names[other]}, which share memory",
            f"one Parameter (stage.b = stage.a), or {ON_DEVICE_HINT}",
        )


def state_shares_memory(inner: Any, state: Sequence[Tensor], parameters: Iterable[Tensor]) -> bool:
    """Return whether a tensor of an optimizer's state shares memory: with another one, with a
    parameter, the gradient of a parameter, or a tensor in an attribute of the optimizer."""
    used = [t for p in parameters for t in (p, p.grad) if t is not None]
    if not {*map(id, state)}.isdisjoint(map(id, used)):
        return True
    attributes = (t for _, value in _list_attributes(inner) for t in tree_leaves(value))
    tensors = [*state, *used, *(t for t in attributes if isinstance(t, Tensor))]
    return any(one < len(state) for one, _ in find_overlaps(tensors))


class _TensorTrace:
    """A tensor of several numbers, and how often it had been written to."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, (self.version,) = tensor, get_versions([tensor])


def _list_attributes(inner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an optimizer, but for its groups and the state of parameters."""
    for name, value in vars(inner).items():
        if name not in _STATE_ATTRIBUTES:
            yield name, value


def _find_inner_optimizers(inner: Any) -> list[Any]:
    """Return the optimizers among the values of an optimizer's attributes."""
    leaves = (x for _, value in _list_attributes(inner) for x in tree_leaves(value))
    return [x for x in leaves if isinstance(x, torch.optim.Optimizer) and x is not inner]


def _list_nested_keys(value: object) -> Iterator[object]:
    """Yield the keys of a dictionary, and of those within it."""
    if isinstance(value, Mapping):
        for key, within in value.items():
            yield key
            yield from _list_nested_keys(within)


def _list_parameter_ids(inner: Any) -> list[list[int]]:
    """Return the ids of an optimizer's parameters by group."""
    return [[id(p) for p in group["params"]] for group in inner.param_groups]


def _collect_entries(inner: Any) -> dict[object, _Entry]:
    """Return all numbers and tensors of an optimizer, except the state of parameters."""
    found: dict[object, _Entry] = {}
    for group in inner.param_groups:
        for k, v in group.items():
            if k != "params":
                found |= _collect_leaves(v, f"{k!r} of a group", (id(group), k))
    for name, v in _list_attributes(inner):
        found |= _collect_leaves(v, f"its {name!r}", ("", name))
    for key, v in inner.state.items():
        if not isinstance(key, Tensor):
            found |= _collect_leaves(v, f"its state of {key!r}", ("state", key))
    return found


def _collect_leaves(value: object, label: str, key: tuple[object, ...]) -> dict[object, _Entry]:
    """Return the numbers and tensors in a value, and how long its lists are."""
    if isinstance(value, Tensor):
        one = value.numel() == 1 and not value.is_meta
        return {key: (label, value.item() if one else _TensorTrace(value))}
    if isinstance(value, Number) and not isinstance(value, bool):  # a flag counts nothing
        return {key: (label, value)}
    found: dict[object, _Entry] = {}
    if isinstance(value, Mapping):
        for k, v in value.items():
            found |= _collect_leaves(v, label, (*key, id(k) if isinstance(k, Tensor) else k))
    elif isinstance(value, list | tuple):
        found[*key, "length"] = (f"the length of {label}", len(value))
        for k, v in enumerate(value):
            found |= _collect_leaves(v, label, (*key, k))
    return found


def _is_unchanged(before: object, after: object) -> bool:
    """Return whether an entry is as it was; NaN is NaN."""
    if isinstance(before, _TensorTrace) and isinstance(after, _TensorTrace):
        return before.tensor is after.tensor and before.version == after.version
    return before is after or bool(before == after) or bool(before != before and after != after)
