"""Exact: the step of a choice as its program takes it, instruction by instruction."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError
from schedir.ir.cluster import Cluster
from schedir.ir.cluster_costs import stepped
from schedir.ir.costs import Costs
from schedir.ir.ops import (
    BACKWARDS,
    BOUNDARY,
    COMPUTE,
    FORWARD,
    LATE,
    RECOMPUTE,
    ROWS,
    SCATTERS,
    SPLITS,
    STEPS,
    WHOLES,
    Opcode,
    Token,
    producers,
)
from schedir.ir.per_stage import from_grid, grid
from schedir.ir.plan import Plan
from schedir.ir.program import Program
from schedir.ir.sizes import Sizes
from schedir.ir.zero import IN_PARTS, WHOLE
from schedir.planner.choice import Choice, Memory, Parts, Phases, Priced, Times
from schedir.planner.constants import Constants
from schedir.planner.division import layers_of
from schedir.planner.layer import stage
from schedir.planner.links import mesh
from schedir.planner.memory import ADAM, States, ends_numbers
from schedir.planner.model import Model
from schedir.planner.priced import priced
from schedir.planner.runnable import program
from schedir.planner.sizes import Numbers, numbers_of
from schedir.planner.trainer import Trainer, trainer_for
from schedir.predict.bubble_causes import Cause, idleness
from schedir.predict.on_processors import WORK, on_processors
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline


def exact(
    model: Model,
    cluster: Cluster,
    choice: Choice,
    constants: Constants | None = None,
    *,
    states: States | None = None,
) -> Priced:
    """The choice with the time of its step and its memory, from simulating its program.

    Each stage has its own times, by its layers and by the embedding or the head; messages, sums,
    gathers of weights and the update take what the cluster makes of their bytes.  What the parts
    tell is of the rank that is busiest, and adds up to the step.  Processes that share processors
    are simulated so (`on_processors`), with the program and the sizes of `schedir train`.

    Raises UsageError for what does not go together, and what `program` raises.

    >>> from schedir import planner
    >>> gpt = planner.Model(layers=24, hidden=2304, heads=24, vocab=51200, sequence=2048)
    >>> node = planner.cluster("a100", nodes=1)
    >>> found = planner.exact(gpt, node, planner.Choice(p=4, t=2, b=2, m=16))
    >>> found.exact, found.step == sum(found.parts), found.fits
    (True, True, True)
    """
    of = trainer_for(cluster, constants, states)
    whole = program(choice, tied=model.tied, **of.options)
    if whole.plan.stages != choice.stages:
        raise UsageError(
            f"{choice.schedule} has {whole.plan.stages} stages of several holders each, which the "
            "planner does not price",
            fields=["schedule"],
        )
    times = times_of(model, cluster, choice, of.constants)
    return simulated(model, cluster, choice, whole, times, of)


def simulated(
    model: Model,
    cluster: Cluster,
    choice: Choice,
    whole: Program,
    times: list[Times],
    of: Trainer,
) -> Priced:
    """The choice with what its program takes, if a microbatch takes so long in each stage."""
    constants, states = of.constants, of.states
    costs = costs_of(model, cluster, choice, whole.plan, times, constants, states)
    held = of.sizes(model, choice, whole.plan, constants, states)
    run = replace(run_of(cluster, choice, whole, costs), sizes=held)
    found = parts_of(run, times, ahead=constants.recompute_ahead)
    return priced(model, cluster, choice, found, memory_of(run, constants), exact=True)


# ---------------------------------------------------------------- costs


def times_of(
    model: Model, cluster: Cluster, choice: Choice, constants: Constants | None = None
) -> list[Times]:
    """What a microbatch takes in each stage."""
    each = layers_of(model, choice)
    known: dict[tuple[int, bool, bool], Times] = {}
    found = []
    for number, layers in enumerate(each):
        kind = (layers, number == 0, number == len(each) - 1)
        if kind not in known:
            known[kind] = stage(model, cluster, choice, *kind, constants)
        found.append(known[kind])
    return found


def costs_of(
    model: Model,
    cluster: Cluster,
    choice: Choice,
    plan: Plan,
    times: list[Times],
    constants: Constants,
    states: States = ADAM,
) -> Costs:
    """The costs of a choice's program, in seconds: those of stages, and all that bytes decide.

    What runs again is an R as far as it may run ahead, and else the beginning of the backward.  Of
    sums over replicas that is left which the last backward does not hide (`reduce_hidden`).
    """
    F, I, W, R = np.array([one.total for one in times]).T
    ahead = R * constants.recompute_ahead * (choice.recompute == "full")
    I = I + R - ahead
    bytes_of = (states.params, states.grads, states.optimizer)
    numbers = numbers_of(model, choice, plan)
    params, grads, optimizer = (_each(size * numbers.all) for size in bytes_of)
    tokens = choice.b * (model.sequence // choice.c)
    sent = Sizes(
        activation=1.0 * cluster.itemsize * tokens * model.hidden,
        params=params,
        grads=grads,
        optimizer=optimizer,
    )
    where = mesh(choice)
    own = Costs(F=_each(F), I=_each(I), W=_each(W), B=_each(I + W), R=_each(ahead),
                reduce_tied=_tied(model, cluster, plan, where, states))  # fmt: skip
    if choice.e > 1:
        own = replace(own, **_of_experts(cluster, choice, plan, where, numbers, states))
    replicas = choice.d * choice.c
    found = cluster.costs(plan, sent, own, tp=choice.t, dp=replicas, zero=choice.zero, mesh=where)
    left = {
        name: from_grid(whole - np.minimum(constants.reduce_hidden * whole, (I + W)[:, None]))
        for name in ("reduce_grads", "reduce_scatter")
        for whole in [np.broadcast_to(grid(getattr(found, name) or 0.0), (plan.stages, 1))]
    }
    return replace(found, **left)


def _of_experts(
    cluster: Cluster,
    choice: Choice,
    plan: Plan,
    where: NDArray[np.int64],
    numbers: Numbers,
    states: States,
) -> dict[str, tuple[float, ...]]:
    """Costs where replicas hold parts of experts: these are summed over those replicas alone that
    have the same, each e-th, and a step is of as many parts fewer."""
    cut = choice.zero > 0
    rings = {
        "reduce_scatter" if cut else "reduce_grads": (
            cluster.reduce_scatter if cut else cluster.all_reduce, states.grads
        ),
        **({"unshard": (cluster.all_gather, states.params)} if cut else {}),
    }  # fmt: skip
    found = {name: np.zeros(plan.stages) for name in rings}
    every, same = len(where), max(len(where) // choice.e, 1)
    parts = numbers.common / (every if cut else 1) + numbers.experts / (same if cut else 1)
    moved = stepped(*(size * parts for size in (states.params, states.grads, states.optimizer)))
    step = np.zeros(plan.stages)
    for rank, stages in enumerate(plan.stages_of):
        step[rank] = moved[list(stages)].sum() / cluster.hbm
        group = where[:, rank, 0]
        for one in stages:
            for name, (ring, size) in rings.items():
                found[name][one] = ring(size * numbers.common[one], group)
                found[name][one] += ring(size * numbers.experts[one], group[:: choice.e])
    return {name: _each(value) for name, value in found.items()} | {"step": _each(step)}


def _tied(
    model: Model, cluster: Cluster, plan: Plan, where: NDArray[np.int64], states: States
) -> float:
    """The sum of the gradients of a tied embedding, of the first rank and the last."""
    first, last = int(plan.holders[0, 0]), int(plan.holders[0, -1])
    if first == last or not model.tied:
        return 0.0
    size = states.grads * float(ends_numbers(model, where.shape[2])[2])
    pairs = where[:, [first, last], 0]
    return max(cluster.all_reduce(size, pair) for pair in pairs)


def _each(value: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(value.tolist())


def run_of(cluster: Cluster, choice: Choice, whole: Program, costs: Costs) -> Timeline:
    """The predicted run of a choice's program."""
    if cluster.processors is None:
        return simulate(whole, costs, model="edge")
    plan = whole.plan
    alone = {
        name: from_grid(grid(getattr(costs, name) or 0.0) / cluster.alone)
        for name in {row.cost for row in ROWS if row.cost and row.lane in WORK}
    }
    each = cluster.processors * cluster.nodes * plan.ranks / choice.gpus  # of a replica's slice
    return on_processors(whole, replace(costs, **alone), each)


