"""Measure the error of the planner's predictions against published figures.

    python benchmarks/planner.py            # all tables but the last
    python benchmarks/planner.py layers     # arXiv 2205.05198, table 4: one layer
    python benchmarks/planner.py stages     # arXiv 2401.10241, table 9: a stage, forward, I and W
    python benchmarks/planner.py node       # vTrain: steps on one node; it fits a constant
    python benchmarks/planner.py sc21       # SC21, table 1: models of 1.7 billion to a trillion
    python benchmarks/planner.py left-out   # SC21, with the FLOP/s of the other models
    python benchmarks/planner.py anchored   # SC21, with the FLOP/s of one model
    python benchmarks/planner.py regret     # the chosen plan compared with the best one
    python benchmarks/planner.py memory     # arXiv 1910.02054, table 1; 2205.05198, table 2
    python benchmarks/planner.py large      # MT-NLG 530B and a trillion: plans of papers and ours
    python benchmarks/planner.py here [--cluster here.toml] [--steps 2] [--microbatch 4]

Each command prints tables. `sc21` and `large` simulate programs. The other commands compute steps
with closed forms, or simulate them with `--exact`. An error is predicted / published - 1. Means are
those of absolute errors. With NUMBA_DISABLE_JIT=1, the script does not use numba.

`here` measures this machine as `schedir plan --measure` does, unless `--cluster` is given. It
simulates the steps of all plans of a small GPT for the same number of processes. It also trains all
plans, as `schedir train` would with the configuration that the planner writes. A step begins when
all processes leave a barrier, and ends with the last process. The measured step is the median of
`--steps` steps after two warm-up steps. "worked" is the processor time of all processes in a step,
divided by the number of processors. No step can be shorter. A much longer step means that
processors were idle or ran other jobs. So run no other jobs. Only `here` needs torch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from time import process_time
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import parse, print_header, print_row
from schedir import Cluster, load_cluster, planner
from schedir.analysis.numba_jit import is_installed
from schedir.errors import UsageError
from schedir.planner import (
    ParallelPlan,
    SoftwareConstants,
    TransformerSpec,
    prediction_regret,
    stack_preset,
)
from schedir.planner.estimate.simulated_estimate import simulate_plan
from schedir.planner.parallel_plan import PlanEstimate, StepBreakdown
from schedir.planner.plan_search import plan
from schedir.planner.train_config_export import train_config
from schedir.planner.transformer.memory_estimate import count_end_params, count_layer_params
from tests import published_runs as published
from tests.published_runs import Run


def print_error_summary(errors: Iterable[float], what: str) -> None:
    """Print a summary of errors below a table."""
    values = list(errors)
    worst = max(values, key=abs)
    print(
        f"\n{what}: {fmean(map(abs, values)):.1%} in the mean, {fmean(values):+.1%} with signs, "
        f"{worst:+.1%} at worst, n = {len(values)}\n"
    )


def print_layers() -> None:
    """Print the table of a layer of the model with 22 billion parameters."""
    print_header("what runs again", "forward, ms", "paper", "", "backward, ms", "paper", "", "both")
    errors = []
    for row in published.read_layer_times():
        times = planner.layer_time(row.model, planner.cluster_preset("a100"), row.choice).total
        off = [
            predicted / measured - 1
            for predicted, measured in zip((times.F, times.B), row.seconds, strict=True)
        ]
        both = (times.F + times.B) / sum(row.seconds) - 1
        errors.append(both)
        print_row(
            row.name, f"{times.F * 1e3:.2f}", f"{row.seconds[0] * 1e3:.1f}", f"{off[0]:+.1%}",
            f"{times.B * 1e3:.2f}", f"{row.seconds[1] * 1e3:.1f}", f"{off[1]:+.1%}", f"{both:+.1%}",
        )  # fmt: skip
    print_error_summary(errors, "forward and backward")


def print_stages() -> None:
    """Print the table of an inner stage: its forward, and both halves of its backward."""
    print_header(
        "model", "p", "m", *(x for name in "FIW" for x in (f"{name}, ms", "paper", "")), "all"
    )
    errors = []
    for row in published.read_stage_times():
        cluster = planner.cluster_preset("a100", nodes=row.choice.pp // 8)
        times = planner.stage_time(row.model, cluster, row.choice, row.layers).total
        stage_times = times.F, times.I, times.W
        cells = [
            f"{predicted * 1e3:.1f} | {published_time * 1e3:.1f} | "
            f"{predicted / published_time - 1:+.1%}"
            for predicted, published_time in zip(stage_times, row.seconds, strict=True)
        ]
        errors.append(sum(stage_times) / sum(row.seconds) - 1)
        print_row(row.name, row.choice.pp, row.choice.microbatches, *cells, f"{errors[-1]:+.1%}")
    print_error_summary(errors, "a microbatch in a stage")


# ------------------------------------------------------------ steps


def choose_cluster(choice: ParallelPlan) -> Cluster:
    """Return a cluster with the A100 nodes of a run, or with some GPUs of one node."""
    node = planner.cluster_preset("a100")
    if choice.gpus < node.gpus_per_node:
        return replace(node, gpus_per_node=choice.gpus)
    return replace(node, nodes=choice.gpus // node.gpus_per_node)


EXACT = False  # True: steps are simulated; False: steps are results of closed forms
SMOKE = False  # True: tables have few rows


def read_weak_scaling_runs() -> list[Run]:
    """Return the runs of SC21's table 1, two of them with `--smoke`."""
    return published.read_weak_scaling_runs()[: 2 if SMOKE else None]


