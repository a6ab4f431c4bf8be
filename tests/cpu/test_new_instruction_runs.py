"""Tests that the new instructions of `tests/new_rows` run, and equal the reference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.new_rows import EDITS, copy_tree


def test_new_instructions_run_alone_and_together(tmp_path: Path) -> None:
    """The checks run in a copy of the tree that has all of the new instructions."""
    tree = copy_tree(tmp_path / "tree", *EDITS)
    command = [
        sys.executable, str(tree / "tests" / "new_rows" / "run_checks.py"),
        *EDITS, "recompute,stash,judge",
    ]  # fmt: skip
    env = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
