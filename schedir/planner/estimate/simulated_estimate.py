"""Estimate the step time of a plan by simulating its program."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.memory.footprint import tiers_of
from schedir.errors import UsageError
from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.per_stage_values import from_grid, grid
from schedir.ir.cost.zero_states import IN_PARTS, WHOLE
from schedir.ir.isa.instructions import (
    BACKWARDS,
    BOUNDARY,
    COMPUTE,
    FORM_CHANGES,
    FORWARD,
    LATE,
    RECOMPUTE,
    ROWS,
    SPLITS,
    STEPS,
    TIERS,
    WHOLES,
    Lane,
    Opcode,
    Value,
    changes,
    producers,
)
from schedir.ir.program import Program
from schedir.planner.config_export import plan_of, plan_program
from schedir.planner.estimate.instruction_costs import costs_of, times_of
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
from schedir.planner.plan_estimate import priced
from schedir.planner.trainer_profile import Trainer, trainer_for
from schedir.planner.transformer.memory_estimate import StateBytes
from schedir.planner.transformer.transformer_spec import TransformerSpec
from schedir.predict.bubble_causes import IdleCause, idleness
from schedir.predict.cpu_contention import WORK, on_processors
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline


def simulate_plan(
    model: TransformerSpec,
    cluster: Cluster,
    choice: ParallelPlan,
    constants: SoftwareConstants | None = None,
    *,
    states: StateBytes | None = None,
) -> PlanEstimate:
    """The choice with the time of its step and its memory, from simulating its program.

    Each stage has its own times, by its layers and by the embedding or the head; messages, sums,
    gathers of weights and the update take what the cluster makes of their bytes.  What the parts
    tell is of the rank that is busiest, and adds up to the step.  Processes that share processors
    are simulated so (`on_processors`), with the program and the sizes of `schedir train`.

    Copies to the host and back are instructions of the program, which take what the cluster's
    `host` makes of their bytes, each way on a lane of its own.

    Raises UsageError for what does not go together, and what `plan_program` raises;
    MemoryLimitError where what `offload` "fit" can move is not enough.

    >>> from schedir import planner
    >>> gpt = planner.TransformerSpec(layers=24, hidden=2304, heads=24, vocab=51200, sequence=2048)
    >>> node = planner.cluster_preset("a100", nodes=1)
    >>> found = planner.simulate_plan(gpt, node, planner.ParallelPlan(pp=4, tp=2, microbatch_size=2,
    ...     microbatches=16))
    >>> found.exact, found.step == sum(found.parts), found.fits
    (True, True, True)
    """
    of = trainer_for(cluster, constants, states)
    whole = program_of(model, cluster, choice, of)
    if whole.shape.stages != choice.stages:
        raise UsageError(
            f"{choice.schedule} has {whole.shape.stages} stages of several holders each, which the "
            "planner does not price",
            fields=["schedule"],
        )
    times = times_of(model, cluster, choice, of.constants)
    return simulated(model, cluster, choice, whole, times, of)


def simulated_program(
    model: TransformerSpec,
    cluster: Cluster,
    choice: ParallelPlan,
    constants: SoftwareConstants | None = None,
    *,
    states: StateBytes | None = None,
) -> Program:
    """The program that `simulate_plan` simulates for a choice: `plan_program`, and of one that
    offloads as much as its memory asks for.  Raises what `simulate_plan` does.

    >>> import schedir
    >>> from schedir import planner
    >>> gpt, node = planner.load_model("gpt-22b"), planner.cluster_preset("a100")
    >>> one = planner.ParallelPlan(pp=8, microbatches=16, offload="fit", optimizer_placement="host")
    >>> "offload 0.1" in schedir.to_text(planner.simulated_program(gpt, node, one), folded=False)
    True
    """
    return program_of(model, cluster, choice, trainer_for(cluster, constants, states))


def program_of(
    model: TransformerSpec, cluster: Cluster, choice: ParallelPlan, of: Trainer
) -> Program:
    """The program of a choice, with what its memory asks to be offloaded.

    The limit is what the allocator and the process leave of a GPU's memory.
    """
    if choice.offload == "none":
        if choice.offloads:
            require_host(cluster, choice)
        whole = plan_program(choice, tied=model.tied, **of.options)
        if not choice.offloads and len(tiers_of(whole)) > 1:
            raise UsageError(
                f"{choice.schedule} offloads, and what its copies take nobody has planned",
                fields=["schedule", "offload"],
            )
        return whole
    require_host(cluster, choice)
    shape, constants = plan_of(choice), of.constants
    times = times_of(model, cluster, choice, constants)
    return plan_program(
        choice,
        tied=model.tied,
        costs=costs_of(model, cluster, choice, shape, times, constants, of.states),
        sizes=of.sizes(model, choice, shape, constants, of.states),
        memory_limit=(cluster.memory - constants.reserved) / (1 + constants.allocator_share),
        host_memory_limit=cluster.host_memory,
        **of.options,
    )


def require_host(cluster: Cluster, choice: ParallelPlan | None = None) -> None:
    """Raise UsageError for machines whose host nobody tells, and what is not planned there."""
    if cluster.processors is not None:
        raise UsageError(
            "processors compute in their host's memory: there is no other to offload to",
            fields=["offload", "optimizer_placement", "processors"],
        )
    told = {"host": "24GB/s", "host_memory": "225GB"}
    if missing := [name for name in told if getattr(cluster, name) is None]:
        raise UsageError(
            f"what offload takes and where it lies the cluster's {' and '.join(missing)} say, "
            "which nobody tells",
            hint=", ".join(f'{name} = "{told[name]}"' for name in missing),
            fields=missing,
        )
    if choice is not None and choice.optimizer_placement == "host" and choice.ep > 1:
        raise UsageError(
            "states of experts, of which replicas hold parts, are not planned on the host",
            fields=["optimizer_placement", "ep"],
        )


def simulated(
    model: TransformerSpec,
    cluster: Cluster,
    choice: ParallelPlan,
    whole: Program,
    times: list[StageTimes],
    of: Trainer,
) -> PlanEstimate:
    """The choice with what its program takes, if a microbatch takes so long in each stage."""
    constants, states = of.constants, of.states
    costs = costs_of(model, cluster, choice, whole.shape, times, constants, states)
    held = of.sizes(model, choice, whole.shape, constants, states)
    run = replace(run_of(cluster, choice, whole, costs), sizes=held)
    found = parts_of(run, times, ahead=constants.recompute_ahead)
    memory = memory_of(run, constants)
    return priced(model, cluster, choice, found, memory, exact=True, host=host_of(run))


def run_of(cluster: Cluster, choice: ParallelPlan, whole: Program, costs: Costs) -> Timeline:
    """The predicted run of a choice's program."""
    if cluster.processors is None:
        return simulate(whole, costs, progress_model="per_edge")
    shape = whole.shape
    alone = {
        name: from_grid(grid(getattr(costs, name) or 0.0) / cluster.alone)
        for name in {row.cost for row in ROWS if row.cost and row.lane in WORK}
    }
    each = cluster.processors * cluster.nodes * shape.ranks / choice.gpus  # of a replica's slice
    return on_processors(whole, replace(costs, **alone), each)