def predict_step(
    run: Run, cluster: Cluster | None = None, constants: SoftwareConstants | None = None
) -> PlanEstimate:
    """Return the predicted step of a run, with processes numbered as in Megatron-LM."""
    cluster = cluster or choose_cluster(run.choice)
    return planner.estimate_step(
        run.model, cluster, run.choice, closed_form_only=not EXACT, constants=constants
    )


def simulate_step(
    run: Run, cluster: Cluster | None = None, constants: SoftwareConstants | None = None
) -> PlanEstimate:
    """Return the step of a run from a simulation of its program."""
    return simulate_plan(run.model, cluster or choose_cluster(run.choice), run.choice, constants)


def fit_flops(run: Run) -> float:
    """Return the FLOP/s at which the predicted step equals the measured step (secant method)."""
    cluster = choose_cluster(run.choice)

    def compute_error(flops: float) -> float:
        return simulate_step(run, replace(cluster, flops=flops)).step_time / run.seconds - 1

    previous_flops, current_flops = (
        cluster.flops,
        cluster.flops * (1 + compute_error(cluster.flops)),
    )
    previous_error, error = compute_error(previous_flops), compute_error(current_flops)
    while abs(error) > 1e-4 and previous_flops != current_flops:
        previous_flops, current_flops = (
            current_flops,
            current_flops - error * (current_flops - previous_flops) / (error - previous_error),
        )
        previous_error, error = error, compute_error(current_flops)
    return current_flops


def print_node() -> None:
    """Print each row of the sample, and mean errors by t, p, d and b."""
    runs = published.read_one_node_runs()
    print_header("model", "GPUs", "batch", "b", "t", "d", "p", "vTrain, ms", "predicted", "")
    errors = []
    for run in runs:
        run_plan, predicted = run.choice, predict_step(run).step_time
        errors.append(predicted / run.seconds - 1)
        print_row(
            run.name,
            run_plan.gpus,
            run_plan.batch,
            run_plan.microbatch_size,
            run_plan.tp,
            run_plan.dp,
            run_plan.pp,
            f"{run.seconds * 1e3:.0f}",
            f"{predicted * 1e3:.0f}",
            f"{errors[-1]:+.1%}",
        )
    print_error_summary(errors, "all rows")
    for field in ("tp", "pp", "dp", "microbatch_size"):
        print_header(field, "rows", "mean", "with signs")
        for value in sorted({getattr(run.choice, field) for run in runs}):
            group_errors = [
                e for e, r in zip(errors, runs, strict=True) if getattr(r.choice, field) == value
            ]
            print_row(
                value,
                len(group_errors),
                f"{fmean(map(abs, group_errors)):.1%}",
                f"{fmean(group_errors):+.1%}",
            )
        print()


