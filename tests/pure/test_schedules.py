"""Tests of the exact closed forms of bubble and memory."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir.analysis.progress_models import ProgressModel
from schedir.compiler.compile import compile
from schedir.errors import ScheduleError
from schedir.ir.cost.costs import Costs
from schedir.ir.isa.instructions import Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.predict.simulate import simulate
from schedir.schedules import gpipe, interleaved, one_f_one_b
from schedir.schedules.schedule_algebra import Schedule
from tests.cases import each_value

MODELS: tuple[ProgressModel, ...] = ("per_edge", "per_pair", "per_device")
UNIT = Costs(F=1, B=2)


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_bubble_of_gpipe_and_1f1b(schedule: Schedule) -> None:
    for ranks, m, priced in each_value((1, 2, 5), (1, 3, 11), (UNIT, Costs(F=3, B=5))):
        program = compile(schedule, PipelineShape(ranks, m), costs=priced)
        for model in MODELS:
            timeline = simulate(program, priced, progress_model=model)
            assert timeline.bubble_over_ideal == pytest.approx((ranks - 1) / m, abs=1e-12)
            f, b = (
                priced.for_opcode(op, PipelineShape(1, 1)).item()
                for op in (Opcode.Forward, Opcode.Backward)
            )
            assert timeline.span == (m + ranks - 1) * (f + b)


@given(st.integers(1, 8), st.integers(1, 24))
def test_activations_in_flight(ranks: int, m: int) -> None:
    shape = PipelineShape(ranks, m)
    peak = simulate(compile(gpipe, shape)).peak_in_flight
    assert peak.tolist() == [m] * ranks
    peak = simulate(compile(one_f_one_b, shape)).peak_in_flight
    assert peak.tolist() == [min(ranks - r, m) for r in range(ranks)]


@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 4))
def test_activations_in_flight_of_interleaved(ranks: int, v: int, groups: int) -> None:
    m = groups * ranks
    peak = simulate(compile(interleaved, PipelineShape(ranks, m, v))).peak_in_flight
    bound = [2 * (ranks - 1 - r) + (v - 1) * ranks + 1 for r in range(ranks)]
    assert peak.tolist() == [min(b, v * m) for b in bound]


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 20))
def test_interleaved_takes_any_number_of_microbatches(ranks: int, v: int, m: int) -> None:
    program = compile(interleaved, PipelineShape(ranks, m, v), costs=UNIT)
    timeline = simulate(program, UNIT)
    # Uneven groups cost no time. The warmup is that of P ranks, or less if m is smaller.
    assert timeline.span == 3 * (v * max(m, ranks) + min(m, ranks) - 1)
    assert program.reduces_in_microbatch_order


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 20))
def test_group_size_has_megatron_limits(ranks: int, m: int, group: int) -> None:
    schedule, shape = partial(interleaved, group=group), PipelineShape(ranks, m, 2)
    if ranks <= group <= m and (m % group == 0 or m % group >= ranks):
        compile(schedule, shape)
    else:
        with pytest.raises(ScheduleError):
            compile(schedule, shape)


def test_group_size_trades_memory_for_slack() -> None:
    """The peaks of rank 0 for groups of 4, 6 and 8 are those of FIELD, for p=4, v=2, m=16."""
    peaks = [
        int(
            simulate(
                compile(partial(interleaved, group=g), PipelineShape(4, 16, 2))
            ).peak_in_flight[0]
        )
        for g in (4, 6, 8)
    ]
    assert peaks == [11, 13, 15]
