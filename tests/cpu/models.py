"""Tiny models of each kind, their batches, and what a step of them leaves, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from schedir.models import llama
from schedir.runtime.batch import Keywords, Microbatches
from schedir.runtime.boundary import Boundary

VOCAB, HIDDEN, LAYERS, CONTEXT, BATCH = 30, 16, 4, 8, 2


class Given(NamedTuple):
    """What a step is given, and the scale that makes a mean of its loss."""

    inputs: Microbatches
    targets: Microbatches
    scale: float
    keywords: Keywords = ()


class Kind(NamedTuple):
    """A kind of model: what makes a stage of it, of so many and of a group of ranks; its loss; what
    passes; batches; and which stages share a weight."""

    stage: Callable[..., nn.Module]
    loss: Callable[..., Tensor]
    boundary: Callable[[int], Any]
    batch: Callable[[int, int], Given]
    tied: Callable[[int], Any]

    def stages(self, count: int) -> list[nn.Module]:
        """All stages, whole."""
        return [self.stage(s, count) for s in range(count)]


def sequences(microbatches: int, seed: int) -> Given:
    """Tokens, and those that come next."""
    numbers = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (microbatches, BATCH, CONTEXT + 1), generator=numbers)
    targets = tokens[..., 1:].clone()
    targets[:, 0, :2] = llama.IGNORE
    return Given(tokens[..., :-1], targets, 1 / llama.count_tokens(targets))


def of_llama(tied: bool = False) -> Kind:
    config = llama.LlamaConfig(
        vocab=VOCAB, layers=LAYERS, hidden=HIDDEN, heads=4, kv_heads=2, feed_forward=20,
        context=CONTEXT, tied=tied,
    )  # fmt: skip
    boundary = Boundary((BATCH, CONTEXT, HIDDEN))
    return Kind(
        partial(llama.build_stage, config),
        llama.loss,
        lambda stages: boundary,
        sequences,
        lambda stages: tied and stages > 1,
    )


KINDS = {"llama": of_llama(), "tied llama": of_llama(tied=True)}


def gradients(stages: Sequence[nn.Module]) -> list[dict[str, Tensor]]:
    """The gradients of each stage."""
    return [
        {n: p.grad.clone() for n, p in s.named_parameters() if p.grad is not None} for s in stages
    ]
