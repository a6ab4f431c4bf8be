"""Compute the costs that reproduce a measured run, and adjust and format costs."""

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
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline, require_timeline

Floats = NDArray[np.float64]

# Largest error of a predicted span, as a share of the span of the run. A prediction with a larger
# error does not explain the run.
MAX_PREDICTION_ERROR: Final = 0.1
MIN_REPORTED_SHARE: Final = 0.01  # Share of ranks x span. Smaller shares are noise.
TIME_TOLERANCE: Final = 1e-9  # Share of a time. Smaller differences come from rounding.
HOST_GAP_QUANTILE: Final = 0.9  # A gap of the host is usual up to this quantile: see `calibrate`.
_OPS_OF_COST: Final = {
    name: [op for op in COST_BY_OPCODE if COST_BY_OPCODE[op] == name]
    for name in COST_BY_OPCODE.values()
}
# Costs of the lanes that run in parallel to compute. The end of an instruction on such a lane is
# recorded only when another instruction waits for it.
_ASYNC_COSTS: Final = [
    name for name, ops in _OPS_OF_COST.items() if INSTRUCTIONS[ops[0]].lane is not Lane.COMPUTE
]
SPLIT_BACKWARD: Final = (BACKWARD_INPUT, BACKWARD_WEIGHT)
# Causes of waits for an instruction that is in progress on a lane other than compute.
_LANE_CAUSES: Final = (
    IdleCause.MESSAGE, IdleCause.REDUCTION, IdleCause.WEIGHTS, IdleCause.SNAPSHOT,
    IdleCause.OFFLOAD, IdleCause.DISK, IdleCause.SUM, IdleCause.STEP,
    IdleCause.ALL_TO_ALL,
)  # fmt: skip


def calibrate(measured: Timeline, *, per_microbatch: bool = False) -> Costs:
    """Compute the costs with which a simulation reproduces a run.

    With these costs, a simulation has about the same span as the run, and its ranks wait at the
    same instructions.

    Costs of instructions on lanes other than compute, such as messages, gathers and reductions:

    - The span of an instruction is the time from its recorded start to its recorded end. The span
      bounds the duration of the instruction from above, and sometimes from below.
    - If a rank waited for the instruction, its end is exact. Its duration is then at most its span.
      The duration is at least the part of the span after the previous instruction of the queue has
      ended.
    - If no rank waited for it, its end may be recorded late. Its duration is then between 0 and its
      span.
    - In a prediction, all durations are equal to the spans.
    - So there is an interval of possible durations for each instruction. The cost is the time with
      the smallest sum of distances to all intervals. If several times have this smallest sum, the
      cost is the smallest of them.
    - A wait is ignored if it is not longer than the usual gaps of the host, or not longer than the
      clock error. A gap of the host is the time between two computes in which the rank waits for
      nothing. A gap is usual if it is not above the quantile `HOST_GAP_QUANTILE` of all gaps.

    Costs of all other instructions are mean times:

    - F, B, I, W, R and pairs (a forward together with a backward) have one cost for each stage.
      Instructions that belong to a rank, such as the step, have one cost for each rank, because the
      step of one rank may run in parallel to a neighbour's backwards. Each other opcode has one
      cost.
    - The time of an instruction is its span plus the unexplained delay before it. To find this
      delay, a simulation uses the recorded ends of all computes, and the costs above for all
      messages. The delay is the recorded start minus the simulated start. It comes from the host,
      slow messages and noise. It is negative after a message that was faster than its cost.
    - A cost is never less than the shortest span of its instructions.
    - The cost of a stage with several replicas is the mean over all replicas.
    - Means hide differences between microbatches. For example, the first microbatch may be slow
      because it uses new memory. A simulation is too short if other ranks waited for the slow
      microbatches, and too long if no rank did.

    If a stage or the program has no instruction of a kind, the cost of this kind is 0. R is an
    exception: if the program has no R, the costs contain no value for R. If these costs are used
    for a program with R, its R takes the time of F.

    Args:
        measured: A measured run, or a prediction.
        per_microbatch: True to return the costs of F, B, I, W, R and pairs as arrays of shape
            (stages, microbatches). Use this for packed data and sequence chunks, whose microbatches
            take different times.

    Returns:
        Costs in the unit of `measured`.

    Raises:
        UsageError: `measured` is not a Timeline.
    """
    require_timeline(measured, "measured")
    spans, stages = measured.spans, range(measured.program.shape.stages)
    costs: dict[str, Cost] = dict.fromkeys(COST_BY_OPCODE.values(), 0.0)
    bounds = _bound_durations(measured)
    # A message or collective is on several ranks, but is counted once.
    is_counted = measured.graph.node == np.arange(len(spans))
    for name in _ASYNC_COSTS:
        costs[name] = _find_nearest_time(
            bounds[:, is_counted & np.isin(spans["op"], _OPS_OF_COST[name])]
        )
    duration = spans["end"] - spans["start"]
    delayed_duration = np.stack(
        [duration + _measure_unexplained(measured, Costs(**costs)), duration]
    )
    is_second = measured.is_second_of_pair
    is_paired = is_second | np.append(is_second[1:], False)
    for name, ops in _OPS_OF_COST.items():
        is_of_cost = np.isin(spans["op"], ops)
        if ops[0] in COMPUTE_OPS and is_of_cost.any():
            is_of_stage = [is_of_cost & (spans["stage"] == s) for s in stages]
            costs[name] = tuple(
                _average_unpaired(name, delayed_duration[:, mask], is_paired[mask])
                for mask in is_of_stage
            )
            if per_microbatch:
                costs[name] = _collect_microbatches(
                    costs[name], measured, delayed_duration, is_of_cost & ~is_paired
                )
        elif INSTRUCTIONS[ops[0]].scope is Scope.RANK and name not in _ASYNC_COSTS:
            costs[name] = _average_ranks(measured, delayed_duration, is_of_cost)
        elif name not in _ASYNC_COSTS:
            costs[name] = _bounded_mean(delayed_duration[:, is_of_cost])
    if is_second.any():
        is_paired_forward = is_paired & (spans["op"] == FORWARD)
        costs["FB"] = tuple(
            _bounded_mean(delayed_duration[:, is_paired_forward & (spans["stage"] == s)])
            for s in stages
        )
        if per_microbatch:
            costs["FB"] = _collect_microbatches(
                costs["FB"], measured, delayed_duration, is_paired_forward
            )
    if RECOMPUTE not in measured.program.used_opcodes:
        del costs[COST_BY_OPCODE[RECOMPUTE]]  # R takes the time of F by default.
    return Costs(**costs)


