"""Cross entropy over a vocabulary that tensor-parallel ranks share, in three small steps.

1. `statistics`: per token, what this rank knows of its shard (maximum, sum of exponentials,
   logit of the target).  Three numbers per token travel, gathered from all ranks.
2. `losses`: the loss of each token, from the statistics of all ranks.
3. `gradient_`: softmax minus one-hot, written over the logits.

No float32 copy of the logits is ever made: 2 bytes a logit stay where 4 + 4 + 2 would come and
go.  (Online softmax: Milakov and Gimelshein, arXiv 1805.02867; the sharing: Megatron-LM, arXiv
1909.08053, section 3, with two reductions where here is one gather.)

Tokens are flat here: logits (n, k), targets int64 (n,).  A rank holds the columns `first` to
`first + k - 1` of the vocabulary.  A token whose target is `ignore` has loss and gradient 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from schedir.kernels.backend_choice import on_triton

TOP, SUM, HIT = range(3)  # the rows of statistics


def statistics(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Float32 (3, n): maximum, sum of exp(logit - maximum), and the target's logit or 0."""
    if on_triton(logits):
        from schedir.kernels import cross_entropy_triton as kernels

        return kernels.statistics(logits, targets, first)
    return statistics_reference(logits, targets, first)


def gradient_(
    logits: Tensor, targets: Tensor, parts: Tensor, dloss: Tensor, first: int, ignore: int
) -> Tensor:
    """`dloss` times the gradient of the summed losses, in place of the logits.

    `parts` (t, 3, n) are the statistics of all t ranks, `dloss` is one number on the device.
    """
    if on_triton(logits):
        from schedir.kernels import cross_entropy_triton as kernels

        return kernels.gradient_(logits, targets, parts, dloss, first, ignore)
    return gradient_reference_(logits, targets, parts, dloss, first, ignore)


def losses(parts: Tensor, targets: Tensor, ignore: int) -> Tensor:
    """The loss of each token, float32 (n,), from the statistics of all ranks, (t, 3, n)."""
    top, total = _softmax(parts)
    loss = total.log() + top - parts[:, HIT].sum(0)
    return loss.masked_fill(targets == ignore, 0)


def _softmax(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum over the vocabulary, and sum of exponentials below it."""
    top = parts[:, TOP].amax(0)
    return top, (parts[:, SUM] * (parts[:, TOP] - top).exp()).sum(0)


def statistics_reference(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """As `statistics`, in plain torch."""
    x = logits.float()
    top = x.amax(-1)
    # A shard of nothing but padding has a maximum of -inf, and a sum of 0.
    total = (x - top.masked_fill(top == float("-inf"), 0).unsqueeze(-1)).exp().sum(-1)
    column = targets - first
    elsewhere = (column < 0) | (column >= x.shape[-1])
    hit = x.gather(-1, column.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    return torch.stack([top, total, hit.masked_fill(elsewhere, 0)])


def gradient_reference_(
    logits: Tensor, targets: Tensor, parts: Tensor, dloss: Tensor, first: int, ignore: int
) -> Tensor:
    """As `gradient_`, in plain torch."""
    top, total = _softmax(parts)
    p = (logits.float() - top.unsqueeze(-1)).exp() / total.unsqueeze(-1)
    columns = torch.arange(first, first + logits.shape[-1], device=logits.device)
    p -= (columns == targets.unsqueeze(-1)).float()
    p *= dloss.float()
    return logits.copy_(p.masked_fill_((targets == ignore).unsqueeze(-1), 0))
