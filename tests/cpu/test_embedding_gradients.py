"""Tests that an embedding's gradient is added by rows, with the bits of the whole gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from schedir.kernels.embedding_gradient import sum_rows
from schedir.runtime.autograd.node_hook_detection import register_observer
from schedir.runtime.autograd.split_backward import (
    DeferredGradients,
    defer_weight_gradients,
    embedding,
    linear,
)
from tests.cpu.largest_tensor import Largest

torch.set_num_threads(1)

VOCAB, HIDDEN = 1000, 4
TOKENS = torch.tensor([[3, 0, 3], [999, 3, 0]])


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@given(
    tokens=st.lists(st.integers(0, 8), max_size=20),
    padding=st.integers(-1, 8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_row_sums_are_the_rows_of_the_whole_gradient(
    tokens: list[int], padding: int, dtype: torch.dtype
) -> None:
    numbers, dy = torch.tensor(tokens, dtype=torch.int64), random(len(tokens), HIDDEN).to(dtype)
    rows, sums = sum_rows(numbers, dy, padding)
    assert rows.shape == (len(tokens),) and sums.shape == dy.shape
    assert {*rows.tolist()} == {*tokens, *[0] * (len({*tokens}) < len(tokens))}
    filled = rows[sums.any(-1)].tolist()
    assert len(filled) == len({*filled})
    whole = torch.ops.aten.embedding_dense_backward(dy, numbers, 9, padding, False)
    assert torch.equal(torch.zeros_like(whole).index_add_(0, rows, sums), whole)


def weight_of(dtype: torch.dtype, grad: torch.dtype | None) -> nn.Parameter:
    """Return a weight, with a gradient if a dtype is given."""
    weight = nn.Parameter(random(VOCAB, HIDDEN).to(dtype))
    if grad is not None:
        weight.grad_dtype = grad
        weight.grad = random(VOCAB, HIDDEN).to(grad)
    return weight


def backward(y: Tensor, late: bool, dy: Tensor | None = None) -> None:
    """Run a whole or split backward of a sum of squares, or with the gradient dy."""
    y, dy = (y.square().sum(), None) if dy is None else (y, dy)
    if not late:
        torch.autograd.backward(y, dy)
        return
    with defer_weight_gradients(DeferredGradients()) as tape:
        torch.autograd.backward(y, dy)
    assert len(tape)
    tape.run()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("padding", [None, 0, 3])
@pytest.mark.parametrize("grad", [None, torch.float32])
@pytest.mark.parametrize("uses", ["E", "EH", "EE", "EEH", "HE"])
def test_any_uses_have_the_bits_of_plain_torch(
    uses: str, grad: torch.dtype | None, padding: int | None, late: bool
) -> None:
    """E embeds tokens with the weight, and H multiplies by the same weight."""

    def run(embed: Any, multiply: Any, late: bool) -> Tensor:
        weight = weight_of(torch.float32, grad)
        x = random(2, 3, HIDDEN)
        for use in uses:
            if use == "E":
                x = x + embed(TOKENS, weight, padding)
            else:
                x = multiply(x, weight)[..., :HIDDEN]
        backward(x, late)
        assert weight.grad is not None
        return weight.grad

    assert torch.equal(run(embedding, linear, late), run(F.embedding, F.linear, False))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("grad", [None, torch.float32, torch.bfloat16])
def test_tokens_may_be_of_32_bits_and_gradients_of_fewer_than_weights(
    grad: torch.dtype | None, late: bool
) -> None:
    """A gradient of lower precision is rounded once per use, as in torch."""
    tokens = (torch.arange(600) % 7).int()
    found = []
    for embed in (embedding, F.embedding):
        weight = weight_of(torch.float32, grad)
        for uses in (1, 2):
            y = sum(embed(tokens * k, weight) * k for k in range(1, 1 + uses))
            assert isinstance(y, Tensor)
            backward(y, late and embed is embedding)
        assert weight.grad is not None
        found.append(weight.grad)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_as_large_as_the_weight_is_made(dtype: torch.dtype, late: bool) -> None:
    weight = weight_of(dtype, torch.float32)
    with Largest() as largest:
        backward(embedding(TOKENS, weight), late)
    assert 0 < largest.most <= TOKENS.numel() * HIDDEN


@pytest.mark.parametrize("late", [False, True])
def test_a_wider_sum_is_not_rounded(late: bool) -> None:
    weight = weight_of(torch.bfloat16, torch.float32)
    assert weight.grad is not None
    tokens, dy = torch.zeros(300, dtype=torch.int64), random(300, HIDDEN).bfloat16()
    want = weight.grad[0].double() + dy.double().sum(0)
    backward(embedding(tokens, weight), late, dy)
    torch.testing.assert_close(weight.grad[0].double(), want, rtol=1e-5, atol=1e-5)


def test_autograd_gets_rows_once_for_each_weight() -> None:
    """autograd would join two tensors of rows into one with duplicate rows."""
    weight, other = (weight_of(torch.float32, torch.float32) for _ in range(2))
    came: list[Any] = []
    nodes = [get_gradient_edge(w).node for w in (weight, other)]
    for node in nodes:
        register_observer(node, lambda _, gradients: came.append(gradients[0].layout))
    for _ in range(2):
        backward(embedding(TOKENS, weight) + embedding(TOKENS, other), late=False)
    assert came == [torch.sparse_coo] * 4
    came.clear()
    backward(embedding(TOKENS, weight) + embedding(TOKENS + 0, weight), late=False)
    assert came == [torch.strided]
    came.clear()
    x = random(2, 3, HIDDEN).requires_grad_()
    inner = checkpoint(  # a backward pass within another
        lambda x: x.tanh() + embedding(TOKENS, other), x + embedding(TOKENS, weight),
        use_reentrant=True,
    )  # fmt: skip
    backward(inner + embedding(TOKENS, weight), late=False)
    assert came == [torch.sparse_coo, torch.strided]


def test_who_asks_for_the_gradient_gets_the_whole() -> None:
    weight = weight_of(torch.float32, torch.float32)
    (asked,) = torch.autograd.grad(embedding(TOKENS, weight).square().sum(), weight)
    (again,) = torch.autograd.grad(
        torch.autograd.grad(embedding(TOKENS, weight).square().sum(), weight, create_graph=True)[0]
        .square()
        .sum(),
        weight,
    )
    assert asked.layout == again.layout == torch.strided
    seen: list[Tensor] = []
    weight.register_hook(seen.append)
    backward(embedding(TOKENS, weight), late=False)
    assert seen[0].layout == torch.strided
