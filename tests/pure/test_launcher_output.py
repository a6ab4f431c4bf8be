"""Tests that the launcher forwards output of processes at once, with numbers, up to a limit."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from schedir.training.processes.launcher import MAX_OUTPUT_BYTES
from schedir.training.train import _import_modules

FORWARD = """\
import subprocess, sys
from schedir.training.processes.launcher import _start_forwarding
own = [sys.executable, "-u", "-c", sys.argv[1]]
with subprocess.Popen(own, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
    for thread in _start_forwarding(3, process):
        thread.join()
"""


def run_forwarded(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process, and return the output that the launcher forwards."""
    command = [sys.executable, "-c", FORWARD, code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)


def test_forwarded_lines_have_process_number() -> None:
    run = run_forwarded("import sys; print('one\\ntwo'); sys.stderr.write('three')")
    assert (run.stdout, run.stderr) == ("[3] one\n[3] two\n", "[3] three\n")


def test_output_above_limit_is_cut_and_reported() -> None:
    run = run_forwarded("for _ in range(50000): print(99 * 'x')")
    lines = run.stdout.splitlines()
    assert lines[0] == "[3] " + 99 * "x" and len(lines) == MAX_OUTPUT_BYTES // 100 + 1
    assert lines[-1] == f"[3] ... more than {MAX_OUTPUT_BYTES} bytes: the rest is not shown"


def test_output_is_forwarded_immediately() -> None:
    code = "import sys; print('now', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", FORWARD, code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"[3] now\n"


@pytest.mark.parametrize("end", ["", "raise ImportError"])
def test_imports_run_without_garbage_collection(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"loaded_{len(end)}"
    (tmp_path / f"{name}.py").write_text(f"import gc\nassert not gc.isenabled()\n{end}\n")
    monkeypatch.syspath_prepend(tmp_path)
    frozen_before = gc.get_freeze_count()
    try:
        _import_modules(name)
    except ImportError:
        assert end
    assert gc.isenabled()
    assert end or gc.get_freeze_count() > frozen_before
    sys.modules.pop(name, None)
