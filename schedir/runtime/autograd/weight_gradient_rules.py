"""Rules that compute the gradient of a weight: of a product, or of a row lookup."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from schedir.kernels.embedding_gradient import accumulate_rows_, sum_rows
from schedir.kernels.weight_gradient import accumulate_

WeightGradientRule = Callable[
    ..., Tensor
]  # weight, what the forward has kept (mostly its input), dy -> dW
PendingTensor = Callable[[], Tensor]  # waits for what is under way, and gives it


class SharedInputRule(NamedTuple):
    """How ranks that share a weight come by what all of them multiply.

    `start_reduce` starts to sum the gradient of that over them, perhaps in place, and gives what is
    due to what this rank was given.  Where that is a part, `start_gather` starts to put all parts
    together.
    """

    start_reduce: Callable[[Tensor], PendingTensor]
    start_gather: Callable[[Tensor], PendingTensor] | None = None


class ProductRule(NamedTuple):
    """The gradient of a weight that is multiplied with, from the right; or its transpose is.

    Where ranks keep a part each of what was multiplied, `start_gather` starts to put these
    together.
    """

    is_transposed: bool
    start_gather: Callable[[Tensor], PendingTensor] | None = None

    def get_factors(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Matrices a and b of as many rows, of which a.T @ b is the gradient."""
        x = x if self.start_gather is None else self.start_gather(x)()
        given, back = flatten_to_matrix(x).conj(), flatten_to_matrix(dy)
        return (back, given) if self.is_transposed else (given, back)

    def __call__(self, weight: Tensor, x: Tensor, dy: Tensor) -> Tensor:
        # A product and then a sum: fused into the accumulator (addmm) the bits differ.
        a, b = self.get_factors(x, dy)
        return (a.t() @ b).to(weight.dtype)

    def add_to(self, total: Tensor, x: Tensor, dy: Tensor) -> None:
        """Add it to a sum of a wider type, in the product itself."""
        accumulate_(total, *self.get_factors(x, dy))


class LookupRule(NamedTuple):
    """The gradient of a weight whose rows are looked up; the row `padding_idx` gets none."""

    padding_idx: int

    def __call__(self, weight: Tensor, tokens: Tensor, dy: Tensor) -> Tensor:
        dw: Tensor = torch.ops.aten.embedding_dense_backward(
            dy, tokens, len(weight), self.padding_idx, False
        )
        return dw

    def add_to(self, total: Tensor, tokens: Tensor, dy: Tensor) -> None:
        """Add it to a sum of its type or a wider one: the rows that there are.

        In its type, the bits are those of a sum with the whole gradient.
        """
        accumulate_rows_(total, tokens, dy, self.padding_idx)

    def compute_sparse(self, weight: Tensor, tokens: Tensor, dy: Tensor) -> Tensor:
        """It as a sparse tensor, for autograd to add up."""
        rows, sums = sum_rows(tokens, dy, self.padding_idx)
        with torch.sparse.check_sparse_tensor_invariants(False):  # torch 2.11 warns otherwise
            return torch.sparse_coo_tensor(rows.unsqueeze(0), sums, weight.shape)


def has_wider_gradient(weight: Tensor) -> bool:
    """Whether gradients are added up in a wider type: then each at once, in the product if it can.

    Autograd would round each to the weight's own type first.
    """
    if weight.grad is None or weight.grad.dtype == weight.dtype:
        return False
    return torch.promote_types(weight.grad.dtype, weight.dtype) == weight.grad.dtype


def can_add_rows(rule: WeightGradientRule, weight: Tensor) -> TypeGuard[LookupRule]:
    """Whether a gradient has few rows, and there is a sum of its type for them."""
    total = weight.grad
    if total is None or total.dtype != weight.dtype or torch.is_grad_enabled():
        return False
    return isinstance(rule, LookupRule) and total.layout == torch.strided and total.is_contiguous()


def accumulate_gradient(
    rule: WeightGradientRule, weight: Tensor, saved: tuple[Tensor, ...], dy: Tensor
) -> None:
    """Add a gradient to the sum that is there."""
    total = weight.grad
    assert total is not None
    with torch.no_grad():
        if isinstance(rule, ProductRule | LookupRule):
            (given,) = saved
            rule.add_to(total, given, dy)
        else:
            total += rule(weight, *saved, dy)


def flatten_to_matrix(x: Tensor) -> Tensor:
    """The same as a matrix."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])  # not -1: there may be none in a row