def compute_tflops(run: Run, seconds: float) -> float:
    """Return the TFLOP/s of a GPU as SC21 computes them."""
    return (
        published.count_operations(run.model, run.choice.batch) / seconds / run.choice.gpus / 1e12
    )


def print_sc21() -> None:
    """Print the table of SC21, and the breakdown of each predicted step.

    One prediction uses the constants of Megatron-LM in 2021, which are fitted to no row. The other
    uses the default constants, which hide tensor-parallel sums.
    """
    runs = read_weak_scaling_runs()
    constants_2021 = stack_preset("megatron-2021").constants
    estimates = [simulate_step(run, constants=constants_2021) for run in runs]
    today = [simulate_step(run).step_time for run in runs]
    print_header("model", "t", "p", "d", "v", "b", "m", "SC21, s", "predicted", "TFLOP/s",
         "predicted", "", "sums hidden")  # fmt: skip
    errors = [
        estimate.step_time / run.seconds - 1 for run, estimate in zip(runs, estimates, strict=True)
    ]
    hidden_errors = [seconds / run.seconds - 1 for run, seconds in zip(runs, today, strict=True)]
    for k, run in enumerate(runs):
        run_plan, predicted = run.choice, estimates[k].step_time
        print_row(
            run.name,
            run_plan.tp,
            run_plan.pp,
            run_plan.dp,
            run_plan.stages_per_rank,
            run_plan.microbatch_size,
            run_plan.microbatches,
            f"{run.seconds:.2f}",
            f"{predicted:.2f}",
            f"{compute_tflops(run, run.seconds):.0f}",
            f"{compute_tflops(run, predicted):.0f}",
            f"{errors[k]:+.1%}",
            f"{hidden_errors[k]:+.1%}",
        )
    print_error_summary(errors, "steps")
    print_error_summary(hidden_errors, "with sums hidden")
    print_header("model", *StepBreakdown._fields, "memory, GB")
    for run, estimate in zip(runs, estimates, strict=True):
        shares = (f"{part / estimate.step_time:.1%}" for part in estimate.breakdown)
        print_row(run.name, *shares, f"{estimate.memory.total / 1e9:.0f}")


def print_left_out() -> None:
    """Predict each row with the median FLOP/s of the other rows."""
    runs = read_weak_scaling_runs()
    fitted_flops = [fit_flops(run) for run in runs]
    print_header("model", "its own TFLOP/s", "of the others", "")
    errors = []
    for k, run in enumerate(runs):
        other_flops = median(fitted_flops[:k] + fitted_flops[k + 1 :])
        predicted = simulate_step(
            run, replace(choose_cluster(run.choice), flops=other_flops)
        ).step_time
        errors.append(predicted / run.seconds - 1)
        print_row(
            run.name,
            f"{fitted_flops[k] / 1e12:.0f}",
            f"{other_flops / 1e12:.0f}",
            f"{errors[-1]:+.1%}",
        )
    print_error_summary(errors, "the one left out")


def print_anchored() -> None:
    """Predict the other rows with the FLOP/s of one row.

    The main result is that of the first row. Its run needs the fewest GPUs, so a user would measure
    it before a larger run.
    """
    runs = read_weak_scaling_runs()
    print_header("anchor", "its TFLOP/s", *(run.name for run in runs), "mean of the others")
    means = []
    for anchor in runs:
        flops = fit_flops(anchor)
        errors = []
        for run in runs:
            predicted = simulate_step(
                run, replace(choose_cluster(run.choice), flops=flops)
            ).step_time
            errors.append(predicted / run.seconds - 1)
        other_errors = [abs(e) for e, run in zip(errors, runs, strict=True) if run is not anchor]
        means.append(fmean(other_errors))
        print_row(
            anchor.name, f"{flops / 1e12:.0f}", *(f"{e:+.1%}" for e in errors), f"{means[-1]:.1%}"
        )
    print(
        f"\nanchored to {runs[0].name}: {means[0]:.1%} in the mean; "
        f"mean over all anchors {fmean(means):.1%}\n"
    )


