"""Rules that compute the gradient of a weight, for a matrix product or a row lookup."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from schedir.kernels.embedding_gradient import accumulate_rows_, sum_rows
from schedir.kernels.weight_gradient import accumulate_

# (weight, *saved, dy) -> dW, where `saved` are the tensors of the forward, usually its input.
WeightGradientRule = Callable[..., Tensor]
PendingTensor = Callable[[], Tensor]  # waits for a communication, and returns its result


class SharedInputRule(NamedTuple):
    """The communication for the input of a matrix product whose weight is split over ranks.

    Attributes:
        start_reduce: A function that starts to sum the gradient of the input over the ranks,
            perhaps in place. It returns a second function, which waits for the sum and returns the
            gradient of this rank's input.
        start_gather: A function that starts to gather the input from the shards of the ranks. None
            if each rank has the full input.
    """

    start_reduce: Callable[[Tensor], PendingTensor]
    start_gather: Callable[[Tensor], PendingTensor] | None = None


class ProductRule(NamedTuple):
    """The rule for the gradient of the weight in `x @ weight` or `x @ weight.T`.

    Attributes:
        is_transposed: True for `x @ weight.T`, False for `x @ weight`.
        start_gather: A function that starts to gather the input from the shards of the ranks. None
            if the forward saved the full input.
    """

    is_transposed: bool
    start_gather: Callable[[Tensor], PendingTensor] | None = None

    def get_factors(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Return two matrices a and b for which `a.T @ b` is the gradient of the weight.

        Args:
            x: The saved input, of shape (..., n), or a shard of it.
            dy: The gradient of the output, of shape (..., k).
        """
        x = x if self.start_gather is None else self.start_gather(x)()
        input_matrix = flatten_to_matrix(x).conj()
        gradient_matrix = flatten_to_matrix(dy)
        if self.is_transposed:
            return gradient_matrix, input_matrix
        return input_matrix, gradient_matrix

    def __call__(self, weight: Tensor, x: Tensor, dy: Tensor) -> Tensor:
        # Use a plain product: an addmm that also adds to `grad` would give other bits than
        # autograd.
        """Return the gradient in the dtype of the weight."""
        a, b = self.get_factors(x, dy)
        return (a.t() @ b).to(weight.dtype)

    def add_to(self, total: Tensor, x: Tensor, dy: Tensor) -> None:
        """Multiply, and add the gradient to a sum of a wider dtype in the same operation.

        Args:
            total: The sum. Its dtype is wider than the dtype of the weight.
            x: The saved input.
            dy: The gradient of the output.
        """
        accumulate_(total, *self.get_factors(x, dy))


class LookupRule(NamedTuple):
    """The rule for the gradient of a weight from which a layer looks up rows, as in an embedding.

    Attributes:
        padding_idx: The number of the row that gets no gradient. -1 means that all rows get a
            gradient.
    """

    padding_idx: int

    def __call__(self, weight: Tensor, tokens: Tensor, dy: Tensor) -> Tensor:
        """Return the dense gradient."""
        dw: Tensor = torch.ops.aten.embedding_dense_backward(
            dy, tokens, len(weight), self.padding_idx, False
        )
        return dw

    def add_to(self, total: Tensor, tokens: Tensor, dy: Tensor) -> None:
        """Add the gradient to a sum. Only the rows with an index in `tokens` change.

        If `total` has the dtype of the weight, the result has the same bits as `total` plus the
        dense gradient.

        Args:
            total: The sum, with the shape of the weight. Its dtype is the dtype of the weight, or a
                wider dtype.
            tokens: The row numbers.
            dy: The gradient of the output.
        """
        accumulate_rows_(total, tokens, dy, self.padding_idx)

    def compute_sparse(self, weight: Tensor, tokens: Tensor, dy: Tensor) -> Tensor:
        """Return the gradient as a sparse COO tensor, which autograd adds to other gradients.

        Args:
            weight: The weight.
            tokens: The row numbers.
            dy: The gradient of the output.
        """
        rows, sums = sum_rows(tokens, dy, self.padding_idx)
        with torch.sparse.check_sparse_tensor_invariants(False):  # torch 2.11 warns otherwise
            return torch.sparse_coo_tensor(rows.unsqueeze(0), sums, weight.shape)


def has_wider_gradient(weight: Tensor) -> bool:
    """Return whether `weight.grad` has a wider dtype than the weight.

    If so, gradients must be added without autograd, which would first round them to the weight's
    dtype.

    Args:
        weight: A weight, with or without a `grad`.
    """
    if weight.grad is None or weight.grad.dtype == weight.dtype:
        return False
    return torch.promote_types(weight.grad.dtype, weight.dtype) == weight.grad.dtype


def can_add_rows(rule: WeightGradientRule, weight: Tensor) -> TypeGuard[LookupRule]:
    """Return whether a gradient can be added to `weight.grad` row by row.

    The rule must be a row lookup. `weight.grad` must be dense, contiguous and of the weight's
    dtype. Torch's gradient mode must be off.

    Args:
        rule: The rule of the gradient.
        weight: The weight.
    """
    total = weight.grad
    if total is None or total.dtype != weight.dtype or torch.is_grad_enabled():
        return False
    return isinstance(rule, LookupRule) and total.layout == torch.strided and total.is_contiguous()


def accumulate_gradient(
    rule: WeightGradientRule, weight: Tensor, saved: tuple[Tensor, ...], dy: Tensor
) -> None:
    """Add a gradient to the existing `weight.grad`.

    Args:
        rule: The rule of the gradient.
        weight: The weight; its `grad` must exist.
        saved: The tensors that the forward saved.
        dy: The gradient of the output.
    """
    total = weight.grad
    assert total is not None
    with torch.no_grad():
        if isinstance(rule, ProductRule | LookupRule):
            (saved_tensor,) = saved
            rule.add_to(total, saved_tensor, dy)
        else:
            total += rule(weight, *saved, dy)


def flatten_to_matrix(x: Tensor) -> Tensor:
    """Return a tensor of shape (..., n) as a matrix of n columns.

    Args:
        x: A tensor with at least one dimension.
    """
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])  # -1 would fail if n is 0
