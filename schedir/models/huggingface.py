"""Cut causal language models of Hugging Face's transformers into pipeline stages.

A stage runs the model's own `forward` with some of the layers, so the transformers library computes
the masks, positions and rotary tables.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from schedir.errors import UsageError, describe, require_type
from schedir.models.partitioning import split_layers


class _Family(NamedTuple):
    """The attribute names of a decoder's submodules.

    Attributes:
        layers: The list of layers.
        norm: The norm after the last layer.
        embedding: The embedding of tokens.
        identity: Submodules of the first stage that the other stages replace by `nn.Identity`.
        positions: The embedding of positions, which is added to the embedding of tokens. "" if the
            decoder has no such embedding.
    """

    layers: str = "layers"
    norm: str = "norm"
    embedding: str = "embed_tokens"
    identity: tuple[str, ...] = ()
    positions: str = ""


_LLAMA: Final = _Family()
_FAMILIES: Final = {
    "gemma": _LLAMA,
    "gpt2": _Family("h", "ln_f", "wte", identity=("drop",), positions="wpe"),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}


class Stage(nn.Module):
    """A pipeline stage of a model: some of its layers, and perhaps its embedding or its head.

    The stage shares its parameters with the model, under the same names. In the first stage,
    `forward` takes tokens of shape (batch, sequence). In all other stages, it takes hidden states
    of shape (batch, sequence, hidden). The last stage returns logits of shape (batch, sequence,
    vocabulary), and all other stages return hidden states. All stages take the model's keywords
    `attention_mask` and `position_ids`.

    Args:
        model: The causal language model.
        family: The names of the decoder's submodules.
        layers: The index of the stage's first layer, and the index of its last layer plus 1.
    """

    def __init__(self, model: Any, family: _Family, layers: tuple[int, int]) -> None:
        super().__init__()
        base_model = getattr(model, model.base_model_prefix)
        begin, end = layers
        count = len(getattr(base_model, family.layers))
        self.is_first = begin == 0
        self.is_last = end == count
        decoder = copy.copy(base_model)
        decoder._modules = dict(base_model._modules)
        decoder.config = _make_config(base_model.config, begin, end)
        stage_layers = nn.ModuleList()
        for number, layer in [*enumerate(getattr(base_model, family.layers))][begin:end]:
            # The number is part of the parameters' names.
            stage_layers._modules[str(number)] = layer
        setattr(decoder, family.layers, stage_layers)
        if not self.is_first:
            decoder._modules[family.embedding] = None
            for name in family.identity:
                setattr(decoder, name, nn.Identity())
            if family.positions:
                setattr(decoder, family.positions, _NoPositions())
        if not self.is_last:
            setattr(decoder, family.norm, nn.Identity())
        self._prefix = model.base_model_prefix
        self._model_config = base_model.config
        setattr(self, self._prefix, decoder)
        self.lm_head = model.lm_head if self.is_last else None

    def forward(self, x: Tensor, **keywords: Any) -> Tensor:
        """Return hidden states, or logits.

        Args:
            x: Tokens, or hidden states.
            **keywords: Keywords of the model, such as `position_ids`.

        Raises:
            UsageError: A keyword is `labels` or `logits_to_keep`, which the decoder would ignore.
        """
        if refused_keywords := keywords.keys() & {"labels", "logits_to_keep"}:
            raise UsageError(
                f"a stage of a cut model does not support the keyword {min(refused_keywords)}",
                hint="the last stage returns all logits; give labels to the executor as targets",
            )
        decoder: Any = getattr(self, self._prefix)
        # Layers read this setting from the config of the model. The config of the decoder is a
        # copy, so it must get the same value.
        attention = self._model_config._attn_implementation
        if decoder.config._attn_implementation != attention:
            decoder.config._attn_implementation = attention
        decoder_input = {"input_ids" if self.is_first else "inputs_embeds": x}
        hidden: Tensor = decoder(**decoder_input, use_cache=False, **keywords).last_hidden_state
        return hidden if self.lm_head is None else self.lm_head(hidden)


class _NoPositions(nn.Module):
    """Replaces the position embedding by -0.0. Adding -0.0 changes no bit of the other term."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.tensor(-0.0, device=position_ids.device)  # x + -0.0 is x, also for x = -0.0.


