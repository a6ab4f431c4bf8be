"""The kinds of models that `schedir train` trains. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from schedir.errors import UsageError
from schedir.models.gpt_config import LAYER_BOUNDARIES, GPTConfig
from schedir.models.llama_config import LlamaConfig
from schedir.models.moe_config import MOE_LAYER_BOUNDARIES, MoEConfig
from schedir.models.partitioning import split_heads

ModelConfig = GPTConfig | LlamaConfig | MoEConfig


def _check_heads(config: Any, tp: int) -> int:
    return split_heads(config.heads, tp)


def _check_kv_heads(config: LlamaConfig, tp: int) -> int:
    return split_heads(config.kv_groups, tp, "heads of keys and values", "kv_heads")


def _require_no_tp(_: object, tp: int) -> None:
    if tp > 1:
        raise UsageError(
            f"a model of kind 'moe' has no tensor parallelism, but tp is {tp}",
            hint="tp = 1",
            fields=["tp", "kind"],
        )


class ModelKind(NamedTuple):
    """A kind of model.

    Args:
        config_class: The class of the section [model] for this kind.
        check_tp_split: A function of (section [model], `tp`). It raises an error if `tp`
            tensor-parallel ranks cannot share the model.
        layer_boundaries: The collectives between the segments of a layer, as the letters of
            `Program.segment_boundaries`. Empty if stages of this kind cannot be segmented.
    """

    config_class: type[Any]
    check_tp_split: Callable[[Any, int], object] = _check_heads
    layer_boundaries: str = ""


MODEL_KINDS: Final = {
    "gpt": ModelKind(GPTConfig, layer_boundaries=LAYER_BOUNDARIES),
    "llama": ModelKind(LlamaConfig, check_tp_split=_check_kv_heads),
    "moe": ModelKind(MoEConfig, _require_no_tp, MOE_LAYER_BOUNDARIES),
}


def get_model_kind(config: ModelConfig) -> str:
    """Return the name of the kind to which a configuration belongs.

    Args:
        config: The section [model] of a configuration.
    """
    return next(name for name, kind in MODEL_KINDS.items() if type(config) is kind.config_class)
