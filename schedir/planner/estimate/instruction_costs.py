"""Compute the Costs of a plan's stages, messages, reductions, copies and update, in seconds."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.cluster_costs import stepped
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.per_stage_values import from_grid, grid
from schedir.ir.cost.sizes import Sizes
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.planner.estimate.link_time import mesh
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import ParallelPlan, StageTimes
from schedir.planner.trainer_profile import trainer_for
from schedir.planner.transformer.layer_division import layers_of
from schedir.planner.transformer.layer_time import stage_time
from schedir.planner.transformer.memory_estimate import ADAM, StateBytes, ends_numbers
from schedir.planner.transformer.op_time import slowest, summed
from schedir.planner.transformer.stage_bytes import StageParameters, numbers_of, seen_in_parts
from schedir.planner.transformer.transformer_spec import TransformerSpec


def times_of(
    model: TransformerSpec,
    cluster: Cluster,
    choice: ParallelPlan,
    constants: SoftwareConstants | None = None,
) -> list[StageTimes]:
    """What a microbatch takes in each stage."""
    each = layers_of(model, choice)
    known: dict[tuple[int, bool, bool], StageTimes] = {}
    found = []
    for number, layers in enumerate(each):
        kind = (layers, number == 0, number == len(each) - 1)
        if kind not in known:
            known[kind] = stage_time(model, cluster, choice, *kind, constants)
        found.append(known[kind])
    return found


def costs_of(
    model: TransformerSpec,
    cluster: Cluster,
    choice: ParallelPlan,
    shape: PipelineShape,
    times: list[StageTimes],
    constants: SoftwareConstants,
    states: StateBytes = ADAM,
) -> Costs:
    """The costs of a choice's program, in seconds: those of stages, and all that bytes decide.

    What runs again is an R as far as it may run ahead, and else the beginning of the backward.  Of
    sums over replicas that is left which the last backward does not hide (`reduce_hidden`).
    """
    F, I, W, R = np.array([one.total for one in times]).T
    ahead = R * constants.recompute_ahead * (choice.recompute == "full")
    I = I + R - ahead
    bytes_of = (states.params, states.grads, states.optimizer)
    numbers = numbers_of(model, choice, shape)
    params, grads, optimizer = (_each(size * numbers.all) for size in bytes_of)
    tokens = choice.microbatch_size * (model.sequence // choice.cp)
    sent = Sizes(
        activation=1.0 * cluster.itemsize * tokens * model.hidden,
        params=params,
        grads=grads,
        optimizer=optimizer,
    )
    again: list[tuple[int, int]] = []
    if choice.offload != "none":
        kept = trainer_for(cluster, constants, states).sizes(
            model, choice, shape, constants, states
        )
        sent = replace(sent, saved=kept.saved, checkpoint=kept.checkpoint)
        if choice.recompute == "full":
            again = [*product(range(shape.stages), range(shape.microbatches))]
    where = mesh(choice)
    own = Costs(F=_each(F), I=_each(I), W=_each(W), B=_each(I + W), R=_each(ahead),
                reduce_tied=_tied(model, cluster, shape, where, states))  # fmt: skip
    if choice.sequence_parallel and choice.tp > 1:
        own = replace(own, reduce_sequence_parallel_grads=_sequence(model, cluster, choice, states))
    if choice.ep > 1:
        own = replace(own, **_of_experts(cluster, choice, shape, where, numbers, states))
    replicas = choice.dp * choice.cp
    found = cluster.costs(
        shape, sent, own, tp=choice.tp, dp=replicas, zero=choice.zero, mesh=where,
        optimizer_placement=choice.optimizer_placement, offload=choice.offload != "none",
        recomputed=again,
    )  # fmt: skip
    left = {
        name: from_grid(whole - np.minimum(constants.reduce_hidden * whole, (I + W)[:, None]))
        for name in ("reduce_grads", "reduce_scatter")
        for whole in [np.broadcast_to(grid(getattr(found, name) or 0.0), (shape.stages, 1))]
    }
    return replace(found, **left)


def _of_experts(
    cluster: Cluster,
    choice: ParallelPlan,
    shape: PipelineShape,
    where: NDArray[np.int64],
    numbers: StageParameters,
    states: StateBytes,
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
    found = {name: np.zeros(shape.stages) for name in rings}
    every, same = len(where), max(len(where) // choice.ep, 1)
    parts = numbers.common / (every if cut else 1) + numbers.experts / (same if cut else 1)
    moved = stepped(*(size * parts for size in (states.params, states.grads, states.optimizer)))
    step = np.zeros(shape.stages)
    for rank, stages in enumerate(shape.stages_of):
        step[rank] = moved[list(stages)].sum() / cluster.hbm
        group = where[:, rank, 0]
        for one in stages:
            for name, (ring, size) in rings.items():
                found[name][one] = ring(size * numbers.common[one], group)
                found[name][one] += ring(size * numbers.experts[one], group[:: choice.ep])
    return {name: _each(value) for name, value in found.items()} | {"step": _each(step)}


def _sequence(
    model: TransformerSpec, cluster: Cluster, choice: ParallelPlan, states: StateBytes
) -> tuple[float, ...]:
    """The sum over slices, each of which has seen its own tokens with what all have whole; of what
    replicas have in parts it is the part (arXiv 2205.05198, section 4.2.2)."""
    every = choice.dp * choice.cp if choice.zero else 1
    group, seen = slowest(cluster, 1, choice.tp), seen_in_parts(model, choice)
    each = states.grads * (seen.common / every + seen.experts / max(every // choice.ep, 1))
    return tuple(summed(cluster, size, group) for size in each.tolist())


def _tied(
    model: TransformerSpec,
    cluster: Cluster,
    shape: PipelineShape,
    where: NDArray[np.int64],
    states: StateBytes,
) -> float:
    """The sum of the gradients of a tied embedding, of the first rank and the last."""
    first, last = int(shape.holders[0, 0]), int(shape.holders[0, -1])
    if first == last or not model.tied:
        return 0.0
    size = states.grads * float(ends_numbers(model, where.shape[2])[2])
    pairs = where[:, [first, last], 0]
    return max(cluster.all_reduce(size, pair) for pair in pairs)


def _each(value: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(value.tolist())
