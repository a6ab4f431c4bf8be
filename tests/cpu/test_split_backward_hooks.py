"""Tests that hooks on autograd nodes of split layers get the gradients of a full backward."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

from schedir.runtime.autograd.node_hook_detection import (
    count_registrations,
    leaf_has_hooks,
    node_has_hooks,
)
from schedir.runtime.autograd.split_backward import DeferredGradients, defer_weight_gradients
from schedir.runtime.autograd.splittable_layers import (
    find_deferrable_weights,
    make_backward_splittable,
    watch_accumulation,
)
from tests.cpu.tiny_stages import have_same_bits

WIDTH = 4
GradientSums = list[float]
Hook = Callable[["Layers", Tensor, GradientSums], object]


class Layers(nn.Module):
    """Two layers; `hook` is called with the output of the first."""

    def __init__(self, hook: Hook) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.hook = hook

    def forward(self, x: Tensor, sums: GradientSums) -> Tensor:
        y: Tensor = self.one(x)
        self.hook(self, y, sums)
        out: Tensor = self.two(torch.tanh(y))
        return out


def _double(gradients: Any, _: object = None) -> Any:
    return tuple(None if g is None else 2 * g for g in gradients)


def _record_sum(sums: GradientSums, gradients: Any) -> None:
    sums.append(float(sum(g.double().sum() for g in gradients if g is not None)))


def _get_accumulator(model: Layers) -> Any:
    """Return the node that accumulates the first weight's gradient, and keep it alive."""
    model.node = get_gradient_edge(model.one.weight).node  # type: ignore[assignment]
    return model.node


HOOKS: dict[str, Hook] = {
    "none": lambda model, y, seen: None,
    "tensor": lambda model, y, seen: y.register_hook(lambda g: 2 * g),
    "node": lambda model, y, seen: y.grad_fn.register_hook(_double),  # type: ignore[union-attr]
    "before node": lambda model, y, seen: y.grad_fn.register_prehook(_double),  # type: ignore[union-attr]
    "sees node": lambda model, y, seen: y.grad_fn.register_hook(  # type: ignore[union-attr]
        lambda gradients, _: _record_sum(seen, gradients)
    ),
    "accumulator": lambda model, y, seen: _get_accumulator(model).register_hook(
        lambda _, gradients: _record_sum(seen, gradients)
    ),
    "before accumulator": lambda model, y, seen: _get_accumulator(model).register_prehook(_double),
    "all": lambda model, y, seen: register_multi_grad_hook(
        [*model.parameters()], lambda gradients: _record_sum(seen, gradients)
    ),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_act_as_in_full_backward(kind: str) -> None:
    torch.manual_seed(0)
    full = Layers(HOOKS[kind])
    split = deepcopy(full)
    make_backward_splittable(split)
    x = torch.randn(3, WIDTH)
    results = []
    for model in (full, split):
        sums: GradientSums = []
        leaf, tape = x.clone().requires_grad_(), DeferredGradients()
        y = model(leaf, sums).square().sum()
        with defer_weight_gradients(tape):
            y.backward()
        tape.run()
        results.append(([leaf.grad, *(p.grad for p in model.parameters())], sums))
    (full_gradients, full_sums), (split_gradients, sums) = results
    assert have_same_bits(full_gradients, split_gradients)
    assert sums == pytest.approx(full_sums)


def test_only_layer_with_hook_is_not_split() -> None:
    model = Layers(HOOKS["node"])
    make_backward_splittable(model)
    with defer_weight_gradients(DeferredGradients()) as tape:
        model(torch.randn(3, WIDTH), []).sum().backward()
    assert [weight is model.two.weight for weight in tape.list_weights()] == [True]


def test_has_hooks_finds_python_hooks_and_forgets_removed_ones() -> None:
    leaf = torch.ones(1, requires_grad=True)
    node = get_gradient_edge(leaf).node
    assert not node_has_hooks(node)
    for register in (node.register_hook, node.register_prehook):
        assert not leaf_has_hooks(leaf, node)
        handle = register(lambda *_: None)
        assert node_has_hooks(node)
        assert leaf_has_hooks(leaf, node)
        handle.remove()
        assert not node_has_hooks(node)


def test_hook_detection_registers_no_hook() -> None:
    before = count_registrations()
    assert not node_has_hooks(get_gradient_edge(torch.ones(1, requires_grad=True)).node)
    assert count_registrations() == before


def test_watch_accumulation_does_not_prevent_split() -> None:
    model = make_backward_splittable(Layers(HOOKS["none"]))
    with (
        watch_accumulation(model) as accumulated,
        defer_weight_gradients(DeferredGradients()) as tape,
    ):
        model(torch.randn(3, WIDTH), []).sum().backward()
    assert len(tape) == 2
    assert accumulated == {"one.bias", "two.bias"}


def test_weight_with_accumulator_hook_is_not_deferrable() -> None:
    model: Any = make_backward_splittable(Layers(HOOKS["none"]))
    assert find_deferrable_weights(model) == {"one.weight", "two.weight"}
    _get_accumulator(model).register_hook(lambda *_: None)
    assert find_deferrable_weights(model) == {"two.weight"}
