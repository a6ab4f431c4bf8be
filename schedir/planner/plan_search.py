"""Find the fastest plans of a model on a cluster, and the bottleneck of each plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, get_args

import numpy as np

from schedir.call_errors import explain_wrong_calls
from schedir.errors import UsageError, describe, require_bool, require_type
from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.units import find_forgotten_unit
from schedir.planner.bottleneck import attach_bottleneck, attach_relative_bottleneck, no_fit_error
from schedir.planner.estimate.offload_plans import (
    attach_offload_comparison,
    mask_state_offload_plans,
    simulate_offload_plans,
)
from schedir.planner.estimate.schedule_formulas import (
    DEFAULT_SCHEDULES,
    SCHEDULE_FORMULAS,
    get_formulas,
)
from schedir.planner.estimate.simulated_estimate import require_host
from schedir.planner.estimate.simulated_estimate import simulate_plan as simulated
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import Attention, ParallelPlan, PlanEstimate, RankOrder
from schedir.planner.plan_columns import PlanColumns, simulation_only_error
from schedir.planner.plan_enumeration import build_field_filter, enumerate_plans, warn_cross_node_tp
from schedir.planner.plan_estimate import strip_estimates
from schedir.planner.plan_table import PlanTable, estimate_closed_form
from schedir.planner.transformer.layer_division import DivisionRule, get_layers_per_stage
from schedir.planner.transformer.layer_ops import require_even_division
from schedir.planner.transformer.memory_estimate import StateBytes, get_state_bytes
from schedir.planner.transformer.transformer_spec import TransformerSpec
from schedir.predict.layer_activation_bytes import Recompute

# `plan` simulates this many of the best plans, and then more until `top` of them fit.
MAX_SIMULATED_PLANS: Final = 32

IntFilter = int | tuple[int, ...] | None


def estimate_step(
    model: TransformerSpec,
    cluster: Cluster,
    plan: ParallelPlan,
    *,
    closed_form_only: bool = False,
    constants: SoftwareConstants | None = None,
    state_bytes: StateBytes | None = None,
) -> PlanEstimate:
    """Estimate the step time and the memory of one plan, even if it does not fit into memory.

    Args:
        model: The model.
        cluster: The cluster. The plan must use all GPUs of the cluster.
        plan: The plan.
        closed_form_only: If True, use the closed form, which is faster. If False, simulate the
            program of the plan.
        constants: Constants of the software. None means `SoftwareConstants()`.
        state_bytes: The bytes of weight, gradient and optimizer state for each parameter. None
            means the bytes of Adam in the number type of the cluster.

    Returns:
        The plan with its estimates. `fits` is False if the plan does not fit in memory.

    Raises:
        UsageError: The plan is impossible for this model on this cluster. Or
            `closed_form_only` is True, and the plan offloads.

    Warns:
        `plan.tp` is more than the GPUs of a node.

    Example:
        >>> from schedir import planner
        >>> gpt3 = planner.TransformerSpec(layers=96, hidden=12288, heads=96, vocab=51200,
        ...     sequence=2048)
        >>> cluster = planner.cluster_preset("a100", nodes=128)
        >>> one = planner.ParallelPlan(pp=8, tp=8, dp=16, microbatches=96, recompute="full")
        >>> found = planner.estimate_step(gpt3, cluster, one, closed_form_only=True)
        >>> found.fits, found.step_time == sum(found.breakdown), 0.3 < found.mfu < 0.6
        (True, True, True)
    """
    _require_types(model, cluster)
    _require_valid_plan(model, cluster, plan)
    if plan.tp > cluster.gpus_per_node:
        warn_cross_node_tp(plan.tp, cluster, stacklevel=2)
    _require_state_bytes(state_bytes)
    constants = constants or SoftwareConstants()
    state_bytes = state_bytes or get_state_bytes(cluster)
    if not closed_form_only:
        return attach_bottleneck(
            cluster, simulated(model, cluster, plan, constants, state_bytes=state_bytes)
        )
    plan_table = estimate_closed_form(
        model, cluster, PlanColumns.from_plan(plan), constants, state_bytes
    )
    return attach_bottleneck(cluster, plan_table.estimate_at(model, cluster, 0))


@explain_wrong_calls("plan(model, cluster, batch=1536)")
def plan(
    model: TransformerSpec,
    cluster: Cluster,
    batch: int,
    *,
    top: int = 20,
    schedules: str | tuple[str, ...] = DEFAULT_SCHEDULES,
    closed_form_only: bool = False,
    pp: IntFilter = None,
    tp: IntFilter = None,
    dp: IntFilter = None,
    stages_per_rank: IntFilter = None,
    microbatch_size: IntFilter = None,
    cp: IntFilter = 1,
    ep: IntFilter = 1,
    recompute: str | tuple[str, ...] | None = None,
    zero: IntFilter = None,
    sequence_parallel: bool | None = None,
    attention: Attention = "softmax",
    rank_order: RankOrder = "tp-pp-dp",
    offload: bool = False,
    division: DivisionRule = "even",
    constants: SoftwareConstants | None = None,
    state_bytes: StateBytes | None = None,
) -> list[PlanEstimate]:
    """Return the fastest plans that fit in the memory of the cluster.

    The closed form estimates all plans. Unless `closed_form_only` is True, the programs of the best
    plans are then simulated. Arguments from `pp` to `sequence_parallel` restrict a field of the
    plan to one value or a tuple of values. None means all useful values.

    Args:
        model: The model.
        cluster: The cluster. All its GPUs are used.
        batch: The number of sequences of a step, over all replicas.
        top: The largest number of plans to return.
        schedules: Names of built-in schedules.
        closed_form_only: If True, return the results of the closed form. If False, simulate the
            best plans.
        pp: Allowed values of `ParallelPlan.pp`.
        tp: Allowed values of `ParallelPlan.tp`. None means only sizes within a node.
        dp: Allowed values of `ParallelPlan.dp`.
        stages_per_rank: Allowed values of `ParallelPlan.stages_per_rank`.
        microbatch_size: Allowed values of `ParallelPlan.microbatch_size`.
        cp: Allowed values of `ParallelPlan.cp`.
        ep: Allowed values of `ParallelPlan.ep`.
        recompute: Allowed values of `ParallelPlan.recompute`.
        zero: Allowed values of `ParallelPlan.zero`.
        sequence_parallel: The value of `ParallelPlan.sequence_parallel`. None means both values.
        attention: The attention of all plans.
        rank_order: The rank order of all plans. See `ParallelPlan.rank_order`.
        offload: If True, also consider plans that fit only if they offload saved activations, the
            optimizer state, or both. Only the plans with the shortest estimated steps are
            simulated. `PlanEstimate.offload_comparison` compares these plans with plans without
            offload.
        division: The rule that divides the layers among stages: "even", or "compute", which counts
            the head too.
        constants: Constants of the software. None means `SoftwareConstants()`.
        state_bytes: The bytes of weight, gradient and optimizer state for each parameter. None
            means the bytes of Adam in the number type of the cluster.

    Returns:
        At most `top` plans that fit, the fastest first, with their bottlenecks.

    Raises:
        UsageError: No plan exists, or no plan fits. Or `offload` is True, and the cluster has no
            `host_bandwidth` or no `host_memory`. Or both `offload` and `closed_form_only` are True.

    Example:
        >>> from schedir import planner
        >>> gpt3 = planner.TransformerSpec(layers=96, hidden=12288, heads=96, vocab=51200,
        ...     sequence=2048)
        >>> cluster = planner.cluster_preset("a100", nodes=128)
        >>> best, *_ = planner.plan(gpt3, cluster, 1536, tp=8, closed_form_only=True)
        >>> best.gpus, best.batch, best.fits
        (1024, 1536, True)
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise UsageError(f"top must be an integer, 1 or more, not {describe(top)}", fields=["top"])
    _require_types(model, cluster)
    if require_bool(offload, "offload"):
        require_host(cluster)
        if closed_form_only:
            raise simulation_only_error()
    _require_state_bytes(state_bytes)
    constants = constants or SoftwareConstants()
    state_bytes = state_bytes or get_state_bytes(cluster)
    plan_table = all_plans(
        model, cluster, batch, constants=constants, state_bytes=state_bytes, schedules=schedules,
        pp=pp, tp=tp, dp=dp, stages_per_rank=stages_per_rank, microbatch_size=microbatch_size,
        cp=cp, ep=ep, recompute=recompute, zero=zero, sequence_parallel=sequence_parallel,
        attention=attention, rank_order=rank_order, offload=offload, division=division,
    )  # fmt: skip
    is_usual = (
        ~mask_state_offload_plans(plan_table) if offload else np.ones(len(plan_table.plans), bool)
    )
    fits = is_usual & (plan_table.total_memory <= cluster.memory)
    if not fits.any() and not offload:
        raise no_fit_error(model, cluster, plan_table)
    ranked = np.lexsort((plan_table.total_memory, plan_table.step_times))
    ranked = ranked[fits[ranked]]
    if closed_form_only:
        estimates = [
            (plan_table.estimate_at(model, cluster, row), row) for row in ranked[:top].tolist()
        ]
        return _attach_bottlenecks(model, cluster, estimates, plan_table)

    def simulate(row: int) -> PlanEstimate:
        estimate = strip_estimates(plan_table.estimate_at(model, cluster, row))
        return simulated(model, cluster, estimate, constants, state_bytes=state_bytes)

    simulated_plans = _simulate_best(ranked.tolist(), simulate, top)
    simulated_table = plan_table.with_simulations(simulated_plans)
    other_plans = simulated_table.select(is_usual)
    row_among_usual = np.cumsum(is_usual) - 1
    fitting_plans = sorted(
        (
            (estimate, int(row_among_usual[row]))
            for estimate, row in simulated_plans
            if estimate.fits
        ),
        key=lambda x: _sort_key(x[0]),
    )
    best = _attach_bottlenecks(model, cluster, fitting_plans[:top], other_plans)
    if offload:
        steps = [estimate.step_time for estimate in best]
        best += simulate_offload_plans(
            model, cluster, simulated_table, max(top, MAX_SIMULATED_PLANS), constants, state_bytes,
            steps,
        )  # fmt: skip
        smallest = other_plans.estimate_at(model, cluster, int(other_plans.total_memory.argmin()))
        best = attach_offload_comparison(sorted(best, key=_sort_key), smallest)
    if not best:
        raise no_fit_error(model, cluster, other_plans, offload=offload)
    return best[:top]


