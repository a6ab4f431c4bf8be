"""Search for a shorter schedule for one plan, within its memory."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from schedir.analysis.numba_jit import NumbaStatus
from schedir.compiler.relower import extract_compute
from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.sizes import Sizes
from schedir.ir.cost.zero_states import SHARDED_FROM_LEVEL
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.planner.config_export import lower_draft, plan_program
from schedir.planner.estimate.instruction_costs import compute_costs, compute_stage_times
from schedir.planner.estimate.offload_plans import require_no_offload
from schedir.planner.estimate.simulated_estimate import estimate_from_program, simulate_plan
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import ParallelPlan, PlanEstimate
from schedir.planner.plan_estimate import strip_estimates
from schedir.planner.trainer_profile import get_trainer
from schedir.planner.transformer.memory_estimate import StateBytes
from schedir.planner.transformer.stage_bytes import compute_sizes
from schedir.planner.transformer.transformer_spec import TransformerSpec
from schedir.schedule_search.search import search_schedule
from schedir.schedule_search.search_results import combine_numba


class ImprovedPlan(NamedTuple):
    """A choice with a schedule of its own, and its program.

    `lower_bound` is what no schedule of the choice takes less than, in seconds, its sums over
    replicas left out: the lesser of schedules whose backwards are whole and of those with W apart,
    whose collectives hide less.  What runs again does so just before its backward.  `numba` is that
    of
    `schedir.schedule_search.search_results.SearchResult`, for both searches.
    """

    estimate: PlanEstimate
    program: Program
    lower_bound: float
    numba: NumbaStatus


def improve_schedule(
    model: TransformerSpec,
    cluster: Cluster,
    plan: ParallelPlan,
    constants: SoftwareConstants | None = None,
    *,
    state_bytes: StateBytes | None = None,
    time_limit: float = 10.0,
    max_evaluations: int | None = None,
    seed: int = 0,
) -> ImprovedPlan:
    """Search for a shorter schedule of a choice, in the memory that its states leave on each rank.

    `schedir.search_schedule` looks for it, at the times of this choice's stages and messages, half
    of the `time_limit` among schedules with whole backwards, and half among those with W apart.
    What is found is priced as `simulate_plan` prices the choice, of which it has all but the
    schedule, whose name then is "search"; where nothing shorter is found it is the choice as it is.

    To train it, write `schedir.to_text(program)` into a FILE.sched, which is the schedule of
    `config(model, replace(choice, schedule="FILE.sched"))`.

    Raises what `simulate_plan` and `schedir.search_schedule` do.

    >>> from schedir import planner
    >>> gpt = planner.TransformerSpec(layers=24, hidden=2304, heads=24, vocab=51200, sequence=2048)
    >>> node = planner.cluster_preset("a100", nodes=1)
    >>> one = planner.ParallelPlan(pp=4, tp=2, microbatch_size=2, microbatches=8)
    >>> found = planner.improve_schedule(gpt, node, one, time_limit=60, max_evaluations=50)
    >>> found.estimate.step_time <= planner.simulate_plan(gpt, node,
    ...     one).step_time, found.lower_bound <= found.estimate.step_time
    (True, True)
    """
    require_no_offload(plan, "a search")
    of = get_trainer(cluster, constants, state_bytes)
    plan = strip_estimates(plan)
    best = simulate_plan(model, cluster, plan, constants, state_bytes=state_bytes)
    kept, bound = plan_program(plan, tied_weights=model.tied, **of.compile_options), best.step_time
    within = of._replace(constants=replace(of.constants, recompute_ahead=0.0))
    again = within.constants
    room = (cluster.memory - again.reserved_bytes) / (1 + again.allocator_share)
    size = _merge_model_states(
        compute_sizes(model, plan, kept.shape, again, of.state_bytes), plan, kept.shape
    )
    uses = set[NumbaStatus]()
    for split in (False, True):
        kind = replace(plan, schedule="zb_h1" if split else "one_f_one_b")
        times = compute_stage_times(model, cluster, kind, again)
        costs = compute_costs(model, cluster, kind, kept.shape, times, again, of.state_bytes)
        found = search_schedule(
            kept.shape, costs, size, room, split_backward=split, seconds=time_limit / 2,
            evaluations=max_evaluations, seed=seed,
        )  # fmt: skip
        bound = min(bound, found.bound)
        uses.add(found.numba)
        own = lower_draft(
            extract_compute(found.program), plan, tied_weights=model.tied, **of.compile_options
        )
        told = estimate_from_program(model, cluster, kind, own, times, within)
        if told.fits and (told.step_time < best.step_time or not best.fits):
            best, kept = replace(told, schedule="search"), own
    return ImprovedPlan(best, kept, bound, combine_numba(uses))


def _merge_model_states(size: Sizes, plan: ParallelPlan, shape: PipelineShape) -> Sizes:
    """The sizes with the states of each stage as one sum: the optimizer's in parts, and of weights
    and gradients in parts whole ones, of which there may be as many at once."""
    replicas = plan.dp * plan.cp
    rest = {
        name: size.for_stages(name, shape.stages)
        for name in ("params", "grads", "optimizer", "buffers")
    }
    if plan.zero >= SHARDED_FROM_LEVEL["optimizer"]:
        rest["optimizer"] = rest["optimizer"] / replicas
    whole = tuple(np.sum([*rest.values()], axis=0).tolist())
    return replace(size, params=0.0, grads=0.0, optimizer=0.0, buffers=0.0, model_states=whole)
