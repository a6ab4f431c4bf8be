"""Models by name, with the shapes from papers, and models from files."""

from __future__ import annotations

from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from schedir.errors import ConfigError, UsageError, describe
from schedir.io.files import read_text, require_path
from schedir.io.toml_tables import MAX_TOML_BYTES, parse_toml
from schedir.planner.transformer.transformer_spec import TransformerSpec


def _make_gpt(layers: int, hidden: int, heads: int) -> TransformerSpec:
    """Return a GPT with the vocabulary and the sequence length that Megatron-LM trains with."""
    return TransformerSpec(layers, hidden, heads, vocab=51200, sequence=2048)


def _make_llama(layers: int, hidden: int, heads: int, ffn: int) -> TransformerSpec:
    return TransformerSpec(
        layers, hidden, heads, vocab=32000, sequence=2048, ffn=ffn, gated=True, tied=False
    )


_LLAMA_SOURCE: Final = (
    "arXiv 2302.13971, Table 2; ffn: 8/3 hidden (section 2.2), rounded up to a multiple of 256"
)
# The shape of each model, and the paper and table of its source.
MODEL_PRESETS: Final[dict[str, tuple[TransformerSpec, str]]] = {
    "gpt-22b": (_make_gpt(48, 6144, 64), "arXiv 2205.05198, Table 3"),
    "gpt-175b": (_make_gpt(96, 12288, 96), "GPT-3: arXiv 2205.05198, Table 3"),
    "gpt-530b": (_make_gpt(105, 20480, 128), "MT-NLG: arXiv 2205.05198, Table 3"),
    "gpt-1t": (_make_gpt(128, 25600, 160), "arXiv 2205.05198, Table 3"),
    "llama-7b": (_make_llama(32, 4096, 32, 11008), _LLAMA_SOURCE),
    "llama-65b": (_make_llama(80, 8192, 64, 22016), _LLAMA_SOURCE),
}
SPEC_FIELDS: Final = {f.name: f for f in fields(TransformerSpec)}
# Keys of a `schedir train` configuration that have another name here, and keys that the planner
# does not need.
_KEY_ALIASES: Final = {"context": "sequence"}
_IGNORED_KEYS: Final = ("seed", "dropout", "window", "stride")


def load_model_fields(name: str | Path) -> dict[str, Any]:
    """Return the fields of a model by its name or from a TOML file.

    Args:
        name: The name of a preset, or the path of a `.toml` file. The file has the fields at its
            top level or in its table [model], as a configuration of `schedir train` has.

    Returns:
        The values of the fields that the preset or the file has.

    Raises:
        UsageError: No preset has this name, or the file cannot be read.
        ConfigError: The file has a key that a model cannot have, or attention with a window.

    Example:
        >>> load_model_fields("gpt-175b")["hidden"]
        12288
    """
    if str(name) in MODEL_PRESETS:
        model = MODEL_PRESETS[str(name)][0]
        return {field: getattr(model, field) for field in SPEC_FIELDS}
    path = require_path(name)
    if path.suffix != ".toml":
        near = get_close_matches(str(name), MODEL_PRESETS, 1)
        raise UsageError(
            f"nobody knows a model {describe(str(name))}",
            hint=f"did you mean {near[0]!r}?" if near
            else f"there are {', '.join(MODEL_PRESETS)}, and a file of your own ends in .toml",
            fields=["model"],
        )  # fmt: skip
    tables = parse_toml(read_text(path, MAX_TOML_BYTES), str(path))
    table = tables["model"] if isinstance(tables.get("model"), dict) else tables
    result: dict[str, Any] = {}
    for key, value in table.items():
        field = _KEY_ALIASES.get(key, key)
        if field in SPEC_FIELDS:
            result[field] = value
        elif key == "window" and value != 0:
            raise ConfigError(
                "the planner knows attention over the whole sequence only, and window "
                f"{describe(value)} would take less time and memory than it says",
                location=str(path),
                fields=[key],
            )
        elif key not in _IGNORED_KEYS:
            near = get_close_matches(key, SPEC_FIELDS, 1)
            raise ConfigError(
                f"a model has no {describe(key)}", location=str(path), fields=[key],
                hint=f"did you mean {near[0]!r}?"
                if near else f"there are {', '.join(SPEC_FIELDS)}",
            )  # fmt: skip
    return result


def load_model(name: str | Path, **overrides: Any) -> TransformerSpec:
    """Return a model by its name or from a TOML file.

    Args:
        name: The name of a preset, or the path of a `.toml` file.
        **overrides: Values for fields of `TransformerSpec`. They replace those of the preset or
            file.

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


def build_model(model_fields: dict[str, Any], source: str = "") -> TransformerSpec:
    """Return the model with given fields.

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
            f"{source or 'nobody'} {'says nothing' if source else 'says anything'} of the model's "
            f"{', '.join(missing)}",
            fields=missing,
        )
    return TransformerSpec(**model_fields)