# ---------------------------------------------------------------- what a run says


def parts_of(run: Timeline, times: list[Times], *, ahead: float = 0.0) -> Parts:
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
    norm = (waits["awaits"] >= 0) & np.isin(run.spans["op"][waits["awaits"]], producers(Token.NORM))
    data = np.isin(cause, (Cause.REDUCTION, Cause.WEIGHTS)) & ~norm
    message = cause == Cause.MESSAGE
    return Parts(
        compute=compute,
        recompute=again,
        tensor=tensor,
        transfers=float(took[np.isin(op, tuple(SCATTERS.values()))].sum() + idle[message].sum()),
        bubble=float(idle[~(data | message | norm)].sum()),
        data=float(idle[data].sum()),
        optimizer=float(took[np.isin(op, STEPS)].sum() + idle[norm].sum()),
    )


def _told_apart(times: list[Times], ahead: float) -> NDArray[np.float64]:
    """Of what computes, what is work, what runs again, and what are collectives: shape
    (3, opcodes, stages)."""
    compute, tensor = (np.array(each).T for each in zip(*times, strict=True))  # by phase and stage
    found = np.zeros((3, len(Opcode), len(times)))
    again = len(Phases._fields) - 1
    for op, phases in _PHASES.items():
        part = (1 - ahead) * (op in BACKWARDS) + ahead * (op == RECOMPUTE)
        found[0, op] = compute[phases].sum(0)
        found[1, op] = part * compute[again]
        found[2, op] = tensor[phases].sum(0) + part * tensor[again]
    return found


_PHASES: Final[dict[Opcode, list[int]]] = {  # those of `Phases` that an instruction is
    FORWARD: [0],
    **{op: [1, 2] for op in WHOLES},
    **{op: [1] for op in SPLITS},
    **{op: [2] for op in LATE},
    RECOMPUTE: [],
}


def memory_of(run: Timeline, constants: Constants) -> Memory:
    """What the fullest rank holds when it holds most, with what the allocator and the process take
    beside it."""
    rank = int(run.peak_memory.argmax())
    curve = run.memory[rank]
    at = int(curve.held.argmax())
    found = dict.fromkeys(Memory._fields, 0.0)
    for kind, size in curve.kinds.items():
        found[_HELD.get(kind, "activations")] += float(size[at])
    found["other"] += constants.allocator_share * sum(found.values()) + constants.reserved
    return Memory(**found)


_HELD: Final = {
    "params": "weights", IN_PARTS["params"]: "weights", WHOLE["params"]: "weights",
    "grads": "gradients", IN_PARTS["grads"]: "gradients", WHOLE["grads"]: "gradients",
    "optimizer": "optimizer", IN_PARTS["optimizer"]: "optimizer",
    **{token.name.lower(): "other" for token in BOUNDARY},
}  # fmt: skip
