"""Tests that module state is restored after a run that only infers shapes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from schedir.runtime.autograd.preserved_state import PreservedState, preserve_module

CPU = torch.device("cpu")


def _rewrite(numbers: torch.Tensor) -> None:
    numbers.add_(1)


# For each kind, a value, an in-place change of it, and a function that reads it.
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], Any]]] = {
    "list": (lambda: [1, 2], lambda v: v.append(3), list),
    "dict": (lambda: {"a": 1}, lambda v: v.update({len(v): 3}), dict),
    "set": (lambda: {1}, lambda v: v.add(len(v) + 1), set),
    "deque": (lambda: deque([1, 2], 2), lambda v: v.append(3), list),
    "tensor": (lambda: torch.arange(3.0), _rewrite, lambda v: v.tolist()),
    "tensor in a list": (lambda: [torch.arange(3.0)], lambda v: _rewrite(v[0]), str),
    "tensor in a dict": (lambda: {"a": torch.arange(3.0)}, lambda v: _rewrite(v["a"]), str),
    "generator of torch": (
        torch.Generator, lambda v: torch.rand(1, generator=v),
        lambda v: torch.rand(1, generator=v.clone_state()).item(),
    ),
    "generator of numpy": (
        lambda: np.random.default_rng(1), lambda v: v.random(), lambda v: str(v.bit_generator.state)
    ),
    "generator of Python": (lambda: random.Random(1), lambda v: v.random(), lambda v: v.getstate()),
}  # fmt: skip


@pytest.mark.parametrize("name", ["kept", "_kept"])
@pytest.mark.parametrize("kind", KINDS)
def test_in_place_changes_of_attributes_are_undone(kind: str, name: str) -> None:
    make, change, read = KINDS[kind]
    module = nn.Sequential(nn.Linear(2, 2))
    value = make()
    setattr(module[0], name, value)
    before = read(value)
    change(value)
    changed = read(value)
    assert changed != before  # otherwise the test could not fail
    with preserve_module(module, CPU):
        change(value)
        assert read(value) != changed
    assert getattr(module[0], name) is value and read(value) == changed


@pytest.mark.parametrize("before", [None, 0, 1.5, "a", (1,), [1]])
def test_replaced_attributes_are_restored(before: object) -> None:
    module: Any = nn.Linear(2, 2)
    module.kept = before
    with preserve_module(module, CPU):
        module.kept = torch.ones(1)
        module.training = False
    assert module.kept is before


def test_gradients_are_restored() -> None:
    module = nn.Linear(2, 2)
    module(torch.ones(2)).sum().backward()
    gradient = module.weight.grad
    assert gradient is not None
    numbers = gradient.clone()
    with preserve_module(module, CPU):
        assert module.weight.grad is None
        module(torch.ones(2)).sum().backward()
    assert module.weight.grad is gradient and torch.equal(gradient, numbers)


def test_lazy_module_stays_initialized() -> None:
    module = nn.Sequential(nn.LazyLinear(3))
    with preserve_module(module, CPU):
        module(torch.ones(1, 2))
    assert module[0].in_features == 2


def test_first_state_is_restored_after_repeated_adds_and_errors() -> None:
    """The fields are added twice, and the block ends with an error."""
    module, table = nn.BatchNorm1d(1), {"a": 1}
    running = module.running_mean
    assert running is not None
    with pytest.raises(KeyError), PreservedState() as preserved:
        for mode in (False, True):
            preserved.add_modes(module)
            module.train(mode)
            preserved.add_values([running])
            running.add_(1)
            preserved.add_tables([table])
            table["b"] = 2
        preserved.add_fields(module, "momentum")
        module.momentum = 0.5
        raise KeyError
    assert module.training and module.momentum == 0.1 and table == {"a": 1}
    assert running is module.running_mean and float(running) == 0