# ---------------------------------------------------------------- what a run says


def parts_of(run: Timeline, times: list[StageTimes], *, ahead: float = 0.0) -> StepBreakdown:
    """Where the time of the busiest rank goes, from the first instruction of all to the last.

    What it computes is told apart by `times`, of whose R a share may run `ahead` of its backward;
    why it waits when it does, `idleness` tells.
    """
    rank = int(run.busy.argmax())
    here = slice(*run.program.offsets[rank : rank + 2].tolist())
    spans, second = run.spans[here], run.second_of_pair[here]
    op, took = spans["op"], spans["end"] - spans["start"]
    work = np.isin(op, COMPUTE)
    each = _told_apart(times, ahead)[:, op[work], spans["stage"][work]]
    pair = np.cumsum(~second[work]) - 1  # what runs together has one span
    alone = np.bincount(pair, each.sum(0))
    whole = took[work][~second[work]]
    share = np.divide(whole, alone, out=np.zeros_like(whole), where=alone > 0)[pair]
    compute, again, tensor = (each * share).sum(1).tolist()
    waits = idleness(run)
    waits = waits[waits["rank"] == rank]
    idle, cause = waits["end"] - waits["start"], waits["cause"]
    norm = (waits["awaits"] >= 0) & np.isin(run.spans["op"][waits["awaits"]], producers(Value.NORM))
    data = np.isin(cause, (IdleCause.REDUCTION, IdleCause.WEIGHTS)) & ~norm
    message, host = cause == IdleCause.MESSAGE, cause == IdleCause.OFFLOAD
    return StepBreakdown(
        compute=compute,
        recompute=again,
        tensor=tensor,
        transfers=float(took[np.isin(op, _FORM_CHANGES)].sum() + idle[message].sum()),
        bubble=float(idle[~(data | message | norm | host)].sum()),
        data=float(idle[data].sum()),
        optimizer=float(took[np.isin(op, _UPDATES)].sum() + idle[norm].sum()),
        host=float(idle[host].sum()),
    )


