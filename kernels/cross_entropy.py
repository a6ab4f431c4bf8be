"""Cross entropy over a vocabulary divided among tensor-parallel ranks, in three steps.

1. `compute_statistics` returns three numbers per token, from this rank's logits: the maximum, the
   sum of exponentials, and the logit of the target. The caller gathers these statistics from all
   ranks.
2. `compute_losses` returns the loss of each token, from the statistics of all ranks.
3. `write_gradient_` overwrites the logits with their gradient: softmax minus one-hot, times the
   gradient of the loss.

The Triton kernels do not copy the logits to float32. With 16-bit logits, the memory is 2 bytes per
logit; two float32 copies would need 8 bytes more per logit. The algorithm is online softmax
(Milakov and Gimelshein, arXiv 1805.02867). Megatron-LM (arXiv 1909.08053, section 3) divides the
vocabulary in the same way, but uses all-reduces instead of the gather.

The logits of n tokens have the shape (n, k), and targets are int64 of shape (n,). A rank has the
columns from `first_column` to `first_column + k - 1` of the vocabulary. A token with the target
`ignore_index` has a loss and a gradient of 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from schedir.kernels.backend_choice import uses_triton

MAXIMUM, EXP_SUM, TARGET_LOGIT = range(3)  # The rows of the statistics.


def compute_statistics(logits: Tensor, targets: Tensor, first_column: int) -> Tensor:
    """Return the maximum, the sum of exponentials and the target's logit of each token.

    Args:
        logits: This rank's logits, of shape (n, k).
        targets: int64 of shape (n,).
        first_column: The first column of this rank in the vocabulary.

    Returns:
        Float32 of shape (3, n). The second row is the sum of exp(logit - maximum). The third row is
        0 if the target is on another rank.
    """
    if uses_triton(logits):
        from schedir.kernels import cross_entropy_triton as kernels

        return kernels.compute_statistics(logits, targets, first_column)
    return compute_statistics_reference(logits, targets, first_column)


def write_gradient_(
    logits: Tensor,
    targets: Tensor,
    all_statistics: Tensor,
    dloss: Tensor,
    first_column: int,
    ignore_index: int,
) -> Tensor:
    """Overwrite the logits with their gradient, and return them.

    Args:
        logits: This rank's logits, of shape (n, k).
        targets: int64 of shape (n,).
        all_statistics: The statistics of all ranks, of shape (t, 3, n).
        dloss: The gradient of the summed loss, one number on the device.
        first_column: The first column of this rank in the vocabulary.
        ignore_index: Tokens with this target have a gradient of 0.
    """
    if uses_triton(logits):
        from schedir.kernels import cross_entropy_triton as kernels

        return kernels.write_gradient_(
            logits, targets, all_statistics, dloss, first_column, ignore_index
        )
    return write_gradient_reference_(
        logits, targets, all_statistics, dloss, first_column, ignore_index
    )


def compute_losses(all_statistics: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Return the loss of each token, float32 of shape (n,).

    Args:
        all_statistics: The statistics of all ranks, of shape (t, 3, n).
        targets: int64 of shape (n,).
        ignore_index: Tokens with this target have a loss of 0.
    """
    top, total = _combine_statistics(all_statistics)
    loss = total.log() + top - all_statistics[:, TARGET_LOGIT].sum(0)
    return loss.masked_fill(targets == ignore_index, 0)


def _combine_statistics(all_statistics: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum over all ranks, and the sum of exponentials relative to this maximum."""
    top = all_statistics[:, MAXIMUM].amax(0)
    return top, (all_statistics[:, EXP_SUM] * (all_statistics[:, MAXIMUM] - top).exp()).sum(0)


def compute_statistics_reference(logits: Tensor, targets: Tensor, first_column: int) -> Tensor:
    """Return the same as `compute_statistics`, in plain torch.

    Args:
        logits: See `compute_statistics`.
        targets: See `compute_statistics`.
        first_column: See `compute_statistics`.
    """
    x = logits.float()
    top = x.amax(-1)
    # If all columns of a shard are padding, the maximum is -inf and the sum is 0.
    total = (x - top.masked_fill(top == float("-inf"), 0).unsqueeze(-1)).exp().sum(-1)
    column = targets - first_column
    elsewhere = (column < 0) | (column >= x.shape[-1])
    hit = x.gather(-1, column.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    return torch.stack([top, total, hit.masked_fill(elsewhere, 0)])


def write_gradient_reference_(
    logits: Tensor,
    targets: Tensor,
    all_statistics: Tensor,
    dloss: Tensor,
    first_column: int,
    ignore_index: int,
) -> Tensor:
    """Do the same as `write_gradient_`, in plain torch.

    Args:
        logits: See `write_gradient_`.
        targets: See `write_gradient_`.
        all_statistics: See `write_gradient_`.
        dloss: See `write_gradient_`.
        first_column: See `write_gradient_`.
        ignore_index: See `write_gradient_`.
    """
    top, total = _combine_statistics(all_statistics)
    p = (logits.float() - top.unsqueeze(-1)).exp() / total.unsqueeze(-1)
    columns = torch.arange(first_column, first_column + logits.shape[-1], device=logits.device)
    p -= (columns == targets.unsqueeze(-1)).float()
    p *= dloss.float()
    return logits.copy_(p.masked_fill_((targets == ignore_index).unsqueeze(-1), 0))
