"""Checkpoints: what saving costs the steps of a run, and how long torchrun takes to come back.

    TORCH_CPP_LOG_LEVEL=FATAL python benchmarks/checkpoints.py [--rounds 12] [--starts 5]

Steps are those of `schedir train` on pp 2, in blocks of `--every`: one that saves nothing, one
whose first step copies a checkpoint that is written beside the others, and one whose first step is
followed by a save that all wait for.  All are in one run, turn by turn, so that they meet the same
load; a block is told as a multiple of the one without before it, and the median of these counts.

A start is the time from the command to the end of the first step, under torchrun; a restart that
from the death of a process by SIGKILL to the end of the first step that is made after it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, time

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import parse
from schedir.training.saving import Saving
from schedir.training.train import run

KINDS = ("without", "beside", "at once")
CONFIG = """
[model]
layers = 4
hidden = 128
heads = 4
context = 64

[pipeline]
ranks = 2
microbatches = 4

[data]
source = "{text}"
microbatch_size = 2

[output]
record = false
folder = "{folder}/out"

[train]
checkpoint = "{folder}/saved"
"""
DYING = """\
import os
import signal
import time

from schedir.schedules import one_f_one_b as mine
from schedir.training import steps

settle = steps.Steps.settle
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def settles(self):
    made = settle(self)
    with open({stamps!r}, "a") as file:
        file.write(f"{{time.time()!r}} {{attempt}} {{self.number}} step\\n")
        file.flush()
        if attempt == 0 and self.number == 9 and os.environ["RANK"] == "1":
            file.write(f"{{time.time()!r}} {{attempt}} {{self.number}} killed\\n")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    return made


steps.Steps.settle = settles
"""


def blocks(home: Path, rounds: int, every: int) -> dict[str, list[float]]:
    """The seconds of each block, by its kind."""
    cycle, begins = every * len(KINDS), list[float]()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])

    def beside(self: Saving, step: int) -> bool:
        if step % every == 0 or step == self.train.steps - 1:
            begins.append(perf_counter())
        return step % cycle == KINDS.index("beside") * every

    def at_once(self: Saving, step: int) -> bool:
        return step % cycle == KINDS.index("at once") * every + 1

    steps = cycle * (rounds + 1) + 1  # the first round warms up
    sets = [f"train.steps={steps}", f"train.every={every}", "train.log_every=50"]
    close, children = Saving.close, []
    for rank in range(2):
        if child := os.fork():
            children.append(child)
            continue
        try:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port,
                           "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2",
                           "LOCAL_WORLD_SIZE": "2"}  # fmt: skip
            Saving.beside, Saving.at_once = beside, at_once  # type: ignore[method-assign]

            def noting(self: Saving, rank: int = rank) -> None:
                close(self)
                if not rank:
                    (home / "times").write_text(" ".join(map(repr, begins)))

            Saving.close = noting  # type: ignore[method-assign]
            to = os.open(home / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(to, 1)
            run(str(home / "run.toml"), sets)
        finally:
            os._exit(1)
    for child in children:
        os.waitpid(child, 0)
    found = [*map(float, (home / "times").read_text().split())]
    each = [b - a for a, b in pairwise(found)]
    return {kind: each[k :: len(KINDS)][1:] for k, kind in enumerate(KINDS)}


def restart(home: Path) -> tuple[float, float]:
    """The seconds of a start, and of a restart."""
    stamps, schedule = home / "stamps", home / "mine.py"
    schedule.write_text(DYING.format(stamps=str(stamps)))
    sets = ["train.steps=12", "train.every=3", f"pipeline.schedule={schedule}:mine"]
    began = time()
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "--max-restarts=1", "-m", "schedir", "train", str(home / "run.toml"),
         *(f"--set={s}" for s in sets)], check=True, capture_output=True,
    )  # fmt: skip
    rows = [row.split() for row in stamps.read_text().splitlines()]
    of = [[float(at) for at, n, *_ in rows if n == attempt] for attempt in ("0", "1")]
    (killed,) = (float(at) for at, *_, what in rows if what == "killed")
    assert min(int(n) for _, attempt, n, _ in rows if attempt == "1") > 1, "it has not resumed"
    return min(of[0]) - began, min(of[1]) - killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--every", type=int, default=50, help="steps of a block")
    options = parse(parser, rounds=1, starts=1, every=5)
    print(f"{os.cpu_count()} cores, load {' '.join(f'{x:.1f}' for x in os.getloadavg())}")
    for number in range(options.starts + 1):
        home = Path(tempfile.mkdtemp(prefix="checkpoints-"))
        (home / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 4000)
        (home / "run.toml").write_text(CONFIG.format(text=home / "text.txt", folder=home))
        if number < options.starts:
            start, again = restart(home)
            print(f"start {start:.2f} s, restart {again:.2f} s: {again / start:.2f}", flush=True)
        else:
            found = blocks(home, options.rounds, options.every)
            without = found["without"]
            for kind, each in found.items():
                ratios = [a / b for a, b in zip(each, without, strict=True)]
                print(f"{kind:>8}: {median(each) / options.every * 1e3:.1f} ms a step, "
                      f"{median(ratios) - 1:+.1%} (of {len(each)} blocks: "
                      f"{min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%})")  # fmt: skip
            sizes = sum(
                p.stat().st_size for p in sorted((home / "saved").glob("step-*"))[-1].iterdir()
            )
            said = [float(line.split()[-2]) for line in (home / "said").read_text().splitlines()
                    if line.startswith("saved step ")]  # fmt: skip
            print(f"a checkpoint of {sizes / 1e6:.1f} MB, written in {median(said):.2g} s")
        shutil.rmtree(home)
    print(f"load {' '.join(f'{x:.1f}' for x in os.getloadavg())}")


if __name__ == "__main__":
    main()