def _simulate_best(
    rows: list[int], simulate: Callable[[int], PlanEstimate], top: int
) -> list[tuple[PlanEstimate, int]]:
    """Return simulated plans with their columns of the plan table, in the order of `rows`.

    A plan may need more memory in the simulation than in the closed form, and then not fit. So the
    function simulates `MAX_SIMULATED_PLANS` plans, and then more until `top` of them fit.
    """
    simulated_plans: list[tuple[PlanEstimate, int]] = []
    for row in rows:
        if (
            len(simulated_plans) >= MAX_SIMULATED_PLANS
            and sum(estimate.fits for estimate, _ in simulated_plans) >= top
        ):
            break
        simulated_plans.append((simulate(row), row))
    return simulated_plans


def _attach_bottlenecks(
    model: TransformerSpec,
    cluster: Cluster,
    estimates: list[tuple[PlanEstimate, int]],
    plan_table: PlanTable,
) -> list[PlanEstimate]:
    """Return estimates with their bottlenecks. Each estimate comes with its column of the table."""
    return [
        attach_relative_bottleneck(model, cluster, estimate, row, plan_table)
        for estimate, row in estimates
    ]


def _sort_key(estimate: PlanEstimate) -> tuple[float, bool, int, int]:
    """Return the key that sorts plans by step time.

    If step times are equal in six digits, a plan without offload comes first. Then the plan with
    the simpler schedule comes first, and then the plan with less recomputation. A prediction does
    not include the cost of issuing more instructions.
    """
    schedule_index = [*SCHEDULE_FORMULAS].index(estimate.schedule)
    recompute_index = get_args(Recompute).index(estimate.recompute)
    return float(f"{estimate.step_time:.6g}"), estimate.has_offload, schedule_index, recompute_index


