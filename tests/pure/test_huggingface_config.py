"""Tests of planner models from a Hugging Face `config.json`, and of model aliases."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schedir import planner
from schedir.errors import ConfigError, UsageError
from schedir.planner import ParallelPlan, cluster_preset, load_model
from schedir.planner.transformer.model_presets import MODEL_ALIASES, MODEL_PRESETS, find_preset

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128000,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def write_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**LLAMA, **changes}))
    return path


def test_llama_config_equals_preset(tmp_path: Path) -> None:
    assert load_model(write_config(tmp_path)) == load_model("llama-3-8b")
    assert load_model(write_config(tmp_path), sequence=4096).sequence == 4096


def test_qwen3_moe_config_equals_preset(tmp_path: Path) -> None:
    """The heads are wider than hidden / heads. The sizes are those of arXiv 2505.09388."""
    path = write_config(
        tmp_path, model_type="qwen3_moe", num_hidden_layers=94, num_attention_heads=64,
        num_key_value_heads=4, head_dim=128, intermediate_size=12288, moe_intermediate_size=1536,
        num_experts=128, num_experts_per_tok=8, vocab_size=151936, max_position_embeddings=4096,
        decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    model = load_model(path)
    assert model == load_model("Qwen3-235B-A22B")
    assert round(model.params / 1e9) == 235
    idle = model.layers * (model.experts - model.active) * model.expert_params
    assert round((model.params - idle) / 1e9) == 22
    sizes = {"qwen3-8b": 8.2, "qwen3-32b": 32.8, "qwen3-30b-a3b": 30.5}
    for name, billions in sizes.items():
        assert abs(load_model(name).params / 1e9 - billions) < 0.1


EXPERTS = {"num_local_experts": 16, "num_experts_per_tok": 4}


@pytest.mark.parametrize(("kind", "keys", "missing", "expected"), [
    ("mixtral", EXPERTS, "num_local_experts", {"experts": 8, "active": 4}),
    ("mixtral", EXPERTS, "num_experts_per_tok", {"experts": 16, "active": 2}),
    ("mistral", {}, "num_key_value_heads", {"kv_heads": 8}),
    ("llama", {}, "num_key_value_heads", {"kv_heads": 32}),
    ("qwen3", {"num_attention_heads": 16}, "head_dim", {"head_dim": 128, "heads": 16}),
    ("qwen3_moe", {"num_experts_per_tok": 4}, "num_experts", {"experts": 128, "active": 4}),
])  # fmt: skip
def test_missing_key_has_default_of_its_class(
    kind: str, keys: dict[str, int], missing: str, expected: dict[str, int], tmp_path: Path
) -> None:
    """The defaults are those of `MixtralConfig` and the other classes of transformers."""
    config = {**LLAMA, **keys, "model_type": kind}
    config.pop(missing, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path / "config.json")
    assert {field: getattr(model, field) for field in expected} == expected


DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "vocab_size": 129280, "max_position_embeddings": 163840,
}  # fmt: skip


def test_deepseek_config_equals_preset_and_is_counted(tmp_path: Path) -> None:
    """README_WEIGHTS.md of DeepSeek-V3: 671 billion parameters, 36.6 active with the head only."""
    model = load_model(write_config(tmp_path, **DEEPSEEK), sequence=4096)
    assert model == load_model("DeepSeek-V3")
    assert round(model.params / 1e9) == 671
    assert abs((model.active_params - model.embedding_params) / 1e9 - 36.6) < 0.1
    few_queries = load_model(write_config(tmp_path, **{**DEEPSEEK, "q_lora_rank": None}))
    difference = 7168 * 128 * 192 - 1536 * (7168 + 128 * 192) - 1536  # The last term is the norm.
    assert few_queries.attention_params - model.attention_params == difference


def test_planner_refuses_latent_attention(tmp_path: Path) -> None:
    model, cluster = load_model("deepseek-v3-671b"), cluster_preset("h100", nodes=256)
    plan = ParallelPlan(pp=16, dp=128, ep=64, microbatches=32)
    calls: list[Callable[[], Any]] = [
        lambda: planner.plan(model, cluster, 4096),
        lambda: planner.layer_time(model, cluster, plan),
        lambda: planner.estimate_step(model, cluster, plan),
        lambda: planner.peak_memory(model, cluster, plan),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UsageError, match=r"kv_rank 512.*671\.\d billion, 37\.\d+ billion"):
            call()
    with pytest.raises(UsageError, match="dense_layers 62 must be at most layers 61"):
        replace(model, dense_layers=62)
    with pytest.raises(ConfigError, match="qk_nope_head_dim 64"):
        load_model(write_config(tmp_path, **{**DEEPSEEK, "qk_nope_head_dim": 64}))


def test_gpt2_config_keys(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
        "n_inner": None, "vocab_size": 50257,
    }))  # fmt: skip
    model = load_model(path)
    assert (model.ffn, model.kv_heads, model.gated, model.tied) == (3072, 12, False, True)
    assert round(model.params / 1e6) == 124  # "GPT-2 small" has 124 million parameters


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": None}, "has no model_type"),
        ({"model_type": "deepseek_v2"}, "model_type 'deepseek_v2'"),
        ({"model_type": "deepseek_v3"}, "no kv_lora_rank"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers [0]"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ({"num_attention_heads": 48, "num_key_value_heads": 8}, "hidden 4096 is not a multiple of"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"num_hidden_layers": None}, "no value for its required fields: layers"),
        ({"hidden_size": "large"}, "hidden must be an integer"),
    ],
)
def test_unsupported_config_is_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_model(write_config(tmp_path, **changes))
    assert text in str(caught.value)


def test_invalid_value_error_names_file_and_key(tmp_path: Path) -> None:
    path = write_config(tmp_path, hidden_size="4096")
    with pytest.raises(UsageError) as caught:
        load_model(path)
    assert caught.value.fact.startswith(f"model {path}: hidden must be an integer")
    assert caught.value.hint == "the key of the file is hidden_size or n_embd"


def test_unused_sliding_window_is_ignored(tmp_path: Path) -> None:
    path = write_config(tmp_path, model_type="qwen2", sliding_window=4096, use_sliding_window=False)
    assert load_model(path).gated


@pytest.mark.parametrize("text", ["[]", "[" * 100_000])
def test_non_object_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not a JSON object"):
        load_model(path)


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type":\n')
    with pytest.raises(ConfigError, match="line 2, column 1: the file is not JSON") as caught:
        load_model(path)
    assert caught.value.hint == "the file is cut off"


def test_missing_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "hidden_size": 8, "vocab_size": 8}')
    with pytest.raises(UsageError, match="required fields: layers, heads, sequence") as caught:
        load_model(path)
    keys = "num_hidden_layers, num_attention_heads, max_position_embeddings"
    assert caught.value.hint == f"add {keys} to the file, or pass layers=N, heads=N, sequence=N"


def test_model_aliases_find_presets() -> None:
    assert {*MODEL_ALIASES.values()} <= {*MODEL_PRESETS}
    assert [find_preset(name) for name in MODEL_PRESETS] == [*MODEL_PRESETS]
    assert find_preset("LLaMA 3 70B") == find_preset("Llama-3.1-70B") == "llama-3-70b"
    with pytest.raises(UsageError, match="did you mean llama-3-8b"):
        load_model("llama-3")
