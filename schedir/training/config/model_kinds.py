"""The kinds of models that `schedir train` trains, one row each.  Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from schedir.models.gpt_config import LAYER, GPTConfig
from schedir.models.llama_config import LlamaConfig
from schedir.models.partitioning import split_heads

ModelConfig = GPTConfig | LlamaConfig


def _heads(config: Any, tp: int) -> int:
    return split_heads(config.heads, tp)


def _groups(config: LlamaConfig, tp: int) -> int:
    return split_heads(config.groups, tp, "heads of keys and values", "kv_heads")


class ModelKind(NamedTuple):
    """A kind of model.

    Args:
        config: The class of its configuration.
        share: Raises an error if this number of tensor-parallel ranks cannot share the model.
        layer: Where these ranks meet in a layer, in the letters of `Program.meets`; empty if its
            stages cannot be cut into pieces.
    """

    config: type[Any]
    share: Callable[[Any, int], int] = _heads
    layer: str = ""


KINDS: Final = {
    "gpt": ModelKind(GPTConfig, layer=LAYER),
    "llama": ModelKind(LlamaConfig, share=_groups),
}


def kind_of(config: ModelConfig) -> str:
    """Return the name of the kind to which a configuration belongs."""
    return next(name for name, kind in KINDS.items() if type(config) is kind.config)
