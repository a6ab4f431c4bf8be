"""Measure whether all processes end in time after a fault in one, and whether reports name it.

    TORCH_CPP_LOG_LEVEL=FATAL python benchmarks/faults.py [--seed 0] [--trials 100] [--only 7 89]

Each trial draws a configuration and a fault. The configuration has up to 4 processes (pp, tp and
dp) over shared memory or Gloo. Its options include ZeRO, offload, optimizer states on the host or
the disk, stage segments, several updates, checkpoints and overlap. The fault of one process is an
error, SIGKILL, SIGSTOP, SIGINT, an exit or a sleep. It happens before, within or after a drawn
instruction of a drawn step, on the lane of this instruction, or while a checkpoint is written.

- Every process must end by itself within `TIMEOUT` + `EXTRA_SECONDS` seconds after the fault.
- The report must begin with the process at fault and its instruction. A slow disk must not cause a
  failure.
- If the run saves checkpoints, the script runs the command again without a fault. The losses must
  equal those of an unbroken run, byte for byte. Only result files may remain in the folder.

The script prints a row per trial: the fault, the seconds until the last process ended, the problems
or "good", and the options. If processes do not end, it prints their stacks.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo  # every optimizer imports it, so import it before processes are forked

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import find_free_port, fork_ranks, parse
from schedir.checkpoints import dcp_storage
from schedir.errors import SchedirError
from schedir.ir.isa.instructions import INSTRUCTIONS, Lane, Opcode
from schedir.training import trainer
from schedir.training.config.config_file import read_config
from schedir.training.processes import process_world
from schedir.training.train import build_program, run
from tests.cpu import process_faults

assert (
    trainer and process_world and torch._dynamo
)  # imported before the fork, so that processes share them
TIMEOUT, EXTRA_SECONDS, NO_FAULT_TIMEOUT = 12.0, 12.0, 60.0  # seconds
STEPS = 7
KINDS = ("raise", "kill", "stop", "interrupt", "exit", "sleep")
HANGING_KINDS = ("stop", "sleep")
MOMENTS = ("before", "within", "behind")
RESULTS = {"loss.csv", "run.json", "summary.json", "evaluation.csv"}
CONFIG = """
[model]
context = 8
hidden = 16
heads = 2

[data]
source = "{text}"
microbatch_size = 2

[train]
steps = {steps}
warmup = 2
log_every = 2
timeout = {timeout}
shutdown_grace = 5

