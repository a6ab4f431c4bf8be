"""Measure the planner's errors on 798 runs of nanotron on H100 and 14 of Megatron-LM on B200.

    python benchmarks/planner_grid.py              # all tables
    python benchmarks/planner_grid.py defaults     # default constants, fitted to no row of these
    python benchmarks/planner_grid.py left-out     # constants of nanotron, fitted to other rows
    python benchmarks/planner_grid.py calibrated   # fitted to 3 runs on 1 and 2 nodes
    python benchmarks/planner_grid.py shipped      # the constants of nanotron that schedir has
    python benchmarks/planner_grid.py b200         # memory of Megatron-LM
    python benchmarks/planner_grid.py mlperf       # MLPerf v4.1: steps of GPT-3 175B in FP8
    python benchmarks/planner_grid.py scatter -o FILE.svg

An error is predicted / measured - 1. The tables have medians of absolute errors and of errors with
signs. Runs with an MFU of 10 % or less have separate columns. The script computes steps with closed
forms. It fits constants to runs with an MFU above 10 %, and minimizes Cauchy's loss of the
logarithms of times.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import parse, print_header, print_row
from schedir import Cluster, planner
from schedir.planner import Stack, StepBreakdown
from schedir.planner.calibration import fit_constants
from schedir.planner.plan_columns import COLUMN_NAMES, RECOMPUTE_MODES, SCHEDULE_NAMES, PlanColumns
from schedir.planner.plan_simplicity import PREFERENCE_TOLERANCE, measure_complexity
from schedir.planner.plan_table import estimate_closed_form
from schedir.planner.transformer.layer_division import divide_layers
from schedir.planner.transformer.memory_estimate import estimate_memory
from tests import published_runs as published
from tests.published_runs import GridRun

SMOKE, DRAWS, OUTPUT = False, 200, ""
NODE_COUNTS = (1, 2, 4, 8, 16)
MIN_MFU = 0.10  # the lowest MFU of runs in the summary of errors
NANOTRON, CLUSTER = planner.stack_preset("nanotron"), planner.cluster_preset("h100-efa")
# Fitted constants -> (lower bound, start value, upper bound).
STACK_CONSTANTS = {
    "speed_share": (0.2, 0.75, 1.0), "kernels_per_op": (0.2, 3.07, 20.0),
    "loss_share": (0.1, 0.5, 2.0), "crossing_us": (1.0, 191.0, 1000.0),
    "shard_copy_us": (0.1, 8.2, 100.0),
}  # fmt: skip
CLUSTER_CONSTANTS = {
    "network_bandwidth": (1e9, 24e9, 1e11), "network_latency": (1e-6, 26e-6, 5e-4),
    "jitter": (1e-3, 0.027, 0.3),
}  # fmt: skip
MEMORY_CONSTANTS = {
    "logit_bytes": (1.0, 9.2, 20.0), "gathered_bytes": (0.1, 3.7, 12.0),
    "unsharded_bytes": (0.01, 0.6, 8.0), "allocator_share": (1e-3, 0.083, 0.5),
}  # fmt: skip


class Prediction(NamedTuple):
    """Predicted seconds and bytes of each run. Seconds are infinite if a plan is impossible.

    `memory` is that of the GPU that uses the most, and decides whether a run fits. `logged_memory`
    is that of the first pipeline rank: `log_throughput` of nanotron's helpers.py writes the line
    of global rank 0.

    `breakdowns` has a row of seconds for each field of `StepBreakdown`.
    """

    seconds: Any
    memory: Any
    logged_memory: Any
    breakdowns: Any


def read_runs() -> list[GridRun]:
    """Return the runs, or every tenth run with `--smoke`."""
    return published.read_grid_runs()[:: 10 if SMOKE else 1]


def read_measured_runs() -> list[GridRun]:
    """Return the runs with a result and a batch of 256 sequences."""
    return [run for run in read_runs() if run.seconds is not None and run.is_consistent]


def select_efficient_runs(runs: Iterable[GridRun]) -> list[GridRun]:
    """Return the runs with an MFU above the bound."""
    return [run for run in runs if run.mfu > MIN_MFU]


def is_possible(run: GridRun, stack: Stack) -> bool:
    """Return whether nanotron can divide the model as the run requires.

    With several replicas, `check_model_has_grad` of its models/base.py refuses a stage without
    weights. `OneForwardOneBackwardPipelineEngine` of its engine.py refuses less than pp - 1
    microbatches.
    """
    model, plan = run.model, run.choice
    if plan.pp > model.layers or model.heads % plan.tp or plan.microbatches < plan.pp - 1:
        return False
    layers = divide_layers(model, plan.pp, stack.division)
    return plan.dp == 1 or 0 not in layers[:-1]  # The last stage has the head.


def predict(runs: Sequence[GridRun], stack: Stack, cluster: Cluster) -> Prediction:
    """Predict runs. Runs with the same model and number of nodes share a table of costs."""
    seconds, memory, logged_memory = np.full((3, len(runs)), np.inf)
    breakdowns = np.zeros((len(StepBreakdown._fields), len(runs)))
    groups: dict[Any, list[int]] = defaultdict(list)
    for k, run in enumerate(runs):
        if is_possible(run, stack):
            groups[run.model, run.nodes].append(k)
    for (model, nodes), members in groups.items():
        rows = []
        for k in members:
            fields = {name: getattr(runs[k].choice, name) for name in COLUMN_NAMES}
            fields["schedule"] = SCHEDULE_NAMES.index(fields["schedule"])
            fields["recompute"] = RECOMPUTE_MODES.index(fields["recompute"])
            rows.append([int(fields[name]) for name in COLUMN_NAMES])
        columns = dict(zip(COLUMN_NAMES, np.array(rows).T, strict=True))
        plans = PlanColumns(
            **columns, attention=stack.attention, rank_order=stack.rank_order,
            division=stack.division,
        )  # fmt: skip
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            table = estimate_closed_form(
                model, replace(cluster, nodes=nodes), plans, stack.constants, stack.state_bytes
            )
        seconds[members], memory[members] = table.step_times, table.total_memory
        shares = plans.compute_shares(model)
        by_group = estimate_memory(
            model, cluster, plans, shares, stack.constants, stack.state_bytes
        ).memory
        logged_memory[members] = by_group.sum(axis=0)[:, 0]  # The first group has the first rank.
        breakdowns[:, members] = table.breakdowns
    return Prediction(seconds, memory, logged_memory, breakdowns)


# ------------------------------------------------------------ fits


def fit_by_gauss_newton(
    names: dict[str, tuple[float, float, float]],
    estimate: Callable[[dict[str, float]], Any],
    real: Any,
) -> dict[str, float]:
    """Return the constants with the least Cauchy loss of logarithms, by Gauss-Newton steps."""
    low, log_constants, high = np.log(np.array([*names.values()], float)).T
    step, loss = 0.05, 0.1
    for _ in range(1 if SMOKE else 6):
        error = np.log(estimate(dict(zip(names, np.exp(log_constants), strict=True))) / real)
        slopes = []
        for k in range(len(log_constants)):
            moved = log_constants - step * np.eye(len(log_constants))[k]
            moved_error = np.log(estimate(dict(zip(names, np.exp(moved), strict=True))) / real)
            slopes.append((error - moved_error) / step)
        jacobian = np.array(slopes).T
        weight = 1 / (1 + (error / loss) ** 2)
        normal_matrix = jacobian.T @ (jacobian * weight[:, None]) + 1e-2 * np.eye(
            len(log_constants)
        )
        change = -np.linalg.solve(normal_matrix, jacobian.T @ (weight * error))
        log_constants = np.clip(log_constants + np.clip(change, -0.5, 0.5), low + step, high)
    return dict(zip(names, np.exp(log_constants).tolist(), strict=True))


def build_stack(constants: dict[str, float]) -> tuple[Stack, Cluster]:
    """Return the stack of nanotron and the cluster with these constants."""
    stack_constants = {k: float(v) for k, v in constants.items() if k not in CLUSTER_CONSTANTS}
    cluster_constants: dict[str, Any] = {
        k: float(v) for k, v in constants.items() if k in CLUSTER_CONSTANTS
    }
    return (
        NANOTRON._replace(constants=replace(NANOTRON.constants, **stack_constants)),
        replace(CLUSTER, **cluster_constants),
    )


def fit_nanotron(runs: Sequence[GridRun]) -> tuple[Stack, Cluster]:
    """Fit the constants of times and of memory to runs."""
    efficient_runs = select_efficient_runs(runs)
    time_constants = fit_by_gauss_newton(
        STACK_CONSTANTS | CLUSTER_CONSTANTS,
        lambda constants: predict(efficient_runs, *build_stack(constants)).seconds,
        np.array([run.seconds for run in efficient_runs]),
    )
    memory_constants = fit_by_gauss_newton(
        MEMORY_CONSTANTS,
        lambda constants: predict(efficient_runs, *build_stack(constants)).logged_memory,
        np.array([run.memory for run in efficient_runs]),
    )
    return build_stack(time_constants | memory_constants)


# ------------------------------------------------------------ figures of errors


def compute_rank_correlation(a: Any, b: Any) -> float:
    """Return Spearman's rank correlation."""
    first, second = (np.argsort(np.argsort(values)) for values in (a, b))
    return float(np.corrcoef(first, second)[0, 1])


