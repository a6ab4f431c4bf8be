"""Options of `plan`, and the planning request that they make."""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from warnings import catch_warnings

from schedir.commands.common.progress_line import ProgressLine
from schedir.errors import SchedirError, UsageError

if TYPE_CHECKING:
    from schedir.ir.cost.cluster import Cluster
    from schedir.ir.program import Program
    from schedir.planner import PlanEstimate, TransformerSpec

_MAX_SEARCHED_PLANS: Final = 3  # plans for which a shorter schedule is searched
_PICTURE_RESOLUTION: Final = 60  # of a picture, in which time or memory grows by a factor e
# Dimensions that can be fixed: the option, the field of a choice, and what it is.
FIXED_OPTIONS: Final = (
    ("pp", "pp", "ranks of a pipeline"),
    ("tp", "tp", "tensor-parallel slices"),
    ("dp", "dp", "replicas"),
    ("cp", "cp", "parts of a sequence (context parallelism)"),
    ("ep", "ep", "replicas that share a layer's experts"),
    ("stages-per-rank", "stages_per_rank", "stages of a rank"),
    ("microbatch-size", "microbatch_size", "sequences of a microbatch"),
    ("zero", "zero", "stages of ZeRO"),
)
NAME_OPTIONS: Final = (
    ("schedules", "schedules", "schedules, by name"),
    ("recompute", "recompute", "what a layer runs again: none, selective, full"),
)


@dataclass(frozen=True)
class PlanRequest:
    """For what is planned; `display_names` is what a person calls the model, and the machines."""

    model: TransformerSpec
    cluster: Cluster
    batch: int
    display_names: tuple[str, str]
    planner_options: dict[str, Any]  # of `schedir.planner.plan`


def parse_plan_request(args: argparse.Namespace) -> PlanRequest:
    """What the options say.  Raises UsageError for what is not said, and cannot be."""
    from schedir.planner.transformer.model_presets import (
        SPEC_FIELDS,
        build_model,
        load_model_fields,
    )

    own = {name: value for name in SPEC_FIELDS if (value := getattr(args, name)) is not None}
    if args.model is None and not own:
        raise UsageError(
            "nobody says which model",
            hint="--model gpt-175b, or --layers 96 --hidden 12288 --heads 96 --vocab 51200 "
            "--sequence 2048",
            fields=["model"],
        )
    shape = {} if args.model is None else load_model_fields(args.model)
    model = build_model({**shape, **own}, args.model or "")
    if args.batch is None:
        raise UsageError("nobody says how many sequences a step has", hint="--batch 1536",
                         fields=["batch"])  # fmt: skip
    fixed = {field: value for _, field, _ in (*FIXED_OPTIONS, *NAME_OPTIONS)
             if (value := getattr(args, field)) is not None}  # fmt: skip
    fixed |= {name: value for name in ("attention", "sequence_parallel", "rank_order")
              if (value := getattr(args, name)) is not None}  # fmt: skip
    how = {"exact": not args.no_exact, "offload": args.offload, **fixed}
    name = Path(args.model).stem if args.model is not None and not own else "the model"
    return PlanRequest(
        model, _resolve_cluster(args), args.batch, (name, Path(args.cluster).stem), how
    )


def _resolve_cluster(args: argparse.Namespace) -> Cluster:
    """The machines: those of a name or of a file, as many as are said."""
    from schedir.io.cluster_file import load_cluster
    from schedir.planner import cluster_preset, cluster_presets

    if args.cluster is None:
        raise UsageError(
            "nobody says on which machines",
            fields=["cluster"],
            hint=f"--cluster {cluster_presets()[0]} --nodes 4, or a FILE.toml of your own",
        )
    named = args.cluster in cluster_presets()
    found = cluster_preset(args.cluster) if named or not args.cluster.endswith(".toml") else None
    found = load_cluster(args.cluster) if found is None else found
    if named and args.nodes is None and args.gpus is None and args.scale is None:
        raise UsageError(f"nobody says how many nodes of {args.cluster}", hint="--nodes 128",
                         fields=["nodes"])  # fmt: skip
    if args.nodes is not None:
        return replace(found, nodes=args.nodes)
    gpus = args.gpus if args.gpus is not None or not args.scale else max(args.scale)
    return found if gpus is None else resize_cluster(found, gpus)


