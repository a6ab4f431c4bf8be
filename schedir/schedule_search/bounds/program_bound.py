"""Compute how much shorter than a given program a schedule with the same memory can be."""

from __future__ import annotations

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
from schedir.ir.program import Program
from schedir.schedule_search.bounds.lower_bound import compute_bound
from schedir.schedule_search.problem import Objective, SchedulingProblem, make_problem
from schedir.schedule_search.search_results import LowerBound

_SEARCHED_OPS: Final = {FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT}
# What holds, moves or frees what is kept of a microbatch in a way of its own, as offloads do.
_UNSUPPORTED_OPS: Final = {
    row.op for row in INSTRUCTIONS
    if row.op not in _SEARCHED_OPS
    and (
        row.op in COMPUTE_OPS
        or {Value.SAVED, Value.DEFERRED_WGRAD} & {*row.needs, *row.gives, *row.frees}
    )
}  # fmt: skip
_SLOT_SIZES: Final = {kind.name.lower() for kind in SLOT_VALUES}  # other programs may have fewer


def compute_program_bound(
    program: Program,
    costs: Costs | None = None,
    sizes: Sizes | None = None,
    *,
    objective: Objective = "span",
    split_backward: bool | None = None,
) -> LowerBound | None:
    """Below what no program of the same work can be that needs no more memory than this one.

    Its memory is, with sizes, the most bytes that a rank has, messages and all, as a prediction
    tells it; else the most microbatches in flight on a rank.  Each rank of the other program may
    have as much, and use for backwards what this one has for messages.  `split_backward` says
    whether that one may split backwards in I and W, also some of them only; by default it may if
    this one does. In a program that does not, F and B may still be in any order.

    Costs and sizes that differ between microbatches are taken as the least of each stage, and a
    backward as what it takes whole or split, whichever is less: the bound is lower then, but holds.

    None where nothing is known: of a program with several holders of a stage, updates or segments,
    with frozen stages, without backwards, with instructions that run forwards again or keep what
    they saved elsewhere, or with `Costs.FB` that are less than a forward and a backward.
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
    problem = _relax_program(program, costs, sizes, objective, split_backward=split_backward)
    return None if problem is None else compute_bound(problem)


def _relax_program(
    program: Program,
    costs: Costs,
    sizes: Sizes | None,
    objective: Objective,
    *,
    split_backward: bool | None,
) -> SchedulingProblem | None:
    """A Problem that no program of this work and memory takes less than."""
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
    if split_backward:  # a backward that is whole is an I with its W behind it
        I = np.minimum(I, B)
        W = np.minimum(W, B - I)
    steps = step if set(OPTIMIZER_STEP_OPS) & program.used_opcodes else 0 * step
    least = Costs(F=_to_floats(F), I=_to_floats(I), W=_to_floats(W), B=_to_floats(B),
        send=_to_floats(send),
                  step=_to_floats(steps))  # fmt: skip
    try:
        problem = make_problem(shape, least, objective=objective, split_backward=split_backward)
    except CostsError:  # they are all 0, or too large
        return None
    if sizes is None:
        return replace(problem, capacity=(float(peak_in_flight(program).max()),) * shape.ranks)
    ranks = compute_footprints(program, sizes)
    most = max(float(own.total_bytes.max()) for own in ranks)
    room = tuple(most - _constant_bytes(own) for own in ranks)
    saved, tape = (sizes.per_microbatch(name, shape).min(1) for name in ("saved", "deferred_wgrad"))
    # A whole backward keeps what was saved until its end, and never has a tape.
    return replace(
        problem, capacity=room, saved=_to_floats(saved), saved_and_deferred=_to_floats(saved),
        deferred_wgrad=_to_floats(np.minimum(tape, saved) if split_backward else 0 * tape),
    )  # fmt: skip


def _to_floats(values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(map(float, values))


def _constant_bytes(footprint: Footprint) -> float:
    """The bytes that a rank has all the time, whatever the program: none of slots."""
    return sum(
        size for name, (_, size) in footprint.static_memory.items() if name not in _SLOT_SIZES
    )
