"""Search below p activations, beside CP-SAT: 20 cases of 72 to 192 (stage, microbatch).

    python benchmarks/search_below.py --certify   # what CP-SAT finds in 60 s each, by itself
    python benchmarks/search_below.py             # beside it, what a search finds in 10 s each

CP-SAT gets no hint and no bound.  What it finds is kept in docs/results/search-below.csv.  It is
`ortools`, which `pip install 'schedir[solver]'` installs.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from time import process_time

sys.path.insert(0, str(Path(__file__).parents[1]))

import schedir
from benchmarks.harness import head, lacks, line, parse
from schedir.shortest.solver import solve
from tests.certified import Case, Row, read

FILE = Path(__file__).parents[1] / "docs" / "results" / "search-below.csv"
# Ranks, microbatches, in flight.
SHAPES = [(6, 12, 3), (8, 16, 4), (8, 16, 6), (8, 24, 4), (8, 24, 6)]


def costs(ranks: int) -> Iterator[tuple[str, Row, Row, Row, float]]:
    """Even costs, those of arXiv 2401.10241, table 9, and uneven ones."""
    last = (1.0,) * (ranks - 1) + (1.5,)
    rng = random.Random(ranks)
    yield "unit", (1.0,), (1.0,), (1.0,), 0.0
    yield "1.5B", (18.522,), (18.086,), (9.337,), 0.601
    yield "last stage x 1.5", last, last, last, 0.0
    drawn = (tuple(round(rng.uniform(0.7, 1.3), 3) for _ in range(ranks)) for _ in range(3))
    yield "0.7 to 1.3", *drawn, 0.0  # type: ignore[misc]


def by_solver(path: Path, seconds: float, shapes: Sequence[tuple[int, int, int]]) -> None:
    """Write what CP-SAT finds of each case to a file."""
    names = [*(f.name for f in fields(Case)), "bound", "costs"]
    with path.open("w", newline="") as file:
        file.write(
            f"# benchmarks/search_below.py --certify, CP-SAT {version('ortools')}, {seconds} s\n"
        )
        out = csv.DictWriter(file, names, lineterminator="\n")
        out.writeheader()
        for ranks, microbatches, room in shapes:
            for name, forward, backward, weight, send in costs(ranks):
                case = Case(
                    ranks, microbatches, 1, "loop", True, "span", forward, backward, weight, send,
                    room, None, None, None, None, 0.0, None, "",
                )  # fmt: skip
                solved = solve(case.problem, seconds, workers=2)
                print(case, name, solved.value, solved.bound.value, flush=True)
                row = replace(case, optimum=solved.value).line()
                out.writerow(row | {"bound": solved.bound.value, "costs": name})
                file.flush()


def searched(path: Path, seconds: float) -> None:
    """Print the results of a search next to the results of CP-SAT, which are read from a file."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    head(
        "p x m", "in flight", "costs", "CP-SAT", "its bound", "search", "over CP-SAT", "bound", "s"
    )
    over = []
    for case, row in zip(read(path), rows, strict=True):
        began = process_time()
        found = schedir.search(case.plan, case.costs, in_flight=case.in_flight, seconds=seconds)
        took = process_time() - began
        # The trail is empty where the time was over before the search had an order of its own.
        taken = found.trail[-1].span if found.trail else found.span
        over.append(taken / case.optimum - 1)
        line(
            f"{case.ranks} x {case.microbatches}", case.in_flight, row["costs"],
            f"{case.optimum:.6g}", f"{float(row['bound']):.6g}", f"{taken:.6g}", f"{over[-1]:+.2%}",
            f"{found.bound:.6g}", f"{took:.1f}",
        )  # fmt: skip
    print(f"\nmean {sum(over) / len(over):+.2%}, at most {max(over):+.2%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--certify", action="store_true", help="ask CP-SAT, for 60 s each")
    options = parse(parser, seconds=0.1)
    if (options.certify or options.smoke) and find_spec("ortools") is None:
        return lacks("needs ortools: pip install 'schedir[solver]'", options.smoke)
    if options.smoke:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, FILE.name)
            by_solver(path, 0.5, SHAPES[:1])
            searched(path, options.seconds)
    elif options.certify:
        by_solver(FILE, 60.0, SHAPES)
    else:
        searched(FILE, options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
