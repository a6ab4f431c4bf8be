"""Read the tables of a TOML file, with errors of one sentence."""

from __future__ import annotations

import re
import tomllib
from typing import Any, Final

from schedir.errors import ConfigError

MAX_TOML_BYTES: Final = 2**18  # of a text: no configuration of a person is so long
MAX_DOTS_PER_LINE: Final = (
    1000  # of a line: of a key with n dots tomllib makes n keys, the longest of n
)


def parse_toml(text: str, location: str) -> dict[str, Any]:
    """What a text in TOML says.  Raises ConfigError, of the file `location`, with line and column
    where they are known."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > MAX_DOTS_PER_LINE:
            raise ConfigError(
                f"is not read: a line has more than {MAX_DOTS_PER_LINE} dots",
                location=location, line=number, column=1, hint="a list may have several lines",
            )  # fmt: skip
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _make_toml_error(text, location, str(error)) from None
    except RecursionError:
        raise ConfigError("is not read: it is nested too deeply", location=location) from None
    except ValueError:  # of Python's int, for numbers of thousands of digits
        raise ConfigError("is not read: a number has too many digits", location=location) from None


def _make_toml_error(text: str, location: str, message: str) -> ConfigError:
    """tomllib's refusal, with its place as numbers."""
    found = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", message, re.S)
    fact, line, column = found.groups() if found else (message, None, None)
    lines = text.split("\n")
    return ConfigError(
        f"is not TOML: {fact[0].lower()}{fact[1:]}",
        location=location,
        line=int(line or len(lines)),
        column=int(column or len(lines[-1]) + 1),
    )
