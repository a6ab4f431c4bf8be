"""Tests of advice on ZeRO, where each change is a program that is compiled and simulated."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import (
    Costs,
    PipelineShape,
    Sizes,
    Timeline,
    compile,
    expand_schedule,
    schedules,
    simulate,
)
from schedir.compiler.relower import Lowering
from schedir.predict.calibrate import adjust_for_zero
from schedir.predict.what_if import SimulatedChange, advise
from tests.commands import run_command

SHAPE = PipelineShape(2, 6, 3)
COSTS = Costs(F=1, B=2, unshard=0.5, reduce_scatter=0.5, reduce_grads=1, step=2)
SIZES = Sizes(activation=1e7, saved=1e8, params=1e9, grads=1e9, optimizer=6e9)


def simulate_zero(zero: int, sizes: Sizes | None = SIZES, dp: int = 4, **options: Any) -> Timeline:
    program = compile(schedules.interleaved, SHAPE, dp=dp, zero=zero, **options)
    return simulate(program, COSTS, sizes=sizes)


ZERO_CHANGES = """\
now: span 70, bubble 20.0%, 11.3 GB on the fullest device; changes that take less time or \
memory, by simulation:
   -14.3%  zero=1, reduce_scatter_at="update_end": span 60, bubble 6.7%, \
11.8 GB on the fullest device
   -11.4%  looped_bfs, breadth-first: span 62, bubble 9.7%, 10.8 GB on the fullest device
    +0.0%  reduce_scatter_at="each_backward": span 70, bubble 20.0%, 10.3 GB on the fullest device