def name_group(run: GridRun) -> str:
    """Return the model and the number of nodes as text."""
    size = "1.34 B" if run.model.layers == 16 else "3.57 B"
    return f"{size}, {run.nodes} node{'s' * (run.nodes > 1)}"


def summarize(errors: Sequence[float]) -> tuple[str, str, str]:
    """Return the median of absolute errors, the median with signs, and the number of errors."""
    if not errors:
        return "", "", "0"
    return f"{median(map(abs, errors)):.1%}", f"{median(errors):+.1%}", str(len(errors))


def print_error_header() -> None:
    print_header(
        "model, nodes",
        "step: median |error|",
        "with signs",
        "n",
        "MFU of 10 % or less",
        "",
        "n",
        "memory: median |error|",
        "with signs",
        "n",
    )


def print_errors(name: str, runs: Sequence[GridRun], prediction: Prediction) -> None:
    """Print a row of errors: of steps by MFU, and of memory if the MFU is above 10 %."""
    measured_seconds = np.array([run.seconds for run in runs])
    measured_bytes = np.array([run.memory for run in runs])
    is_predicted = np.isfinite(prediction.seconds)
    is_efficient = np.array([run.mfu > MIN_MFU for run in runs])
    step = prediction.seconds / measured_seconds - 1
    memory = prediction.logged_memory / measured_bytes - 1
    parts = (
        step[is_predicted & is_efficient],
        step[is_predicted & ~is_efficient],
        memory[is_predicted & is_efficient],
    )
    print_row(name, *(cell for part in parts for cell in summarize(part.tolist())))


