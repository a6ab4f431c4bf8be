"""The gradient of an embedding, for only the rows that tokens use.

A dense gradient has a row for each token of the vocabulary. Each microbatch would allocate, write
and add all of these rows, although its few thousand tokens use only a few thousand of these rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sum_rows(tokens: Tensor, dy: Tensor, padding_index: int = -1) -> tuple[Tensor, Tensor]:
    """Return the rows that tokens use, and the gradient of each row.

    The result has n entries for n tokens. So a GPU does not have to send the number of distinct
    rows to the host. Each row that tokens use has one entry. The remaining entries are zeros for
    row 0. Because a row has only one entry that is not zero, the order of later additions has no
    effect, and a GPU may use atomics. Each gradient is bitwise equal to the same row of the result
    of `embedding_dense_backward`.

    Args:
        tokens: int64 or int32, of any shape (...).
        dy: The gradient of the output, of shape (..., h).
        padding_index: A row that gets no gradient. -1 means that there is no such row.

    Returns:
        The rows, int64 of shape (n,), and their gradients, of shape (n, h).
    """
    flat = tokens.reshape(-1).long()
    n = len(flat)
    ascending, order = flat.sort(stable=True)
    slots = torch.diff(ascending, prepend=ascending[:1]).ne(0).cumsum(0)
    slot_of = torch.empty_like(slots).scatter_(0, order, slots)
    rows = torch.zeros_like(slots).scatter_(0, slots, ascending)
    flat_dy = dy.reshape(n, dy.shape[-1])
    sums: Tensor = torch.ops.aten.embedding_dense_backward(flat_dy, slot_of, n, -1, False)
    if padding_index >= 0:
        sums.masked_fill_((rows == padding_index).unsqueeze(-1), 0)
    return rows, sums


def accumulate_rows_(
    main_grad: Tensor, tokens: Tensor, dy: Tensor, padding_index: int = -1
) -> Tensor:
    """Add the gradient of an embedding to a gradient buffer, in the type of the buffer.

    Args:
        main_grad: The gradient buffer, of shape (rows, h).
        tokens: int64 or int32, of any shape (...).
        dy: The gradient of the output, of shape (..., h).
        padding_index: A row that gets no gradient. -1 means that there is no such row.
    """
    return main_grad.index_add_(0, *sum_rows(tokens, dy.to(main_grad.dtype), padding_index))
