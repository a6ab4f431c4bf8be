"""Load models from files, or from presets with the shapes of published models."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from schedir.errors import CommandHint, ConfigError, UsageError, describe
from schedir.io.files import read_text, require_path
from schedir.io.toml_tables import MAX_TOML_BYTES, parse_toml, suggest_field
from schedir.planner.transformer.huggingface_config import (
    describe_keys,
    describe_missing_keys,
    read_huggingface_config,
)
from schedir.planner.transformer.megatron_arguments import read_megatron_arguments
from schedir.planner.transformer.transformer_spec import TransformerSpec


def _make_gpt(layers: int, hidden: int, heads: int) -> TransformerSpec:
    """Return a GPT with the vocabulary and the sequence length of Megatron-LM's papers."""
    return TransformerSpec(layers, hidden, heads, vocab=51200, sequence=2048)


def _make_llama(layers: int, hidden: int, heads: int, ffn: int) -> TransformerSpec:
    return TransformerSpec(
        layers, hidden, heads, vocab=32000, sequence=2048, ffn=ffn, gated=True, tied=False
    )


def _make_llama3(layers: int, hidden: int, heads: int, ffn: int) -> TransformerSpec:
    return TransformerSpec(
        layers, hidden, heads, vocab=128_000, sequence=8192, ffn=ffn, kv_heads=8, gated=True,
        tied=False,
    )  # fmt: skip


def _make_qwen3(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, experts: int = 1
) -> TransformerSpec:
    return TransformerSpec(
        layers, hidden, heads, vocab=151_936, sequence=4096, ffn=ffn, kv_heads=kv_heads,
        head_dim=128, gated=True, experts=experts, active=8 if experts > 1 else 1, tied=False,
    )  # fmt: skip


_QWEN3_SOURCE: Final = (
    "arXiv 2505.09388, Tables 1 and 2, and section 3.2 for the sequence of 4096; hidden, ffn and "
    "head_dim: github.com/THUDM/slime, scripts/models"
)
_LLAMA3_SOURCE: Final = "arXiv 2407.21783, Table 3, and section 3.4.1 for the sequence of 8192"
_LLAMA_SOURCE: Final = (
    "arXiv 2302.13971, Table 2; ffn: 8/3 hidden (section 2.2), rounded up to a multiple of 256"
)
# Name of a preset -> (the shape of the model, the paper and table of its source).
MODEL_PRESETS: Final[dict[str, tuple[TransformerSpec, str]]] = {
    "gpt-22b": (_make_gpt(48, 6144, 64), "arXiv 2205.05198, Table 3"),
    "gpt-175b": (_make_gpt(96, 12288, 96), "GPT-3: arXiv 2205.05198, Table 3"),
    "gpt-530b": (_make_gpt(105, 20480, 128), "MT-NLG: arXiv 2205.05198, Table 3"),
    "gpt-1t": (_make_gpt(128, 25600, 160), "arXiv 2205.05198, Table 3"),
    "llama-7b": (_make_llama(32, 4096, 32, 11008), _LLAMA_SOURCE),
    "llama-65b": (_make_llama(80, 8192, 64, 22016), _LLAMA_SOURCE),
    "llama-3-8b": (_make_llama3(32, 4096, 32, 14336), _LLAMA3_SOURCE),
    "llama-3-70b": (_make_llama3(80, 8192, 64, 28672), _LLAMA3_SOURCE),
    "llama-3-405b": (_make_llama3(126, 16384, 128, 53248), _LLAMA3_SOURCE),
    "mixtral-8x7b": (
        TransformerSpec(
            32, 4096, 32, vocab=32000, sequence=32768, ffn=14336, kv_heads=8, gated=True,
            experts=8, active=2, tied=False,
        ),
        "arXiv 2401.04088, Table 1",
    ),
    "qwen3-8b": (_make_qwen3(36, 4096, 32, 8, 12288), _QWEN3_SOURCE),
    "qwen3-32b": (_make_qwen3(64, 5120, 64, 8, 25600), _QWEN3_SOURCE),
    "qwen3-30b-a3b": (_make_qwen3(48, 2048, 32, 4, 768, 128), _QWEN3_SOURCE),
    "qwen3-235b-a22b": (_make_qwen3(94, 4096, 64, 4, 1536, 128), _QWEN3_SOURCE),
    "deepseek-v3-671b": (
        TransformerSpec(
            61, 7168, 128, vocab=129_280, sequence=4096, ffn=2048, head_dim=128, gated=True,
            experts=256, active=8, tied=False, shared_experts=1, dense_layers=3, dense_ffn=18432,
            query_rank=1536, kv_rank=512, rope_dim=64,
        ),
        "arXiv 2412.19437, section 4.2; vocab and dense_ffn: config.json of deepseek-ai/DeepSeek-V3"
        " at huggingface.co. The planner computes the number of parameters "
        "of this model, but no plans",
    ),
}  # fmt: skip
# Other name of a model -> name of the preset. Names are compared without case, spaces, "-", "_" and
# ".".
MODEL_ALIASES: Final = {
    "gpt3": "gpt-175b",
    "gpt3175b": "gpt-175b",
    "mtnlg": "gpt-530b",
    "mtnlg530b": "gpt-530b",
    "llama17b": "llama-7b",
    "llama165b": "llama-65b",
    "llama38b": "llama-3-8b",
    "llama318b": "llama-3-8b",
    "metallama38b": "llama-3-8b",
    "llama370b": "llama-3-70b",
    "llama3170b": "llama-3-70b",
    "llama3405b": "llama-3-405b",
    "llama31405b": "llama-3-405b",
    "mixtral": "mixtral-8x7b",
    "qwen330b": "qwen3-30b-a3b",
    "qwen3235b": "qwen3-235b-a22b",
    "deepseekv3": "deepseek-v3-671b",
    "deepseek671b": "deepseek-v3-671b",
}
SPEC_FIELDS: Final = {f.name: f for f in fields(TransformerSpec)}
# Key of a `schedir train` configuration -> field of `TransformerSpec`. The planner does not need
# the keys in `_IGNORED_KEYS`.
_KEY_ALIASES: Final = {"context": "sequence"}
# Suffixes of files that may have arguments of Megatron-LM.
_ARGUMENT_SUFFIXES: Final = (".sh", ".txt", ".yaml", ".yml")
_IGNORED_KEYS: Final = ("seed", "dropout", "window", "stride")


