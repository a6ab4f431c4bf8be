"""Compute costs that predict a measured run."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.critical_path.longest_path import compute_earliest_times
from schedir.ir.cost.cost_fields import COST_BY_OPCODE
from schedir.ir.cost.costs import Cost, Costs
from schedir.ir.cost.per_stage_values import from_grid, to_grid
from schedir.ir.cost.sizes import Sizes
from schedir.ir.instruction_index import NO_POSITION
from schedir.ir.isa.instructions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE_OPS,
    FORWARD,
    INSTRUCTIONS,
    RECOMPUTE,
    Lane,
    Scope,
)
from schedir.ir.program import Program
from schedir.predict.bubble_causes import IdleCause, find_ready_gaps, idleness
from schedir.predict.timeline import Timeline, require_timelines

Floats = NDArray[np.float64]

MAX_PREDICTION_ERROR: Final = (
    0.1  # of a step: a prediction that is further off says nothing of its run
)
MIN_REPORTED_SHARE: Final = 0.01  # of ranks x span: what is less is not worth a word
TIME_TOLERANCE: Final = 1e-9  # of a time: two that differ by less differ by rounding
HOST_GAP_QUANTILE: Final = 0.9  # of the host's gaps are no longer than usual
_OPS_OF_COST: Final = {
    name: [op for op in COST_BY_OPCODE if COST_BY_OPCODE[op] == name]
    for name in COST_BY_OPCODE.values()
}
# What runs beside computes, and is seen to end when somebody looks.
_ASYNC_COSTS: Final = [
    name for name, ops in _OPS_OF_COST.items() if INSTRUCTIONS[ops[0]].lane is not Lane.COMPUTE
]
SPLIT_BACKWARD: Final = (BACKWARD_INPUT, BACKWARD_WEIGHT)
# Why a rank waits for what is under way on another lane than compute.
_LANE_CAUSES: Final = (
    IdleCause.MESSAGE, IdleCause.REDUCTION, IdleCause.WEIGHTS, IdleCause.SNAPSHOT,
    IdleCause.OFFLOAD, IdleCause.DISK, IdleCause.SUM, IdleCause.STEP,
)  # fmt: skip


def calibrate(measured: Timeline, *, per_microbatch: bool = False) -> Costs:
    """The costs at which a simulation takes as long as the run did, and waits where it waited.

    A message, a gather, also of weights, and a reduction cost what somebody waited for them;
    nothing, if nobody did.
    An instruction that somebody waited for was seen to end when it ended, so its time lies between
    `least` and its span, where `least` is the span less what the one ahead in its queue may have
    taken of it.  The end of any other is seen only when the receiver looks, so its time lies
    between 0 and its span.  But a prediction is seen whole: all its spans are costs.  The cost of a
    kind is the time that is nearest to all these intervals: of the times c with the smallest sum of
    distances |c - interval| the least.  A wait counts if it is longer than nine in ten of the gaps
    that the host leaves between two computes with nothing to wait for, and longer than the
    error of the clocks.

    All else costs its mean time, per stage for F, B, I, W and pairs, per rank for a step, which may
    run alone on one and beside a neighbour's backwards on another, and one number for each other
    kind.  An instruction of the compute lane takes its span and the delay before it that nothing
    explains: how much earlier a simulation would begin it in which all computes end as they did and
    messages take the times above.  The delay is the host's own work, messages that took longer
    than most, and noise; it is negative where a message took less than most.  But nothing costs
    less than the least that it was seen to take.

    Instructions that the program, or a stage of it, does not have cost nothing, but for R, which is
    left to be as long as F.

    With `per_microbatch` F, B, I, W and pairs cost what each microbatch took in each stage, as an
    array: for packed data and segments of a sequence, which take different times.  All else,
    messages too, costs one number as without.

    Else a mean is assumed to stand for all: where the times of one instruction differ from
    microbatch to microbatch (the first touches new memory, another process takes the core), a
    simulation is too short if others waited for the slow ones, and too long if those fell where
    nobody waited.  Of a stage with several holders it is the mean of all.
    """
    require_timelines([measured])
    spans, stages = measured.spans, range(measured.program.shape.stages)
    costs: dict[str, Cost] = dict.fromkeys(COST_BY_OPCODE.values(), 0.0)
    bounds = _bound_durations(measured)
    once = measured.graph.node == np.arange(len(spans))  # of what is one on several ranks
    for name in _ASYNC_COSTS:
        costs[name] = _find_nearest_time(bounds[:, once & np.isin(spans["op"], _OPS_OF_COST[name])])
    lasted = spans["end"] - spans["start"]
    took = np.stack([lasted + _measure_unexplained(measured, Costs(**costs)), lasted])
    second = measured.is_second_of_pair
    paired = second | np.append(second[1:], False)
    for name, ops in _OPS_OF_COST.items():
        here = np.isin(spans["op"], ops)
        if ops[0] in COMPUTE_OPS and here.any():
            of = [here & (spans["stage"] == s) for s in stages]
            costs[name] = tuple(_average_unpaired(name, took[:, w], paired[w]) for w in of)
            if per_microbatch:
                costs[name] = _collect_microbatches(costs[name], measured, took, here & ~paired)
        elif INSTRUCTIONS[ops[0]].scope is Scope.RANK and name not in _ASYNC_COSTS:
            costs[name] = _average_ranks(measured, took, here)
        elif name not in _ASYNC_COSTS:
            costs[name] = _bounded_mean(took[:, here])
    if second.any():
        ahead = paired & (spans["op"] == FORWARD)
        costs["FB"] = tuple(_bounded_mean(took[:, ahead & (spans["stage"] == s)]) for s in stages)
        if per_microbatch:
            costs["FB"] = _collect_microbatches(costs["FB"], measured, took, ahead)
    if RECOMPUTE not in measured.program.used_opcodes:
        del costs[COST_BY_OPCODE[RECOMPUTE]]  # it takes as long as its F
    return Costs(**costs)


def compute_prediction_error(predicted: Timeline, run: Timeline) -> float:
    """How much longer than a run its prediction takes, over the run; 0 for a run of no length."""
    return predicted.span / run.span - 1 if run.span else 0.0


def compute_unexplained_share(predicted: Timeline, run: Timeline) -> float:
    """The share of ranks x span that a prediction at a run's own times counts as work, and in
    which ranks of the run stood still: the host's time, messages that were late, and noise.
    """
    whole = predicted.span * predicted.ranks
    return float((predicted.busy - run.busy).sum()) / whole if whole else 0.0


def format_bubbles(run: Timeline, predicted: Timeline) -> str:
    """The bubble of a run, and the predicted one if the prediction does not miss the run.

    What is unexplained is said where it is a hundredth or more.
    """
    more = compute_prediction_error(predicted, run)
    if abs(more) > MAX_PREDICTION_ERROR:
        than = f"{abs(more):.0%} {'more' if more > 0 else 'less'}"
        return f"bubble {run.bubble:.1%}, not predicted: at its mean times it takes {than}"
    lost = compute_unexplained_share(predicted, run)
    also = f" and {lost:.1%} unexplained" if lost >= MIN_REPORTED_SHARE else ""
    return f"bubble {run.bubble:.1%}, predicted {predicted.bubble:.1%}{also}"


def _bounded_mean(durations: Floats) -> float:
    """The mean of times with delays, and no less than the least without; shape (2, n)."""
    times, lasted = durations
    return max(float(lasted.min()), float(times.mean())) if len(times) else 0.0


def _collect_microbatches(
    mean: Cost, measured: Timeline, durations: Floats, mask: NDArray[np.bool_]
) -> Cost:
    """What some instructions took, by stage and microbatch; the stage's mean for all others."""
    shape, spans = measured.program.shape, measured.spans[mask]
    each = np.repeat(to_grid(mean), shape.microbatches, 1)
    each[spans["stage"], spans["mb"]] = durations[:, mask].max(0)
    return from_grid(each)


