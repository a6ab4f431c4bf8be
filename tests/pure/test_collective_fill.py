"""Tests of computes that fill the waits of segments for sums, and of what they must not cost."""

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
from schedir.ir.pipeline.placement import find_named_placement
from tests.mutants import known
from tests.oracle_threads import verdict

PIECES = 5
SHARES = (0.2, 1, 0.2, 1, 0.2)


def costs_of(shape: PipelineShape, sum: float = 0.6) -> Costs:
    """Return the costs of segments of a stage whose forward takes 2."""
    return split_costs(Costs(F=2, B=4, I=2, W=2, send=0.1, tp_reduce=sum), PIECES, shape, SHARES)


def made(schedule: Any, shape: PipelineShape, fill: str | None, **more: Any) -> Timeline:
    costs = costs_of(shape)
    program = compile(
        schedule,
        shape,
        tp=2,
        stage_segments=PIECES,
        costs=costs,
        fill_collective_waits=fill,
        **more,
    )
    return simulate(program, costs)


@pytest.mark.parametrize("schedule", known(), ids=lambda schedule: schedule.__name__)
def test_whole_zoo_filled(schedule: Any) -> None:
    """A filled program has the same work in another legal order, which takes no longer.

    It sums in the same order, and has no more forwards in flight.
    """
    placement, v = getattr(schedule, "placed", ("loop", None))
    shape = PipelineShape(2, 4, v or find_named_placement(placement).stages_per_rank, placement)
    try:
        plain = made(schedule, shape, None)
    except SchedirError:
        pytest.skip("not for this shape")
    spans = {}
    for fill in ("W", "F", "all"):
        timeline = made(schedule, shape, fill)
        program, spans[fill] = timeline.program, timeline.span
        assert (
            check(program, "per_edge", blocking_hosts=True)
            and verdict(program, "per_edge").kind == "ok"
        )
        assert timeline.span <= plain.span * (1 + 1e-9)
        assert program.reduces_in_microbatch_order == plain.program.reduces_in_microbatch_order
        if program.has_backward:
            assert (timeline.peak_in_flight <= plain.peak_in_flight).all()
        for own, was in zip(program.streams, plain.program.streams, strict=True):
            assert sorted(map(str, own)) == sorted(map(str, was))
    assert spans["all"] <= min(spans.values()) * (1 + 1e-9)


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
def test_several_that_fill_one_wait_hold_no_more(
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


def test_weight_gradients_run_under_sums() -> None:
    """Each W that fits runs while a gradient is summed, and all others keep their order."""
    shape = PipelineShape(1, 4)
    plain, filled = (made(schedules.zb_h1, shape, fill) for fill in (None, "W"))
    assert filled.span < plain.span - 3

    def others(program: Program) -> list[str]:
        return [
            str(i)
            for i in program.streams[0]
            if i.op not in BACKWARD_WEIGHT_OPS and "tp_reduce" not in str(i)
        ]

    assert others(filled.program)[:8] == others(plain.program)[:8]


def test_what_it_wins() -> None:
    """All sums except the first and the last overlap with compute of other microbatches."""
    shape = PipelineShape(1, 8)
    plain = made(schedules.gpipe, shape, None)
    assert plain.span == pytest.approx(8 * (2 + 4) + 8 * 4 * 0.6)
    assert made(schedules.gpipe, shape, "all").span < 8 * (2 + 4) + 4 * 0.6 + 1e-9
    two = PipelineShape(4, 8, 2)
    assert made(schedules.interleaved, two, "F").span < 0.95 * made(
        schedules.interleaved, two, None
    ).span  # fmt: skip


def test_within_a_limit() -> None:
    """A memory limit allows more forwards in flight, but never more bytes than the limit."""
    shape, costs = PipelineShape(4, 16), costs_of(PipelineShape(4, 16))
    sizes = split_costs(Sizes(activation=1.0, saved=100.0), PIECES, shape, SHARES)
    spans = []
    for limit in (460.0, 1800.0):
        program = compile(
            schedules.one_f_one_b, shape, tp=2, stage_segments=PIECES, costs=costs,
            fill_collective_waits="all", sizes=sizes,
            memory_limit=limit, boundary="sharded",
        )  # fmt: skip
        timeline = simulate(program, costs, sizes=sizes)
        assert (timeline.peak_memory <= limit).all()
        spans.append(timeline.span)
    assert spans[1] < 0.95 * spans[0], "room for more lets more run"
    assert np.isclose(spans[0], made(schedules.one_f_one_b, shape, None).span, rtol=0.03)


def test_refusals() -> None:
    def of(**more: Any) -> Any:
        shape = PipelineShape(2, 4)
        how: dict[str, Any] = {
            "tp": 2,
            "stage_segments": PIECES,
            "costs": costs_of(shape),
            "fill_collective_waits": "W",
        } | more
        return compile(schedules.zb_h1, shape, **how)

    with pytest.raises(UsageError, match="fill_collective_waits must be W, F or all, not 'X'"):
        of(fill_collective_waits="X")
    with pytest.raises(UsageError, match="needs costs"):
        of(costs=None)
    with pytest.raises(UsageError, match="but these collectives take no time"):
        of(costs=Costs(F=1, B=2))  # like the command line without costs
    with pytest.raises(UsageError, match="no stage has segments"):
        of(stage_segments=None)
    assert of(tp=1) == of(tp=1, fill_collective_waits=None), "one rank meets nobody"
    text = "F 0.0; F 1.0; B 1.0; F 0.1 & B 0.0; F 1.1; B 1.1; B 0.1"
    header = "stages_per_rank 2 placement 0,0 tp 2\nmeets g"
    pair = from_text(f"schedir 1\nprogram p\nranks 1 microbatches 2 {header}\nrank 0\n  {text}")
    with pytest.raises(UsageError, match="such pairs in stages without segments"):
        compile(pair, costs=Costs(tp_reduce=1), fill_collective_waits="all")
