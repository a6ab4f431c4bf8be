"""Tests of layers that are split by type: bits of the full backward, and refusals."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss
from torch.nn.utils import parametrize, prune

from schedir.errors import ModelError, UsageError
from schedir.runtime import (
    check_splittable_layer,
    make_backward_splittable,
    register_splittable_layer,
)
from schedir.runtime.autograd.split_backward import DeferredGradients, defer_weight_gradients
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.boundaries.size_measurement import measure_sizes
from tests.cpu.tiny_layers import LAYERS, WIDTH, Square
from tests.cpu.tiny_stages import have_same_bits


def input_grad(layer: Any, x: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of the input of `Square`."""
    dx: Tensor = dy * layer.weight.square()
    return dx


def weight_grad(layer: Any, x: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of the weight of `Square`."""
    dw: Tensor = (x * dy).sum_to_size(WIDTH) * (2 * layer.weight)
    return dw


def assert_same_bits(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    assert not [name for name in want if not have_same_bits(got[name], want[name])]


class RepeatedLayer(nn.Module):
    """Applies one layer several times."""

    def __init__(self, layer: nn.Module, uses: int) -> None:
        super().__init__()
        self.layer, self.uses = layer, uses

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            x = x + gelu(self.layer(x))
        return x


def _compute_gradients(
    net: nn.Module, x: Tensor, late: bool, num_deferred: int | None = None
) -> dict[str, Tensor | None]:
    """Return the gradients of two microbatches, with deferred W or with full backwards."""
    tapes = []
    results: dict[str, Tensor | None] = {}
    for k in range(2):
        leaf = (x + k).requires_grad_()
        y = net(leaf)
        results[f"y{k}"] = y.detach()
        dy = torch.linspace(-1, 1, y.numel()).view_as(y).to(y)
        if late:
            with defer_weight_gradients(DeferredGradients()) as tape:
                torch.autograd.backward(y, dy)
            assert num_deferred is None or len(tape) == num_deferred
            tapes.append(tape)
        else:
            torch.autograd.backward(y, dy)
        results[f"dx{k}"] = leaf.grad
    for tape in tapes:
        tape.run()
    return results | {name: p.grad for name, p in net.named_parameters()}


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from([*LAYERS]),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    bias=st.booleans(),
    uses=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    frozen=st.sampled_from(["", "weight", "bias"]),
    wide=st.booleans(),
)
def test_split_layer_has_bits_of_full_backward(
    kind: str,
    shape: list[int],
    bias: bool,
    uses: int,
    dtype: torch.dtype,
    frozen: str,
    wide: bool,
) -> None:
    torch.manual_seed(0)
    layer = LAYERS[kind](bias).to(dtype)
    if getattr(layer, frozen, None) is not None and frozen:
        getattr(layer, frozen).requires_grad_(False)
    x = torch.randn(*shape, WIDTH).to(dtype)
    plain = RepeatedLayer(layer, uses)
    full, split = (make_backward_splittable(copy.deepcopy(plain), nn.LayerNorm) for _ in range(2))
    wide = wide and dtype is torch.bfloat16
    for net in (plain, full, split):
        for p in net.parameters() if wide else ():
            p.grad_dtype = torch.float32
            p.grad = torch.zeros_like(p, dtype=torch.float32)
    num_deferred = sum(p.requires_grad and (n == "weight" or kind == "norm")
                       for n, p in layer.named_parameters())  # fmt: skip
    want = _compute_gradients(full, x, late=False)
    assert_same_bits(
        _compute_gradients(split, x, late=True, num_deferred=num_deferred * uses), want
    )
    if not wide and kind != "conv2d":  # else autograd rounds or computes differently
        assert_same_bits(want, _compute_gradients(plain, x, late=False))


def test_huggingface_conv1d_is_split() -> None:
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    layer = pytorch_utils.Conv1D(12, WIDTH)
    names, x = [*layer.state_dict()], torch.randn(2, 3, WIDTH)
    plain, split = copy.deepcopy(layer), make_backward_splittable(layer)
    assert split is layer and type(split) is not type(plain) and [*split.state_dict()] == names
    assert_same_bits(
        _compute_gradients(split, x, late=True, num_deferred=1),
        _compute_gradients(plain, x, late=False),
    )


@pytest.mark.parametrize("kind", LAYERS)
def test_split_layer_can_be_copied_and_pickled(kind: str) -> None:
    layer = LAYERS[kind](True)
    x = torch.randn(3, WIDTH)
    make_backward_splittable(layer, nn.LayerNorm)
    assert isinstance(layer, type(LAYERS[kind](True)))
    for other in (copy.deepcopy(layer), copy.copy(layer)):
        assert type(other) is type(layer) and torch.equal(other(x), layer(x))
    if kind == "norm":  # its type can be imported in another process
        assert type(pickle.loads(pickle.dumps(layer))) is type(layer)


def test_layer_norm_is_split_only_on_request() -> None:
    net = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, elementwise_affine=False)
    )
    assert type(make_backward_splittable(net)[1]) is nn.LayerNorm  # type: ignore[index]
    make_backward_splittable(net, nn.LayerNorm)
    with defer_weight_gradients(DeferredGradients()) as tape:
        net(torch.randn(2, WIDTH)).square().sum().backward()
    weight = net[1].weight
    assert len(tape) == 3 and isinstance(weight, nn.Parameter) and weight.grad is None
    # By default norms are not split, since their deferred gradients keep more memory than it gains.
    net = nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    )
    x = torch.randn(8, WIDTH)
    deferred_bytes = []
    for types in ((), (nn.LayerNorm,)):
        stages = [nn.Identity(), make_backward_splittable(copy.deepcopy(net), *types)]
        sizes = measure_sizes(stages, x, x, loss=mse_loss, boundary=Boundary((8, WIDTH)))
        deferred_bytes.append(sizes.for_stages("deferred_wgrad", 2)[1])
    added_bytes = 4 * (8 * WIDTH + 8 * WIDTH + 2 * 8)  # x, dy, means and deviations
    assert deferred_bytes[1] - deferred_bytes[0] == added_bytes


def test_wrong_split_rules_are_refused() -> None:
    class Odd(Square):
        pass

    def wrong_weight_grad(layer: Any, x: Tensor, dy: Tensor) -> Tensor:
        return (x * dy).sum_to_size(WIDTH)

    layer, x = Odd(WIDTH), torch.randn(2, 3, WIDTH)
    wrong_rules: Any = {"weight": wrong_weight_grad}
    with pytest.raises(UsageError, match=r"layer_type must be a subclass of nn\.Module, not Odd"):
        register_splittable_layer(layer, input_grad=input_grad, deferred_grads=wrong_rules)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cannot split the backward of layers of type Odd"):
        make_backward_splittable(layer, Odd)
    with pytest.raises(UsageError, match="cannot split the backward of layers of type Odd"):
        check_splittable_layer(layer, x)
    for dx, rules, message in (
        (input_grad, wrong_rules, "differ in the gradient of weight"),
        (wrong_weight_grad, wrong_rules, r"for its input of shape \[2, 3, 6\]"),
        (input_grad, {"weight": lambda layer, x, dy: (x * dy).sum()},
         r"a gradient of shape \[\] for weight of shape \[6\]"),
    ):  # fmt: skip
        register_splittable_layer(Odd, input_grad=dx, deferred_grads=rules)
        with pytest.raises(ModelError, match=message):
            check_splittable_layer(layer, x)
    register_splittable_layer(Odd, input_grad=input_grad, deferred_grads={"wieght": weight_grad})
    with pytest.raises(ModelError, match="has no rule for its parameter weight"):
        make_backward_splittable(layer)


def test_registered_layer_with_other_arguments_is_not_split() -> None:
    class Scaled(Square):
        def forward(self, x: Tensor, by: float = 1.0) -> Tensor:
            return super().forward(x) * by

    register_splittable_layer(Scaled, input_grad=input_grad, deferred_grads={"weight": weight_grad})
    layer, x = make_backward_splittable(Scaled(WIDTH)), torch.randn(2, WIDTH)
    for y, factor, num_deferred in (
        (layer(x=x), 1, 1), (layer(x, by=2.0), 2, 0), (layer(x, 2.0), 2, 0),
    ):  # fmt: skip
        assert torch.equal(y, Square.forward(layer, x) * factor)  # type: ignore[arg-type]
        with defer_weight_gradients(DeferredGradients()) as tape:
            y.sum().backward()
        assert len(tape) == num_deferred


def test_second_registration_replaces_split_rule() -> None:
    """The new rule also applies to layers that were split before, and to full backwards."""

    class Twice(Square):
        pass

    x = torch.randn(2, 3, WIDTH)
    rules: Any = {"weight": weight_grad}
    register_splittable_layer(Twice, input_grad=lambda layer, x, dy: dy, deferred_grads=rules)
    layer = Twice(WIDTH)
    net = make_backward_splittable(nn.Sequential(layer, nn.Linear(WIDTH, WIDTH)))
    with pytest.raises(ModelError, match="differ in the gradient of the input"):
        check_splittable_layer(layer, x)
    register_splittable_layer(Twice, input_grad=input_grad, deferred_grads=rules)
    for one in make_backward_splittable(net).children():
        check_splittable_layer(one, x)
    leaf = x.clone().requires_grad_()
    dx, dw = torch.autograd.grad(layer(leaf).sum(), (leaf, layer.weight))
    assert torch.equal(dx, input_grad(layer, x, torch.ones_like(x)))
    torch.testing.assert_close(dw, weight_grad(layer, x, torch.ones_like(x)))


def _prune(layer: nn.Module) -> nn.Module:
    pruned: nn.Module = prune.custom_from_mask(layer, "weight", torch.arange(WIDTH) % 2)
    return pruned


def _parametrize(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", nn.Softplus())
    return layer


@pytest.mark.parametrize("compute", [_prune, _parametrize])
@pytest.mark.parametrize("first", [False, True])
def test_registered_layer_with_computed_weight_is_not_split(compute: Any, first: bool) -> None:
    x, plain = torch.randn(3, WIDTH), Square(WIDTH)
    steps = [make_backward_splittable, compute]
    split: nn.Module = copy.deepcopy(plain)
    for step in steps if first else reversed(steps):
        split = step(split)
    assert_same_bits(
        _compute_gradients(split, x, True, num_deferred=0),
        _compute_gradients(compute(plain), x, False),
    )


@pytest.mark.parametrize("kind", LAYERS)
def test_built_in_split_rules_equal_autograd(kind: str) -> None:
    check_splittable_layer(LAYERS[kind](True), torch.randn(2, 3, WIDTH))


def test_registered_layer_under_autocast_is_not_split() -> None:
    x = torch.randn(3, WIDTH)
    plain, split = Square(WIDTH), make_backward_splittable(Square(WIDTH))
    split.load_state_dict(plain.state_dict())
    gradients = []
    for net in (plain, split):
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x).float()
        y.square().sum().backward()
        gradients.append({name: p.grad for name, p in net.named_parameters()})
    assert_same_bits(*gradients)
