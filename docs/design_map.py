"""The map of rooms in docs/design.md, read off the tree: see `generate.py`.

A room says in the first sentence of its docstring what it is.  On which floor it stands, the layout
test says.
"""

from __future__ import annotations

import ast
from pathlib import Path

from docs.pages import ROOT, first_sentence, table

BEGIN, END = "<!-- rooms: made by docs/generate.py -->", "<!-- end of rooms -->"


def floors() -> list[list[str]]:
    """The rooms of each floor, the lowest floor first, without the public face and the command."""
    layout = ast.parse((ROOT / "tests" / "pure" / "test_layout.py").read_text())
    (told,) = (
        ast.literal_eval(node.value)
        for node in layout.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS"
    )
    named = [sorted(name for name in rooms if not name.startswith("__")) for rooms in told]
    return [rooms for rooms in named if rooms]


def home(room: str) -> Path:
    """The folder of a room, or its file."""
    folders = (ROOT / room, ROOT / "schedir" / room, ROOT / "schedir" / f"{room}.py")
    return next(path for path in folders if path.exists())


def about(room: str) -> str:
    """The first sentence of a room about itself."""
    path = home(room)
    if path.is_file():
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
    elif (path / "__init__.py").exists():
        text = ast.get_docstring(ast.parse((path / "__init__.py").read_text())) or ""
    else:  # below its title
        text = (path / "README.md").read_text().partition("\n\n")[2]
    return first_sentence(text)


def picture(rooms: list[list[str]]) -> str:
    """The floors, highest on top: a room imports from those below it."""
    lines = ["    ".join(f"{room}/" if home(room).is_dir() else room for room in floor)
             for floor in reversed(rooms)]  # fmt: skip
    return "\n".join(["```", *lines, "```"])


def listed(rooms: list[list[str]]) -> str:
    """A row for each room, with what it is."""
    rows = []
    for room in (room for floor in rooms for room in floor):
        path = home(room)
        link = f"../{path.relative_to(ROOT)}"
        title = f"{room}/" if path.is_dir() else room
        rows.append([f"[`{title}`]({link})", about(room)])
    return table(["room", "what it is"], rows)


def page() -> str:
    """docs/design.md with the rooms as they are."""
    text, rooms = (ROOT / "docs" / "design.md").read_text(), floors()
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    assert found, f"docs/design.md has no part between {BEGIN} and {END}"
    return f"{before}{BEGIN}\n{picture(rooms)}\n\n{listed(rooms)}\n{END}{after}"


PAGES = {"design.md": page}
