"""The settings of each section of a configuration. Needs no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import fields
from inspect import getdoc
from typing import Any, Final, NamedTuple, get_type_hints

from schedir.errors import UsageError, describe
from schedir.ir.program import ATTRIBUTE_FIELDS
from schedir.passes.pass_registry import PASS_OPTIONS
from schedir.retired_names import RETIRED_HINTS
from schedir.training.config.model_kinds import MODEL_KINDS
from schedir.training.config.run_config import Config
from schedir.training.config.setting_types import describe_type
from schedir.training.config.train_config import SETTING_CHOICES


def get_section_classes(model_kind: object) -> dict[str, type]:
    """Return the class of each section, by name.

    Args:
        model_kind: The kind of model, which decides the class of [model].

    Raises:
        UsageError: The kind is unknown.
    """
    if not isinstance(model_kind, str) or model_kind not in MODEL_KINDS:
        hint = RETIRED_HINTS.get(f"kind = {model_kind}", " or ".join(MODEL_KINDS))
        raise UsageError(f"kind {describe(model_kind)} is not known", hint=hint, fields=["kind"])
    return get_type_hints(Config) | {"model": MODEL_KINDS[model_kind].config_class}


def get_setting_types(section: type) -> dict[str, Any]:
    """Return the type of each setting of a section, by name.

    Args:
        section: The class of the section.
    """
    kind = (
        {"kind": str}
        if section in {model_kind.config_class for model_kind in MODEL_KINDS.values()}
        else {}
    )
    return kind | get_type_hints(section, include_extras=True)


# The class of each section by name, for a model of kind gpt.
SECTION_CLASSES: Final = get_section_classes("gpt")


# Name of a program field or a pass option -> its help.
_OPTION_HELP: Final = {f.name: f.help for f in ATTRIBUTE_FIELDS} | {
    name: text for name, (_, text) in PASS_OPTIONS.items()
}


class Setting(NamedTuple):
    """A setting of a section.

    Args:
        name: The name of the setting.
        accepted: A text with the values that the setting accepts.
        default: The default as in TOML, or a text that describes it. "" if there is no default.
        meaning: The meaning, from the docstring of the section, or else the help of the option. ""
            if both are missing.
    """

    name: str
    accepted: str
    default: str
    meaning: str


def list_settings() -> dict[str, tuple[str, list[Setting]]]:
    """Return the docstring and the settings of each section, by name.

    Returns:
        The sections. The section "model" is for a GPT. Each other kind of model has a section
        "model of kind NAME".
    """
    settings = {section: _list_section_settings(kind) for section, kind in SECTION_CLASSES.items()}
    settings["model"][1].insert(
        0,
        Setting(
            "kind",
            _describe_choices(MODEL_KINDS),
            _format_default("gpt"),
            "The kind of the model.",
        ),
    )
    other_settings = {
        f"model of kind {name}": _list_section_settings(kind.config_class)
        for name, kind in MODEL_KINDS.items()
    }
    del other_settings["model of kind gpt"]
    return {"model": settings["model"]} | other_settings | settings


def split_docstring(about: str) -> tuple[str, dict[str, str]]:
    """Return the prose of a section's docstring, and the meaning of each setting by name.

    Args:
        about: The docstring, with an entry for each setting in `Args` or in a list.
    """
    prose, has_args, args = about.partition("\n\nArgs:\n")
    if has_args:
        args_text = re.split(r"^\S", args, maxsplit=1, flags=re.MULTILINE)[0]
        _, *items = re.split(r"^    (\w+): ", args_text, flags=re.MULTILINE)
    else:
        prose, *items = re.split(r"^- `(\w+)`: ", about, flags=re.MULTILINE)
    return prose.strip(), dict(zip(items[::2], map(str.strip, items[1::2]), strict=True))


def format_heading(section: str) -> str:
    """Return the heading of a section of `list_settings`.

    Args:
        section: The name of the section.

    Example:
        >>> format_heading("model of kind llama")
        '[model] of kind llama'
    """
    name, space, kind = section.partition(" ")
    return f"[{name}]{space}{kind}"


def _list_section_settings(section: type[Any]) -> tuple[str, list[Setting]]:
    types = get_setting_types(section)
    meanings: dict[str, str] = {}
    for base in reversed(section.__mro__):  # A docstring has only the settings that a class adds.
        meanings |= split_docstring(str(getdoc(base)))[1]
    return str(getdoc(section)), [
        Setting(
            f.name,
            _describe_choices(SETTING_CHOICES[f.name])
            if f.name in SETTING_CHOICES
            else describe_type(types[f.name]),
            f.metadata.get("default", _format_default(f.default)),
            meanings.get(f.name) or _OPTION_HELP.get(f.name, ""),
        )
        for f in fields(section)
    ]


def _describe_choices(choices: Iterable[str]) -> str:
    *others, last = map(json.dumps, choices)
    return f"{', '.join(others)} or {last}"


def _format_default(value: Any) -> str:
    """Return a default as in TOML, or "" for None."""
    return "" if value is None else json.dumps(list(value) if isinstance(value, tuple) else value)