def all_plans(
    model: TransformerSpec,
    cluster: Cluster,
    batch: int,
    *,
    constants: SoftwareConstants | None = None,
    state_bytes: StateBytes | None = None,
    **filters: Any,
) -> PlanTable:
    """Estimate all plans that `plan` chooses from, including plans that do not fit into memory.

    Args:
        model: The model.
        cluster: The cluster. All its GPUs are used.
        batch: The number of sequences of a step, over all replicas.
        constants: Constants of the software. None means `SoftwareConstants()`.
        state_bytes: The bytes of weight, gradient and optimizer state for each parameter. None
            means the bytes of Adam in the number type of the cluster.
        **filters: The arguments of `plan` from `schedules` to `division`, without
            `closed_form_only`.

    Returns:
        A table of the plans in no particular order, with estimates of the closed form.

    Raises:
        UsageError: No plan exists.

    Example:
        >>> from schedir import planner
        >>> gpt = planner.TransformerSpec(layers=24, hidden=2304, heads=24, vocab=51200,
        ...     sequence=2048)
        >>> found = planner.all_plans(gpt, planner.cluster_preset("a100", nodes=4), 512, tp=(1, 2))
        >>> len(found.plans) == len(found.step_times) == len(found.total_memory) > 1000
        True
    """
    _require_types(model, cluster)
    plans = enumerate_plans(model, cluster, batch, build_field_filter(**filters))
    state_bytes = state_bytes or get_state_bytes(cluster)
    return estimate_closed_form(
        model, cluster, plans, constants or SoftwareConstants(), state_bytes
    )