def find_preset(name: str) -> str:
    """Return the name of the preset of a model, or "" if there is none.

    Args:
        name: The name of the preset, or another name of the model.

    Example:
        >>> find_preset("GPT-3"), find_preset("Llama-3.1-8B"), find_preset("gpt-4")
        ('gpt-175b', 'llama-3-8b', '')
    """
    if name in MODEL_PRESETS:
        return name
    plain = re.sub(r"[-_. ]", "", name.lower())
    by_plain_name = {re.sub(r"[-_. ]", "", preset): preset for preset in MODEL_PRESETS}
    return {**by_plain_name, **MODEL_ALIASES}.get(plain, "")


def load_model_fields(name: str | Path) -> dict[str, Any]:
    """Return the fields of a model from a preset or a file.

    Args:
        name: The name of a preset, or the path of a file. The file is a `.toml` file, the
            `config.json` of a Hugging Face model, or a file with arguments of Megatron-LM (`.sh`,
            `.txt`, `.yaml` or `.yml`). A `.toml` file has the fields at its top level, or in a
            table [model], as in a configuration of `schedir train`. If [model] has a `flavor`, the
            file is a job of torchtitan. The result is then the preset of this flavor, with the
            sequence length of [training].

    Returns:
        The values of the fields that the preset or the file has.

    Raises:
        UsageError: No preset has this name, or the file cannot be read.
        ConfigError: The file has a key that a model cannot have, or a model that the planner does
            not support.

    Example:
        >>> load_model_fields("gpt-175b")["hidden"]
        12288
    """
    if preset := find_preset(str(name)):
        model = MODEL_PRESETS[preset][0]
        return {field: getattr(model, field) for field in SPEC_FIELDS}
    path = require_path(name)
    if path.suffix == ".json":
        return read_huggingface_config(path)
    if path.suffix in _ARGUMENT_SUFFIXES:
        return read_megatron_arguments(path)
    if path.suffix != ".toml":
        matches = get_close_matches(str(name), MODEL_PRESETS, 3)
        raise UsageError(
            f"there is no model preset {describe(str(name))}",
            hint=(f"did you mean {' or '.join(matches)}? " if matches else "")
            + f"The presets are {', '.join(MODEL_PRESETS)}; FILE.toml, the config.json of a "
            "Hugging Face model, and a script.sh with arguments of Megatron-LM work, too",
            fields=["model"],
        )
    tables = parse_toml(read_text(path, MAX_TOML_BYTES), str(path))
    table = tables["model"] if isinstance(tables.get("model"), dict) else tables
    if "flavor" in table:
        return _read_torchtitan_job(tables, table, path)
    result: dict[str, Any] = {}
    for key, value in table.items():
        field = _KEY_ALIASES.get(key, key)
        if field in SPEC_FIELDS:
            result[field] = value
        elif key == "window" and value != 0:
            raise ConfigError(
                f"the planner does not support attention with window {describe(value)}",
                hint="window = 0 plans full attention, which needs more time and memory",
                location=str(path),
                fields=[key],
            )
        elif key not in _IGNORED_KEYS:
            raise ConfigError(
                f"a model has no field {describe(key)}", location=str(path), fields=[key],
                hint=suggest_field(key, tables, SPEC_FIELDS),
            )  # fmt: skip
    return result


