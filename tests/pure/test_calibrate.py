"""Tests of calibration: it finds the costs of a run, and these predict the same run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import schedir
from schedir import Costs, Opcode, PipelineShape, Program, split_costs
from schedir.compiler.compile import lower
from schedir.errors import CostsError
from schedir.ir.cost.per_stage_values import to_grid
from schedir.ir.isa.instructions import SEND_OPS
from schedir.predict.calibrate import calibrate, compute_unexplained_share, format_bubbles
from schedir.predict.timeline import Timeline
from schedir.schedules import gpipe, interleaved, looped_bfs, one_f_one_b
from schedir.schedules.schedule_algebra import B, F, I, RankSchedule, Schedule, W
from tests.clock_noise import measured
from tests.laws import TWO_WAY, ZOO, least, shape_of
from tests.strategies import compute_programs, costs


def split(r: int, P: int, m: int) -> RankSchedule:
    return m * F + m * (I + W)


def whole(r: int, P: int, m: int) -> RankSchedule:
    return m * (F + B)


GIVEN = Costs(
    F=(1, 2, 3, 4), B=(2, 4, 6, 8), send=0.25, step=3, reduce_grads=0.5, tp_scatter=0.1,
    tp_gather=0.2
)  # fmt: skip


def test_simulated_costs_come_back() -> None:
    program = schedir.compile(
        interleaved, PipelineShape(2, 4, 2), tp=2, clip_grad_norm=True, progress_model="per_edge"
    )
    timeline = schedir.simulate(program, GIVEN, progress_model="per_edge")
    found = calibrate(timeline)
    for name in ("F", "B", "step", "reduce_grads", "tp_scatter", "tp_gather", "reduce_norm"):
        assert np.allclose(getattr(found, name), GIVEN.specified.get(name, 0.0)), name
    again = schedir.simulate(program, found, progress_model="per_edge")
    assert again.span == pytest.approx(timeline.span)
    assert again.bubble == pytest.approx(timeline.bubble)


def test_a_step_costs_each_rank_its_own_time() -> None:
    """When ranks take different times for a step, none is predicted to take their mean."""
    given = replace(GIVEN, step=(1, 2, 5, 5))
    for schedule, shape in ((gpipe, PipelineShape(4, 4)), (interleaved, PipelineShape(2, 4, 2))):
        program = schedir.compile(schedule, shape)
        timeline = schedir.simulate(program, given)
        found = calibrate(timeline)
        assert found.step is not None
        assert np.allclose(to_grid(found.step)[: shape.ranks, 0], (1, 2, 5, 5)[: shape.ranks])
        assert schedir.simulate(program, found).span == pytest.approx(timeline.span)


def test_what_is_not_there_costs_nothing() -> None:
    shape = PipelineShape(4, 4)
    found = calibrate(schedir.simulate(schedir.compile(split, shape), Costs(I=2, W=3)))
    assert found.I == (2.0,) * 4 and found.W == (3.0,) * 4
    assert found.B == found.tp_gather == found.step == 0.0
    found = calibrate(schedir.simulate(schedir.compile(gpipe, shape), Costs(B=5)))
    assert found.B == (5.0,) * 4 and found.I == found.W == 0.0


def test_nothing_costs_less_than_it_took() -> None:
    """This holds even where a stage's messages took much less time than those of others."""
    given = Costs(F=1, B=2, send=(1, 50, 50, 50))
    program = schedir.compile(one_f_one_b, PipelineShape(4, 8))
    found = calibrate(schedir.simulate(program, given, progress_model="per_edge"))
    assert (to_grid(found.specified["F"]) >= 1).all() and (to_grid(found.specified["B"]) >= 2).all()


def test_a_pipeline_of_one() -> None:
    found = calibrate(schedir.simulate(schedir.compile(whole, PipelineShape(1, 2)), Costs(F=2)))
    assert found.F == (2.0,) and found.send == 0.0


def test_stages_may_differ_in_how_they_run_backward() -> None:
    def mixed(r: int, P: int, m: int) -> RankSchedule:
        return m * F + (m * (I + W) if r else m * B)

    program = schedir.compile(mixed, PipelineShape(2, 3))
    found = calibrate(schedir.simulate(program, Costs(B=5, I=2, W=3)))
    assert (found.B, found.I, found.W) == ((5.0, 0.0), (0.0, 2.0), (0.0, 3.0))


