"""Read the shape of a transformer from the `config.json` of a Hugging Face model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from schedir.errors import ConfigError, describe
from schedir.io.files import read_text

MAX_JSON_BYTES: Final = 1_000_000

# For each supported `model_type`: True if its feed-forward network has a gate and its positions are
# rotary. The planner supports no type with another structure of attention or feed-forward network.
_GATED_BY_TYPE: Final = {
    "gpt2": False,
    "llama": True,
    "mistral": True,
    "mixtral": True,
    "qwen2": True,
    "qwen3": True,
    "qwen3_moe": True,
    "deepseek_v3": True,
}
# The keys of a `config.json` for each field of TransformerSpec. The first key with a value is used.
_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
    "sequence": ("max_position_embeddings", "n_positions"),
    "ffn": ("moe_intermediate_size", "intermediate_size", "n_inner"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "active": ("num_experts_per_tok",),
}
# Further keys of `deepseek_v3`. The planner counts parameters with the fields of these keys.
_DEEPSEEK_KEYS: Final = {
    "head_dim": "v_head_dim",
    "shared_experts": "n_shared_experts",
    "dense_layers": "first_k_dense_replace",
    "dense_ffn": "intermediate_size",
    "query_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "rope_dim": "qk_rope_head_dim",
}
# The values of missing keys, if TransformerSpec has another default. They are the defaults of the
# configuration classes of transformers.
_DEFAULTS_BY_TYPE: Final[dict[str, dict[str, int]]] = {
    "mistral": {"kv_heads": 8},
    "mixtral": {"kv_heads": 8, "experts": 8, "active": 2},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"kv_heads": 4, "experts": 128, "active": 8},
    "deepseek_v3": {"experts": 256, "active": 8},
}


def describe_missing_keys(fields: Sequence[str]) -> str:
    """Return a hint with the keys to add to a `config.json`.

    Args:
        fields: Names of the missing fields of `TransformerSpec`.
    """
    return f"add {', '.join(_KEYS[field][0] for field in fields)} to the file"


def describe_keys(field: str) -> str:
    """Return a hint with the keys of a `config.json` that may give a field of a model.

    Args:
        field: The name of a field of `TransformerSpec`.
    """
    keys = _KEYS.get(field, ())
    return f"the key of the file is {' or '.join(keys)}" if keys else ""


def read_huggingface_config(path: Path) -> dict[str, Any]:
    """Return the fields of a model from its `config.json`.

    `sequence` is the largest sequence length of the model, which is often longer than the sequences
    in training.

    Args:
        path: The path of the file.

    Returns:
        Values of the fields of `TransformerSpec`.

    Raises:
        UsageError: The file cannot be read.
        ConfigError: The file is not JSON, or the planner does not support the model.
    """
    try:
        config = json.loads(read_text(path, MAX_JSON_BYTES))
    except json.JSONDecodeError as error:
        # For an unterminated string, the JSON parser reports the start of the string, not the end
        # of the file.
        is_cut = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
        raise ConfigError(
            f"the file is not JSON: {error.msg}",
            hint="the file is cut off" if is_cut else "",
            location=str(path),
            line=error.lineno,
            column=error.colno,
            fields=["model"],
        ) from None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ConfigError("the file is not a JSON object", location=str(path), fields=["model"])
    kind = config.get("model_type")
    if kind is None:
        raise ConfigError(
            "the file has no model_type, so it is not the config.json of a model",
            hint="give the config.json in the folder of the model",
            location=str(path),
            fields=["model"],
        )
    if kind not in _GATED_BY_TYPE:
        raise ConfigError(
            f"the planner does not support model_type {describe(kind)}",
            hint=f"it supports {', '.join(_GATED_BY_TYPE)}; write other models as FILE.toml",
            location=str(path),
            fields=["model_type"],
        )
    fields: dict[str, Any] = dict.fromkeys(("gated", "rotary"), _GATED_BY_TYPE[kind])
    defaults = _DEFAULTS_BY_TYPE.get(kind, {})
    for field, keys in _KEYS.items():
        key = next((key for key in keys if config.get(key) is not None), None)
        if key is not None:
            fields[field] = config[key]
        elif field in defaults and not {*keys} & {*config}:  # The value null is not the default.
            fields[field] = defaults[field]
    if kind == "deepseek_v3":
        if not config.get("kv_lora_rank"):
            raise ConfigError(
                "the file has model_type 'deepseek_v3', but no kv_lora_rank",
                hint="give the config.json in the folder of the model",
                location=str(path),
                fields=["model"],
            )
        # Models without a latent vector of queries have null as q_lora_rank.
        fields |= {field: config.get(key) or 0 for field, key in _DEEPSEEK_KEYS.items()}
    # By default, GPT-2 ties its embeddings, and the other types do not.
    fields["tied"] = config.get("tie_word_embeddings", kind == "gpt2")
    _require_supported(config, fields, path)
    return fields


def _require_supported(config: dict[str, Any], fields: dict[str, Any], path: Path) -> None:
    """Raise ConfigError for attention windows, and if only some layers have experts."""
    usual_values: list[tuple[str, Any]] = [
        ("decoder_sparse_step", 1), ("mlp_only_layers", []), ("moe_layer_freq", 1),
    ]  # fmt: skip
    if config["model_type"] == "deepseek_v3":
        usual_values.append(("qk_nope_head_dim", config.get("v_head_dim")))
    for key, usual in usual_values:
        if (value := config.get(key, usual)) != usual:
            raise ConfigError(
                f"the planner does not support {key} {describe(value)}",
                hint="all layers must have experts, or none",
                location=str(path),
                fields=[key],
            )
    window = config.get("sliding_window")
    sequence = fields.get("sequence")
    if not config.get("use_sliding_window", True):
        window = None
    if isinstance(window, int) and isinstance(sequence, int) and window < sequence:
        raise ConfigError(
            f"the planner does not support attention with sliding_window {window}",
            hint="set sliding_window to null to plan full attention, which needs more time and "
            "memory",
            location=str(path),
            fields=["sliding_window"],
        )
