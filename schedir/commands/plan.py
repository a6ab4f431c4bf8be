"""The command `plan`: find the parallel plans with the shortest steps for a model and a cluster.

With `--gpu-counts`, the command plans for several numbers of GPUs. With `--measure` or
`--calibrate`, it does not plan, but writes a cluster file.
"""

from __future__ import annotations

import argparse
import re
import shlex
from contextlib import nullcontext
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from schedir.commands.common.cluster_calibration import calibrate_cluster
from schedir.commands.common.plan_report import (
    LAST_COLUMNS,
    collect_plan_facts,
    describe_speeds,
    format_seconds,
    format_teraflops,
    wrap,
)
from schedir.commands.common.plan_request import (
    FIXED_OPTIONS,
    MODEL_SIZE_OPTIONS,
    NAME_OPTIONS,
    PlanRequest,
    find_plans,
    find_preferred_plans,
    improve_plan_schedules,
    list_all_plans,
    optimize_plan_divisions,
    parse_plan_request,
)
from schedir.commands.common.schedule_options import (
    make_argument_type,
    parse_byte_option,
    parse_count,
    parse_number,
    parse_seconds,
)
from schedir.errors import SchedirError, UsageError
from schedir.extras import require_package
from schedir.io.files import atomic_write, require_writable
from schedir.io.terminal_output import format_json, format_table
from schedir.ir.cost.number_parsing import parse_integer
from schedir.schedule_search.search_arguments import DEFAULT_TIME_LIMIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from schedir.ir.program import Program
    from schedir.planner import PlanEstimate


# ---------------------------------------------------------------- plans for several numbers of GPUs

# With strong scaling, the batch is the same for each number of GPUs. With weak scaling, the batch
# is proportional to the number of GPUs.
_SCALING_DESCRIPTIONS = {"strong": "the same batch", "weak": "a batch that grows with the GPUs"}


def _plan_for_gpu_counts(args: argparse.Namespace) -> str:
    """Return the plans for strong scaling and for weak scaling as text, and write the picture."""
    excluded = (
        (args.output, "-o"), (args.tradeoff, "--tradeoff"),
        (args.improve_schedules, "--improve-schedules"), (args.gpus is not None, "--gpus"),
    )  # fmt: skip
    for option, name in excluded:
        if option:
            raise UsageError(f"{name} cannot be combined with --gpu-counts")
    from schedir.planner import find_step_errors

    request = parse_plan_request(args)
    errors = find_step_errors(request.cluster, request.stack)
    refusals = list[str]()
    plans_by_scaling = {
        scaling: _find_plan_per_gpu_count(request, args.gpu_counts, scaling, refusals)
        for scaling in _SCALING_DESCRIPTIONS
    }
    if args.picture is not None:
        from schedir.viz import plan_scaling, save

        save(plan_scaling(plans_by_scaling["strong"], plans_by_scaling["weak"]), args.picture)
    if args.json:
        facts = {
            f"{scaling}_scaling": [collect_plan_facts(plan, errors) for plan in plans]
            for scaling, plans in plans_by_scaling.items()
        }
        return format_json({"step_errors": errors._asdict()} | facts | {"refusals": refusals})
    lines = [
        f"{scaling}: {_SCALING_DESCRIPTIONS[scaling]}\n{_format_scaling_table(plans)}"
        for scaling, plans in plans_by_scaling.items()
        if plans
    ]
    max_gpus = max(plan.gpus for plans in plans_by_scaling.values() for plan in plans)
    lines += map(wrap, describe_speeds(request, errors, max_gpus))
    lines += [f"no plan for {line}\n" for line in refusals]
    return "".join(lines) + (f"wrote {args.picture}\n" if args.picture is not None else "")


def _find_plan_per_gpu_count(
    request: PlanRequest, gpu_counts: Sequence[int], scaling: str, refusals: list[str]
) -> list[PlanEstimate]:
    """Return the best plan for each number of GPUs.

    For each number of GPUs without a plan, a line with the reason is appended to `refusals`.
    """
    from schedir.planner.hardware.cluster_size import resize_cluster

    result: list[PlanEstimate] = []
    max_gpus = max(gpu_counts)
    first_error: SchedirError | None = None
    for gpus in sorted({*gpu_counts}):
        batch = request.batch if scaling == "strong" else request.batch * gpus / max_gpus
        if batch != int(batch):
            refusals.append(f"{gpus:,} GPUs, {scaling}: {batch:.2f} is not a number of sequences")
            continue
        scaled_request = replace(
            request, cluster=resize_cluster(request.cluster, gpus), batch=int(batch)
        )
        try:
            result += find_plans(scaled_request, 1)
        except SchedirError as error:
            first_error = first_error or error
            refusals.append(f"{gpus:,} GPUs, {scaling}: {error.fact}")
    if not result and first_error is not None:
        raise first_error
    return result