def _read_torchtitan_job(
    tables: dict[str, Any], table: dict[str, Any], path: Path
) -> dict[str, Any]:
    """Return the fields of the model that a torchtitan job names by `name` and `flavor`."""
    name = f"{table.get('name', '')}-{table['flavor']}"
    preset = find_preset(name)
    if not preset:
        raise ConfigError(
            f"there is no model preset for torchtitan's {describe(name)}",
            hint=f"the presets are {', '.join(MODEL_PRESETS)}; write other models as FILE.toml "
            "with the fields of the model",
            location=str(path),
            fields=["flavor"],
        )
    training = tables.get("training")
    sequence = training.get("seq_len") if isinstance(training, dict) else None
    return {**load_model_fields(preset), **({} if sequence is None else {"sequence": sequence})}


def load_model(name: str | Path, **overrides: Any) -> TransformerSpec:
    """Load a model from a preset or a file.

    Args:
        name: The name of a preset or the path of a file, as in `load_model_fields`.
        **overrides: Values for fields of `TransformerSpec`. They replace the values of the preset
            or file.

    Raises:
        UsageError: See `load_model_fields` and `TransformerSpec`. Also if a required field is
            missing.
        ConfigError: See `load_model_fields`.

    Example:
        >>> from schedir.planner import load_model
        >>> load_model("gpt-175b", sequence=8192).sequence
        8192
    """
    return build_model({**load_model_fields(name), **overrides}, str(name))


def _describe_missing_fields(source: str, missing: Sequence[str]) -> CommandHint:
    """Return a hint with the ways to give the fields that a model lacks."""
    options = " ".join(f"--{field} N" for field in missing)
    arguments = ", ".join(f"{field}=N" for field in missing)
    in_file = ""
    if source.endswith(".json"):
        in_file = f"{describe_missing_keys(missing)}, or "
    elif source.endswith(_ARGUMENT_SUFFIXES) and missing == ["vocab"]:
        in_file = "add --vocab-size N to the file, or "
    return CommandHint(f"{in_file}pass {arguments}", f"{in_file}give {options}")


def build_model(model_fields: dict[str, Any], source: str = "") -> TransformerSpec:
    """Build a model from the values of its fields.

    Args:
        model_fields: Values of the fields of `TransformerSpec`.
        source: The name or path of the model, for the error message.

    Raises:
        UsageError: A required field is missing, or has an invalid value.
    """
    missing = [
        name for name, f in SPEC_FIELDS.items() if f.default is MISSING and name not in model_fields
    ]
    if missing:
        raise UsageError(
            f"{f'model {source}' if source else 'the model'} has no value for its required fields: "
            f"{', '.join(missing)}",
            hint=_describe_missing_fields(source, missing),
            fields=missing,
        )
    try:
        return TransformerSpec(**model_fields)
    except UsageError as error:
        if source:
            error.fact = error.fact.replace("model: ", f"model {source}: ", 1)
        if source.endswith(".json") and not error.hint:
            error.hint = describe_keys(error.fields[0])
        raise
