"""Tests that a new instruction needs a row, a pass and a handler, and other code supports it.

Each test adds instructions of `tests/new_rows` to a copy of the tree.
`cpu/test_new_instruction_runs.py` runs them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import ALL, cases
from tests.new_rows import EDITS, EDITS_WITHOUT_HANDLERS, PRODUCT, ROOT, copy_tree


def run_script(tree: Path, script: str, *args: str) -> str:
    command = [sys.executable, str(tree / "tests" / "new_rows" / script), *args]
    # Numba would compile its loops again for each copy of the tree.
    env = {"PYTHONPATH": str(tree), "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "names",
    cases(
        [(*EDITS,), (*EDITS_WITHOUT_HANDLERS,)],
        [(name,) for name in (*EDITS, *EDITS_WITHOUT_HANDLERS)],
    ),
    ids="-".join,
)
def test_table_rows_support_all_static_features(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Check order, memory, text, pictures, export and explanation of programs with new rows."""
    run_script(copy_tree(tmp_path, *names), "static_checks.py", *names, str(tmp_path))


def test_new_instruction_changes_at_most_four_files(tmp_path: Path) -> None:
    """The files are the opcodes, the instruction table, a pass and handlers."""
    tree = copy_tree(tmp_path, *EDITS, *EDITS_WITHOUT_HANDLERS)
    changed_files = {
        str(file.relative_to(tree))
        for folder in PRODUCT
        for file in (tree / folder).rglob("*")
        if file.suffix != ".pyc"
        and file.is_file()
        and not has_same_bytes(file, ROOT / file.relative_to(tree))
    }
    assert changed_files == {
        "schedir/ir/isa/opcodes.py",
        "schedir/ir/isa/instruction_table.py",
        *(f"schedir/passes/{name}.py" for name in (*EDITS, *EDITS_WITHOUT_HANDLERS)),
        *(f"schedir/runtime/handlers/{name}_handlers.py" for name in EDITS),
    }


def has_same_bytes(first: Path, second: Path) -> bool:
    return second.is_file() and first.read_bytes() == second.read_bytes()


def test_check_of_new_instructions_agrees_with_oracle(tmp_path: Path) -> None:
    """One tree contains all new rows with handlers. Programs with them are mutated."""
    tree = copy_tree(tmp_path, *EDITS)
    assert "with new rows" in run_script(tree, "mutation_checks.py", "1" if ALL else "4")