def resize_cluster(cluster: Cluster, gpus: int) -> Cluster:
    """So many GPUs of such nodes: whole nodes, or a part of one."""
    each = cluster.gpus_per_node
    if gpus < each:
        return replace(cluster, nodes=1, gpus_per_node=gpus)
    if gpus % each:
        raise UsageError(
            f"{gpus} GPUs are no whole number of nodes of {each}",
            hint=f"{gpus // each * each} or {(gpus // each + 1) * each}",
            fields=["gpus"],
        )
    return replace(cluster, nodes=gpus // each)


def find_plans(request: PlanRequest, max_plans: int) -> list[PlanEstimate]:
    """The best plans, the shortest step first."""
    from schedir.planner import plan

    progress = ProgressLine()
    progress.show(f"planning on {request.cluster.gpu_count:,} GPUs")
    try:
        with catch_warnings(action="ignore", category=UserWarning):  # which is told below the table
            return plan(
                request.model,
                request.cluster,
                request.batch,
                top=max_plans,
                **request.planner_options,
            )
    finally:
        progress.clear()


def improve_plan_schedules(
    request: PlanRequest, plans: list[PlanEstimate], seconds: float
) -> tuple[list[PlanEstimate], dict[PlanEstimate, Program], str]:
    """Search shorter schedules for the first plans.

    Args:
        request: The model, the cluster and what else the command got.
        plans: The plans, the shortest step first.
        seconds: How long to search for each plan; with 0 there is no search.

    Returns:
        The plans, the programs of those that a search made shorter, and a line that says how the
        searches used numba, which is empty without a search.
    """
    from schedir.planner import improve_schedule
    from schedir.schedule_search.search_results import combine_numba, describe_numba

    found, programs, progress = [*plans], dict[Any, Any](), ProgressLine()
    uses = []
    for k, plan in enumerate(plans[: _MAX_SEARCHED_PLANS if seconds else 0]):
        progress.show(f"searching a shorter schedule for plan {k + 1}")
        with suppress(SchedirError):  # some leave no room for what a search knows of
            new = improve_schedule(request.model, request.cluster, plan, time_limit=seconds)
            uses.append(new.numba)
            if new.estimate.step_time < plan.step_time:
                found[k] = replace(
                    new.estimate, bottleneck=plan.bottleneck, explanation=plan.explanation
                )
                programs[found[k]] = new.program
    progress.clear()
    note = (
        f"searched {describe_numba(combine_numba(uses))}; a plan has two searches\n" if uses else ""
    )
    return sorted(found, key=lambda plan: plan.step_time), programs, note


def optimize_plan_divisions(request: PlanRequest, plans: list[PlanEstimate]) -> list[PlanEstimate]:
    """The plans with layers divided so that a step is shorter, of the first ones, where that is."""
    from schedir.planner import optimize_layer_division, simulate_plan
    from schedir.planner.plan_estimate import strip_estimates

    found, progress = [*plans], ProgressLine()
    for k, plan in enumerate(plans[:_MAX_SEARCHED_PLANS]):
        progress.show(f"dividing the layers of plan {k + 1}")
        with suppress(UsageError):  # no division holds little enough
            layers = optimize_layer_division(request.model, request.cluster, strip_estimates(plan))
            even, new = (
                simulate_plan(
                    request.model,
                    request.cluster,
                    replace(strip_estimates(plan), layers_per_stage=which),
                )
                for which in (plan.layers_per_stage, layers)
            )
            if new.step_time < even.step_time:
                found[k] = replace(new, bottleneck=plan.bottleneck, explanation=plan.explanation)
    progress.clear()
    return sorted(found, key=lambda plan: plan.step_time)


def list_all_plans(request: PlanRequest) -> list[PlanEstimate]:
    """All plans by their closed form, also those that do not fit; of those that a picture cannot
    tell apart, one."""
    import numpy as np

    from schedir.planner import all_plans

    how = {
        name: value
        for name, value in request.planner_options.items()
        if name not in ("exact", "offload")
    }
    found = all_plans(request.model, request.cluster, request.batch, **how)
    where = np.rint(_PICTURE_RESOLUTION * np.log([found.step_times, found.total_memory]))
    first = np.unique([*where, found.plans.recompute], axis=1, return_index=True)[1]
    return [found.estimate_at(request.model, request.cluster, number) for number in first.tolist()]
