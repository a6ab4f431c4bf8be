"""Read the tables of a TOML file, with errors of one sentence."""

from __future__ import annotations

import re
import tomllib
from typing import Any, Final

from schedir.errors import ConfigError

MAX_TOML_BYTES: Final = 2**18  # bytes: a configuration that a user writes is shorter
# For a key with n dots, tomllib creates n keys of up to n parts. The limit bounds their memory.
MAX_DOTS_PER_LINE: Final = 1000


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
    """Return a ConfigError for an error of tomllib, with the line and column of its message."""
    match = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", message, re.S)
    fact, line, column = match.groups() if match else (message, None, None)
    lines = text.split("\n")
    written = lines[int(line) - 1][int(column) - 1 :].strip() if line and column else ""
    is_bare = fact == "Invalid value" and re.fullmatch(r"[A-Za-z][\w.:/ ()=-]*", written)
    return ConfigError(
        f"is not TOML: {fact[0].lower()}{fact[1:]}",
        location=location,
        line=int(line or len(lines)),
        column=int(column or len(lines[-1]) + 1),
        hint=f'put text in quotes: "{written}"' if is_bare else "",
    )
