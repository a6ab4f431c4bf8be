"""The new instructions of `tests/new_rows` run with the bits of the reference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.new_rows import EDITS, copy_tree


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with all new instructions."""
    return copy_tree(tmp_path_factory.mktemp("new") / "tree", *EDITS)


@pytest.mark.parametrize("name", [*EDITS, "recompute,stash,judge"])
def test_a_new_row_runs(tree: Path, name: str) -> None:
    command = [sys.executable, str(tree / "tests" / "new_rows" / "run_checks.py"), name]
    env = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
