"""Read the configuration of a training run from TOML and `--set`. Needs no torch.

Each error in the configuration is reported with its position, before any process starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, Final, NamedTuple, get_args

from schedir.errors import ConfigError, SchedirError, ShapeError, UsageError, describe
from schedir.io.files import read_text
from schedir.io.program_request import Request
from schedir.io.source_loader import Source
from schedir.io.toml_tables import (
    MAX_TOML_BYTES,
    find_position,
    parse_toml,
    require_configuration_name,
    suggest_file_kind,
    suggest_section,
)
from schedir.ir.input_trust import get_max_file_instructions
from schedir.ir.pipeline.pipeline_shape import SHAPE_FIELDS
from schedir.ir.program import ATTRIBUTE_FIELDS, HEADER_FIELDS, Program
from schedir.passes.pass_registry import OPTION_SECTIONS, PASS_OPTIONS
from schedir.retired_names import RETIRED_HINTS, find_present_name, suggest_name
from schedir.training.config.model_kinds import MODEL_KINDS
from schedir.training.config.run_config import Config, PipelineConfig, make_contradiction_error
from schedir.training.config.setting_types import coerce, describe_type
from schedir.training.config.settings_table import (
    SECTION_CLASSES,
    get_section_classes,
    get_setting_types,
)
from schedir.training.config.train_config import SETTING_CHOICES


class _SettingValue(NamedTuple):
    """The value of a setting, and its position in the file or on the command line."""

    value: Any
    location: str
    line: int = 0
    column: int = 0

    def make_error(self, fact: str, hint: str = "", fields: Sequence[str] = ()) -> ConfigError:
        return ConfigError(
            fact,
            location=self.location,
            line=self.line,
            column=self.column,
            hint=hint,
            fields=fields,
        )


# (section, name) -> the value of the setting.
_Settings = dict[tuple[str, str], _SettingValue]
_Values = dict[tuple[str, str], Any]
# The settings that select stages and microbatches by a text such as "all" or "0,1.3".
_SELECTIONS: Final = ("recompute", "offload", "offload_to_disk")
# The settings that are the name of a folder.
_FOLDERS: Final = ("dir", "trace", "spill_dir", "checkpoint_dir")
# The settings whose requirement lists all their values.
_TEXT_REQUIREMENTS: Final = {
    f.name: f.field_type.requirement
    for f in ATTRIBUTE_FIELDS
    if f.name in ("reduce_scatter_at", "optimizer_placement")
} | {"recompute_at": PASS_OPTIONS["recompute_at"][0].requirement}
_MODEL_KIND_KEY: Final = ("model", "kind")  # Its value decides which settings [model] has.


def read_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a TOML file.

    Args:
        path: The path of the file.
        overrides: Settings that replace the settings of the file, such as "pipeline.ranks=2". The
            values are TOML, but strings need no quotes, and lists of numbers need no brackets.

    Raises:
        ConfigError: A setting is wrong. The error has its position.
        SchedirError: The file cannot be read, or the configuration is wrong for a reason other than
            a setting.
    """
    settings = _read_settings(path, overrides)
    with _locate_errors(path, settings):
        sections = get_section_classes(
            settings[_MODEL_KIND_KEY].value if _MODEL_KIND_KEY in settings else "gpt"
        )
    types = {section: get_setting_types(kind) for section, kind in sections.items()}
    values: _Values = {}
    for (section, name), setting in settings.items():
        _require_known_name(name, types[section], f"setting {section}", setting, types)
        kind = types[section][name]
        try:
            values[section, name] = coerce(setting.value, kind)
        except TypeError:
            is_flag = isinstance(setting.value, bool)
            shown = str(setting.value).lower() if is_flag else describe(setting.value)
            raise setting.make_error(
                f"{section}.{name} must be {describe_type(kind)}, not {shown}",
                _suggest_value(name, kind, setting.value),
            ) from None
    for name in ("checkpoint_every", "checkpoint_keep"):
        if ("train", name) in settings and ("train", "checkpoint_dir") not in settings:
            raise settings["train", name].make_error(
                f"train.{name} needs train.checkpoint_dir: without it, no checkpoint is saved",
                'train.checkpoint_dir = "checkpoints"',
                [name, "checkpoint_dir"],
            )
    values.pop(_MODEL_KIND_KEY, None)
    with _locate_errors(path, settings):
        values |= _read_source_settings(values, settings, path)
        config = Config(
            **{
                section: kind(**{name: v for (s, name), v in values.items() if s == section})
                for section, kind in sections.items()
            }
        )
        frozen = getattr(config.pipeline, "frozen_stages", 0)
        shape, max_instructions_of_file = config.pipeline.shape, get_max_file_instructions()
        shape.require_lowered_limit(
            has_backward=True, frozen_stages=frozen, max_instructions=max_instructions_of_file
        )
        return config


