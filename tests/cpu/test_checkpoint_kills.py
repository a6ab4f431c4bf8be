"""Tests of training runs that are killed and resume from checkpoints.

There is one kill by default, in a step after two checkpoints. With ALL_CASES=1 there are five.
"""

from __future__ import annotations

from pathlib import Path

from tests.cases import ALL
from tests.cpu.train_command import ROOT, run_launched


def test_killed_run_resumes_with_equal_losses(tmp_path: Path) -> None:
    """Processes are killed in set-up, in steps, and while they copy or write a checkpoint.

    The command fails if a start does not resume, loses too many steps, or has other losses.
    """
    kills, seed = (5, 11) if ALL else (1, 15)
    script = str(ROOT / "benchmarks" / "resume.py")
    code, out, err = run_launched(
        [script, f"--kills={kills}", f"--seed={seed}"], tmp_path / "kills"
    )
    assert code == 0, out + err
    assert f"kills {kills}, " in out
