"""Tests that list scheduling gives the known schedules, and no program that hangs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir import greedy_schedule
from schedir.analysis.memory.footprint import peak_in_flight
from schedir.compiler.compile import lower
from schedir.errors import ScheduleError
from schedir.ir.cost.costs import Costs
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.predict.simulate import simulate
from schedir.schedules import gpipe, one_f_one_b
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.testing import shapes
from schedir.verify.check import check
from tests.strategies import costs


@pytest.mark.parametrize("priced", [Costs(), Costs(F=3, B=5), Costs(F=2, B=1)])
@pytest.mark.parametrize("P", range(1, 7))
def test_1f1b_and_gpipe_come_out(P: int, priced: Costs) -> None:
    for m in (1, P - 1 or 1, P, 2 * P + 1):
        shape = PipelineShape(P, m)
        found = greedy_schedule(shape, "BF", lambda rank: P - rank, priced)
        assert found.streams == expand_schedule(one_f_one_b, shape).streams
        found = greedy_schedule(shape, "FB", lambda rank: 99, priced)
        assert found.streams == expand_schedule(gpipe, shape).streams


def test_time_decides() -> None:
    """A rank that waits for its next forward runs a backward meanwhile, whatever its preference."""
    shape = PipelineShape(2, 4)
    slow = Costs(F=(3, 1), B=2)
    found = greedy_schedule(shape, "FB", lambda rank: 4, slow)
    assert found.streams != expand_schedule(gpipe, shape).streams
    assert simulate(found, slow).span < simulate(expand_schedule(gpipe, shape), slow).span


@settings(max_examples=150)
@given(st.data())
def test_whatever_comes_out_is_legal(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    priced = data.draw(costs(shape))
    prefer = data.draw(st.sampled_from(["BF", "FB", "FIW", "FWI", "IFW", "IWF", "WFI", "WIF"]))
    limits = [data.draw(st.integers(len(own), len(own) + 4)) for own in shape.stages_on_rank]
    found = greedy_schedule(shape, prefer, limits.__getitem__, priced)
    check(lower(found, priced), "blocking_serial")
    assert (peak_in_flight(found) <= limits).all()
    again = greedy_schedule(shape, prefer, limits.__getitem__, priced)
    assert found == again


def test_weights_fill_what_1f1b_leaves() -> None:
    priced = Costs(F=(1, 3, 2, 1), I=2, W=1, send=0.5)
    filled = simulate(greedy_schedule(PipelineShape(4, 9), "IFW", lambda rank: 4, priced), priced)
    assert filled.span < simulate(expand_schedule(one_f_one_b, PipelineShape(4, 9)), priced).span


@pytest.mark.parametrize("prefer", ["", "F", "BB", "FBW", "FI", "fb"])
def test_bad_preferences(prefer: str) -> None:
    with pytest.raises(ScheduleError):
        greedy_schedule(PipelineShape(2, 2), prefer, lambda rank: 2)


def test_too_little_room() -> None:
    with pytest.raises(ScheduleError, match="rank 1"):
        greedy_schedule(PipelineShape(2, 2, 2), "FB", lambda rank: 2 - rank)


def test_room_may_be_a_number() -> None:
    assert greedy_schedule(PipelineShape(3, 5), "BF", 2) == greedy_schedule(
        PipelineShape(3, 5), "BF", lambda rank: 2
    )
