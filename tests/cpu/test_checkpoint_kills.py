"""Tests of runs with checkpoints whose processes are killed, with the campaign's first kills.

There is one kill by default, and five with ALL_CASES=1.
"""

from __future__ import annotations

import sys

from tests.cases import ALL
from tests.cpu.train_command import ROOT, finish, start


def test_after_kills_a_run_goes_on_as_if_it_had_not_broken() -> None:
    """Kills are in set-up, in steps, and while a checkpoint is copied or written.

    The command fails if a start does not resume, loses too many steps, or has other losses.
    """
    kills = 5 if ALL else 1
    script = str(ROOT / "benchmarks" / "resume.py")
    command = [sys.executable, script, f"--kills={kills}", "--seed=11"]
    code, out, err = finish(start(command))
    assert code == 0, out + err
    assert f"kills {kills}, " in out
