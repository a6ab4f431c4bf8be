"""What it takes to read large traces: seconds and memory, beside the whole file in memory.

    python benchmarks/import_traces.py [--mb 200]

The traces are those of examples/traced.py, each made larger by operators of another thread, of
the kind that fill real ones, until it has so many megabytes.  "alone" is one process that reads one
file after the other, "together" as `schedir import` does; "json" is one file by Python's parser.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import parse

ROOT = Path(__file__).resolve().parents[1]


def pad(path: Path, size: int) -> None:
    """Make a trace so large, with events that mean nothing to a reader of instructions."""
    head, _, tail = path.read_text().partition('"traceEvents": [')
    rng = random.Random(1)
    first = json.loads(path.read_text())["traceEvents"][0]["ts"]
    with path.open("w") as file:
        file.write(f'{head}"traceEvents": [')
        written, k = 0, 0
        while written < size - len(tail):
            k += 1
            name = rng.choice(["aten::addmm", "aten::view", "aten::native_layer_norm", "aten::to"])
            args = {"External id": k, "Sequence number": k, "Fwd thread id": 0, "Ev Idx": k}
            event = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 2}
            event |= {"ts": first + k / 8, "dur": rng.random(), "args": args}
            written += file.write(json.dumps(event) + ",\n")
        file.write(tail)


def _measured(work: Callable[[], object], told: Any) -> None:
    since = perf_counter()
    work()
    took = perf_counter() - since
    own, below = (
        resource.getrusage(who).ru_maxrss / 1e3
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    told.send((took, max(own, below)))


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and megabytes of the largest process, of work in a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measured, args=(work, theirs))
    process.start()
    result: tuple[float, float] = ours.recv()
    process.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=200)
    options = parse(parser, mb=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "traced.py"), name], capture_output=True
        )
        made.check_returncode()
        paths = sorted(folder.glob("*.json"))
        for path in paths:
            pad(path, options.mb * 10**6)
        total = sum(path.stat().st_size for path in paths) / 1e6

        def alone() -> None:
            from schedir.traces.kineto import read_trace

            for path in paths:
                read_trace(path)

        def together() -> None:
            from schedir.traces.run import read_run

            read_run(paths)

        def loaded() -> None:
            json.loads(paths[0].read_bytes())

        print(f"{len(paths)} files, {total:.0f} MB, {len(os.sched_getaffinity(0))} cores")
        print(f"{'':10} {'s':>6} {'MB/s':>6} {'MB of the largest process':>26}")
        for what, work, size in (
            ("alone", alone, total),
            ("together", together, total),
            ("json", loaded, total / len(paths)),
        ):
            took, memory = measured(work)
            print(f"{what:10} {took:6.1f} {size / took:6.0f} {memory:26.0f}")


if __name__ == "__main__":
    main()
