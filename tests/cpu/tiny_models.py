"""Tiny models of each kind, their batches, and their gradients, for tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from examples import bert, encoder_decoder
from schedir.models import llama
from schedir.models.language_model import IGNORE_INDEX, count_tokens, loss
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.step_inputs import Keywords, Microbatches

VOCAB, HIDDEN, LAYERS, CONTEXT, BATCH = 30, 16, 4, 8, 2


class Batch(NamedTuple):
    """The batch of a step, and the scale that turns its summed loss into a mean."""

    inputs: Microbatches
    targets: Microbatches
    scale: float
    keywords: Keywords = ()


class Kind(NamedTuple):
    """A kind of model: functions for its stages, loss, boundaries and batches, and tied stages."""

    stage: Callable[..., nn.Module]
    loss: Callable[..., Tensor]
    boundary: Callable[[int], Any]
    batch: Callable[[int, int], Batch]
    tied: Callable[[int], Any]

    def stages(self, count: int) -> list[nn.Module]:
        """Return all stages, without tensor parallelism."""
        return [self.stage(s, count) for s in range(count)]


def make_sequences(microbatches: int, seed: int) -> Batch:
    """Return tokens and the following tokens."""
    numbers = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (microbatches, BATCH, CONTEXT + 1), generator=numbers)
    targets = tokens[..., 1:].clone()
    targets[:, 0, :2] = IGNORE_INDEX
    return Batch(tokens[..., :-1], targets, 1 / llama.count_tokens(targets))


def make_llama(tied: bool = False) -> Kind:
    config = llama.LlamaConfig(
        vocab=VOCAB, layers=LAYERS, hidden=HIDDEN, heads=4, kv_heads=2, feed_forward=20,
        context=CONTEXT, tied=tied, window=(0, 5, 3, 3), stride=(1, 2, 1, 3),
    )  # fmt: skip
    boundary = Boundary((BATCH, CONTEXT, HIDDEN))
    return Kind(
        partial(llama.build_stage, config),
        llama.loss,
        lambda stages: boundary,
        make_sequences,
        lambda stages: tied and stages > 1,
    )


def make_sentence_pairs(config: bert.BertConfig, microbatches: int, seed: int) -> Batch:
    """Return pairs of sentences of various lengths with some masked tokens."""
    numbers = torch.Generator().manual_seed(seed)
    shape = (microbatches, BATCH, config.context)
    tokens = torch.randint(config.text, shape, generator=numbers)
    targets = torch.full(shape, IGNORE_INDEX)
    keywords = []
    for mb in range(microbatches):
        of, mask = torch.zeros(shape[1:], dtype=torch.int64), torch.ones(shape[1:]).bool()
        for row in range(BATCH):
            second, end, masked = (5 + mb + row) % 3 + 2, 8 - mb % 2, 1 + row
            of[row, second:], mask[row, end:] = 1, False
            targets[mb, row, masked] = tokens[mb, row, masked]
            targets[mb, row, 0] = (mb + row) % 5 == 0
            tokens[mb, row, masked], tokens[mb, row, end:] = config.mask, config.pad
            tokens[mb, row, 0] = config.cls
        keywords.append({"sentences": of, "mask": mask})
    return Batch(tokens, targets, 1 / bert.count_tokens(targets), keywords)


def make_bert() -> Kind:
    config = bert.BertConfig(
        vocab=VOCAB + 1, layers=LAYERS, hidden=HIDDEN, heads=4, context=CONTEXT
    )
    boundary = Boundary((BATCH, CONTEXT, HIDDEN))
    return Kind(
        partial(bert.build_stage, config),
        bert.loss,
        lambda stages: boundary,
        partial(make_sentence_pairs, config),
        lambda stages: stages > 1,
    )


SOURCE = 6


def make_translations(microbatches: int, seed: int) -> Batch:
    """Return sources of various lengths, and targets, whose tokens except the first count."""
    numbers = torch.Generator().manual_seed(seed)
    source = torch.randint(VOCAB, (microbatches, BATCH, SOURCE), generator=numbers)
    target = torch.randint(VOCAB, (microbatches, BATCH, CONTEXT + 1), generator=numbers)
    lengths = SOURCE - torch.arange(microbatches)[:, None] % 2 - torch.arange(BATCH)
    mask = torch.arange(SOURCE) < lengths[..., None]
    after = target[..., 1:].clone()
    after[:, 1, -2:] = IGNORE_INDEX
    keywords = [{"target": t[:, :-1], "mask": m} for t, m in zip(target, mask, strict=True)]
    return Batch(source, after, 1 / count_tokens(after), keywords)


def make_encoder_decoder(encoder: int, decoder: int) -> Kind:
    config = encoder_decoder.EncoderDecoderConfig(
        vocab=VOCAB, encoder_layers=encoder, decoder_layers=decoder, hidden=HIDDEN, heads=4,
        context=CONTEXT,
    )  # fmt: skip
    return Kind(
        partial(encoder_decoder.build_stage, config),
        loss,
        lambda stages: encoder_decoder.boundaries(config, stages, BATCH, SOURCE, CONTEXT),
        make_translations,
        partial(encoder_decoder.tied_stages, config),
    )


KINDS = {"tied llama": make_llama(tied=True), "bert": make_bert()}
KINDS |= {"encoder_decoder": make_encoder_decoder(2, 2), "uneven": make_encoder_decoder(1, 3)}
