"""Tests that split backwards have the bits of the full backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schedir.errors import ModelError
from schedir.runtime import make_backward_splittable
from schedir.runtime.autograd import split_backward
from schedir.runtime.autograd.split_backward import DeferredGradients

torch.set_num_threads(1)

VOCAB, HIDDEN, TOKENS = 13, 16, 7


class TorchLayers(nn.Module):
    """An embedding, a block without dropout, and a head that may have the embedding's weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCAB, HIDDEN, padding_idx=2)
        self.block = nn.Sequential(
            nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(),
            nn.Linear(2 * HIDDEN, HIDDEN, bias=False),
        )  # fmt: skip
        self.head = nn.Linear(HIDDEN, VOCAB)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y: Tensor = self.head(x + self.block(x))
        return y


def compute_gradients(
    net: TorchLayers, microbatches: int, late: int | None, forward: Callable[..., Any] | None = None
) -> dict[str, Tensor]:
    """Return gradients of all microbatches, with W `late` microbatches after I, or with full B."""
    g = torch.Generator().manual_seed(1)
    tapes = []
    for _ in range(microbatches):
        y = (forward or net)(torch.randint(VOCAB, (2, TOKENS), generator=g))
        dy = torch.randn(y.shape, generator=g).to(y.dtype)
        if late is None:
            torch.autograd.backward(y, dy)
            continue
        with defer() as tape:
            torch.autograd.backward(y, dy)
        assert len(tape) == 4  # the layers with a weight
        tapes.append(tape)
        if len(tapes) > late:
            tapes.pop(0).run()
    for tape in tapes:
        tape.run()
        assert len(tape) == 0
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def assert_same_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


def defer() -> AbstractContextManager[DeferredGradients]:
    """Collect the weight gradients of the backwards in a context."""
    return split_backward.defer_weight_gradients(DeferredGradients())


@settings(max_examples=30, deadline=None)
@given(
    tied=st.booleans(),
    checkpointed=st.booleans(),
    microbatches=st.integers(1, 4),
    late=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_split_backward_has_bits_of_full_backward(
    tied: bool, checkpointed: bool, microbatches: int, late: int, dtype: torch.dtype
) -> None:
    """Layers are split in place."""

    def forward(net: nn.Module) -> Callable[..., Any]:
        return partial(checkpoint, net, use_reentrant=False) if checkpointed else net

    plain, full, split = (TorchLayers(tied).to(dtype) for _ in range(3))
    names, parameter_ids = list(plain.state_dict()), {id(p) for p in split.parameters()}
    for net in (full, split):
        assert make_backward_splittable(net) is net
    assert names == list(split.state_dict())
    assert parameter_ids == {id(p) for p in split.parameters()}
    want = compute_gradients(plain, microbatches, None, forward(plain))
    assert_same_bits(compute_gradients(full, microbatches, None, forward(full)), want)
    assert_same_bits(compute_gradients(split, microbatches, late, forward(split)), want)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_accumulate_in_views_of_flat_buffer(tied: bool) -> None:
    want = compute_gradients(TorchLayers(tied), 3, None)
    net = TorchLayers(tied)
    make_backward_splittable(net)
    flat = torch.zeros(sum(p.numel() for p in net.parameters()))
    offset = 0
    for p in net.parameters():
        p.grad = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    got = compute_gradients(net, 3, late=1)
    assert_same_bits(got, want)
    assert torch.equal(flat, torch.cat([g.flatten() for g in got.values()]))
    addresses = {g.untyped_storage().data_ptr() for g in got.values()}
    assert addresses == {flat.untyped_storage().data_ptr()}


def test_linear_and_embedding_equal_plain_torch() -> None:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 5, 8, generator=g), torch.randn(6, 8, generator=g)
    tokens = torch.randint(6, (2, 5), generator=g)

    def compute_grads(
        linear: Callable[..., Tensor], embedding: Callable[..., Tensor]
    ) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        y = linear(leaves[0], leaves[1]).square().sum()
        torch.autograd.backward(y + embedding(tokens, leaves[1]).square().sum())
        return [t.grad for t in leaves if t.grad is not None]

    ours = compute_grads(split_backward.linear, split_backward.embedding)
    plain = compute_grads(F.linear, F.embedding)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_nonleaf_weight_is_not_split() -> None:
    w = torch.ones(3, 4, requires_grad=True)
    with defer() as tape:
        torch.autograd.backward(split_backward.linear(torch.ones(2, 4), 2 * w).sum())
    assert len(tape) == 0
    assert w.grad is not None and torch.equal(w.grad, torch.full((3, 4), 4.0))


def test_frozen_weight_is_not_deferred() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    with defer() as tape:
        torch.autograd.backward(split_backward.linear(x, torch.ones(3, 4)).sum())
    assert len(tape) == 0 and x.grad is not None


def test_weight_changed_between_forward_and_backward_is_refused() -> None:
    x, w = torch.ones(2, 4, requires_grad=True), nn.Parameter(torch.ones(3, 4))
    y = split_backward.linear(x, w).sum()
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="between F and B"):
        torch.autograd.backward(y)