def _format_scaling_table(plans: Sequence[PlanEstimate]) -> str:
    first = plans[0]
    last = [(name, field) for name, field, usual in LAST_COLUMNS
            if any(getattr(plan, field) != usual for plan in plans)]  # fmt: skip
    return format_table(
        ["GPUs", "batch", "pp", "tp", "dp", "v", "b", "schedule", "recompute", "ZeRO",
         *(name for name, _ in last), "step", "TFLOP/s", "MFU", "of the first"],
        [
            [
                f"{plan.gpus:,}", f"{plan.batch:,}", str(plan.pp), str(plan.tp), str(plan.dp),
                str(plan.stages_per_rank), str(plan.microbatch_size), plan.schedule, plan.recompute,
                str(plan.zero), *(getattr(plan, field) for _, field in last),
                format_seconds(plan.step_time), format_teraflops(plan.flops_per_second),
                f"{plan.mfu:.1%}", f"{plan.flops_per_second / first.flops_per_second:.0%}",
            ]
            for plan in plans
        ],
    )  # fmt: skip


# ---------------------------------------------------------------- --measure


# Options that cannot be combined with `--measure`, and options that need it.
_PLANNING_OPTIONS: Final = (
    "model", "layers", "batch", "cluster", "gpu_counts", "picture", "calibrate", "memory_limit",
)  # fmt: skip
_MEASURING_OPTIONS: Final = ("processes", "device")


def add_measure_options(group: argparse._ArgumentGroup) -> None:
    """Add `--measure` and the options that need it.

    Args:
        group: The group of options.
    """
    group.add_argument(
        "--measure", action="store_true",
        help="measure this machine for about half a minute, and write its cluster file to -o",
    )  # fmt: skip
    group.add_argument(
        "--processes", type=parse_count, metavar="N",
        help="with --measure: the number of processes (default: one per processor or GPU)",
    )  # fmt: skip
    group.add_argument(
        "--device", metavar="DEVICE", help="with --measure: the device, cpu (default) or cuda"
    )


def measure_cluster(args: argparse.Namespace) -> str | None:
    """Measure this machine, and write the cluster file.

    Args:
        args: The parsed options of `plan`.

    Returns:
        A table that compares the measurements with the predictions for the new cluster file. None
        without `--measure`.

    Raises:
        UsageError: An option is missing or cannot be combined with `--measure`, or the machine
            cannot be measured.
    """
    if not args.measure:
        if given_options := [
            name for name in _MEASURING_OPTIONS if getattr(args, name) is not None
        ]:
            raise UsageError(f"--{given_options[0]} needs --measure", hint="--measure -o here.toml",
                             fields=given_options)  # fmt: skip
        return None
    if given_options := [name for name in _PLANNING_OPTIONS if getattr(args, name) is not None]:
        option = given_options[0].replace("_", "-")
        raise UsageError(
            f"--measure does not plan, and cannot be combined with --{option}",
            hint="plan with the file that it writes: --cluster here.toml", fields=given_options,
        )  # fmt: skip
    if args.output is None or Path(args.output).suffix != ".toml":
        raise UsageError("--measure writes a cluster file, and needs -o FILE.toml",
                         hint="-o here.toml", fields=["output"])  # fmt: skip
    require_package("torch", "--measure")
    from schedir.io.cluster_file import save_cluster
    from schedir.training.hardware_benchmark import measure

    with atomic_write(args.output) as temporary:  # Fail now if the path cannot be written.
        measurement = measure(args.processes, args.device or "cpu", progress=True)
        processes = (
            f"{measurement.cluster.gpu_count} process{'es' * (measurement.cluster.gpu_count > 1)}"
        )
        comment = f"Measured by schedir plan --measure with {processes} at the same time."
        save_cluster(measurement.cluster, temporary, comment=comment, notes=measurement.notes)
    warnings = [f"warning: {warning}" for warning in measurement.warnings]
    return "".join(f"{line}\n" for line in (*measurement.table, *warnings, f"wrote {args.output}"))


# ---------------------------------------------------------------- options

