"""Calibration: costs that were simulated come back, and predict the same run."""

from __future__ import annotations

import numpy as np
import pytest

import schedir
from schedir import Costs, Plan
from schedir.calibrate import calibrate
from schedir.schedules import gpipe, interleaved
from schedir.words import B, F, I, W, Word


def split(r: int, P: int, m: int) -> Word:
    return m * F + m * (I + W)


def whole(r: int, P: int, m: int) -> Word:
    return m * (F + B)


GIVEN = Costs(
    F=(1, 2, 3, 4), B=(2, 4, 6, 8), send=0.25, step=3, reduce_grads=0.5, scatter=0.1, gather=0.2
)  # fmt: skip


def test_simulated_costs_come_back() -> None:
    program = schedir.compile(interleaved, Plan(2, 4, 2), tp=2, clip=True, model="edge")
    timeline = schedir.simulate(program, GIVEN, model="edge")
    found = calibrate(timeline)
    for name in ("F", "B", "step", "reduce_grads", "scatter", "gather", "reduce_norm"):
        assert np.allclose(getattr(found, name), getattr(GIVEN, name)), name
    again = schedir.simulate(program, found, model="edge")
    assert again.span == pytest.approx(timeline.span)
    assert again.bubble == pytest.approx(timeline.bubble)


def test_what_is_not_there_costs_nothing() -> None:
    plan = Plan(4, 4)
    found = calibrate(schedir.simulate(schedir.compile(split, plan), Costs(I=2, W=3)))
    assert found.I == (2.0,) * 4 and found.W == (3.0,) * 4
    assert found.B == found.gather == found.step == 0.0
    found = calibrate(schedir.simulate(schedir.compile(gpipe, plan), Costs(B=5)))
    assert found.B == (5.0,) * 4 and found.I == found.W == 0.0


def test_a_pipeline_of_one() -> None:
    found = calibrate(schedir.simulate(schedir.compile(whole, Plan(1, 2)), Costs(F=2)))
    assert found.F == (2.0,) and found.send == 0.0


def test_stages_may_differ_in_how_they_run_backward() -> None:
    def mixed(r: int, P: int, m: int) -> Word:
        return m * F + (m * (I + W) if r else m * B)

    program = schedir.compile(mixed, Plan(2, 3))
    found = calibrate(schedir.simulate(program, Costs(B=5, I=2, W=3)))
    assert (found.B, found.I, found.W) == ((5.0, 0.0), (0.0, 2.0), (0.0, 3.0))
