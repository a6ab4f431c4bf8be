"""Kinds: the models that a training run can have, a row each.  Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from schedir.models.llama_config import LlamaConfig
from schedir.models.shape import split_heads
from schedir.training.gpt_config import LAYER, GPTConfig

ModelConfig = GPTConfig | LlamaConfig


def _heads(config: Any, tp: int) -> int:
    return split_heads(config.heads, tp)


def _groups(config: LlamaConfig, tp: int) -> int:
    return split_heads(config.groups, tp, "heads of keys and values", "kv_heads")


class Kind(NamedTuple):
    """A kind of model.

    `config` is the class of its configuration.  `share` refuses tensor-parallel ranks that cannot
    share it.  `layer` says where these meet in a layer of it, as `meets` has it, "" where its
    stages have no pieces.
    """

    config: type[Any]
    share: Callable[[Any, int], int] = _heads
    layer: str = ""


KINDS: Final = {
    "gpt": Kind(GPTConfig, layer=LAYER),
    "llama": Kind(LlamaConfig, share=_groups),
}


def kind_of(config: ModelConfig) -> str:
    """The name of the kind that a configuration is of."""
    return next(name for name, kind in KINDS.items() if type(config) is kind.config)
