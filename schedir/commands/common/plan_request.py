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

_SEARCHED: Final = 3  # plans for which a shorter schedule is searched
_CELLS: Final = 60  # of a picture, in which time or memory grows by a factor e
# Dimensions that can be fixed: the option, the field of a choice, and what it is.
FIXED: Final = (
    ("pp", "pp", "ranks of a pipeline"),
    ("tp", "tp", "tensor-parallel slices"),
    ("dp", "dp", "replicas"),
    ("cp", "cp", "parts of a sequence (context parallelism)"),
    ("ep", "ep", "replicas that share a layer's experts"),
    ("stages-per-rank", "stages_per_rank", "stages of a rank"),
    ("microbatch-size", "microbatch_size", "sequences of a microbatch"),
    ("zero", "zero", "stages of ZeRO"),
)
WORDS: Final = (
    ("schedules", "schedules", "schedules, by name"),
    ("recompute", "recompute", "what a layer runs again: none, selective, full"),
)


@dataclass(frozen=True)
class PlanRequest:
    """For what is planned; `named` is what a person calls the model, and the machines."""

    model: TransformerSpec
    cluster: Cluster
    batch: int
    named: tuple[str, str]
    how: dict[str, Any]  # of `schedir.planner.plan`


def asked_of(args: argparse.Namespace) -> PlanRequest:
    """What the options say.  Raises UsageError for what is not said, and cannot be."""
    from schedir.planner.transformer.model_presets import FIELDS, model_of, shape_of

    own = {name: value for name in FIELDS if (value := getattr(args, name)) is not None}
    if args.model is None and not own:
        raise UsageError(
            "nobody says which model",
            hint="--model gpt-175b, or --layers 96 --hidden 12288 --heads 96 --vocab 51200 "
            "--sequence 2048",
            fields=["model"],
        )
    shape = {} if args.model is None else shape_of(args.model)
    model = model_of({**shape, **own}, args.model or "")
    if args.batch is None:
        raise UsageError("nobody says how many sequences a step has", hint="--batch 1536",
                         fields=["batch"])  # fmt: skip
    fixed = {field: value for _, field, _ in (*FIXED, *WORDS)
             if (value := getattr(args, field)) is not None}  # fmt: skip
    fixed |= {name: value for name in ("attention", "sequence_parallel", "rank_order")
              if (value := getattr(args, name)) is not None}  # fmt: skip
    how = {"exact": not args.no_exact, "offload": args.offload, **fixed}
    name = Path(args.model).stem if args.model is not None and not own else "the model"
    return PlanRequest(model, _cluster(args), args.batch, (name, Path(args.cluster).stem), how)


def _cluster(args: argparse.Namespace) -> Cluster:
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
    return found if gpus is None else with_gpus(found, gpus)


def with_gpus(cluster: Cluster, gpus: int) -> Cluster:
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


def planned(asked: PlanRequest, top: int) -> list[PlanEstimate]:
    """The best plans, the shortest step first."""
    from schedir.planner import plan

    progress = ProgressLine()
    progress.show(f"planning on {asked.cluster.gpus:,} GPUs")
    try:
        with catch_warnings(action="ignore", category=UserWarning):  # which is told below the table
            return plan(asked.model, asked.cluster, asked.batch, top=top, **asked.how)
    finally:
        progress.done()


def searched(
    asked: PlanRequest, plans: list[PlanEstimate], seconds: float
) -> tuple[list[PlanEstimate], dict[PlanEstimate, Program], str]:
    """Search shorter schedules for the first plans.

    Args:
        asked: The model, the cluster and what else the command got.
        plans: The plans, the shortest step first.
        seconds: How long to search for each plan; with 0 there is no search.

    Returns:
        The plans, the programs of those that a search made shorter, and a line that says how the
        searches used numba, which is empty without a search.
    """
    from schedir.planner import improve_schedule
    from schedir.schedule_search.search_results import combined, numba_in_words

    found, programs, progress = [*plans], dict[Any, Any](), ProgressLine()
    uses = []
    for k, plan in enumerate(plans[: _SEARCHED if seconds else 0]):
        progress.show(f"searching a shorter schedule for plan {k + 1}")
        with suppress(SchedirError):  # some leave no room for what a search knows of
            new = improve_schedule(asked.model, asked.cluster, plan, seconds=seconds)
            uses.append(new.numba)
            if new.priced.step < plan.step:
                found[k] = replace(new.priced, bound=plan.bound, why=plan.why)
                programs[found[k]] = new.program
    progress.done()
    note = f"searched {numba_in_words(combined(uses))}; a plan has two searches\n" if uses else ""
    return sorted(found, key=lambda plan: plan.step), programs, note


def divided(asked: PlanRequest, plans: list[PlanEstimate]) -> list[PlanEstimate]:
    """The plans with layers divided so that a step is shorter, of the first ones, where that is."""
    from schedir.planner import optimize_layer_division, simulate_plan
    from schedir.planner.plan_estimate import plain

    found, progress = [*plans], ProgressLine()
    for k, plan in enumerate(plans[:_SEARCHED]):
        progress.show(f"dividing the layers of plan {k + 1}")
        with suppress(UsageError):  # no division holds little enough
            layers = optimize_layer_division(asked.model, asked.cluster, plain(plan))
            even, new = (
                simulate_plan(
                    asked.model, asked.cluster, replace(plain(plan), layers_per_stage=which)
                )
                for which in (plan.layers_per_stage, layers)
            )
            if new.step < even.step:
                found[k] = replace(new, bound=plan.bound, why=plan.why)
    progress.done()
    return sorted(found, key=lambda plan: plan.step)


def everything(asked: PlanRequest) -> list[PlanEstimate]:
    """All plans by their closed form, also those that do not fit; of those that a picture cannot
    tell apart, one."""
    import numpy as np

    from schedir.planner import all_plans

    how = {name: value for name, value in asked.how.items() if name not in ("exact", "offload")}
    found = all_plans(asked.model, asked.cluster, asked.batch, **how)
    where = np.rint(_CELLS * np.log([found.step, found.total]))
    first = np.unique([*where, found.plans.recompute], axis=1, return_index=True)[1]
    return [found.at(asked.model, asked.cluster, number) for number in first.tolist()]
