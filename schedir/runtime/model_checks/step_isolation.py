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
from schedir.runtime.model_checks.memory_overlap import overlaps
from schedir.runtime.model_checks.tensor_fingerprint import versions_of
from schedir.runtime.parameters.mixed_precision import is_torchs

ON_DEVICE: Final = "compile(..., optimizer_placement='device')"
_HELD_BY_STEPS: Final = ("param_groups", "state", "defaults")  # attributes that are moved, or fixed
_Entry = tuple[str, object]  # what it is, for people to read, and its value


def refusal(fact: str, hint: str = ON_DEVICE, program: str = "") -> ModelError:
    """Return the error for an optimizer whose states cannot leave the device."""
    return ModelError(
        f"the optimizer's states are not on the device, and {fact}", program=program, hint=hint
    )


class StepIsolation:
    """Verifies that the steps of an optimizer for different stages do not depend on each other.

    Args:
        inner: the optimizer; if it is one of torch's own, nothing is verified.
        replaces: whether a step gets other parameters in place of those of the device.
    """

    def __init__(self, inner: Any, *, replaces: bool) -> None:
        self.inner, self.replaces = inner, replaces
        self.name = type(inner).__name__
        self.changed: dict[object, int] = {}  # the stage whose step has changed an entry
        self.owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # the stage of a state

    def expect_no_references(self, *, stages: int) -> None:
        """Raise ModelError if the optimizer may step parameters outside its own groups.

        That is another optimizer in an attribute, and a parameter in an attribute if there are
        several `stages`, or if steps get other parameters.
        """
        if is_torchs(self.inner):
            return
        for other in _optimizers_in(self.inner):
            raise refusal(
                f"{self.name} contains another optimizer, {type(other).__name__}, which has states "
                "of its own"
            )
        if stages < 2 and not self.replaces:
            return
        steps = {id(p) for group in self.inner.param_groups for p in group["params"]}
        for name, value in _attributes_of(self.inner):
            keys = _keys(value) if self.replaces else ()
            if any(id(one) in steps for one in (*tree_leaves(value), *keys)):
                raise refusal(
                    f"{self.name} has parameters in its attribute {name!r}: a step of one stage "
                    "must find them in param_groups alone"
                )

    @contextmanager
    def watch(self, stage: int) -> Iterator[None]:
        """Verify a step of a stage.

        Raises ModelError if it changes which parameters the optimizer has, or a number, or a
        tensor beside the state of parameters, that the step of another stage has changed, too.
        """
        if is_torchs(self.inner):
            yield
            return
        groups, before = _parameters_of(self.inner), _entries_of(self.inner)
        yield
        if _parameters_of(self.inner) != groups:
            raise refusal(f"a step of {self.name} changes which parameters it has")
        after = _entries_of(self.inner)
        for key in before.keys() | after.keys():
            what = (after.get(key) or before[key])[0]
            was, now = (each[key][1] if key in each else None for each in (before, after))
            if not _same(was, now) and self.changed.setdefault(key, stage) != stage:
                traced = isinstance(was, _TensorTrace) or isinstance(now, _TensorTrace)
                values = "" if traced else f", from {was} to {now}"
                raise refusal(
                    f"a step of {self.name} changes {what}{values}: it would for each stage"
                )

    def expect_own_memory(
        self, state: Sequence[Tensor], parameters: Iterable[Tensor], stage: int
    ) -> None:
        """Raise ModelError if a stage's state, which is about to be moved, shares memory.

        A write to the one would then be missing in the other.  `parameters` are those of the
        device: their memory, and that of their gradients, is not moved.
        """
        if is_torchs(self.inner):
            return
        for t in state:
            if (other := self.owners.setdefault(t, stage)) != stage:
                raise refusal(f"{self.name} keeps one tensor for stages {other} and {stage}")
        if shares_memory(self.inner, state, parameters):
            raise refusal(
                f"{self.name} keeps a tensor for stage {stage} in memory that it shares with "
                "another state, a parameter, a gradient or an attribute",
                hint=f"state = tensor.clone(), or {ON_DEVICE}",
            )


