"""Shard: when the weights of a stage are whole, and that no more are than is said."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import schedules
from schedir.analysis.models import MODELS
from schedir.analysis.residency import stays
from schedir.analysis.slots import KINDS, minimum_slots
from schedir.compiler.compile import compile
from schedir.ir.ops import Opcode, Token
from schedir.ir.plan import Plan
from schedir.ir.program import Program
from schedir.ir.text import parse, show
from schedir.schedules.words import Schedule
from schedir.testing import plans
from schedir.testing.strategies import random_draft, ties
from schedir.verify.check import check

FULL = KINDS.index(Token.FULL)


def gathers(program: Program) -> list[int]:
    """How often each rank makes a stage whole."""
    return [int((stream.op == Opcode.Unshard).sum()) for stream in program.streams]


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    ("schedule", "plan", "fewest"),
    [
        (schedules.one_f_one_b, Plan(4, 8), 1),
        (schedules.looped_bfs, Plan(4, 16, 4), 6),
        (schedules.looped_bfs, Plan(1, 4, 6), 10),
        (schedules.interleaved, Plan(4, 16, 4), 18),
        (schedules.zb_v, Plan(4, 8, 2, "vee"), 2),
        (schedules.dualpipe, Plan(4, 8, 1, "mirror"), 2),
        (schedules.dualpipe_v, Plan(4, 8, 2, "vee"), 2),
    ],
)
def test_stages_are_whole_where_they_are_used(
    schedule: Schedule, plan: Plan, fewest: int, zero: int
) -> None:
    program = compile(schedule, plan, dp=2, zero=zero, clip=True)
    own = [len(stages) for stages in plan.stages_of]
    for model in MODELS:
        check(program, model, blocks=True)
    if zero < 3:
        assert gathers(program) == own and not program.slots
    else:
        room = [min(stages, 2) for stages in own]
        assert min(gathers(program)) >= fewest
        assert minimum_slots(program)[:, FULL].tolist() == [s.full for s in program.slots] == room


@given(plans(), st.integers(0, 2**32 - 1), st.data())
def test_every_draft_is_lowered_for_every_level(plan: Plan, seed: int, data: st.DataObject) -> None:
    zero = data.draw(st.integers(1, 3))
    frozen, tied = data.draw(st.integers(0, plan.stages - 1)), data.draw(ties(plan))
    if any(stages[0] < frozen <= stages[-1] for stages in tied):
        frozen = 0
    model, overlap = data.draw(st.sampled_from(MODELS)), data.draw(st.booleans())
    program = compile(
        random_draft(plan, random.Random(seed)),
        model=model,
        zero=zero,
        reduce=data.draw(st.sampled_from(["end", "turn"][: max(1, zero)])) if zero > 1 else "end",
        frozen=frozen,
        tied=tied,
        clip=data.draw(st.booleans()),
        dp=data.draw(st.integers(1, 3)),
        tp=data.draw(st.integers(1, 2)),
        slots=data.draw(st.sampled_from([None, "fewest", "enough"])),
        overlap=overlap,
        recompute=data.draw(st.sampled_from([None, "all"])),
    )
    for each in (model,) if overlap else MODELS:
        check(program, each, blocks=True)
    assert parse(show(program)) == program
    if zero == 3:
        full = [slots.full for slots in program.slots]
        assert (minimum_slots(program)[:, FULL] == full).all()


@given(st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=2), max_size=9), st.integers(2, 5))
def test_no_more_are_whole_than_there_is_room_for(uses: list[set[int]], active: int) -> None:
    step = np.array([k for k, own in enumerate(uses) for _ in own], np.int64)
    stage = np.array([one for own in uses for one in sorted(own)], np.int64)
    for ahead in range(4):
        found = stays(step, stage, active, ahead)
        for k, own in enumerate(uses):
            whole = [stage[a] for a, b in found if step[a] <= k <= step[b]]
            assert own <= {*whole} and len(whole) == len({*whole}) <= active
