"""Generate the table of packages in docs/explanation/design.md from the source tree.

The layers are those of the layout test.  The description of a package is the first sentence of its
docstring.
"""

from __future__ import annotations

import ast
from pathlib import Path

from docs.pages import ROOT, format_table, get_first_sentence

BEGIN, END = "<!-- packages: made by docs/generate.py -->", "<!-- end of packages -->"


def read_layers() -> list[list[str]]:
    """Return the packages of each layer, the lowest layer first, without `__init__`, `__main__`."""
    layout = ast.parse((ROOT / "tests" / "pure" / "test_layout.py").read_text())
    (all_layers,) = (
        ast.literal_eval(node.value)
        for node in layout.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS"
    )
    sorted_layers = [
        sorted(name for name in layer if not name.startswith("__")) for layer in all_layers
    ]
    return [layer for layer in sorted_layers if layer]


def find_package(package: str) -> Path:
    """Return the folder of a package, or its file."""
    folders = (ROOT / package, ROOT / "schedir" / package, ROOT / "schedir" / f"{package}.py")
    return next(path for path in folders if path.exists())


def read_description(path: Path) -> str:
    """Return the first sentence of the docstring of a package or module."""
    if path.is_file():
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
    elif (path / "__init__.py").exists():
        text = ast.get_docstring(ast.parse((path / "__init__.py").read_text())) or ""
    else:  # below its title
        text = (path / "README.md").read_text().partition("\n\n")[2]
    return get_first_sentence(text)


def format_listing(packages: list[list[str]]) -> str:
    """Return a row for each package and sub-package, with its description."""
    rows = []
    for package in (package for layer in packages for package in layer):
        top = find_package(package)
        inner = sorted(p.parent for p in top.glob("*/__init__.py")) if top.is_dir() else []
        for path in (top, *inner):
            relative = path.relative_to(ROOT)
            title = str(relative).removeprefix("schedir/").removesuffix(".py")
            title += "/" if path.is_dir() else ""
            rows.append([f"[`{title}`](../../{relative})", read_description(path)])
    return format_table(["package", "what it does"], rows)


def update_page() -> str:
    """Return docs/explanation/design.md with the current packages."""
    text, packages = (ROOT / "docs" / "explanation" / "design.md").read_text(), read_layers()
    before, _, rest = text.partition(BEGIN)
    _, end_marker, after = rest.partition(END)
    assert end_marker, f"docs/explanation/design.md has no part between {BEGIN} and {END}"
    return f"{before}{BEGIN}\n\n{format_listing(packages)}\n\n{END}{after}"


PAGES = {"explanation/design.md": update_page}
