"""Read the configuration of a training run from TOML and `--set`.

Whatever is wrong with it is refused here, and told where it stands, before a process starts.  Needs
no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from schedir.errors import ConfigError, SchedirError, ShapeError, describe
from schedir.io.files import read_text
from schedir.io.program_request import Request
from schedir.io.source_loader import Source
from schedir.io.toml_tables import MOST_BYTES, tables_of
from schedir.ir.input_trust import most_of_a_file
from schedir.ir.pipeline.pipeline_shape import SHAPE_FIELDS
from schedir.ir.program import HEADER, TRAITS, Program
from schedir.passes.pass_registry import OPTIONS, SECTION_OF
from schedir.retired_names import RETIRED
from schedir.training.config.model_kinds import KINDS
from schedir.training.config.run_config import Config, PipelineConfig, contradicts
from schedir.training.config.setting_types import coerce, describe_type
from schedir.training.config.settings_table import SECTIONS, sections_of, types_of


class _SettingValue(NamedTuple):
    """A setting as it was found: its value, and where."""

    value: Any
    where: str
    line: int = 0
    column: int = 0

    def error(self, fact: str, hint: str = "", fields: Sequence[str] = ()) -> ConfigError:
        return ConfigError(
            fact, where=self.where, line=self.line, column=self.column, hint=hint, fields=fields
        )


# By section and name.
_Settings = dict[tuple[str, str], _SettingValue]
_Values = dict[tuple[str, str], Any]
_KIND: Final = ("model", "kind")  # which decides what settings a model has


def read(path: str, sets: Sequence[str] = ()) -> Config:
    """The configuration of a TOML file, with settings like "pipeline.ranks=2" on top.

    A value of `sets` is written as in TOML; strings need no quotes, and lists of numbers no
    brackets.  Raises ConfigError that says where.
    """
    given = dict(_of_file(path))
    given.update(map(_of_set, sets))
    with _blaming(path, given):
        sections = sections_of(given[_KIND].value if _KIND in given else "gpt")
    types = {section: types_of(kind) for section, kind in sections.items()}
    values: _Values = {}
    for (section, name), setting in given.items():
        _known(name, types[section], f"setting {section}", setting, types)
        kind = types[section][name]
        try:
            values[section, name] = coerce(setting.value, kind)
        except TypeError:
            raise setting.error(
                f"{section}.{name} must be {describe_type(kind)}, not {describe(setting.value)}"
            ) from None
    values.pop(_KIND, None)
    with _blaming(path, given):
        values |= _of_source(values, given)
        config = Config(
            **{
                section: kind(**{name: v for (s, name), v in values.items() if s == section})
                for section, kind in sections.items()
            }
        )
        frozen = getattr(config.pipeline, "frozen_stages", 0)
        shape, most = config.pipeline.shape, most_of_a_file()
        shape.require_room_lowered(trains=True, frozen_stages=frozen, most=most)
        return config


def _of_file(path: str) -> Iterator[tuple[tuple[str, str], _SettingValue]]:
    text = read_text(path, MOST_BYTES)
    tables = tables_of(text, path)
    for section, table in tables.items():
        at = _SettingValue(table, path, *_find(text, section))
        _known(section, SECTIONS, "section", at)
        if not isinstance(table, dict):
            raise at.error(f"{section} is a section, not {describe(table)}", f"[{section}]")
        for name, value in table.items():
            setting = _SettingValue(value, path, *_find(text, section, name))
            yield (section, name), setting


def _of_set(option: str) -> tuple[tuple[str, str], _SettingValue]:
    key, equals, text = option.partition("=")
    section, dot, name = key.strip().partition(".")
    value: Any = text.strip()  # a string without its quotes
    for form in (f"value = {text}", f"value = [{text}]"):
        with suppress(ConfigError):
            value = tables_of(form, "")["value"]
            break
    setting = _SettingValue(value, f"--set {option}")
    if not equals or not dot:
        raise setting.error("is not SECTION.NAME=VALUE", "pipeline.ranks=2")
    _known(section, SECTIONS, "section", setting)
    return (section, name), setting


def _of_source(values: _Values, given: _Settings) -> _Values:
    """What the source decides: a program in a file, which no setting may contradict, or a schedule
    by what it is for, where no setting says otherwise."""
    source = Source(values.get(("pipeline", "schedule"), PipelineConfig.schedule))
    said = {f.name: values[f.section, f.name] for f in HEADER if (f.section, f.name) in values}
    usual = {f.name: getattr(PipelineConfig, f.name) for f in SHAPE_FIELDS if f.required}
    request = Request(source, said, usual, lowers=True, contradicts=contradicts)
    decided = {f.name: getattr(request.shape, f.name) for f in SHAPE_FIELDS if f.in_config}
    if request.shape.sequence_chunks > 1:
        raise ShapeError(
            f"{source} splits each sequence into {request.shape.sequence_chunks} chunks, and "
            "the GPT of a "
            "training run takes whole ones",
            fields=["schedule"],
        )
    if isinstance(source.found, Program) and not source.found.is_draft:
        for name in ("overlap", *OPTIONS):
            if setting := given.get((SECTION_OF.get(name, "pipeline"), name)):
                raise setting.error(f"{source} has its transfers: {name} is for what is compiled")
        decided |= {f.name: f.of(source.found) for f in TRAITS if f.in_config}
    elif isinstance(source.found, Program):  # a draft has what it says, unless a setting says other
        own = [f for f in TRAITS if f.in_config and not f.is_default(source.found)]
        decided |= {f.name: f.of(source.found) for f in own if f.name not in said}
    home = {f.name: f.section for f in HEADER}
    said = {"schedule": source} | decided
    return {(home.get(name, "pipeline"), name): value for name, value in said.items()}


def _known(
    name: str,
    known: Mapping[str, Any],
    what: str,
    at: _SettingValue,
    types: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    if name in known:
        return
    near = get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    said = f"{what} {name!r}"
    if "setting" in what:
        said = f"{what}.{name}"
        homes = [f"{section}.{name}" for section, own in types.items() if name in own]
        kinds = [kind for kind, one in KINDS.items() if name in types_of(one.config)]
        if homes:
            hint = f"it is {' or '.join(homes)}"
        elif what == "setting model" and kinds:
            hint = f"it is for kind = {' or '.join(kinds)}"
        hint = RETIRED.get(said.removeprefix("setting "), hint)
    raise at.error(f"no {said}", hint)


@contextmanager
def _blaming(path: str, given: _Settings) -> Iterator[None]:
    """Say of a refusal where the first of its fields stands that is among the settings."""
    try:
        yield
    except ConfigError:
        raise
    except SchedirError as error:
        if not error.fields:
            raise
        named = {name: setting for (_, name), setting in given.items()}
        at = next(
            (named[name] for name in error.fields if name in named), _SettingValue(None, path)
        )
        raise at.error(error.fact, error.hint, error.fields) from error


def _find(text: str, section: str, name: str = "") -> tuple[int, int]:
    """Line and column of a setting, or of its section; (0, 0) if it is written in an odd way."""
    table = ""
    wanted = f"{section}.{name}" if name else section
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[+\s*([^\[\]\s][^\[\]]*)\]", line)
        table = header[1] if header else table
        key = header or re.match(r"\s*([\w.\"'-]+)\s*=", line)
        if not key:
            continue
        dotted = re.sub(r"[\"'\s]", "", key[1] if header or not table else f"{table}.{key[1]}")
        if dotted == wanted or dotted.startswith(f"{wanted}."):
            return number, key.start(1) + 1
        inline = re.search(rf"[{{,]\s*({re.escape(name)})\s*=", line) if name else None
        if dotted == section and inline:
            return number, inline.start(1) + 1
    return 0, 0
