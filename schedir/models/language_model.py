"""What all language models share: embedding, head, initialization and loss."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from schedir.tensor_parallel.sliced_init import SlicedInit
from schedir.tensor_parallel.vocab_parallel import (
    VocabParallelEmbedding,
    VocabParallelHead,
    shard_vocab,
    vocab_parallel_cross_entropy,
)

IGNORE_INDEX = -1  # a target that counts neither in the loss nor in `count_tokens`
INIT_STD = 0.02


class ParameterPlacement(TypedDict):
    """Where parameters lie, and their type."""

    device: torch.device | str
    dtype: torch.dtype


class TokenModelConfig(Protocol):
    """A configuration of a model that has tokens at both ends."""

    @property
    def vocab(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def seed(self) -> int: ...


def make_normal_init(
    seed: int,
    name: str,
    k: int,
    n: int,
    placement: ParameterPlacement,
    dim: int = 0,
    std: float = INIT_STD,
) -> SlicedInit:
    """The parameter `name`, (k, n), normal(0, std), which tensor-parallel ranks share along `dim`.

    What it is depends on the seed and the name alone.
    """
    return SlicedInit(f"{seed} {name}", torch.Size((k, n)), dim, std, **placement)


class EmbeddingAndHead(NamedTuple):
    """The embedding of a stage that is the first, and the head of one that is the last."""

    embedding: VocabParallelEmbedding | None
    head: VocabParallelHead | None

    @classmethod
    def for_stage(
        cls,
        config: TokenModelConfig,
        is_first: bool,
        is_last: bool,
        tp: ProcessGroup | None,
        placement: ParameterPlacement,
        *,
        sequence_parallel: bool = False,
    ) -> EmbeddingAndHead:
        """This rank's shards of them; where they are tied, they share one Parameter, or have
        copies of it if they are in two stages."""

        def weight(name: str) -> nn.Parameter:
            return shard_vocab(
                make_normal_init(config.seed, name, config.vocab, config.hidden, placement), tp
            )

        shared = weight("embedding.weight") if is_first or (is_last and config.tied) else None
        own = shared if config.tied else weight("head.weight") if is_last else None
        embedding = head = None
        if is_first and shared is not None:
            embedding = VocabParallelEmbedding(shared, tp, sequence_parallel=sequence_parallel)
        if is_last and own is not None:
            head = VocabParallelHead(own, config.vocab, tp, sequence_parallel=sequence_parallel)
        return cls(embedding, head)


def find_tied_weight(
    config: TokenModelConfig,
    embedding: VocabParallelEmbedding | None,
    head: VocabParallelHead | None,
) -> nn.Parameter | None:
    """A stage's copy of the embedding, if another stage has one: their gradients are summed.

    None where nothing is tied, on the stages between, and where one stage is the model, in which
    the head shares the embedding's parameter.
    """
    ends = [end for end in (embedding, head) if end is not None]
    return ends[0].weight if config.tied and len(ends) == 1 else None


def loss(logits: Tensor, targets: Tensor, tp: ProcessGroup | None = None) -> Tensor:
    """Sum of the cross entropies of the counted tokens, 0-dim float32, the same on all ranks.

    `logits` (b, T, V/t) are this rank's, as the last stage returns them; `targets` int64 (b, T).
    """
    return vocab_parallel_cross_entropy(logits, targets, tp, IGNORE_INDEX)


def count_tokens(targets: Tensor) -> int:
    """How many targets count: divide the summed loss by it for the mean."""
    return int((targets != IGNORE_INDEX).sum())
