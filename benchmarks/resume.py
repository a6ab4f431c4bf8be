"""Measure whether killed training runs resume from their checkpoints with the same losses.

    TORCH_CPP_LOG_LEVEL=FATAL python benchmarks/resume.py [--seed 0] [--kills 100] [--csv kills.csv]

Each run has pp 2, or pp 2 x dp 2 with zero 3, and saves a checkpoint after every fifth step. The
script draws a process and a moment from the seed, and kills the process with SIGKILL. The moment is
during set-up (or the load of a checkpoint), in a step, or while the process writes losses or a
checkpoint. It can also be a rename, a removal or an fsync of a file. When all processes have ended,
the script runs the same command again, until the run is complete. Then the next run begins.

For each kill, the script prints and records the number of lost steps, and checks the step at which
the next start resumes. For each run, it compares the losses with those of an unbroken run, byte for
byte, and lists extra files. The script imports torch, forks the processes, and sets the environment
variables that torchrun sets.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import find_free_port, fork_ranks, parse
from schedir.checkpoints.async_saver import Saver
from schedir.checkpoints.checkpoint_directory import CheckpointDirectory
from schedir.models import gpt
from schedir.training import checkpointing, run_results, step_queue, trainer
from schedir.training.processes import process_world
from schedir.training.processes.watchdog import Watchdog
from schedir.training.train import run

CHECKPOINT_INTERVAL, STEPS = 5, 23
HANG_SECONDS = 180.0  # seconds after which processes count as hung
SHAPES = {
    "pp 2": ["pipeline.ranks=2"],
    "pp 2 x dp 2, zero 3": ["pipeline.ranks=2", "pipeline.dp=2", "pipeline.zero=3"],
}
PLACES = ("set-up", "step", "losses", "save", "file")
CONFIG = """
[model]
layers = 2
hidden = 16
heads = 2
context = 8
dropout = 0.1

[pipeline]
microbatches = 2

[data]
source = "{text}"
microbatch_size = 2

[train]
steps = {steps}
warmup = 2
log_every = 1
timeout = 30

