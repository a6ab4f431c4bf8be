"""A new instruction is a row, a pass and a handler: all that reads the table knows it then.

Some kinds of it (`tests/new_rows`), each in a copy of the tree; how they run is tested beside the
executor.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.new_rows import EDITS, LOOKED_AT, PRODUCT, ROOT, copy


def _run(tree: Path, script: str, *args: str) -> str:
    command = [sys.executable, str(tree / "tests" / "new_rows" / script), *args]
    env = {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [*EDITS, *LOOKED_AT])
def test_a_row_is_enough(tmp_path: Path, name: str) -> None:
    """Order, memory, text, pictures, export and explanation."""
    _run(copy(tmp_path, name), "looks.py", name, str(tmp_path))


@pytest.mark.parametrize("name", [*EDITS, *LOOKED_AT])
def test_a_row_needs_at_most_four_files(tmp_path: Path, name: str) -> None:
    """Its numbers, its rows, a pass, and handlers."""
    tree = copy(tmp_path, name)
    changed = {
        str(file.relative_to(tree))
        for folder in PRODUCT
        for file in (tree / folder).rglob("*")
        if file.is_file() and not _same(file, ROOT / file.relative_to(tree))
    }
    own = {
        "schedir/ir/isa/opcodes.py",
        "schedir/ir/isa/instruction_table.py",
        f"schedir/passes/{name}.py",
    }
    assert own <= changed <= own | {f"schedir/runtime/handlers/{name}_handlers.py"}


def _same(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()


def test_rows_go_together(tmp_path: Path) -> None:
    """All of them in one tree, and in changed programs: what is refused is what does not run."""
    tree = copy(tmp_path, *EDITS)
    for name in EDITS:
        _run(tree, "looks.py", name, str(tmp_path))
    assert "with new rows" in _run(tree, "changed.py", "2")
