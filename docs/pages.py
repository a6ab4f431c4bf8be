"""Generate pages from templates of Markdown and blocks of text.

`docs/templates/NAME.md.in` is the source of `docs/FOLDER/NAME.md`. A template has these places:

- `str.format` replaces `{block}` by a block of the page's module.
- The output of `$ schedir ...` replaces `{printed}` below this line.
- A command of schedir that writes an SVG draws the picture with this name, if the page shows it.
  A comment `<!-- draws: schedir ... -->` contains a command that the page does not show.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import chdir, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from matplotlib import rc_context

from schedir.__main__ import main

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

PRINTED = re.compile(r"^\$ (schedir .*)\n\{printed\}", re.MULTILINE)
DRAWS = re.compile(r"(?:schedir [^`\n]*) ([\w-]+\.svg)(?=`|\n| -->)")
HIDDEN = re.compile(r"^<!-- draws: .* -->\n", re.MULTILINE)


def define_page(
    name: str,
    blocks: Callable[[], Mapping[str, object]] = dict,
    pictures: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, Callable[[], str]]:
    """Return functions that generate a page and its pictures, by their paths in `docs/`.

    Args:
        name: The page's path in `docs/`, without its suffix: `reference/api`.
        blocks: Computes the text of each block of the template.
        pictures: More pictures, by file name.  Each function writes that file to the working
            directory.
    """
    template = (DOCS / "templates" / f"{Path(name).name}.md.in").read_text()
    draw_functions: dict[str, Callable[[], object]] = {**(pictures or {})}
    for command in DRAWS.finditer(template.replace(" \\\n    ", " ")):
        if f"images/{command[1]}" in template:
            draw_functions[command[1]] = partial(run_command, command[0])

    def make_text() -> str:
        filled = HIDDEN.sub("", template).format(**blocks(), printed="{printed}")
        return PRINTED.sub(
            lambda command_line: f"$ {command_line[1]}\n{run_command(command_line[1])}", filled
        )

    images = {
        f"images/{file}": partial(draw_svg, file, draw) for file, draw in draw_functions.items()
    }
    return {f"{name}.md": make_text, **images}


def run_command(command: str) -> str:
    """Return the output of a command of schedir on a terminal of 80 columns."""
    with patch.dict(os.environ, COLUMNS="80"), redirect_stdout(StringIO()) as out:
        assert main(shlex.split(command)[1:]) == 0, command
    return out.getvalue()


def draw_svg(file: str, draw: Callable[[], object]) -> str:
    """Return the SVG that `draw` writes as `file`, without its invisible parts."""
    with TemporaryDirectory() as folder, rc_context({"font.sans-serif": ["DejaVu Sans"]}):
        Path(folder, "examples").symlink_to(ROOT / "examples")
        with chdir(folder):
            draw()
        svg = Path(folder, file).read_text()
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Ids of hatches (h), markers (m) and clip paths (p) must stay, because elements refer to them.
    svg = re.sub(r' id="(?!h|m|p)\w*"', "", svg)
    svg = re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", svg)
    return re.sub(r"\s*\n\s*", "\n", svg).replace(" \n", "\n")


def format_table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table of Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def get_first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, on one line."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) +(?=[A-Z`])", paragraph)[0]


def parse_entries(docstring: str, section: str = "Args") -> dict[str, str]:
    """Return the text of each entry of a section of a docstring, on one line, by name.

    A nested list becomes one line of the table cell for each item.
    """
    body = re.search(rf"^{section}:\n((?:    .*\n?|\n)+)", docstring, re.MULTILINE)
    names_and_texts = re.split(r"^    (\w+): ", body[1] if body else "", flags=re.MULTILINE)[1:]
    return {
        name: format_cell_text(text)
        for name, text in zip(names_and_texts[::2], names_and_texts[1::2], strict=True)
    }


def format_cell_text(text: str) -> str:
    """Return a paragraph for a table cell. Items of its list begin on new lines."""
    first, *items = re.split(r"\n\s*- ", text.strip())
    return "<br>- ".join(" ".join(item.split()).replace("|", "\\|") for item in [first, *items])