def _average_ranks(measured: Timeline, durations: Floats, mask: NDArray[np.bool_]) -> Cost:
    """The mean of what is once on each rank, the k-th number rank k's; one if all are alike."""
    shape = measured.program.shape
    column = np.minimum(measured.spans["rank"], shape.stages - 1)  # as Costs has them
    each = range(min(shape.ranks, shape.stages)) if mask.any() else ()
    own = [_bounded_mean(durations[:, mask & (column == k)]) for k in each]
    if not own or np.ptp(own) <= TIME_TOLERANCE * max(own):
        return _bounded_mean(durations[:, mask])
    return tuple(own + own[-1:] * (shape.stages - len(own)))


def _average_unpaired(name: str, durations: Floats, paired: NDArray[np.bool_]) -> float:
    """The mean of what is not in a pair; if all is, a pair's third for F, and the rest for B."""
    if paired.all():
        return _bounded_mean(durations) * (1 / 3 if name == "F" else 2 / 3)
    return _bounded_mean(durations[:, ~paired])


def _bound_durations(measured: Timeline) -> Floats:
    """The least and the most time that each instruction can have taken, shape (2, n)."""
    spans, graph, idle = measured.spans, measured.graph, idleness(measured)
    idle = idle[np.isin(idle["cause"], _LANE_CAUSES)]
    # Another one ended the wait if this one was seen to end later.
    idle = idle[idle["end"] >= spans["end"][idle["awaits"]] - measured.clock_error]
    waited = np.zeros(graph.node_id_limit)
    np.maximum.at(waited, graph.node[idle["awaits"]], idle["end"] - idle["start"])
    gaps = find_ready_gaps(measured)
    usual = float(np.quantile(gaps, HOST_GAP_QUANTILE)) if len(gaps) else 0.0
    # What is behind another in its queue may have begun when that one was seen to end.
    behind = (graph.queue_predecessor != NO_POSITION) & (
        graph.entry_exit_nodes[0][graph.queue_predecessor] != graph.entry_exit_nodes[0]
    )
    freed = np.where(behind, spans["end"][graph.queue_predecessor], -np.inf)
    begun = np.full(graph.node_id_limit, -np.inf)
    np.maximum.at(begun, graph.node, np.maximum(spans["start"], freed))
    least = np.maximum(spans["end"] - begun[graph.node], 0.0)
    known = waited[graph.node] > max(usual, measured.clock_error)
    lasted = spans["end"] - spans["start"]
    if measured.kind == "predicted":
        return np.stack([lasted, lasted])
    return np.stack([np.where(known, least, 0.0), lasted])


