"""Every public name is shown by an example that runs, and that runs alone."""

from __future__ import annotations

import ast
import builtins
import doctest
import re
import runpy
from inspect import getdoc, signature
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import schedir

ROOT = Path(__file__).parents[2]
API = runpy.run_path(str(ROOT / "docs" / "api_page.py"))
NAMES: dict[str, Any] = API["public"]()


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example(name: str) -> None:
    """In its docstring, where pytest runs it."""
    assert NAMES[name].has_example


@pytest.mark.parametrize("name", NAMES)
def test_an_example_can_be_copied(name: str) -> None:
    """It imports whatever it takes."""
    known, taken = {*vars(builtins)}, set()
    for example in doctest.DocTestParser().get_examples(NAMES[name].doc):
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


def test_the_page_reads_what_is_imported() -> None:
    """It takes names and docstrings off the source, so that it need not import torch."""
    assert {*schedir.__all__} <= NAMES.keys()
    for name, read in NAMES.items():
        # But for those that import torch.
        if name.partition(".")[0] not in ("checkpoints", "runtime", "testing"):
            public = attrgetter(name)(schedir)
            if callable(public):
                assert read.doc == getdoc(public), name
                called = API["signature"](read)
                if called and public is not schedir.viz.Style:
                    taken = re.findall(r"(\w+)(?:: |,|=|\))", called)
                    assert {*signature(public).parameters} <= {*taken}, name


def test_pages_import_public_names_from_where_they_are_public() -> None:
    """Not from the files that they happen to lie in."""
    homes = {(read.module, name.rpartition(".")[2]) for name, read in NAMES.items()}
    public = {f"schedir.{prefix}".rstrip(".") for prefix in API["PUBLIC"]}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    for page in pages:
        for home, names in re.findall(r"^from (schedir\S*) import (.+)$", page.read_text(), re.M):
            each = [name.strip() for name in names.split("#")[0].split(",")]
            wrong = [name for name in each if home not in public and (home, name) in homes]
            assert not wrong, f"{page.name} takes {wrong} from {home}"


def test_no_public_module_is_left_out() -> None:
    """A module that `schedir` names is public, if it says by `__all__` which names of it are."""
    homes = {name: API["path_of"](f"schedir.{home}") for name, home in schedir._HOME.items()}
    telling = {name for name, path in homes.items() if path and "\n__all__ = " in path.read_text()}
    assert telling <= API["PUBLIC"].keys()