def again(run: Timeline) -> Timeline:
    """Return the prediction of a run from its own costs."""
    return schedir.simulate(
        run.program,
        calibrate(run),
        progress_model=run.progress_model,
        blocking_hosts=run.blocking_hosts,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Program, Costs]:
    """Draw a built-in or random program and uneven costs, with messages from free to long."""
    tp, clip = draw(st.sampled_from([1, 2])), draw(st.booleans())
    if draw(st.booleans()):
        draft = draw(compute_programs())
    else:
        schedule, ranks = draw(st.sampled_from([*ZOO.values()])), draw(st.sampled_from([2, 4]))
        few = least(schedule, ranks)
        shape = shape_of(schedule, ranks, ranks * draw(st.integers(-(-few // ranks), 5)))
        draft, tp = schedir.expand_schedule(schedule, shape), 1 if schedule in TWO_WAY else tp
    # A pair with its own cost takes the same time with either kind of backward.
    pair = tuple(map(float, draw(st.lists(st.integers(2, 9), min_size=1)))) * draft.shape.stages
    given = replace(
        draw(costs(draft.shape)),
        FB=pair[: draft.shape.stages],
        send=draw(st.sampled_from([0.0, 0.5, 1.0, 7.0, 50.0])),
        tp_gather=draw(st.sampled_from([0.0, 2.0])),
        tp_scatter=0.5,
        reduce_grads=draw(st.sampled_from([0.0, 3.0])),
        reduce_norm=1.0,
        step=1.0,
    )
    overlap = draw(st.booleans())
    draft = replace(draft, tp=tp, clip_grad_norm=clip)
    return lower(draft, given, "per_edge", overlap=overlap), given


@settings(max_examples=150)
@given(cases())
def test_who_looks_late_changes_no_prediction(case: tuple[Program, Costs]) -> None:
    run = measured(*case)
    assert again(run).span == pytest.approx(run.span, abs=1e-9)


@settings(max_examples=50)
@given(cases())
def test_the_hosts_time_is_counted_where_it_is_lost(case: tuple[Program, Costs]) -> None:
    """Only the host's time before the very first instruction cannot be seen."""
    run = measured(*case, host=0.25)
    assert again(run).span == pytest.approx(run.span, abs=0.25 + 1e-9)


@settings(max_examples=50)
@given(cases(), st.lists(st.floats(0, 1e-3), min_size=8, max_size=8))
def test_clocks_that_differ_a_little(case: tuple[Program, Costs], ahead: list[float]) -> None:
    """One direction gains by a clock difference what the other loses."""
    run = measured(*case, clocks=np.array(ahead))
    assert again(run).span == pytest.approx(run.span, abs=1e-3 * (len(run.critical_path) + 1))


@pytest.mark.parametrize("schedule", ZOO.values(), ids=ZOO)
@pytest.mark.parametrize(("tp", "send"), [(1, 0.1), (2, 0.1), (1, 20.0), (2, 2.0)])
def test_hosts_that_wait_themselves(schedule: Schedule, tp: int, send: float) -> None:
    """Such hosts reach a message late, by up to a compute, and the simulation does the same."""
    shape = shape_of(schedule, 4, max(8, least(schedule, 4)))
    tp = 1 if schedule in TWO_WAY else tp
    uneven = tuple(2 + 0.5 * (s % 3) for s in range(shape.stages))
    given = Costs(F=uneven, I=2.5, W=1.5, FB=7, send=send, tp_scatter=0.02, tp_gather=0.05, step=1)
    program = schedir.compile(
        schedule, shape, tp=tp, progress_model="per_edge", costs=given, tied_weights=True
    )
    run = measured(program, given, host=0.05, blocking_hosts=True)
    assert again(run).span == pytest.approx(run.span, rel=0.005)
    assert calibrate(run).send == pytest.approx(send, abs=0.1)


def test_messages_that_nobody_waits_for_cost_nothing() -> None:
    """Stages 0 and 2 are on one rank, which always has work."""
    shape = PipelineShape(2, 8, placement=(0, 1, 0))
    program = schedir.compile(looped_bfs, shape, progress_model="per_edge")
    given = Costs(F=(2, 2, 3), B=(4, 4, 5), send=0.05, step=1)
    run = measured(program, given, host=0.02)
    sends = run.spans[np.isin(run.spans["op"], SEND_OPS)]
    assert np.median(sends["end"] - sends["start"]) > 5  # the measured duration
    assert np.max(calibrate(run).specified["send"]) <= 0.05 + 1e-9
    assert again(run).bubble == pytest.approx(run.bubble, abs=0.01)


def test_one_late_message_does_not_make_all_late() -> None:
    """The extra time of the late message is counted with the instruction that waited for it."""
    program = schedir.compile(one_f_one_b, PipelineShape(3, 8), progress_model="per_edge")
    given = Costs(F=2, B=4, send=0.5)
    run = measured(program, given)
    spans = run.spans.copy()
    spans["start"][spans["start"] > run.span / 2] += 20
    spans["end"][spans["end"] > run.span / 2] += 20
    late = replace(run, spans=spans)
    assert calibrate(late).send == pytest.approx(0.5)
    assert again(late).span > again(run).span


def test_a_bubble_is_called_predicted_where_the_step_was() -> None:
    program = schedir.compile(gpipe, PipelineShape(2, 4))
    step, slow = (schedir.simulate(program, Costs(F=f, B=2)) for f in (1.0, 2.0))
    assert format_bubbles(step, step) == "bubble 20.0%, predicted 20.0%"
    told = "bubble 20.0%, not predicted: the simulation takes 33% more"
    assert format_bubbles(step, slow) == told
    assert "25% less" in format_bubbles(slow, step)


def test_what_a_prediction_counts_as_work_is_said() -> None:
    """The host takes a tenth of each compute, so the bubble is larger than predicted."""
    program = schedir.compile(gpipe, PipelineShape(2, 4))
    run = measured(program, Costs(F=10, B=10), "per_device", host=1.0)
    predicted = again(run)
    lost = compute_unexplained_share(predicted, run)
    assert lost == pytest.approx(0.08, abs=0.005)
    assert run.bubble == pytest.approx(predicted.bubble + lost, abs=0.005)
    assert format_bubbles(run, predicted).endswith(
        f"predicted {predicted.bubble:.1%} and {lost:.1%} unexplained"
    )


def test_what_a_prediction_hides_costs_what_it_costs() -> None:
    """No rank waits for these copies and messages, but with more of them a rank may wait."""
    costs = Costs(
        F=1, B=2, send=0.125, offload=0.875, reload=0.75, offload_to_disk=0.5, reload_from_disk=0.25
    )
    program = schedir.compile(
        one_f_one_b, PipelineShape(4, 8), costs=costs, offload="all", offload_to_disk="half"
    )
    told = calibrate(schedir.simulate(program, costs)).specified
    for name in ("F", "B", "send", "offload", "reload", "offload_to_disk", "reload_from_disk"):
        assert np.allclose(told[name], costs.specified[name])


@given(numbers=st.lists(st.integers(1, 9), min_size=3, max_size=3))
def test_costs_of_a_rank_fit_any_number_of_stages(numbers: list[int]) -> None:
    """The step of a run with two stages per rank applies to schedules with one, and to segments."""
    vee = schedir.compile("zb_v", ranks=3, microbatches=6)
    run = schedir.simulate(vee, Costs(step=(*numbers, 1, 1, 1)))
    step = calibrate(run).step
    assert step == (numbers[0] if len({*numbers}) == 1 else (*map(float, numbers),))
    one = schedir.compile("one_f_one_b", ranks=3, microbatches=6)
    ends = schedir.simulate(one, Costs(step=step)).spans
    steps = ends[ends["op"] == Opcode.OptimizerStep]
    assert (steps["end"] - steps["start"]).tolist() == [*map(float, numbers)]
    assert split_costs(Costs(step=step), "fg", one.shape).step == step
    with pytest.raises(CostsError, match="5 numbers for 3 ranks"):
        schedir.simulate(one, Costs(step=(1, 2, 3, 4, 5)))
