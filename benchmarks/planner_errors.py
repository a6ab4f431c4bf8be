"""Measure by how much measured steps differ from predictions, and what the terms contribute.

    python benchmarks/planner_errors.py intervals      # the errors in step_time_errors.py
    python benchmarks/planner_errors.py fp4            # steps in FP4, in 16 bits and in FP8
    python benchmarks/planner_errors.py terms          # the terms of steps of nanotron on H100
    python benchmarks/planner_errors.py terms -o FILE  # the same as a picture

No constant of a prediction is fitted to a run with which this script compares it. Steps are results
of closed forms, except those of `schedir train`, which are simulated.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import planner_grid as grid
from benchmarks.harness import parse, print_header, print_row
from schedir import Cluster, planner
from schedir.planner import SoftwareConstants, Stack, StepBreakdown
from schedir.planner.hardware.cluster_size import resize_cluster
from schedir.planner.hardware.step_time_errors import INTERVAL_SHARE
from tests import published_runs as published
from tests.published_runs import GridRun

# ------------------------------------------------------------ intervals


class ComparedRun(NamedTuple):
    """A measured and a predicted step in seconds. Runs of a group differ only in their plans."""

    group: object
    measured: float
    predicted: float


def compare_grid_runs(runs: Sequence[GridRun], prediction: grid.Prediction) -> list[ComparedRun]:
    return [
        ComparedRun((run.model, run.nodes), run.seconds or 0.0, seconds)
        for run, seconds in zip(runs, prediction.seconds.tolist(), strict=True)
    ]


def compare_nanotron() -> list[ComparedRun]:
    """Predict the runs of the two left-out groups, each with constants of the other runs."""
    runs, compared = grid.read_measured_runs(), []
    for is_training in list(grid.LEFT_OUT_SPLITS.values())[:2]:
        constants = grid.fit_nanotron([run for run in runs if is_training(run)])
        test_runs = grid.select_efficient_runs(run for run in runs if not is_training(run))
        compared += compare_grid_runs(test_runs, grid.predict(test_runs, *constants))
    return compared


def predict_published_run(run: published.Run, cluster: Cluster, stack: Stack) -> float:
    return planner.estimate_step(
        run.model, resize_cluster(cluster, run.choice.gpus), run.choice, closed_form_only=True,
        constants=stack.constants, state_bytes=stack.state_bytes,
    ).step_time  # fmt: skip


def fit_launch_time(node: Cluster, stack: Stack, runs: Sequence[published.Run]) -> Cluster:
    """Fit the time to issue a kernel to runs."""

    def estimate(constants: dict[str, float]) -> Any:
        fitted = replace(node, kernel_us=constants["kernel_us"])
        return [predict_published_run(run, fitted, stack) for run in runs]

    measured = np.array([run.seconds for run in runs])
    fit = grid.fit_by_gauss_newton({"kernel_us": (5.0, 46.0, 200.0)}, estimate, measured)
    return replace(node, kernel_us=fit["kernel_us"])


def compare_megatron_on_a100() -> list[ComparedRun]:
    """Predict SC21, and each half of vTrain's rows with `kernel_us` fitted to the other half."""
    node = planner.cluster_preset("a100")
    old_stack, stack = map(planner.stack_preset, ("megatron-2021", "megatron"))
    compared = [
        ComparedRun(run.name, run.seconds, predict_published_run(run, node, old_stack))
        for run in published.read_weak_scaling_runs()
    ]
    runs = published.read_one_node_runs()
    for half in range(2):
        fitted = fit_launch_time(node, stack, runs[half::2])
        compared += [
            ComparedRun(
                (run.model, run.choice.batch, run.choice.gpus), run.seconds,
                predict_published_run(run, fitted, stack),
            )
            for run in runs[1 - half :: 2]
        ]  # fmt: skip
    return compared


def compare_megatron_elsewhere() -> list[ComparedRun]:
    """Predict steps on H100 and B200 with the speeds of data sheets."""
    b200 = planner.cluster_preset("b200")
    compared = []
    for model, choice, _, seconds in published.read_b200_runs():
        run = published.Run("", model, choice, seconds)
        predicted = predict_published_run(run, b200, planner.stack_preset("megatron"))
        compared.append(ComparedRun((model, choice.batch), seconds, predicted))
    # The speedup of FP8 is fitted to the first row.
    for accelerator, run in published.read_mlperf_runs()[1:]:
        cluster = planner.cluster_preset(accelerator)
        predicted = predict_published_run(run, cluster, planner.stack_preset("megatron-fp8"))
        compared.append(ComparedRun(run.name, run.seconds, predicted))
    return compared


