"""Mutants: change many legal programs, and compare the checker with execution.

    python benchmarks/mutants.py --programs 100000 --seed 1 --jobs 2

Prints a row per mutation: programs judged, how many were rejected (wrong under a model under
which the program was right before) or equivalent, texts that said no program, and where checker
and execution disagreed under any of the four models, which should be nowhere.  Exits with 1 if
they did; `tests.mutants.trial(mutation, seed)` repeats a case.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count
from multiprocessing import Pool
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.mutants import MUTATIONS, Trial, trial

CHUNK = 50  # programs of one task
SEEDS = 100 * CHUNK  # and its seeds, more than it can need
COLUMNS = ("rejected", "equivalent", "no program", "disagreements")

Task = tuple[str, int, int]  # mutation, first seed, programs


def tasks(programs: int, seed: int) -> Iterator[Task]:
    """The programs, divided evenly between mutations, in chunks."""
    names = [*MUTATIONS]
    for k, name in enumerate(names):
        share = programs // len(names) + (k < programs % len(names))
        for chunk in range(-(-share // CHUNK)):
            first = (seed << 32) + chunk * SEEDS
            yield name, first, min(CHUNK, share - chunk * CHUNK)


def run(task: Task) -> tuple[str, Counter[str], list[Trial]]:
    """Judge this many programs; texts that say none do not count."""
    name, first, programs = task
    done: Counter[str] = Counter()
    differ = []
    for seed in count(first):
        one = trial(name, seed)
        done[one.outcome] += 1
        if one.disagreements:
            differ.append(one)
        if done["rejected"] + done["equivalent"] == programs:
            break
    done["disagreements"] = len(differ)
    return name, done, differ


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=10_000, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--jobs", type=int, default=2, metavar="N")
    options = parser.parse_args()
    todo = [*tasks(options.programs, options.seed)]
    table: dict[str, Counter[str]] = {name: Counter() for name in MUTATIONS}
    begin, differ = perf_counter(), []
    with Pool(options.jobs) as pool:
        for k, (name, done, wrong) in enumerate(pool.imap_unordered(run, todo), 1):
            table[name] += done
            differ += wrong
            print(f"\r{k / len(todo):4.0%}", end="", file=sys.stderr, flush=True)
            for one in wrong:
                print(f"\r{one}", file=sys.stderr)
    seconds = perf_counter() - begin
    print(f"\r| {'mutation':<20} | programs | " + " | ".join(COLUMNS) + " |")
    rules = ["-" * 20, "-------:", *("-" * (len(c) - 1) + ":" for c in COLUMNS)]
    print(f"| {' | '.join(rules)} |")
    total: Counter[str] = Counter()
    for done in table.values():
        total += done
    for name, done in [*table.items(), ("all", total)]:
        programs = done["rejected"] + done["equivalent"]
        cells = " | ".join(f"{done[c]:>{len(c)}}" for c in COLUMNS)
        print(f"| {name:<20} | {programs:>8} | {cells} |")
    print(f"\nseed {options.seed}, {options.jobs} processes, {seconds:.0f} s, "
          f"{options.programs / seconds:.0f} programs per second, each under 4 models")  # fmt: skip
    return bool(differ)


if __name__ == "__main__":
    raise SystemExit(main())