EXAMPLES = """\
  schedir plan --model gpt-175b --cluster a100 --nodes 128 --batch 1536

The page docs/how-to/plan-a-cluster.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan`.

    Args:
        parser: The parser of the command.
    """
    parser.description = (
        "Plan a training run. Find the parallel degrees, schedule, recomputation and ZeRO level "
        "with the shortest step on a cluster, and print its time, memory and bottleneck."
    )
    parser.add_argument("--batch", type=parse_count, metavar="N", help="sequences per step")
    parser.add_argument("--top", type=parse_count, default=10, metavar="N",
                        help="the number of plans to print (10)")  # fmt: skip
    parser.add_argument(
        "--tokens", type=parse_number, metavar="N",
        help="the number of tokens of the training run, such as 300e9, to print how many steps and "
        "days it takes",
    )  # fmt: skip
    parser.add_argument(
        "--closed-form-only", action="store_true",
        help="estimate all plans by formulas; by default, the best plans are also compiled and "
        "simulated",
    )  # fmt: skip
    parser.add_argument("--offload", action="store_true",
                        help="also search plans that move activations or the optimizer state to "
                        "the host, and simulate them")  # fmt: skip
    parser.add_argument("--optimize-division", action="store_true",
                        help="for the best three plans, search for a division of layers into "
                        "stages that makes the step shorter")  # fmt: skip
    parser.add_argument("--improve-schedules", action="store_true",
                        help="for the best three plans, search for a shorter schedule")  # fmt: skip
    parser.add_argument("--time-limit", type=parse_seconds, default=DEFAULT_TIME_LIMIT, metavar="S",
                        help="with --improve-schedules: the longest time of the search per plan, "
                        f"in seconds ({DEFAULT_TIME_LIMIT:g})")  # fmt: skip
    parser.add_argument("--gpu-counts", type=_parse_counts, metavar="GPUS",
                        help="plan for each of these numbers of GPUs, such as 256,512,1024: first "
                        "with the same batch (strong scaling), then with a batch that grows with "
                        "the GPUs (weak scaling)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_output(parser.add_argument_group("output"))
    _add_model(parser.add_argument_group("the model"))
    _add_cluster(parser.add_argument_group("the machines"))
    add_measure_options(parser.add_argument_group("measuring this machine instead of planning"))
    group = parser.add_argument_group("plans to consider; 4,8 allows both values")
    for option, field, about in FIXED_OPTIONS:
        group.add_argument(f"--{option}", dest=field, type=_parse_counts, metavar="N", help=about)
    for option, field, about in NAME_OPTIONS:
        group.add_argument(
            f"--{option}", dest=field, type=_parse_names, metavar="NAMES", help=about
        )
    group.add_argument(
        "--sequence-parallel", action=argparse.BooleanOptionalAction,
        help="consider only plans that divide the tokens in norms and dropout among "
        "tensor-parallel ranks, or only plans that do not (default: both)",
    )  # fmt: skip
    group.add_argument("--attention", metavar="HOW",
                       help="softmax (default), which saves the scores of all pairs of tokens, or "
                       "flash, which saves none")  # fmt: skip
    group.add_argument(
        "--rank-order", metavar="ORDER",
        help="the order in which ranks are numbered on the GPUs: tp-pp-dp (default) or tp-dp-pp; "
        "the ranks of a tp group are on neighbouring GPUs",
    )  # fmt: skip


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-o", dest="output", metavar="FILE",
        help="write the first plan to FILE.toml for schedir train, or its program to FILE.sched",
    )  # fmt: skip
    group.add_argument(
        "--select", type=parse_count, default=1, metavar="N",
        help="write and describe the plan with this number instead of the first",
    )  # fmt: skip
    group.add_argument(
        "--picture", metavar="FILE",
        help="draw the parts of the step time of each plan, such as compute and bubble; with "
        "--gpu-counts, draw step time against the number of GPUs",
    )  # fmt: skip
    group.add_argument("--tradeoff", action="store_true",
                       help="with --picture: draw step time against memory")  # fmt: skip


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model", metavar="MODEL",
        help="a name (gpt-175b), a FILE.toml with the numbers below (at top level or in [model]), "
        "the config.json of a Hugging Face model, a script.sh with arguments of Megatron-LM, or "
        "the job.toml of torchtitan. Each option below replaces one of the numbers",
    )  # fmt: skip
    for name, about in MODEL_SIZE_OPTIONS:
        group.add_argument(f"--{name}", type=parse_count, metavar="N", help=about)
    group.add_argument("--gated", action="store_true", default=None,
                       help="the feed-forward network has a third matrix, a gate")  # fmt: skip
    group.add_argument(
        "--rotary", action=argparse.BooleanOptionalAction, default=None,
        help="positions are rotary (RoPE) and have no parameters; with --no-rotary, each position "
        "has a learned embedding (default: rotary with --gated)",
    )  # fmt: skip
    group.add_argument("--untied", dest="tied", action="store_false", default=None,
                       help="the head and the embedding do not share a matrix")  # fmt: skip


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--cluster", metavar="CLUSTER",
        help="a name (a100, h100), or FILE.toml with your own cluster; `schedir examples` writes "
        "files to edit, such as examples/clusters/a100.toml",
    )  # fmt: skip
    group.add_argument(
        "--stack", metavar="NAME",
        help="the training software: megatron, megatron-fp8, megatron-fp4, megatron-2021, "
        "nanotron, torchtitan or schedir. The planner uses its kernel constants, bytes of model "
        "states, attention and order of ranks",
    )  # fmt: skip
    group.add_argument(
        "--calibrate", metavar="RUNS.csv",
        help="fit the constants of the cluster to measured runs, and write the cluster to -o; "
        "RUNS.csv lists 1 to 20 runs of the software --stack",
    )  # fmt: skip
    group.add_argument(
        "--memory-limit", type=parse_byte_option, metavar="BYTES",
        help="the most bytes of a GPU that a plan may use, such as 40GB (default: its memory)",
    )  # fmt: skip
    many: Any = group.add_mutually_exclusive_group()
    many.add_argument("--nodes", type=parse_count, metavar="N", help="number of nodes")
    many.add_argument("--gpus", type=parse_count, metavar="N", help="number of GPUs")