def expect_stepped_apart(parameters: Mapping[Tensor, str]) -> None:
    """Raise ModelError for two parameters in one memory, of those that an optimizer steps.

    `parameters` has their names.  The optimizer steps each stage by itself, and where states is
    "cpu" with memory of its own for each parameter.
    """
    each, names = [*parameters], [*parameters.values()]
    for one, other in sorted(overlaps(each)):
        raise refusal(
            f"it steps {names[one]} and {names[other]}, which share memory",
            f"one Parameter (stage.b = stage.a), or {ON_DEVICE}",
        )


def shares_memory(inner: Any, state: Sequence[Tensor], parameters: Iterable[Tensor]) -> bool:
    """Return whether a tensor of an optimizer's state shares memory: with another one, with a
    parameter, the gradient of a parameter, or a tensor in an attribute of the optimizer."""
    used = [t for p in parameters for t in (p, p.grad) if t is not None]
    if not {*map(id, state)}.isdisjoint(map(id, used)):
        return True
    attributes = (t for _, value in _attributes_of(inner) for t in tree_leaves(value))
    tensors = [*state, *used, *(t for t in attributes if isinstance(t, Tensor))]
    return any(one < len(state) for one, _ in overlaps(tensors))


class _TensorTrace:
    """A tensor of several numbers, and how often it had been written to."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, (self.version,) = tensor, versions_of([tensor])


def _attributes_of(inner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an optimizer, but for its groups and the state of parameters."""
    for name, value in vars(inner).items():
        if name not in _HELD_BY_STEPS:
            yield name, value


def _optimizers_in(inner: Any) -> list[Any]:
    """Return the optimizers among the values of an optimizer's attributes."""
    leaves = (x for _, value in _attributes_of(inner) for x in tree_leaves(value))
    return [x for x in leaves if isinstance(x, torch.optim.Optimizer) and x is not inner]


def _keys(value: object) -> Iterator[object]:
    """Yield the keys of a dictionary, and of those within it."""
    if isinstance(value, Mapping):
        for key, within in value.items():
            yield key
            yield from _keys(within)


def _parameters_of(inner: Any) -> list[list[int]]:
    """Return the ids of an optimizer's parameters by group."""
    return [[id(p) for p in group["params"]] for group in inner.param_groups]


def _entries_of(inner: Any) -> dict[object, _Entry]:
    """Return all numbers and tensors of an optimizer, except the state of parameters."""
    found: dict[object, _Entry] = {}
    for group in inner.param_groups:
        for k, v in group.items():
            if k != "params":
                found |= _leaves(v, f"{k!r} of a group", (id(group), k))
    for name, v in _attributes_of(inner):
        found |= _leaves(v, f"its {name!r}", ("", name))
    for key, v in inner.state.items():
        if not isinstance(key, Tensor):
            found |= _leaves(v, f"its state of {key!r}", ("state", key))
    return found


def _leaves(value: object, what: str, key: tuple[object, ...]) -> dict[object, _Entry]:
    """Return the numbers and tensors in a value, and how long its lists are."""
    if isinstance(value, Tensor):
        one = value.numel() == 1 and not value.is_meta
        return {key: (what, value.item() if one else _TensorTrace(value))}
    if isinstance(value, Number) and not isinstance(value, bool):  # a flag counts nothing
        return {key: (what, value)}
    found: dict[object, _Entry] = {}
    if isinstance(value, Mapping):
        for k, v in value.items():
            found |= _leaves(v, what, (*key, id(k) if isinstance(k, Tensor) else k))
    elif isinstance(value, list | tuple):
        found[*key, "length"] = (f"the length of {what}", len(value))
        for k, v in enumerate(value):
            found |= _leaves(v, what, (*key, k))
    return found


def _same(one: object, other: object) -> bool:
    """Return whether an entry is as it was; NaN is NaN."""
    if isinstance(one, _TensorTrace) and isinstance(other, _TensorTrace):
        return one.tensor is other.tensor and one.version == other.version
    return one is other or bool(one == other) or bool(one != one and other != other)
