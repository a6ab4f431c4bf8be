"""Estimate the step time of a plan by simulating its program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.memory.footprint import find_used_tiers
from schedir.errors import UsageError
from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.per_stage_values import from_grid, to_grid
from schedir.ir.cost.zero_states import SHARDED_LABELS, UNSHARDED_LABELS
from schedir.ir.isa.instructions import (
    BACKWARD_INPUT_OPS,
    BACKWARD_OPS,
    BACKWARD_WEIGHT_OPS,
    BOUNDARY_VALUES,
    COMPUTE_OPS,
    FORM_CHANGE_OPS,
    FORWARD,
    FULL_BACKWARD_OPS,
    INSTRUCTIONS,
    OPTIMIZER_STEP_OPS,
    RECOMPUTE,
    TIERS,
    Lane,
    Opcode,
    Value,
    find_modifiers,
    find_producers,
)
from schedir.ir.program import Program
from schedir.planner.estimate.instruction_costs import compute_costs, compute_stage_times
from schedir.planner.estimate.link_time import compute_data_loading_time, compute_expected_maximum
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import (
    GpuMemory,
    HostMemory,
    ParallelPlan,
    PhaseTimes,
    PlanEstimate,
    StageTimes,
    StepBreakdown,
)
from schedir.planner.plan_compilation import build_pipeline_shape, plan_program
from schedir.planner.plan_estimate import attach_estimates
from schedir.planner.trainer_profile import Trainer, get_trainer
from schedir.planner.transformer.memory_estimate import StateBytes, compute_reclaimed_bytes
from schedir.planner.transformer.stage_sizes import compute_state_buffers
from schedir.planner.transformer.transformer_spec import TransformerSpec
from schedir.predict.bubble_causes import IdleCause, idleness
from schedir.predict.cpu_contention import CPU_LANES, simulate_on_cpus
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline


def simulate_plan(
    model: TransformerSpec,
    cluster: Cluster,
    plan: ParallelPlan,
    constants: SoftwareConstants | None = None,
    *,
    state_bytes: StateBytes | None = None,
) -> PlanEstimate:
    """Estimate the step time and the memory of a plan by simulating its program.

    The times of a stage follow from its layers and from its embedding or head. The times of
    messages, reductions, gathers of weights, copies to the host and the update follow from their
    bytes and the cluster. Copies to the host and back are instructions of the program, with a lane
    for each direction. The result contains the breakdown of the busiest rank. For a cluster of
    CPUs, `simulate_on_cpus` simulates processes that share cores, with the program and the sizes of
    `schedir train`.

    Args:
        model: The model.
        cluster: The cluster.
        plan: The plan.
        constants: Constants of the software. None means the constants of the cluster's trainer
            (`get_trainer`).
        state_bytes: The bytes of weight, gradient and optimizer state for each parameter. None
            means the bytes of Adam in the number type of the cluster.

    Raises:
        UsageError: The options of the plan are incompatible, or its schedule has stage replicas.
            See also `plan_program`.
        MemoryLimitError: With `offload="fit"`, the plan exceeds the memory even if it offloads
            everything that it can.
        SchedirError: See `plan_program`.

    Example:
        >>> from schedir import planner
        >>> gpt = planner.TransformerSpec(layers=24, hidden=2304, heads=24, vocab=51200,
        ...     sequence=2048)
        >>> node = planner.cluster_preset("a100", nodes=1)
        >>> found = planner.simulate_plan(gpt, node, planner.ParallelPlan(pp=4, tp=2,
        ...     microbatch_size=2,
        ...     microbatches=16))
        >>> found.is_simulated, found.step_time == sum(found.breakdown), found.fits
        (True, True, True)
    """
    trainer = get_trainer(cluster, constants, state_bytes)
    program = compile_plan(model, cluster, plan, trainer)
    if program.shape.stages != plan.stages:
        raise UsageError(
            f"schedule {plan.schedule} has stage replicas, but the planner supports only schedules "
            "with one rank per stage",
            fields=["schedule"],
        )
    times = compute_stage_times(model, cluster, plan, trainer.constants)
    return estimate_from_program(model, cluster, plan, program, times, trainer)


def simulated_program(
    model: TransformerSpec,
    cluster: Cluster,
    plan: ParallelPlan,
    constants: SoftwareConstants | None = None,
    *,
    state_bytes: StateBytes | None = None,
) -> Program:
    """Return the program that `simulate_plan` simulates.

    This is the program of `plan_program`. With `offload="fit"`, it offloads as many activations as
    the memory requires.

    Args:
        model: The model.
        cluster: The cluster.
        plan: The plan.
        constants: Constants of the software. None means the constants of the cluster's trainer
            (`get_trainer`).
        state_bytes: The bytes of weight, gradient and optimizer state for each parameter. None
            means the bytes of Adam in the number type of the cluster.

    Raises:
        UsageError: See `simulate_plan`.
        MemoryLimitError: See `simulate_plan`.
        SchedirError: See `plan_program`.

    Example:
        >>> import schedir
        >>> from schedir import planner
        >>> gpt, node = planner.load_model("gpt-22b"), planner.cluster_preset("a100")
        >>> one = planner.ParallelPlan(pp=8, microbatches=16, offload="fit",
        ...     optimizer_placement="host")
        >>> "offload 0.1" in schedir.to_text(planner.simulated_program(gpt, node, one),
        ...     folded=False)
        True
    """
    return compile_plan(model, cluster, plan, get_trainer(cluster, constants, state_bytes))


def compile_plan(
    model: TransformerSpec, cluster: Cluster, plan: ParallelPlan, trainer: Trainer
) -> Program:
    """Return the program of a plan, with the offloads that the memory of a GPU requires.

    The memory limit is the memory of a GPU without the overheads of the allocator and the process.

    Args:
        model: The model.
        cluster: The cluster.
        plan: The plan.
        trainer: The trainer of the cluster.

    Raises:
        UsageError: The cluster has no host to offload to, or the schedule is a program that already
            contains offload. See also `plan_program`.
        MemoryLimitError: The plan exceeds the memory even if it offloads everything that it can.
        SchedirError: See `plan_program`.
    """
    if plan.offload == "none":
        if plan.has_offload:
            require_host(cluster, plan)
        program = plan_program(plan, tied_weights=model.tied, **trainer.compile_options)
        if not plan.has_offload and len(find_used_tiers(program)) > 1:
            raise UsageError(
                f"{plan.schedule} is a program that contains offload, and the planner cannot "
                "estimate the copies of such a program",
                fields=["schedule", "offload"],
            )
        return program
    require_host(cluster, plan)
    shape, constants = build_pipeline_shape(plan), trainer.constants
    times = compute_stage_times(model, cluster, plan, constants)
    return plan_program(
        plan,
        tied_weights=model.tied,
        costs=compute_costs(model, cluster, plan, shape, times, constants, trainer.state_bytes),
        sizes=trainer.compute_sizes(model, plan, shape, constants, trainer.state_bytes),
        memory_limit=(cluster.memory - constants.reserved_bytes) / (1 + constants.allocator_share),
        host_memory_limit=cluster.host_memory,
        **trainer.compile_options,
    )


def require_host(cluster: Cluster, plan: ParallelPlan | None = None) -> None:
    """Raise an error if the planner cannot offload to the hosts of a cluster.

    Args:
        cluster: The cluster.
        plan: The plan to check too, or None.

    Raises:
        UsageError: The cluster has only CPUs, or lacks `host_bandwidth` or `host_memory`. Or the
            plan has expert parallelism, and places optimizer state on the host.
    """
    if cluster.processors is not None:
        raise UsageError(
            "offload needs GPUs: the processors of this cluster compute in host memory",
            fields=["offload", "optimizer_placement", "processors"],
        )
    examples = {"host_bandwidth": "24GB/s", "host_memory": "225GB"}
    if missing := [name for name in examples if getattr(cluster, name) is None]:
        raise UsageError(
            f"offload needs a value for {' and '.join(missing)} of the cluster, which is not set",
            hint=", ".join(f'{name} = "{examples[name]}"' for name in missing),
            fields=missing,
        )
    if plan is not None and plan.optimizer_placement == "host" and plan.ep > 1:
        raise UsageError(
            "the planner does not support optimizer_placement 'host' with expert parallelism, "
            f"and ep is {plan.ep}",
            fields=["optimizer_placement", "ep"],
        )


def estimate_from_program(
    model: TransformerSpec,
    cluster: Cluster,
    plan: ParallelPlan,
    program: Program,
    stage_times: list[StageTimes],
    trainer: Trainer,
) -> PlanEstimate:
    """Estimate a plan from its program and the times of its stages.

    Args:
        model: The model.
        cluster: The cluster.
        plan: The plan.
        program: The program of the plan.
        stage_times: The times of one microbatch in each stage.
        trainer: The trainer of the cluster.
    """
    constants, states = trainer.constants, trainer.state_bytes
    costs = compute_costs(model, cluster, plan, program.shape, stage_times, constants, states)
    sizes = trainer.compute_sizes(model, plan, program.shape, constants, states)
    timeline = replace(simulate_on_cluster(cluster, plan, program, costs), sizes=sizes)
    breakdown = break_down_step(timeline, stage_times, recompute_ahead=constants.recompute_ahead)
    loading = compute_data_loading_time(cluster, plan.microbatches * plan.microbatch_size)
    breakdown = breakdown._replace(data_loading=loading)
    waits = cluster.jitter * compute_expected_maximum(plan.dp * plan.cp) * sum(breakdown)
    breakdown = breakdown._replace(data_parallel=breakdown.data_parallel + waits)
    reclaimed = compute_reclaimed_bytes(model, cluster, plan, constants, timeline.peak_memory)
    state_buffers = (
        compute_state_buffers(model, plan, program.shape, constants, states)
        if cluster.processors is None
        else {}
    )
    memory = _measure_gpu_memory(timeline, constants, reclaimed, state_buffers)
    return attach_estimates(
        model,
        cluster,
        plan,
        breakdown,
        memory,
        is_simulated=True,
        host_memory=measure_host_memory(timeline),
    )


def simulate_on_cluster(
    cluster: Cluster, plan: ParallelPlan, program: Program, costs: Costs
) -> Timeline:
    """Return the predicted timeline of a program.

    `simulate` predicts the timeline of GPUs. `simulate_on_cpus` predicts the timeline of CPUs, with
    the cores that one replica has.

    Args:
        cluster: The cluster.
        plan: The plan of the program.
        program: The program.
        costs: The costs of the instructions of the program.
    """
    if cluster.processors is None:
        return simulate(program, costs, progress_model="per_edge")
    shape = program.shape
    solo_costs = {
        name: from_grid(to_grid(getattr(costs, name) or 0.0) / cluster.solo_speedup)
        for name in {row.cost for row in INSTRUCTIONS if row.cost and row.lane in CPU_LANES}
    }
    # The number of cores of one replica. All processes of the plan share the cores evenly, and the
    # program has one process per rank.
    processors = cluster.processors * cluster.nodes * shape.ranks / plan.gpus
    return simulate_on_cpus(program, replace(costs, **solo_costs), processors)


# ---------------------------------------------------------------- parts of a timeline


def break_down_step(
    run: Timeline, stage_times: list[StageTimes], *, recompute_ahead: float = 0.0
) -> StepBreakdown:
    """Divide the time from the first start to the last end of a step into parts.

    All parts are times of the busiest rank. The function uses `stage_times` to split the time of
    each compute instruction of this rank into model compute, recomputation and collectives.
    `idleness` returns the causes of the idle time of this rank.

    Args:
        run: The timeline of the step.
        stage_times: The times of one microbatch in each stage.
        recompute_ahead: The share of recomputation that is a separate instruction R. The rest of
            the recomputation is part of the backward.
    """
    rank = int(run.busy.argmax())
    rank_slice = slice(*run.program.offsets[rank : rank + 2].tolist())
    spans, is_second = run.spans[rank_slice], run.is_second_of_pair[rank_slice]
    op, duration = spans["op"], spans["end"] - spans["start"]
    is_compute = np.isin(op, COMPUTE_OPS)
    parts = _split_compute_time(stage_times, recompute_ahead)[
        :, op[is_compute], spans["stage"][is_compute]
    ]
    # The two instructions of a joined pair have one span.
    pair = np.cumsum(~is_second[is_compute]) - 1
    sequential_times = np.bincount(pair, parts.sum(0))
    collectives = np.bincount(pair, parts[2])
    pair_times = duration[is_compute][~is_second[is_compute]]
    # A joined pair is faster than its two instructions in sequence, because the compute of each
    # instruction hides all-to-alls of the other.
    hidden = np.clip(sequential_times - pair_times, 0, collectives)
    exposed_share = np.divide(
        collectives - hidden, collectives, where=collectives > 0, out=np.zeros_like(hidden)
    )
    parts[2] *= exposed_share[pair]
    exposed_times = sequential_times - hidden
    scale = np.divide(
        pair_times, exposed_times, out=np.zeros_like(pair_times), where=exposed_times > 0
    )[pair]
    compute, recompute, tensor = (parts * scale).sum(1).tolist()
    waits = idleness(run)
    waits = waits[waits["rank"] == rank]
    idle, cause = waits["end"] - waits["start"], waits["cause"]
    is_norm = (waits["awaited_span"] >= 0) & np.isin(
        run.spans["op"][waits["awaited_span"]], find_producers(Value.NORM)
    )
    is_data_parallel = np.isin(cause, (IdleCause.REDUCTION, IdleCause.WEIGHTS)) & ~is_norm
    is_message, is_host_copy = cause == IdleCause.MESSAGE, cause == IdleCause.OFFLOAD
    return StepBreakdown(
        compute=compute,
        recompute=recompute,
        layer_collectives=tensor,
        transfers=float(duration[np.isin(op, _FORM_CHANGE_OPS)].sum() + idle[is_message].sum()),
        bubble=float(idle[~(is_data_parallel | is_message | is_norm | is_host_copy)].sum()),
        data_parallel=float(idle[is_data_parallel].sum()),
        optimizer=float(duration[np.isin(op, _UPDATE_OPS)].sum() + idle[is_norm].sum()),
        host_copies=float(idle[is_host_copy].sum()),
    )


def _split_compute_time(
    stage_times: list[StageTimes], recompute_ahead: float
) -> NDArray[np.float64]:
    """Return the seconds of the parts of each compute instruction.

    The shape is (3, opcodes, stages). The parts are compute, recomputation and collectives.
    """
    # `compute` and `tensor` have the shape (phases, stages).
    compute, tensor, _ = (np.array(column).T for column in zip(*stage_times, strict=True))
    result = np.zeros((3, len(Opcode), len(stage_times)))
    recompute_phase = len(PhaseTimes._fields) - 1
    for op, phases in _PHASES_OF_OP.items():
        part = (1 - recompute_ahead) * (op in BACKWARD_OPS) + recompute_ahead * (op == RECOMPUTE)
        result[0, op] = compute[phases].sum(0)
        result[1, op] = part * compute[recompute_phase]
        result[2, op] = tensor[phases].sum(0) + part * tensor[recompute_phase]
    return result


_UPDATE_OPS: Final = (
    *OPTIMIZER_STEP_OPS,
    *(op for op in find_modifiers(Value.STATE) if INSTRUCTIONS[op].lane is Lane.COMPUTE),
)
_FORM_CHANGE_OPS: Final = tuple(
    op for op in FORM_CHANGE_OPS if INSTRUCTIONS[op].lane is Lane.COMPUTE
)
_PHASES_OF_OP: Final[dict[Opcode, list[int]]] = {  # Indices of the fields of `PhaseTimes`.
    FORWARD: [0],
    **{op: [1, 2] for op in FULL_BACKWARD_OPS},
    **{op: [1] for op in BACKWARD_INPUT_OPS},
    **{op: [2] for op in BACKWARD_WEIGHT_OPS},
    RECOMPUTE: [],
}


def _measure_gpu_memory(
    run: Timeline,
    constants: SoftwareConstants,
    reclaimed: NDArray[np.float64],
    state_buffers: Mapping[str, NDArray[np.float64]],
) -> GpuMemory:
    """Return the peak memory of the rank with the highest peak, in bytes.

    Each field has the memory of its kind at the time of the peak. The result includes the overheads
    of the allocator and the process. `reclaimed` has the bytes of activations that the allocator
    reclaims on each rank. `state_buffers` has the result of `compute_state_buffers`.
    """
    rank = int((run.peak_memory - reclaimed).argmax())
    curve = run.memory[rank]
    peak_index = int(curve.total.argmax())
    result = dict.fromkeys(GpuMemory._fields, 0.0)
    for kind, size in curve.by_kind.items():
        result[_MEMORY_KINDS.get(kind, "activations")] += float(size[peak_index])
    for name, sizes in state_buffers.items():
        size_on_rank = float(sizes[list(run.program.shape.stages_on_rank[rank])].sum())
        result[name] += size_on_rank
        result["activations"] -= size_on_rank
    result["activations"] -= float(reclaimed[rank])
    result["allocator"] = constants.allocator_share * sum(result.values())
    result["process"] = constants.reserved_bytes
    return GpuMemory(**result)


def measure_host_memory(run: Timeline) -> HostMemory:
    """Return the peak host memory of the rank with the highest peak, in bytes.

    Each field has the memory of its kind at the time of the peak.

    Args:
        run: The timeline, with sizes.
    """
    curves = run.memory_on(TIERS[1]) if len(find_used_tiers(run.program)) > 1 else ()
    peak, kinds = 0.0, dict[str, float]()
    for curve in curves:
        peak_index = int(curve.total.argmax())
        if curve.total[peak_index] > peak:
            peak = float(curve.total[peak_index])
            kinds = {k: float(v[peak_index]) for k, v in curve.by_kind.items()}
    states = sum(size for kind, size in kinds.items() if _MEMORY_KINDS.get(kind) == "optimizer")
    return HostMemory(states, peak - states)


_MEMORY_KINDS: Final = {
    "params": "weights",
    SHARDED_LABELS["params"]: "weights",
    UNSHARDED_LABELS["params"]: "weights",
    "grads": "gradients",
    SHARDED_LABELS["grads"]: "gradients",
    UNSHARDED_LABELS["grads"]: "gradients",
    "optimizer": "optimizer",
    SHARDED_LABELS["optimizer"]: "optimizer",
    Value.STATE.name.lower(): "optimizer",
    **{value.name.lower(): "buffers" for value in BOUNDARY_VALUES},
}
