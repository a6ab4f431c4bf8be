"""Every public name is shown by an example that runs, and that runs alone."""

from __future__ import annotations

import ast
import builtins
import doctest
import re
from operator import attrgetter
from pathlib import Path

import pytest

import schedir
from docs import api_page

ROOT = Path(__file__).parents[2]
NAMES = api_page.public()


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example(name: str) -> None:
    """In its docstring, where pytest runs it."""
    assert ">>> " in api_page.docstring(NAMES[name])


@pytest.mark.parametrize("name", NAMES)
def test_an_example_can_be_copied(name: str) -> None:
    """It imports whatever it takes."""
    known, taken = {*vars(builtins)}, set()
    for example in doctest.DocTestParser().get_examples(api_page.docstring(NAMES[name])):
        for node in ast.walk(ast.parse(example.source)):
            if isinstance(node, ast.alias):
                known.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                taken.add(node.id)
            elif isinstance(node, ast.Name):
                known.add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                known.add(node.name)
            elif isinstance(node, ast.arg):
                known.add(node.arg)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                known.add(node.name)
    assert taken <= known


def test_every_public_name_is_on_the_page() -> None:
    """In one group, and found where the page says that it is."""
    assert {*schedir.__all__} <= NAMES.keys()
    for _, titles in api_page.GROUPS.values():
        for name in (name for title in titles for name in title.split(", ")):
            assert attrgetter(name)(schedir) is NAMES[name], name


def test_an_undocumented_name_is_refused() -> None:
    def undocumented() -> None: ...

    with pytest.raises(ValueError, match="is public, and has no docstring"):
        api_page.docstring(undocumented)


def test_pages_import_public_names_from_where_they_are_public() -> None:
    """Not from the files that they happen to lie in."""
    homes = {
        (getattr(value, "__module__", ""), name.rpartition(".")[2]) for name, value in NAMES.items()
    }
    public = {"schedir", *(f"schedir.{name}" for name in api_page.MODULES)}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
    for page in pages:
        for home, names in re.findall(r"^from (schedir\S*) import (.+)$", page.read_text(), re.M):
            each = [name.strip() for name in names.split("#")[0].split(",")]
            wrong = [name for name in each if home not in public and (home, name) in homes]
            assert not wrong, f"{page.name} takes {wrong} from {home}"


def test_no_public_module_is_left_out() -> None:
    """A module that `schedir` names is public, if it says by `__all__` which names of it are."""
    modules = {name for name, home in schedir._LAZY_IMPORTS.items() if ":" not in home}
    listing = {name for name in modules if hasattr(getattr(schedir, name), "__all__")}
    assert listing <= {*api_page.MODULES}
