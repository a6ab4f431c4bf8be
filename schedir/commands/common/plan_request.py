"""Convert the options of `plan` into a planning request, and run the planner."""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from warnings import catch_warnings

from schedir.commands.common.progress_bar import show_progress
from schedir.errors import SchedirError, UsageError, format_bytes
from schedir.planner.estimate.schedule_formulas import describe_schedule_names

if TYPE_CHECKING:
    from schedir.ir.cost.cluster import Cluster
    from schedir.ir.program import Program
    from schedir.planner import PlanEstimate, TransformerSpec

_MAX_SEARCHED_PLANS: Final = 3  # The number of plans to improve. Improving a plan takes seconds.
# Plans are one point of a picture if their times and memories differ by less than about 1/60.
_PICTURE_RESOLUTION: Final = 60
# Options that fix a field of all plans: (option, field, help).
FIXED_OPTIONS: Final = (
    ("pp", "pp", "pipeline ranks"),
    ("tp", "tp", "tensor-parallel ranks"),
    ("dp", "dp", "data-parallel replicas"),
    ("cp", "cp", "parts of each sequence (context parallelism)"),
    ("ep", "ep", "replicas that share the experts of a layer (expert parallelism)"),
    ("stages-per-rank", "stages_per_rank", "stages per rank"),
    ("microbatch-size", "microbatch_size", "sequences per microbatch"),
    ("zero", "zero", "ZeRO level, 0 to 3"),
)
# Options with a number of the model: (option, help).
MODEL_SIZE_OPTIONS: Final = (
    ("layers", "number of layers"),
    ("hidden", "hidden width"),
    ("heads", "attention heads"),
    ("vocab", "vocabulary size"),
    ("sequence", "tokens per sequence"),
    ("ffn", "width of the feed-forward network (default: 4 x hidden)"),
    ("kv-heads", "heads of keys and values (default: as many as --heads)"),
    ("head-dim", "width of a head (default: hidden / heads)"),
    ("experts", "experts per layer (1)"),
    ("active", "experts per token (1)"),
)
NAME_OPTIONS: Final = (
    ("schedules", "schedules", f"schedules: {describe_schedule_names()}"),
    ("recompute", "recompute", "recomputation of a layer: none, selective, full"),
)

