"""Compute how much shorter than a given program a schedule with the same memory can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.memory.footprint import Footprint, held, peak_in_flight
from schedir.errors import CostsError
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    FORWARD,
    ROWS,
    SENDS,
    SLOTTED,
    STEPS,
    Value,
)
from schedir.ir.program import Program
from schedir.schedule_search.bounds.lower_bound import bound_of
from schedir.schedule_search.problem import Objective, SchedulingProblem, problem_of
from schedir.schedule_search.search_results import LowerBound

_KNOWN: Final = {FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT}
# What holds, moves or frees what is kept of a microbatch in a way of its own, as offloads do.
_OTHER: Final = {
    row.op for row in ROWS
    if row.op not in _KNOWN
    and (
        row.op in COMPUTE
        or {Value.SAVED, Value.DEFERRED_WGRAD} & {*row.needs, *row.gives, *row.frees}
    )
}  # fmt: skip
_SLOTS: Final = {kind.name.lower() for kind in SLOTTED}  # other programs may have fewer


def bound_of_program(
    program: Program,
    costs: Costs | None = None,
    sizes: Sizes | None = None,
    *,
    objective: Objective = "span",
    split: bool | None = None,
) -> LowerBound | None:
    """Below what no program of the same work can be that needs no more memory than this one.

    Its memory is, with sizes, the most bytes that a rank has, messages and all, as a prediction
    tells it; else the most microbatches in flight on a rank.  Each rank of the other program may
    have as much, and use for backwards what this one has for messages.  `split` says whether that
    one may split backwards in I and W, also some of them only; by default it may if this one does.
    In a program that does not, F and B may still be in any order.

    Costs and sizes that differ between microbatches are taken as the least of each stage, and a
    backward as what it takes whole or split, whichever is less: the bound is lower then, but holds.

    None where nothing is known: of a program with several holders of a stage, updates or segments,
    with frozen stages, without backwards, with instructions that run forwards again or keep what
    they saved elsewhere, or with `Costs.FB` that are less than a forward and a backward.
    """
    costs = Costs() if costs is None else costs
    shape = program.shape
    if (
        shape.rows > 1
        or shape.optimizer_steps > 1
        or shape.sequence_chunks > 1
        or program.frozen_stages
    ):
        return None
    if not program.trains or program.ops & _OTHER:
        return None
    if costs.pairs_save(shape):
        return None
    problem = _relaxed(program, costs, sizes, objective, split=split)
    return None if problem is None else bound_of(problem)


def _relaxed(
    program: Program, costs: Costs, sizes: Sizes | None, objective: Objective, *, split: bool | None
) -> SchedulingProblem | None:
    """A Problem that no program of this work and memory takes less than."""
    shape = program.shape
    if split is None:
        split = not program.ops.isdisjoint({BACKWARD_INPUT, BACKWARD_WEIGHT})
    F, I, W, B, send, step = (
        costs.of(op, shape).min(1)
        for op in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, BACKWARD, SENDS[0], STEPS[0])
    )
    if split:  # a backward that is whole is an I with its W behind it
        I = np.minimum(I, B)
        W = np.minimum(W, B - I)
    steps = step if set(STEPS) & program.ops else 0 * step
    least = Costs(F=_plain(F), I=_plain(I), W=_plain(W), B=_plain(B), send=_plain(send),
                  step=_plain(steps))  # fmt: skip
    try:
        problem = problem_of(shape, least, objective=objective, split=split)
    except CostsError:  # they are all 0, or too large
        return None
    if sizes is None:
        return replace(problem, room=(float(peak_in_flight(program).max()),) * shape.ranks)
    ranks = held(program, sizes)
    most = max(float(own.bytes.max()) for own in ranks)
    room = tuple(most - _always(own) for own in ranks)
    saved, tape = (sizes.each(name, shape).min(1) for name in ("saved", "deferred_wgrad"))
    # A whole backward keeps what was saved until its end, and never has a tape.
    return replace(
        problem, room=room, saved=_plain(saved), both=_plain(saved),
        tape=_plain(np.minimum(tape, saved) if split else 0 * tape),
    )  # fmt: skip


def _plain(each: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(map(float, each))


def _always(own: Footprint) -> float:
    """The bytes that a rank has all the time, whatever the program: none of slots."""
    return sum(size for name, (_, size) in own.fixed.items() if name not in _SLOTS)