[output]
record = false
"""


class Kill(NamedTuple):
    """A kill of a process.

    Attributes:
        process: The process that is killed.
        where: The place in the code, one of `PLACES`.
        times: The visit of this place at which the process is killed, from 1.
        delay: The seconds from this visit to the kill.
    """

    process: int
    where: str
    times: int
    delay: float


def draw_kill(draw: random.Random, processes: int) -> Kill:
    """Draw the next kill."""
    place = draw.choice(PLACES)
    max_visits = {"set-up": 6, "step": 20, "losses": 20, "save": 4, "file": 30}[place]
    # Only process 0 writes losses and renames files.
    process = 0 if place == "losses" else draw.randrange(processes)
    max_delay = {"set-up": 0.05, "step": 0.02, "losses": 0.0, "save": 0.06, "file": 0.0}[place]
    return Kill(process, place, draw.randint(1, max_visits), draw.uniform(0, max_delay))


def install_kill(kill: Kill) -> None:
    """Wrap functions of this process, so that it is killed at the place of `kill`."""
    visits_left = [kill.times]

    def end() -> None:
        if kill.delay:
            time.sleep(kill.delay)
        os.kill(os.getpid(), signal.SIGKILL)

    def wrap(owner: Any, name: str, *, after: bool = False) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def run_and_kill(*args: Any, **kwargs: Any) -> Any:
            visits_left[0] -= 1
            is_due = visits_left[0] == 0
            if is_due and kill.delay:
                threading.Thread(target=end, daemon=True).start()
            elif is_due and not after:
                end()
            result = function(*args, **kwargs)
            if is_due and after:
                end()
            return result

        setattr(owner, name, run_and_kill)

    owner: Any
    match kill.where:
        case "set-up":
            for owner, name in (
                (process_world, "met"), (gpt, "build_stage"), (trainer, "Executor"),
                (checkpointing, "load"), (run_results.LossLog, "begin"), (Watchdog, "watching"),
            ):  # fmt: skip
                wrap(owner, name)
        case "step":
            wrap(step_queue.StepQueue, "issue")
        case "losses":
            wrap(run_results.LossLog, "write", after=bool(kill.times % 2))
        case "save":
            for owner, name in (
                (checkpointing.TrainingCheckpoints, "save"), (Saver, "due"), (Saver, "write"),
            ):  # fmt: skip
                wrap(owner, name)
        case "file":
            for name in ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir"):
                wrap(os, name, after=bool(kill.times % 2))


def run_processes(
    sets: list[str], folder: Path, processes: int, kill: Kill | None
) -> tuple[bool, str]:
    """Run all processes to their end. Return whether all succeeded, and their output."""
    output_path = folder / "said.txt"
    output_path.write_text("")

    def work(rank: int) -> None:
        if kill is not None and kill.process == rank:
            install_kill(kill)
        run(str(folder / "run.toml"), sets)

    children = fork_ranks(processes, find_free_port(), output_path, work)
    deadline, codes = time.monotonic() + HANG_SECONDS, []
    for child in children:
        while True:
            ended_pid, status = os.waitpid(child, os.WNOHANG)
            if ended_pid:
                codes.append(os.waitstatus_to_exitcode(status))
                break
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                raise SystemExit(f"process {child} hangs after {kill}: {output_path.read_text()}")
            time.sleep(0.01)
    return not any(codes), output_path.read_text()


def read_last_step(folder: Path) -> int:
    """Return the last step in the file of losses."""
    path = folder / "out" / "loss.csv"
    rows = path.read_text().splitlines()[1:] if path.exists() else []
    return int(rows[-1].partition(",")[0]) if rows else 0


def find_newest_checkpoint(folder: Path) -> int:
    """Return the step of the newest checkpoint."""
    return CheckpointDirectory(folder / "saved").find_newest_step() or 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--csv", metavar="FILE")
    options = parse(parser, kills=1)
    draw, counts, rows, number = random.Random(options.seed), Counter[str](), [], 0
    root_folder = Path(tempfile.mkdtemp(prefix="resume-"))
    (root_folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 40)
    config = CONFIG.format(text=root_folder / "text.txt", steps=STEPS)
    unbroken_losses: dict[str, bytes] = {}
    shared = {*os.listdir("/dev/shm")}
    while counts["kills"] < options.kills:
        shape = [*SHAPES][number % 2]
        number += 1
        folder = root_folder / str(number)
        folder.mkdir()
        (folder / "run.toml").write_text(config)
        processes = 2 if shape == "pp 2" else 4
        base = [*SHAPES[shape], f'output.dir="{folder / "out"}"']
        if shape not in unbroken_losses:
            succeeded, text = run_processes(base, folder, processes, None)
            assert succeeded, text
            unbroken_losses[shape] = (folder / "out" / "loss.csv").read_bytes()
            shutil.rmtree(folder / "out")
        sets = [
            *base,
            f'train.checkpoint_dir="{folder / "saved"}"',
            f"train.checkpoint_every={CHECKPOINT_INTERVAL}",
        ]
        is_complete, checkpoint_step, last_step = False, 0, 0
        kill: Kill | None = None
        while not is_complete:
            needs_kill = counts["kills"] < options.kills
            previous_kill, kill = kill, draw_kill(draw, processes) if needs_kill else None
            is_complete, text = run_processes(sets, folder, processes, kill)
            resumed_line = re.search(r"^resumed at step (\d+) ", text, re.M)
            # A run that was killed before it printed a line does not show where it resumed.
            if resumed_line or " step " in text:
                resumed_step = int(resumed_line[1]) if resumed_line else 0
                # Two intervals may be lost: a checkpoint is due while another one is written.
                if (
                    resumed_step != checkpoint_step
                    or last_step - resumed_step > 2 * CHECKPOINT_INTERVAL
                ):
                    raise SystemExit(
                        f"after {previous_kill} resumed at {resumed_step}, not "
                        f"{checkpoint_step}: {text}"
                    )
            if is_complete:
                break
            checkpoint_step, last_step = find_newest_checkpoint(folder), read_last_step(folder)
            assert kill is not None, text
            counts["kills"] += 1
            counts[kill.where] += 1
            lost = last_step - checkpoint_step
            counts["lost"] = max(counts["lost"], lost)
            rows.append((shape, *kill, checkpoint_step, last_step, lost))
            print(
                f"{counts['kills']:>3} {shape}: {kill}, saved {checkpoint_step}, made {last_step}",
                flush=True,
            )
        counts["runs"] += 1
        has_same_losses = (folder / "out" / "loss.csv").read_bytes() == unbroken_losses[shape]
        counts["same losses"] += has_same_losses
        extra_files = {p.name for p in (folder / "out").iterdir()} - {
            "loss.csv",
            "run.json",
            "summary.json",
        }
        extra_files |= {p.name for p in (folder / "saved").iterdir()} - {
            ".checkpoints.lock", "run.json", "step-00000020", f"step-{STEPS:08}"}  # fmt: skip
        extra_files |= {name for name in {*os.listdir("/dev/shm")} - shared if "schedir" in name}
        counts["left something"] += bool(extra_files)
        if extra_files or not has_same_losses:
            print(f"run {number}: same losses {has_same_losses}, left {extra_files}", flush=True)
    shutil.rmtree(root_folder)
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            csv.writer(file).writerows([("shape", *Kill._fields, "saved", "made", "lost"), *rows])
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    if counts["same losses"] < counts["runs"] or counts["left something"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
