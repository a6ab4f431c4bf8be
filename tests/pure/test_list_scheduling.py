"""Tests that list scheduling gives known schedules, and only programs that finish."""

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
def test_greedy_schedule_gives_1f1b_and_gpipe(P: int, priced: Costs) -> None:
    for m in (1, P - 1 or 1, P, 2 * P + 1):
        shape = PipelineShape(P, m)
        draft = greedy_schedule(shape, "BF", lambda rank: P - rank, priced)
        assert draft.streams == expand_schedule(one_f_one_b, shape).streams
        draft = greedy_schedule(shape, "FB", lambda rank: 99, priced)
        assert draft.streams == expand_schedule(gpipe, shape).streams


def test_greedy_schedule_depends_on_costs() -> None:
    """A rank that waits for a forward runs a backward, even if it prefers forwards."""
    shape = PipelineShape(2, 4)
    slow = Costs(F=(3, 1), B=2)
    draft = greedy_schedule(shape, "FB", lambda rank: 4, slow)
    assert draft.streams != expand_schedule(gpipe, shape).streams
    assert simulate(draft, slow).span < simulate(expand_schedule(gpipe, shape), slow).span


@settings(max_examples=150)
@given(st.data())
def test_greedy_schedules_pass_check(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    drawn_costs = data.draw(costs(shape))
    prefer = data.draw(st.sampled_from(["BF", "FB", "FIW", "FWI", "IFW", "IWF", "WFI", "WIF"]))
    limits = [
        data.draw(st.integers(len(stages), len(stages) + 4)) for stages in shape.stages_on_rank
    ]
    draft = greedy_schedule(shape, prefer, limits.__getitem__, drawn_costs)
    check(lower(draft, drawn_costs), "blocking_serial")
    assert (peak_in_flight(draft) <= limits).all()
    second_draft = greedy_schedule(shape, prefer, limits.__getitem__, drawn_costs)
    assert draft == second_draft


def test_weight_gradients_fill_idle_time_of_1f1b() -> None:
    uneven = Costs(F=(1, 3, 2, 1), I=2, W=1, send=0.5)
    filled = simulate(greedy_schedule(PipelineShape(4, 9), "IFW", lambda rank: 4, uneven), uneven)
    assert filled.span < simulate(expand_schedule(one_f_one_b, PipelineShape(4, 9)), uneven).span


@pytest.mark.parametrize("prefer", ["", "F", "BB", "FBW", "FI", "fb"])
def test_invalid_preference_is_refused(prefer: str) -> None:
    with pytest.raises(ScheduleError):
        greedy_schedule(PipelineShape(2, 2), prefer, lambda rank: 2)


def test_too_small_limit_is_refused() -> None:
    with pytest.raises(ScheduleError, match="rank 1"):
        greedy_schedule(PipelineShape(2, 2, 2), "FB", lambda rank: 2 - rank)


def test_limit_may_be_number() -> None:
    assert greedy_schedule(PipelineShape(3, 5), "BF", 2) == greedy_schedule(
        PipelineShape(3, 5), "BF", lambda rank: 2
    )