def choose_run(runs: Sequence[GridRun], subset: Sequence[int], prediction: Prediction) -> int:
    """Return the index of the run that `schedir plan` prefers: the simplest within 2 %.

    Of equally simple runs, the result is the run with the shortest predicted step.
    """
    longest = (1 + PREFERENCE_TOLERANCE) * min(prediction.seconds[k] for k in subset)
    fast = [k for k in subset if prediction.seconds[k] <= longest]
    return min(
        fast,
        key=lambda k: (
            measure_complexity(runs[k].choice), prediction.seconds[k], prediction.memory[k],
        ),
    )  # fmt: skip


def compute_regrets(runs: Sequence[GridRun], prediction: Prediction) -> list[float]:
    """Return the regrets of the first choice among all runs, and without one value of tp or pp."""
    groups: dict[str, list[int]] = defaultdict(list)
    for k in np.flatnonzero(np.isfinite(prediction.seconds)).tolist():
        groups[name_group(runs[k])].append(k)
    all_regrets = []
    for group in groups.values():
        subsets = [group]
        for name in ("tp", "pp"):
            for value in {getattr(runs[k].choice, name) for k in group}:
                subsets.append([k for k in group if getattr(runs[k].choice, name) != value])
        for subset in subsets:
            if len(subset) > 1:
                chosen_seconds = runs[choose_run(runs, subset, prediction)].seconds or 0.0
                all_regrets.append(chosen_seconds / min(runs[k].seconds or 0.0 for k in subset) - 1)
    return all_regrets


