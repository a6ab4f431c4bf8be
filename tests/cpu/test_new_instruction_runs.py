"""Tests that the new instructions of `tests/new_rows` run with the bits of the reference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.new_rows import EDITS, copy_tree


def test_new_rows_run(tmp_path: Path) -> None:
    """Each runs alone and three run together, in a copy of the tree that has all of them."""
    tree = copy_tree(tmp_path / "tree", *EDITS)
    command = [
        sys.executable, str(tree / "tests" / "new_rows" / "run_checks.py"),
        *EDITS, "recompute,stash,judge",
    ]  # fmt: skip
    env = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