def print_regrets() -> None:
    """Print the regrets of plans with one model, batch and number of GPUs."""
    print_header("model", "batch", "GPUs", "plans", "best", "ms", "chosen", "ms", "regret")
    regrets = []
    for group in published.group_runs(published.read_one_node_runs()):
        predicted = [predict_step(run).step_time for run in group]
        measured = [run.seconds for run in group]
        best, chosen = group[measured.index(min(measured))], group[predicted.index(min(predicted))]
        regrets.append(prediction_regret(predicted, measured))
        print_row(
            group[0].name, best.choice.batch, best.choice.gpus, len(group),
            format_layout(best.choice), f"{best.seconds * 1e3:.0f}",
            format_layout(chosen.choice), f"{chosen.seconds * 1e3:.0f}", f"{regrets[-1]:.1%}",
        )  # fmt: skip
    exact_choices = sum(regret == 0 for regret in regrets)
    print(
        f"\n{fmean(regrets):.1%} in the mean, {max(regrets):.1%} at worst; right in "
        f"{exact_choices} of "
        f"{len(regrets)} groups\n"
    )


def format_layout(choice: ParallelPlan) -> str:
    """Return the layout of a plan as a short text."""
    text = f"t{choice.tp} p{choice.pp} d{choice.dp}"
    if choice.stages_per_rank > 1:
        text += f" v{choice.stages_per_rank}"
    return f"{text} b{choice.microbatch_size}"


# ------------------------------------------------------------ memory


def print_memory() -> None:
    """Compare the model states of ZeRO and the saved bytes of a layer with published numbers."""
    model, cluster = (
        TransformerSpec(72, 4096, 32, vocab=published.VOCAB, sequence=1024),
        planner.cluster_preset("a100"),
    )
    print_header("billion", "d", *(x for z in (1, 2, 3) for x in (f"level {z}, GB", "paper")))
    matching_cells = cells = 0
    for row in published.read_table("zero_table1_memory_GB"):
        billions, d = float(row["params_billion"]), int(row["dp_degree"])
        row_cells: list[str] = []
        for level, printed in enumerate((row["P_os"], row["P_os+g"], row["P_os+g+p"]), 1):
            # One stage per layer, because the paper's table has no memory for unsharded stages.
            stages = model.layers
            choice = ParallelPlan(dp=d, stages_per_rank=stages, schedule="looped_bfs", zero=level)
            peak = planner.peak_memory(model, cluster, choice)
            layer_params = sum(count_layer_params(model))
            unsharded_bytes = 2 * (level > 1) * (layer_params + count_end_params(model)[0])
            unsharded_bytes += 2 * (level > 2) * (2 * layer_params + count_end_params(model)[0])
            bytes_per_param = (
                peak.weights + peak.gradients + peak.optimizer - unsharded_bytes
            ) / model.params
            digits = len(printed.partition(".")[2])
            matching_cells += abs(bytes_per_param * billions - float(printed)) <= 10.0**-digits
            cells += 1
            row_cells += [f"{bytes_per_param * billions:.{digits}f}", printed]
        print_row(row["params_billion"], d, *row_cells)
    print(f"\n{matching_cells} of {cells} cells within one unit of the last digit\n")
    print_header("configuration", "a layer keeps, MB", "paper", "")
    gpt3 = TransformerSpec(3, 12288, 96, vocab=published.VOCAB, sequence=2048)
    for name, choice, paper in published.read_kept_bytes(gpt3):
        three_layers, two_layers = (
            planner.peak_memory(replace(gpt3, layers=layers), cluster, choice).activations
            for layers in (3, 2)
        )
        layer_bytes = three_layers - two_layers
        print_row(
            name,
            f"{layer_bytes / 1e6:.2f}",
            f"{paper / 1e6:.2f}",
            f"{layer_bytes / paper - 1:+.1%}",
        )


# ------------------------------------------------------------ large models