def simulate_at_mean_times(run: Timeline, costs: Costs | None = None) -> Timeline:
    """Simulate the program of a run with the mean times of the run as costs.

    Args:
        run: The measured run.
        costs: The costs of `calibrate(run)`, if they are known already.

    Returns:
        The prediction, in the unit of the run and with its sizes.
    """
    predicted = simulate(
        run.program,
        costs or calibrate(run),
        progress_model=run.progress_model,
        blocking_hosts=run.blocking_hosts,
        sizes=run.sizes,
    )
    return replace(predicted, unit=run.unit)


def compute_prediction_error(predicted: Timeline, run: Timeline) -> float:
    """Return the relative error of a predicted span.

    Args:
        predicted: The prediction.
        run: The measured run.

    Returns:
        The difference of the spans as a share of the run's span. It is negative if the prediction
        is shorter than the run, and 0 if the run's span is 0.
    """
    return predicted.span / run.span - 1 if run.span else 0.0


def compute_unexplained_share(predicted: Timeline, run: Timeline) -> float:
    """Return the predicted minus the measured busy time, as a share of ranks x span.

    The difference consists of time of the host, delays of late messages, and noise. `calibrate`
    adds this time to the costs of computes.

    Args:
        predicted: The prediction at the calibrated costs of the run.
        run: The measured run.

    Returns:
        A share of ranks x span of the prediction.
    """
    total = predicted.span * predicted.ranks
    return float((predicted.busy - run.busy).sum()) / total if total else 0.0


def format_bubbles(run: Timeline, predicted: Timeline) -> str:
    """Describe the bubble of a run and of its prediction in words.

    The text has no predicted bubble if the prediction error is above `MAX_PREDICTION_ERROR`. The
    text includes the unexplained share if this share is at least `MIN_REPORTED_SHARE`.

    Args:
        run: The measured run.
        predicted: The prediction at the calibrated costs of the run.
    """
    error = compute_prediction_error(predicted, run)
    if abs(error) > MAX_PREDICTION_ERROR:
        difference = f"{abs(error):.0%} {'more' if error > 0 else 'less'}"
        return f"bubble {run.bubble:.1%}, not predicted: the simulation takes {difference}"
    unexplained = compute_unexplained_share(predicted, run)
    suffix = f" and {unexplained:.1%} unexplained" if unexplained >= MIN_REPORTED_SHARE else ""
    return f"bubble {run.bubble:.1%}, predicted {predicted.bubble:.1%}{suffix}"


def _bounded_mean(durations: Floats) -> float:
    """Return the mean of times with delays, but at least the shortest time without delays.

    `durations` has shape (2, n): row 0 has the times with delays, and row 1 the times without.
    """
    delayed, undelayed = durations
    return max(float(undelayed.min()), float(delayed.mean())) if len(delayed) else 0.0