def compare_training_on_cpus() -> list[ComparedRun]:
    """Return the steps of `planner.py here`. The cluster was measured without any step."""
    path = Path(__file__).parents[1] / "docs/results/planner-cpu.csv"
    with path.open(newline="") as file:
        return [
            ComparedRun("", float(row["measured, ms"]), float(row["predicted, ms"]))
            for row in csv.DictReader(file)
        ]


def compare_defaults() -> list[ComparedRun]:
    """Predict nanotron on H100 with the default constants, which are those of Megatron-LM."""
    runs = grid.select_efficient_runs(grid.read_measured_runs())
    return compare_grid_runs(
        runs, grid.predict(runs, grid.build_default_stack(), planner.cluster_preset("h100"))
    )


COMPARISONS: dict[str, Callable[[], list[ComparedRun]]] = {
    "nanotron on h100-efa": compare_nanotron,
    "Megatron-LM on a100": compare_megatron_on_a100,
    "Megatron-LM on other machines": compare_megatron_elsewhere,
    "schedir train on CPUs": compare_training_on_cpus,
    "others": compare_defaults,
}


def measure_step_errors(runs: Sequence[ComparedRun]) -> tuple[float, float, float]:
    """Return the numbers of `StepErrors`: both quantiles, and the resolution.

    Two plans are predicted in the wrong order if their errors differ by more than their predicted
    steps do. The sign of this difference is arbitrary, so it is above the 80 % quantile of its
    absolute value in 10 % of the pairs.
    """
    log_errors = np.log([run.measured / run.predicted for run in runs])
    tail = (1 - INTERVAL_SHARE) / 2
    low, high = np.expm1(np.quantile(log_errors, [tail, 1 - tail])).tolist()
    differences = [
        abs(log_errors[i] - log_errors[j])
        for i, j in combinations(range(len(runs)), 2)
        if runs[i].group == runs[j].group
    ]
    return low, high, float(np.expm1(np.quantile(differences, 1 - 4 * tail)))


def print_intervals() -> None:
    """Print the errors from which the planner computes the intervals of step times."""
    print_header("software and machine", "5 %", "95 %", "resolution", "n")
    for name, compare in COMPARISONS.items():
        runs = compare()
        print_row(name, *(f"{x:+.1%}" for x in measure_step_errors(runs)), len(runs))


def print_fp4() -> None:
    """Print the speedups of FP4. The factor of FP4 is fitted to the first row."""
    print_header("model", "GPUs", "compared with", "published speedup", "predicted")
    stacks = {name: planner.stack_preset(f"megatron-{name}") for name in ("fp4", "fp8")}
    for row in published.read_fp4_speedups():
        baseline = stacks.get(row.baseline, planner.stack_preset("megatron"))
        run = published.Run(row.name, row.model, row.choice, 0.0)
        slow, fast = (
            predict_published_run(run, planner.cluster_preset("gb200"), stack)
            for stack in (baseline, stacks["fp4"])
        )
        baseline_name = row.baseline.upper() or "16 bits"
        print_row(row.name, row.choice.gpus, baseline_name, row.speedup, f"{slow / fast:.2f}")


# ------------------------------------------------------------ terms


class Term(NamedTuple):
    """A term of the predicted step of nanotron.

    Attributes:
        name: What takes the time.
        removal: The values of constants without the term. Empty if `part` is the term.
        part: The field of `StepBreakdown` that is the term.
        driver: What the term depends on.
        value_of: The value of the driver for a run.
        has_term: Whether a run can have the term.
        color: The color of the term in the picture.
    """

    name: str
    removal: dict[str, float]
    part: str
    driver: str
    value_of: Callable[[GridRun], int]
    has_term: Callable[[GridRun], bool]
    color: str


def has_crossings(run: GridRun) -> bool:
    return run.nodes > 1 and run.choice.pp > 1 and run.choice.tp > 1


