"""Tests that every public name has an example, which runs separately."""

from __future__ import annotations

import ast
import builtins
import doctest
import re
from functools import cache
from operator import attrgetter
from pathlib import Path

import pytest

import schedir
from docs import api_page

ROOT = Path(__file__).parents[2]


@cache
def list_public_names() -> dict[str, object]:
    """Return the public names, some of which are in modules that import torch."""
    return api_page.list_public_names()


def test_public_names_have_examples() -> None:
    """The examples are in docstrings, where pytest runs them."""
    assert not [
        name
        for name, value in list_public_names().items()
        if ">>> " not in api_page.get_docstring(value)
    ]


def find_undefined(docstring: str) -> set[str]:
    """Return the names that the examples of a docstring use and neither import nor define."""
    known, used = {*vars(builtins)}, set()
    for example in doctest.DocTestParser().get_examples(docstring):
        for node in ast.walk(ast.parse(example.source)):
            if isinstance(node, ast.alias):
                known.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                used.add(node.id)
            elif isinstance(node, ast.Name):
                known.add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                known.add(node.name)
            elif isinstance(node, ast.arg):
                known.add(node.arg)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                known.add(node.name)
    return used - known


def test_examples_can_be_copied() -> None:
    """Examples import the names that they use."""
    undefined = {
        name: find_undefined(api_page.get_docstring(value))
        for name, value in list_public_names().items()
    }
    assert not {name: names for name, names in undefined.items() if names}


def test_api_page_has_every_public_name() -> None:
    """Each name is in one group, and in the module that the page states."""
    assert {*schedir.__all__} <= list_public_names().keys()
    for _, titles in api_page.GROUPS.values():
        for name in (name for title in titles for name in title.split(", ")):
            assert attrgetter(name)(schedir) is list_public_names()[name], name


def test_undocumented_name_is_refused() -> None:
    def undocumented() -> None: ...

    with pytest.raises(ValueError, match="is public, and has no docstring"):
        api_page.get_docstring(undocumented)


def test_pages_import_from_public_modules() -> None:
    """Pages do not import public names from the files that define them."""
    homes = {
        (getattr(value, "__module__", ""), name.rpartition(".")[2])
        for name, value in list_public_names().items()
    }
    public = {"schedir", *(f"schedir.{name}" for name in api_page.MODULES)}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
    for page in pages:
        for home, names in re.findall(r"^from (schedir\S*) import (.+)$", page.read_text(), re.M):
            imported_names = [name.strip() for name in names.split("#")[0].split(",")]
            wrong = [
                name for name in imported_names if home not in public and (home, name) in homes
            ]
            assert not wrong, f"{page.name} takes {wrong} from {home}"


def test_api_page_has_every_public_module() -> None:
    """A module that `schedir` exports is public if it has an `__all__`."""
    modules = {name for name, home in schedir._LAZY_IMPORTS.items() if ":" not in home}
    listing = {name for name in modules if hasattr(getattr(schedir, name), "__all__")}
    assert listing <= {*api_page.MODULES}