LARGE = [
    *(
        (f"MT-NLG 530B, {nodes} nodes",
         TransformerSpec(105, 20480, 128, vocab=51200, sequence=2048), 1920, nodes,
         ParallelPlan(pp=35, tp=8, dp=nodes // 35, microbatch_size=1,
                      microbatches=1920 * 35 // nodes, recompute="full",
                      rank_order="tp-dp-pp"))
        for nodes in (280, 350, 420)
    ),
    ("a trillion, 384 nodes",
     TransformerSpec(128, 25600, 160, vocab=51200, sequence=2048), 3072, 384,
     ParallelPlan(pp=64, tp=8, dp=6, microbatch_size=1, microbatches=512, recompute="full",
                  rank_order="tp-dp-pp")),
]  # fmt: skip
SMALL = [
    ("8 layers, 1 node", TransformerSpec(8, 1024, 16, vocab=51200, sequence=1024), 32, 1,
     ParallelPlan(pp=2, tp=2, dp=2, microbatch_size=1, microbatches=16, recompute="full",
                  rank_order="tp-dp-pp")),
]  # fmt: skip
FULL_BACKWARD_SCHEDULES = ("gpipe", "one_f_one_b", "interleaved")
RESTRICTIONS: dict[str, dict[str, Any]] = {
    "only schedules without halves of a backward": {"schedules": FULL_BACKWARD_SCHEDULES},
    "only full recomputation": {"recompute": "full"},
    "no sequence cut over slices": {"sequence_parallel": False},
    "no ZeRO": {"zero": 0},
    "only what the paper had": {
        "schedules": FULL_BACKWARD_SCHEDULES, "recompute": "full",
        "sequence_parallel": False, "zero": 0,
    },
}  # fmt: skip


def print_plan(name: str, estimate: PlanEstimate) -> None:
    """Print the row of a plan."""
    seconds = (f"{part:.2f}" for part in (estimate.step_time, *estimate.breakdown))
    options_text = f"{estimate.schedule}, {estimate.recompute}, ZeRO {estimate.zero}"
    options_text += ", sequence cut" * estimate.sequence_parallel
    memory_text = f"{estimate.memory.total / 1e9:.0f}" + " (too much)" * (not estimate.fits)
    print_row(
        name, format_layout(estimate), options_text, *seconds, memory_text, f"{estimate.mfu:.1%}"
    )


def print_large() -> None:
    """Simulate the plans of papers, of the planner, and of the planner with fewer options."""
    numba = "with numba" if is_installed() else "without numba"
    for name, model, batch, nodes, paper in SMALL if SMOKE else LARGE:
        cluster = planner.cluster_preset("a100", nodes=nodes)
        start = process_time()
        planner_plans = planner.plan(
            model, cluster, batch, rank_order=paper.rank_order, closed_form_only=False
        )
        planning_time = process_time() - start
        print(f"\n### {name}: planned in {planning_time:.1f} s of processor time, {numba}\n")
        print_header("plan", "layout", "also", "step, s", *StepBreakdown._fields, "GB", "MFU")
        print_plan(
            "the paper's", planner.estimate_step(model, cluster, paper, closed_form_only=False)
        )
        print_plan("ours", planner_plans[0])
        paper_sizes = {name: getattr(paper, name) for name in ("pp", "tp", "dp")}
        for what, restriction in (
            {"the paper's pp, tp and dp": paper_sizes} | RESTRICTIONS
        ).items():
            try:
                best, *_ = planner.plan(
                    model,
                    cluster,
                    batch,
                    rank_order=paper.rank_order,
                    top=1,
                    closed_form_only=False,
                    **restriction,
                )
                print_plan(f"ours: {what}", best)
            except UsageError as error:
                print_row(f"ours: {what}", error.fact, *[""] * (len(StepBreakdown._fields) + 4))
        print(f"\n{planner_plans[0].explanation}\n")


# ------------------------------------------------------------ this machine

HERE_MODEL = TransformerSpec(layers=8, hidden=256, heads=8, vocab=256, sequence=128)
HERE_BATCH, WARM_UP_STEPS = 16, 2
SCHEDULES = ("one_f_one_b", "interleaved", "zb_h1")
GOAL = 0.10


class MeasuredStep(NamedTuple):
    """The measured median step of a plan, its spread, and the processor seconds of a step."""

    step: float
    spread: float
    cpu: float


