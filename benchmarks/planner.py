"""Planner: what it predicts beside published figures.

    python benchmarks/planner.py layers     # arXiv 2205.05198, table 4: one layer
    python benchmarks/planner.py stages     # arXiv 2401.10241, table 9: a stage, forward, I and W

Each prints tables.  An error is predicted over published, less 1; means are of its absolute values.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[1]))

from schedir import planner
from tests import published_runs as published


def line(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def head(*cells: str) -> None:
    line(*cells)
    line(*["---"] * len(cells))


def summed(errors: Iterable[float], what: str) -> None:
    """What errors come to, as a line below a table."""
    all_ = list(errors)
    worst = max(all_, key=abs)
    print(
        f"\n{what}: {fmean(map(abs, all_)):.1%} in the mean, {fmean(all_):+.1%} with signs, "
        f"{worst:+.1%} at worst, n = {len(all_)}\n"
    )


def layers() -> None:
    """One layer of 22 billion."""
    head("what runs again", "forward, ms", "paper", "", "backward, ms", "paper", "", "both")
    errors = []
    for row in published.layer_times():
        times = planner.layer(row.model, planner.cluster("a100"), row.choice).total
        off = [
            predicted / measured - 1
            for predicted, measured in zip((times.F, times.B), row.seconds, strict=True)
        ]
        both = (times.F + times.B) / sum(row.seconds) - 1
        errors.append(both)
        line(
            row.name, f"{times.F * 1e3:.2f}", f"{row.seconds[0] * 1e3:.1f}", f"{off[0]:+.1%}",
            f"{times.B * 1e3:.2f}", f"{row.seconds[1] * 1e3:.1f}", f"{off[1]:+.1%}", f"{both:+.1%}",
        )  # fmt: skip
    summed(errors, "forward and backward")


def stages() -> None:
    """An inner stage: its forward, and both halves of its backward."""
    head("model", "p", "m", *(x for name in "FIW" for x in (f"{name}, ms", "paper", "")), "all")
    errors = []
    for row in published.stage_times():
        cluster = planner.cluster("a100", nodes=row.choice.p // 8)
        times = planner.stage(row.model, cluster, row.choice, row.layers).total
        found = times.F, times.I, times.W
        cells = [
            f"{told * 1e3:.1f} | {real * 1e3:.1f} | {told / real - 1:+.1%}"
            for told, real in zip(found, row.seconds, strict=True)
        ]
        errors.append(sum(found) / sum(row.seconds) - 1)
        line(row.name, row.choice.p, row.choice.m, *cells, f"{errors[-1]:+.1%}")
    summed(errors, "a microbatch in a stage")


TABLES: dict[str, Callable[[], None]] = {"layers": layers, "stages": stages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", choices=TABLES)
    TABLES[parser.parse_args().table]()


if __name__ == "__main__":
    main()