[output]
record = false
"""


class Fault(NamedTuple):
    """A fault of a process.

    Attributes:
        process: The process.
        kind: One of `KINDS`.
        op: The name of the instruction, or "save" for a fault while a checkpoint is written.
        position: The index of the instruction in the Stream of the rank.
        moment: One of `MOMENTS`, or "on the lane" for a fault on the lane of the instruction.
        step: The step of the fault, from 1.
    """

    process: int
    kind: str
    op: str
    position: int
    moment: str
    step: int

    @property
    def is_slow_disk(self) -> bool:
        """Return whether the fault is a slow disk, which must not cause a failure."""
        return self.op == "save" and self.kind == "sleep"


class Outcome(NamedTuple):
    """The result of a run.

    Attributes:
        codes: The exit codes of the processes.
        hung: The ids of the processes that the script had to kill.
        end_delay: The seconds from the fault to the end of the last process.
        output: The output of all processes.
    """

    codes: list[int]
    hung: list[int]
    end_delay: float
    output: str


def draw_configuration(draw: random.Random, folder: Path) -> list[str]:
    """Draw the settings of a run. schedir refuses some of them."""
    pp, tp, dp = draw.choice([(2, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 2), (2, 2, 1), (1, 2, 2)])
    model = draw.choice(["gpt", "gpt", "gpt", "llama"])
    settings: dict[str, object] = {
        "model.kind": model, "model.layers": 4,
        "pipeline.ranks": pp, "pipeline.tp": tp, "pipeline.dp": dp,
        "pipeline.zero": draw.randrange(4) if dp > 1 else 0,
        "pipeline.overlap": draw.random() < 0.5,
        "pipeline.microbatches": draw.choice([2, 4]),
        "train.transport": draw.choice(["shared_memory", "gloo"]),
        "train.clip_grad_norm": draw.choice([0, 1]),
    }  # fmt: skip
    schedules = ["one_f_one_b", "gpipe", "interleaved", "zb_h1", "zb_v"]
    settings["pipeline.schedule"] = draw.choice(schedules if pp > 1 else schedules[:2])
    if settings["pipeline.schedule"] in ("interleaved", "zb_v"):
        settings["pipeline.stages_per_rank"] = 2
    states = draw.choice(["device", "host", "cpu_step", "disk"])
    settings["memory.optimizer_placement"] = states
    if draw.random() < 0.4:
        settings["memory.offload"] = draw.choice(["all", "half"])
        if draw.random() < 0.5:
            settings["memory.offload_to_disk"] = "all"
    if states == "disk" or "memory.offload_to_disk" in settings:
        settings["memory.spill_dir"] = str(folder)
    if draw.random() < 0.2:
        settings["memory.recompute"] = "all"
    if tp > 1 and model == "gpt" and draw.random() < 0.5:
        settings["pipeline.stage_segments"] = "all"
        if draw.random() < 0.5:
            settings["pipeline.fill_collective_waits"] = "all"
    if tp > 1 and draw.random() < 0.4:
        settings["pipeline.sequence_parallel"] = True
    if draw.random() < 0.2:
        settings["pipeline.optimizer_steps"] = 2
    if draw.random() < 0.7:
        settings["train.checkpoint_dir"] = str(folder / "saved")
        settings["train.checkpoint_every"] = 2
    if draw.random() < 0.2:
        settings["train.evaluate_every"], settings["data.validation"] = 3, 0.2
    return [f"{name}={_format_toml(value)}" for name, value in settings.items()]


def _format_toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool | int) else repr(value)


def draw_trial(draw: random.Random, path: Path, folder: Path) -> tuple[list[str], Fault]:
    """Draw a configuration that schedir accepts, and a fault that its program can have."""
    while True:
        sets = draw_configuration(draw, folder)
        try:
            config = read_config(str(path), [*sets, f"output.dir={str(folder / 'out')!r}"])
            program = build_program(config)
        except SchedirError:
            continue
        saves = config.train.checkpoint_dir is not None
        process = draw.randrange(config.world_size)
        stream = program.streams[process // program.tp % program.shape.ranks]
        ops = sorted({int(op) for op, _, _ in stream})
        op = -1 if saves and draw.random() < 0.2 else draw.choice(ops)
        if op < 0:
            return sets, Fault(process, draw.choice(KINDS), "save", 0, "before", draw.randint(1, 2))
        index = draw.choice([k for k, i in enumerate(stream) if i.op == op])
        on_lane = INSTRUCTIONS[op].lane in (Lane.D2H, Lane.H2D, Lane.DISK, Lane.HOST)
        moment = draw.choice((*MOMENTS, "on the lane") if on_lane else MOMENTS)
        name = Opcode(op).name
        return sets, Fault(
            process, draw.choice(KINDS), name, index, moment, draw.randint(1, STEPS - 1)
        )


# ---------------------------------------------------------------- in a process


def install_fault(fault: Fault, note: Path) -> None:
    """Install the fault in this process."""

    def cause_fault() -> None:
        note.write_text(str(time.time()))
        if fault.is_slow_disk:
            time.sleep(TIMEOUT + 2)
        else:
            process_faults.cause_fault(fault.kind)

    if fault.op == "save":
        dcp_storage.write = process_faults.fail_at_call(
            fault.step, "", dcp_storage.write, cause_fault
        )
    else:
        process_faults.install_instruction_fault(
            fault.position, fault.step, fault.moment, cause_fault
        )


def start_store() -> tuple[int, int]:
    """Start a process with the TCPStore of a run, as torchrun does. Return its id and port."""
    port = find_free_port()
    if child := os.fork():
        return child, port
    tcp_store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=True, wait_for_workers=False
    )
    while tcp_store:
        time.sleep(1)
        if os.getppid() == 1:
            os._exit(0)
    os._exit(0)


def run_processes(sets: list[str], folder: Path, processes: int, fault: Fault | None) -> Outcome:
    """Run all processes to their end."""
    agent, port = start_store()
    output_path, fault_time_path = folder / "said.txt", folder / "at"
    output_path.write_text("")
    fault_time_path.unlink(missing_ok=True)
    sets = [*sets, f"output.dir={str(folder / 'out')!r}"]

    def work(rank: int) -> None:
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        # A shell starts background jobs with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        (folder / "tmp").mkdir(exist_ok=True)
        tempfile.tempdir = str(folder / "tmp")
        if fault is not None and fault.process == rank:
            install_fault(fault, fault_time_path)
        run(str(folder / "run.toml"), sets)

    children = fork_ranks(processes, port, output_path, work, TORCHELASTIC_USE_AGENT_STORE="True")
    try:
        return _wait_for_processes(children, output_path, fault_time_path)
    finally:
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)


def _wait_for_processes(children: list[int], output_path: Path, fault_time_path: Path) -> Outcome:
    """Wait for processes. If some do not end, make them print their stacks, and kill them."""
    start, codes, hung, last_end = time.time(), dict[int, int](), list[int](), 0.0
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                ended_pid, status = os.waitpid(child, os.WNOHANG)
                if ended_pid:
                    codes[child], last_end = os.waitstatus_to_exitcode(status), time.time()
        fault_time = (
            float(fault_time_path.read_text() or start) if fault_time_path.exists() else 0.0
        )
        deadline = fault_time + TIMEOUT + EXTRA_SECONDS if fault_time else start + NO_FAULT_TIMEOUT
        if time.time() > deadline and not hung:
            hung = [child for child in children if child not in codes]
            for child in hung:
                os.kill(child, signal.SIGUSR1)
            time.sleep(1)
            for child in hung:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    fault_time = float(fault_time_path.read_text() or start) if fault_time_path.exists() else 0.0
    end_delay = last_end - fault_time if fault_time else 0.0
    return Outcome(
        [codes[c] for c in children], hung, end_delay, output_path.read_text(errors="replace")
    )


# ---------------------------------------------------------------- checks of the result


def find_errors(fault: Fault, outcome: Outcome, happened: bool) -> list[str]:
    """Return the problems of a run with a fault, as texts."""
    problems = []
    if outcome.hung:
        problems.append(f"{len(outcome.hung)} processes did not end")
    if not happened:
        return [*problems, *(["failed without a fault"] if any(outcome.codes) else [])]
    if not any(outcome.codes) or fault.is_slow_disk:
        if any(outcome.codes) == fault.is_slow_disk:
            problems.append("failed for a slow disk" if fault.is_slow_disk else "nobody failed")
        return problems
    first_line = re.search(r"^(?:[^\s\[].*: )?process (\d+) \(.*", outcome.output, re.M)
    # If one process cannot save, all processes raise an error with the number of this process.
    first_line = (
        re.search(r"CheckpointError: process (\d+): ValueError.*", outcome.output) or first_line
    )
    if first_line is None:
        problems.append("nothing was said")
    elif int(first_line[1]) != fault.process:
        problems.append(f"process {first_line[1]} was blamed")
    elif fault.op != "save" and not re.search(r"#\d+ ", first_line[0]):
        text = outcome.output[first_line.end() :].partition("\nprocess ")[0]
        if not re.search(r"#\d+ ", text):
            problems.append("no instruction was named")
    if "Traceback" in outcome.output:
        problems.append("a traceback was shown")
    return problems


def find_resume_errors(folder: Path, sets: list[str], processes: int) -> list[str]:
    """Resume the run, and compare it with an unbroken run. Return the problems, as texts."""
    sets = [*sets, f"train.timeout={NO_FAULT_TIMEOUT}"]  # on a busy machine no process may time out
    resumed = run_processes(sets, folder, processes, None)
    if any(resumed.codes):
        return [f"did not go on: {resumed.output}"]
    losses = (folder / "out" / "loss.csv").read_bytes()
    extra_files = {path.name for path in (folder / "out").iterdir()} - RESULTS
    extra_files |= {p.name for p in (folder / "saved").iterdir() if not re.fullmatch(
        r"step-\d{8}|run\.json|\.checkpoints\.lock", p.name)}  # fmt: skip
    extra_files |= {path.name for path in (folder / "tmp").iterdir() if "inductor" not in path.name}
    problems = [f"left {', '.join(sorted(extra_files))}"] if extra_files else []
    for name in ("out", "saved"):
        shutil.rmtree(folder / name)
    unbroken = run_processes(sets, folder, processes, None)
    if any(unbroken.codes):
        return [*problems, f"fails unbroken: {unbroken.output}"]
    if (folder / "out" / "loss.csv").read_bytes() != losses:
        problems.append("other losses than unbroken")
    return problems


def main() -> None:
    """Cause faults, and print their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--only", type=int, nargs="+", help="run only trials with these numbers")
    parser.add_argument("--no-resume", action="store_true", help="do not resume runs after a fault")
    args = parse(parser, trials=2)
    torch.set_num_threads(1)
    root_folder, counts, longest_delay = (
        Path(tempfile.mkdtemp(prefix="hangs-")),
        Counter[str](),
        0.0,
    )
    (root_folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 80)
    config = CONFIG.format(text=root_folder / "text.txt", steps=STEPS, timeout=TIMEOUT)
    shared = {*os.listdir("/dev/shm")}
    for number in args.only or range(args.trials):
        draw = random.Random(f"{args.seed} {number}")
        folder = root_folder / str(number)
        folder.mkdir()
        path = folder / "run.toml"
        path.write_text(config)
        sets, fault = draw_trial(draw, path, folder)
        processes = read_config(str(path), sets).world_size
        outcome = run_processes(sets, folder, processes, fault)
        happened = (folder / "at").exists()
        problems = find_errors(fault, outcome, happened)
        patience = TIMEOUT if fault.kind in HANGING_KINDS else 0.0
        counts["trials"] += 1
        counts["faults"] += happened
        counts[fault.kind] += happened
        if happened:
            longest_delay = max(longest_delay, outcome.end_delay - patience)
        if (
            happened
            and not args.no_resume
            and any("train.checkpoint_dir" in setting for setting in sets)
        ):
            counts["resumed"] += 1
            problems += find_resume_errors(folder, sets, processes)
        if memory := [n for n in {*os.listdir("/dev/shm")} - shared if "schedir" in n]:
            problems.append(f"left {memory} in memory")
        counts["wrong"] += bool(problems)
        settings_text = " ".join(setting.split(".", 1)[1] for setting in sets)
        print(
            number,
            *fault,
            f"{outcome.end_delay:.1f} s",
            "; ".join(problems) or "good",
            "|",
            settings_text,
        )
        if problems:
            print(outcome.output[-6000:])
        sys.stdout.flush()
        shutil.rmtree(folder)
    shutil.rmtree(root_folder)
    print(", ".join(f"{name} {count}" for name, count in counts.items()), end="")
    print(f"; at most {longest_delay:.1f} s beyond the timeout")
    if counts["wrong"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