# Stacks -> the plans that they can run. Megatron-LM and torchtitan can run schedules of schedir.
_STACK_PLANS: Final = {
    "nanotron": {
        "schedules": ("gpipe", "one_f_one_b"), "recompute": ("none", "full"), "zero": (0, 1),
    },
}  # fmt: skip


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of the planner.

    Args:
        model: The model.
        cluster: The cluster.
        batch: The number of sequences in a step.
        display_names: The printed names of the model and of the cluster.
        planner_options: The keyword arguments of `schedir.planner.plan`.
        stack: The name of the training software, or "".
    """

    model: TransformerSpec
    cluster: Cluster
    batch: int
    display_names: tuple[str, str]
    planner_options: dict[str, Any]
    stack: str = ""

    @property
    def software(self) -> dict[str, Any]:
        """The constants and state bytes of `--stack`, as keyword arguments of the planner."""
        names = ("constants", "state_bytes")
        return {name: self.planner_options.get(name) for name in names}


def resolve_model(args: argparse.Namespace) -> TransformerSpec:
    """Return the model that the options of `plan` define.

    Args:
        args: The parsed options of `plan`.

    Raises:
        UsageError: The model is missing or invalid.
    """
    from schedir.planner.transformer.model_presets import (
        SPEC_FIELDS,
        build_model,
        load_model_fields,
    )

    model_options = {
        name: value for name in SPEC_FIELDS if (value := vars(args).get(name)) is not None
    }
    if args.model is None and not model_options:
        raise UsageError(
            "--model is missing",
            hint="--model gpt-175b, or --layers 96 --hidden 12288 --heads 96 --vocab 51200 "
            "--sequence 2048",
            fields=["model"],
        )
    preset_fields = {} if args.model is None else load_model_fields(args.model)
    return build_model({**preset_fields, **model_options}, args.model or "")


def parse_plan_request(args: argparse.Namespace) -> PlanRequest:
    """Return the planning request that the options of `plan` define.

    Args:
        args: The parsed options of `plan`.

    Raises:
        UsageError: The model, the batch, the cluster or its number of nodes is missing or invalid.
    """
    from schedir.planner import stack_preset
    from schedir.planner.transformer.model_presets import SPEC_FIELDS

    model = resolve_model(args)
    if args.batch is None:
        raise UsageError("--batch, the sequences per step, is missing", hint="--batch 1536",
                         fields=["batch"])  # fmt: skip
    fixed = {field: value for _, field, _ in (*FIXED_OPTIONS, *NAME_OPTIONS)
             if (value := getattr(args, field)) is not None}  # fmt: skip
    fixed |= {name: value for name in ("attention", "sequence_parallel", "rank_order")
              if (value := getattr(args, name)) is not None}  # fmt: skip
    planner_options = {"closed_form_only": args.closed_form_only, "offload": args.offload}
    planner_options |= {} if args.stack is None else stack_preset(args.stack).options
    planner_options |= _STACK_PLANS.get(args.stack or "", {})
    planner_options |= fixed
    is_preset = args.model is not None and all(vars(args).get(name) is None for name in SPEC_FIELDS)
    name = Path(args.model).stem if is_preset else "the model"
    cluster = _limit_memory(resolve_cluster(args), args.memory_limit)
    names = (name, Path(args.cluster).stem)
    return PlanRequest(model, cluster, args.batch, names, planner_options, args.stack or "")


def _limit_memory(cluster: Cluster, limit: float | None) -> Cluster:
    """Return the cluster with `--memory-limit` as the memory of each GPU."""
    if limit is not None and not 0 < limit <= cluster.memory:
        raise UsageError(
            f"--memory-limit {format_bytes(limit)} must be above 0 and at most "
            f"{format_bytes(cluster.memory)}, the memory of a GPU of the cluster",
            fields=["memory_limit"],
        )
    return cluster if limit is None else replace(cluster, memory=limit)


def resolve_cluster(args: argparse.Namespace) -> Cluster:
    """Return the cluster of a preset or a file, with the given number of nodes or GPUs.

    Args:
        args: The parsed options of `plan`.

    Raises:
        UsageError: The cluster or its number of nodes is missing or invalid.
    """
    from schedir.io.cluster_file import load_cluster
    from schedir.planner import cluster_preset, cluster_presets
    from schedir.planner.hardware.cluster_size import resize_cluster

    if args.cluster is None:
        raise UsageError(
            "--cluster is missing",
            fields=["cluster"],
            hint=f"--cluster {cluster_presets()[0]} --nodes 4, or --cluster FILE.toml with your "
            "own cluster",
        )
    is_preset = args.cluster in cluster_presets()
    is_file = args.cluster.endswith(".toml") and not is_preset
    result = (load_cluster if is_file else cluster_preset)(args.cluster)
    if (
        is_preset
        and args.calibrate is None
        and args.nodes is None
        and args.gpus is None
        and args.gpu_counts is None
    ):
        raise UsageError(f"--nodes, the number of nodes of {args.cluster}, is missing",
                         hint="--nodes 128", fields=["nodes"])  # fmt: skip
    if args.nodes is not None:
        return replace(result, nodes=args.nodes)
    gpus = args.gpus if args.gpus is not None or not args.gpu_counts else max(args.gpu_counts)
    return result if gpus is None else resize_cluster(result, gpus)


def find_plans(request: PlanRequest, max_plans: int) -> list[PlanEstimate]:
    """Return the plans that fit into memory, the shortest step first.

    Args:
        request: The planning request.
        max_plans: The largest number of plans.

    Raises:
        UsageError: No plan fits.
    """
    from schedir.planner import plan

    show_progress(f"planning on {request.cluster.gpu_count:,} GPUs")
    # The warnings are not printed here, because the notes below the table of plans contain them.
    with catch_warnings(action="ignore", category=UserWarning):
        return plan(
            request.model, request.cluster, request.batch, top=max_plans, **request.planner_options
        )


def find_preferred_plans(
    request: PlanRequest, max_plans: int
) -> tuple[list[PlanEstimate], PlanEstimate]:
    """Return the plans that fit into memory: the preferred plan, then the others by step time.

    Args:
        request: The planning request.
        max_plans: The largest number of plans.

    Returns:
        The plans, and the fastest plan, which may be beyond `max_plans`.

    Raises:
        UsageError: No plan fits.
    """
    from schedir.planner import prefer_simplest
    from schedir.planner.plan_search import MAX_SIMULATED_PLANS

    plans = find_plans(request, max(max_plans, MAX_SIMULATED_PLANS))
    return prefer_simplest(plans)[:max_plans], plans[0]


def improve_plan_schedules(
    request: PlanRequest, plans: list[PlanEstimate], seconds: float
) -> tuple[list[PlanEstimate], dict[PlanEstimate, Program], str]:
    """Search for shorter schedules of the first plans.

    Args:
        request: The planning request.
        plans: The plans, the shortest step first.
        seconds: The time limit of the search for each plan.

    Returns:
        The plans, the shortest step first. Then a dict with the program of each plan that became
        shorter. Then a line about the use of Numba, or "" if no plan was searched.
    """
    from schedir.planner import improve_schedule
    from schedir.schedule_search.search_results import combine_numba, describe_numba

    result, programs = [*plans], dict[Any, Any]()
    uses, searched = [], plans[:_MAX_SEARCHED_PLANS]
    for k, plan in enumerate(searched):
        show_progress(f"searching for a shorter schedule of plan {k + 1}", k, len(searched))
        with suppress(SchedirError):  # The search does not support all plans.
            improved = improve_schedule(
                request.model, request.cluster, plan, time_limit=seconds, **request.software
            )
            uses.append(improved.numba)
            if improved.estimate.step_time < plan.step_time:
                result[k] = replace(
                    improved.estimate, bottleneck=plan.bottleneck, explanation=plan.explanation
                )
                programs[result[k]] = improved.program
    note = (
        f"searched {describe_numba(combine_numba(uses))}; each plan has two searches\n"
        if uses
        else ""
    )
    return sorted(result, key=lambda plan: plan.step_time), programs, note


def optimize_plan_divisions(request: PlanRequest, plans: list[PlanEstimate]) -> list[PlanEstimate]:
    """Optimize the layers per stage of the first plans, and return all plans.

    Args:
        request: The planning request.
        plans: The plans, the shortest step first.

    Returns:
        The plans, the shortest step first. A plan keeps its layers per stage if a simulation finds
        no shorter step.
    """
    from schedir.planner import optimize_layer_division, simulate_plan
    from schedir.planner.plan_estimate import strip_estimates

    result, searched = [*plans], plans[:_MAX_SEARCHED_PLANS]
    for k, plan in enumerate(searched):
        show_progress(f"dividing the layers of plan {k + 1}", k, len(searched))
        with suppress(UsageError):  # No division fits into memory.
            layers = optimize_layer_division(
                request.model, request.cluster, strip_estimates(plan), **request.software
            )
            even, optimized = (
                simulate_plan(
                    request.model,
                    request.cluster,
                    replace(strip_estimates(plan), layers_per_stage=division),
                    **request.software,
                )
                for division in (plan.layers_per_stage, layers)
            )
            if optimized.step_time < even.step_time:
                result[k] = replace(
                    optimized, bottleneck=plan.bottleneck, explanation=plan.explanation
                )
    return sorted(result, key=lambda plan: plan.step_time)


def list_all_plans(request: PlanRequest) -> list[PlanEstimate]:
    """Return the closed-form estimates of all plans, for a picture.

    Args:
        request: The planning request.

    Returns:
        The estimates, also of plans that do not fit into memory. If several plans are the same
        point of the picture, only one of them is returned.
    """
    import numpy as np

    from schedir.planner import all_plans

    options = {
        name: value
        for name, value in request.planner_options.items()
        if name not in ("closed_form_only", "offload")
    }
    plan_table = all_plans(request.model, request.cluster, request.batch, **options)
    points = np.rint(_PICTURE_RESOLUTION * np.log([plan_table.step_times, plan_table.total_memory]))
    plan_numbers = np.unique([*points, plan_table.plans.recompute], axis=1, return_index=True)[1]
    return [
        plan_table.estimate_at(request.model, request.cluster, number)
        for number in plan_numbers.tolist()
    ]