def _require_types(model: TransformerSpec, cluster: Cluster) -> None:
    require_type(model, "model", TransformerSpec, 'planner.load_model("gpt-22b")')
    model.require_supported()
    require_type(cluster, "cluster", Cluster, 'planner.cluster_preset("a100", nodes=8)')
    for name in ("flops", "hbm_bandwidth", "nvlink_bandwidth", "network_bandwidth", "latency"):
        base, unit = find_forgotten_unit(name, number := getattr(cluster, name))
        if unit:
            fact = f"cluster: {name} = {number:g} is a number of {base}"
            raise UsageError(fact, hint=f'{name}="{number:g}{unit}"', fields=["cluster"])


def _require_state_bytes(state_bytes: StateBytes | None) -> None:
    if state_bytes is not None:
        require_type(
            state_bytes, "state_bytes", StateBytes, "StateBytes(params=2, grads=4, optimizer=12)"
        )


def _require_valid_plan(model: TransformerSpec, cluster: Cluster, plan: ParallelPlan) -> None:
    formulas = get_formulas(plan.schedule)
    bounds = {"one": (1,), "two": (2,), "many": (1, model.layers)}[formulas.stages_per_rank]
    if not bounds[0] <= plan.stages_per_rank <= bounds[-1]:
        raise UsageError(
            f"schedule {plan.schedule} needs stages_per_rank {' to '.join(map(str, bounds))}, not "
            f"{plan.stages_per_rank}",
            fields=["stages_per_rank", "schedule"],
        )
    if plan.gpus != cluster.gpu_count:
        raise UsageError(
            f"pp {plan.pp} x tp {plan.tp} x dp {plan.dp} x cp {plan.cp} = {plan.gpus} GPUs, but "
            f"the cluster has {cluster.gpu_count} GPUs (nodes x GPUs of a node: {cluster.nodes} x "
            f"{cluster.gpus_per_node})",
            fields=["pp", "tp", "dp", "cp"],
        )
    min_microbatches = int(formulas.min_microbatches(plan.pp))
    if plan.microbatches < min_microbatches or (
        formulas.needs_multiple_of_ranks
        and plan.stages_per_rank > 1
        and plan.microbatches % plan.pp
    ):
        requirement = (
            f"a number of microbatches that is a multiple of pp {plan.pp}"
            if formulas.needs_multiple_of_ranks
            else f"at least {min_microbatches} microbatches"
        )
        raise UsageError(
            f"schedule {plan.schedule} needs {requirement}, not {plan.microbatches}",
            fields=["microbatches", "schedule"],
        )
    get_layers_per_stage(model, plan)
    require_even_division(model, plan)
