"""Hypothesis strategies: those of `schedir.testing`, and more that only these tests need."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import strategies as st

from schedir.analysis.memory.buffer_slots import count_min_slots
from schedir.ir.cost.costs import Costs
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program, SlotCounts
from schedir.testing import compute_programs as compute_programs
from schedir.testing import shapes as shapes


@st.composite
def costs(draw: st.DrawFn, shape: PipelineShape, send: bool = True) -> Costs:
    """Draw integer costs, so that sums are exact in floating point. Some costs are zero."""

    def per_stage() -> tuple[float, ...]:
        one = st.integers(0, 5).map(float)
        return tuple(draw(st.lists(one, min_size=shape.stages, max_size=shape.stages)))

    return Costs(
        F=per_stage(), I=per_stage(), W=per_stage(), B=per_stage(),
        send=draw(st.integers(0, 3)) if send else 0,
    )  # fmt: skip


def with_slots(program: Program, rng: random.Random) -> Program:
    """Return a program with few slots on each rank, or every third time with one per value."""
    if not rng.randrange(3):
        return replace(program, slots=())
    few = count_min_slots(program)[:, :4].tolist()
    more = rng.randrange(1, 4)
    slots = tuple(SlotCounts(*(n + rng.randrange(more) for n in row)) for row in few)
    return replace(program, slots=slots)
