"""Config file: a training run's configuration, read from TOML and `--set`.

Whatever is wrong with it is refused here, and told where it stands, before a process starts.  Needs
no torch.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from schedir.errors import ConfigError, ProgramError
from schedir.io.load import load
from schedir.ir.program import Program
from schedir.schedules.words import delay_for, placed_for, stages_per_rank_for
from schedir.training.config import KINDS, PLAN, SECTIONS, Config, PipelineConfig
from schedir.training.settings import coerce, describe


class _Given(NamedTuple):
    """A setting as it was found: its value, and where."""

    value: Any
    where: str
    line: int = 0
    column: int = 0

    def error(self, fact: str, hint: str = "") -> ConfigError:
        return ConfigError(fact, where=self.where, line=self.line, column=self.column, hint=hint)


# By section and name.
_Settings = dict[tuple[str, str], _Given]
_Values = dict[tuple[str, str], Any]


def read(path: str, sets: Sequence[str] = ()) -> Config:
    """The configuration of a TOML file, with settings like "pipeline.ranks=2" on top.

    A value of `sets` is written as in TOML; strings need no quotes, and lists of numbers no
    brackets.  Raises ConfigError that says where.
    """
    given = dict(_of_file(path))
    given.update(map(_of_set, sets))
    values: _Values = {}
    for (section, name), setting in given.items():
        kind = KINDS[section][name]
        try:
            values[section, name] = coerce(setting.value, kind)
        except TypeError:
            raise setting.error(
                f"{section}.{name} must be {describe(kind)}, not {setting.value!r}"
            ) from None
    values |= _of_program(values, given)
    with _blaming(path, given):
        return Config(
            **{
                section: kind(**{name: v for (s, name), v in values.items() if s == section})
                for section, kind in SECTIONS.items()
            }
        )


def _of_file(path: str) -> Iterator[tuple[tuple[str, str], _Given]]:
    try:
        text = Path(path).read_bytes().decode()
        tables = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=path) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text: see byte {error.start}", where=path) from None
    except tomllib.TOMLDecodeError as error:
        raise _not_toml(path, text, str(error)) from None
    for section, table in tables.items():
        at = _Given(table, path, *_find(text, section))
        _known(section, SECTIONS, "section", at)
        if not isinstance(table, dict):
            raise at.error(f"{section} is a section, not {table!r}", f"[{section}]")
        for name, value in table.items():
            setting = _Given(value, path, *_find(text, section, name))
            _known(name, KINDS[section], f"setting {section}", setting)
            yield (section, name), setting


def _of_set(option: str) -> tuple[tuple[str, str], _Given]:
    key, equals, text = option.partition("=")
    section, dot, name = key.strip().partition(".")
    value: Any = text.strip()  # a string without its quotes
    for form in (f"value = {text}", f"value = [{text}]"):
        with suppress(tomllib.TOMLDecodeError):
            value = tomllib.loads(form)["value"]
            break
    setting = _Given(value, f"--set {option}")
    if not equals or not dot:
        raise setting.error("is not SECTION.NAME=VALUE", "pipeline.ranks=2")
    _known(section, SECTIONS, "section", setting)
    _known(name, KINDS[section], f"setting {section}", setting)
    return (section, name), setting


def _of_program(values: _Values, given: _Settings) -> _Values:
    """What a program in a file decides, where a setting that says otherwise is refused, or what a
    schedule is for, where none does."""
    source = values.get(("pipeline", "schedule"), PipelineConfig.schedule)
    program = load(source)
    if not isinstance(program, Program):
        placement = placed_for(program)[0]
        delay = delay_for(program) if values.get(("pipeline", "updates"), 1) > 1 else None
        mapped = isinstance(values.get(("pipeline", "placement"), placement), tuple)
        v = None if mapped else stages_per_rank_for(program)
        marks = {"placement": placement, "stages_per_rank": v, "delay": delay}
        return {
            ("pipeline", name): mark
            for name, mark in marks.items()
            if mark and ("pipeline", name) not in given
        }
    overlap = given.get(("pipeline", "overlap"))
    if overlap and not program.is_draft:
        raise overlap.error(f"{source} has its transfers: overlap is for what is compiled")
    decided = {}
    for name in PLAN if program.is_draft else (*PLAN, "tp", "dp"):
        key = "pipeline", name
        has = decided[key] = getattr(program.plan if name in PLAN else program, name)
        if key in given and values[key] != has:
            raise given[key].error(
                f"{source} has {name} {has}, not {values[key]}", f"leave out {name}"
            )
    return decided


def _known(name: str, known: dict[str, Any], what: str, at: _Given) -> None:
    if name in known:
        return
    near = get_close_matches(name, known, 1)
    said = f"{what}.{name}" if "setting" in what else f"{what} {name!r}"
    raise at.error(
        f"no {said}", f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    )


@contextmanager
def _blaming(path: str, given: _Settings) -> Iterator[None]:
    """Say of a refusal which setting it speaks of: its first word that is one."""
    try:
        yield
    except ProgramError as error:
        named = {name: setting for (_, name), setting in given.items()}
        words = re.findall(r"\w+", error.fact)
        at = next((named[word] for word in words if word in named), _Given(None, path))
        raise at.error(error.fact, error.hint) from error


def _not_toml(path: str, text: str, message: str) -> ConfigError:
    """tomllib's refusal, with its place as numbers."""
    found = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", message)
    fact, line, column = found.groups() if found else (message, None, None)
    lines = text.split("\n")
    return ConfigError(
        f"is not TOML: {fact[0].lower()}{fact[1:]}",
        where=path,
        line=int(line or len(lines)),
        column=int(column or len(lines[-1]) + 1),
    )


def _find(text: str, section: str, name: str = "") -> tuple[int, int]:
    """Line and column of a setting, or of its section; (0, 0) if it is written in an odd way."""
    table = ""
    wanted = f"{section}.{name}" if name else section
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[+\s*([^\[\]]+?)\s*\]", line)
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
