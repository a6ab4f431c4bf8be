"""Tests of models from launch scripts of Megatron-LM, and from jobs of torchtitan."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedir.errors import ConfigError, UsageError
from schedir.planner import TransformerSpec, load_model

SCRIPT = r"""#!/bin/bash
SEQ=8192
# --num-layers 7 is a comment
GPT_MODEL_ARGS=(
    --num-layers 32 \
    --hidden-size=4096
    --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --ffn-hidden-size "14336"
    --seq-length ${SEQ}
    --max-position-embeddings $SEQ
    --untie-embeddings-and-output-weights
    --swiglu
    --position-embedding-type rope
    --lr -0.5
    --vocab-size 128000
)
torchrun pretrain_gpt.py ${GPT_MODEL_ARGS[@]}
"""
LLAMA = load_model("llama-3-8b")


def read_model(folder: Path, text: str, name: str = "train.sh") -> TransformerSpec:
    path = folder / name
    path.write_text(text)
    return load_model(path)


def test_launch_script_gives_preset_model(tmp_path: Path) -> None:
    assert read_model(tmp_path, SCRIPT) == LLAMA
    listed = " ".join(SCRIPT.replace("\\", "").partition("(")[2].partition(")")[0].split())
    assert read_model(tmp_path, f"SEQ=8192\n{listed}", "args.txt") == LLAMA
    yaml = "\n".join(
        ("MODEL_ARGS:", "  --num-layers: 2", "  --hidden-size: 64", "  --num-attention-heads: 4",
         "  --seq-length: 32", "  --vocab-size: 100", "  --swiglu: true",
         "  --position-embedding-type: rope",
         "  --group-query-attention: false")
    )  # fmt: skip
    assert read_model(tmp_path, yaml, "model.yaml") == TransformerSpec(
        2, 64, 4, vocab=100, sequence=32, gated=True, ffn=128
    )


@pytest.mark.parametrize(
    "second",
    [
        "if large; then\n  --num-layers 48\nfi",
        "LAYERS=32\nif large; then\n  LAYERS=48\nfi\n--num-layers $LAYERS",
    ],
)
def test_conflicting_option_values_are_refused(tmp_path: Path, second: str) -> None:
    """The reader does not know which branch of a script runs."""
    with pytest.raises(ConfigError, match="2 values of --num-layers: 32, 48") as caught:
        read_model(tmp_path, f"{SCRIPT}\n{second}")
    assert caught.value.fields == ("num-layers",)
    assert read_model(tmp_path, f"{SCRIPT}\n--num-layers 32") == LLAMA


def test_megatron_defaults_are_used(tmp_path: Path) -> None:
    base = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 100"
    )
    plain = read_model(tmp_path, base)
    assert (plain.ffn, plain.kv_heads, plain.gated, plain.tied) == (256, 4, False, True)
    assert read_model(tmp_path, f"{base} --num-query-groups 2").kv_heads == 4
    assert read_model(tmp_path, f"{base} --group-query-attention").kv_heads == 1
    experts = read_model(tmp_path, f"{base} --num-experts 8 --moe-ffn-hidden-size 48")
    assert (experts.experts, experts.active, experts.ffn) == (8, 2, 48)
    assert read_model(tmp_path, f"{base} --num-experts 8 --moe-layer-freq 1").experts == 8
    wide = base.replace("--hidden-size 64", "--hidden-size 4096")
    assert read_model(tmp_path, f"{wide} --swiglu").ffn == 10880  # int(4 * 4096 * 2/3 / 64) * 64
    assert read_model(tmp_path, f"{wide} --swiglu --ffn-hidden-size 128").ffn == 128


def test_comments_and_printed_text_are_ignored(tmp_path: Path) -> None:
    """Comments and printed lines set nothing. An option at the start of a string is read."""
    commented = SCRIPT.replace("--lr -0.5", "--lr -0.5  # not --num-layers 7 --num-experts 8")
    assert (
        read_model(tmp_path, f'echo "--num-layers 9"\n{commented}\n  printf --hidden-size 9')
        == LLAMA
    )
    strings = '--num-layers 2"\nB="--hidden-size 64"\nC=\'--num-attention-heads 4 --swiglu\''
    arrays = "(--seq-length 32 --vocab-size 100)"
    assert read_model(tmp_path, f'A="{strings}\nD={arrays}') == TransformerSpec(
        2, 64, 4, vocab=100, sequence=32, gated=True, rotary=False, ffn=128
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("--num-layers 32", "", "the file has no --num-layers"),
        ("--num-layers 32", "--num-layers $LAYERS", "--num-layers is '.LAYERS'"),
        ("--hidden-size=4096", "--hidden-size", "--hidden-size is ''"),
        ("--swiglu", "--multi-latent-attention", "does not support latent attention"),
        ("--swiglu", "--mtp-num-layers 1", "does not support multi-token prediction"),
        ("--swiglu", "--moe-layer-freq 2", "only some layers have experts"),
        ("--swiglu", "--hybrid-layer-pattern M*M-", "does not support layers of state-space"),
        ("--swiglu", "--experimental-attention-variant dsa", "linear attention and sparse"),
        ("--vocab-size 128000", "", "has no value for its required fields: vocab"),
    ],
)
def test_unsupported_or_missing_options_are_refused(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    with pytest.raises((ConfigError, UsageError), match=message):
        read_model(tmp_path, SCRIPT.replace(old, new))


def test_torchtitan_job_gives_preset_model(tmp_path: Path) -> None:
    job = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 4096\n'
    model = read_model(tmp_path, job, "job.toml")
    assert (model.sequence, model.layers, model.ffn) == (4096, LLAMA.layers, LLAMA.ffn)
    with pytest.raises(ConfigError, match="no model preset for torchtitan's 'llama3-debugmodel'"):
        read_model(tmp_path, job.replace("8B", "debugmodel"), "job.toml")
