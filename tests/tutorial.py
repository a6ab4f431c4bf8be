"""A page as a person follows it: files that grow, commands, and what they print."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
OWN_MODEL = ROOT / "docs" / "own-model.md"


class Step(NamedTuple):
    """A block of Python (to run, or to add to a file), or a command and what it prints."""

    kind: str  # "file", "python" or "command"
    text: str
    prints: str = ""

    @property
    def argv(self) -> list[str]:
        return shlex.split(self.text)[1:]


def steps(page: str) -> Iterator[Step]:
    """The steps of a page, in order; `$ ` begins a command, the lines behind it are its output."""
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.M | re.S):
        if language == "python":
            yield Step("file" if re.match(r"# \w+\.py\n", body) else "python", body)
            continue
        for command in re.split(r"^\$ ", body.replace("\\\n", ""), flags=re.M)[1:]:
            yield Step("command", *command.split("\n", 1))


def numbers_apart(text: str) -> str:
    return re.sub(r"\d[\d.,e+-]*", "N", " ".join(text.split()))
