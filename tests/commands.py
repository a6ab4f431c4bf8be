"""Running the command line, in this process and as a person does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from schedir.__main__ import main

ENV = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command that must go well prints."""
    code = main(argv)
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one message of a command that must be refused."""
    code = main(argv)
    out, err = capsys.readouterr()
    assert code == 2 and not out, (code, out, err)
    assert "Traceback" not in err and len(re.findall(r"^\w+Error: ", err, re.M)) == 1, err
    return err


def command(*argv: str) -> "subprocess.CompletedProcess[str]":
    argv = (sys.executable, "-m", "schedir", *argv)
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, env=ENV)
