"""Parse `-O NAME=VALUE` and `--config FILE.toml`, the options for compiling a schedule.

The command line, `schedir.compile`, a configuration and the text of a program use the same names.
`schedir options` lists them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import signature
from typing import Any, Final, NamedTuple

from schedir.errors import ConfigError, SchedirError, UsageError, describe
from schedir.io.files import read_text
from schedir.io.option_spelling import FIELDS_WITH_FLAGS, option_name, option_words
from schedir.io.toml_tables import (
    find_position,
    parse_toml,
    require_configuration_name,
    suggest_file_kind,
    suggest_section,
)
from schedir.ir.pipeline.field_schema import YES_OR_NO_TYPE, FieldType, make_choice_type
from schedir.ir.program import HEADER_FIELDS
from schedir.passes.pass_registry import OPTION_SECTIONS, PASS_OPTIONS
from schedir.retired_names import RETIRED_HINTS, find_similar_name, get_rename_hint

# Name that a user may try with -O -> the correct option.
_OTHER_OPTIONS: Final = {
    "limit": "--memory-limit BYTES",
    "memory_limit": "--memory-limit BYTES",
    "model": "--progress-model MODEL",
    "progress_model": "--progress-model MODEL",
    "costs": "--costs COSTS",
    "sizes": "--sizes SIZES",
    "cluster": "--cluster FILE.toml",
}


class ProgramOption(NamedTuple):
    """An option for compiling a schedule.

    Attributes:
        kind: The type of the values of the option.
        help: A description.
        config_key: The name in a configuration, such as "pipeline.zero", or "" if a configuration
            cannot have the option.
        is_shape_option: True for an option of the shape, False for an option of the lowering.
    """

    kind: FieldType
    help: str
    config_key: str
    is_shape_option: bool = False


def _list_options() -> Iterator[tuple[str, ProgramOption]]:
    for field in HEADER_FIELDS:
        setting = f"{field.section}.{field.name}" if field.in_config else ""
        yield field.name, ProgramOption(field.field_type, field.help, setting, field.is_shape_field)
    yield (
        "overlap",
        ProgramOption(
            YES_OR_NO_TYPE,
            "group opposite transfers of two ranks, and begin gathers and receives early",
            "pipeline.overlap",
        ),
    )
    sharing = make_choice_type(
        "must be minimal or latency_preserving", ("minimal", "latency_preserving"), "HOW"
    )
    yield (
        "buffer_sharing",
        ProgramOption(
            sharing,
            "how values share static buffers: minimal uses the fewest buffers; latency_preserving "
            "searches for few buffers that keep the predicted step time",
            "pipeline.buffer_sharing",
        ),
    )
    for name, (kind, about) in PASS_OPTIONS.items():
        section = OPTION_SECTIONS[name]
        yield name, ProgramOption(kind, about, f"{section}.{name}" if section else "")


# Name -> option, for all options. Some options have a separate flag, such as `--ranks`.
PROGRAM_OPTIONS: Final[Mapping[str, ProgramOption]] = dict(_list_options())


def unknown_option_error(name: str) -> UsageError:
    """Return the error for a name that is not an option, with the nearest names.

    Args:
        name: The name.
    """
    match = find_similar_name(name.lower(), PROGRAM_OPTIONS)
    words = _separate_value(name) or (match and option_name(match))
    hint = f"did you mean {words}?" if words else "schedir options lists all options"
    if not words and (schedule := _find_schedule_with_option(name)):
        hint = f"options of a schedule are in brackets: '{schedule}({name}=VALUE)'"
    hint = _OTHER_OPTIONS.get(name, RETIRED_HINTS.get(name, hint))
    return UsageError(f"-O: no option {name!r}", hint=hint)


def _separate_value(text: str) -> str:
    """Return the words for a name and a value without = between them, such as "zero3", or ""."""
    for name in sorted(PROGRAM_OPTIONS, key=len, reverse=True):
        value = text.removeprefix(name).lstrip(":_")
        if value and text.startswith(name):
            try:
                PROGRAM_OPTIONS[name].kind.parse(value)
            except ValueError:
                continue
            return " ".join(option_words(name, value))
    return ""


def _find_schedule_with_option(name: str) -> str:
    """Return the name of a built-in schedule that has an option in brackets, or ""."""
    from schedir.schedules import get_built_in_schedules

    for schedule_name, schedule in get_built_in_schedules().items():
        if name != "v" and name in [*signature(schedule).parameters][3:]:
            return schedule_name
    return ""


def parse_option(text: str) -> tuple[str, Any]:
    """Return the name and the value of an option.

    Args:
        text: `NAME=VALUE`, or `NAME` for an option that is on or off.

    Raises:
        UsageError: There is no such option, the option has a separate flag, or the value is
            invalid.

    Example:
        >>> parse_option("zero=3"), parse_option("overlap")
        (('zero', 3), ('overlap', True))
    """
    name, equals, value = text.partition("=")
    name = name.strip().replace("-", "_")
    if name not in PROGRAM_OPTIONS:
        raise unknown_option_error(name)
    if name in FIELDS_WITH_FLAGS:
        raise UsageError(
            f"-O {name} does not exist: {name} has its own option",
            hint=f"{option_name(name)} {value or PROGRAM_OPTIONS[name].kind.metavar}",
        )
    kind = PROGRAM_OPTIONS[name].kind
    if not equals:
        if kind.metavar and name != "tied_weights":
            raise UsageError(f"-O {name} needs a value", hint=f"-O {name}={kind.metavar}")
        return name, True
    return name, _parse_value(f"-O {name}", name, value)


def _parse_value(location: str, name: str, text: str) -> Any:
    try:
        return PROGRAM_OPTIONS[name].kind.parse(text)
    except ValueError as error:
        hint = get_rename_hint(name, text) or f"schedir options {name}"
        # A configuration accepts "none", which had the name "own" in older versions.
        if name == "buffer_sharing" and text in ("none", "own"):
            hint = "leave out buffer_sharing: this is its default"
        separator = ": " if location.startswith("-O") else " "
        raise UsageError(f"{location}{separator}{error}", hint=hint, fields=[name]) from None


class _ProgramOptionAction(argparse.Action):
    """Parses `-O NAME=VALUE`, and sets the attribute NAME of the namespace."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name, value = parse_option(values)
        self.const(name, values)
        given_names = {*(getattr(namespace, self.dest, None) or ())}
        if name in given_names:
            raise UsageError(f"-O {name} is given twice", fields=[name])
        setattr(namespace, name, value)
        setattr(namespace, self.dest, {*given_names, name})


