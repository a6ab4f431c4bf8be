"""Run the commands in an environment that has only the packages of a plain install: no torch.

`python -m tests.plain_install dist/schedir.whl` installs a wheel with pip into a new environment,
runs its commands in an empty folder, and prints its size and the time until a first picture.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from schedir import Costs, PipelineShape, check, compile, schedules, simulate
from schedir.analysis.dependency_graph import Graph
from tests import flight_recorder_dumps, kineto

MOST_MEGABYTES = 250  # for a whole environment with pip
SHAPE = "--ranks 4 --microbatches 8"
# Commands that work without torch, and the file that each writes.
WORKS = (
    (f"print one_f_one_b {SHAPE} -o x.sched", "x.sched"),
    ("check x.sched", None),
    ("simulate x.sched --costs F=1,B=2 -o x.timeline", "x.timeline"),
    ("calibrate x.timeline", None),
    ("explain x.sched --costs F=1,B=2", None),
    ("draw x.sched", None),
    ("draw x.sched -o x.png", "x.png"),
    ("draw x.sched -o x.svg", "x.svg"),
    ("draw x.sched -o x.html", "x.html"),
    (f"compare one_f_one_b interleaved {SHAPE}", None),
    (f"recommend {SHAPE}", None),
    ("search --ranks 2 --microbatches 4 --time-limit 1", None),
    (
        "plan --model gpt-175b --cluster a100 --nodes 8 --batch 64 --tp 8 --pp 8 --schedules gpipe",
        None,
    ),
    (f"export interleaved {SHAPE} --to torch -o x.csv", "x.csv"),
    ("import x.csv -o y.sched", "y.sched"),
    ("import traces -o run.timeline", "run.timeline"),
    ("diagnose dumps", None),
    ("train --help", None),
)
# Arguments of python that must fail and name the extra that installs torch.
REFUSED = (
    ("-m", "schedir", "train", "x.toml"),
    ("-m", "schedir", "checkpoint", "export", "x", "--to", "x.safetensors"),
    ("-m", "schedir", "plan", "--measure", "-o", "here.toml"),
    ("-c", "import schedir.runtime"),
    ("-c", "from schedir.runtime import Executor"),
    ("-c", "from schedir.torch_pipelining import Schedule"),
    ("-c", "from schedir.checkpoints import load"),
    ("-c", "from schedir.testing import assert_same_gradients"),
)


# Runs the arguments of several interpreters in one, and prints how each ends.
ONE_PROCESS = """
import contextlib, io, json, sys, traceback
from schedir.__main__ import main
ends = []
for argv in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv[2:]) if argv[0] == "-m" else exec(argv[1], {})
        except SystemExit as end:
            code = end.code
        except Exception:
            traceback.print_exc()
            code = 1
    ends.append((code or 0, out.getvalue(), err.getvalue()))
print(json.dumps(ends))
"""


def use(python: Path, folder: Path, *, in_one_process: bool = False) -> None:
    """Run each command in an empty folder.

    Args:
        python: The interpreter of an environment without torch.
        folder: Where commands run and write.
        in_one_process: Run all commands in one process, which takes less time.

    Raises:
        AssertionError: A command failed, wrote no file, or did not refuse to run without torch.
    """
    _write_inputs(folder)
    works = [("-m", "schedir", *line.split()) for line, _ in WORKS]
    if in_one_process:
        text = json.dumps([*works, *REFUSED])
        done = _run(python, folder, "-c", ONE_PROCESS, text=text)
        assert done.returncode == 0, done.stderr
        ends = [subprocess.CompletedProcess[str](python, *end) for end in json.loads(done.stdout)]
    else:
        ends = [_run(python, folder, *argv) for argv in (*works, *REFUSED)]
    for (line, written), done in zip(WORKS, ends, strict=False):
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        assert written is None or (folder / written).stat().st_size > 0, line
    for argv, done in zip(REFUSED, ends[len(WORKS) :], strict=True):
        assert done.returncode == (2 if argv[0] == "-m" else 1), (argv, done.stdout, done.stderr)
        assert "needs torch, which is not installed" in done.stderr, (argv, done.stderr)
        assert "hint: pip install 'schedir[torch]'" in done.stderr, (argv, done.stderr)
        assert argv[0] == "-c" or "Traceback" not in done.stderr, (argv, done.stderr)


def _write_inputs(folder: Path) -> None:
    """Write traces of two steps, and dumps of a run that hangs at its first instruction."""
    program = compile(schedules.one_f_one_b, PipelineShape(ranks=2, microbatches=4))
    (folder / "traces").mkdir()
    kineto.write_traces(folder / "traces", 2 * [simulate(check(program), Costs(F=1, B=2))], seed=1)
    (folder / "dumps").mkdir()
    for recorder in flight_recorder_dumps.record(
        flight_recorder_dumps.stop_at(Graph(program), 0, blocking_hosts=True)
    ):
        recorder.save(folder / "dumps")


def _run(
    python: Path, folder: Path, *argv: str, text: str = ""
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [python, *argv],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        input=text,
    )


def _megabytes(folder: Path) -> float:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e6


def main() -> int:
    """Install a wheel, run its commands, and print sizes and times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--python", default=sys.executable, help="the interpreter of the environment"
    )
    args = parser.parse_args()
    wheel = args.wheel.resolve()
    size = wheel.stat().st_size / 1e6
    assert size < 2, f"the wheel has {size:.2f} MB"
    with TemporaryDirectory() as scratch:
        environment, folder = Path(scratch, "environment"), Path(scratch, "empty")
        folder.mkdir()
        subprocess.run([args.python, "-m", "venv", environment], check=True)
        python = environment / "bin" / "python"
        begin = time.perf_counter()
        options = ("--quiet", "--disable-pip-version-check")
        done = _run(python, folder, "-m", "pip", "install", *options, str(wheel))
        assert done.returncode == 0, done.stderr
        installed = time.perf_counter()
        drawn = _run(python, folder, "-m", "schedir", *f"draw zb_h1 {SHAPE} -o a.png".split())
        assert drawn.returncode == 0, drawn.stderr
        end = time.perf_counter()
        megabytes = _megabytes(environment)
        assert megabytes < MOST_MEGABYTES, f"the environment has {megabytes:.0f} MB"
        use(python, folder)
    print(f"wheel: {size:.2f} MB; environment with pip: {megabytes:.0f} MB, without torch")
    print(
        f"from `pip install` to a picture: {end - begin:.1f} s ({installed - begin:.1f} s of it "
        f"pip's); then {len(WORKS)} commands worked and {len(REFUSED)} asked for torch"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