# In this order, the terms are removed from the prediction one after the other.
TERMS = (
    Term("stragglers", {"jitter": 0}, "", "replicas", lambda r: r.choice.dp,
         lambda r: r.choice.dp > 1, "#e69f00"),
    Term("host at node boundaries", {"crossing_us": 0}, "", "tensor-parallel ranks",
         lambda r: r.choice.tp, has_crossings, "#882255"),
    Term("host: kernel launches", {"kernel_us": 0}, "", "microbatch size",
         lambda r: r.choice.microbatch_size, lambda r: True, "#cc79a7"),
    Term("copies of ZeRO", {"shard_copy_us": 0}, "", "replicas",
         lambda r: r.choice.dp, lambda r: r.choice.zero > 0, "#d55e00"),
    Term("latency of buckets", {"bucket_params": 0}, "", "replicas",
         lambda r: r.choice.dp, lambda r: r.choice.zero == 0 and r.choice.dp > 1, "#f0e442"),
    Term("gradient accumulation", {"accumulation_bytes": 0}, "", "microbatches",
         lambda r: r.choice.microbatches, lambda r: True, "#999933"),
    Term("reductions and gathers", {}, "data_parallel", "nodes", lambda r: r.nodes,
         lambda r: r.choice.dp > 1, "#444444"),
    Term("tensor-parallel collectives", {}, "layer_collectives", "tensor-parallel ranks",
         lambda r: r.choice.tp, lambda r: r.choice.tp > 1, "#009e73"),
    Term("messages of stages", {}, "transfers", "pipeline ranks", lambda r: r.choice.pp,
         lambda r: r.choice.pp > 1, "#117733"),
    Term("bubble", {}, "bubble", "pipeline ranks", lambda r: r.choice.pp,
         lambda r: r.choice.pp > 1, "#bbbbbb"),
    Term("optimizer", {}, "optimizer", "ranks per replica", lambda r: r.choice.pp * r.choice.tp,
         lambda r: True, "#56b4e9"),
    Term("compute of GPUs", {}, "compute", "nodes", lambda r: r.nodes, lambda r: True, "#0072b2"),
)  # fmt: skip
_STACK_CONSTANTS = {f.name for f in fields(SoftwareConstants)}


def replace_constants(
    stack: Stack, cluster: Cluster, constants: dict[str, float]
) -> tuple[Stack, Cluster]:
    """Return the stack and the cluster with these constants."""
    software: dict[str, Any] = {k: v for k, v in constants.items() if k in _STACK_CONSTANTS}
    machine: dict[str, Any] = {k: v for k, v in constants.items() if k not in software}
    return (
        stack._replace(constants=replace(stack.constants, **software)),
        replace(cluster, **machine),
    )


class TermTable(NamedTuple):
    """Predictions of runs, with constants that are fitted to runs on other numbers of nodes.

    Attributes:
        runs: The runs.
        measured: Measured seconds, of shape (runs,).
        predicted: Predicted seconds, of shape (runs,).
        removed: Predicted seconds without one term, of shape (terms, runs).
        parts: Seconds of each term, of shape (terms, runs). The sum over terms is `predicted`.
    """

    runs: list[GridRun]
    measured: Any
    predicted: Any
    removed: Any
    parts: Any


def predict_terms(runs: list[GridRun], stack: Stack, cluster: Cluster) -> TermTable:
    """Predict runs with all terms, without each term, and with fewer and fewer terms."""
    prediction = grid.predict(runs, stack, cluster)
    removed, parts, rest, all_removed = [], [], prediction, dict[str, float]()
    for term in TERMS:
        if term.part:
            index = StepBreakdown._fields.index(term.part)
            removed.append(prediction.seconds - prediction.breakdowns[index])
            parts.append(rest.breakdowns[index])
            continue
        shorter = grid.predict(runs, *replace_constants(stack, cluster, term.removal))
        removed.append(shorter.seconds)
        all_removed |= term.removal
        shorter = grid.predict(runs, *replace_constants(stack, cluster, all_removed))
        parts.append(rest.seconds - shorter.seconds)
        rest = shorter
    measured = np.array([run.seconds for run in runs])
    return TermTable(runs, measured, prediction.seconds, np.array(removed), np.array(parts))


def build_term_table() -> TermTable:
    """Predict the runs on each number of nodes, with constants that are fitted to the others."""
    runs = grid.read_measured_runs()
    tables = []
    for nodes in grid.NODE_COUNTS[-1 if grid.SMOKE else None :]:
        constants = grid.fit_nanotron([run for run in runs if run.nodes != nodes])
        test_runs = grid.select_efficient_runs(run for run in runs if run.nodes == nodes)
        tables.append(predict_terms(test_runs, *constants))
    return TermTable(
        [run for table in tables for run in table.runs],
        *(np.concatenate(arrays, axis=-1) for arrays in zip(*(t[1:] for t in tables), strict=True)),
    )


def print_terms(output: str) -> None:
    """Print the share of each term, and the errors with and without it. Draw them, too."""
    table = build_term_table()
    print_header("term", "depends on", "n", "share of the step: median", "largest",
                 "median error with signs", "without the term")  # fmt: skip
    for k, term in enumerate(TERMS):
        mask = np.array([term.has_term(run) for run in table.runs])
        shares = (table.parts[k] / table.predicted)[mask]
        errors = [(p / table.measured - 1)[mask] for p in (table.predicted, table.removed[k])]
        print_row(
            term.name, term.driver, int(mask.sum()), f"{np.median(shares):.1%}",
            f"{shares.max():.1%}", *(f"{np.median(error):+.1%}" for error in errors),
        )  # fmt: skip
    if output:
        draw_terms(table, output)


