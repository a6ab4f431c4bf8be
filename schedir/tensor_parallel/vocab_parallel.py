"""Embedding, head and cross entropy over a vocabulary that a tensor-parallel group shares.

Rank r holds tokens r*k .. (r+1)*k - 1 with k = ceil(vocab / t). Rows past the vocabulary are
padding: zero, never looked up, and with logits of -inf no token's probability.
(1909.08053, section 3; the loss needs one MAX and one SUM of a few numbers per token, where
gathering the logits would send all of the vocabulary. On a GPU it is one gather of three numbers
per token and rank, and the logits are never copied: `schedir.kernels.cross_entropy`. Where some are
padding their gradient is, once.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from schedir.kernels import cross_entropy
from schedir.kernels.backend_choice import uses_triton
from schedir.runtime.autograd import split_backward
from schedir.tensor_parallel.mappings import (
    ShardableWeight,
    all_gather,
    enter_tp_region,
    leave_tp_region,
    shard,
    tp_rank,
    tp_size,
)


def shard_vocab(full: ShardableWeight, group: ProcessGroup | None = None) -> nn.Parameter:
    """This rank's rows of a (vocab, n) weight, padded so that all ranks hold equally many."""
    return shard(full, 0, group, padded=True)


class VocabParallelEmbedding(nn.Module):
    """Token ids int64 (...) to (..., n), the same on all ranks; `weight` from `shard_vocab`.

    Of ids (..., s) with `sequence_parallel` to the rank's own tokens, (..., s / t, n).
    """

    def __init__(
        self,
        weight: nn.Parameter,
        group: ProcessGroup | None = None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        if tp_size(self.group) == 1:
            return split_backward.embedding(tokens, self.weight)
        row, absent = _find_local_rows(tokens, len(self.weight), self.group)
        x = split_backward.embedding(row, self.weight).masked_fill_(absent.unsqueeze(-1), 0)
        return leave_tp_region(x, self.group, sequence_parallel=self.sequence_parallel)


class VocabParallelHead(nn.Module):
    """(..., n) to this rank's logits (..., k), padding -inf; `weight` from `shard_vocab`.

    The weight may be the embedding's own parameter (tied).  With `sequence_parallel`, of the rank's
    own tokens (..., s / t, n) to its logits of all, (..., s, k).
    """

    def __init__(
        self,
        weight: nn.Parameter,
        vocab: int,
        group: ProcessGroup | None = None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.input_rule = enter_tp_region(group, sequence_parallel=sequence_parallel)
        self.weight = weight
        # How many rows are no padding.
        self.local_vocab = min(max(vocab - tp_rank(group) * len(weight), 0), len(weight))

    def forward(self, x: Tensor) -> Tensor:
        logits = split_backward.linear(x, self.weight, input_rule=self.input_rule)
        if self.local_vocab < len(self.weight):
            logits[..., self.local_vocab :] = float("-inf")
        return logits


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, group: ProcessGroup | None = None, ignore_index: int = -1
) -> Tensor:
    """Sum of -log p(target) over the tokens whose target is not `ignore_index`: 0-dim float32.

    `logits` is this rank's shard (..., k), in any floating type; `targets` int64 (...), the same
    on all ranks, as is the result. A target outside the vocabulary is not detected here.
    On a GPU the backward pass overwrites the logits.
    """
    if uses_triton(logits):
        return fused_cross_entropy(logits, targets, group, ignore_index)
    loss: Tensor = _CrossEntropy.apply(logits, targets, group, ignore_index)  # type: ignore[no-untyped-call]
    return loss


def fused_cross_entropy(
    logits: Tensor, targets: Tensor, group: ProcessGroup | None = None, ignore_index: int = -1
) -> Tensor:
    """As `vocab_parallel_cross_entropy`, by the kernels or their references on any device.

    Backward writes the gradient over the logits, and raises RuntimeError the second time.
    """
    if logits.is_leaf and logits.requires_grad:
        logits = logits.clone()  # someone's parameter is not ours to overwrite
    loss: Tensor = _FusedCrossEntropy.apply(logits, targets, group, ignore_index)  # type: ignore[no-untyped-call]
    return loss


def _find_local_rows(
    tokens: Tensor, rows: int, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """For each token its row on this rank, 0 if it is elsewhere, and whether it is elsewhere."""
    row = tokens - tp_rank(group) * rows
    absent = (row < 0) | (row >= rows)
    return row.masked_fill(absent, 0), absent


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: ProcessGroup | None, ignore_index: int
    ) -> Tensor:
        counted = targets != ignore_index
        row, absent = _find_local_rows(targets, logits.shape[-1], group)
        row, absent = row.unsqueeze(-1), absent | ~counted

        top = logits.amax(-1).float()
        if tp_size(group) > 1:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        z = logits.float() - top.unsqueeze(-1)
        hit = z.gather(-1, row).squeeze(-1).masked_fill(absent, 0)
        p = z.exp_()
        sums = torch.stack([p.sum(-1), hit])
        if tp_size(group) > 1:
            dist.all_reduce(sums, group=group)
        total, hit = sums
        p /= total.unsqueeze(-1)

        ctx.save_for_backward(p, row, absent, counted)
        ctx.dtype = logits.dtype
        losses: Tensor = (total.log() - hit).masked_fill(~counted, 0)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *dlosses: Tensor) -> tuple[Tensor, None, None, None]:
        p, row, absent, counted = ctx.saved_tensors
        (dloss,) = dlosses
        dlogits = p * (dloss * counted).unsqueeze(-1)  # softmax - one_hot, times dloss
        dlogits.scatter_add_(-1, row, -(dloss * ~absent).unsqueeze(-1))
        return dlogits.to(ctx.dtype), None, None, None


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: ProcessGroup | None, ignore_index: int
    ) -> Tensor:
        k, t = logits.shape[-1], tp_size(group)
        logits, flat = logits.contiguous(), targets.reshape(-1)
        first = tp_rank(group) * k
        mine = cross_entropy.compute_statistics(logits.view(-1, k), flat, first)
        parts = mine.unsqueeze(0)
        if group is not None and t > 1:
            parts = mine.new_empty(t, *mine.shape)
            all_gather(parts, mine, group)
        ctx.save_for_backward(logits, flat, parts)
        ctx.first, ctx.ignore = first, ignore_index
        return cross_entropy.compute_losses(parts, flat, ignore_index).sum()

    @staticmethod
    def backward(ctx: Any, *dlosses: Tensor) -> tuple[Tensor, None, None, None]:
        logits, flat, parts = ctx.saved_tensors
        rows = logits.view(-1, logits.shape[-1])
        cross_entropy.write_gradient_(rows, flat, parts, dlosses[0], ctx.first, ctx.ignore)
        # A kernel's writing goes unseen: say it, so that a second backward is refused.
        torch.autograd.graph.increment_version(logits)
        return logits, None, None, None