def format_epilog() -> str:
    """Return the end of the `--help` text: the columns of the table, and names for `--model`."""
    from schedir.planner.transformer.model_presets import MODEL_PRESETS

    width = max(map(len, MODEL_PRESETS))
    rows = "".join(f"  {name:{width}} {source}\n" for name, (_, source) in MODEL_PRESETS.items())
    return (
        "\ncolumns of the table: pp, tp, dp, cp and ep are the options of these names; SP is "
        "sequence\nparallelism, v stages per rank, b sequences per microbatch, m microbatches\n"
        f"\nnames for --model, and the sources of their sizes\n{rows}"
    )


_parse_counts: Final = make_argument_type(
    lambda text: tuple(map(parse_integer, text.split(","))),
    "must be an integer, or integers with commas between them like 4,8",
)


def _parse_names(text: str) -> tuple[str, ...]:
    if re.search(r"\w *[ ;:|+] *\w", text):
        raise argparse.ArgumentTypeError(f"must be names with commas between them, not {text!r}")
    return tuple(word.strip() for word in text.split(","))


# ---------------------------------------------------------------- the command


def run(args: argparse.Namespace) -> str:
    """Return the best plans and details of the selected plan, and write the output files.

    Args:
        args: The parsed options of `plan`.

    Returns:
        A table, JSON with `--json`, or the result of `measure_cluster` with `--measure`.

    Raises:
        UsageError: Options are invalid or cannot be combined, or no plan fits.
    """
    if (measurement := measure_cluster(args)) is not None:
        return measurement
    if args.calibrate is not None:
        return calibrate_cluster(args)
    from schedir.commands.common.plan_report import format_plans, format_plans_json

    _require_valid_options(args)
    if args.gpu_counts is not None:
        return _plan_for_gpu_counts(args)
    request = parse_plan_request(args)
    if args.picture is not None:
        require_writable(args.picture)
    with nullcontext() if args.output is None else atomic_write(args.output) as path:
        # These options start from the fastest plans. Without them, the first plan may be a simpler
        # plan that is almost as fast.
        if args.optimize_division or args.improve_schedules:
            best, fastest = find_plans(request, args.top), None
        else:
            best, fastest = find_preferred_plans(request, args.top)
        plans = optimize_plan_divisions(request, best) if args.optimize_division else best
        programs: dict[PlanEstimate, Program] = {}
        note = ""
        if args.improve_schedules:
            plans, programs, note = improve_plan_schedules(request, plans, args.time_limit)
        if not 1 <= args.select <= len(plans):
            raise UsageError(
                f"--select: there is no plan {args.select}, the plans are 1 to {len(plans)}",
                fields=["select"],
            )
        selected_plan = plans[args.select - 1]
        if path is not None:
            path.write_text(
                _format_plan_file(args, request, selected_plan, programs.get(selected_plan)),
                encoding="utf-8",
            )
    if args.picture is not None:
        _draw_plans(args, request, plans, selected_plan)
    if args.json:
        return format_plans_json(request, plans)
    written_files = [path for path in (args.output, args.picture) if path is not None]
    text = format_plans(request, plans, args.select, args.tokens, fastest) + note
    return text + "".join(f"wrote {path}\n" for path in written_files)