def train_all(texts: list[str], processes: int, steps: int) -> list[MeasuredStep]:
    """Train each configuration in its own processes, one after the other. Return the times."""
    from schedir.transports.local_processes import run_processes

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([train_one.__module__])
    measured_steps = []
    start = time.perf_counter()
    for number, text in enumerate(texts):
        ranks: list[MeasuredStep] = run_processes(
            train_one, processes, text, steps, context=context, timeout=600
        )
        measured_steps.append(merge_ranks(ranks))
        seconds_left = (time.perf_counter() - start) / (number + 1) * (len(texts) - number - 1)
        print(f"\r{number + 1} of {len(texts)} trained, {seconds_left:.0f} s left ", end="",
              file=sys.stderr, flush=True)  # fmt: skip
    return measured_steps


def train_one(_: int, text: str, steps: int) -> MeasuredStep:
    """Train some steps as one rank of a configuration, as `training.trainer` does."""
    import torch
    import torch.distributed as dist

    from schedir.models import gpt
    from schedir.models.gpt_config import GPTConfig
    from schedir.runtime.executor import Executor
    from schedir.runtime.executor_options import ExecutionOptions, GradientOptions
    from schedir.training.config.config_file import read_config
    from schedir.training.optimizer import build_optimizer
    from schedir.transports.registry import choose_transport

    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        config = read_config(file.name)
    torch.set_num_threads(config.train.threads)
    program, size, context = (
        config.request.program,
        config.data.microbatch_size,
        HERE_MODEL.sequence,
    )
    transport = choose_transport(config.train.transport, "cpu", program)(
        program,
        config.train.timeout,
        max_message_bytes=4 * size * context * HERE_MODEL.hidden // program.tp,
    )
    tp, division = transport.tp_group, config.pipeline.layers_per_stage
    assert isinstance(config.model, GPTConfig), "the planner writes no other"
    stages = {
        s: gpt.build_stage(config.model, s, program.shape.stages, tp=tp, layers_per_stage=division)
        for s in program.shape.stages_on_rank[transport.rank]
    }
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    executor = Executor(
        program, transport.rank, stages, transport,
        loss=partial(gpt.loss, tp=tp), boundary=(size, context, HERE_MODEL.hidden),
        optimizer=build_optimizer(parameters, config.train),
        gradients=GradientOptions(max_norm=config.train.clip_grad_norm),
        execution=ExecutionOptions(record_timestamps=False),
    )  # fmt: skip
    draw = torch.Generator().manual_seed(transport.dp_rank)
    shape = (2, program.shape.microbatches, size, context)
    wall_times, cpu_times = [], []
    for _ in range(WARM_UP_STEPS + steps):
        x, y = torch.randint(HERE_MODEL.vocab, shape, generator=draw)
        dist.barrier()
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        executor.step(x, y, 1 / (HERE_BATCH * context))
        dist.barrier()
        wall_times.append(time.perf_counter() - wall_start)
        cpu_times.append(time.process_time() - cpu_start)
    measured_times = wall_times[WARM_UP_STEPS:]
    return MeasuredStep(
        statistics.median(measured_times),
        max(measured_times) / min(measured_times) - 1,
        statistics.median(cpu_times[WARM_UP_STEPS:]),
    )


def list_plans(cluster: Cluster, microbatch: int | None, zero: int) -> list[PlanEstimate]:
    """Return all plans that the trainer can run, the shortest predicted step first."""
    return plan(
        HERE_MODEL, cluster, HERE_BATCH, top=10**6, schedules=SCHEDULES, closed_form_only=False,
        microbatch_size=(1, 2, 4) if microbatch is None else microbatch, stages_per_rank=(1, 2),
        zero=zero,
        recompute=("none", "full"), sequence_parallel=False, attention="flash",
    )  # fmt: skip


def format_plan(one: PlanEstimate) -> list[object]:
    """Return a plan as table cells."""
    recompute_text = "yes" if one.recompute == "full" else ""
    return [
        one.pp,
        one.tp,
        one.dp,
        one.microbatch_size,
        f"{one.schedule} {one.stages_per_rank}",
        recompute_text,
    ]


