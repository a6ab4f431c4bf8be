"""Tests that run tests/gpu on a CPU, and find mistakes before time on a GPU is used.

Tests with one process run by default. ALL_CASES=1 also runs those of NCCL, as in `make campaign`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import ALL, cases
from tests.cpu.train_command import Run

ONE_PROCESS = [f"tests/gpu/test_{name}.py" for name in ("streams", "random")]


@pytest.mark.parametrize(
    "given",
    cases(
        [ONE_PROCESS if ALL else [*ONE_PROCESS, "-k", "shape1-dtype1 or True"]],
        [
            ["tests/gpu/test_nccl.py", "-k", "eager and one_f_one_b and edge and None"],
            ["tests/gpu/test_nccl_steps.py", "-k", "proven or dies"],
        ],
    ),
)
def test_gpu_tests_run_on_cpu(given: list[str], tmp_path: Path) -> None:
    """`SCHEDIR_REHEARSAL=1 python -m pytest tests/gpu` runs all of them."""
    # The process has already loaded helper modules, so pytest cannot rewrite their assertions.
    quiet = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    words = ["-m", "pytest", *quiet, *given]
    code, out, err = Run(words, tmp_path / "rehearsal", SCHEDIR_REHEARSAL="1").finish()
    assert code == 0 and " passed" in out, out + err
