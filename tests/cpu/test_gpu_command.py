"""Tests of the command that runs all GPU steps, also if steps fail or hang."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_metrics, gpu_run
from benchmarks.gpu_run import METRICS, STATE, Step
from schedir.io.black_box import read_process_state
from tests.cases import campaign
from tests.cpu.train_command import wait_until

ROOT = Path(__file__).parents[2]
GOOD = Step("good", "", 60, ["-c", "print('one'); print('two')"])
BAD = Step("bad", "", 60, ["-c", "import sys; sys.exit('no: it fails')"])
LINE = '["a gap", 12.5, "us", "gap between ready instructions, eager"]'
MEASURES = Step("measures", "", 60, ["-c", f"open(r'{METRICS}', 'w').write('''{LINE}\n''')"])
# The child of this step would run for a long time.
HANGS = Step("hangs", "", 5, ["-c", """if True:
    import subprocess, sys, time
    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
    print(child.pid, flush=True)
    time.sleep(600)
"""])  # fmt: skip


@pytest.fixture(autouse=True)
def _replace_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the steps, which need a GPU."""
    monkeypatch.setattr(gpu_run, "STEPS", (GOOD, BAD, MEASURES, HANGS))
    yield


def list_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read_rows(folder: Path) -> list[list[str]]:
    lines = (folder / "README.md").read_text().splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]


def test_failing_or_hanging_step_does_not_stop_other_steps(tmp_path: Path) -> None:
    assert gpu_run.main(["--folder", str(tmp_path)]) == 1
    assert list_files(tmp_path) == sorted(
        ["README.md", STATE, "good.txt", "bad.txt", "measures.txt", "hangs.txt"]
    )
    steps = {row[0].partition("]")[0][1:]: row[2:] for row in read_rows(tmp_path) if len(row) == 5}
    assert steps["good"][::2] == ["ok", "two"]
    assert steps["bad"][::2] == ["failed: 1", "no: it fails"]
    assert steps["hangs"][0] == "cut after 5 s"
    child = int((tmp_path / "hangs.txt").read_text())
    wait_until(lambda: read_process_state(child, 0) not in ("runs", "stopped"))
    goals = {row[0]: row[1:] for row in read_rows(tmp_path) if len(row) == 4}
    assert goals[f"{gpu_metrics.GAP.name} (measures: a gap)"] == ["<= 10 us", "12.50 us", "no"]
    assert goals[gpu_metrics.MEMORY.name] == ["<= 2 %", "not measured", ""]


def test_exit_code_is_nonzero_if_step_or_goal_fails(tmp_path: Path) -> None:
    def run_only(*only: str) -> int:
        return gpu_run.main(["--folder", str(tmp_path), *(f"--only={name}" for name in only)])

    assert [run_only("good"), run_only("good", "measures"), run_only("good", "bad")] == [0, 1, 1]


def test_interrupted_run_continues_with_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ["--folder", str(tmp_path)]
    assert gpu_run.main([*folder, "--minutes", "0.1"]) == 0
    assert capsys.readouterr().out.count("there is no time left") == 4
    monkeypatch.setattr(gpu_run, "MIN_STEP_SECONDS", 0.0)
    hangs = HANGS._replace(limit=60)
    monkeypatch.setattr(gpu_run, "STEPS", (GOOD, hangs))
    assert gpu_run.main([*folder, "--minutes", "0.03"]) == 1
    assert capsys.readouterr().out.splitlines()[1].startswith(f"hangs: {gpu_run.OUT_OF_TIME}, ")
    monkeypatch.setattr(gpu_run, "STEPS", (GOOD, hangs._replace(command=GOOD.command), MEASURES))
    assert gpu_run.main([*folder, "--rest"]) == 1
    # The first step, which identifies the machine, runs again.
    step_names = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()[:-2]]
    assert step_names == ["good", "hangs", "measures"]


def test_killed_run_leaves_partial_output(tmp_path: Path) -> None:
    steps = [tuple(GOOD), tuple(HANGS._replace(limit=600))]
    script = (
        "from benchmarks import gpu_run\n"
        f"gpu_run.STEPS = tuple(gpu_run.Step(*fields) for fields in {steps!r})\n"
        f"gpu_run.main(['--folder', {str(tmp_path)!r}])"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.DEVNULL)
    partial_output = tmp_path / "hangs.txt.part"
    try:
        deadline = time.monotonic() + 120
        while not (partial_output.exists() and partial_output.read_text().endswith("\n")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    child = int(partial_output.read_text())
    os.killpg(os.getpgid(child), signal.SIGKILL)  # nothing else would kill it
    assert list_files(tmp_path) == ["README.md", "good.txt", "hangs.txt.part", STATE]
    assert [row[2] for row in read_rows(tmp_path) if len(row) == 5][2:] == ["ok", "not run"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpu_later_steps_do_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert gpu_run.main(["--folder", str(tmp_path)]) == 2
    first, *later_lines, _, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("machine: failed: 2")
    assert "torch finds none" in (tmp_path / "machine.txt").read_text()
    assert later_lines == [f"{s.name}: not run, there is no GPU" for s in gpu_run.STEPS[1:]]
    assert list_files(tmp_path) == ["README.md", "machine.txt", STATE]
    no_gpu = gpu_run.STEPS[0]._replace(command=["-c", "import sys; sys.exit(2)"])
    monkeypatch.setattr(gpu_run, "STEPS", (no_gpu, *gpu_run.STEPS[1:]))
    assert gpu_run.main(["--folder", str(tmp_path), "--only", "streams"]) == 2
    assert "streams: not run, there is no GPU" in capsys.readouterr().out


def test_run_with_only_skipped_tests_fails(tmp_path: Path) -> None:
    for summary, code in (("2 skipped in 1 s", 1), ("1 passed, 2 skipped in 1 s", 0)):
        step = GOOD._replace(command=["-c", f"print('{summary}')"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu_run, "STEPS", (GOOD, step._replace(name="tests")))
            assert gpu_run.main(["--folder", str(tmp_path)]) == code


def list_test_arguments() -> list[list[str]]:
    """Return the arguments of pytest in each step that runs tests."""
    commands = [s.command for s in gpu_run.STEPS if s.command[:2] == ["-m", "pytest"]]
    return [[word for word in command[2:] if word != "-x"] for command in commands]


def test_every_step_has_files_with_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of each step exists, and the file of a step has the names after `-k`."""
    monkeypatch.undo()
    for step in gpu_run.STEPS:
        if step.command[0] != "-m":
            assert (ROOT / step.command[0]).is_file(), step.name
    tested_files = set()
    for words in list_test_arguments():
        (file,) = (word for word in words if word.endswith(".py"))
        text = (ROOT / file).read_text()
        names = re.findall(r"\w+", words[words.index("-k") + 1]) if "-k" in words else []
        required = ["def test_", *(name for name in names if name not in ("and", "not"))]
        assert [name for name in required if name not in text] == [], file
        tested_files.add(file)
    gpu_tests = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/gpu/test_*.py")}
    assert gpu_tests <= tested_files
    outputs = [gpu_run.name_output_file(step) for step in gpu_run.STEPS]
    assert len({*outputs}) == len(outputs) and len(list_test_arguments()) > 8


@campaign
def test_pytest_collects_tests_of_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    arguments = list_test_arguments()
    script = "import pytest\n" + "".join(
        f"print(int(pytest.main(['--collect-only', *{words!r}])))\n" for words in arguments
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    codes = [line for line in result.stdout.splitlines() if line.isdecimal()]
    assert codes == ["0"] * len(arguments), result.stdout
