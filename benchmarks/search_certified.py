"""Search, beside certified optima: how often it finds them, and how far it and the bound are off.

    python benchmarks/search_certified.py [--seconds 2] [--cells 72] [--every 10]

Cases are those of tests/certified.csv.  An excess is that of the shortest order as the search
counts, without the queues of messages, as the optima are; the last column counts the cases where a
simulation, which has queues, takes longer.  Seconds are of processor time, of the search alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import schedir
from benchmarks.harness import parse
from schedir.shortest.found import Step
from schedir.shortest.solver import EXACT
from tests.certified import Case, cases


class Result(NamedTuple):
    case: Case
    excess: float
    slack: float  # of the bound, below the optimum
    queued: bool
    seconds: float
    by: str


def run(case: Case, seconds: float) -> Result:
    """What a search gives; a bound above the optimum ends it all."""
    began = process_time()
    found = schedir.search(
        case.plan, case.costs, case.sizes, case.limit,
        in_flight=case.in_flight, objective=case.objective, split=case.split, seconds=seconds,
    )  # fmt: skip
    took = process_time() - began
    # The trail is empty where the time was over before the search had an order of its own.
    last = found.trail[-1] if found.trail else Step(took, "none", found.span)
    taken = last.span
    assert taken >= case.optimum * (1 - EXACT), case
    assert found.bound <= case.optimum * (1 + EXACT), case
    queued = found.span > taken * (1 + EXACT)
    slack = 1 - found.bound / case.optimum
    return Result(case, taken / case.optimum - 1, slack, queued, took, last.method)


def groups(case: Case) -> Iterator[str]:
    yield "all"
    yield "S*m <= 72" if case.cells <= 72 else "S*m > 72"
    yield "below p activations" if case.tight else "p or more"
    yield "one stage per rank" if case.stages_per_rank == 1 else "several stages per rank"
    yield "I and W" if case.split else "whole B"
    yield case.objective
    yield "in bytes" if case.limit is not None else "in counts"


def table(results: list[Result]) -> Iterator[str]:
    by_group: dict[str, list[Result]] = {}
    for result in results:
        for group in groups(result.case):
            by_group.setdefault(group, []).append(result)
    yield "| cases | n | optimal | worst excess | bound exact | mean slack | s | queues |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for group, own in by_group.items():
        n = len(own)
        yield (
            f"| {group} | {n} | {sum(r.excess <= EXACT for r in own)} "
            f"| {max(r.excess for r in own):.2%} | {sum(r.slack <= EXACT for r in own)} "
            f"| {sum(r.slack for r in own) / n:.2%} | {sum(r.seconds for r in own) / n:.2f} "
            f"| {sum(r.queued for r in own)} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--cells", type=int, default=10**6, help="at most S*m")
    parser.add_argument("--every", type=int, default=1, help="each n-th case")
    options = parse(parser, seconds=0.1, every=100)
    results = []
    for case in [c for c in cases() if c.cells <= options.cells][:: options.every]:
        results.append(run(case, options.seconds))
        if results[-1].excess > EXACT:
            print(f"{results[-1].excess:.3%} over: {case}, {results[-1].by}", flush=True)
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