"""


@pytest.fixture(scope="module")
def single_unshard_run() -> Timeline:
    return simulate_zero(3, unsharded_stages=1)


@pytest.fixture(scope="module")
def single_unshard_changes(single_unshard_run: Timeline) -> list[SimulatedChange]:
    return advise(single_unshard_run, COSTS).memory_changes


def get_peak(change: SimulatedChange) -> float:
    return change.memory["device"]


@pytest.mark.parametrize("zero", range(4))
def test_changes_are_simulated_and_undominated(zero: int) -> None:
    run = simulate_zero(zero)
    advice = advise(run, COSTS)
    current, held = advice.current, advice.memory_changes
    assert current.run.span == run.span and get_peak(current) == run.peak_memory.max()
    assert held
    for change in held:
        program = change.run.program
        assert program.proofs and (program.zero, program.reduce_scatter_at) in {
            (0, "update_end"), (1, "update_end"), (2, "update_end"), (2, "each_backward"),
            (3, "update_end"), (3, "each_backward"),
        }  # fmt: skip
        resimulated = simulate(
            program, adjust_for_zero(COSTS, run.program, program.zero, SIZES), sizes=SIZES
        )
        assert (resimulated.span, resimulated.peak_memory.max()) == (
            change.run.span,
            get_peak(change),
        )
        assert change.run.span < current.run.span or get_peak(change) < get_peak(current)
        assert not any(
            other_change.run.span < change.run.span and get_peak(other_change) <= get_peak(change)
            for other_change in held
        )


def test_advice_stays_within_memory_limit(
    single_unshard_run: Timeline, single_unshard_changes: list[SimulatedChange]
) -> None:
    """Advice that needs more memory appears only within the limit."""
    run, changes = single_unshard_run, single_unshard_changes
    high = 1.1 * max(map(get_peak, changes))
    advice = advise(run, COSTS, memory_limit=high)
    assert advice.fits_memory
    assert [change.description for change in advice.memory_changes] == [
        change.description for change in changes
    ]
    fitting_changes = advise(run, COSTS, memory_limit=run.peak_memory.max()).memory_changes
    assert all(get_peak(change) <= run.peak_memory.max() for change in fitting_changes)
    assert len(fitting_changes) < len(changes)


def test_advice_needs_replicas_and_sizes() -> None:
    def list_zero_changes(timeline: Timeline, costs: Costs = COSTS) -> list[str]:
        return [
            change.description
            for change in advise(timeline, costs).memory_changes
            if "zero" in change.description
        ]

    assert list_zero_changes(simulate_zero(3, dp=1)) == []
    assert list_zero_changes(simulate_zero(0, sizes=None)) == []
    assert list_zero_changes(simulate_zero(0, sizes=Sizes(model_states=1e9))) == []
    assert list_zero_changes(simulate_zero(3, sizes=None), replace(COSTS, unshard=0)) == []


def test_advice_without_sizes_compares_time() -> None:
    advice = advise(simulate_zero(3, sizes=None, unsharded_stages=1), COSTS)
    assert advice.memory_changes
    assert all(change.run.span < advice.baseline.span for change in advice.memory_changes)
    assert not any("GB" in change.describe() for change in advice.memory_changes)


# ---------------------------------------------------------------- costs of another level


@given(st.floats(0.1, 100), st.floats(0, 100), st.sampled_from([2, 3, 64]), st.integers(1, 3))
def test_all_reduce_costs_reduce_scatter_and_gather(
    whole: float, step: float, dp: int, zero: int
) -> None:
    """An all-reduce costs a reduce-scatter and a gather (arXiv 1910.02054, section 7.1)."""
    program = compile(schedules.gpipe, PipelineShape(2, 2), dp=dp)
    plain = Costs(F=1, B=2, reduce_grads=whole, step=step)
    costs = adjust_for_zero(plain, program, zero)
    assert costs.reduce_scatter == costs.unshard == pytest.approx(whole / 2)
    assert costs.step == pytest.approx(step / dp)
    without_all_reduce = replace(costs, reduce_grads=None)
    all_reduce_costs = adjust_for_zero(
        without_all_reduce, compile(schedules.gpipe, PipelineShape(2, 2), dp=dp, zero=zero), 0
    )
    assert all_reduce_costs.reduce_grads == pytest.approx(whole)
    assert all_reduce_costs.step == pytest.approx(step)
    assert adjust_for_zero(plain, program, 0) == plain


def test_given_costs_stay_and_others_follow_bytes() -> None:
    program = compile(schedules.gpipe, PipelineShape(2, 2), dp=2)
    plain = Costs(F=1, B=2, reduce_grads=(4, 8), reduce_scatter=3)
    costs = adjust_for_zero(plain, program, 1, Sizes(params=(1e9, 2e9), grads=4e9))
    assert costs.reduce_scatter == 3 and costs.unshard == (0.5, 2.0)


# ---------------------------------------------------------------- other plans and schedules


def test_unsharded_stages_are_limited_to_stages_of_rank() -> None:
    """This run unshards two stages at once. A schedule with one stage per rank unshards one."""
    program = compile(schedules.interleaved, SHAPE, dp=2, zero=3, unsharded_stages=2)
    lowering = Lowering(program, "per_device")
    assert lowering.options["unsharded_stages"] == 2
    recompiled = lowering.compile_draft(
        expand_schedule(schedules.one_f_one_b, PipelineShape(2, 6)), COSTS
    )
    assert recompiled.zero == 3 and [slots.unsharded_params for slots in recompiled.slots] == [1, 1]


@pytest.mark.parametrize("command", ["recommend", "compare one_f_one_b interleaved"])
def test_schedules_with_fewer_stages_are_ranked(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `-O unsharded_stages=2`, schedules with one stage per rank unshard that stage."""
    shape = [
        "--ranks=2",
        "--microbatches=4",
        "-O",
        "dp=2",
        "-O",
        "zero=3",
        "-O",
        "unsharded_stages=2",
        "--json",
    ]
    row_by_program = {
        row["program"]: row for row in json.loads(run_command(capsys, *command.split(), *shape))
    }
    assert {"one_f_one_b", "interleaved"} <= row_by_program.keys()


def test_explain_prints_zero_changes(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["explain", "interleaved", "--ranks=2", "--microbatches=6", "--stages-per-rank=3",
             "-O", "dp=4", "-O", "zero=3", "-O", "unsharded_stages=1",
             "--costs=F=1,B=2,unshard=0.5,reduce_scatter=0.5,reduce_grads=1,step=2",
             "--sizes=activation=10MB,saved=100MB,params=1GB,grads=1GB,optimizer=6GB"]  # fmt: skip
    assert ZERO_CHANGES in run_command(capsys, *shape)
    facts = json.loads(run_command(capsys, *shape, "--json"))
    assert facts["current"]["span"] == 70 and facts["fits_memory"]
    change_spans = [(row["description"], row["span"]) for row in facts["memory_changes"]]
    assert change_spans == [
        ('zero=1, reduce_scatter_at="update_end"', 60), ("looped_bfs, breadth-first", 62),
        ('reduce_scatter_at="each_backward"', 70)
    ]  # fmt: skip
