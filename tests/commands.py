"""Run the command line, in this process or in another process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from schedir.__main__ import main

ENV = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}


def run_command(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return what a command prints that must succeed."""
    code = main(argv)
    out, err = capsys.readouterr()
    assert (code, err) == (0, ""), err
    return out


def run_refused_command(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the one error message of a command that must be refused."""
    code = main(argv)
    out, err = capsys.readouterr()
    assert code == 2 and not out, (code, out, err)
    assert "Traceback" not in err and len(re.findall(r"^\w+Error: ", err, re.M)) == 1, err
    return err


def run_process(*argv: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in another process."""
    argv = (sys.executable, "-m", "schedir", *argv)
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, env=ENV)
