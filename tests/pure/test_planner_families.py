"""Tests of the closed forms of families of schedules, against their programs."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir import Costs, PipelineShape, compile, schedules, simulate
from schedir.analysis.memory.footprint import peak_in_flight
from schedir.errors import UsageError
from schedir.ir.isa.instructions import Opcode
from schedir.planner import TransformerSpec
from schedir.planner.estimate.schedule_formulas import (
    SCHEDULE_FORMULAS,
    ScheduleFormulas,
    count_unshards,
    get_formulas,
)
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.transformer.layer_division import (
    compute_rank_shares,
    divide_evenly,
    get_layers_per_stage,
)

ALL_FORMULAS = [pytest.param(each, id=name) for name, each in SCHEDULE_FORMULAS.items()]


def make_shape(formulas: ScheduleFormulas, P: int, v: int, rounds: int) -> PipelineShape:
    """Return a shape with a few microbatches more than the family's minimum."""
    stages = {"one": 1, "two": 2, "many": v}[formulas.stages_per_rank]
    min_microbatches = int(formulas.min_microbatches(P))
    m = P * rounds if formulas.needs_multiple_of_ranks else max(min_microbatches, P) + rounds
    return PipelineShape(P, m, stages, "vee" if formulas.is_vee else "loop")


def simulate_span(formulas: ScheduleFormulas, shape: PipelineShape, **costs: float) -> float:
    program = compile(getattr(schedules, formulas.name), shape, costs=Costs(**costs))
    return simulate(program, Costs(**costs)).span


@pytest.mark.parametrize("each", ALL_FORMULAS)
@settings(max_examples=8)
@given(data=st.data())
def test_idle_time_and_messages_match_program(each: ScheduleFormulas, data: Any) -> None:
    P, v = data.draw(st.integers(2, 6)), data.draw(st.integers(2, 4))
    shape = make_shape(each, P, v, data.draw(st.integers(1, 3)))
    F, I, W = 1.0, data.draw(st.floats(1.0, 1.6)), data.draw(st.floats(0.4, 1.0))
    m, v = shape.microbatches, shape.stages_per_rank
    costs = {"F": F, "I": I, "W": W, "B": I + W}
    ideal_span = (P - 1) * float(each.wait_time(F, I, W)) + m * v * (F + I + W)
    assert simulate_span(each, shape, **costs) == pytest.approx(ideal_span)
    send = 0.02
    exposed_messages = (simulate_span(each, shape, **costs, send=send) - ideal_span) / send
    assert exposed_messages == pytest.approx(
        float(each.exposed_messages(P, v, m)), abs=P + 1 if each.has_split_backward else 2
    )


@pytest.mark.parametrize("each", ALL_FORMULAS)
@given(P=st.integers(1, 6), v=st.integers(2, 4), turns=st.integers(1, 3))
@settings(max_examples=8)
def test_live_activations_match_program(each: ScheduleFormulas, P: int, v: int, turns: int) -> None:
    shape = make_shape(each, P, v, turns)
    peaks = peak_in_flight(compile(getattr(schedules, each.name), shape))
    expected = [
        each.live_activations(P, shape.stages_per_rank, shape.microbatches, r) for r in range(P)
    ]
    assert peaks.tolist() == expected


@given(P=st.integers(1, 4), v=st.integers(1, 6), groups=st.integers(1, 4))
@settings(max_examples=12)
def test_unshard_count_matches_program(P: int, v: int, groups: int) -> None:
    for name in ("looped_bfs", "interleaved", "interleaved_zb"):
        program = compile(getattr(schedules, name), PipelineShape(P, P * groups, v), dp=2, zero=3)
        counts = {int((stream.op == Opcode.Unshard).sum()) for stream in program.streams}
        assert counts == {int(count_unshards(name, P, v, P * groups))}, (name, P, v, groups)


@given(layers=st.integers(1, 60), stages=st.integers(1, 12))
def test_layers_divide_evenly(layers: int, stages: int) -> None:
    layers_by_stage = divide_evenly(layers, stages)
    assert sum(layers_by_stage) == layers
    assert len(layers_by_stage) == stages
    assert max(layers_by_stage) - min(layers_by_stage) <= 1
    if stages > 2 and layers % stages <= stages - 2:
        assert layers_by_stage[0] == layers_by_stage[-1] == min(layers_by_stage)


def test_rank_shares_have_each_layer_once() -> None:
    model = TransformerSpec(layers=10, hidden=8, heads=2, vocab=16, sequence=4)
    choice = ParallelPlan(
        pp=2, stages_per_rank=2, microbatches=4, schedule="zb_v", layers_per_stage=(1, 2, 3, 4)
    )
    assert [share[2:] for share in compute_rank_shares(model, choice)] == [
        (5, True, True),
        (5, False, False),
    ]
    choice = ParallelPlan(pp=4, microbatches=4, layers_per_stage=(2, 3, 3, 2))
    assert [share[:3] for share in compute_rank_shares(model, choice)] == [
        (1, 0, 2),
        (2, 1, 3),
        (1, 3, 2),
    ]


def test_wrong_division_or_schedule_is_refused() -> None:
    model = TransformerSpec(layers=10, hidden=8, heads=2, vocab=16, sequence=4)
    with pytest.raises(
        UsageError,
        match=r"10 layers cannot be divided evenly among pp 4 x stages_per_rank 1 = 4 stages",
    ):
        get_layers_per_stage(model, ParallelPlan(pp=4))
    with pytest.raises(UsageError, match="has 9 layers in 2 stages: it must have 10 layers in"):
        get_layers_per_stage(model, ParallelPlan(pp=2, layers_per_stage=(4, 5)))
    with pytest.raises(UsageError, match="did you mean 'interleaved'"):
        get_formulas("interleave")