def compute_efficient_regrets(runs: Sequence[GridRun], prediction: Prediction) -> list[float]:
    """Return the regrets of the first choice among the runs with an MFU above 10 %."""
    is_efficient = np.array([run.mfu > MIN_MFU for run in runs])
    return compute_regrets(
        runs, prediction._replace(seconds=np.where(is_efficient, prediction.seconds, np.inf))
    )


def format_regrets(lost: Sequence[float]) -> str:
    """Return the median, the 90th percentile and the largest regret as text."""
    return (f"regret of the first choice: median {median(lost):.1%}, 90th percentile "
            f"{np.percentile(lost, 90):.1%}, worst {max(lost):.0%}, n = {len(lost)}")  # fmt: skip


def count_refusals(runs: Sequence[GridRun], stack: Stack, cluster: Cluster) -> Any:
    """Return the number of refused runs and of all runs: with a result, and without a result."""
    is_refused = ~(predict(runs, stack, cluster).memory <= cluster.memory)
    has_result = np.array([run.seconds is not None for run in runs])
    return np.array(
        [((is_refused & group).sum(), group.sum()) for group in (has_result, ~has_result)]
    )


def format_refusals(counts: Any) -> str:
    """Return the counts of `count_refusals` as text."""
    (wrong, ran), (correct, failed) = counts.tolist()
    return (f"of {ran} runs that ran, {wrong} are refused; of {failed} without a result, "
            f"{correct} ({correct / max(failed, 1):.1%})")  # fmt: skip


def print_comparison(runs: Sequence[GridRun], stack: Stack, cluster: Cluster) -> None:
    """Print errors by model and nodes, the rank correlation, the regret, and the refused runs."""
    print_error_header()
    for name in dict.fromkeys(map(name_group, runs)):
        group = [run for run in runs if name_group(run) == name]
        print_errors(name, group, predict(group, stack, cluster))
    prediction = predict(runs, stack, cluster)
    print_errors("all", runs, prediction)
    is_counted = np.isfinite(prediction.seconds) & np.array([run.mfu > MIN_MFU for run in runs])
    correlation = compute_rank_correlation(
        np.array([run.seconds for run in runs])[is_counted], prediction.seconds[is_counted]
    )
    print(f"\nrank correlation: {correlation:.3f}, n = {is_counted.sum()}")
    print(f"\n{format_regrets(compute_regrets(runs, prediction))}")
    print(f"\namong runs that count, {format_regrets(compute_efficient_regrets(runs, prediction))}")
    print(f"\n{format_refusals(count_refusals(read_runs(), stack, cluster))}\n")


# ------------------------------------------------------------ tables


def build_default_stack() -> Stack:
    """Return software with the default constants and 16-bit gradients."""
    return Stack(
        planner.SoftwareConstants(), planner.StateBytes(2, 2, 12), "even", "flash", "tp-dp-pp", ""
    )


def print_defaults() -> None:
    """Test the default constants on H100. None of them is fitted to these rows."""
    print_comparison(read_measured_runs(), build_default_stack(), planner.cluster_preset("h100"))


def print_shipped() -> None:
    """Print errors with the constants of schedir, which are fitted to all of these rows."""
    print_comparison(read_measured_runs(), NANOTRON, CLUSTER)


def has_other_nodes(nodes: int, run: GridRun) -> bool:
    """Return whether a run has another number of nodes."""
    return run.nodes != nodes


LEFT_OUT_SPLITS: dict[str, Callable[[GridRun], bool]] = {
    "1 and 2 nodes": lambda run: run.nodes <= 2,
    "1.34 B": lambda run: run.model.layers == 16,
    **{f"all but {n} nodes": partial(has_other_nodes, n) for n in NODE_COUNTS},
}


