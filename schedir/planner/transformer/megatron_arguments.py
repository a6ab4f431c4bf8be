"""Read the shape of a transformer from a file with Megatron-LM arguments: a script or a list."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from schedir.errors import ConfigError, describe
from schedir.io.files import read_text

MAX_SCRIPT_BYTES: Final = 1_000_000

# The field of TransformerSpec that each option sets: megatron/training/arguments.py.
_FIELD_BY_OPTION: Final = {
    "num-layers": "layers",
    "hidden-size": "hidden",
    "num-attention-heads": "heads",
    "seq-length": "sequence",
    "vocab-size": "vocab",
    "ffn-hidden-size": "ffn",
    "num-query-groups": "kv_heads",
    "kv-channels": "head_dim",
    "num-experts": "experts",
    "moe-router-topk": "active",
    "moe-ffn-hidden-size": "ffn",
}
# The values of --position-embedding-type. Only the default has a table of learned positions.
_LEARNED_POSITIONS: Final = "learned_absolute"
_OTHER_POSITIONS: Final = ("rope", "yarn", "mrope", "relative", "none")
_UNSUPPORTED: Final = {
    "multi-latent-attention": "latent attention",
    "window-size": "attention with a window",
    "moe-layer-freq": "models in which only some layers have experts",
    "moe-shared-expert-intermediate-size": "shared experts",
    "mtp-num-layers": "multi-token prediction",
    "hybrid-layer-pattern": "layers of state-space models",
    "hybrid-override-pattern": "layers of state-space models",
    "hybrid-attention-ratio": "layers of state-space models",
    "is-hybrid-model": "layers of state-space models",
    "experimental-attention-variant": "linear attention and sparse attention",
    "heterogeneous-layers-config-path": "layers of different sizes",
}
# Values of unsupported options that have no effect.
_NEUTRAL_VALUES: Final = {"moe-layer-freq": ("1",), "mtp-num-layers": ("0",)}
_ASSIGNMENT: Final = re.compile(
    r"^\s*(?:export\s+)?(\w+)=[\"']?(?:\$\{\w+:-)?(\d+)\b", re.MULTILINE
)
_VARIABLE: Final = re.compile(r"\$\{?(\w+)\}?")
# Text that contains no arguments: comments, and lines with `echo` or `printf`.
_NOT_ARGUMENTS: Final = re.compile(r"(?:(?<!\S)#|^\s*(?:echo|printf)\s).*$", re.MULTILINE)
# An option, and its value if it has one: "--a 1", "--a=1", or "--a: 1" of a YAML file.
_OPTION: Final = re.compile(
    r"(?<![^\s\"'=(])--([a-z][a-z0-9-]*)[\"']?(?:[=:]?\s*(?!-|\\|\w+\+?=)([^\s\\)]+))?"
)


def read_megatron_arguments(path: Path) -> dict[str, Any]:
    """Return the fields of a model from a file with arguments of Megatron-LM.

    The file is a script that starts Megatron-LM, or a list of its arguments. The value of an option
    is a number, or a shell variable to which the file assigns a number. All other text is ignored,
    including the conditions of `if`. If `--vocab-size` is missing, Megatron-LM takes the vocabulary
    from the tokenizer, and the result has no `vocab`.

    Args:
        path: The path of the file.

    Returns:
        Values of the fields of `TransformerSpec`.

    Raises:
        UsageError: The file cannot be read.
        ConfigError: The file has no `--num-layers`, the value of an option is not a number, the
            file has different values of an option, or the planner does not support the model.
    """
    text = _NOT_ARGUMENTS.sub("", read_text(path, MAX_SCRIPT_BYTES))
    found = [(match[1], match[2] or "") for match in _OPTION.finditer(text)]
    options = {name: value for name, value in found if value.lower() != "false"}
    if "num-layers" not in options:
        raise ConfigError(
            "the file has no --num-layers",
            hint="a file with arguments of Megatron-LM has --num-layers, --hidden-size, "
            "--num-attention-heads and --seq-length",
            location=str(path),
            fields=["model"],
        )
    for option, reason in _UNSUPPORTED.items():
        if option in options and options[option] not in _NEUTRAL_VALUES.get(option, ()):
            raise ConfigError(
                f"the planner does not support {reason}: --{option}",
                location=str(path),
                fields=[option],
            )
    assignments: dict[str, set[str]] = defaultdict(set)
    for variable, number in _ASSIGNMENT.findall(text):
        assignments[variable].add(number)
    fields: dict[str, Any] = {
        "gated": "swiglu" in options,
        "rotary": _has_rotary_positions(options, path),
        "tied": "untie-embeddings-and-output-weights" not in options,
    }
    for option, field in _FIELD_BY_OPTION.items():
        if option in options:
            texts = [value for name, value in found if name == option]
            fields[field] = _parse_number(option, texts, assignments, path)
    if "group-query-attention" not in options:
        fields.pop("kv_heads", None)
    elif "kv_heads" not in fields:
        fields["kv_heads"] = 1
    if fields["gated"] and "hidden" in fields:
        # `validate_args` of Megatron-LM: 2/3 of 4 hidden, rounded down to a multiple of 64.
        fields.setdefault("ffn", 8 * fields["hidden"] // 3 // 64 * 64)
    if "experts" in fields:
        fields.setdefault("active", 2)  # The default of --moe-router-topk.
    return fields


def _has_rotary_positions(options: Mapping[str, str], path: Path) -> bool:
    """Return whether positions have no learned embeddings."""
    # Megatron-LM replaces this older option by --position-embedding-type rope.
    default = "rope" if "use-rotary-position-embeddings" in options else _LEARNED_POSITIONS
    kind = options.get("position-embedding-type", default).strip("\"',;")
    if kind not in (_LEARNED_POSITIONS, *_OTHER_POSITIONS):
        raise ConfigError(
            f"--position-embedding-type is {describe(kind)}, which is no type of positions",
            hint=f"the types are {', '.join((_LEARNED_POSITIONS, *_OTHER_POSITIONS))}",
            location=str(path),
            fields=["position-embedding-type"],
        )
    return kind != _LEARNED_POSITIONS


def _parse_number(
    option: str, texts: list[str], assignments: Mapping[str, Collection[str]], path: Path
) -> int:
    """Return the value of an option as a number.

    `texts` has the value of each occurrence of the option. `assignments` has, for each variable,
    the numbers that the file assigns to this variable.
    """
    numbers: set[int] = set()
    for text in texts:
        plain = text.strip("\"',;")
        variable = _VARIABLE.fullmatch(plain)
        assigned = assignments.get(variable[1]) if variable else None
        for number in assigned or [plain]:
            if not number.isdecimal() or len(number) > 18:
                raise ConfigError(
                    f"--{option} is {describe(text)}, which is not a number",
                    hint="write the number, or assign it to the variable in this file",
                    location=str(path),
                    fields=[option],
                )
            numbers.add(int(number))
    if len(numbers) > 1:
        raise ConfigError(
            f"the file has {len(numbers)} values of --{option}: "
            + ", ".join(map(str, sorted(numbers))),
            hint="write the arguments of one run to a file of their own",
            location=str(path),
            fields=[option],
        )
    return numbers.pop()
