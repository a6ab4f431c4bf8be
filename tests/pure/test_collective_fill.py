"""Tests of `fill_collective_waits`: computes run while segments wait for their collectives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedir import (
    Costs,
    PipelineShape,
    Program,
    Sizes,
    Timeline,
    check,
    compile,
    from_text,
    schedules,
    simulate,
    split_costs,
)
from schedir.errors import SchedirError, UsageError
from schedir.ir.isa.instructions import BACKWARD_WEIGHT_OPS
from tests.cases import each_value
from tests.mutants import built_in_schedules
from tests.oracle_threads import verdict
from tests.pure.test_stage_segments import shape_of

SEGMENTS = 5
SHARES = (0.2, 1, 0.2, 1, 0.2)


def split_stage_costs(shape: PipelineShape, sum: float = 0.6) -> Costs:
    """Return the costs of segments of a stage whose forward takes 2."""
    return split_costs(Costs(F=2, B=4, I=2, W=2, send=0.1, tp_reduce=sum), SEGMENTS, shape, SHARES)


def simulate_filled(
    schedule: Any, shape: PipelineShape, fill: str | None, **overrides: Any
) -> Timeline:
    costs = split_stage_costs(shape)
    program = compile(
        schedule,
        shape,
        tp=2,
        stage_segments=SEGMENTS,
        costs=costs,
        fill_collective_waits=fill,
        **overrides,
    )
    return simulate(program, costs)


@pytest.mark.parametrize(("schedule", "fill"), each_value(built_in_schedules(), ("W", "F", "all")))
def test_filled_built_in_schedules_keep_work_and_are_no_slower(schedule: Any, fill: str) -> None:
    """A filled program has the same instructions in another legal order, and is no slower.

    It reduces in the same order, and has no more forwards in flight.
    """
    shape = shape_of(schedule)
    try:
        plain = simulate_filled(schedule, shape, None)
    except SchedirError:
        pytest.skip("not for this shape")
    timeline = simulate_filled(schedule, shape, fill)
    program = timeline.program
    assert (
        check(program, "per_edge", blocking_hosts=True)
        and verdict(program, "per_edge").kind == "ok"
    )
    assert timeline.span <= plain.span * (1 + 1e-9)
    assert program.reduces_in_microbatch_order == plain.program.reduces_in_microbatch_order
    if program.has_backward:
        assert (timeline.peak_in_flight <= plain.peak_in_flight).all()
    for stream, plain_stream in zip(program.streams, plain.program.streams, strict=True):
        assert sorted(map(str, stream)) == sorted(map(str, plain_stream))


@pytest.mark.parametrize("schedule", [schedules.one_f_one_b, schedules.zb_h1])
def test_filling_with_all_computes_is_no_slower_than_with_some(schedule: Any) -> None:
    fill_spans = {
        fill: simulate_filled(schedule, PipelineShape(2, 2), fill).span
        for fill in ("W", "F", "all")
    }
    assert fill_spans["all"] <= min(fill_spans.values()) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("schedule", "shape", "frozen_stages", "costs"),
    [
        (
            schedules.interleaved, PipelineShape(1, 4, 2), 0,
            Costs(F=(0.5, 2, 3, 0.5), B=(1, 3, 2, 3), send=0.1, tp_reduce=1),
        ),
        (
            schedules.interleaved, PipelineShape(2, 4, 2), 2,
            Costs(F=(0.5, 3, 0.5, 2, 1, 2, 2, 0.5), B=(0.5, 0.5, 0.5, 0.5, 2, 1, 2, 0.5), send=0.1,
                  tp_reduce=2),
        ),
    ],
)  # fmt: skip
def test_filled_forwards_keep_peak_in_flight(
    schedule: Any, shape: PipelineShape, frozen_stages: int, costs: Costs
) -> None:
    """Forwards follow each other before a backward. Forwards of frozen stages save no memory."""
    peaks = []
    for fill in (None, "F", "all"):
        program = compile(
            schedule,
            shape,
            tp=2,
            stage_segments="f",
            frozen_stages=frozen_stages,
            costs=costs,
            fill_collective_waits=fill,
        )
        peaks.append(simulate(program, costs).peak_in_flight)
    assert (peaks[1] <= peaks[0]).all() and (peaks[2] <= peaks[0]).all()


def test_weight_gradients_overlap_gradient_sums() -> None:
    """Each W that fits runs while a gradient is summed, and all others keep their order."""
    shape = PipelineShape(1, 4)
    plain, filled = (simulate_filled(schedules.zb_h1, shape, fill) for fill in (None, "W"))
    assert filled.span < plain.span - 3

    def list_other_instructions(program: Program) -> list[str]:
        return [
            str(i)
            for i in program.streams[0]
            if i.op not in BACKWARD_WEIGHT_OPS and "tp_reduce" not in str(i)
        ]

    assert list_other_instructions(filled.program)[:8] == list_other_instructions(plain.program)[:8]


def test_fill_hides_all_but_first_and_last_sum() -> None:
    """All sums except the first and the last overlap with compute of other microbatches."""
    shape = PipelineShape(1, 8)
    plain = simulate_filled(schedules.gpipe, shape, None)
    assert plain.span == pytest.approx(8 * (2 + 4) + 8 * 4 * 0.6)
    assert simulate_filled(schedules.gpipe, shape, "all").span < 8 * (2 + 4) + 4 * 0.6 + 1e-9
    two_ranks = PipelineShape(2, 4, 2)
    assert simulate_filled(schedules.interleaved, two_ranks, "F").span < 0.95 * simulate_filled(
        schedules.interleaved, two_ranks, None
    ).span  # fmt: skip


def test_fill_keeps_memory_limit() -> None:
    """A memory limit allows more forwards in flight, but never more bytes than the limit."""
    shape, costs = PipelineShape(4, 8), split_stage_costs(PipelineShape(4, 8))
    sizes = split_costs(Sizes(activation=1.0, saved=100.0), SEGMENTS, shape, SHARES)
    spans = []
    for limit in (460.0, 900.0):
        program = compile(
            schedules.one_f_one_b, shape, tp=2, stage_segments=SEGMENTS, costs=costs,
            fill_collective_waits="F", sizes=sizes,
            memory_limit=limit, boundary="sharded",
        )  # fmt: skip
        timeline = simulate(program, costs, sizes=sizes)
        assert (timeline.peak_memory <= limit).all()
        spans.append(timeline.span)
    assert spans[1] < 0.95 * spans[0], "room for more lets more run"
    assert np.isclose(spans[0], simulate_filled(schedules.one_f_one_b, shape, None).span, rtol=0.03)


def test_invalid_fill_is_refused() -> None:
    def compile_filled(**overrides: Any) -> Any:
        shape = PipelineShape(2, 4)
        options: dict[str, Any] = {
            "tp": 2,
            "stage_segments": SEGMENTS,
            "costs": split_stage_costs(shape),
            "fill_collective_waits": "W",
        } | overrides
        return compile(schedules.zb_h1, shape, **options)

    with pytest.raises(UsageError, match="fill_collective_waits must be W, F or all, not 'X'"):
        compile_filled(fill_collective_waits="X")
    with pytest.raises(UsageError, match="needs costs"):
        compile_filled(costs=None)
    with pytest.raises(UsageError, match="but these collectives take no time"):
        compile_filled(costs=Costs(F=1, B=2))  # like the command line without costs
    with pytest.raises(UsageError, match="no stage has segments"):
        compile_filled(stage_segments=None)
    assert compile_filled(tp=1) == compile_filled(tp=1, fill_collective_waits=None), (
        "one rank meets nobody"
    )
    text = "F 0.0; F 1.0; B 1.0; F 0.1 & B 0.0; F 1.1; B 1.1; B 0.1"
    header = "stages_per_rank 2 placement 0,0 tp 2\nmeets g"
    pair = from_text(f"schedir 1\nprogram p\nranks 1 microbatches 2 {header}\nrank 0\n  {text}")
    with pytest.raises(UsageError, match="such pairs in stages without segments"):
        compile(pair, costs=Costs(tp_reduce=1), fill_collective_waits="all")