def print_left_out() -> None:
    """Fit constants of nanotron to some of the rows, and test them with the other rows."""
    runs = read_measured_runs()
    all_regrets, refusals = [], np.zeros((2, 2), int)
    for name, is_training in list(LEFT_OUT_SPLITS.items())[: 1 if SMOKE else None]:
        stack, cluster = fit_nanotron([run for run in runs if is_training(run)])
        test_runs = [run for run in runs if not is_training(run)]
        print(f"\nfitted on {name}\n")
        print_error_header()
        for group in dict.fromkeys(map(name_group, test_runs)):
            group_runs = [run for run in test_runs if name_group(run) == group]
            print_errors(group, group_runs, predict(group_runs, stack, cluster))
        prediction = predict(test_runs, stack, cluster)
        print_errors("all of these", test_runs, prediction)
        all_test_runs = [run for run in read_runs() if not is_training(run)]
        counts = count_refusals(all_test_runs, stack, cluster)
        print(f"\n{format_refusals(counts)}")
        if name.startswith("all but"):
            all_regrets += compute_regrets(test_runs, prediction)
            refusals += counts
    print(f"\nfor each number of nodes, by the others: {format_regrets(all_regrets or [0.0])}\n")
    print(f"{format_refusals(refusals)}\n")


def predict_rows(
    predict_pool: Callable[[Cluster], Prediction], rows: list[int], cluster: Cluster
) -> Any:
    """Return the predicted seconds of some rows."""
    return predict_pool(cluster).seconds[rows]


def print_calibrated() -> None:
    """Calibrate with three runs on 1 and 2 nodes, and test with runs on other numbers of nodes."""
    runs = read_measured_runs()
    pool = [run for run in select_efficient_runs(runs) if run.nodes <= 2]
    errors: dict[int, list[float]] = defaultdict(list)
    inefficient_errors: dict[int, list[float]] = defaultdict(list)
    all_regrets: list[float] = []
    efficient_regrets: list[float] = []
    for test_nodes in ((8,), (4, 16))[: 1 if SMOKE else None]:
        stack, cluster = fit_nanotron([run for run in runs if run.nodes not in test_nodes])
        test_runs = [run for run in runs if run.nodes in test_nodes]
        predict_pool = lru_cache(
            partial(predict, pool, stack)
        )  # all fits begin with the same predictions
        for draw in range(DRAWS):
            sample = random.Random(draw).sample(range(len(pool)), 3)
            log_seconds = np.log([pool[k].seconds or 0.0 for k in sample])
            fitted_cluster, _ = fit_constants(
                cluster, partial(predict_rows, predict_pool, sample), log_seconds
            )
            prediction = predict(test_runs, stack, fitted_cluster)
            for run, seconds in zip(test_runs, prediction.seconds.tolist(), strict=True):
                (errors if run.mfu > MIN_MFU else inefficient_errors)[run.nodes].append(
                    seconds / (run.seconds or 0.0) - 1
                )
            all_regrets += compute_regrets(test_runs, prediction)
            efficient_regrets += compute_efficient_regrets(test_runs, prediction)
    print_header(
        "nodes", "median |error|", "with signs", "n: runs x draws", "MFU of 10 % or less", "", "n"
    )
    for n in sorted(errors):
        print_row(n, *summarize(errors[n]), *summarize(inefficient_errors[n]))
    all_errors = [e for node_errors in errors.values() for e in node_errors]
    print_row(
        "all",
        *summarize(all_errors),
        *summarize([e for node_errors in inefficient_errors.values() for e in node_errors]),
    )
    print(f"\n{format_regrets(all_regrets)}")
    print(f"\namong runs that count, {format_regrets(efficient_regrets)}\n")


def print_b200() -> None:
    """Compare the memory of Megatron-LM on B200. The rows have only the bytes of tensors."""
    stack, node = planner.stack_preset("megatron"), planner.cluster_preset("b200")
    constants = replace(stack.constants, allocator_share=0, reserved_bytes=0)
    print_header("layout", "allocated, GB", "predicted, GB", "")
    errors = []
    for model, choice, size, _ in published.read_b200_runs():
        predicted = planner.peak_memory(
            model, node, choice, constants, state_bytes=stack.state_bytes
        ).total
        errors.append(predicted / size - 1)
        print_row(f"tp {choice.tp} pp {choice.pp} dp {choice.dp} cp {choice.cp} "
             f"m {choice.microbatches}",
             f"{size / 1e9:.1f}", f"{predicted / 1e9:.1f}", f"{errors[-1]:+.1%}")  # fmt: skip
    largest = max(map(abs, errors))
    print(f"\nmedian {median(map(abs, errors)):.1%}, largest {largest:.1%}, n = {len(errors)}")