def _collect_microbatches(
    mean: Cost, measured: Timeline, durations: Floats, mask: NDArray[np.bool_]
) -> Cost:
    """Return costs of shape (stages, microbatches): the durations of the instructions in `mask`.

    A stage and microbatch without such an instruction gets the mean of the stage.
    """
    shape, spans = measured.program.shape, measured.spans[mask]
    durations_by_stage = np.repeat(to_grid(mean), shape.microbatches, 1)
    durations_by_stage[spans["stage"], spans["mb"]] = durations[:, mask].max(0)
    return from_grid(durations_by_stage)


def _average_ranks(measured: Timeline, durations: Floats, mask: NDArray[np.bool_]) -> Cost:
    """Return the mean duration of an instruction on each rank, or one number if all are equal.

    If there are fewer stages than ranks, the last number is for all remaining ranks.
    """
    shape = measured.program.shape
    # For each instruction, the index of the number that `Costs` has for its rank.
    column_of_span = np.minimum(measured.spans["rank"], shape.stages - 1)
    columns = range(min(shape.ranks, shape.stages)) if mask.any() else ()
    means = [_bounded_mean(durations[:, mask & (column_of_span == k)]) for k in columns]
    if not means or np.ptp(means) <= TIME_TOLERANCE * max(means):
        return _bounded_mean(durations[:, mask])
    return tuple(means)


def _average_unpaired(name: str, durations: Floats, is_paired: NDArray[np.bool_]) -> float:
    """Return the mean duration of the instructions that are not in pairs.

    If all are in pairs, the result is a third of the mean time of a pair for F, and two thirds for
    a backward.
    """
    if is_paired.all():
        return _bounded_mean(durations) * (1 / 3 if name == "F" else 2 / 3)
    return _bounded_mean(durations[:, ~is_paired])


def _bound_durations(measured: Timeline) -> Floats:
    """Return the shortest and the longest possible duration of each instruction, shape (2, n)."""
    spans, graph, idle = measured.spans, measured.graph, idleness(measured)
    idle = idle[np.isin(idle["cause"], _LANE_CAUSES)]
    # If the awaited instruction ended after the wait, another instruction ended the wait.
    idle = idle[idle["end"] >= spans["end"][idle["awaited_span"]] - measured.clock_error]
    longest_wait = np.zeros(graph.node_id_limit)
    np.maximum.at(longest_wait, graph.node[idle["awaited_span"]], idle["end"] - idle["start"])
    gaps = find_ready_gaps(measured)
    usual_gap = float(np.quantile(gaps, HOST_GAP_QUANTILE)) if len(gaps) else 0.0
    # A recorded start may be too early: an instruction begins only when the previous instruction in
    # its queue has ended.
    has_predecessor = (graph.queue_predecessor != NO_POSITION) & (
        graph.entry_exit_nodes[0][graph.queue_predecessor] != graph.entry_exit_nodes[0]
    )
    queue_free_time = np.where(has_predecessor, spans["end"][graph.queue_predecessor], -np.inf)
    latest_start = np.full(graph.node_id_limit, -np.inf)
    np.maximum.at(latest_start, graph.node, np.maximum(spans["start"], queue_free_time))
    shortest = np.maximum(spans["end"] - latest_start[graph.node], 0.0)
    is_awaited = longest_wait[graph.node] > max(usual_gap, measured.clock_error)
    longest = spans["end"] - spans["start"]
    if measured.kind == "predicted":
        return np.stack([longest, longest])
    return np.stack([np.where(is_awaited, shortest, 0.0), longest])


def _find_nearest_time(bounds: Floats) -> float:
    """Return the smallest time with the smallest sum of distances to all intervals.

    Each bound of an interval has the same weight, so this is the lower median of all bounds.
    """
    count = bounds.shape[1]
    return float(np.sort(bounds, axis=None)[count - 1]) if count else 0.0


def _measure_unexplained(measured: Timeline, costs: Costs) -> Floats:
    """Return the unexplained delay before each instruction of the compute lane.

    The delay is the recorded start minus the earliest possible start. The earliest start follows
    from the recorded ends of computes, and from `costs` for all other instructions.
    """
    spans, is_compute = measured.spans, measured.spans["lane"] == Lane.COMPUTE
    recorded_ends = np.where(is_compute, spans["end"] - measured.start_time, np.nan)
    earliest = compute_earliest_times(measured.graph, costs, recorded_ends).start
    return np.where(is_compute, spans["start"] - measured.start_time - earliest, 0.0)


