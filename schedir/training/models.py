"""Models: what a training run needs of a model of each kind, beside its configuration.

A row here is of the kind of that name in `training/kinds.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from schedir.data.pairs import Marks, pair
from schedir.models import bert, encoder_decoder, llama
from schedir.models.bert_config import BertConfig
from schedir.models.encoder_decoder_config import EncoderDecoderConfig, halves
from schedir.models.language import IGNORE
from schedir.runtime.boundary import Boundary, Crossing
from schedir.training import gpt, gpt_pieces
from schedir.training.data import Batches, Samples
from schedir.training.kinds import ModelConfig, kind_of


class Module(Protocol):
    """The module of a model: what makes a stage of it, this rank's shard; the loss of what the last
    stage gives; and how many targets count in it."""

    @property
    def build_stage(self) -> Callable[..., nn.Module]: ...

    def loss(self, found: Any, targets: Tensor, /, tp: ProcessGroup | None) -> Tensor: ...

    def count_tokens(self, targets: Tensor) -> int: ...


def _windows(config: ModelConfig, batches: Batches, first: int, count: int) -> Samples:
    """Windows of which each token's target is the next."""
    return Samples(*batches.batch(first, count))


def _pairs(config: BertConfig, batches: Batches, first: int, count: int) -> Samples:
    """Pairs of sentences: each sample's window, and as often as not another's."""
    marks = Marks(config.cls, config.sep, config.mask, config.pad, config.text)
    found = []
    for number, own in enumerate(batches.batch(first, count)[0], first):
        numbers = np.random.default_rng([batches.seed or 0, number])
        other, _ = batches.batch(int(numbers.integers(len(batches))), 1)
        found.append(pair(own.numpy(), other[0].numpy(), marks, numbers, IGNORE))
    tokens, sentences, there, targets = (
        torch.from_numpy(np.stack(one)) for one in zip(*found, strict=True)
    )
    return Samples(tokens, targets, {"sentences": sentences, "mask": there})


def _halves(config: EncoderDecoderConfig, batches: Batches, first: int, count: int) -> Samples:
    """Windows of which the second half is to be told from the first (T5's prefix language
    modelling: Raffel et al., arXiv 1910.10683, section 3.2.3)."""
    inputs, targets = batches.batch(first, count)
    half, _ = halves(config)
    return Samples(inputs[:, :half], targets[:, half:], {"target": inputs[:, half:]})


Passing = Boundary | dict[int, tuple[Boundary, ...]]


class Cut(NamedTuple):
    """How a model is cut: its stages, samples of a microbatch, layers of each stage, a type, and by
    how many ranks tokens are shared."""

    stages: int
    size: int
    division: Sequence[int] | None
    dtype: torch.dtype
    share: int = 1


def _hidden(config: ModelConfig, cut: Cut) -> Passing:
    return Boundary((cut.size, config.context // cut.share, config.hidden), cut.dtype)


def _with_memory(config: EncoderDecoderConfig, cut: Cut) -> Passing:
    source, target = (length // cut.share for length in halves(config))
    return encoder_decoder.boundaries(
        config, cut.stages, cut.size, source, target, division=cut.division, dtype=cut.dtype
    )


def largest(passing: Passing) -> int:
    """Bytes of the largest message."""
    each = passing.values() if isinstance(passing, dict) else [passing]
    return max((Crossing.of(one).nbytes for one in each), default=0)


class Model(NamedTuple):
    """A model: its module; the samples of a stream, so many from one on; and what passes between
    stages.  Of a kind that has pieces: those of a stage, and what passes between stages of so many
    pieces, given what passes between whole ones, how many are frozen, and by how many ranks
    tokens are shared."""

    module: Module
    samples: Callable[[Any, Batches, int, int], Samples] = _windows
    boundaries: Callable[[Any, Cut], Passing] = _hidden
    pieces: Callable[[Any], list[nn.Module]] | None = None
    between: Callable[[Sequence[int], Any, int, int], dict[int, Any]] | None = None


MODELS: Final = {
    "gpt": Model(gpt, pieces=gpt_pieces.pieces, between=gpt_pieces.boundaries),
    "llama": Model(llama),
    "bert": Model(bert, _pairs),
    "encoder_decoder": Model(encoder_decoder, _halves, _with_memory),
}


def model_of(config: ModelConfig) -> Model:
    """The model that a configuration is of."""
    return MODELS[kind_of(config)]
