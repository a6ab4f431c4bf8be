"""Tests that calibration finds the costs of a run, and that these costs predict the run."""

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
from tests.cases import each_value
from tests.clock_noise import measure_timeline
from tests.laws import TWO_WAY, ZOO, find_min_microbatches, make_shape
from tests.strategies import compute_programs, costs


def split_backward_schedule(r: int, P: int, m: int) -> RankSchedule:
    return m * F + m * (I + W)


def full_backward_schedule(r: int, P: int, m: int) -> RankSchedule:
    return m * (F + B)


COSTS = Costs(
    F=(1, 2, 3, 4), B=(2, 4, 6, 8), send=0.25, step=3, reduce_grads=0.5, tp_scatter=0.1,
    tp_gather=0.2
)  # fmt: skip


def test_calibrate_recovers_simulated_costs() -> None:
    program = schedir.compile(
        interleaved, PipelineShape(2, 4, 2), tp=2, clip_grad_norm=True, progress_model="per_edge"
    )
    timeline = schedir.simulate(program, COSTS, progress_model="per_edge")
    calibrated = calibrate(timeline)
    for name in ("F", "B", "step", "reduce_grads", "tp_scatter", "tp_gather", "reduce_norm"):
        assert np.allclose(getattr(calibrated, name), COSTS.specified.get(name, 0.0)), name
    prediction = schedir.simulate(program, calibrated, progress_model="per_edge")
    assert prediction.span == pytest.approx(timeline.span)
    assert prediction.bubble == pytest.approx(timeline.bubble)


def test_step_cost_is_calibrated_per_rank() -> None:
    """The predicted step of a rank takes the time of that rank, not the mean of all ranks."""
    costs = replace(COSTS, step=(1, 2, 5, 5))
    for schedule, shape in ((gpipe, PipelineShape(4, 4)), (interleaved, PipelineShape(2, 4, 2))):
        program = schedir.compile(schedule, shape)
        timeline = schedir.simulate(program, costs)
        calibrated = calibrate(timeline)
        assert calibrated.step is not None
        assert np.allclose(to_grid(calibrated.step)[: shape.ranks, 0], (1, 2, 5, 5)[: shape.ranks])
        assert schedir.simulate(program, calibrated).span == pytest.approx(timeline.span)


def test_absent_instructions_cost_zero() -> None:
    shape = PipelineShape(4, 4)
    calibrated = calibrate(
        schedir.simulate(schedir.compile(split_backward_schedule, shape), Costs(I=2, W=3))
    )
    assert calibrated.I == (2.0,) * 4 and calibrated.W == (3.0,) * 4
    assert calibrated.B == calibrated.tp_gather == calibrated.step == 0.0
    calibrated = calibrate(schedir.simulate(schedir.compile(gpipe, shape), Costs(B=5)))
    assert calibrated.B == (5.0,) * 4 and calibrated.I == calibrated.W == 0.0


def test_computes_cost_at_least_their_duration() -> None:
    """The messages of one stage take much less time than those of the others."""
    costs = Costs(F=1, B=2, send=(1, 50, 50, 50))
    program = schedir.compile(one_f_one_b, PipelineShape(4, 8))
    calibrated = calibrate(schedir.simulate(program, costs, progress_model="per_edge"))
    assert (to_grid(calibrated.specified["F"]) >= 1).all()
    assert (to_grid(calibrated.specified["B"]) >= 2).all()


def test_calibrate_single_rank() -> None:
    calibrated = calibrate(
        schedir.simulate(schedir.compile(full_backward_schedule, PipelineShape(1, 2)), Costs(F=2))
    )
    assert calibrated.F == (2.0,) and calibrated.send == 0.0


def test_calibrate_full_and_split_backward_by_stage() -> None:
    def backward_by_rank(r: int, P: int, m: int) -> RankSchedule:
        return m * F + (m * (I + W) if r else m * B)

    program = schedir.compile(backward_by_rank, PipelineShape(2, 3))
    calibrated = calibrate(schedir.simulate(program, Costs(B=5, I=2, W=3)))
    assert (calibrated.B, calibrated.I, calibrated.W) == ((5.0, 0.0), (0.0, 2.0), (0.0, 3.0))


