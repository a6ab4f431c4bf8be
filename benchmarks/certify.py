"""Certify: make Problems at random, have CP-SAT prove their optima, and keep those that it does.

    python benchmarks/certify.py --seeds 0:200 [--seconds 6] [--add]

A case is drawn from its seed alone: 2 to 8 ranks, one stage per rank or several in loops and vees,
even and uneven costs, limits in counts and in bytes below, at and above the ranks.  Those proved
are printed as lines of tests/certified.csv, or added to it.  CP-SAT is `ortools`, which
`pip install 'schedir[solver]'` installs.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib.metadata import version
from importlib.util import find_spec
from math import ceil, inf
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import lacks, parse
from schedir.errors import ProgramError
from schedir.ir.ops import BACKWARD, FORWARD
from schedir.schedules.draft import draft
from schedir.schedules.words import placed_for
from schedir.shortest.orders import Order, codes_of, length, peaks
from schedir.shortest.problem import Objective, Problem
from schedir.shortest.solver import solve
from tests.certified import FILE, Case, Row
from tests.laws import ZOO

SHAPES = {  # how many (stage, microbatch) at most, by stages per rank
    1: 130,
    2: 64,
    3: 36,
}


def drawn(seed: int) -> Case:
    """The case of a seed, its optimum not known."""
    rng = random.Random(seed)
    v = rng.choices((1, 2, 3), (7, 3, 1))[0]
    ranks = rng.randint(2, 8 if v == 1 else 4)
    most = min(24, SHAPES[v] // (ranks * v))
    microbatches = rng.randint(min(2, most), most)
    placement = rng.choice(("loop", "vee")) if v == 2 else "loop"
    stages, split = ranks * v, rng.random() < 0.75
    forward, backward, weight, send = _costs(rng, stages)
    if not split:
        backward, weight = (
            tuple(round(sum(both), 15) for both in zip(backward, weight, strict=True)),
            (0.0,),
        )
    objectives: tuple[Objective, ...] = ("span", "own")
    objective = rng.choices(objectives, (3, 1))[0]
    case = Case(
        ranks, microbatches, v, placement, split, objective, forward, backward, weight, send,
        None, None, None, None, None, 0.0, None, "",
    )  # fmt: skip
    share = rng.choice((0.5, 0.5, 0.6, 0.75, 1, 1, 1.25, 1.5, 2))
    if rng.random() < 0.5:
        return replace(case, in_flight=max(ceil(share * ranks * v), v))
    saved = _row(rng, stages, lambda: float(rng.randint(8, 20)), rng.random() < 0.7)
    part = rng.choice((0.25, 0.4, 0.7, 1.0))
    tape = tuple(float(ceil(part * s)) for s in saved)
    both = tuple(s + float(rng.randint(0, int(t))) for s, t in zip(saved, tape, strict=True))
    limit = float(ceil(share * ranks * v * max(saved) + max(tape)))
    return replace(case, saved=saved, tape=tape, both=rng.choice((None, both)), limit=limit)


def _costs(rng: random.Random, stages: int) -> tuple[Row, Row, Row, float]:
    kind = rng.choice(("even", "last", "whole", "decimal", "real"))
    if kind in ("even", "last"):
        each = rng.choice(
            ((1.0, 1.0, 1.0), (3.0, 3.0, 2.0), (18.522, 18.086, 9.337), (2.0, 3.0, 1.0))
        )
        factor = [1.0] * (stages - 1) + [1.5 if kind == "last" else 1.0]
        rows = [tuple(round(c * f, 6) for f in factor) for c in each]
    elif kind == "whole":
        rows = [tuple(float(rng.randint(1, 9)) for _ in range(stages)) for _ in range(3)]
    else:
        digits = 2 if kind == "decimal" else 15
        rows = [
            tuple(round(c * rng.uniform(0.7, 1.3), digits) for _ in range(stages))
            for c in (1.0, 1.0, rng.choice((0.5, 1.0)))
        ]
    send = rng.choice((0.0, round(rng.uniform(0.01, 0.3) * min(rows[0]), 3)))
    return (*(row[:1] if len(set(row)) == 1 else row for row in rows), send)  # type: ignore[return-value]


def _row(rng: random.Random, stages: int, one: object, alike: bool) -> Row:
    assert callable(one)
    return (one(),) if alike else tuple(one() for _ in range(stages))


def of_the_zoo(problem: Problem) -> Iterator[tuple[str, Order]]:
    """The orders of the zoo that are for the plan; whole backwards are split where all are."""
    plan = problem.plan
    for name, schedule in ZOO.items():
        placement, per_rank = placed_for(schedule)
        if placement not in (None, plan.placement) or per_rank not in (None, plan.stages_per_rank):
            continue
        try:
            program = draft(schedule, plan)
        except ProgramError:
            continue
        if not problem.split and any(
            {*stream.op} - {FORWARD, BACKWARD} for stream in program.streams
        ):
            continue
        order = codes_of(program, split=problem.split)
        each = problem.microbatches * (2 + problem.split)
        if all(
            len(codes) == len(own) * each for codes, own in zip(order, problem.own, strict=True)
        ):
            yield name, order


def best_of_zoo(problem: Problem) -> tuple[float | None, str]:
    """The least that an order of the zoo takes which fits, and its name."""
    best, found = inf, ""
    for name, order in of_the_zoo(problem):
        taken = length(problem, order)
        if taken is None or taken >= best:
            continue
        if all(problem.fits(held, rank) for rank, held in enumerate(peaks(problem, order))):
            best, found = taken, name
    return (best, found) if found else (None, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="0:60", help="from:to")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--add", action="store_true", help=f"to {FILE.name}")
    options = parse(parser, seeds="2:4", seconds=0.5)
    if find_spec("ortools") is None:
        return lacks("needs ortools: pip install 'schedir[solver]'", options.smoke)
    names = [f.name for f in fields(Case)]
    file = FILE.open("a", newline="") if options.add else sys.stdout
    out = csv.DictWriter(file, names, lineterminator="\n")
    if not options.add or not FILE.stat().st_size:
        file.write(f"# benchmarks/certify.py, CP-SAT {version('ortools')}\n")
        out.writeheader()
    for seed in range(*map(int, options.seeds.split(":"))):
        case = drawn(seed)
        try:
            problem = case.problem
        except ProgramError:  # there is no room for it
            continue
        began = perf_counter()
        solved = solve(problem, options.seconds, workers=2)
        took = perf_counter() - began
        print(f"{seed} {case}: {solved.value:.6g} {solved.proved} {took:.1f} s", file=sys.stderr)
        if solved.proved:
            zoo, name = best_of_zoo(problem)
            out.writerow(replace(case, optimum=solved.value, zoo=zoo, schedule=name).line())
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
