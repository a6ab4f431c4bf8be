"""Faults: processes of runs are killed, stopped or led astray, and who is blamed is looked at.

    python benchmarks/faults.py [--seed 0] [--of 8 --part 3 | --only 7 89] [--csv faults.csv]

Every rank of pp 4, and of pp 2 x tp 2, over shared memory and over Gloo, under the launcher of
`schedir train` and under torchrun: SIGKILL, SIGSTOP, an error, a sleep, a loop, a limit of memory,
and an exit, at a moment that the seed draws: in set-up, between steps, inside of an instruction, or
in the loss.  Of each run it is noted whether the process is named, at which instruction or in which
phase, whether anybody else is called the cause, how long it took beyond the timeout, and what is
left: processes, files in places for temporary ones, shared memory.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import line, parse
from tests.cpu.training import CONFIG, ROOT

OURS = re.compile(r"([^\s\[].*: )?process \d")  # the head of what is said
TIMEOUT = 6.0  # seconds, of the runs
LONGEST = 120.0
KINDS = ("kill", "stop", "raise", "sleep", "spin", "memory", "exit")
WHERE = ("set-up", "between", "inside", "loss")
SHAPES = {"pp 4": (4, 1), "pp 2 x tp 2": (2, 2)}
TRANSPORTS = ("shared", "gloo")
LAUNCHERS = ("schedir", "torchrun")
COUNTED = ("named", "placed", "innocent", "left")

# A schedule's file is the user's own code: here it lets one process go wrong.
FAULTY = """
import os
import time
from pathlib import Path

from schedir.schedules import one_f_one_b as mine
from tests.cpu.faulty import goes_wrong

process, kind, where, number = os.environ["FAULT"].split(",")
if os.environ.get("RANK") == process:
    at = Path(os.environ["FAULT_AT"])
    goes_wrong(kind, where, int(number), lambda: at.write_text(str(time.time())))
