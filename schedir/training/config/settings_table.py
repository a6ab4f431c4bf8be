"""The settings that each section of a configuration takes.

Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from inspect import getdoc
from typing import Any, Final, NamedTuple, get_type_hints

from schedir.errors import UsageError, describe
from schedir.retired_names import RETIRED
from schedir.training.config.model_kinds import KINDS
from schedir.training.config.run_config import Config
from schedir.training.config.setting_types import describe_type
from schedir.training.config.train_config import CHOICES


def sections_of(kind: object) -> dict[str, type]:
    """By name, the class of each section, where the model is of a kind.  Raises UsageError for one
    that is not known."""
    if not isinstance(kind, str) or kind not in KINDS:
        hint = RETIRED.get(f"kind = {kind}", " or ".join(KINDS))
        raise UsageError(f"kind {describe(kind)} is not known", hint=hint, fields=["kind"])
    return get_type_hints(Config) | {"model": KINDS[kind].config}


def types_of(section: type) -> dict[str, Any]:
    """By name, the types of a section's settings."""
    kind = {"kind": str} if section in {one.config for one in KINDS.values()} else {}
    return kind | get_type_hints(section, include_extras=True)


# By name, the class of each section, and the types of its settings.
SECTIONS: Final = sections_of("gpt")


class Setting(NamedTuple):
    """A setting of a section: what it takes, in words, and its default, as in TOML or in words."""

    name: str
    takes: str
    default: str


def settings() -> dict[str, tuple[str, list[Setting]]]:
    """By section, what it is about and its settings; that of the model of each kind."""
    found = {section: _settings_of(kind) for section, kind in SECTIONS.items()}
    found["model"][1].insert(0, Setting("kind", _one_of(KINDS), _toml("gpt")))
    others = {f"model of kind {name}": _settings_of(kind.config) for name, kind in KINDS.items()}
    del others["model of kind gpt"]
    return {"model": found["model"]} | others | found


def heading(section: str) -> str:
    """How a section of `settings` is called.

    >>> heading("model of kind llama")
    '[model] of kind llama'
    """
    name, space, kind = section.partition(" ")
    return f"[{name}]{space}{kind}"


def _settings_of(section: type[Any]) -> tuple[str, list[Setting]]:
    types = types_of(section)
    return str(getdoc(section)), [
        Setting(
            f.name,
            _one_of(CHOICES[f.name]) if f.name in CHOICES else describe_type(types[f.name]),
            f.metadata.get("default", _toml(f.default)),
        )
        for f in fields(section)
    ]


def _one_of(choices: Iterable[str]) -> str:
    """What a setting takes, in words."""
    *others, last = map(json.dumps, choices)
    return f"{', '.join(others)} or {last}"


def _toml(value: Any) -> str:
    """A default as it would be written; nothing where there is none."""
    return "" if value is None else json.dumps(list(value) if isinstance(value, tuple) else value)
