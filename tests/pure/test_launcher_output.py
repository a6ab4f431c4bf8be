"""Tests that output of processes is passed on at once, with their numbers, within limits."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from schedir.training.processes.launcher import MAX_OUTPUT_BYTES
from schedir.training.train import _import_modules

PASSES_ON = """\
import subprocess, sys
from schedir.training.processes.launcher import _start_forwarding
own = [sys.executable, "-u", "-c", sys.argv[1]]
with subprocess.Popen(own, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
    for thread in _start_forwarding(3, process):
        thread.join()
"""


def passed_on(code: str) -> subprocess.CompletedProcess[str]:
    """Return the output that is passed on for a process that runs some code."""
    command = [sys.executable, "-c", PASSES_ON, code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)


def test_lines_have_the_number_of_their_process() -> None:
    run = passed_on("import sys; print('one\\ntwo'); sys.stderr.write('three')")
    assert (run.stdout, run.stderr) == ("[3] one\n[3] two\n", "[3] three\n")


def test_more_than_a_bound_is_left_out_and_that_is_said() -> None:
    run = passed_on("for _ in range(50000): print(99 * 'x')")
    lines = run.stdout.splitlines()
    assert lines[0] == "[3] " + 99 * "x" and len(lines) == MAX_OUTPUT_BYTES // 100 + 1
    assert lines[-1] == f"[3] ... more than {MAX_OUTPUT_BYTES} bytes: the rest is not shown"


def test_it_comes_as_it_is_printed() -> None:
    code = "import sys; print('now', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", PASSES_ON, code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"[3] now\n"


@pytest.mark.parametrize("end", ["", "raise ImportError"])
def test_nothing_looks_for_garbage_while_a_process_loads(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"loaded_{len(end)}"
    (tmp_path / f"{name}.py").write_text(f"import gc\nassert not gc.isenabled()\n{end}\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = gc.get_freeze_count()
    try:
        _import_modules(name)
    except ImportError:
        assert end
    assert gc.isenabled()
    assert end or gc.get_freeze_count() > before
    sys.modules.pop(name, None)