"""


class Fault(NamedTuple):
    """Something that happens to a process of a run."""

    shape: str
    transport: str
    launcher: str
    process: int
    kind: str
    where: str
    number: int

    @property
    def name(self) -> str:
        """The process, as messages have it."""
        rank, slice_ = divmod(self.process, SHAPES[self.shape][1])
        tp = f", tp {slice_}" * (SHAPES[self.shape][1] > 1)
        return f"process {self.process} (pipeline rank {rank}{tp})"


class Verdict(NamedTuple):
    """What a run has said of a fault, and left; `late` is in seconds, beyond the timeout."""

    named: bool
    placed: bool
    innocent: bool
    late: float
    left: str
    said: str


def faults(seed: int) -> Iterator[Fault]:
    """All of them, each at a moment of its own."""
    draw = random.Random(seed)
    cases = itertools.product(SHAPES, TRANSPORTS, LAUNCHERS, range(4), KINDS)
    for shape, transport, launcher, process, kind in cases:
        last = process // SHAPES[shape][1] == SHAPES[shape][0] - 1
        where = draw.choice(WHERE if last else WHERE[:3])
        yield Fault(shape, transport, launcher, process, kind, where, draw.randint(1, 24))


def try_it(fault: Fault, folder: Path) -> Verdict:
    """Run into a fault, and look at what was said."""
    (folder / "mine.py").write_text(FAULTY)
    (folder / "run.toml").write_text(CONFIG.format(text=ROOT / "README.md"))
    temporary = folder / "tmp"
    temporary.mkdir()
    ranks, tp = SHAPES[fault.shape]
    sets = [
        f"pipeline.ranks={ranks}",
        f"pipeline.tp={tp}",
        "pipeline.stages_per_rank=1",
        "pipeline.microbatches=4",
        f"train.transport={fault.transport}",
        f"train.timeout={TIMEOUT}",
        "train.steps=100000",
        "train.log_every=1000",
        "output.record=false",
        f"output.folder={str(folder / 'out')!r}",
        f"pipeline.schedule={folder}/mine.py:mine",
    ]
    command = [sys.executable, "-m", "schedir"]
    if fault.launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   "--nproc-per-node", "4", "-m", "schedir"]  # fmt: skip
    command += ["train", str(folder / "run.toml"), *(f"--set={s}" for s in sets)]
    at = folder / "at"
    environment = os.environ | {
        "FAULT": f"{fault.process},{fault.kind},{fault.where},{fault.number}",
        "FAULT_AT": str(at), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    memory = {*os.listdir("/dev/shm")}
    lines: list[tuple[float, str]] = []
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as run:
        over = threading.Timer(LONGEST, run.kill)
        over.start()
        assert run.stderr is not None
        for said_line in run.stderr:
            lines.append((time.time(), said_line.decode(errors="replace")))
        over.cancel()
    said = "".join(line for _, line in lines)
    when = next((when for when, line in lines if OURS.match(line)), time.time())
    began = float(at.read_text()) if at.exists() else when
    late = when - began - (TIMEOUT if fault.kind in ("stop", "sleep", "spin") else 0.0)
    return Verdict(*judged(fault, said), late, left(folder, memory), said)


def judged(fault: Fault, text: str) -> tuple[bool, bool, bool]:
    """Whether the process is named, and where it was; and whether another is called the cause."""
    ours = [line for line in text.splitlines() if OURS.match(line)]
    first = next(iter(ours), "")
    found = re.search(r"process \d+ \([^)]*\)", first)
    named = found is not None and found[0] == fault.name
    at = text[text.find(first) :] if first else ""
    head = at.split("\n  process")[0]
    placed = bool(re.search(r"#\d+ +\S+ \d", head) or "in set-up" in head or "of step" in head
                  or "in step" in head)  # fmt: skip
    innocent = found is not None and not named
    root = re.search(r"Root Cause.*?rank +: (\d+)", text, re.S)
    if root is not None and int(root[1]) != fault.process:
        innocent = True
    return named, named and placed, innocent


def left(folder: Path, memory: set[str]) -> str:
    """What a run has left: processes, files that are temporary, shared memory."""
    time.sleep(0.3)
    found = []
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in status.read_bytes():
                found.append(f"process {status.parent.name}")
        except OSError:
            continue
    found += [f"file {path.name}" for path in (folder / "tmp").rglob("schedir*")]
    found += [f"memory {name}" for name in {*os.listdir("/dev/shm")} - memory if "schedir" in name]
    return ", ".join(found)


def print_table(path: Path) -> None:
    """Print a row for each kind of fault; times are those of faults in steps, and in set-up."""
    with path.open(newline="") as file:
        rows = [*csv.reader(file)]
    heads = ["fault", "tried", "named", "and where", "an innocent one", "left something"]
    heads += ["most seconds beyond the timeout, in steps", "in set-up"]
    line(*heads)
    line("---", *["---:"] * (len(heads) - 1))
    for kind in KINDS:
        own = [row for row in rows if row[5] == kind]
        late = [
            max((float(row[11]) for row in own if (row[6] == "set-up") is first), default=None)
            for first in (False, True)
        ]
        yes = [sum(row[column] == "True" for row in own) for column in (8, 9, 10)]
        said = ["" if most is None else f"{most:.1f}" for most in late]
        line(kind, len(own), *yes, sum(bool(row[12]) for row in own), *said)


def main() -> int:
    """Try faults, and print what came of them; the exit code is 1 where that was not good."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--of", type=int, default=1, help="of so many parts")
    parser.add_argument("--part", type=int, default=0, help="the one that is tried")
    parser.add_argument("--only", type=int, nargs="+", help="those of these numbers")
    parser.add_argument("--csv", type=Path, help="append a line for each fault to this file")
    parser.add_argument(
        "--table", type=Path, metavar="CSV", help="only print the table of a file that --csv wrote"
    )
    args = parse(parser, only=[0])
    if args.table:
        print_table(args.table)
        return 0
    if not args.smoke:
        return try_all(args)
    with tempfile.TemporaryDirectory() as folder:
        args.csv = Path(folder, "faults.csv")
        code = try_all(args)
        print_table(args.csv)
        return code


def try_all(args: argparse.Namespace) -> int:
    """Try the faults that are asked for, and return the exit code."""
    bad = 0
    counts: Counter[tuple[str, str]] = Counter()
    for number, fault in enumerate(faults(args.seed)):
        if number not in args.only if args.only else number % args.of != args.part:
            continue
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            verdict = try_it(fault, Path(folder))
        good = verdict.placed and not verdict.innocent and not verdict.left
        print(number, *fault, "good" if good else "BAD", f"{verdict.late:.1f} s", verdict.left)
        if not good:
            bad += 1
            print(verdict.said[-3000:])
        sys.stdout.flush()
        counts[fault.kind, "tried"] += 1
        for what in COUNTED:
            counts[fault.kind, what] += bool(getattr(verdict, what))
        if args.csv:
            with args.csv.open("a", newline="") as file:
                row = [number, *fault, verdict.named, verdict.placed, verdict.innocent,
                       f"{verdict.late:.2f}", verdict.left]  # fmt: skip
                csv.writer(file).writerow(row)
    for kind in KINDS:
        print(kind, *(f"{what} {counts[kind, what]}" for what in ("tried", *COUNTED)))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
