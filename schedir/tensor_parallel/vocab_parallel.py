"""Embedding, head and cross entropy with a vocabulary divided among tensor-parallel ranks.

Rank r has the tokens r*k to (r+1)*k - 1, with k = ceil(vocab / t). Rows after the vocabulary are
padding: they are zero, no token uses them, and their logits are -inf.

The loss (arXiv 1909.08053, section 3) does not gather the logits. On a CPU it needs one MAX and one
SUM reduction of a few numbers per token. On a GPU it gathers three numbers per token and rank, and
does not copy the logits (`schedir.kernels.cross_entropy`). On ranks with padding, the gradient of
the logits is copied once.
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
    """Return this rank's rows of a (vocab, n) weight, padded to the same number on all ranks.

    Args:
        full: The full weight.
        group: The tensor-parallel group. None means one rank, without communication.
    """
    return shard(full, 0, group, padded=True)


class VocabParallelEmbedding(nn.Module):
    """The embedding of int64 tokens (...) as vectors (..., n), the same on all ranks.

    With `sequence_parallel`, tokens of shape (..., s) become the vectors of this rank's tokens,
    (..., s / t, n).

    Args:
        weight: This rank's rows, from `shard_vocab`.
        group: The tensor-parallel group. None means one rank, without communication.
        sequence_parallel: True if the ranks divide the tokens of the output.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        group: ProcessGroup | None = None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors of tokens.

        Args:
            tokens: int64, all tokens of the sequence on each rank.
        """
        if tp_size(self.group) == 1:
            return split_backward.embedding(tokens, self.weight)
        row, absent = _find_local_rows(tokens, len(self.weight), self.group)
        x = split_backward.embedding(row, self.weight).masked_fill_(absent.unsqueeze(-1), 0)
        return leave_tp_region(x, self.group, sequence_parallel=self.sequence_parallel)


class VocabParallelHead(nn.Module):
    """The projection of (..., n) to this rank's logits (..., k), with -inf for padding.

    With `sequence_parallel`, the input has this rank's tokens, (..., s / t, n), and the logits have
    all tokens, (..., s, k).

    Args:
        weight: This rank's rows, from `shard_vocab`. It may be the parameter of the embedding
            (tied).
        vocab: Size of the vocabulary.
        group: The tensor-parallel group. None means one rank, without communication.
        sequence_parallel: True if the ranks divide the tokens of the input.
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
        # The number of rows without padding.
        self.local_vocab = min(max(vocab - tp_rank(group) * len(weight), 0), len(weight))

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's logits.

        Args:
            x: The output of the last norm.
        """
        logits = split_backward.linear(x, self.weight, input_rule=self.input_rule)
        if self.local_vocab < len(self.weight):
            logits[..., self.local_vocab :] = float("-inf")
        return logits


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, group: ProcessGroup | None = None, ignore_index: int = -1
) -> Tensor:
    """Return the sum of -log p(target) over all tokens with a target other than `ignore_index`.

    On a GPU the backward overwrites the logits. The function does not detect targets outside of the
    vocabulary.

    Args:
        logits: This rank's logits, of shape (..., k), in any floating type.
        targets: int64 of shape (...), the same on all ranks.
        group: The tensor-parallel group. None means one rank, without communication.
        ignore_index: Tokens with this target are ignored.

    Returns:
        A 0-dimensional float32 tensor, the same on all ranks.
    """
    if uses_triton(logits):
        return fused_cross_entropy(logits, targets, group, ignore_index)
    loss: Tensor = _CrossEntropy.apply(logits, targets, group, ignore_index)  # type: ignore[no-untyped-call]
    return loss


def fused_cross_entropy(
    logits: Tensor, targets: Tensor, group: ProcessGroup | None = None, ignore_index: int = -1
) -> Tensor:
    """Return the same as `vocab_parallel_cross_entropy`, from fused operations on any device.

    On a GPU with Triton, the fused operations are kernels. Elsewhere they are the reference
    implementations of the kernels. The backward overwrites the logits with the gradient. A second
    backward raises RuntimeError.

    Args:
        logits: This rank's logits, of shape (..., k), in any floating type.
        targets: int64 of shape (...), the same on all ranks.
        group: The tensor-parallel group. None means one rank, without communication.
        ignore_index: Tokens with this target are ignored.
    """
    if logits.is_leaf and logits.requires_grad:
        logits = logits.clone()  # The backward must not overwrite a parameter of the caller.
    loss: Tensor = _FusedCrossEntropy.apply(logits, targets, group, ignore_index)  # type: ignore[no-untyped-call]
    return loss


def _find_local_rows(
    tokens: Tensor, rows: int, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return the row of each token on this rank (0 if absent), and a mask of absent tokens."""
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
        logits = logits.contiguous()
        flat = targets.reshape(-1)
        first_column = tp_rank(group) * k
        statistics = cross_entropy.compute_statistics(logits.view(-1, k), flat, first_column)
        parts = statistics.unsqueeze(0)
        if group is not None and t > 1:
            parts = statistics.new_empty(t, *statistics.shape)
            all_gather(parts, statistics, group)
        ctx.save_for_backward(logits, flat, parts)
        ctx.first = first_column
        ctx.ignore = ignore_index
        return cross_entropy.compute_losses(parts, flat, ignore_index).sum()

    @staticmethod
    def backward(ctx: Any, *dlosses: Tensor) -> tuple[Tensor, None, None, None]:
        logits, flat, parts = ctx.saved_tensors
        rows = logits.view(-1, logits.shape[-1])
        cross_entropy.write_gradient_(rows, flat, parts, dlosses[0], ctx.first, ctx.ignore)
        # Autograd does not see that a kernel wrote to the logits. The new version number makes
        # autograd refuse a second backward.
        torch.autograd.graph.increment_version(logits)
        return logits, None, None, None