def draw_terms(table: TermTable, path: str) -> None:
    """Draw the terms of all runs, and the errors with and without each term."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 12.5), layout="constrained")
    grid_spec = figure.add_gridspec(4, 4, height_ratios=[1.5, 1, 1, 1])
    draw_runs(figure.add_subplot(grid_spec[0, :]), table)
    for k in range(len(TERMS)):
        draw_term_errors(figure.add_subplot(grid_spec[1 + k // 4, k % 4]), table, k)
    figure.savefig(path, dpi=110)


def draw_runs(ax: Any, table: TermTable) -> None:
    """Draw a bar of terms for each run, relative to its measured step."""
    names = [grid.name_group(run) for run in table.runs]
    groups = sorted({*names}, key=lambda name: (name.split(",")[0], int(name.split()[2])))
    order = sorted(range(len(names)), key=lambda k: (groups.index(names[k]), table.measured[k]))
    heights = (table.parts / table.measured)[::-1, order]
    heights = np.concatenate([heights, heights[:, -1:]], axis=1)  # The last bar needs an end.
    ax.stackplot(
        np.arange(len(order) + 1), heights, step="post", linewidth=0,
        colors=[term.color for term in TERMS[::-1]], labels=[term.name for term in TERMS[::-1]],
    )  # fmt: skip
    ax.axhline(1, color="black", linewidth=1)
    sorted_names = [names[k] for k in order]
    for name in groups:
        first = sorted_names.index(name)
        ax.axvline(first, color="black", linewidth=0.8)
        middle = first + sorted_names.count(name) / 2
        ax.text(middle, 1.42, name.replace(", ", "\n"), ha="center", va="top", fontsize=9)
    ax.set(xlim=(0, len(order)), ylim=(0, 1.45), xticks=[],
           xlabel="runs, by model and nodes; the shortest steps first",
           ylabel="predicted term / measured step")  # fmt: skip
    ax.legend(*(x[::-1] for x in ax.get_legend_handles_labels()), ncols=6, fontsize=8,
              loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)  # fmt: skip


def draw_term_errors(ax: Any, table: TermTable, k: int) -> None:
    """Draw the errors with and without a term against the number that the term depends on."""
    term = TERMS[k]
    mask = np.array([term.has_term(run) for run in table.runs])
    values = np.array([term.value_of(run) for run in table.runs])
    positions = sorted({*values[mask].tolist()})
    for predicted, color, label, shift in (
        (table.predicted, "#0072b2", "all terms", -0.15),
        (table.removed[k], "#d55e00", "without this term", 0.15),
    ):
        errors = [(predicted / table.measured - 1)[mask & (values == x)] for x in positions]
        low, middle, high = np.array([np.percentile(e, (10, 50, 90)) for e in errors]).T
        ax.errorbar(
            np.arange(len(positions)) + shift, middle, (middle - low, high - middle), fmt="o",
            color=color, label=label, markersize=4, linewidth=1,
        )  # fmt: skip
    for x, value in enumerate(positions):
        count = int((mask & (values == value)).sum())
        ax.annotate(
            str(count), (x, 1), xycoords=ax.get_xaxis_transform(), xytext=(0, -9),
            textcoords="offset points", ha="center", fontsize=7, color="gray",
        )  # fmt: skip
    ax.axhline(0, color="gray", linewidth=0.8)
    ax.set_xticks(range(len(positions)), [str(x) for x in positions], fontsize=8)
    ax.set(ylim=(-1, 0.6) if term.part == "compute" else (-0.75, 0.6), xlabel=term.driver)
    ax.set_title(term.name, fontsize=10)
    if k % 4 == 0:
        ax.set_ylabel("predicted / measured - 1")
    if k == 0:
        ax.legend(fontsize=8, loc="lower left")


TABLES: dict[str, Callable[[str], None]] = {
    "intervals": lambda _: print_intervals(), "fp4": lambda _: print_fp4(), "terms": print_terms,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", nargs="?", default="all", choices=("all", *TABLES))
    parser.add_argument(
        "-o", dest="output", default="", metavar="FILE", help="the picture of `terms`"
    )
    options = parse(parser)
    grid.SMOKE = options.smoke
    for name, table in TABLES.items():
        if options.table in ("all", name):
            print(f"\n## {name}\n")
            table(options.output)


if __name__ == "__main__":
    main()