def _suggest_value(name: str, kind: Any, value: Any) -> str:
    """Return a hint for a setting whose value has a wrong type, or ""."""
    is_flag = isinstance(value, bool)
    if is_flag and name in _SELECTIONS:
        return f'{name} = "all", or leave it out'
    if is_flag and name in _FOLDERS:
        return f'{name} = "FOLDER", or leave it out'
    if name in SETTING_CHOICES:
        return " or ".join(f'{name} = "{choice}"' for choice in SETTING_CHOICES[name])
    if name in _TEXT_REQUIREMENTS:
        return f"{name} {_TEXT_REQUIREMENTS[name]}"
    # A number in data.validation is a share of the source. In quotes, it would be the name of
    # another source.
    if str in get_args(kind) and not isinstance(value, list | dict | bool) and name != "validation":
        return f'{name} = "{value}{"GB" * name.endswith("_limit")}"'
    return ""


@contextmanager
def locate_setting_errors(path: str, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Within this context, add the position of a setting to an error about the setting.

    Args:
        path: The path of the configuration, a TOML file.
        overrides: Settings that replace the settings of the file.

    Raises:
        ConfigError: An error within the context was about a setting.
    """
    with _locate_errors(path, _read_settings(path, overrides)):
        yield


def _read_settings(path: str, overrides: Sequence[str]) -> _Settings:
    return dict(_read_file_settings(path)) | dict(map(_parse_override, overrides))


def _read_file_settings(path: str) -> Iterator[tuple[tuple[str, str], _SettingValue]]:
    require_configuration_name(path)
    text = read_text(path, MAX_TOML_BYTES)
    tables = parse_toml(text, path)
    for section, table in tables.items():
        location = _SettingValue(table, path, *find_position(text, section))
        if hint := suggest_file_kind(tables, SECTION_CLASSES):
            raise location.make_error(f"no section {section!r}", hint)
        _require_known_name(section, SECTION_CLASSES, "section", location)
        if not isinstance(table, dict):
            raise location.make_error(
                f"{section} must be a section, not {describe(table)}", f"[{section}]"
            )
        for name, value in table.items():
            setting = _SettingValue(value, path, *find_position(text, section, name))
            yield (section, name), setting


def _parse_override(override: str) -> tuple[tuple[str, str], _SettingValue]:
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    value: Any = text.strip()  # A value that is not TOML is a string without quotes.
    for form in (f"value = {text}", f"value = [{text}]"):
        with suppress(ConfigError):
            value = parse_toml(form, "")["value"]
            break
    if name in _SELECTIONS and isinstance(value, list | int | float) and value is not True:
        value = text.strip()  # A shell removes the quotes of recompute="0,1".
    setting = _SettingValue(value, f"--set {override}")
    if not equals or not dot:
        homes = _find_sections(key.strip())
        raise setting.make_error(
            "must be SECTION.NAME=VALUE",
            f"--set {homes[0]}.{override}" if homes and equals else "--set pipeline.ranks=2",
        )
    _require_known_name(section, SECTION_CLASSES, "section", setting)
    if not text.strip():
        raise setting.make_error(
            f"{key.strip()} has no value after =",
            "if the value is a variable of the shell, the variable is empty",
        )
    return (section, name), setting


def _suggest_path(source: str, config_path: str) -> str:
    """Return a hint if the file of a schedule is in the folder of the configuration, or ""."""
    file, colon, function = source.rpartition(":")
    file = file or source
    path = os.path.join(os.path.dirname(config_path), file)
    # A source can be any text. These functions return False if a file cannot have this name.
    if os.path.exists(file) or not os.path.isfile(path):
        return ""
    return (
        "a path starts at the current folder, not at the folder of the configuration: "
        f'schedule = "{path}{colon}{function if colon else ""}"'
    )


def _read_source_settings(values: _Values, settings: _Settings, config_path: str) -> _Values:
    """Return the settings that the schedule or the program file decides.

    For a schedule, the result has the schedule's defaults for settings that are not set. For a
    program in a file, the result has the settings of the program. A setting that contradicts the
    program is an error.
    """
    source = Source(values.get(("pipeline", "schedule"), PipelineConfig.schedule))
    try:
        _ = source.schedule_or_program  # loads it
    except UsageError as error:
        if not error.__cause__:  # A cause already has the line of the user's file.
            error.fields = error.fields or ("schedule",)
        error.hint = _suggest_path(str(source), config_path) or error.hint
        raise
    given_settings = {
        f.name: values[f.section, f.name] for f in HEADER_FIELDS if (f.section, f.name) in values
    }
    defaults = {f.name: getattr(PipelineConfig, f.name) for f in SHAPE_FIELDS if f.is_required}
    request = Request(
        source,
        given_settings,
        defaults,
        lower_drafts=True,
        make_conflict_error=make_contradiction_error,
    )
    decided = {f.name: getattr(request.shape, f.name) for f in SHAPE_FIELDS if f.in_config}
    if request.shape.sequence_chunks > 1:
        raise ShapeError(
            f"{source} splits each sequence into {request.shape.sequence_chunks} chunks, which "
            "schedir train does not support",
            fields=["schedule"],
        )
    if isinstance(source.schedule_or_program, Program) and not source.schedule_or_program.is_draft:
        for name in ("overlap", *PASS_OPTIONS):
            if setting := settings.get((OPTION_SECTIONS.get(name, "pipeline"), name)):
                raise setting.make_error(
                    f"{source} is a lowered program: {name} applies only to schedules and drafts"
                )
        decided |= {
            f.name: f.get_value(source.schedule_or_program) for f in ATTRIBUTE_FIELDS if f.in_config
        }
    elif isinstance(source.schedule_or_program, Program):
        # The attributes of a draft apply if no setting replaces them.
        program_settings = [
            f
            for f in ATTRIBUTE_FIELDS
            if f.in_config and not f.is_default(source.schedule_or_program)
        ]
        decided |= {
            f.name: f.get_value(source.schedule_or_program)
            for f in program_settings
            if f.name not in given_settings
        }
    section_of_field = {f.name: f.section for f in HEADER_FIELDS}
    decided = {"schedule": source} | decided
    return {
        (section_of_field.get(name, "pipeline"), name): value for name, value in decided.items()
    }


def _find_sections(name: str) -> list[str]:
    """Return the sections that have a setting of this name."""
    kinds = get_section_classes("gpt").items()
    return [section for section, kind in kinds if name in get_setting_types(kind)]


def _require_known_name(
    name: str,
    known_names: Mapping[str, Any],
    subject: str,
    setting: _SettingValue,
    types: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    if name in known_names:
        return
    hint = suggest_name(name, known_names) or f"the names are {', '.join(known_names)}"
    setting_name = f"{subject} {name!r}"
    if full_names := _find_sections(name) if subject == "section" else []:
        hint = f"it belongs into a section: [{full_names[0]}]"
    if "setting" in subject:
        setting_name = f"{subject}.{name}"
        present = {
            name,
            *(find_present_name(name, section_types) for section_types in types.values()),
        }
        full_names = [
            f"{section}.{setting_type}"
            for section, section_types in types.items()
            for setting_type in section_types
            if setting_type in present and name not in known_names
        ]
        names_by_kind = {
            kind: name if name in settings else find_present_name(name, settings)
            for kind, model_kind in MODEL_KINDS.items()
            for settings in [get_setting_types(model_kind.config_class)]
        }
        kinds = [kind for kind, present_name in names_by_kind.items() if present_name]
        if name in SECTION_CLASSES:
            hint = suggest_section(name)
        elif full_names:
            hint = f"did you mean {' or '.join(full_names)}?"
        elif subject == "setting model" and kinds:
            present_name = names_by_kind[kinds[0]]
            shown_name = "it" if present_name == name else present_name
            hint = f"{shown_name} is a setting of kind = {' or '.join(kinds)}"
        hint = RETIRED_HINTS.get(setting_name.removeprefix("setting "), hint)
    raise setting.make_error(f"no {setting_name}", hint)


@contextmanager
def _locate_errors(path: str, settings: _Settings) -> Iterator[None]:
    """Within this context, add to an error the position of the first setting that it names."""
    try:
        yield
    except ConfigError:
        raise
    except SchedirError as error:
        if not error.fields:
            raise
        named = {name: setting for (_, name), setting in settings.items()}
        location = next(
            (named[name] for name in error.fields if name in named), _SettingValue(None, path)
        )
        raise location.make_error(error.fact, error.hint, error.fields) from error