def test_gradient_requested_in_hook_is_not_accumulated() -> None:
    """An example is a hook that solves for a fixed point's gradient by torch.autograd.grad."""
    weight_gradients = []
    for linear in (F.linear, split_backward.linear):
        torch.manual_seed(0)
        w, x = nn.Parameter(torch.randn(4, 4)), torch.randn(2, 4)
        z = x.clone().requires_grad_()
        again = linear(z, w)

        def solve(g: Tensor, w: Tensor = w, z: Tensor = z, again: Tensor = again) -> Tensor:
            (dz,) = torch.autograd.grad(again, z, g, retain_graph=True)
            dz, dw = torch.autograd.grad(again, (z, w), dz, retain_graph=True)
            solved: Tensor = g + dz * dw.norm()
            return solved

        y = linear(x, w)
        y.register_hook(solve)
        with defer() as tape:
            torch.autograd.backward(y, torch.ones_like(y))
        assert len(tape) == (linear is split_backward.linear)
        tape.run()
        assert w.grad is not None and z.grad is None
        weight_gradients.append(w.grad)
    assert torch.equal(*weight_gradients)


def test_requested_gradient_is_not_added_to_float32_gradient() -> None:
    w = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
    w.grad_dtype = torch.float32
    w.grad = torch.zeros(3, 4)
    x = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    dx, dw = torch.autograd.grad(split_backward.linear(x, w).sum(), (x, w))
    assert torch.equal(dx, torch.full_like(x, 3)) and torch.equal(dw.float(), torch.full((3, 4), 2))
    assert torch.equal(w.grad, torch.zeros(3, 4))


def test_saved_tensor_changed_before_w_is_refused() -> None:
    """An example is a hook that writes to a gradient that other nodes receive too."""
    x, w = torch.ones(2, 4, requires_grad=True), nn.Parameter(torch.ones(4, 4))
    scaled = x * 1
    scaled.register_hook(lambda dy: dy.mul_(0.5))
    y = scaled + split_backward.linear(x, w)
    with defer() as tape:
        torch.autograd.backward(y, torch.ones_like(y))
    with pytest.raises(ModelError, match="changed in place between I and W"):
        tape.run()
    assert w.grad is None


@pytest.mark.parametrize(("n", "k"), [(0, 3), (4, 0)])
def test_empty_linear_has_gradients(n: int, k: int) -> None:
    x, w = torch.ones(2, n, requires_grad=True), nn.Parameter(torch.ones(k, n))
    split_backward.linear(x, w, nn.Parameter(torch.ones(k))).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, k))
    assert w.grad is not None and w.grad.shape == (k, n)


def test_gradients_are_not_deferred_after_context() -> None:
    w = nn.Parameter(torch.ones(3, 4))
    with defer() as tape:
        pass
    torch.autograd.backward(split_backward.linear(torch.ones(2, 4), w).sum())
    assert len(tape) == 0 and w.grad is not None


def test_deferred_gradients_do_not_keep_graph_alive() -> None:
    x, w = torch.ones(2, 4, requires_grad=True), nn.Parameter(torch.ones(3, 4))
    with defer() as tape:
        torch.autograd.backward(split_backward.linear(x * 2, w).sum())
    assert all(x.grad_fn is None for x in tape.list_saved_tensors())


class InPlaceRelu(nn.Module):
    """Changes the output of a linear layer in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(F.relu_(self.one(x)))
        y += x
        return y


class AutocastLayers(InPlaceRelu):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = self.two(self.one(x))
        return y


class HookedWeights(InPlaceRelu):
    """Has a gradient hook on one weight, and a post-accumulate hook on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one.weight.register_hook(lambda grad: grad / 2)
        self.two.weight.register_post_accumulate_grad_hook(_halve_gradient)


def _halve_gradient(p: Tensor) -> None:
    assert p.grad is not None
    p.grad /= 2


class ComplexLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8, dtype=torch.cfloat)

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(self.one(torch.complex(x, 2 * x)))


@pytest.mark.parametrize(
    ("model", "deferred"),
    [(InPlaceRelu, 2), (AutocastLayers, 2), (HookedWeights, 0), (ComplexLinear, 1)],
)
def test_split_layers_in_unusual_modules_have_same_bits(
    model: type[nn.Module], deferred: int
) -> None:
    g = torch.Generator().manual_seed(0)
    batches = [torch.randn(4, 6, 8, generator=g) for _ in range(2)]

    def compute_grads(splits: bool) -> dict[str, Tensor]:
        torch.manual_seed(1)
        net, tapes = model(), []
        if splits:
            make_backward_splittable(net)
        for k, batch in enumerate(batches):
            x = batch.clone().requires_grad_()
            y = net(x)
            with defer() as tape:
                torch.autograd.backward(y, torch.ones_like(y))
            assert x.grad is not None
            assert len(tape) == deferred * splits
            net.register_buffer(f"dx{k}", x.grad)
            tapes.append(tape)
        for tape in tapes:
            tape.run()
        named = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        return named | dict(net.named_buffers())

    want = compute_grads(False)
    assert len(want) == 2 + len([*model().parameters()])
    assert_same_bits(compute_grads(True), want)


def test_layers_with_own_computation_are_not_split() -> None:
    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    net = nn.ModuleList([Own(2, 2), nn.Embedding(2, 2, max_norm=1.0), nn.Bilinear(2, 2, 2)])
    kinds = [type(layer) for layer in net]
    make_backward_splittable(net)
    assert [type(layer) for layer in net] == kinds
