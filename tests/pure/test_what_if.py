"""Tests that every claim of advice is what a simulation of the change gives."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import schedir
from schedir import Costs, PipelineShape, RankSchedule, Sizes, Timeline
from schedir.__main__ import main
from schedir.analysis.memory.footprint import compute_footprints
from schedir.commands.common.schedule_options import parse_costs
from schedir.ir.isa.instructions import COMPUTE_OPS, FORWARD
from schedir.predict import what_if
from schedir.predict.bubble_causes import IdleCause
from schedir.predict.calibrate import simulate_at_mean_times
from schedir.predict.what_if import Advice, advise
from schedir.schedules import gpipe, one_f_one_b, pipedream_2bw, zb_h1, zb_v
from tests.cases import cases
from tests.clock_noise import simulate_slow_last_microbatch
from tests.commands import run_command, run_refused_command

SHAPE = PipelineShape(4, 8)
COSTS = Costs(F=(1, 1, 1, 1.5), B=(2, 2, 2, 3), send=0.25, reduce_grads=2)


def simulate_schedule(
    schedule: schedir.schedules.schedule_algebra.Schedule,
    costs: Costs,
    shape: PipelineShape = SHAPE,
) -> Timeline:
    return schedir.simulate(schedir.compile(schedule, shape, costs=costs), costs)


def get_saved_share(advice: Advice, phrase: str) -> float:
    [change] = [c for c in advice.changes if phrase in c.description]
    return change.saved_share


def test_saved_shares_equal_simulations() -> None:
    timeline = simulate_schedule(one_f_one_b, COSTS)
    program, advice = timeline.program, advise(timeline, COSTS)
    assert advice.relative_error == 0 and advice.baseline.span == timeline.span

    def compute_saved_share(changed_costs: Costs) -> float:
        return 1 - schedir.simulate(program, changed_costs).span / timeline.span

    assert get_saved_share(advice, "messages") == compute_saved_share(replace(COSTS, send=0))
    assert get_saved_share(advice, "reductions") == compute_saved_share(
        replace(COSTS, reduce_grads=0)
    )
    even = get_saved_share(advice, "F and B of stage 3 on rank 3 take 1.33x")
    assert even == pytest.approx(
        compute_saved_share(Costs(F=1.125, B=2.25, send=0.25, reduce_grads=2))
    )
    doubled = simulate_schedule(one_f_one_b, COSTS, PipelineShape(4, 16))
    assert get_saved_share(advice, "twice") == pytest.approx(1 - doubled.span / timeline.span / 2)
    assert [c.saved_share for c in advice.changes] == sorted(c.saved_share for c in advice.changes)[
        ::-1
    ]


def test_segment_sum_advice_equals_simulation() -> None:
    shape, costs = PipelineShape(2, 4), Costs(F=1, I=1, W=1, tp_reduce=0.9)

    def simulate_span(costs: Costs, **options: Any) -> float:
        program = schedir.compile(zb_h1, shape, tp=2, stage_segments=3, costs=costs, **options)
        return schedir.simulate(program, costs).span

    base = simulate_span(costs)
    timeline = schedir.simulate(
        schedir.compile(zb_h1, shape, tp=2, stage_segments=3, costs=costs), costs
    )
    advice = advise(timeline, costs)
    assert get_saved_share(advice, "sums of segments") == pytest.approx(
        1 - simulate_span(replace(costs, tp_reduce=0)) / base
    )
    best = min(simulate_span(costs, fill_collective_waits=which) for which in ("W", "F", "all"))
    assert get_saved_share(advice, "fill_collective_waits=") == pytest.approx(1 - best / base)
    assert best < base
    pair = schedir.compile(schedir.schedules.dualpipe_v, PipelineShape(2, 4, 2, "vee"), tp=2)
    assert not any("fill" in c.description for c in advise(schedir.simulate(pair)).changes)


@pytest.mark.parametrize(("cut", "chunks"), cases([(("fgfg", "g"), 2)], [(3, 1), (1, 2)]))
def test_advice_keeps_segments_and_chunks(cut: Any, chunks: int) -> None:
    """Advised schedules and more microbatches have the segments and chunks of the run.

    Stages of equal segments get the same advice as stages without segments.
    """
    shape, costs = PipelineShape(2, 4), Costs(F=1, B=2, I=1, W=1, tp_reduce=0.3, send=0.1)

    def simulate_cut(schedule: Any, shape: PipelineShape = shape, costs: Costs = costs) -> Timeline:
        program = schedir.compile(
            schedule, shape, tp=2, stage_segments=cut, microbatch_chunks=chunks, costs=costs
        )
        return schedir.simulate(program, costs)

    base = simulate_cut(one_f_one_b)
    for schedule in (None, one_f_one_b):  # found by its name, or given
        advice = advise(base, costs, schedule)
        doubled_span = simulate_cut(one_f_one_b, PipelineShape(2, 8)).span
        assert get_saved_share(advice, "twice") == pytest.approx(1 - doubled_span / base.span / 2)
    other_change = next(
        (c for c in advice.changes if "with 1 stage per rank" in c.description), None
    )
    if other_change is not None:
        assert other_change.saved_share == pytest.approx(1 - simulate_cut(zb_h1).span / base.span)
    whats = " ".join(c.description for c in advice.changes)
    assert ("(F and B of the stage of segments 0 to 4 on rank 0 take 1.43x)" in whats) == (
        cut == ("fgfg", "g")
    )
    if cut == ("fgfg", "g"):
        even = Costs(F=(0.7,) * 5 + (1.75,) * 2, B=(1.4,) * 5 + (3.5,) * 2, tp_reduce=0.3, send=0.1)
        span = schedir.simulate(base.program, even).span
        assert get_saved_share(advice, "take the mean") == pytest.approx(1 - span / base.span)


def test_advised_schedules_hold_no_more_activations() -> None:
    """1F1B holds at most P activations, so advice contains ZB-H1 but not GPipe, which holds m."""
    plain = Costs(F=1, B=2)
    whats = [
        c.description
        for c in advise(simulate_schedule(one_f_one_b, plain, PipelineShape(2, 4)), plain).changes
    ]
    assert any(
        "with no more activations; I and W each half of B" in description for description in whats
    )
    timeline = simulate_schedule(zb_h1, Costs())
    whats = [c.description for c in advise(timeline, Costs()).changes]
    assert not any("half of B" in description for description in whats)


@pytest.mark.parametrize("limit", [3.5e9, 4.6e9, 7e9])
def test_advised_programs_fit_into_memory_limit(limit: float) -> None:
    """ZB-V has no more activations than 1F1B, but more boundary tensors. Sizes are per stage."""
    costs, sizes = Costs(F=1, B=2), Sizes(saved=1e9, activation=32e6)
    timeline = simulate_schedule(one_f_one_b, costs)
    changes = advise(replace(timeline, sizes=sizes), costs, one_f_one_b, limit).changes
    programs = [c.run.program for c in changes if c.row.draft is not None]
    for program in programs:
        share = Sizes(saved=1e9 / program.shape.stages_per_rank, activation=32e6)
        footprints = compute_footprints(program, share, "device", worst_case=True)
        assert max(footprint.total_bytes.max() for footprint in footprints) <= limit
    assert any(program.name == "zb_v" for program in programs) == (limit == 7e9)


def test_one_more_activation_is_tried_if_possible() -> None:
    """GPipe already holds all activations, so its advice is a greedy order without one more."""
    uneven = Costs(F=(2, 1), B=(3, 4))
    whats = [
        c.description
        for c in advise(simulate_schedule(gpipe, uneven, PipelineShape(2, 4)), uneven).changes
    ]
    assert "a greedy order, with no more activations" in whats
    assert not any("one more activation" in description for description in whats)
    slow_messages = Costs(F=1, B=2, send=0.5)
    whats = [
        c.description
        for c in advise(simulate_schedule(one_f_one_b, slow_messages), slow_messages).changes
    ]
    assert any("one more activation" in description for description in whats)


def user_gpipe(rank: int, ranks: int, microbatches: int) -> RankSchedule:
    return microbatches * schedir.F + microbatches * schedir.B


def test_advice_on_microbatches_needs_schedule() -> None:
    timeline = simulate_schedule(user_gpipe, Costs())
    assert not any("twice" in c.description for c in advise(timeline).changes)
    assert any("twice" in c.description for c in advise(timeline, schedule=user_gpipe).changes)
    # A name counts only if its schedule compiles to the program of the run.
    renamed = replace(timeline, program=replace(timeline.program, name="one_f_one_b"))
    assert not any("twice" in c.description for c in advise(renamed).changes)
    renamed = replace(timeline, program=replace(timeline.program, name="gpipe"))
    assert any("twice" in c.description for c in advise(renamed).changes)


@pytest.mark.parametrize(
    ("schedule", "how"),
    [
        (one_f_one_b, {"overlap": True}),
        (gpipe, {"buffer_sharing": "minimal"}),
        (gpipe, {"buffer_sharing": "latency_preserving"}),
        (gpipe, {"tp": 2, "boundary": "sharded"}),
    ],
)
def test_advice_keeps_compile_options(
    schedule: schedir.schedules.schedule_algebra.Schedule, how: dict[str, Any]
) -> None:
    costs = Costs(F=1, B=2, send=0.5, tp_scatter=0.25, tp_gather=0.25)

    def simulate_microbatches(microbatches: int) -> Timeline:
        program = schedir.compile(schedule, PipelineShape(4, microbatches), costs=costs, **how)
        return schedir.simulate(program, costs)

    timeline, doubled = simulate_microbatches(8), simulate_microbatches(16)
    saved = get_saved_share(advise(timeline, costs), "twice")
    assert saved == pytest.approx(1 - doubled.span / timeline.span / 2)


def test_advice_keeps_optimizer_steps() -> None:
    """Advice keeps the number of updates: fewer updates of larger batches change the training."""
    costs = Costs(F=1, B=2)
    timeline = simulate_schedule(
        pipedream_2bw, costs, PipelineShape(4, 16, optimizer_steps=4, weight_delay=1)
    )
    whats = [change.description for change in advise(timeline, costs).changes]
    assert any("twice" in description for description in whats)
    assert not any("gpipe" in description or "zb_v" in description for description in whats)


def test_measured_run_is_simulated_at_mean_times() -> None:
    timeline = simulate_schedule(gpipe, COSTS)
    spans = timeline.spans.copy()
    spans["end"] += 2 * (np.arange(len(spans)) == timeline.critical_path[-1])
    advice = advise(replace(timeline, spans=spans, kind="measured", unit="s"))
    assert advice.relative_error == pytest.approx(advice.baseline.span / (timeline.span + 2) - 1)
    assert -0.1 < advice.relative_error < 0 and advice.is_reliable and advice.changes


def test_unreliable_simulation_gives_no_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = simulate_slow_last_microbatch(
        schedir.compile(one_f_one_b, SHAPE, progress_model="per_edge"), 9
    )
    advice = advise(run)
    assert advice.relative_error < -0.1 and not advice.is_reliable and advice.changes == []
    schedir.save_timeline(run, tmp_path / "x.timeline")
    golden = Path(__file__).parents[1] / "golden" / "explain_no_advice.txt"
    monkeypatch.chdir(tmp_path)
    assert run_command(capsys, "explain", "x.timeline") == golden.read_text()
    facts = json.loads(run_command(capsys, "explain", "x.timeline", "--json"))
    assert facts["is_advice_reliable"] is False and facts["changes"] == []
    assert facts["simulated_span"] == advice.baseline.span
    for command in (["compare", "x.timeline", "gpipe"], ["recommend", "x.timeline"]):
        line = run_command(capsys, *command).splitlines()[-1]
        assert line.startswith(
            "a simulation of x.timeline at its mean times takes 66 s, 48.8% less"
        )
        assert line.endswith("schedir draw x.timeline -o x.html shows where they differ")
        assert "a simulation" not in run_command(capsys, *command, "--costs=F=1,B=2")
    # A comparison of runs only contains no prediction that the line could concern.
    assert "a simulation" not in run_command(capsys, "compare", "x.timeline", "x.timeline")


def test_gain_below_simulation_error_is_omitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = schedir.compile(zb_v, PipelineShape(4, 8, 2, "vee"), progress_model="per_edge")
    for slow, told in ((1.2, "2.9%  twice as many"), (2.0, "no tried change saves 8.9%")):
        run = simulate_slow_last_microbatch(program, slow)
        assert advise(run).is_reliable
        schedir.save_timeline(run, tmp_path / "x.timeline")
        *_, line, last_line = run_command(
            capsys, "explain", str(tmp_path / "x.timeline")
        ).splitlines()
        assert line.strip().startswith(told)
        assert last_line.startswith("another order of these stages")


def test_slow_stage_is_named_besides_longest_awaited(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = run_command(capsys, "explain", "one_f_one_b", "--costs=F=1:1:4:1,B=2:2:8:2")
    slow, awaited = output.splitlines()[1:3]
    assert slow == "slow stage: B of stage 2 on rank 2 takes 2.29x the mean of all B"
    assert awaited.startswith("longest awaited: B of stage 1 on rank 1")
    assert awaited.endswith("it takes 0.57x the mean of all B")
    output = run_command(capsys, "explain", "one_f_one_b", "--costs=F=1,B=2")
    assert "takes" not in next(line for line in output.splitlines() if "longest awaited" in line)


def test_help_defines_each_idle_cause(capsys: pytest.CaptureFixture[str]) -> None:
    output = run_command(capsys, "explain", "--help")
    assert all(f"\n  {cause.text:11} " in output for cause in IdleCause)


def test_explain_prints_idle_shares_of_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", "one_f_one_b", "--costs=F=1:1:1:1.5,B=2,send=0.25"]
    heading, _, *lines = run_command(capsys, *command).splitlines()[2:8]
    facts = json.loads(run_command(capsys, *command, "--json"))
    causes = heading.split()[5:]
    assert heading.split()[:5] == ["share", "of", "the", "span", "idle"] and "message" in causes
    for rank, line in enumerate(lines):
        word, number, idle, *shares = line.split()
        rank_shares = [facts["idle"][cause][rank] / facts["span"] for cause in causes]
        assert (word, number) == ("rank", str(rank))
        assert shares == [f"{share:.1%}" for share in rank_shares]
        assert float(idle.rstrip("%")) == pytest.approx(100 * sum(rank_shares), abs=0.1)
    many_ranks = run_command(capsys, "explain", "gpipe", "--ranks=17", "--progress-model=per_edge")
    assert "progress model per_edge: " in many_ranks.splitlines()[0]
    assert "schedir draw gpipe --idle-map -o idle.png" in many_ranks
    assert "rank 16 " not in many_ranks


def test_calibrate_reports_share_of_host_delay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted = simulate_schedule(gpipe, COSTS)
    schedir.save_timeline(predicted, tmp_path / "x.timeline")
    run_command(capsys, "calibrate", str(tmp_path / "x.timeline"))  # nothing on standard error
    spans = predicted.spans.copy()  # a delay of the host before each compute
    spans["end"] *= 2
    spans["start"] *= 2
    delayed = (spans["op"] == FORWARD) & (spans["rank"] == 1)
    spans["start"][delayed] += 0.5 * (spans["end"] - spans["start"])[delayed]
    run = replace(predicted, spans=spans, kind="measured", unit="s")
    schedir.save_timeline(run, tmp_path / "x.timeline")
    assert main(["calibrate", str(tmp_path / "x.timeline")]) == 0
    out, err = capsys.readouterr()
    share, rank = re.findall(r": ([0-9.]+)% of the busy time.* on rank (\d)", err)[0]
    simulated = simulate_at_mean_times(run, parse_costs(out.strip()))
    assert float(share) == pytest.approx(100 - 100 * run.busy.sum() / simulated.busy.sum(), abs=0.1)
    assert rank == "1" and float(share) > 1


def test_advice_for_draft_and_single_rank() -> None:
    assert advise(schedir.simulate(schedir.expand_schedule(gpipe, SHAPE))).changes
    alone = advise(simulate_schedule(gpipe, Costs(), PipelineShape(1, 4)), Costs())
    assert all(abs(c.saved_share) < 1e-9 for c in alone.changes)


def test_explain_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    costs = "--costs=F=1:1:1:1.5,B=2:2:2:3,send=0.25,reduce_grads=2"
    lines = run_command(capsys, "explain", "one_f_one_b", costs).splitlines()
    table = [line for line in lines if line.startswith((" share", " ──", " rank"))]
    assert len(table) == 2 + 4 and len(lines) - len(table) <= 7
    assert lines[-1].startswith("another order of these stages")
    assert "imbalance" in lines[0] and "by simulation" in lines[8]
    assert "F and B of stage 3 on rank 3 take 1.33x" in "".join(lines)
    *_, nothing, last_line = run_command(capsys, "explain", "gpipe", "--ranks=1").splitlines()
    assert nothing.endswith("by simulation") and last_line.endswith("saves nothing")
    assert '"imbalance"' in run_command(capsys, "explain", "gpipe", "--json")
    with monkeypatch.context() as patch:
        patch.setattr(what_if, "MAX_COMPILED_INSTRUCTIONS", 60)
        large_run = run_command(capsys, "explain", "gpipe", "--ranks=4")
    assert "instructions are not tried" in large_run

    measured = replace(simulate_schedule(one_f_one_b, COSTS), kind="measured", unit="s")
    schedir.save_timeline(measured, "x.timeline")
    lines = run_command(capsys, "explain", "x.timeline").splitlines()
    assert "at the run's mean times" in lines[8] and "unexplained" not in lines[8]
    spans = measured.spans.copy()
    # The host delays each compute by more than a message takes.
    spans["start"] += 0.5 * np.isin(spans["op"], COMPUTE_OPS)
    schedir.save_timeline(replace(measured, spans=spans), "late.timeline")
    assert "19.9% of the ranks' time is unexplained" in run_command(
        capsys, "explain", "late.timeline"
    )
    assert "--ranks" in run_refused_command(capsys, "explain", "x.timeline", "--ranks=3")
