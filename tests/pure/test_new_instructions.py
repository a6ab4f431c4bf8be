"""Tests that a new instruction needs a row, a pass and a handler, and other code supports it.

Each test adds instructions of `tests/new_rows` to a copy of the tree.
`cpu/test_new_instruction_runs.py` runs them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import ALL
from tests.new_rows import EDITS, EDITS_WITHOUT_HANDLERS, PRODUCT, ROOT, copy_tree


def run_script(tree: Path, script: str, *args: str) -> str:
    command = [sys.executable, str(tree / "tests" / "new_rows" / script), *args]
    env = {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [*EDITS, *EDITS_WITHOUT_HANDLERS])
def test_table_row_supports_all_static_features(tmp_path: Path, name: str) -> None:
    """Check order, memory, text, pictures, export and explanation of its programs."""
    run_script(copy_tree(tmp_path, name), "static_checks.py", name, str(tmp_path))


@pytest.mark.parametrize("name", [*EDITS, *EDITS_WITHOUT_HANDLERS])
def test_new_instruction_changes_at_most_four_files(tmp_path: Path, name: str) -> None:
    """The files are the opcodes, the instruction table, a pass and handlers."""
    tree = copy_tree(tmp_path, name)
    changed_files = {
        str(file.relative_to(tree))
        for folder in PRODUCT
        for file in (tree / folder).rglob("*")
        if file.suffix != ".pyc"
        and file.is_file()
        and not has_same_bytes(file, ROOT / file.relative_to(tree))
    }
    required_files = {
        "schedir/ir/isa/opcodes.py",
        "schedir/ir/isa/instruction_table.py",
        f"schedir/passes/{name}.py",
    }
    assert (
        required_files
        <= changed_files
        <= required_files | {f"schedir/runtime/handlers/{name}_handlers.py"}
    )


def has_same_bytes(first: Path, second: Path) -> bool:
    return second.is_file() and first.read_bytes() == second.read_bytes()


def test_all_new_instructions_work_together(tmp_path: Path) -> None:
    """One tree contains all new rows. The checker agrees with the oracle on mutated programs."""
    tree = copy_tree(tmp_path, *EDITS)
    run_script(tree, "static_checks.py", *EDITS, str(tmp_path))
    assert "with new rows" in run_script(tree, "mutation_checks.py", "2" if ALL else "1")