def merge_ranks(ranks: list[MeasuredStep]) -> MeasuredStep:
    """Return the longest time of a rank, and the processor time of all ranks."""
    longest = max(ranks)
    return longest._replace(cpu=sum(rank.cpu for rank in ranks))


def print_report(
    estimates: list[PlanEstimate], measured_steps: list[MeasuredStep], processors: int
) -> None:
    """Print the table and its summary."""
    print_row("p", "t", "d", "b", "schedule, stages of a rank", "run again", "predicted, ms",
         "measured, ms", "off", "spread", "worked, ms")  # fmt: skip
    print_row(*["---:"] * 4, *["---"] * 2, *["---:"] * 5)
    for estimate, measured in zip(estimates, measured_steps, strict=True):
        print_row(
            *format_plan(estimate),
            f"{1e3 * estimate.step_time:.0f}",
            f"{1e3 * measured.step:.0f}",
            f"{estimate.step_time / measured.step - 1:+.0%}",
            f"{measured.spread:.0%}",
            f"{1e3 * measured.cpu / processors:.0f}",
        )
    errors = [
        abs(estimate.step_time / measured.step - 1)
        for estimate, measured in zip(estimates, measured_steps, strict=True)
    ]
    steps = [measured.step for measured in measured_steps]
    mean = statistics.mean(errors)
    chosen_rank = sorted(steps).index(steps[0]) + 1
    print(
        f"\nmean error {mean:.1%} (goal: {GOAL:.0%}), median {statistics.median(errors):.1%}, "
        f"largest {max(errors):.1%}; the chosen plan is number {chosen_rank} of "
        f"{len(steps)} measured, "
        f"{steps[0] / min(steps) - 1:.1%} slower than the best (goal: among two)"
    )


def print_here(options: argparse.Namespace) -> None:
    """Print predicted and measured steps of all plans of a small GPT on this machine."""
    start = time.perf_counter()
    if options.cluster:
        cluster = load_cluster(options.cluster)
    else:
        from schedir.training.hardware_benchmark import measure

        hardware = measure(options.processes, quick=options.smoke, progress=True)
        cluster = hardware.cluster
        print("\n".join([*hardware.table, *hardware.warnings, ""]))
    print(f"{cluster}\n")
    estimates = list_plans(cluster, options.microbatch, options.zero)[
        : 2 if options.smoke else None
    ]
    measured_steps = train_all(
        [train_config(HERE_MODEL, estimate) for estimate in estimates],
        options.processes,
        options.steps,
    )
    print(file=sys.stderr)
    print_report(estimates, measured_steps, cluster.processors or options.processes)
    print(f"\n{len(measured_steps)} plans in {time.perf_counter() - start:.0f} s")


TABLES: dict[str, Callable[[], None]] = {
    "layers": print_layers, "stages": print_stages, "node": print_node, "sc21": print_sc21,
    "left-out": print_left_out,
    "anchored": print_anchored, "regret": print_regrets, "memory": print_memory,
    "large": print_large,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", nargs="?", default="all", choices=("all", *TABLES, "here"))
    parser.add_argument(
        "--exact", action="store_true", help="simulate programs instead of closed forms"
    )
    here_options = parser.add_argument_group("here")
    here_options.add_argument(
        "--cluster", metavar="FILE", help="use this cluster file, and measure nothing"
    )
    here_options.add_argument("--steps", type=int, default=4, metavar="N")
    here_options.add_argument(
        "--microbatch", type=int, metavar="B", help="sequences per microbatch (1, 2, 4)"
    )
    here_options.add_argument("--zero", type=int, default=0, metavar="LEVEL")
    here_options.add_argument("--processes", type=int, default=4, metavar="N")
    options = parse(parser, processes=2, steps=1, microbatch=4)
    global EXACT, SMOKE
    EXACT, SMOKE = options.exact, options.smoke
    for name, table in TABLES.items():
        if options.table in ("all", name):
            table()
    if options.table == "here" or (options.smoke and options.table == "all"):
        print_here(options)


if __name__ == "__main__":
    main()
