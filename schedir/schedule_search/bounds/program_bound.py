"""Compute a lower bound for all programs with the same work and memory as a given program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.memory.footprint import Footprint, compute_footprints, peak_in_flight
from schedir.errors import CostsError
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE_OPS,
    FORWARD,
    INSTRUCTIONS,
    OPTIMIZER_STEP_OPS,
    SEND_OPS,
    SLOT_VALUES,
    Value,
)
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.schedule_search.bounds.lower_bound import compute_bound
from schedir.schedule_search.problem import Objective, SchedulingProblem, make_problem
from schedir.schedule_search.search_results import LowerBound

_SEARCHED_OPS: Final = {FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT}
# Other instructions that compute, or that use saved activations or deferred weight gradients, for
# example R and offloads. A `SchedulingProblem` cannot represent these instructions.
_UNSUPPORTED_OPS: Final = {
    row.op for row in INSTRUCTIONS
    if row.op not in _SEARCHED_OPS
    and (
        row.op in COMPUTE_OPS
        or {Value.SAVED, Value.DEFERRED_WGRAD} & {*row.needs, *row.gives, *row.frees}
    )
}  # fmt: skip
# Names of the sizes of slots. Other programs may need fewer slots, so the bytes of slots are left
# out.
_SLOT_SIZES: Final = {kind.name.lower() for kind in SLOT_VALUES}


def compute_program_bound(
    program: Program,
    costs: Costs | None = None,
    sizes: Sizes | None = None,
    *,
    objective: Objective = "span",
    split_backward: bool | None = None,
    footprints: Sequence[Footprint] = (),
) -> LowerBound | None:
    """Return a lower bound on the length of every program with the same work and no more memory.

    The memory limit of every rank is the largest memory of a rank of `program`. With sizes, memory
    is the predicted number of bytes, including messages. Without sizes, memory is the number of
    microbatches in flight. With sizes, the bound also holds for programs with fewer bytes of
    messages and more bytes of saved activations.

    If costs or sizes differ between microbatches, the smallest value of each stage is used. With
    `split_backward`, each backward has the cost of a full or a split backward, whichever is
    cheaper. The bound is then lower, but still valid.

    Args:
        program: The program to compare with.
        costs: The costs of stages. By default `Costs()`.
        sizes: The sizes in bytes. By default memory is counted in microbatches in flight.
        objective: The length to bound: "span" or "active_span", see `search_schedule`.
        split_backward: True if the bound must also hold for programs that split some or all
            backwards into I and W. False if it must hold only for programs with full backwards. By
            default True if `program` splits a backward.
        footprints: `Timeline.footprints` of a prediction for the program with these sizes. By
            default they are computed.

    Returns:
        The bound. None if the program has stage replicas, several updates, sequence chunks, frozen
        stages or no backwards, because no bound then applies. Also None if the program recomputes
        or offloads, or if `Costs.FB` is less than a forward and a backward.
    """
    costs = Costs() if costs is None else costs
    shape = program.shape
    if (
        shape.placement_rows > 1
        or shape.optimizer_steps > 1
        or shape.sequence_chunks > 1
        or program.frozen_stages
    ):
        return None
    if not program.has_backward or program.used_opcodes & _UNSUPPORTED_OPS:
        return None
    if costs.has_pairing_gain(shape):
        return None
    problem = _relax_program(program, costs, objective, split_backward=split_backward)
    if problem is None:
        return None
    if sizes is None:
        capacity = (float(peak_in_flight(program).max()),) * shape.ranks
        return compute_bound(replace(problem, capacity=capacity))
    footprints = footprints or compute_footprints(program, sizes)
    return compute_bound(_limit_memory(problem, shape, sizes, footprints))


def _relax_program(
    program: Program,
    costs: Costs,
    objective: Objective,
    *,
    split_backward: bool | None,
) -> SchedulingProblem | None:
    """Return a problem with a bound that applies to all programs with this work, or None.

    The problem does not limit memory.
    """
    shape = program.shape
    if split_backward is None:
        split_backward = not program.used_opcodes.isdisjoint({BACKWARD_INPUT, BACKWARD_WEIGHT})
    F, I, W, B, send, step = (
        costs.for_opcode(op, shape).min(1)
        for op in (
            FORWARD,
            BACKWARD_INPUT,
            BACKWARD_WEIGHT,
            BACKWARD,
            SEND_OPS[0],
            OPTIMIZER_STEP_OPS[0],
        )
    )
    if split_backward:  # A full backward is treated as an I followed by its W.
        I = np.minimum(I, B)
        W = np.minimum(W, B - I)
    step_costs = step if set(OPTIMIZER_STEP_OPS) & program.used_opcodes else 0 * step
    try:
        min_costs = Costs(
            F=_to_floats(F), I=_to_floats(I), W=_to_floats(W), B=_to_floats(B),
            send=_to_floats(send), step=_to_floats(step_costs),
        )  # fmt: skip
        return make_problem(shape, min_costs, objective=objective, split_backward=split_backward)
    except CostsError:  # The costs are all 0, or too large.
        return None


def _limit_memory(
    problem: SchedulingProblem,
    shape: PipelineShape,
    sizes: Sizes,
    footprints: Sequence[Footprint],
) -> SchedulingProblem:
    """Return the problem with the largest memory of a rank of a program as the limit.

    Args:
        problem: The problem.
        shape: The shape of the program.
        sizes: The sizes in bytes.
        footprints: The memory of each rank of the program.
    """
    max_bytes = max(float(footprint.total_bytes.max()) for footprint in footprints)
    capacity = tuple(max_bytes - _constant_bytes(footprint) for footprint in footprints)
    saved, deferred = (
        sizes.per_microbatch(name, shape).min(1) for name in ("saved", "deferred_wgrad")
    )
    # Other programs may have full backwards, which keep the saved activations until their end and
    # defer nothing. So `saved_and_deferred` has the same values as `saved`.
    deferred = np.minimum(deferred, saved) if problem.split_backward else 0 * deferred
    return replace(
        problem, capacity=capacity, saved=_to_floats(saved), saved_and_deferred=_to_floats(saved),
        deferred_wgrad=_to_floats(deferred),
    )  # fmt: skip


def _to_floats(values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(map(float, values))


def _constant_bytes(footprint: Footprint) -> float:
    """Return the static bytes of a rank that all programs with this work need, without slots."""
    return sum(
        size for name, (_, size) in footprint.static_memory.items() if name not in _SLOT_SIZES
    )
