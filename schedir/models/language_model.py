"""The common parts of all language models: embedding, head, initialization and loss."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from schedir.tensor_parallel.sliced_init import SlicedInit
from schedir.tensor_parallel.vocab_parallel import (
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_parallel_cross_entropy,
)

IGNORE_INDEX = -1  # The loss and `count_tokens` ignore tokens with this target.
INIT_STD = 0.02  # The standard deviation of initial weights in GPT-2.


class ParameterPlacement(TypedDict):
    """The device and the type of parameters.

    Attributes:
        device: The device.
        dtype: The type.
    """

    device: torch.device | str
    dtype: torch.dtype


def make_normal_init(
    seed: int,
    name: str,
    k: int,
    n: int,
    placement: ParameterPlacement,
    dim: int = 0,
    std: float = INIT_STD,
) -> SlicedInit:
    """Return the initializer of a (k, n) parameter with the distribution normal(0, std).

    The values depend only on the seed and the name.

    Args:
        seed: The seed of the model.
        name: The name of the parameter.
        k: The size of the first dimension.
        n: The size of the second dimension.
        placement: The device and the type of the parameter.
        dim: The dimension that is divided among tensor-parallel ranks.
        std: The standard deviation.
    """
    return SlicedInit(f"{seed} {name}", torch.Size((k, n)), dim, std, **placement)


def find_tied_weight(
    embedding: VocabParallelEmbedding | None, head: VocabParallelHead | None, *, is_tied: bool
) -> nn.Parameter | None:
    """Return a stage's copy of a tied weight if another stage has a copy too.

    The gradients of both copies are summed. The result is None if the weight is not tied, or if the
    stage has neither embedding nor head. The result is also None for a stage with both, because the
    head of such a stage uses the parameter of the embedding.

    Args:
        embedding: The embedding of the stage, or None.
        head: The head of the stage, or None.
        is_tied: True if the head of the model uses the weight of the embedding.
    """
    ends = [end for end in (embedding, head) if end is not None]
    return ends[0].weight if is_tied and len(ends) == 1 else None


def loss(logits: Tensor, targets: Tensor, tp: ProcessGroup | None = None) -> Tensor:
    """Return the sum of the cross entropies of all tokens that are not ignored.

    Args:
        logits: The logits of this rank, of shape (b, T, V/t), from the last stage.
        targets: int64 of shape (b, T). Tokens with the target `IGNORE_INDEX` are ignored.
        tp: The tensor-parallel group. None means one rank, without communication.

    Returns:
        A 0-dimensional float32 tensor, the same on all tensor-parallel ranks.
    """
    return vocab_parallel_cross_entropy(logits, targets, tp, IGNORE_INDEX)


def count_tokens(targets: Tensor) -> int:
    """Return the number of targets in the loss: the mean loss is the sum divided by this number.

    Args:
        targets: int64, of any shape.
    """
    return int((targets != IGNORE_INDEX).sum())