def cut(model: Any, stages: int, layers_per_stage: Sequence[int] | None = None) -> list[Stage]:
    """Return the pipeline stages of a causal language model of Hugging Face.

    The stages share their parameters with the model. If they run one after the other, losses and
    gradients are bitwise equal to those of the model with `use_cache=False`. Tied weights are in
    the first and in the last stage; `schedir.find_tied_weights` finds them. For a model with LoRA
    of peft, use `cut(model.get_base_model(), stages)`.

    Args:
        model: A model such as `LlamaForCausalLM` or `GPT2LMHeadModel`, of the types gemma, gpt2,
            llama, mistral, qwen2 or qwen3.
        stages: The number of stages.
        layers_per_stage: The number of layers of each stage. Each must be 1 or more. None means
            that the layers are divided evenly.

    Raises:
        UsageError: The type of the model is not supported, or the model has no head for language
            modeling, or has parameters or layers that no stage would use. Or its `forward` was
            replaced, or the layers do not fit the stages.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, hidden_size=32, vocab_size=64,
        ...     intermediate_size=64, num_attention_heads=4))
        >>> first, last = cut(model, 2)
        >>> tokens = torch.arange(8)[None]
        >>> bool((last(first(tokens)) == model(tokens).logits).all())
        True
        >>> [name for name, _ in last.named_parameters()][0]
        'model.layers.2.self_attn.q_proj.weight'
    """
    require_type(model, "model", nn.Module, 'AutoModelForCausalLM.from_pretrained("gpt2")')
    require_type(stages, "stages", int, "cut(model, 2, layers_per_stage=(3, 1))")
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type not in _FAMILIES:
        raise UsageError(
            f"cut does not support models of type {describe(model_type)}",
            hint=f"cut supports {', '.join(_FAMILIES)}; write a Stage class for other models",
            fields=["model"],
        )
    prefix = getattr(model, "base_model_prefix", "")
    head = getattr(model, "lm_head", None)
    if not isinstance(head, nn.Module) or not isinstance(getattr(model, prefix, None), nn.Module):
        raise UsageError(
            f"cut needs a causal language model, not {type(model).__name__}",
            hint="use a class with lm_head, such as LlamaForCausalLM; with peft, "
            "cut(model.get_base_model(), stages)",
            fields=["model"],
        )
    family = _FAMILIES[model_type]
    decoder = getattr(model, prefix)
    layers = len(getattr(decoder, family.layers))
    if layers > (count := decoder.config.num_hidden_layers):
        raise UsageError(
            f"the model has {layers} layers, and its num_hidden_layers is {count}",
            hint="remove the layers that the model does not use, or correct its configuration",
        )
    if "forward" in vars(decoder):
        raise UsageError(
            f"cut cannot use {type(decoder).__name__}, because its forward was replaced",
            hint="load the model without a device_map, or remove its hooks before cut",
        )
    counts = split_layers(layers, stages, layers_per_stage)
    if 0 in counts:
        raise UsageError(
            f"layers_per_stage {[*counts]} has a stage without layers; a stage needs 1 or more",
            fields=["layers_per_stage"],
        )
    ends = [sum(counts[: number + 1]) for number in range(stages)]
    result = [
        Stage(model, family, (end - count, end)) for end, count in zip(ends, counts, strict=True)
    ]
    used_parameters = {parameter for stage in result for parameter in stage.parameters()}
    if unused_names := [name for name, p in model.named_parameters() if p not in used_parameters]:
        raise UsageError(
            f"cut cannot divide {type(model).__name__}: no stage would use its parameter "
            f"{unused_names[0]}",
            hint="use the class for language modeling, or write a Stage class",
        )
    return result


def _make_config(config: Any, begin: int, end: int) -> Any:
    """Return the configuration of a decoder with some of the layers."""
    stage_config = copy.deepcopy(config)
    stage_config.num_hidden_layers = end - begin
    if getattr(config, "layer_types", None) is not None:
        stage_config.layer_types = config.layer_types[begin:end]
    return stage_config
