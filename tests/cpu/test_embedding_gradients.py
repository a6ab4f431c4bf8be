"""Tests that the gradient of an embedding is added by rows, bitwise equal to a dense gradient."""

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
from tests.cpu.largest_tensor import TensorSizeRecorder

torch.set_num_threads(1)

VOCAB, HIDDEN = 1000, 4
TOKENS = torch.tensor([[3, 0, 3], [999, 3, 0]])


def make_random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@given(
    tokens=st.lists(st.integers(0, 8), max_size=20),
    padding=st.integers(-1, 8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_row_sums_equal_dense_gradient(tokens: list[int], padding: int, dtype: torch.dtype) -> None:
    numbers = torch.tensor(tokens, dtype=torch.int64)
    dy = make_random(len(tokens), HIDDEN).to(dtype)
    rows, sums = sum_rows(numbers, dy, padding)
    assert rows.shape == (len(tokens),) and sums.shape == dy.shape
    assert {*rows.tolist()} == {*tokens, *[0] * (len({*tokens}) < len(tokens))}
    nonzero_rows = rows[sums.any(-1)].tolist()
    assert len(nonzero_rows) == len({*nonzero_rows})
    dense = torch.ops.aten.embedding_dense_backward(dy, numbers, 9, padding, False)
    assert torch.equal(torch.zeros_like(dense).index_add_(0, rows, sums), dense)


def make_weight(dtype: torch.dtype, grad_dtype: torch.dtype | None) -> nn.Parameter:
    """Return a weight. It has a gradient if `grad_dtype` is given."""
    weight = nn.Parameter(make_random(VOCAB, HIDDEN).to(dtype))
    if grad_dtype is not None:
        weight.grad_dtype = grad_dtype
        weight.grad = make_random(VOCAB, HIDDEN).to(grad_dtype)
    return weight


def run_backward(y: Tensor, split: bool, dy: Tensor | None = None) -> None:
    """Run a full or split backward of `y` with gradient `dy`, or of the sum of squares of `y`."""
    y, dy = (y.square().sum(), None) if dy is None else (y, dy)
    if not split:
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
def test_any_uses_of_weight_equal_torch(
    uses: str, grad: torch.dtype | None, padding: int | None, late: bool
) -> None:
    """E embeds tokens with the weight, and H multiplies by the same weight."""

    def compute_gradient(embed: Any, multiply: Any, split: bool) -> Tensor:
        weight = make_weight(torch.float32, grad)
        x = make_random(2, 3, HIDDEN)
        for use in uses:
            if use == "E":
                x = x + embed(TOKENS, weight, padding)
            else:
                x = multiply(x, weight)[..., :HIDDEN]
        run_backward(x, split)
        assert weight.grad is not None
        return weight.grad

    assert torch.equal(
        compute_gradient(embedding, linear, late), compute_gradient(F.embedding, F.linear, False)
    )


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("grad", [None, torch.float32, torch.bfloat16])
def test_int32_tokens_and_lower_precision_gradients_equal_torch(
    grad: torch.dtype | None, late: bool
) -> None:
    """A gradient of lower precision is rounded once per use, as in torch."""
    tokens = (torch.arange(600) % 7).int()
    gradients = []
    for embed in (embedding, F.embedding):
        weight = make_weight(torch.float32, grad)
        for uses in (1, 2):
            y = sum(embed(tokens * k, weight) * k for k in range(1, 1 + uses))
            assert isinstance(y, Tensor)
            run_backward(y, late and embed is embedding)
        assert weight.grad is not None
        gradients.append(weight.grad)
    assert torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_allocates_no_tensor_as_large_as_weight(dtype: torch.dtype, late: bool) -> None:
    weight = make_weight(dtype, torch.float32)
    with TensorSizeRecorder() as largest:
        run_backward(embedding(TOKENS, weight), late)
    assert 0 < largest.most <= TOKENS.numel() * HIDDEN


@pytest.mark.parametrize("late", [False, True])
def test_float32_gradient_of_bfloat16_weight_is_not_rounded(late: bool) -> None:
    weight = make_weight(torch.bfloat16, torch.float32)
    assert weight.grad is not None
    tokens, dy = torch.zeros(300, dtype=torch.int64), make_random(300, HIDDEN).bfloat16()
    expected = weight.grad[0].double() + dy.double().sum(0)
    run_backward(embedding(tokens, weight), late, dy)
    torch.testing.assert_close(weight.grad[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_autograd_receives_sparse_rows_once_per_weight() -> None:
    """autograd would join two sparse tensors into one with duplicate rows."""
    weight, second_weight = (make_weight(torch.float32, torch.float32) for _ in range(2))
    layouts: list[Any] = []
    nodes = [get_gradient_edge(w).node for w in (weight, second_weight)]
    for node in nodes:
        register_observer(node, lambda _, gradients: layouts.append(gradients[0].layout))
    for _ in range(2):
        run_backward(embedding(TOKENS, weight) + embedding(TOKENS, second_weight), split=False)
    assert layouts == [torch.sparse_coo] * 4
    layouts.clear()
    run_backward(embedding(TOKENS, weight) + embedding(TOKENS + 0, weight), split=False)
    assert layouts == [torch.strided]
    layouts.clear()
    x = make_random(2, 3, HIDDEN).requires_grad_()
    inner = checkpoint(  # a backward pass within another
        lambda x: x.tanh() + embedding(TOKENS, second_weight), x + embedding(TOKENS, weight),
        use_reentrant=True,
    )  # fmt: skip
    run_backward(inner + embedding(TOKENS, weight), split=False)
    assert layouts == [torch.sparse_coo, torch.strided]


def test_grad_calls_and_hooks_receive_dense_gradient() -> None:
    weight = make_weight(torch.float32, torch.float32)
    total = embedding(TOKENS, weight).square().sum()
    (first_gradient,) = torch.autograd.grad(total, weight, create_graph=True)
    (second_gradient,) = torch.autograd.grad(first_gradient.square().sum(), weight)
    assert first_gradient.layout == second_gradient.layout == torch.strided
    hook_gradients: list[Tensor] = []
    weight.register_hook(hook_gradients.append)
    run_backward(embedding(TOKENS, weight), split=False)
    assert hook_gradients[0].layout == torch.strided
