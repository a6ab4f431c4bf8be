"""The page of all schedules and pictures: see `generate.py`."""

from __future__ import annotations

import runpy
from inspect import getdoc
from itertools import zip_longest

from docs.pages import DOCS, ROOT, first_sentence, page
from schedir import schedules


def blocks() -> dict[str, str]:
    """All schedules, two in a row, each with the first sentence of its docstring."""
    cells = []
    for name in schedules.__all__:
        about = first_sentence(str(getdoc(getattr(schedules, name))))
        drawn = f"[![{name}](../images/schedules/{name}.svg)](schedules.md#{name})"
        cells.append(f"{drawn}<br>{about}")
    rows = [f"| {a} | {b} |" for a, b in zip_longest(cells[::2], cells[1::2], fillvalue="")]
    return {"schedules": "\n".join(["| | |", "| --- | --- |", *rows])}


def first() -> None:
    """Run the first lines of the first page."""
    code = (DOCS / "index.md").read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code, "index.md", "exec"), {})


def seq1f1b() -> None:
    """Draw the picture of `examples/seq1f1b.py`."""
    runpy.run_path(str(ROOT / "examples/seq1f1b.py"))["draw"]("seq1f1b.svg")


PAGES = page("reference/gallery", blocks, {"first.svg": first, "seq1f1b.svg": seq1f1b})
