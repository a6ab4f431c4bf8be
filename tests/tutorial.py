"""The steps of a tutorial page: files that grow, commands, and their output."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FIRST_SCHEDULE = ROOT / "docs" / "tutorials" / "first-schedule.md"
TRAIN_A_MODEL = ROOT / "docs" / "tutorials" / "train-a-model.md"
READ_A_TRACE = ROOT / "docs" / "tutorials" / "read-a-trace.md"
OWN_MODEL = ROOT / "docs" / "how-to" / "train-your-own-model.md"
READERS = [
    "index",
    "how-to/write-a-schedule",
    "how-to/choose-a-schedule",
    "how-to/speed-up-a-run",
    "how-to/find-a-hang",
    "how-to/train-from-a-configuration",
    "how-to/fit-in-memory",
    "how-to/run-in-torch",
    "how-to/test-a-schedule",
    "reference/gallery",
    "reference/file-formats",
    "reference/errors",
    "how-to/draw-pictures",
    "how-to/search-for-a-schedule",
    "how-to/shard-with-zero",
    "how-to/offload-to-the-host",
]


class Step(NamedTuple):
    """A block of Python to run, a block to add to a file, or a command and its output."""

    kind: str  # "file", "python" or "command"
    text: str
    prints: str = ""
    named: str = ""  # the file

    @property
    def needs_torch(self) -> bool:
        return any(f"schedir.{room}" in self.text for room in ("runtime", "testing"))

    @property
    def argv(self) -> list[str]:
        return shlex.split(self.text)[1:]


def read_blocks(page: str) -> list[tuple[str, str]]:
    """Return the language and the text of each block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.M | re.S)


def read_steps(page: str) -> Iterator[Step]:
    """Yield the steps of a page in order. `$ ` begins a command, and its output follows."""
    for language, body in read_blocks(page):
        if named := re.match(r"# (\w+\.\w+)\n", body):
            yield Step("file", body, named=named[1])
            continue
        if language == "python":
            yield Step("python", body)
            continue
        for command in re.split(r"^\$ ", body.replace("\\\n", ""), flags=re.M)[1:]:
            yield Step("command", *command.split("\n", 1))


def replace_numbers(text: str) -> str:
    return re.sub(r"\d[\d.,e+-]*", "N", " ".join(text.split()))
