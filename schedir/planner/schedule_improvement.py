"""Search for a shorter schedule of one plan that fits in the memory of its GPUs."""

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
from schedir.planner.estimate.instruction_costs import compute_costs, compute_stage_times
from schedir.planner.estimate.offload_plans import require_no_offload
from schedir.planner.estimate.simulated_estimate import estimate_from_program, simulate_plan
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import SEARCHED_SCHEDULE, ParallelPlan, PlanEstimate
from schedir.planner.plan_compilation import lower_draft, plan_program
from schedir.planner.plan_estimate import strip_estimates
from schedir.planner.trainer_profile import get_trainer
from schedir.planner.transformer.memory_estimate import StateBytes
from schedir.planner.transformer.stage_sizes import compute_sizes
from schedir.planner.transformer.transformer_spec import TransformerSpec
from schedir.schedule_search.search import search_schedule
from schedir.schedule_search.search_arguments import DEFAULT_TIME_LIMIT
from schedir.schedule_search.search_results import combine_numba


class ImprovedPlan(NamedTuple):
    """A plan with the schedule that a search found.

    Attributes:
        estimate: The plan and its estimates. Its schedule is "search" if the search found a better
            schedule.
        program: The program of the plan.
        lower_bound: A lower bound of the step time of all schedules of the plan, in seconds,
            without reductions over replicas. A bound for full backwards does not apply to split
            backwards, because fewer collectives overlap with compute in a split backward. So the
            search computes a bound for each of the two, and `lower_bound` is the smaller one. The
            bound assumes that recomputation runs directly before its backward.
        numba: The Numba status of the searches. See
            `schedir.schedule_search.search_results.SearchResult`.
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
    time_limit: float = DEFAULT_TIME_LIMIT,
    max_evaluations: int | None = None,
    seed: int = 0,
) -> ImprovedPlan:
    """Search for a shorter schedule of a plan, within the memory that model states leave free.

    `schedir.search_schedule` searches with the times of the plan's stages and messages. The search
    uses half of `time_limit` for schedules with full backwards, and half for split backwards. The
    result is estimated as in `simulate_plan`. If the search finds no shorter schedule that fits,
    the plan is returned unchanged. If the plan itself does not fit, the result can be a longer
    schedule that fits.

    To train the result, write `schedir.to_text(program)` to a FILE.sched. Then call
    `train_config(model, replace(plan, schedule="FILE.sched"))`.

    Args:
        model: The model.
        cluster: The cluster.
        plan: The plan. It must not offload.
        constants: Constants of the software. None means the constants of the cluster's trainer
            (`get_trainer`).
        state_bytes: The bytes of weight, gradient and optimizer state for each parameter. None
            means the bytes of Adam in the number type of the cluster.
        time_limit: The time limit of both searches together, in seconds.
        max_evaluations: The largest number of rank orders that each search evaluates, or None. If
            this limit ends the search before `time_limit`, the result depends only on `seed`.
        seed: The seed of the random numbers.

    Raises:
        UsageError: The plan offloads. See also `simulate_plan` and `schedir.search_schedule`.
        SchedirError: See `simulate_plan` and `schedir.search_schedule`.

    Example:
        >>> from schedir import planner
        >>> gpt = planner.TransformerSpec(layers=24, hidden=2304, heads=24, vocab=51200,
        ...     sequence=2048)
        >>> node = planner.cluster_preset("a100", nodes=1)
        >>> one = planner.ParallelPlan(pp=4, tp=2, microbatch_size=2, microbatches=8)
        >>> found = planner.improve_schedule(gpt, node, one, time_limit=60, max_evaluations=50)
        >>> found.estimate.step_time <= planner.simulate_plan(gpt, node,
        ...     one).step_time, found.lower_bound <= found.estimate.step_time
        (True, True)
    """
    require_no_offload(plan, "improve_schedule")
    trainer = get_trainer(cluster, constants, state_bytes)
    plan = strip_estimates(plan)
    best = simulate_plan(model, cluster, plan, constants, state_bytes=state_bytes)
    program = plan_program(plan, tied_weights=model.tied, **trainer.compile_options)
    lower_bound = best.step_time
    search_trainer = trainer._replace(constants=replace(trainer.constants, recompute_ahead=0.0))
    search_constants = search_trainer.constants
    memory_limit = (cluster.memory - search_constants.reserved_bytes) / (
        1 + search_constants.allocator_share
    )
    sizes = _merge_model_states(
        compute_sizes(model, plan, program.shape, search_constants, trainer.state_bytes),
        plan,
        program.shape,
    )
    numba_statuses = set[NumbaStatus]()
    for split in (False, True):
        kind = replace(plan, schedule="zb_h1" if split else "one_f_one_b")
        times = compute_stage_times(model, cluster, kind, search_constants)
        costs = compute_costs(
            model, cluster, kind, program.shape, times, search_constants, trainer.state_bytes
        )
        result = search_schedule(
            program.shape, costs, sizes, memory_limit, split_backward=split,
            time_limit=time_limit / 2,
            max_evaluations=max_evaluations, seed=seed,
        )  # fmt: skip
        lower_bound = min(lower_bound, result.bound)
        numba_statuses.add(result.numba)
        lowered = lower_draft(
            extract_compute(result.program),
            plan,
            tied_weights=model.tied,
            **trainer.compile_options,
        )
        estimate = estimate_from_program(model, cluster, kind, lowered, times, search_trainer)
        if estimate.fits and (estimate.step_time < best.step_time or not best.fits):
            best, program = replace(estimate, schedule=SEARCHED_SCHEDULE), lowered
    return ImprovedPlan(best, program, lower_bound, combine_numba(numba_statuses))


def _merge_model_states(size: Sizes, plan: ParallelPlan, shape: PipelineShape) -> Sizes:
    """Return the sizes with the sum of all states of a stage as the one size `model_states`.

    A search treats this sum as memory that the stage always uses. With ZeRO the optimizer state is
    sharded. The sum contains the unsharded weights and gradients, because all stages may be
    unsharded at the same time.
    """
    replicas = plan.dp * plan.cp
    states = {
        name: size.for_stages(name, shape.stages)
        for name in ("params", "grads", "optimizer", "buffers")
    }
    if plan.zero >= SHARDED_FROM_LEVEL["optimizer"]:
        states["optimizer"] = states["optimizer"] / replicas
    model_states = tuple(np.sum([*states.values()], axis=0).tolist())
    return replace(
        size, params=0.0, grads=0.0, optimizer=0.0, buffers=0.0, model_states=model_states
    )