def print_mlperf() -> None:
    """Print the table of GPT-3 in FP8. The speedup of FP8 is fitted to the first row."""
    stack = planner.stack_preset("megatron-fp8")
    print_header("run", "t", "p", "d", "v", "b", "m", "MLPerf, s", "predicted", "", "in 16 bits")
    errors = []
    for accelerator, run in published.read_mlperf_runs():
        plan = run.choice
        cluster = replace(planner.cluster_preset(accelerator), nodes=plan.gpus // 8)
        predicted, predicted_16_bit = (
            planner.estimate_step(
                run.model, cluster, plan, closed_form_only=True, constants=constants
            ).step_time
            for constants in (stack.constants, planner.SoftwareConstants())
        )
        errors.append(predicted / run.seconds - 1)
        print_row(
            run.name,
            plan.tp,
            plan.pp,
            plan.dp,
            plan.stages_per_rank,
            plan.microbatch_size,
            plan.microbatches,
            f"{run.seconds:.2f}",
            f"{predicted:.2f}",
            f"{errors[-1]:+.1%}",
            f"{predicted_16_bit / run.seconds - 1:+.1%}",
        )
    other_errors = errors[1:]
    print(
        f"\nall but the first row: mean {fmean(map(abs, other_errors)):.1%}, with signs "
        f"{fmean(other_errors):+.1%}, largest {max(other_errors, key=abs):+.1%}, n = "
        f"{len(other_errors)}"
    )


def draw_scatter() -> None:
    """Draw measured and predicted steps, with default and with fitted constants."""
    if not OUTPUT:
        return
    from matplotlib.figure import Figure

    runs = select_efficient_runs(read_measured_runs())
    measured_seconds = np.array([run.seconds for run in runs])
    figure = Figure(figsize=(9, 6.6), layout="constrained")
    grid_of_axes = figure.subplots(2, 3, sharex=True, sharey=True)
    fitted = fit_nanotron([run for run in read_measured_runs() if run.nodes <= 2])
    predictors = (("default constants", (build_default_stack(), planner.cluster_preset("h100"))),
            ("fitted on 1 and 2 nodes", fitted))  # fmt: skip
    colors: tuple[tuple[str, Callable[[GridRun], int]], ...] = (
        ("nodes", lambda run: run.nodes), ("tp", lambda run: run.choice.tp),
        ("pp", lambda run: run.choice.pp),
    )  # fmt: skip
    for row, (title, (stack, cluster)) in zip(grid_of_axes, predictors, strict=True):
        predicted = predict(runs, stack, cluster).seconds
        for ax, (name, value_of) in zip(row, colors, strict=True):
            values = np.array([value_of(run) for run in runs])
            for value in sorted(set(values.tolist())):
                mask = values == value
                ax.plot(
                    measured_seconds[mask],
                    predicted[mask],
                    ".",
                    label=f"{name} {value}",
                    markersize=4,
                )
            ax.plot([0.2, 20], [0.2, 20], color="gray", linewidth=0.8)
            ax.set(xscale="log", yscale="log", title=f"{title}, by {name}")
            ax.legend(fontsize="small")
        row[0].set_ylabel("predicted step, s")
    for ax in grid_of_axes[1]:
        ax.set_xlabel("measured step, s")
    figure.savefig(OUTPUT, metadata={"Date": None})


TABLES: dict[str, Callable[[], None]] = {
    "defaults": print_defaults, "left-out": print_left_out, "calibrated": print_calibrated,
    "shipped": print_shipped,
    "b200": print_b200, "mlperf": print_mlperf, "scatter": draw_scatter,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", nargs="?", default="all", choices=("all", *TABLES))
    parser.add_argument("--draws", type=int, default=200, metavar="N")
    parser.add_argument(
        "-o", dest="output", default="", metavar="FILE", help="the picture of `scatter`"
    )
    options = parse(parser, draws=2)
    global SMOKE, DRAWS, OUTPUT
    SMOKE, DRAWS, OUTPUT = options.smoke, options.draws, options.output
    for name, table in TABLES.items():
        if options.table in ("all", name):
            print(f"\n## {name}\n")
            table()


if __name__ == "__main__":
    main()