def _require_valid_options(args: argparse.Namespace) -> None:
    """Raise UsageError if an option has an invalid value, or if two options exclude each other."""
    if args.tradeoff and args.picture is None:
        raise UsageError(
            "--tradeoff draws a picture, and needs --picture", hint="--picture FILE.svg"
        )
    if args.output is not None and Path(args.output).suffix not in (".toml", ".sched"):
        raise UsageError(f"-o {args.output}: the file of a plan must end in .toml or .sched")
    if args.picture is not None:
        from schedir.viz.figures.figure_files import require_figure_suffix

        require_figure_suffix(args.picture)  # Fail before the search for plans.
    if args.top < 1:
        raise UsageError(f"--top must be 1 or more, not {args.top}")
    if args.tokens is not None and not 0 < args.tokens < inf:
        raise UsageError(f"--tokens must be above 0 and finite, not {args.tokens:g}")
    if not 0 < args.time_limit < inf:
        raise UsageError(f"--time-limit must be above 0 s and finite, not {args.time_limit:g}")
    plan_options = (
        ("--tradeoff", args.tradeoff),
        ("--optimize-division", args.optimize_division),
        ("--improve-schedules", args.improve_schedules),
    )
    for option, is_given in plan_options:
        if args.offload and is_given:
            raise UsageError(f"{option} cannot be combined with --offload", fields=["offload"])


def _format_plan_file(
    args: argparse.Namespace,
    request: PlanRequest,
    plan: PlanEstimate,
    searched_program: Program | None,
) -> str:
    """Return a plan as a configuration of `schedir train` or as a program, with comments."""
    from schedir.commands.common.plan_report import describe_plan
    from schedir.errors import format_bytes
    from schedir.ir.text_format import to_text
    from schedir.planner import simulated_program, train_config

    lines = [
        f"schedir {shlex.join(args.command_words)}",
        f"{describe_plan(plan)}: predicted are {format_seconds(plan.step_time)} per step and "
        f"{format_bytes(plan.memory.total)} on the fullest GPU",
    ]
    comments = "".join(f"# {' '.join(line.split())}\n" for line in lines)
    if str(args.output).endswith(".toml"):
        if searched_program is not None:
            raise UsageError(
                f"-o {args.output}: plan {args.select} has a schedule from --improve-schedules, "
                "and a .toml cannot contain this schedule",
                hint="-o best.sched writes the schedule; then set schedule = \"best.sched\" in "
                "[pipeline]",
                fields=["output"],
            )  # fmt: skip
        moves = (
            simulated_program(request.model, request.cluster, plan, **request.software)
            if plan.offload != "none"
            else None
        )
        return comments + train_config(request.model, plan, offload_program=moves)
    comments += _format_simulate_command(request, plan, searched_program)
    return comments + to_text(
        searched_program
        or simulated_program(request.model, request.cluster, plan, **request.software)
    )


def _format_simulate_command(
    request: PlanRequest, plan: PlanEstimate, searched_program: Program | None
) -> str:
    """Return a comment with the command that simulates the program at the costs of the plan.

    Return "" if the ranks share CPU cores, because `simulate` does not model this.
    """
    from schedir.planner.estimate.instruction_costs import compute_costs, compute_stage_times
    from schedir.planner.plan_compilation import build_pipeline_shape
    from schedir.planner.trainer_profile import get_trainer
    from schedir.predict.calibrate import format_costs

    model, cluster = request.model, request.cluster
    if cluster.processors is not None:
        return ""
    trainer = get_trainer(cluster, **request.software)
    times = compute_stage_times(model, cluster, plan, trainer.constants)
    shape = build_pipeline_shape(plan) if searched_program is None else searched_program.shape
    costs = compute_costs(
        model, cluster, plan, shape, times, trainer.constants, trainer.state_bytes
    )
    return (
        "# predicted by: schedir simulate FILE --progress-model per_edge "
        f"--costs {format_costs(costs)}\n"
    )


def _draw_plans(
    args: argparse.Namespace,
    request: PlanRequest,
    plans: Sequence[PlanEstimate],
    selected_plan: PlanEstimate,
) -> None:
    from schedir.viz import plan_memory, plan_times, save

    if not args.tradeoff:
        save(plan_times(plans), args.picture)
        return
    save(plan_memory(list_all_plans(request), request.cluster.memory, selected_plan), args.picture)