def _told_apart(times: list[StageTimes], ahead: float) -> NDArray[np.float64]:
    """Of what computes, what is work, what runs again, and what are collectives: shape
    (3, opcodes, stages)."""
    compute, tensor = (np.array(each).T for each in zip(*times, strict=True))  # by phase and stage
    found = np.zeros((3, len(Opcode), len(times)))
    again = len(PhaseTimes._fields) - 1
    for op, phases in _PHASES.items():
        part = (1 - ahead) * (op in BACKWARDS) + ahead * (op == RECOMPUTE)
        found[0, op] = compute[phases].sum(0)
        found[1, op] = part * compute[again]
        found[2, op] = tensor[phases].sum(0) + part * tensor[again]
    return found


_UPDATES: Final = (*STEPS, *(op for op in changes(Value.STATE) if ROWS[op].lane is Lane.COMPUTE))
_FORM_CHANGES: Final = tuple(op for op in FORM_CHANGES if ROWS[op].lane is Lane.COMPUTE)
_PHASES: Final[dict[Opcode, list[int]]] = {  # those of `PhaseTimes` that an instruction is
    FORWARD: [0],
    **{op: [1, 2] for op in WHOLES},
    **{op: [1] for op in SPLITS},
    **{op: [2] for op in LATE},
    RECOMPUTE: [],
}


def memory_of(run: Timeline, constants: SoftwareConstants) -> GpuMemory:
    """What the fullest rank holds when it holds most, with what the allocator and the process take
    beside it."""
    rank = int(run.peak_memory.argmax())
    curve = run.memory[rank]
    at = int(curve.held.argmax())
    found = dict.fromkeys(GpuMemory._fields, 0.0)
    for kind, size in curve.kinds.items():
        found[_HELD.get(kind, "activations")] += float(size[at])
    found["other"] += constants.allocator_share * sum(found.values()) + constants.reserved
    return GpuMemory(**found)


def host_of(run: Timeline) -> HostMemory:
    """What the rank has on its host that has most there, at the peak of it."""
    curves = run.memory_on(TIERS[1]) if len(tiers_of(run.program)) > 1 else ()
    most, kinds = 0.0, dict[str, float]()
    for curve in curves:
        at = int(curve.held.argmax())
        if curve.held[at] > most:
            most, kinds = float(curve.held[at]), {k: float(v[at]) for k, v in curve.kinds.items()}
    states = sum(size for kind, size in kinds.items() if _HELD.get(kind) == "optimizer")
    return HostMemory(states, most - states)


_HELD: Final = {
    "params": "weights", IN_PARTS["params"]: "weights", WHOLE["params"]: "weights",
    "grads": "gradients", IN_PARTS["grads"]: "gradients", WHOLE["grads"]: "gradients",
    "optimizer": "optimizer", IN_PARTS["optimizer"]: "optimizer",
    Value.STATE.name.lower(): "optimizer",
    **{token.name.lower(): "other" for token in BOUNDARY},
}  # fmt: skip
