"""Activation recomputation: the places of R, its memory and time, and errors."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir.__main__ import main
from schedir.compiler.compile import compile
from schedir.compiler.relower import Lowering
from schedir.errors import (
    MemoryLimitError,
    ScheduleError,
    UsageError,
)
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import FORWARD, RECOMPUTE
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.ir.text_format import from_text, to_text
from schedir.predict.simulate import simulate
from schedir.predict.what_if import advise
from schedir.schedules import (
    get_built_in_schedules,
    gpipe,
    interleaved,
    interleaved_zb,
    one_f_one_b,
    zb_h1,
)
from schedir.schedules.greedy import greedy_schedule
from schedir.schedules.schedule_algebra import B, F, I, R, RankSchedule, W
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.testing import compute_programs
from schedir.verify.check import check
from tests.cases import cases, each_value
from tests.laws import ZOO, find_min_microbatches, make_shape

SIZES = Sizes(saved=10, recompute_inputs=1)


def list_recomputes(program: Program) -> list[list[str]]:
    """Return the R instructions of each rank in order."""
    return [[str(i) for i in stream if i.op is RECOMPUTE] for stream in program.streams]


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (2 * F + 2 * (R + B), "F0 F1 R0 B0 R1 B1"),
        (2 * F + 2 * R + 2 * B, "F0 F1 R0 R1 B0 B1"),
        (2 * F + B + R + B, "F0 F1 B0 R1 B1"),
        (3 * F + R + B + R + R + 2 * B, "F0 F1 F2 R0 B0 R1 R2 B1 B2"),
        (2 * F + R + B.at(1) + R + B.at(0), "F0 F1 R1 B1 R0 B0"),
        (2 * F + R.at(1) + B + B, "F0 F1 R1 B0 B1"),
        (2 * F + R + I + W + R + I + W, "F0 F1 R0 I0 W0 R1 I1 W1"),
    ],
)
def test_recompute_letter_belongs_to_next_backward(word: RankSchedule, expected: str) -> None:
    program = expand_schedule(lambda r, P, m: word, PipelineShape(1, word.letters.size and 3))
    assert [f"{i}".replace(" 0.", "") for i in program.streams[0]] == expected.split()


def test_recompute_letters_count_per_local_stage() -> None:
    word = F[0] + F[0] + F[1] + F[1] + R[1] + B[1] + R[0] + R[1] + B[1] + B[0] + R[0] + B[0]
    program = expand_schedule(lambda r, P, m, v: word, PipelineShape(1, 2, 2))
    recomputes = [str(i) for i in program.streams[0] if i.op is RECOMPUTE]
    assert recomputes == ["R 1.0", "R 0.0", "R 1.1", "R 0.1"]


def test_recompute_without_later_backward_is_refused() -> None:
    with pytest.raises(ScheduleError, match="letter #3") as caught:
        expand_schedule(lambda r, P, m: F + R + B + R, PipelineShape(1, 1))
    assert "F + R + B" in caught.value.hint


def test_program_with_recompute_round_trips() -> None:
    program = compile(interleaved, PipelineShape(2, 4, 2), recompute="all")
    assert RECOMPUTE in program.used_opcodes
    assert from_text(to_text(program)) == program == check(program)


# ---------------------------------------------------------------- memory and time


def test_recompute_peak_memory_by_hand() -> None:
    """All microbatches in flight except one have only their recompute inputs."""
    for schedule, shape, full_peaks, recompute_peaks in (
        (one_f_one_b, PipelineShape(2, 4), [20, 10], [11, 10]),
        (interleaved, PipelineShape(2, 4, 2), [50, 30], [14, 12]),
    ):
        plain, program = compile(schedule, shape), compile(schedule, shape, recompute="all")
        runs = [simulate(p, sizes=SIZES) for p in (plain, program)]
        assert [run.peak_memory.tolist() for run in runs] == [full_peaks, recompute_peaks]
        assert runs[0].peak_in_flight.tolist() == runs[1].peak_in_flight.tolist()


def test_recompute_inputs_default_to_input_activation() -> None:
    sizes = Sizes(activation=(1, 2, 3), saved=10)
    assert sizes.for_stages("recompute_inputs", 3).tolist() == [0, 1, 2]
    assert Sizes(recompute_inputs=5).for_stages("recompute_inputs", 2).tolist() == [5, 5]


def test_recompute_cost_defaults_to_forward_cost() -> None:
    program = compile(one_f_one_b, PipelineShape(2, 4), recompute="all")
    assert simulate(program, Costs(F=1, B=2)).busy.tolist() == [4 * 3 + 4, 4 * 3]
    assert simulate(program, Costs(F=1, B=2, R=0.5)).busy.tolist() == [4 * 3 + 2, 4 * 3]


def test_recompute_overlaps_wait_for_gradient() -> None:
    """R runs while a rank waits for a gradient, so it costs less than a longer B."""
    costs = Costs(F=1, B=2)
    program = compile(gpipe, PipelineShape(4, 4), recompute=lambda stage, mb: mb == 0, costs=costs)
    assert sum(map(len, list_recomputes(program))) == 4
    plain = simulate(compile(gpipe, PipelineShape(4, 4)), costs).span
    assert simulate(program, costs).span == plain + 1  # only the R of the last rank adds time
    inside = Costs(F=1, B=((3, 2, 2, 2),))
    assert simulate(compile(gpipe, PipelineShape(4, 4)), inside).span == plain + 4


@pytest.mark.parametrize("schedule", ZOO.values(), ids=ZOO)
def test_early_recompute_is_no_worse_than_late(schedule: Any) -> None:
    if schedule is get_built_in_schedules()["forward_only"]:
        assert RECOMPUTE not in compile(schedule, PipelineShape(4, 8), recompute="all").used_opcodes
        return
    shape = make_shape(schedule, 4, max(8, find_min_microbatches(schedule, 4)))
    for costs in (Costs(F=1, I=1, W=1), Costs(F=2, I=3, W=1, send=0.5, R=1)):
        runs = [
            simulate(p, costs, sizes=SIZES)
            for p in (
                compile(schedule, shape, costs=costs),
                compile(schedule, shape, costs=costs, recompute="all", recompute_at="late"),
                compile(schedule, shape, costs=costs, recompute="all"),
            )
        ]
        assert runs[2].span <= runs[1].span
        assert (runs[2].peak_memory <= runs[1].peak_memory).all()
        assert (runs[1].peak_memory <= runs[0].peak_memory).all()


@pytest.mark.parametrize("schedule", [one_f_one_b, zb_h1, interleaved_zb])
@pytest.mark.parametrize("ranks", [3, 4])
def test_early_recompute_moves_only_if_program_is_shorter(schedule: Any, ranks: int) -> None:
    shape, costs = PipelineShape(ranks, 4), Costs(F=1, B=2, send=1)
    early, late = (
        compile(schedule, shape, costs=costs, recompute="all", recompute_at=recompute_at)
        for recompute_at in ("early", "late")
    )
    early_span, late_span = (simulate(program, costs).span for program in (early, late))
    assert early_span < late_span or to_text(early) == to_text(late)


def test_early_recompute_runs_before_waiting_forward() -> None:
    """With "early", R runs before a forward that waits for its input."""

    def schedule(rank: int, ranks: int, microbatches: int) -> RankSchedule:
        return 3 * F + 3 * B if rank == 0 else F.at(0) + F.at(1) + B.at(0) + F.at(2) + B + B

    costs = Costs(F=(4, 1), B=(1, 1), R=1)
    selection = {(1, 0), (1, 1)}
    late, early = (
        compile(
            schedule,
            PipelineShape(2, 3),
            costs=costs,
            recompute=selection,
            recompute_at=recompute_at,
        )
        for recompute_at in ("late", "early")
    )
    assert list_recomputes(late) == list_recomputes(early)
    order = [str(i) for i in early.streams[1] if i.op in (FORWARD, RECOMPUTE)]
    assert order == ["F 1.0", "R 1.0", "F 1.1", "R 1.1", "F 1.2"]
    assert simulate(early, costs).span < simulate(late, costs).span


@settings(max_examples=40)
@given(compute_programs(), st.sets(st.integers(0, 30)), st.booleans())
def test_recompute_of_random_draft(program: Program, some: set[int], late: bool) -> None:
    options: dict[str, Any] = {"recompute_at": "late"} if late else {}
    lowered = compile(program, recompute=lambda s, m: 5 * s + m in some, debug=True, **options)
    recomputed = {
        tuple(map(int, name[2:].split(".")))
        for rank_recomputes in list_recomputes(lowered)
        for name in rank_recomputes
    }
    assert all(5 * s + m in some for s, m in recomputed)
    assert len(recomputed) == sum(map(len, list_recomputes(lowered)))


def test_selected_microbatches_are_recomputed() -> None:
    shape = PipelineShape(2, 3)
    recomputes = {
        selection: list_recomputes(compile(one_f_one_b, shape, recompute=selection))
        for selection in ("0.1", "0", "1", "all")
    }
    assert recomputes["0.1"] == [["R 0.1"], []]
    assert recomputes["0"] == recomputes["all"] == [["R 0.0", "R 0.1", "R 0.2"], []]
    # On the last rank each backward follows its forward, so R would save no memory.
    assert recomputes["1"] == [[], []]
    assert list_recomputes(compile(one_f_one_b, shape, recompute=[(0, 1)])) == recomputes["0.1"]
    assert list_recomputes(compile(one_f_one_b, shape, recompute=[0])) == recomputes["0"]
    frozen = compile(one_f_one_b, shape, recompute="all", frozen_stages=1)
    assert list_recomputes(frozen) == [[], []]


def test_recompute_in_schedule_is_kept() -> None:
    def schedule(rank: int, ranks: int, microbatches: int) -> RankSchedule:
        return 2 * F + R + B + B

    program = compile(schedule, PipelineShape(1, 2), recompute="all")
    assert list_recomputes(program) == [["R 0.0", "R 0.1"]]


def test_greedy_draft_is_recomputed() -> None:
    draft = greedy_schedule(PipelineShape(3, 6), "BF", 3)
    program = compile(draft, recompute="all")
    assert (
        simulate(program, sizes=SIZES).peak_memory.max()
        < simulate(compile(draft), sizes=SIZES).peak_memory.max()
    )


# ---------------------------------------------------------------- as few as fit


def test_fit_recomputes_nothing_within_limit() -> None:
    program = compile(
        one_f_one_b, PipelineShape(4, 8), recompute="fit", sizes=SIZES, memory_limit=40
    )
    assert program == compile(one_f_one_b, PipelineShape(4, 8))


@pytest.mark.parametrize(("limit", "slots"), each_value([39, 31, 25, 22, 13], [None, "minimal"]))
def test_fit_stays_within_limit(limit: float, slots: Any) -> None:
    program = compile(
        one_f_one_b,
        PipelineShape(4, 8),
        recompute="fit",
        sizes=SIZES,
        memory_limit=limit,
        buffer_sharing=slots,
    )
    assert simulate(program, sizes=SIZES).peak_memory.max() <= limit
    assert not list_recomputes(program)[3]


@pytest.mark.parametrize(
    ("schedule", "shape"),
    cases(
        [(one_f_one_b, PipelineShape(3, 4)), (zb_h1, PipelineShape(2, 4))],
        [(gpipe, PipelineShape(2, 4)), (one_f_one_b, PipelineShape(3, 5))],
    ),
)
def test_fit_recomputes_minimal_set(schedule: Any, shape: PipelineShape) -> None:
    """All smaller sets of recomputations of a rank exceed the memory limit."""
    all_recomputed = compile(schedule, shape, recompute="all", recompute_at="late")
    for limit in (31, 22, 21, 13):
        try:
            program = compile(schedule, shape, recompute="fit", sizes=SIZES, memory_limit=limit)
        except MemoryLimitError:
            assert simulate(all_recomputed, sizes=SIZES).peak_memory.max() > limit
            continue
        for rank, rank_recomputes in enumerate(list_recomputes(program)):
            pairs = [(rank, mb) for mb in range(shape.microbatches)]
            for fewer in (
                combinations(pairs, max(len(rank_recomputes) - 1, 0)) if rank_recomputes else ()
            ):
                with_fewer = compile(schedule, shape, recompute=list(fewer))
                assert simulate(with_fewer, sizes=SIZES).peak_memory[rank] > limit


def test_unreachable_limit_is_refused() -> None:
    with pytest.raises(MemoryLimitError) as caught:
        compile(one_f_one_b, PipelineShape(4, 8), recompute="fit", sizes=SIZES, memory_limit=9)
    assert caught.value.required_bytes == 13


@pytest.mark.parametrize("given", [{}, {"sizes": SIZES}])
def test_fit_needs_sizes_and_limit(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        compile(one_f_one_b, PipelineShape(4, 8), recompute="fit", **given)
    assert "recompute" in caught.value.fields


# ---------------------------------------------------------------- output of commands


def test_advice_simulates_recompute_all_and_none() -> None:
    costs = Costs(F=1, B=2)
    without_recompute = compile(one_f_one_b, PipelineShape(4, 8), costs=costs)
    with_recompute = compile(one_f_one_b, PipelineShape(4, 8), recompute="all", costs=costs)
    for program, description, other_program in (
        (without_recompute, 'recompute="all"', with_recompute),
        (with_recompute, "all saved activations kept", without_recompute),
    ):
        # There is no advice about memory without sizes.
        assert not advise(simulate(program, costs), costs).memory_changes
        (change,) = advise(simulate(program, costs, sizes=SIZES), costs).memory_changes
        assert change.description == description and change.run.program == other_program
        run = simulate(other_program, costs, sizes=SIZES)
        assert change.run.span == run.span
        assert change.memory == {"device": run.peak_memory.max()}


def test_advice_omits_current_recompute_setting() -> None:
    costs = Costs(F=1, B=2, send=0.2)
    program = compile(one_f_one_b, PipelineShape(4, 8))  # compiled for other costs
    changes = advise(simulate(program, costs, sizes=SIZES), costs).memory_changes
    assert [change.description for change in changes] == ['recompute="all"']


def test_print_and_draw_show_recomputes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["print", "one_f_one_b", "-O", "recompute=0.1,1"]) == 0
    assert "  R 0.1\n" in capsys.readouterr().out
    assert main(["draw", "one_f_one_b", "-O", "recompute=all"]) == 0
    assert "R7" in capsys.readouterr().out


def test_check_and_simulate_print_recomputed_forwards(capsys: pytest.CaptureFixture[str]) -> None:
    fits = [
        "gpipe",
        "--ranks",
        "2",
        "--microbatches",
        "4",
        "--sizes",
        "saved=10,recompute_inputs=1",
    ]
    for command in ("check", "simulate"):
        assert main([command, *fits, "--memory-limit", "25", "-O", "recompute=fit"]) == 0
        line = "recomputed: 4 of 8 forwards: mb 2-3 of stage 0, mb 2-3 of stage 1\n"
        assert line in capsys.readouterr().out
        assert main([command, *fits]) == 0
        assert "recomputed" not in capsys.readouterr().out


def test_advised_schedules_keep_recompute() -> None:
    """Other schedules in the advice have the `recompute` of the program."""
    program, costs = compile(gpipe, PipelineShape(4, 8), recompute="all"), Costs(F=1, B=2)
    for change in advise(simulate(program, costs), costs).changes:
        assert RECOMPUTE in change.run.program.used_opcodes
    lowering = Lowering(program, "per_device")
    assert (
        RECOMPUTE
        in lowering.compile_draft(
            expand_schedule(one_f_one_b, PipelineShape(4, 8)), costs
        ).used_opcodes
    )


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "how", ["some", 5, [(0, 1, 2)], ["a"], [7], [(0, 9)], [-1], object(), "0.1.2", "fit,1"]
)
def test_invalid_recompute_is_refused(how: Any) -> None:
    with pytest.raises(UsageError) as caught:
        compile(one_f_one_b, PipelineShape(4, 8), recompute=how)
    assert "recompute" in caught.value.fields


def test_recompute_at_must_be_early_or_late() -> None:
    with pytest.raises(UsageError, match="early or late"):
        compile(one_f_one_b, PipelineShape(4, 8), recompute="all", recompute_at="soon")


def test_memory_curve_counts_recomputed_activations() -> None:
    """Count the live activations: R adds memory at its start, and B frees it at its end."""
    program = compile(interleaved, PipelineShape(2, 4, 2), recompute="all")
    run = simulate(program, Costs(F=1, B=2, send=0.25), sizes=SIZES)
    for rank, curve in enumerate(run.memory):
        spans = run.spans[run.spans["rank"] == rank]
        op_names = np.array([str(i.op.name) for i in program.streams[rank]])
        for time, live_bytes in dict(zip(curve.times, curve.total, strict=True)).items():
            started = op_names[spans["start"] <= time]
            ended = op_names[spans["end"] <= time]
            recomputed = {(s["stage"], s["mb"]) for s in spans[op_names == "Recompute"]}
            size = [
                1 if (s["stage"], s["mb"]) in recomputed else 10
                for s in spans[op_names == "Forward"]
            ]
            expected_bytes = sum(np.array(size)[: (started == "Forward").sum()])
            expected_bytes += 9 * (started == "Recompute").sum()
            assert live_bytes == expected_bytes - 10 * (ended == "Backward").sum()