def fill_missing_backwards(costs: Costs, program: Program) -> Costs:
    """Add the costs of backwards that the run did not have.

    If the run has no B, B costs I + W. If the run has no I, then I and W each cost half of B.

    Args:
        costs: The costs of a run.
        program: The program of the run.
    """
    full_backward, backward_input, backward_weight = (
        costs.for_opcode(op, program.shape) for op in (BACKWARD, *SPLIT_BACKWARD)
    )
    if BACKWARD_INPUT not in program.used_opcodes:
        half = from_grid(full_backward / 2)
        return replace(costs, I=half, W=half, B=from_grid(full_backward))
    if BACKWARD not in program.used_opcodes:
        costs = replace(costs, B=from_grid(backward_input + backward_weight))
    return costs


def adjust_for_zero(costs: Costs, program: Program, zero: int, sizes: Sizes | None = None) -> Costs:
    """Convert the costs of a program to another ZeRO level.

    An all-reduce takes the time of a reduce-scatter and an all-gather (arXiv 1910.02054, section
    7.1), so each of the two takes half of this time. The time of the all-gather is then multiplied
    by the ratio of the bytes of weights to the bytes of gradients. A sharded optimizer step takes
    1/dp of the time.

    Costs are changed only if exactly one of the two levels is 0. A given cost other than 0 stays
    unchanged, except the cost of the step.

    Args:
        costs: The costs of `program`.
        program: The program.
        zero: The ZeRO level of the returned costs.
        sizes: The sizes, for the bytes of weights and gradients. If None, both are assumed equal.
    """
    if bool(zero) == bool(program.zero):
        return costs
    dp, stages = program.dp, program.shape.stages
    ratio = 1.0 if sizes is None else _params_per_gradient_byte(sizes, stages)
    step = from_grid(to_grid(costs.step or 0.0) * (1 / dp if zero else dp))
    if not zero:
        reduce_grads = costs.reduce_grads or from_grid(2 * to_grid(costs.reduce_scatter or 0.0))
        return replace(costs, reduce_grads=reduce_grads, step=step)
    half = to_grid(costs.reduce_grads or 0.0) / 2
    return replace(
        costs,
        reduce_scatter=costs.reduce_scatter or from_grid(half),
        unshard=costs.unshard or from_grid(half * ratio),
        step=step,
    )


def _params_per_gradient_byte(sizes: Sizes, stages: int) -> float | NDArray[np.float64]:
    """Return bytes of weights / bytes of gradients for each stage; 1 if one of them is unknown."""
    params, grads = (sizes.for_stages(name, stages)[:, None] for name in ("params", "grads"))
    has_both = (params > 0) & (grads > 0)
    ratios = np.where(has_both, params / np.where(has_both, grads, 1.0), 1.0)
    return float(ratios[0, 0]) if (ratios == ratios[0]).all() else ratios


def round_costs(costs: Costs) -> Costs:
    """Return costs rounded to 6 digits, as `format_costs` writes them.

    If all stages have the same cost, the result has one number for all of them. The same applies to
    microbatches.

    Args:
        costs: The costs.

    Example:
        >>> round_costs(Costs(F=(1 / 3, 1 / 3), B=(2.0, 1 / 3))).B
        (2.0, 0.333333)
        >>> round_costs(Costs(F=((1.0, 2.0), (1.0, 2.0)))).F
        ((1.0, 2.0),)
    """

    def round_cost(value: Cost) -> Cost:
        rounded = np.array(
            [[float(f"{cost:.6g}") for cost in row] for row in to_grid(value).tolist()]
        )
        if (rounded == rounded[:, :1]).all():
            rounded = rounded[:, :1]
        return from_grid(rounded[:1] if (rounded == rounded[:1]).all() else rounded)

    return Costs(**{name: round_cost(value) for name, value in costs.specified.items()})


def format_costs(costs: Costs) -> str:
    """Format costs as a value of the option `--costs`.

    Args:
        costs: The costs. Costs that are not given are left out.

    Example:
        >>> format_costs(Costs(F=(1.5, 2.0), B=3.0, I=1.0, W=2.0, send=0.25))
        'F=1.5:2,I=1,W=2,B=3,send=0.25'
        >>> format_costs(Costs(F=((1.0, 2.0), (1.5, 2.5)))).split(",")[0]  # stages and microbatches
        'F=1/2:1.5/2.5'
    """

    def format_cost(value: Cost) -> str:
        rows = to_grid(value).tolist()
        return ":".join("/".join(f"{cost:.6g}" for cost in row) for row in rows)

    return ",".join(f"{name}={format_cost(value)}" for name, value in costs.specified.items())
