"""Cause a fault in one process of a run: all must end in time, and the report must name it.

    TORCH_CPP_LOG_LEVEL=FATAL python benchmarks/hangs.py [--seed 0] [--trials 100] [--only 7 89]

Each trial draws a configuration and a fault. The configuration has up to 4 processes (pp, tp and
dp), and options such as ZeRO, offload, optimizer states on the host or the disk, stage segments,
several updates, checkpoints and overlap, over shared memory or Gloo. The fault is an error,
SIGKILL, SIGSTOP, SIGINT, an exit or a sleep of one process. It happens before, within or after an
instruction of a drawn kind in a drawn step, on the lane of this instruction, or while a checkpoint
is written.

- Every process must end without help within `TIMEOUT` and `MORE` seconds after the fault.
- The report must begin with the process at fault and its instruction. A slow disk must not cause a
  failure.
- If the run saves checkpoints, the command runs again without a fault. Its losses must equal those
  of an unbroken run, byte for byte, and only results may remain in the folder.

If processes do not end, the script prints the stacks of all of them.
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

assert trainer and process_world and torch._dynamo  # imported here, so forked processes share them
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
    """A fault of a process: its kind, its step (from 1), and its instruction.

    The fault can happen on the lane of the instruction. The kind of instruction "save" is a fault
    while a checkpoint is written.
    """

    process: int
    kind: str
    op: str
    at: int
    when: str
    step: int

    @property
    def is_slow_disk(self) -> bool:
        """Return whether the fault is a slow disk, which must not cause a failure."""
        return self.op == "save" and self.kind == "sleep"


class Outcome(NamedTuple):
    """How processes ended.

    These are the exit codes, the processes that did not end without help, the seconds from the
    fault to the last end, and the output.
    """

    codes: list[int]
    hung: list[int]
    late: float
    said: str


def draw_configuration(draw: random.Random, folder: Path) -> list[str]:
    """Return settings of a run. schedir refuses some of them."""
    pp, tp, dp = draw.choice([(2, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 2), (2, 2, 1), (1, 2, 2)])
    model = draw.choice(["gpt", "gpt", "gpt", "llama"])
    found: dict[str, object] = {
        "model.kind": model, "model.layers": 4,
        "pipeline.ranks": pp, "pipeline.tp": tp, "pipeline.dp": dp,
        "pipeline.zero": draw.randrange(4) if dp > 1 else 0,
        "pipeline.overlap": draw.random() < 0.5,
        "pipeline.microbatches": draw.choice([2, 4]),
        "train.transport": draw.choice(["shared_memory", "gloo"]),
        "train.clip_grad_norm": draw.choice([0, 1]),
    }  # fmt: skip
    schedules = ["one_f_one_b", "gpipe", "interleaved", "zb_h1", "zb_v"]
    found["pipeline.schedule"] = draw.choice(schedules if pp > 1 else schedules[:2])
    if found["pipeline.schedule"] in ("interleaved", "zb_v"):
        found["pipeline.stages_per_rank"] = 2
    states = draw.choice(["device", "host", "cpu_step", "disk"])
    found["memory.optimizer_placement"] = states
    if draw.random() < 0.4:
        found["memory.offload"] = draw.choice(["all", "half"])
        if draw.random() < 0.5:
            found["memory.offload_to_disk"] = "all"
    if states == "disk" or "memory.offload_to_disk" in found:
        found["memory.spill_dir"] = str(folder)
    if draw.random() < 0.2:
        found["memory.recompute"] = "all"
    if tp > 1 and model == "gpt" and draw.random() < 0.5:
        found["pipeline.stage_segments"] = "all"
        if draw.random() < 0.5:
            found["pipeline.fill_collective_waits"] = "all"
    if tp > 1 and draw.random() < 0.4:
        found["pipeline.sequence_parallel"] = True
    if draw.random() < 0.2:
        found["pipeline.optimizer_steps"] = 2
    if draw.random() < 0.7:
        found["train.checkpoint_dir"] = str(folder / "saved")
        found["train.checkpoint_every"] = 2
    if draw.random() < 0.2:
        found["train.evaluate_every"], found["data.validation"] = 3, 0.2
    return [f"{name}={_format_toml(value)}" for name, value in found.items()]


def _format_toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool | int) else repr(value)


def draw_trial(draw: random.Random, path: Path, folder: Path) -> tuple[list[str], Fault]:
    """Return a configuration that schedir accepts, and a fault that its program can have."""
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
        at = draw.choice([k for k, i in enumerate(stream) if i.op == op])
        on_lane = INSTRUCTIONS[op].lane in (Lane.D2H, Lane.H2D, Lane.DISK, Lane.HOST)
        when = draw.choice((*MOMENTS, "on the lane") if on_lane else MOMENTS)
        name = Opcode(op).name
        return sets, Fault(process, draw.choice(KINDS), name, at, when, draw.randint(1, STEPS - 1))


# ---------------------------------------------------------------- in a process


def install_fault(fault: Fault, note: Path) -> None:
    """Make the fault happen in this process."""

    def fails() -> None:
        note.write_text(str(time.time()))
        if fault.is_slow_disk:
            time.sleep(TIMEOUT + 2)
        else:
            process_faults.cause_fault(fault.kind)

    if fault.op == "save":
        dcp_storage.write = process_faults.fail_at_call(fault.step, "", dcp_storage.write, fails)
    else:
        process_faults.install_instruction_fault(fault.at, fault.step, fault.when, fails)


def start_store() -> tuple[int, int]:
    """Start a process that has the store of a run, as an agent of torchrun. Return pid and port."""
    port = find_free_port()
    if child := os.fork():
        return child, port
    own = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=True, wait_for_workers=False
    )
    while own:
        time.sleep(1)
        if os.getppid() == 1:
            os._exit(0)
    os._exit(0)


def run_processes(sets: list[str], folder: Path, processes: int, fault: Fault | None) -> Outcome:
    """Run all processes until they have ended."""
    agent, port = start_store()
    said, note = folder / "said.txt", folder / "at"
    said.write_text("")
    note.unlink(missing_ok=True)
    sets = [*sets, f"output.dir={str(folder / 'out')!r}"]

    def work(rank: int) -> None:
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        # A shell starts background jobs with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        (folder / "tmp").mkdir(exist_ok=True)
        tempfile.tempdir = str(folder / "tmp")
        if fault is not None and fault.process == rank:
            install_fault(fault, note)
        run(str(folder / "run.toml"), sets)

    children = fork_ranks(processes, port, said, work, TORCHELASTIC_USE_AGENT_STORE="True")
    try:
        return _wait_for_processes(children, said, note)
    finally:
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)


def _wait_for_processes(children: list[int], said: Path, note: Path) -> Outcome:
    """Wait for processes. Print the stacks of those that do not end, and end them."""
    began, codes, hung, last = time.time(), dict[int, int](), list[int](), 0.0
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    codes[child], last = os.waitstatus_to_exitcode(status), time.time()
        since = float(note.read_text() or began) if note.exists() else 0.0
        over = since + TIMEOUT + EXTRA_SECONDS if since else began + NO_FAULT_TIMEOUT
        if time.time() > over and not hung:
            hung = [child for child in children if child not in codes]
            for child in hung:
                os.kill(child, signal.SIGUSR1)
            time.sleep(1)
            for child in hung:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    since = float(note.read_text() or began) if note.exists() else 0.0
    late = last - since if since else 0.0
    return Outcome([codes[c] for c in children], hung, late, said.read_text(errors="replace"))


# ---------------------------------------------------------------- what came of it


def find_errors(fault: Fault, ends: Outcome, happened: bool) -> list[str]:
    """Return what is wrong with a run that has a fault."""
    found = []
    if ends.hung:
        found.append(f"{len(ends.hung)} processes did not end")
    if not happened:
        return [*found, *(["failed without a fault"] if any(ends.codes) else [])]
    if not any(ends.codes) or fault.is_slow_disk:
        if any(ends.codes) == fault.is_slow_disk:
            found.append("failed for a slow disk" if fault.is_slow_disk else "nobody failed")
        return found
    head = re.search(r"^(?:[^\s\[].*: )?process (\d+) \(.*", ends.said, re.M)
    # If one process cannot save, all processes raise an error that names this process.
    head = re.search(r"CheckpointError: process (\d+): ValueError.*", ends.said) or head
    if head is None:
        found.append("nothing was said")
    elif int(head[1]) != fault.process:
        found.append(f"process {head[1]} was blamed")
    elif fault.op != "save" and not re.search(r"#\d+ ", head[0]):
        text = ends.said[head.end() :].partition("\nprocess ")[0]
        if not re.search(r"#\d+ ", text):
            found.append("no instruction was named")
    if "Traceback" in ends.said:
        found.append("a traceback was shown")
    return found


def find_resume_errors(folder: Path, sets: list[str], processes: int) -> list[str]:
    """Resume the run and run it from the beginning. Return what is wrong."""
    sets = [*sets, f"train.timeout={NO_FAULT_TIMEOUT}"]  # on a busy machine no process may time out
    again = run_processes(sets, folder, processes, None)
    if any(again.codes):
        return [f"did not go on: {again.said}"]
    got = (folder / "out" / "loss.csv").read_bytes()
    left = {path.name for path in (folder / "out").iterdir()} - RESULTS
    left |= {p.name for p in (folder / "saved").iterdir() if not re.fullmatch(
        r"step-\d{8}|run\.json|\.checkpoints\.lock", p.name)}  # fmt: skip
    left |= {path.name for path in (folder / "tmp").iterdir() if "inductor" not in path.name}
    found = [f"left {', '.join(sorted(left))}"] if left else []
    for name in ("out", "saved"):
        shutil.rmtree(folder / name)
    whole = run_processes(sets, folder, processes, None)
    if any(whole.codes):
        return [*found, f"fails unbroken: {whole.said}"]
    if (folder / "out" / "loss.csv").read_bytes() != got:
        found.append("other losses than unbroken")
    return found


def main() -> None:
    """Cause faults, and print their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--only", type=int, nargs="+", help="run only trials with these numbers")
    parser.add_argument("--no-resume", action="store_true", help="do not resume runs after a fault")
    args = parse(parser, trials=2)
    torch.set_num_threads(1)
    home, counts, most = Path(tempfile.mkdtemp(prefix="hangs-")), Counter[str](), 0.0
    (home / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 80)
    config = CONFIG.format(text=home / "text.txt", steps=STEPS, timeout=TIMEOUT)
    shared = {*os.listdir("/dev/shm")}
    for number in args.only or range(args.trials):
        draw = random.Random(f"{args.seed} {number}")
        folder = home / str(number)
        folder.mkdir()
        path = folder / "run.toml"
        path.write_text(config)
        sets, fault = draw_trial(draw, path, folder)
        processes = read_config(str(path), sets).world_size
        ends = run_processes(sets, folder, processes, fault)
        happened = (folder / "at").exists()
        found = find_errors(fault, ends, happened)
        patience = TIMEOUT if fault.kind in HANGING_KINDS else 0.0
        counts["trials"] += 1
        counts["faults"] += happened
        counts[fault.kind] += happened
        if happened:
            most = max(most, ends.late - patience)
        if happened and not args.no_resume and any("train.checkpoint_dir" in one for one in sets):
            counts["resumed"] += 1
            found += find_resume_errors(folder, sets, processes)
        if memory := [n for n in {*os.listdir("/dev/shm")} - shared if "schedir" in n]:
            found.append(f"left {memory} in memory")
        counts["wrong"] += bool(found)
        shown = " ".join(one.split(".", 1)[1] for one in sets)
        print(number, *fault, f"{ends.late:.1f} s", "; ".join(found) or "good", "|", shown)
        if found:
            print(ends.said[-6000:])
        sys.stdout.flush()
        shutil.rmtree(folder)
    shutil.rmtree(home)
    print(", ".join(f"{name} {count}" for name, count in counts.items()), end="")
    print(f"; at most {most:.1f} s beyond the timeout")
    if counts["wrong"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
