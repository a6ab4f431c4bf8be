"""Parse TOML, and raise errors with the line and column of a problem."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Container, Mapping
from difflib import get_close_matches
from typing import Any, Final

from schedir.errors import ConfigError, UsageError

MAX_TOML_BYTES: Final = 2**18  # In bytes. A configuration that a user writes is shorter.
# For a key with n dots, tomllib creates n keys of up to n parts. The limit bounds the memory of
# these keys.
MAX_DOTS_PER_LINE: Final = 1000


def require_configuration_name(path: str) -> None:
    """Refuse the name of a schedule or a run in place of a configuration.

    Args:
        path: The path of the configuration.

    Raises:
        UsageError: The path ends with the suffix of another type of file.
    """
    if path.endswith((".sched", ".timeline", ".py", ".csv")):
        raise UsageError(
            f"{path} is not a configuration, which is a TOML file",
            hint="the setting pipeline.schedule of a configuration names its schedule",
        )


def parse_toml(text: str, location: str) -> dict[str, Any]:
    """Parse a TOML text.

    Args:
        text: The text.
        location: The name of the file in errors.

    Returns:
        The top-level table.

    Raises:
        ConfigError: The text is not TOML, or is too deeply nested. The error has the line and the
            column if tomllib reports them.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > MAX_DOTS_PER_LINE:
            raise ConfigError(
                f"cannot be read: the line has more than {MAX_DOTS_PER_LINE} dots",
                location=location, line=number, column=1, hint="write a list in several lines",
            )  # fmt: skip
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _make_toml_error(text, location, str(error)) from None
    except RecursionError:
        raise ConfigError("cannot be read: it is nested too deeply", location=location) from None
    except ValueError:  # Python's int refuses numbers with thousands of digits
        raise ConfigError("cannot be read: a number is too long", location=location) from None


def _make_toml_error(text: str, location: str, message: str) -> ConfigError:
    """Return a ConfigError for an error of tomllib, with the line and column in `message`."""
    match = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", message, re.S)
    fact, line, column = match.groups() if match else (message, None, None)
    lines = text.split("\n")
    value_text = lines[int(line) - 1][int(column) - 1 :].strip() if line and column else ""
    key = re.match(r"\s*([\w.\"'-]+)\s*=", lines[int(line or len(lines)) - 1])
    if fact == "Cannot overwrite a value" and key:
        return ConfigError(
            f"{key[1]} is set twice in this table",
            location=location,
            line=int(line or len(lines)),
            column=key.start(1) + 1,
            hint="remove one of the two lines",
        )
    is_bare = fact == "Invalid value" and re.fullmatch(r"[A-Za-z][\w.:/ ()=-]*", value_text)
    return ConfigError(
        f"is not TOML: {fact[0].lower()}{fact[1:]}",
        location=location,
        line=int(line or len(lines)),
        column=int(column or len(lines[-1]) + 1),
        hint=f'put text in quotes: "{value_text}"' if is_bare else "",
    )


def suggest_section(name: str) -> str:
    """Return a hint for a section that is written within another one.

    Args:
        name: The name of the section.
    """
    return f"[{name}] is a section of its own"


def find_position(text: str, section: str, name: str = "") -> tuple[int, int]:
    """Return the line and the column of a setting or a section, from 1.

    Args:
        text: The text of a TOML file.
        section: The name of the section.
        name: The name of the setting; "" for the section.

    Returns:
        The position. It is (0, 0) if the setting is written in a form that this function does not
        recognize.
    """
    table = ""
    key_path = f"{section}.{name}" if name else section
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[+\s*([^\[\]\s][^\[\]]*)\]", line)
        table = header[1] if header else table
        key = header or re.match(r"\s*([\w.\"'-]+)\s*=", line)
        if not key:
            continue
        line_path = re.sub(r"[\"'\s]", "", key[1] if header or not table else f"{table}.{key[1]}")
        if line_path == key_path or line_path.startswith(f"{key_path}."):
            return number, key.start(1) + 1
        inline = re.search(rf"[{{,]\s*({re.escape(name)})\s*=", line) if name else None
        if line_path == section and inline:
            return number, inline.start(1) + 1
    return 0, 0


# Name at the top of a TOML file -> hint if the caller does not read files with this name.
_FILE_KIND_HINTS: Final = {
    "gpus_per_node": "the file is a cluster: give it to --cluster",
    "pipeline": "the file is a configuration: give it to schedir train",
    "train": "the file is a configuration: give it to schedir train",
}


def suggest_file_kind(table: Mapping[str, Any], known_names: Container[str]) -> str:
    """Return a hint if a TOML file with an unknown name is a file of another kind, or "".

    Args:
        table: The file.
        known_names: The names at the top of the files that the caller reads.
    """
    names = (name for name in _FILE_KIND_HINTS if name in table and name not in known_names)
    return next((_FILE_KIND_HINTS[name] for name in names), "")


def suggest_field(
    name: str, table: Mapping[str, Any], known_names: Collection[str], new_name: str = ""
) -> str:
    """Return a hint for an unknown name at the top of a TOML file.

    Args:
        name: The unknown name.
        table: The file.
        known_names: The names at the top of the files that the caller reads.
        new_name: The new name of a renamed field, or "".
    """
    if hint := suggest_file_kind(table, known_names):
        return hint
    suggestions = [new_name] if new_name else get_close_matches(name, known_names, 1)
    if suggestions:
        return f"did you mean {suggestions[0]!r}?"
    return f"the fields are {', '.join(known_names)}"