class _ConfigAction(argparse.Action):
    """Reads `--config FILE.toml`, and sets the values that no option gives.

    An option has priority over the configuration, whether it is before or after `--config`.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest, None) is not None:
            raise UsageError("--config is given twice")
        setattr(namespace, self.dest, values)
        typed = getattr(namespace, "program_options", None) or ()
        require_configuration_name(values)
        settings, text = {}, read_text(values)
        for name, value in _read_options(text, values).items():
            if name not in typed and getattr(namespace, name, None) in (None, False):
                with suppress(UsageError):  # The command does not have this option.
                    if name in PROGRAM_OPTIONS:
                        self.const(name, f"{name}={value}")
                    setattr(namespace, name, value)
                    settings[name] = value
        namespace.config_settings = settings
        namespace.config_text = text


@contextmanager
def locate_config_errors(args: argparse.Namespace) -> Iterator[None]:
    """Add the position in `--config FILE.toml` to an error about a value of this file.

    Args:
        args: The arguments of the command.
    """
    try:
        yield
    except SchedirError as error:
        settings = getattr(args, "config_settings", {})
        for name in error.fields:
            # The values differ if an option after --config has replaced the value of the file.
            if name in settings and getattr(args, name) is settings[name]:
                section, _, key = _get_config_key(name).partition(".")
                line, _ = find_position(args.config_text, section, key)
                line_text = f", line {line}" if line else ""
                error.add_note(f"in {args.config}{line_text}: {section}.{key}")
                break
        raise


def _get_config_key(name: str) -> str:
    return "memory.memory_limit" if name == "memory_limit" else PROGRAM_OPTIONS[name].config_key


def read_config(path: str) -> dict[str, Any]:
    """Return the options in the sections [pipeline] and [memory] of a configuration.

    Args:
        path: A configuration of `schedir train`.

    Returns:
        The values by name, without the schedule and without the settings that only `train` needs.

    Raises:
        UsageError: The file cannot be read, contains a section or a setting that `schedir train`
            does not have, or contains an invalid value.
    """
    require_configuration_name(path)
    return _read_options(read_text(path), path)


def _read_options(text: str, path: str) -> dict[str, Any]:
    from schedir.training.config.settings_table import list_settings

    known = {
        name: {setting.name for setting in table} for name, (_, table) in list_settings().items()
    }
    tables = parse_toml(text, path)

    def make_error(fact: str, hint: str, section: str, key: str = "") -> ConfigError:
        line, column = find_position(text, section, key)
        return ConfigError(
            fact, location=path, line=line, column=column, hint=hint, fields=[key or section]
        )

    for section, table in tables.items():
        if section not in known or not isinstance(table, dict):
            section_names = [
                section_name for section_name, names in known.items() if section in names
            ]
            hint = f"it belongs into a section: [{section_names[0]}]" if section_names else ""
            hint = suggest_file_kind(tables, known) or hint or suggest_names(section, known)
            raise make_error(f"no section {section!r}", hint, section)
        # The settings of [model] depend on its kind, and only `schedir train` reads them.
        for key in table if section != "model" else ():
            if key not in known[section]:
                name = f"{section}.{key}"
                section_names = [
                    f"{section_name}.{key}"
                    for section_name, names in known.items()
                    if key in names
                    and " " not in section_name  # "model of kind llama" is not a section.
                ]
                hint = f"did you mean {' or '.join(section_names)}?" if section_names else ""
                hint = suggest_section(key) if key in known else hint
                hint = RETIRED_HINTS.get(name) or hint or suggest_names(key, known[section])
                raise make_error(f"no setting {name}", hint, section, key)
    values: dict[str, Any] = {}
    keys = [(name, name, option.config_key) for name, option in PROGRAM_OPTIONS.items()]
    # Parse memory_limit like the option host_memory_limit, which is also a number of bytes.
    keys.append(("memory_limit", "host_memory_limit", _get_config_key("memory_limit")))
    for name, kind_name, config_key in keys:
        section, _, key = config_key.partition(".")
        value = tables.get(section, {}).get(key) if key else None
        if value is None or (name == "buffer_sharing" and value in ("auto", "none")):
            continue
        try:
            values[name] = _parse_setting(config_key, kind_name, value)
        except UsageError as error:
            hint = 'memory_limit = "40GB"' if name == "memory_limit" else error.hint
            raise make_error(error.fact, hint, section, key) from None
    return values


def _parse_setting(location: str, name: str, value: Any) -> Any:
    """Convert a TOML value into the value of an option."""
    kind = PROGRAM_OPTIONS[name].kind
    if isinstance(value, bool) is bool(kind.metavar):
        shown = str(value).lower() if isinstance(value, bool) else describe(value)
        hint = f"schedir options {name}"
        raise UsageError(f"{location} {kind.requirement}, not {shown}", hint=hint, fields=[name])
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and kind.type is int:
        raise UsageError(f"{location} {kind.requirement}, not {describe(value)}", fields=[name])
    if isinstance(value, list):
        rows = [",".join(map(str, row)) if isinstance(row, list) else str(row) for row in value]
        value = ("/" if any(isinstance(row, list) for row in value) else ",").join(rows)
    return _parse_value(location, name, str(value))


def suggest_names(name: str, known_names: Iterable[str]) -> str:
    """Return a hint with the nearest known name, or with all known names.

    Args:
        name: An unknown name.
        known_names: The known names.
    """
    names = sorted(known_names)
    match = find_similar_name(name, names)
    return f"did you mean {match}?" if match else f"the names are {', '.join(names)}"


def add_program_options(
    group: argparse._ArgumentGroup,
    validate_option: Any,
    *,
    has_shape_options: bool,
    has_lowering_options: bool = True,
) -> None:
    """Add `-O` and `--config` to a group of options.

    Args:
        group: The group.
        validate_option: A function of the name and the text of an option. It raises UsageError if
            the command does not have this option.
        has_shape_options: True if the command has options of the shape.
        has_lowering_options: True if the command has options of the lowering.
    """
    names = [
        name
        for name, option in PROGRAM_OPTIONS.items()
        if has_shape_options or not option.is_shape_option
    ]
    group.add_argument(
        "-O", dest="program_options", metavar="NAME=VALUE", const=validate_option,
        action=_ProgramOptionAction,
        help="an option for compiling: -O zero=3, -O overlap, -O recompute=fit; `schedir options` "
        "lists all"
        if has_lowering_options
        else argparse.SUPPRESS,  # `search` refuses options of the lowering, with a hint.
    )  # fmt: skip
    group.add_argument(
        "--config", metavar="FILE.toml", action=_ConfigAction, const=validate_option,
        help="read the options that are not on the command line from the tables [pipeline] and "
        "[memory] of this configuration; its schedule is ignored",
    )  # fmt: skip
    defaults = {name: None for name in names if name not in FIELDS_WITH_FLAGS}
    group.set_defaults(**{**defaults, "overlap": False})
