"""Measure whether `check` agrees with executions of many mutated programs.

    python benchmarks/mutants.py --programs 100000 --seed 1 --jobs 2
    python benchmarks/mutants.py --programs 100000 --seed 1 --jobs 1 --only zero
    python benchmarks/mutants.py --programs 100000 --seed 1 --jobs 2 --only activation_offload
    python benchmarks/mutants.py --programs 10000 --seed 1 --jobs 2 --only segments
    python benchmarks/mutants.py --programs 10000 --seed 1 --jobs 1 --only optimizer_offload

The script mutates legal programs, checks and executes each mutant, and prints a row per mutation.
"programs" is the number of mutants. "rejected" mutants fail under a progress model under which the
original program finishes. The others are "equivalent". "no program" counts texts that schedir does
not parse. "disagreements" counts mutants for which `check` and the execution disagree under a
model. If there are any, the exit code is 1. `tests.mutants.trial(mutation, seed)` repeats a case.

- `--only zero` has the mutations of ZeRO: gathers of weights and reductions of gradients.
- `--only activation_offload` has the mutations of offloaded activations.
- `--only segments` has the mutations of stage segments, microbatch chunks and their collectives.
- `--only optimizer_offload` has the mutations of optimizer states that move, and of optimizer steps
  per stage.

With these options, the script tests each mutant under one model, the next model for the next seed,
and mutates each legal program 50 times. `trial(mutation, seed, [model], 50)` repeats a case.
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

from benchmarks.harness import parse
from schedir.analysis.progress_models import MODELS
from tests.mutants import MUTATIONS, Trial, trial
from tests.mutations_of_activation_offload import ACTIVATION_OFFLOAD_MUTATIONS
from tests.mutations_of_optimizer_offload import OPTIMIZER_OFFLOAD_MUTATIONS
from tests.mutations_of_segments import SEGMENT_MUTATIONS
from tests.mutations_of_zero import ZERO_MUTATIONS

CHUNK = 50  # mutants of one task
SEEDS = 100 * CHUNK  # seeds of one task, more than it can need
COLUMNS = ("rejected", "equivalent", "no program", "disagreements")

MUTATION_GROUPS = {
    "all": [*MUTATIONS],
    "zero": ZERO_MUTATIONS,
    "activation_offload": ACTIVATION_OFFLOAD_MUTATIONS,
    "segments": SEGMENT_MUTATIONS,
    "optimizer_offload": OPTIMIZER_OFFLOAD_MUTATIONS,
}

Task = tuple[
    str, int, int, bool
]  # mutation, first seed, mutants, whether each runs under all models


def list_tasks(programs: int, seed: int, only: str) -> Iterator[Task]:
    """Yield tasks, with the same number of programs for each mutation."""
    names = MUTATION_GROUPS[only]
    for k, name in enumerate(names):
        share = programs // len(names) + (k < programs % len(names))
        for chunk in range(-(-share // CHUNK)):
            first_seed = (seed << 32) + chunk * SEEDS
            yield name, first_seed, min(CHUNK, share - chunk * CHUNK), only == "all"


def run_task(task: Task) -> tuple[str, Counter[str], list[Trial]]:
    """Test a number of mutants. Texts that are no program do not count."""
    name, first_seed, programs, under_all_models = task
    counts: Counter[str] = Counter()
    disagreements = []
    for seed in count(first_seed):
        models = MODELS if under_all_models else [MODELS[seed % len(MODELS)]]
        result = trial(name, seed, models, 4 if under_all_models else CHUNK)
        counts[result.outcome] += 1
        counts["experts"] += result.mutant is not None and result.mutant.ep > 1
        if result.disagreements:
            disagreements.append(result)
        if counts["rejected"] + counts["equivalent"] == programs:
            break
    counts["disagreements"] = len(disagreements)
    return name, counts, disagreements


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=10_000, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--jobs", type=int, default=2, metavar="N")
    parser.add_argument(
        "--only",
        choices=MUTATION_GROUPS,
        default="all",
        help="the group of mutations (default: all)",
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop after these seconds"
    )
    options = parse(parser, programs=4, jobs=1)
    all_tasks = sorted(
        list_tasks(options.programs, options.seed, options.only), key=lambda task: task[1]
    )
    table: dict[str, Counter[str]] = {task[0]: Counter() for task in all_tasks}
    begin, all_disagreements = perf_counter(), []
    with Pool(options.jobs) as pool:
        for k, (name, counts, disagreements) in enumerate(
            pool.imap_unordered(run_task, all_tasks), 1
        ):
            table[name] += counts
            all_disagreements += disagreements
            print(f"\r{k / len(all_tasks):4.0%}", end="", file=sys.stderr, flush=True)
            for disagreement in disagreements:
                print(f"\r{disagreement}", file=sys.stderr)
            if perf_counter() - begin > options.seconds:
                break
    seconds = perf_counter() - begin
    print(f"\r| {'mutation':<24} | programs | " + " | ".join(COLUMNS) + " |")
    rules = ["-" * 24, "-------:", *("-" * (len(c) - 1) + ":" for c in COLUMNS)]
    print(f"| {' | '.join(rules)} |")
    total: Counter[str] = Counter()
    for counts in table.values():
        total += counts
    for name, counts in [*table.items(), ("all", total)]:
        programs = counts["rejected"] + counts["equivalent"]
        cells = " | ".join(f"{counts[c]:>{len(c)}}" for c in COLUMNS)
        print(f"| {name:<24} | {programs:>8} | {cells} |")
    checked = total["rejected"] + total["equivalent"]
    print(f"\n{total['experts']} programs with experts; "
          f"seed {options.seed}, {options.jobs} processes, {seconds:.0f} s, "
          f"{checked / seconds:.0f} programs per second, each under "
          f"{f'{len(MODELS)} models' if options.only == 'all' else 'one model'}")  # fmt: skip
    return bool(all_disagreements)


if __name__ == "__main__":
    raise SystemExit(main())
