"""Run all tests and benchmarks that need a GPU, the most important first.

    python benchmarks/gpu_run.py
    python benchmarks/gpu_run.py --minutes 9 --folder results; ... --rest --minutes 9
    python benchmarks/gpu_run.py --only streams --only "gpt"
    python benchmarks/gpu_run.py --device cpu

Each step is a process with a time limit. If a step hangs or fails, the other steps still run. The
output of a step is in `FOLDER/STEP.txt`, and in `STEP.txt.part` while the step runs. After every
step, the script rewrites `FOLDER/README.md`, so an interrupted run keeps its results. The page
lists the machine, the steps, and a table of goals and measured values. `--rest` runs only steps
without a result in the folder, to continue an interrupted run. `--device cpu` is a rehearsal: it
tests that the steps run, without steps that need a GPU. Its metrics mean nothing.

The exit code is 0 if all steps succeed and meet their goals, 2 without a GPU, and 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu_metrics
from benchmarks.harness import parse

ROOT: Final = Path(__file__).resolve().parents[1]
STATE = "results.json"
METRICS, FOLDER = (
    "METRICS",
    "FOLDER",
)  # placeholders in commands for the file of metrics and the folder
OUT_OF_TIME = "cut, as the run's time was over"
NOT_REHEARSED = "needs a GPU", "skipped"
SANITIZER = "TORCH_CUDA_SANITIZER"
MIN_STEP_SECONDS = 20.0  # seconds; the run starts no step if less time is left
GRACE_SECONDS = 5.0  # seconds between SIGTERM and SIGKILL


class Step(NamedTuple):
    """A test or a benchmark.

    Attributes:
        name: The name.
        about: The purpose.
        limit: The time limit, in seconds.
        command: The arguments of Python.
        environ: More environment variables.
        rehearsal: The arguments that replace `command` on a CPU.
    """

    name: str
    about: str
    limit: int
    command: Sequence[str]
    environ: Mapping[str, str] = {}
    rehearsal: Sequence[str] = ()

    def get_command(self, device: str) -> Sequence[str]:
        """Return the command for a device, or no command if the step cannot run there."""
        tests = self.command[:2] == ["-m", "pytest"] and SANITIZER not in self.environ
        return (
            self.command if device == "cuda" or (tests and not self.rehearsal) else self.rehearsal
        )


def make_test_command(*arguments: str) -> list[str]:
    """Return a command of pytest in which warnings of other packages are no errors."""
    return ["-m", "pytest", "-q", "-rfEs", "-W", "default", "-p", "no:cacheprovider",
            "--durations=3", *arguments]  # fmt: skip


def make_part_command(name: str) -> list[str]:
    return ["benchmarks/gpu.py", "--only", name, "--metrics", METRICS]


def make_training_command(*sets: str) -> list[str]:
    settings = ["pipeline.ranks=1", "pipeline.tp=1", "train.steps=20", "train.log_every=5", *sets]
    settings += [f'output.dir="{FOLDER}/train"', "output.overwrite=true"]
    return ["-m", "schedir", "train", "examples/demo.toml", f"--trace={FOLDER}/train",
            *(f"--set={s}" for s in settings)]  # fmt: skip


NCCL: Final = {"NCCL_DEBUG": "WARN"}
REHEARSAL: Final = {"SCHEDIR_REHEARSAL": "1"}  # makes tests/gpu run on a CPU
STREAMS: Final = "tests/gpu/test_streams.py"
STEPS: Final = (
    Step("machine", "the machine and its versions", 60, make_part_command("machine"),
         rehearsal=make_part_command("machine")),
    Step("queues", "streams that share a hardware queue", 60, make_part_command("queues")),
    Step("kernels", "kernels compared with float64", 240,
         make_test_command("tests/gpu/test_kernels.py")),
    Step("sanitizer", "virtual ranks with torch's sanitizer of streams", 180,
         make_test_command("-x", STREAMS), {SANITIZER: "1"}),
    Step("streams", "virtual ranks: no host waits, and Timelines", 120, make_test_command(STREAMS)),
    Step("nccl grouped", "2 x 2 processes on one GPU, one group", 280,
         make_test_command("-x", "tests/gpu/test_nccl.py", "-k",
                           "eager and grouped and one_f_one_b"),
         NCCL),
    Step("nccl edge", "2 x 2 processes on one GPU, a group per edge", 280,
         make_test_command("-x", "tests/gpu/test_nccl.py", "-k", "eager and edge and one_f_one_b"),
         NCCL),
    Step("nccl gather", "a late gather delays no layer", 120,
         make_test_command("tests/gpu/test_nccl.py", "-k", "late_gather"), NCCL),
    Step("bandwidth", "kernels compared with eager torch, torch.compile and Liger-Kernel", 420,
         ["benchmarks/kernels.py"]),
    *(Step(name, about, limit, make_part_command(name)) for name, about, limit in (
        ("stage", "a stage compared with its products and attention alone", 120),
        ("instruction", "the overhead of an instruction", 90),
        ("sleep", "four virtual ranks that sleep", 90),
        ("gpt", "four virtual ranks of a GPT", 240),
    )),
    Step("train", "schedir train, 20 steps in bfloat16", 180,
         make_training_command("train.device=cuda", "train.precision=bfloat16"),
         rehearsal=make_training_command("train.precision=bfloat16", "train.steps=2")),
    Step("loop", "a training loop without host waits", 180,
         make_test_command("tests/gpu/test_loop.py")),
    Step("nccl steps", "memory, waits for the device, all options at once, failures", 560,
         make_test_command("tests/gpu/test_nccl_steps.py"), NCCL),
    Step("nccl rest", "all other tests over NCCL", 560,
         make_test_command("tests/gpu/test_nccl.py", "-k", "not one_f_one_b and not late_gather"),
         NCCL),
    Step("random", "random numbers", 120, make_test_command("tests/gpu/test_random.py")),
    Step("offload", "saved activations on the host and its disk", 180,
         make_test_command("tests/gpu/test_offload.py")),
    Step("windows", "attention with windows, by FlexAttention", 300,
         make_test_command("tests/gpu/test_attention.py")),
    Step("gains", "measured and predicted speedup of windows", 560,
         ["benchmarks/kernels.py", "--only", "windows", "--device", "cuda"]),
)  # fmt: skip


class Result(NamedTuple):
    """The outcome of a step, its seconds, the last line of its output, and its metrics."""

    outcome: str
    seconds: float
    last_line: str
    metrics: list[list[Any]]

    @property
    def is_ok(self) -> bool:
        return self.outcome == "ok"


class Run:
    """Steps, and the folder of their results."""

    def __init__(self, folder: Path, device: str, minutes: float | None) -> None:
        self.folder, self.device = folder, device
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self.results: dict[str, Result] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if (state := folder / STATE).exists():
            self.results = {k: Result(*v) for k, v in json.loads(state.read_text()).items()}

    def run_step(self, step: Step) -> Result:
        """Run a step to its end or its time limit. Write its result and all tables."""
        command = step.get_command(self.device)
        limit = float(step.limit)
        if self.deadline is not None:
            limit = min(limit, self.deadline - time.monotonic())
        result = (
            self._run_process(step, command, limit)
            if command
            else Result(NOT_REHEARSED[0], 0, "", [])
        )
        self.results[step.name] = result
        self.write()
        return result

    def _run_process(self, step: Step, command: Sequence[str], limit: float) -> Result:
        output_path = self.folder / f"{name_output_file(step)}.part"
        metrics_path = self.folder / f"{name_output_file(step)}.metrics"
        metrics_path.unlink(missing_ok=True)
        arguments = [
            word.replace(METRICS, str(metrics_path)).replace(FOLDER, str(self.folder))
            for word in command
        ]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
        environ |= step.environ if self.device == "cuda" else REHEARSAL
        start = time.monotonic()
        with output_path.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, env=environ,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(max(limit, 1.0))
                outcome = "ok" if code == 0 else f"failed: {code}"
            except subprocess.TimeoutExpired:
                outcome = f"cut after {limit:.0f} s" if limit == step.limit else OUT_OF_TIME
            finally:
                stop_process(process)
        seconds = time.monotonic() - start
        lines = [
            line for line in output_path.read_text(errors="replace").splitlines() if line.strip()
        ]
        measured = [
            [f.name, f.value, f.unit, f.goal and f.goal.name]
            for f in gpu_metrics.read_metrics(metrics_path)
        ]
        metrics_path.unlink(missing_ok=True)
        output_path.replace(self.folder / name_output_file(step))
        last_line = lines[-1].strip("= ") if lines else ""
        # `last_line` is the last line of pytest's output.
        if outcome == "ok" and " skipped" in last_line and " passed" not in last_line:
            outcome = "skipped"
        return Result(outcome, seconds, last_line, measured)

    def write(self) -> None:
        """Write the current results, each file atomically."""
        write_atomically(self.folder / STATE, json.dumps(self.results, indent=1))
        write_atomically(
            self.folder / "README.md", format_page(self.folder, self.results, self.device)
        )


def name_output_file(step: Step) -> str:
    return f"{step.name.replace(' ', '_')}.txt"


def stop_process(process: subprocess.Popen[bytes]) -> None:
    """Stop a process and all processes that it has started."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        # A process that waits in a driver may never end. The run then continues.
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)


