"""Cross entropy over a vocabulary that tensor-parallel ranks share, in three small steps.

1. `compute_statistics`: per token, what this rank knows of its shard (maximum, sum of exponentials,
   logit of the target).  Three numbers per token travel, gathered from all ranks.
2. `compute_losses`: the loss of each token, from the statistics of all ranks.
3. `write_gradient_`: softmax minus one-hot, written over the logits.

No float32 copy of the logits is ever made: 2 bytes a logit stay where 4 + 4 + 2 would come and
go.  (Online softmax: Milakov and Gimelshein, arXiv 1805.02867; the sharing: Megatron-LM, arXiv
1909.08053, section 3, with two reductions where here is one gather.)

Tokens are flat here: logits (n, k), targets int64 (n,).  A rank holds the columns `first_column` to
`first + k - 1` of the vocabulary.  A token whose target is `ignore_index` has loss and gradient 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from schedir.kernels.backend_choice import uses_triton

MAXIMUM, EXP_SUM, TARGET_LOGIT = range(3)  # the rows of statistics


def compute_statistics(logits: Tensor, targets: Tensor, first_column: int) -> Tensor:
    """Float32 (3, n): maximum, sum of exp(logit - maximum), and the target's logit or 0."""
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
    """`dloss` times the gradient of the summed losses, in place of the logits.

    `all_statistics` (t, 3, n) are the statistics of all t ranks, `dloss` is one number on the
    device.
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
    """The loss of each token, float32 (n,), from the statistics of all ranks, (t, 3, n)."""
    top, total = _combine_statistics(all_statistics)
    loss = total.log() + top - all_statistics[:, TARGET_LOGIT].sum(0)
    return loss.masked_fill(targets == ignore_index, 0)


def _combine_statistics(all_statistics: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum over the vocabulary, and sum of exponentials below it."""
    top = all_statistics[:, MAXIMUM].amax(0)
    return top, (all_statistics[:, EXP_SUM] * (all_statistics[:, MAXIMUM] - top).exp()).sum(0)


def compute_statistics_reference(logits: Tensor, targets: Tensor, first_column: int) -> Tensor:
    """As `compute_statistics`, in plain torch."""
    x = logits.float()
    top = x.amax(-1)
    # A shard of nothing but padding has a maximum of -inf, and a sum of 0.
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
    """As `write_gradient_`, in plain torch."""
    top, total = _combine_statistics(all_statistics)
    p = (logits.float() - top.unsqueeze(-1)).exp() / total.unsqueeze(-1)
    columns = torch.arange(first_column, first_column + logits.shape[-1], device=logits.device)
    p -= (columns == targets.unsqueeze(-1)).float()
    p *= dloss.float()
    return logits.copy_(p.masked_fill_((targets == ignore_index).unsqueeze(-1), 0))
