"""Planner: what it predicts beside 798 runs of nanotron on H100, and 14 of Megatron-LM on B200.

    python benchmarks/planner_grid.py            # all tables
    python benchmarks/planner_grid.py steps      # error of the step, by nodes
    python benchmarks/planner_grid.py regret     # what the first choice loses
    python benchmarks/planner_grid.py memory     # error of the memory
    python benchmarks/planner_grid.py refused    # runs without a result that are refused

An error is predicted over measured, less 1; medians are of absolute values.  Runs with an MFU above
10 % count; the others are rows of their own.  Steps are those of closed forms.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import head, line, parse
from schedir import Cluster, planner
from schedir.errors import UsageError
from schedir.planner import PlanEstimate
from schedir.planner.transformer.layer_division import divide_evenly
from tests import published_runs as published
from tests.published_runs import GridRun

SMOKE = False
COUNTS = 0.10  # runs with a higher MFU count


def grid() -> list[GridRun]:
    """The runs; every twentieth with `--smoke`."""
    return published.grid()[:: 20 if SMOKE else 1]


def measured() -> list[GridRun]:
    """The runs that have a result and a batch as their row says."""
    return [run for run in grid() if run.seconds is not None and run.is_consistent]


def cluster_of(run: GridRun) -> Cluster:
    """As many nodes as it ran on."""
    return planner.cluster_preset("h100", nodes=run.nodes)


def predict(run: GridRun) -> PlanEstimate | None:
    """What is predicted of a run, or None if it is refused as impossible."""
    choice = run.choice
    if run.model.layers % choice.pp:
        if choice.pp > run.model.layers:
            return None
        choice = replace(choice, layers_per_stage=divide_evenly(run.model.layers, choice.pp))
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        try:
            return planner.estimate_step(run.model, cluster_of(run), choice, exact=False)
        except UsageError:
            return None


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's correlation: that of the ranks."""
    first, second = (np.argsort(np.argsort(each)) for each in (a, b))
    return float(np.corrcoef(first, second)[0, 1])


def group_of(run: GridRun) -> str:
    """The model and the number of nodes."""
    size = "1.34 B" if run.model.layers == 16 else "3.57 B"
    return f"{size}, {run.nodes} nodes"


def summarize(errors: Sequence[float]) -> tuple[str, str, str]:
    """The median of absolute values, the median with signs, and the number."""
    if not errors:
        return "", "", "0"
    return f"{median(map(abs, errors)):.1%}", f"{median(errors):+.1%}", str(len(errors))


def steps() -> None:
    """Errors of steps by model and nodes."""
    runs = [(run, found) for run in measured() if (found := predict(run)) is not None]
    groups: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for run, found in runs:
        assert run.seconds is not None
        off = found.step_time / run.seconds - 1
        for name in (group_of(run), "all"):
            groups[name].append((off, run.mfu > COUNTS))
    head("model, nodes", "MFU above 10 %: median |error|", "with signs", "n",
         "others: median |error|", "with signs", "n")  # fmt: skip
    for name, errors in groups.items():
        cells = (summarize([e for e, c in errors if c is which]) for which in (True, False))
        line(name, *(cell for part in cells for cell in part))
    counted = [(run.seconds or 0.0, found.step_time) for run, found in runs if run.mfu > COUNTS]
    correlation = rank_correlation(*zip(*counted, strict=True))
    print(f"\nrank correlation where MFU is above 10 %: {correlation:.3f}, n = {len(counted)}\n")


def first_choices(predictions: dict[int, float], runs: Sequence[GridRun]) -> list[float]:
    """Regrets of the first choice among the runs of a model on as many nodes.

    The choice is among all of them, and among those that are left without one tp or one pp.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for k in predictions:
        groups[group_of(runs[k])].append(k)
    found = []
    for group in groups.values():
        subsets = [group]
        for name in ("tp", "pp"):
            for value in {getattr(runs[k].choice, name) for k in group}:
                subsets.append([k for k in group if getattr(runs[k].choice, name) != value])
        for some in subsets:
            if len(some) > 1:
                real = [runs[k].seconds or 0.0 for k in some]
                found.append(planner.prediction_regret([predictions[k] for k in some], real))
    return found


def describe_regrets(lost: Sequence[float]) -> str:
    """The median, the 90th percentile and the largest."""
    return (f"median {median(lost):.1%}, 90th percentile {np.percentile(lost, 90):.1%}, "
            f"worst {max(lost):.0%}, n = {len(lost)}")  # fmt: skip


def regret() -> None:
    """What the choice loses by model and nodes, and without one tp or one pp."""
    runs = measured()
    found = {k: one.step_time for k, run in enumerate(runs) if (one := predict(run)) is not None}
    print(f"\nregret of the first choice: {describe_regrets(first_choices(found, runs))}\n")


def memory() -> None:
    """Errors of the memory of H100 and B200."""
    head("runs", "median |error|", "with signs", "n", "largest")
    errors: dict[str, list[float]] = defaultdict(list)
    for run in measured():
        if run.memory is not None and (found := predict(run)) is not None:
            group = "H100, MFU above 10 %" if run.mfu > COUNTS else "H100, others"
            errors[group].append(found.memory.total / run.memory - 1)
    node = planner.cluster_preset("h100")
    for model, choice, size, _ in published.b200_memory():
        found_memory = planner.peak_memory(model, node, choice)
        errors["B200"].append(found_memory.total / size - 1)
    for name, some in errors.items():
        line(name, *summarize(some), f"{max(map(abs, some)):.0%}")


def refused() -> None:
    """Runs that are refused: those that ran, and those that gave no result."""
    counts = {True: [0, 0], False: [0, 0]}
    for run in grid():
        found = predict(run)
        ran = counts[run.seconds is not None]
        ran[0] += found is None or not found.fits
        ran[1] += 1
    print(f"\nof {counts[True][1]} runs that ran, {counts[True][0]} are refused; of "
          f"{counts[False][1]} without a result, {counts[False][0]}\n")  # fmt: skip


TABLES: dict[str, Callable[[], None]] = {
    "steps": steps, "regret": regret, "memory": memory, "refused": refused,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", nargs="?", default="all", choices=("all", *TABLES))
    options = parse(parser)
    global SMOKE
    SMOKE = options.smoke
    for name, table in TABLES.items():
        if options.table in ("all", name):
            table()


if __name__ == "__main__":
    main()