def predict_again(run: Timeline) -> Timeline:
    """Return the prediction of a run from its own costs."""
    return schedir.simulate(
        run.program,
        calibrate(run),
        progress_model=run.progress_model,
        blocking_hosts=run.blocking_hosts,
    )


@st.composite
def programs_with_costs(draw: st.DrawFn) -> tuple[Program, Costs]:
    """Draw a built-in or random program and uneven costs, with messages from free to long."""
    tp, clip = draw(st.sampled_from([1, 2])), draw(st.booleans())
    if draw(st.booleans()):
        draft = draw(compute_programs())
    else:
        schedule, ranks = draw(st.sampled_from([*ZOO.values()])), draw(st.sampled_from([2, 4]))
        least_microbatches = find_min_microbatches(schedule, ranks)
        shape = make_shape(
            schedule, ranks, ranks * draw(st.integers(-(-least_microbatches // ranks), 5))
        )
        draft, tp = schedir.expand_schedule(schedule, shape), 1 if schedule in TWO_WAY else tp
    # A pair with its own cost takes the same time with either kind of backward.
    pair = tuple(map(float, draw(st.lists(st.integers(2, 9), min_size=1)))) * draft.shape.stages
    uneven_costs = replace(
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
    return lower(draft, uneven_costs, "per_edge", overlap=overlap), uneven_costs


@settings(max_examples=150)
@given(programs_with_costs())
def test_late_observation_keeps_predicted_span(case: tuple[Program, Costs]) -> None:
    run = measure_timeline(*case)
    assert predict_again(run).span == pytest.approx(run.span, abs=1e-9)


@settings(max_examples=50)
@given(programs_with_costs())
def test_prediction_includes_host_time(case: tuple[Program, Costs]) -> None:
    """Only the host time before the first instruction is not recorded."""
    run = measure_timeline(*case, host=0.25)
    assert predict_again(run).span == pytest.approx(run.span, abs=0.25 + 1e-9)


@settings(max_examples=50)
@given(programs_with_costs(), st.lists(st.floats(0, 1e-3), min_size=8, max_size=8))
def test_prediction_tolerates_small_clock_differences(
    case: tuple[Program, Costs], ahead: list[float]
) -> None:
    """A clock difference adds to one direction what it takes from the other."""
    run = measure_timeline(*case, clocks=np.array(ahead))
    assert predict_again(run).span == pytest.approx(
        run.span, abs=1e-3 * (len(run.critical_path) + 1)
    )


@pytest.mark.parametrize(
    ("schedule", "tp", "send"),
    each_value([*ZOO.values()], [(1, 0.1), (2, 0.1), (1, 20.0), (2, 2.0)]),
)
def test_calibrated_run_of_blocking_hosts_is_predicted(
    schedule: Schedule, tp: int, send: float
) -> None:
    """A blocking host reaches a message late by up to one compute, also in the simulation."""
    shape = make_shape(schedule, 4, max(8, find_min_microbatches(schedule, 4)))
    tp = 1 if schedule in TWO_WAY else tp
    uneven = tuple(2 + 0.5 * (s % 3) for s in range(shape.stages))
    costs = Costs(F=uneven, I=2.5, W=1.5, FB=7, send=send, tp_scatter=0.02, tp_gather=0.05, step=1)
    program = schedir.compile(
        schedule, shape, tp=tp, progress_model="per_edge", costs=costs, tied_weights=True
    )
    run = measure_timeline(program, costs, host=0.05, blocking_hosts=True)
    assert predict_again(run).span == pytest.approx(run.span, rel=0.005)
    assert calibrate(run).send == pytest.approx(send, abs=0.1)


def test_hidden_messages_cost_no_more_than_send() -> None:
    """Stages 0 and 2 are on one rank, which is never idle."""
    shape = PipelineShape(2, 8, placement=(0, 1, 0))
    program = schedir.compile(looped_bfs, shape, progress_model="per_edge")
    costs = Costs(F=(2, 2, 3), B=(4, 4, 5), send=0.05, step=1)
    run = measure_timeline(program, costs, host=0.02)
    sends = run.spans[np.isin(run.spans["op"], SEND_OPS)]
    assert np.median(sends["end"] - sends["start"]) > 5  # the measured duration
    assert np.max(calibrate(run).specified["send"]) <= 0.05 + 1e-9
    assert predict_again(run).bubble == pytest.approx(run.bubble, abs=0.01)


def test_one_late_message_keeps_send_cost() -> None:
    """The extra time of the late message is counted with the instruction that waited for it."""
    program = schedir.compile(one_f_one_b, PipelineShape(3, 8), progress_model="per_edge")
    costs = Costs(F=2, B=4, send=0.5)
    run = measure_timeline(program, costs)
    spans = run.spans.copy()
    spans["start"][spans["start"] > run.span / 2] += 20
    spans["end"][spans["end"] > run.span / 2] += 20
    late = replace(run, spans=spans)
    assert calibrate(late).send == pytest.approx(0.5)
    assert predict_again(late).span > predict_again(run).span


def test_predicted_bubble_is_printed_only_for_predicted_step() -> None:
    program = schedir.compile(gpipe, PipelineShape(2, 4))
    step, slow = (schedir.simulate(program, Costs(F=f, B=2)) for f in (1.0, 2.0))
    assert format_bubbles(step, step) == "bubble 20.0%, predicted 20.0%"
    expected = "bubble 20.0%, not predicted: the simulation takes 33% more"
    assert format_bubbles(step, slow) == expected
    assert "25% less" in format_bubbles(slow, step)


def test_unexplained_share_of_bubble_is_printed() -> None:
    """The host takes a tenth of each compute, so the bubble is larger than predicted."""
    program = schedir.compile(gpipe, PipelineShape(2, 4))
    run = measure_timeline(program, Costs(F=10, B=10), "per_device", host=1.0)
    predicted = predict_again(run)
    lost = compute_unexplained_share(predicted, run)
    assert lost == pytest.approx(0.08, abs=0.005)
    assert run.bubble == pytest.approx(predicted.bubble + lost, abs=0.005)
    assert format_bubbles(run, predicted).endswith(
        f"predicted {predicted.bubble:.1%} and {lost:.1%} unexplained"
    )


def test_hidden_transfers_and_copies_keep_their_costs() -> None:
    """No rank waits for these copies and messages, but with more of them a rank may wait."""
    costs = Costs(
        F=1, B=2, send=0.125, offload=0.875, reload=0.75, offload_to_disk=0.5, reload_from_disk=0.25
    )
    program = schedir.compile(
        one_f_one_b, PipelineShape(4, 8), costs=costs, offload="all", offload_to_disk="half"
    )
    calibrated = calibrate(schedir.simulate(program, costs)).specified
    for name in ("F", "B", "send", "offload", "reload", "offload_to_disk", "reload_from_disk"):
        assert np.allclose(calibrated[name], costs.specified[name])


@given(numbers=st.lists(st.integers(1, 9), min_size=3, max_size=3))
def test_step_cost_of_rank_fits_any_stages_per_rank(numbers: list[int]) -> None:
    """The step of a run with two stages per rank applies to schedules with one, and to segments."""
    vee = schedir.compile("zb_v", ranks=3, microbatches=6)
    run = schedir.simulate(vee, Costs(step=(*numbers, 1, 1, 1)))
    step = calibrate(run).step
    assert step == (numbers[0] if len({*numbers}) == 1 else (*map(float, numbers),))
    single_stage = schedir.compile("one_f_one_b", ranks=3, microbatches=6)
    spans = schedir.simulate(single_stage, Costs(step=step)).spans
    steps = spans[spans["op"] == Opcode.OptimizerStep]
    assert (steps["end"] - steps["start"]).tolist() == [*map(float, numbers)]
    assert split_costs(Costs(step=step), "fg", single_stage.shape).step == step
    with pytest.raises(CostsError, match="5 numbers for 3 ranks"):
        schedir.simulate(single_stage, Costs(step=(1, 2, 3, 4, 5)))
