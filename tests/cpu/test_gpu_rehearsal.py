"""Tests that run tests/gpu on a CPU, and find mistakes before time on a GPU is used.

Tests with one process run by default. ALL_CASES=1 also runs those of NCCL, as in `make campaign`.
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
def test_gpu_tests_run_on_cpu(given: list[str]) -> None:
    """`SCHEDIR_REHEARSAL=1 python -m pytest tests/gpu` runs all of them."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *given],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env=os.environ | {"SCHEDIR_REHEARSAL": "1"},
    )  # fmt: skip
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout
