"""Generate the page of all schedules and pictures."""

from __future__ import annotations

import runpy
from inspect import getdoc
from itertools import zip_longest

from docs.pages import DOCS, ROOT, define_page, get_first_sentence
from schedir import schedules


def build_blocks() -> dict[str, str]:
    """Return the table of all schedules, two in a row, with first sentences of docstrings."""
    cells = []
    for name in schedules.__all__:
        about = get_first_sentence(str(getdoc(getattr(schedules, name))))
        image = f"[![{name}](../images/schedules/{name}.svg)](schedules.md#{name})"
        cells.append(f"{image}<br>{about}")
    rows = [f"| {a} | {b} |" for a, b in zip_longest(cells[::2], cells[1::2], fillvalue="")]
    return {"schedules": "\n".join(["| | |", "| --- | --- |", *rows])}


def draw_first() -> None:
    """Run the first Python block of docs/index.md, which draws first.svg."""
    code = (DOCS / "index.md").read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code, "index.md", "exec"), {})


def draw_seq1f1b() -> None:
    """Draw the picture of `examples/seq1f1b.py`."""
    runpy.run_path(str(ROOT / "examples/seq1f1b.py"))["draw"]("seq1f1b.svg")


PAGES = define_page(
    "reference/gallery", build_blocks, {"first.svg": draw_first, "seq1f1b.svg": draw_seq1f1b}
)
