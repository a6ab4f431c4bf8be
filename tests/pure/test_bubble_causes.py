"""Tests that each idle interval has one cause, and that together they are all the idle time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import Costs, PipelineShape, Program, Timeline
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.compiler.compile import lower
from schedir.ir.isa.instructions import TP_SPLIT_OPS, TRANSFER_OPS, Lane
from schedir.passes.communication.transfer_overlap import group_opposite_transfers
from schedir.predict.bubble_causes import (
    IdleCause,
    compute_exposed_share,
    find_ready_gaps,
    idleness,
    sum_by_cause,
)
from schedir.schedules import dualpipe_v, gpipe, interleaved, one_f_one_b
from tests.strategies import compute_programs, costs

WAITS = (IdleCause.WARMUP, IdleCause.COOLDOWN, IdleCause.PEER, IdleCause.IMBALANCE)


def assert_spans_covered(timeline: Timeline) -> None:
    """Assert that on each rank idle intervals and work cover the span exactly once."""
    idle, spans = idleness(timeline), timeline.spans
    second = timeline.is_second_of_pair
    for rank in range(timeline.ranks):
        work = (spans["rank"] == rank) & (spans["lane"] == Lane.COMPUTE) & ~second
        rank_idle = idle[idle["rank"] == rank]
        assert (rank_idle["end"] > rank_idle["start"]).all()
        intervals = np.concatenate([rank_idle[["start", "end"]], spans[work][["start", "end"]]])
        intervals.sort()
        assert intervals["start"][0] == timeline.start_time
        assert intervals["end"][-1] == spans["end"].max()
        assert (intervals["end"][:-1] == intervals["start"][1:]).all()
    assert np.allclose(sum_by_cause(idle, timeline.ranks).sum(1), timeline.idle, rtol=0, atol=1e-9)


def lower_draft(draft: Program, form: str) -> Program:
    return group_opposite_transfers(lower(draft)) if form == "grouped" else lower(draft)


TRANSFER_FORMS = st.sampled_from(["lowered", "grouped"])


@given(compute_programs(), st.data(), st.sampled_from(MODELS), TRANSFER_FORMS)
def test_idle_intervals_cover_all_idle_time(
    draft: Program, data: st.DataObject, progress_model: ProgressModel, how: str
) -> None:
    progress_model = "per_edge" if how == "grouped" else progress_model
    timeline = schedir.simulate(
        lower_draft(draft, how), data.draw(costs(draft.shape)), progress_model=progress_model
    )
    assert_spans_covered(timeline)
    idle, spans = idleness(timeline), timeline.spans
    assert (
        sum_by_cause(idle, timeline.ranks).sum(1) == timeline.idle
    ).all()  # exact, since costs are whole numbers
    assert not (idle["cause"] == IdleCause.HOST).any()
    work = np.flatnonzero(spans["lane"] == Lane.COMPUTE)
    last_work = {int(spans["rank"][k]): k for k in work}  # the last work of each rank
    for interval in idle:
        awaited = spans[interval["awaited_span"]]
        if interval["awaited_span"] < 0:
            assert interval["cause"] in (IdleCause.COOLDOWN, IdleCause.IMBALANCE)
            assert interval["start"] >= spans["end"][last_work[interval["rank"]]]
        elif interval["cause"] in WAITS:  # waits for work on another rank that has not ended
            assert awaited["rank"] != interval["rank"] and awaited["lane"] == Lane.COMPUTE
            assert awaited["end"] >= interval["end"]
        elif interval["cause"] == IdleCause.REDUCTION:
            assert awaited["lane"] == Lane.DP and awaited["start"] <= interval["start"]
            assert awaited["end"] >= interval["end"]
        else:
            assert awaited["op"] in TRANSFER_OPS + TP_SPLIT_OPS
            assert awaited["start"] <= interval["start"] < interval["end"] <= awaited["end"]
    spare = timeline.busy.max() - timeline.busy
    assert (sum_by_cause(idle, timeline.ranks)[:, IdleCause.IMBALANCE] <= spare).all()


@given(compute_programs(), st.data(), st.sampled_from(MODELS))
def test_unexplained_idle_time_of_measured_run_is_covered(
    draft: Program, data: st.DataObject, progress_model: ProgressModel
) -> None:
    """Instructions end early, and the clocks of the ranks differ."""
    timeline = schedir.simulate(
        lower(draft), data.draw(costs(draft.shape)), progress_model=progress_model
    )
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    spans = timeline.spans.copy()
    durations = (spans["end"] - spans["start"]) * random.random(len(spans))
    clock_offsets = random.normal(size=timeline.ranks)[spans["rank"]]
    spans["start"] += clock_offsets
    spans["end"] = spans["start"] + durations
    assert_spans_covered(replace(timeline, spans=spans, kind="measured", unit="s"))


def read_causes(timeline: Timeline) -> dict[IdleCause, list[float]]:
    """Return the causes that occur, with the idle time of each rank."""
    table = sum_by_cause(idleness(timeline), timeline.ranks)
    return {c: table[:, c].round(9).tolist() for c in IdleCause if table[:, c].any()}


def test_idle_time_of_even_1f1b_is_warmup_and_cooldown() -> None:
    """1F1B is idle for (P-1)(F+B) on every rank. The warmup ends at the first backward."""
    timeline = schedir.simulate(schedir.compile(one_f_one_b, PipelineShape(4, 8)), Costs(F=1, B=2))
    assert read_causes(timeline) == {
        IdleCause.WARMUP: [6, 5, 4, 3],
        IdleCause.COOLDOWN: [3, 4, 5, 6],
    }


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_slow_stage_causes_imbalance_on_other_ranks(
    schedule: schedir.schedules.schedule_algebra.Schedule,
) -> None:
    slow = Costs(F=(1, 1, 1.5, 1), B=(2, 2, 3, 2))
    timeline = schedir.simulate(schedir.compile(schedule, PipelineShape(4, 8)), slow)
    assert read_causes(timeline)[IdleCause.IMBALANCE] == [12, 12, 0, 12]


def test_idle_time_of_messages_and_reductions() -> None:
    program = schedir.compile(one_f_one_b, PipelineShape(2, 2), dp=2, clip_grad_norm=True)
    costs = Costs(F=1, B=2, send=0.25, reduce_grads=4, reduce_norm=0.5, step=1)
    idle_by_cause = read_causes(schedir.simulate(program, costs))
    # Rank 1 waits for the first activation and then computes. Rank 0 waits for each gradient.
    assert idle_by_cause[IdleCause.REDUCTION] == [4.5, 4.5]
    assert idle_by_cause[IdleCause.WARMUP] == [2.25, 1]
    assert idle_by_cause[IdleCause.MESSAGE][1] == 0.25
    assert idle_by_cause[IdleCause.COOLDOWN][1] == 2.25


def test_tensor_parallel_sums_have_their_own_idle_causes() -> None:
    """Waiting for the sum of a segment is not waiting for a message.

    Sums of sequence parallelism count as reductions.
    """
    program = schedir.compile(gpipe, PipelineShape(1, 2), tp=2, stage_segments="fg")
    timeline = schedir.simulate(program, Costs(tp_reduce=1.5))
    assert read_causes(timeline) == {IdleCause.SUM: [2 * 2 * 1.5]}
    assert_spans_covered(timeline)
    program = schedir.compile(one_f_one_b, PipelineShape(1, 2), tp=2, sequence_parallel=True)
    timeline = schedir.simulate(program, Costs(reduce_sequence_parallel_grads=3))
    assert read_causes(timeline) == {IdleCause.REDUCTION: [3]}


def test_waiting_for_gather_or_scatter_counts_as_message() -> None:
    program = schedir.compile(interleaved, PipelineShape(2, 2, 2), tp=2)
    timeline = schedir.simulate(program, Costs(tp_gather=1, tp_scatter=1))
    idle = idleness(timeline)
    ops = timeline.spans["op"][idle["awaited_span"][idle["cause"] == IdleCause.MESSAGE]]
    assert {*ops.tolist()} <= {*map(int, TP_SPLIT_OPS)}
    assert_spans_covered(timeline)


def test_idle_intervals_cover_schedule_with_overlapped_pairs() -> None:
    program = schedir.compile(dualpipe_v, PipelineShape(4, 10, 2, "vee"))
    assert_spans_covered(schedir.simulate(program, Costs(F=1, I=1, W=1, FB=2, send=0.5)))


def test_single_rank_has_no_idle_intervals() -> None:
    assert not len(idleness(schedir.simulate(schedir.compile(gpipe, PipelineShape(1, 3)))))


# ---------------------------------------------------------------- quality measures of a run


@given(compute_programs(), st.data(), st.sampled_from(MODELS), TRANSFER_FORMS)
def test_prediction_has_no_ready_gaps(
    draft: Program, data: st.DataObject, progress_model: ProgressModel, how: str
) -> None:
    progress_model = "per_edge" if how == "grouped" else progress_model
    timeline = schedir.simulate(
        lower_draft(draft, how), data.draw(costs(draft.shape)), progress_model=progress_model
    )
    assert not find_ready_gaps(timeline).any()
    assert 0 <= compute_exposed_share(timeline) <= 1


def test_ready_gaps_are_delays_without_missing_inputs() -> None:
    program = schedir.compile(one_f_one_b, PipelineShape(2, 2), progress_model="per_edge")
    timeline = schedir.simulate(program, Costs(F=1, B=2, send=0.5), progress_model="per_edge")
    spans = timeline.spans.copy()
    for instr, delay in (("F 0.1", 0.25), ("B 1.1", 0.5)):  # delays it and all later instructions
        names = [str(timeline.graph.index.locate(k)[2]) for k in range(len(spans))]
        is_delayed = spans["start"] >= spans["start"][names.index(instr)]
        spans["start"][is_delayed] += delay
        spans["end"][is_delayed] += delay
    gaps = find_ready_gaps(replace(timeline, spans=spans))
    # Rank 0 runs F and F, then B waits for its message, B for another, and then step. Rank 1 runs
    # F, B, F, B and step, where each B needs only its F.
    assert sorted(gaps.tolist()) == [0.0, 0.0, 0.0, 0.0, 0.25, 0.5]


def test_exposed_share_counts_steady_state_transfers() -> None:
    program = schedir.compile(one_f_one_b, PipelineShape(2, 3), progress_model="per_edge")
    timeline = schedir.simulate(program, Costs(F=1, B=2, send=0.5), progress_model="per_edge")
    # Rank 0 is in steady state from 5 to 8 and never waits there. Rank 1 is from 2.5 to 9.5, and
    # waits before its third forward from 7.5 on, for half a unit while the message is on its way.
    assert compute_exposed_share(timeline) == pytest.approx(0.5 / (3 + 7))
    assert (
        compute_exposed_share(schedir.simulate(program, Costs(F=1, B=2), progress_model="per_edge"))
        == 0
    )
    without_steady_state = schedir.compile(gpipe, PipelineShape(2, 3), progress_model="per_edge")
    assert (
        compute_exposed_share(
            schedir.simulate(without_steady_state, Costs(send=0.5), progress_model="per_edge")
        )
        == 0
    )
