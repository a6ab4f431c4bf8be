"""Tests that the planner counts the parameters of models as their publishers do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedir.errors import ConfigError
from schedir.planner import ParallelPlan, TransformerSpec, load_model
from schedir.planner.plan_compilation import build_pipeline_shape
from schedir.planner.transformer.memory_estimate import count_end_params
from schedir.planner.transformer.model_presets import MODEL_PRESETS
from schedir.planner.transformer.stage_sizes import count_stage_params, count_stage_replicated

# Billions of parameters: SC21 (arXiv 2104.04473), arXiv 2205.05198, arXiv 2302.13971, and the model
# cards of the other models.
PRESET_BILLIONS = {
    "gpt-22b": 22, "gpt-175b": 174.6, "gpt-530b": 529.6, "gpt-1t": 1008.0, "llama-7b": 6.7,
    "llama-65b": 65.2, "llama-3-8b": 8.03, "llama-3-70b": 70.6, "llama-3-405b": 406,
    "mixtral-8x7b": 46.7, "qwen3-8b": 8.19, "qwen3-32b": 32.8, "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235, "deepseek-v3-671b": 671,
}  # fmt: skip
LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256,
         "max_position_embeddings": 131072}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_positions": 1024, "vocab_size": 50257}
# Name -> (`config.json`, number of elements of the weights that the publisher distributes).
CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-3.2-1B": (
        {**LLAMA, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
         "intermediate_size": 8192, "head_dim": 64, "tie_word_embeddings": True}, 1_235_814_400),
    "Llama-3.2-3B": (
        {**LLAMA, "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24,
         "intermediate_size": 8192, "head_dim": 128, "tie_word_embeddings": True}, 3_212_749_824),
    "Llama-3.1-8B": (
        {**LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "intermediate_size": 14336}, 8_030_261_248),
    "Mistral-7B-v0.3": (
        {**LLAMA, "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32,
         "num_attention_heads": 32, "intermediate_size": 14336, "vocab_size": 32768,
         "max_position_embeddings": 32768, "sliding_window": None}, 7_248_023_552),
    "Qwen2.5-0.5B": (
        {"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
         "vocab_size": 151936, "max_position_embeddings": 32768, "sliding_window": 32768,
         "use_sliding_window": False, "tie_word_embeddings": True}, 494_032_768),
    "Qwen3-0.6B": (
        {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
         "intermediate_size": 3072, "vocab_size": 151936, "max_position_embeddings": 40960,
         "tie_word_embeddings": True}, 596_049_920),
    "GPT-2 small": ({**GPT2, "n_embd": 768, "n_layer": 12, "n_head": 12}, 124_439_808),
    "GPT-2 XL": ({**GPT2, "n_embd": 1600, "n_layer": 48, "n_head": 25}, 1_557_611_200),
}  # fmt: skip
SMALL = TransformerSpec(layers=4, hidden=64, heads=4, vocab=256, sequence=96)
SCRIPT = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 100"


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_presets_have_published_parameters(name: str) -> None:
    assert load_model(name).params / 1e9 == pytest.approx(PRESET_BILLIONS[name], rel=0.01)


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_have_published_parameters(name: str, tmp_path: Path) -> None:
    config, published = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(tmp_path / "config.json").params == pytest.approx(published, rel=0.01)


def test_rotary_positions_have_no_parameters_anywhere() -> None:
    """The first stage, its replicated weights and the embedding lack the same parameters."""
    learned, rotary = SMALL, replace(SMALL, rotary=True)
    assert learned.position_params == 96 * 64 and rotary.position_params == 0
    assert learned.params - rotary.params == 96 * 64
    plan = ParallelPlan(pp=2, tp=2, microbatches=2, sequence_parallel=True)
    shape = build_pipeline_shape(plan)
    stages, replicated, ends = (
        [count_stage_params(model, plan, shape).common for model in (learned, rotary)],
        [count_stage_replicated(model, plan).common for model in (learned, rotary)],
        [np.array(count_end_params(model, 2)) for model in (learned, rotary)],
    )
    for pair in (stages, replicated):
        assert (pair[0] - pair[1]).tolist() == [96 * 64, 0]
    assert (ends[0] - ends[1]).tolist() == [96 * 64, 0, 0]


def test_gated_model_is_rotary_by_default() -> None:
    sizes: dict[str, Any] = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 256, "sequence": 96}
    assert TransformerSpec(**sizes, gated=True).rotary is True
    assert TransformerSpec(**sizes, gated=True, rotary=False).position_params == 96 * 64


@pytest.mark.parametrize(("arguments", "is_rotary"), [
    ("", False), ("--swiglu", False), ("--position-embedding-type learned_absolute", False),
    ("--position-embedding-type rope", True), ("--position-embedding-type 'yarn'", True),
    ("--use-rotary-position-embeddings", True), ("--position-embedding-type none", True),
])  # fmt: skip
def test_megatron_arguments_select_positions(
    arguments: str, is_rotary: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.sh").write_text(f"{SCRIPT} {arguments}")
    assert load_model(tmp_path / "train.sh").rotary is is_rotary


def test_unknown_position_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(f"{SCRIPT} --position-embedding-type $KIND")
    with pytest.raises(ConfigError, match=r"--position-embedding-type is '\$KIND'"):
        load_model(tmp_path / "train.sh")
