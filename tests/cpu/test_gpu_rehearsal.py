"""Tests that run tests/gpu on a CPU, so that no time on a GPU is lost to simple mistakes.

Tests with one process run by default, and those of NCCL with ALL_CASES=1, as in `make campaign`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import cases

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "given",
    cases(
        [[f"tests/gpu/test_{name}.py" for name in ("streams", "random")]],
        [
            ["tests/gpu/test_nccl.py", "-k", "eager and one_f_one_b and edge and None"],
            ["tests/gpu/test_nccl_steps.py", "-k", "proven or dies"],
        ],
    ),
)
def test_they_run_where_a_cpu_stands_in(given: list[str]) -> None:
    """`SCHEDIR_REHEARSAL=1 python -m pytest tests/gpu` runs all of them."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *given],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env=os.environ | {"SCHEDIR_REHEARSAL": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout
