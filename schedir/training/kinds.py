"""Kinds: the models that a training run can have, a row each.  Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from schedir.ir.ties import Tied
from schedir.models.bert_config import BertConfig
from schedir.models.encoder_decoder_config import EncoderDecoderConfig, halves, tied_stages
from schedir.models.llama_config import LlamaConfig
from schedir.models.shape import split_heads
from schedir.training.gpt_config import LAYER, GPTConfig

ModelConfig = GPTConfig | LlamaConfig | BertConfig | EncoderDecoderConfig


def _heads(config: Any, tp: int) -> int:
    return split_heads(config.heads, tp)


def _groups(config: LlamaConfig, tp: int) -> int:
    return split_heads(config.groups, tp, "heads of keys and values", "kv_heads")


def _ends(config: Any, stages: int, division: Sequence[int] | None) -> bool:
    return bool(config.tied)


class Kind(NamedTuple):
    """A kind of model: the class of its configuration; what refuses tensor-parallel ranks that
    cannot share it; which stages share weights, as a program has it; how many tokens are text, of
    which the first are; whether its samples are windows as they are, so that documents may be
    packed into them; how long its sequences are, which tensor-parallel ranks may share; and where
    they meet in a layer of it, as `meets` has it, "" where its stages have no pieces."""

    config: type[Any]
    share: Callable[[Any, int], int] = _heads
    tied: Callable[[Any, int, Sequence[int] | None], bool | Tied] = _ends
    text: Callable[[Any], int] = lambda config: int(config.vocab)
    packs: bool = True
    lengths: Callable[[Any], tuple[int, ...]] = lambda config: (int(config.context),)
    layer: str = ""


KINDS: Final = {
    "gpt": Kind(GPTConfig, layer=LAYER),
    "llama": Kind(LlamaConfig, share=_groups),
    "bert": Kind(BertConfig, text=lambda config: int(config.text), packs=False),
    "encoder_decoder": Kind(EncoderDecoderConfig, tied=tied_stages, packs=False, lengths=halves),
}


def kind_of(config: ModelConfig) -> str:
    """The name of the kind that a configuration is of."""
    return next(name for name, kind in KINDS.items() if type(config) is kind.config)
