"""The gradient of an embedding, without the rows that no token has looked up.

The dense one has a row for each of the vocabulary: it is made, written and added as a whole for
each microbatch, of which a few thousand tokens have looked up a few thousand rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sum_rows(tokens: Tensor, dy: Tensor, padding_index: int = -1) -> tuple[Tensor, Tensor]:
    """Rows of the weight, int64 (n,), and what is to be added to them, (n, h), of n tokens.

    `tokens` are int64 or int32 (...), `dy` (..., h).  To the row `padding_index` nothing is added.
    There are as many rows as tokens, whatever they are, so that a GPU asks nothing of the host:
    zeros for row 0 fill up.  Each other row is there once.  So it does not matter in which order
    they are added, and a GPU may do so by atomics.  Each is the row of `embedding_dense_backward`,
    to the last bit.
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
    """Add the gradient of an embedding to `main_grad` (rows, h), in the type of that."""
    return main_grad.index_add_(0, *sum_rows(tokens, dy.to(main_grad.dtype), padding_index))