def write_atomically(path: Path, text: str) -> None:
    """Write a file under another name and rename it, so that it is complete or absent."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


def format_page(folder: Path, results: Mapping[str, Result], device: str) -> str:
    """Return the page with the machine, the steps and the goals, as Markdown."""
    machine = folder / name_output_file(STEPS[0])
    lines = machine.read_text().splitlines() if machine.exists() else []
    rows = ["# Run on a GPU" if device == "cuda" else "# A rehearsal without a GPU", ""]
    rows += [f"- {line}" for line in lines]
    rows += ["", "| step | what | ended | s | last line |", "| --- | --- | --- | --- | --- |"]
    for step in STEPS:
        r = results.get(step.name, Result("not run", 0, "", []))
        rows.append(f"| [{step.name}]({name_output_file(step)}) | {step.about} | {r.outcome} "
                    f"| {r.seconds:.0f} | {format_cell(r.last_line)} |")  # fmt: skip
    all_metrics = [
        (name, f) for name, r in results.items() for f in gpu_metrics.parse_metrics(r.metrics)
    ]
    rows += ["", "| goal | | measured | met |", "| --- | --- | --- | --- |"]
    for goal in gpu_metrics.GOALS:
        goal_metrics = [(name, f) for name, f in all_metrics if f.goal == goal]
        for name, f in goal_metrics:
            rows.append(
                f"| {goal.name} ({name}: {f.name}) | {goal} {goal.unit} "
                f"| {f.value:.2f} {f.unit} | {'no' if f.is_missed else 'yes'} |"
            )
        if not goal_metrics:
            rows.append(f"| {goal.name} | {goal} {goal.unit} | not measured | |")
    rows += ["", "| other metrics | |", "| --- | --- |"]
    rows += [
        f"| {name}: {f.name} | {f.value:.2f} {f.unit} |" for name, f in all_metrics if not f.goal
    ]
    return "\n".join(rows) + "\n"


def format_cell(text: str) -> str:
    """Return a line as the text of a table cell."""
    return text.replace("|", "/")[:120]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="run all tests and benchmarks that need a GPU")
    names = [step.name for step in STEPS]
    parser.add_argument(
        "--only", action="append", choices=names, help="run only this step; can be repeated"
    )
    parser.add_argument(
        "--rest", action="store_true", help="run only steps without a result in the folder"
    )
    parser.add_argument("--minutes", type=float, help="time limit of all steps together")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--folder", type=Path, help="folder of the results (docs/results/gpu)")
    options = parse(parser, argv, device="cpu", only=[STEPS[0].name])
    if options.smoke and options.folder is None:
        with tempfile.TemporaryDirectory() as folder:
            return run_steps(options, Path(folder))
    default_folder = ROOT / ("docs/results/gpu" if options.device == "cuda" else "out/gpu")
    return run_steps(options, options.folder or default_folder)


def run_steps(options: argparse.Namespace, folder: Path) -> int:
    """Run the selected steps, and return the exit code."""
    run = Run(folder.resolve(), options.device, options.minutes)
    has_gpu, is_ok = True, True
    for step in STEPS:
        # The first step always runs. Without a GPU it ends the run, in which pytest would skip all
        # tests.
        checks_gpu = step == STEPS[0] and options.device == "cuda"
        if options.only and step.name not in options.only and not checks_gpu:
            continue
        has_result = step.name in run.results and run.results[step.name].outcome != OUT_OF_TIME
        if options.rest and has_result and not checks_gpu:
            continue
        if run.deadline is not None and run.deadline - time.monotonic() < MIN_STEP_SECONDS:
            print(f"{step.name}: not run, there is no time left", flush=True)
            continue
        if not has_gpu:
            print(f"{step.name}: not run, there is no GPU", flush=True)
            continue
        result = run.run_step(step)
        print(
            f"{step.name}: {result.outcome}, {result.seconds:.0f} s: {result.last_line}", flush=True
        )
        if checks_gpu:
            has_gpu = result.outcome != "failed: 2"
        is_rehearsed = options.device == "cpu" and (
            step == STEPS[0] or result.outcome in NOT_REHEARSED
        )
        misses_goal = any(f.is_missed for f in gpu_metrics.parse_metrics(result.metrics))
        is_ok = is_ok and (result.is_ok or is_rehearsed) and not misses_goal
    print(f"\n{run.folder / 'README.md'}")
    return 2 if not has_gpu else int(not is_ok)


if __name__ == "__main__":
    sys.exit(main())