def _find_nearest_time(bounds: Floats) -> float:
    """The least of the times of which the sum of distances to all intervals is the smallest.

    Each end of an interval pulls as strongly as any other, so it is the median of them all.
    """
    count = bounds.shape[1]
    return float(np.sort(bounds, axis=None)[count - 1]) if count else 0.0


def _measure_unexplained(measured: Timeline, costs: Costs) -> Floats:
    """How much later than it could each instruction of the compute lane began.

    It could when all computes that it waits for had ended as they did, and all else as at `costs`.
    """
    spans, compute = measured.spans, measured.spans["lane"] == Lane.COMPUTE
    known = np.where(compute, spans["end"] - measured.start_time, np.nan)
    could = compute_earliest_times(measured.graph, costs, known).start
    return np.where(compute, spans["start"] - measured.start_time - could, 0.0)


def fill_missing_backwards(costs: Costs, program: Program) -> Costs:
    """Costs of a run with those of backwards that it does not have: a whole one is I + W, and
    of a whole one I and W are half each.
    """
    whole, first, late = (costs.for_opcode(op, program.shape) for op in (BACKWARD, *SPLIT_BACKWARD))
    if BACKWARD_INPUT not in program.used_opcodes:
        half = from_grid(whole / 2)
        return replace(costs, I=half, W=half, B=from_grid(whole))
    if BACKWARD not in program.used_opcodes:
        costs = replace(costs, B=from_grid(first + late))
    return costs


def adjust_for_zero(costs: Costs, program: Program, zero: int, sizes: Sizes | None = None) -> Costs:
    """Costs of a program with those that it needs with another level of ZeRO.

    An all-reduce takes as long as a reduce-scatter and an all-gather (arXiv 1910.02054, section
    7.1): so each of these takes half of it, and the gather of weights as much as their bytes are
    more or less than those of gradients, where sizes tell.  What is stepped in parts takes 1/dp.
    A cost that is told, and is not 0, stays.
    """
    if bool(zero) == bool(program.zero):
        return costs
    dp, stages = program.dp, program.shape.stages
    more = 1.0 if sizes is None else _params_per_gradient_byte(sizes, stages)
    step = from_grid(to_grid(costs.step or 0.0) * (1 / dp if zero else dp))
    if not zero:
        whole = costs.reduce_grads or from_grid(2 * to_grid(costs.reduce_scatter or 0.0))
        return replace(costs, reduce_grads=whole, step=step)
    half = to_grid(costs.reduce_grads or 0.0) / 2
    return replace(
        costs,
        reduce_scatter=costs.reduce_scatter or from_grid(half),
        unshard=costs.unshard or from_grid(half * more),
        step=step,
    )


def _params_per_gradient_byte(sizes: Sizes, stages: int) -> float | NDArray[np.float64]:
    """Bytes of weights over those of gradients, of each stage; 1 where nobody tells both."""
    params, grads = (sizes.for_stages(name, stages)[:, None] for name in ("params", "grads"))
    told = (params > 0) & (grads > 0)
    each = np.where(told, params / np.where(told, grads, 1.0), 1.0)
    return float(each[0, 0]) if (each == each[0]).all() else each


def round_costs(costs: Costs) -> Costs:
    """The costs that `format_costs` says of some, and one number for what all stages, or all
    microbatches, have alike.

    >>> round_costs(Costs(F=(1 / 3, 1 / 3), B=(2.0, 1 / 3))).B
    (2.0, 0.333333)
    >>> round_costs(Costs(F=((1.0, 2.0), (1.0, 2.0)))).F
    ((1.0, 2.0),)
    """

    def said(value: Cost) -> Cost:
        each = np.array([[float(f"{cost:.6g}") for cost in row] for row in to_grid(value).tolist()])
        if (each == each[:, :1]).all():
            each = each[:, :1]
        return from_grid(each[:1] if (each == each[:1]).all() else each)

    return Costs(**{name: said(value) for name, value in costs.specified.items()})


def format_costs(costs: Costs) -> str:
    """Costs as the option --costs takes them: those that are told.

    >>> format_costs(Costs(F=(1.5, 2.0), B=3.0, I=1.0, W=2.0, send=0.25))
    'F=1.5:2,I=1,W=2,B=3,send=0.25'
    >>> format_costs(Costs(F=((1.0, 2.0), (1.5, 2.5)))).split(",")[0]  # stages and microbatches
    'F=1/2:1.5/2.5'
    """

    def said(value: Cost) -> str:
        rows = to_grid(value).tolist()
        return ":".join("/".join(f"{cost:.6g}" for cost in row) for row in rows)

    return ",".join(f"{name}={said(value)}" for name, value in costs.specified.items())
