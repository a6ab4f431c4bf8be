"""Tests that no schedule is below a lower bound, and that bounds match published results."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import schedir
from schedir import Costs, PipelineShape, Sizes, lower_bound, schedules
from schedir.compiler.compile import lower
from schedir.errors import CostsError, ScheduleError
from schedir.ir.program import Program
from schedir.predict.simulate import simulate
from schedir.schedule_search.bounds.closed_form_bounds import compute_closed_bound
from schedir.schedule_search.bounds.lower_bound import compute_bound
from schedir.schedule_search.bounds.memory_precedences import MemoryLags
from schedir.schedule_search.bounds.microbatch_latency import MicrobatchLatency
from schedir.schedule_search.bounds.program_bound import compute_program_bound
from schedir.schedule_search.bounds.round_trip import crossing_delays
from schedir.schedule_search.problem import OBJECTIVES, Objective, SchedulingProblem, make_problem
from schedir.schedule_search.rank_order import (
    KINDS,
    F,
    I,
    W,
    compute_length,
    compute_peaks,
    compute_starts,
    order_of_program,
)
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.testing import compute_programs, shapes_for
from tests.cases import ALL
from tests.interleavings import find_shortest_length
from tests.strategies import costs

UNREPLICATED_PLACEMENTS = ("loop", "vee", "given")
TOLERANCE = 1 - 1e-9

# arXiv 2401.10241: from Table 9 the times of F, B, W and a message, and from Table 5 the idle part
# of ZB-1p's own span.
# fmt: off
ZB_1P_ROWS = [  # hidden size, heads, ranks, microbatches
    (2304, 24, 8, 24, 18.522, 18.086, 9.337, 0.601, 0.1585),
    (2304, 24, 8, 32, 18.513, 18.086, 9.331, 0.626, 0.1242),
    (2304, 24, 8, 64, 18.546, 18.097, 9.321, 0.762, 0.0674),
    (4096, 32, 8, 24, 29.718, 29.444, 19.927, 0.527, 0.1323),
    (4096, 32, 8, 32, 29.802, 29.428, 19.530, 0.577, 0.1045),
    (4096, 32, 8, 64, 29.935, 29.621, 19.388, 0.535, 0.0554),
    (5120, 40, 16, 48, 11.347, 11.248, 8.132, 0.377, 0.1397),
    (5120, 40, 16, 64, 11.307, 11.254, 8.101, 0.379, 0.1088),
    (5120, 40, 16, 128, 11.325, 11.308, 8.109, 0.378, 0.0576),
    (6144, 48, 32, 96, 10.419, 10.207, 7.715, 0.408, 0.1421),
    (6144, 48, 32, 128, 10.408, 10.204, 7.703, 0.408, 0.1106),
    (6144, 48, 32, 256, 10.402, 10.248, 7.698, 0.460, 0.0594),
]
ZB_2P_IDLE_SHARES = [
    0.0433, 0.0039, 0.0026, 0.0029, 0.0022, 0.0010,
    0.0066, 0.0054, 0.0028, 0.0038, 0.0029, 0.0018,
]
# fmt: on


@pytest.mark.parametrize(("row", "twice"), [*zip(ZB_1P_ROWS, ZB_2P_IDLE_SHARES, strict=True)])
def test_bounds_match_zero_bubble_paper(row: tuple[float, ...], twice: float) -> None:
    """The paper's ZB-1p reaches the lower bound at its memory. Its ZB-2p is not below the bound."""
    hidden, heads, ranks, m = map(int, row[:4])
    *times, printed = row[4:]
    # Section 3.1 of the paper, with sequences of 1024 tokens.
    deferred = 32 * hidden / (34 * hidden + 5 * heads * 1024)
    measured_costs = Costs(F=times[0], I=times[1], W=times[2], send=times[3])
    sizes = Sizes(saved=1.0, deferred_wgrad=deferred)
    work = m * sum(times[:3])
    idle_of_zb_1p, idle_of_zb_2p = (
        1
        - work
        / lower_bound(
            PipelineShape(ranks, m), measured_costs, sizes, limit, objective="active_span"
        ).value
        for limit in (ranks, 2 * ranks)
    )
    assert round(idle_of_zb_1p, 4) == printed
    assert idle_of_zb_2p <= twice + 5e-5


def test_explanation_of_bound() -> None:
    measured_costs = Costs(F=18.522, I=18.086, W=9.337, send=0.601)
    bound = lower_bound(PipelineShape(8, 24), measured_costs, max_in_flight=8)
    assert bound.explanation == (
        "rank 0 computes for 1102.68 with at most 8 in flight; it is idle for 135.016 between its "
        "8th F and its first I, and 72.709 between its last F and its last I"
    )
    assert bound.value == pytest.approx(1102.68 + 135.016 + 72.709)


def test_explanation_of_full_backwards_names_B() -> None:
    shape, costs = PipelineShape(4, 8), Costs(F=1, B=2)
    bound = lower_bound(shape, costs, max_in_flight=4, split_backward=False)
    assert bound.explanation == (
        "rank 0 computes for 24 with at most 4 in flight; it is idle for 6 between its 4th F and "
        "its first B, and 3 between its last F and its last B"
    )


def test_built_in_schedules_are_not_below_bound() -> None:
    bound_count, exact_count = 0, 0
    for name in schedules.__all__:
        schedule = getattr(schedules, name)
        all_shapes = shapes_for(schedule, ranks=4, microbatches=4, stages_per_rank=2)
        for shape in all_shapes[:: 1 if ALL else 3]:
            uneven_costs = Costs(
                F=tuple(3.0 + s % 3 for s in range(shape.stages)), I=3, W=2, send=0.5
            )
            try:
                program = lower(expand_schedule(schedule, shape), uneven_costs)
            except ScheduleError:  # the schedule needs more microbatches
                continue
            if (bound := compute_program_bound(program, uneven_costs)) is not None:
                span = simulate(program, uneven_costs).span
                assert bound.value * TOLERANCE <= span, (name, shape)
                bound_count += 1
                exact_count += span * TOLERANCE <= bound.value
    assert bound_count > exact_count > (200 if ALL else 60)


@settings(max_examples=150)
@given(st.data())
def test_random_programs_are_not_below_bound(data: st.DataObject) -> None:
    """This holds for any order, full and split backwards, and memory in counts and bytes."""
    draft = data.draw(compute_programs(placements=UNREPLICATED_PLACEMENTS))
    if data.draw(st.booleans()):
        draft = _shuffle_microbatches(draft, data.draw(st.randoms(use_true_random=False)))
    drawn_costs = data.draw(costs(draft.shape))
    drawn_costs = replace(drawn_costs, step=data.draw(st.integers(0, 3)))
    sizes = Sizes(saved=3, deferred_wgrad=data.draw(st.integers(0, 5)), model_states=1)
    program = lower(draft, drawn_costs)
    timeline = simulate(program, drawn_costs)
    for sizes_or_none in (None, sizes):
        for objective in OBJECTIVES:
            bound = compute_program_bound(program, drawn_costs, sizes_or_none, objective=objective)
            duration = timeline.span if objective == "span" else timeline.active_span.max()
            assert bound is None or bound.value * TOLERANCE <= duration


def _shuffle_microbatches(draft: Program, rng: random.Random) -> Program:
    """Return the same program with shuffled microbatch numbers, so that no order ascends."""
    number = [*range(draft.shape.microbatches)]
    rng.shuffle(number)
    streams = tuple(
        schedir.Stream.from_instructions([i._replace(mb=number[i.mb]) for i in stream])
        for stream in draft.streams
    )
    return replace(draft, streams=streams)


@settings(max_examples=150)
@given(st.data())
def test_random_orders_are_not_below_bound(data: st.DataObject) -> None:
    """This holds for uneven memory, full and split backwards, and every objective."""
    split = data.draw(st.booleans())
    draft = data.draw(
        compute_programs(3, 4, 2, split=float(split), placements=UNREPLICATED_PLACEMENTS)
    )
    problem, order = (
        data.draw(problems(draft.shape, split)),
        order_of_program(draft, split_backward=split),
    )
    peaks = compute_peaks(problem, order)
    if data.draw(st.booleans()):
        peaks = [max(peaks)] * len(peaks)
    problem = replace(problem, capacity=tuple(peaks))
    length = compute_length(problem, order)
    assert length is not None
    for bound in (compute_closed_bound(problem), compute_bound(problem, 1.0)):
        assert bound.value * TOLERANCE <= length, bound.explanation


@settings(max_examples=200)
@given(st.data())
def test_memory_lags_hold_in_random_orders(data: st.DataObject) -> None:
    """Each lag holds in any order if the capacity is the peak memory of the order."""
    split = data.draw(st.booleans())
    draft = data.draw(
        compute_programs(2, 5, 3, split=float(split), placements=UNREPLICATED_PLACEMENTS)
    )
    assert_lags_hold(
        data.draw(problems(draft.shape, split)), order_of_program(draft, split_backward=split)
    )


@pytest.mark.parametrize("saved", [1.0, 2.0])
def test_memory_lags_of_later_stage_hold(saved: float) -> None:
    """Two deferred W of the later stage are in memory, and only one F fits beside them."""
    problem = replace(make_problem(PipelineShape(1, 3, 2)), saved=(saved, 1.0))
    first_order = (0, 3, 4, 1, 2)  # F and F, I and I, W of the first stage
    assert_lags_hold(problem, [(*first_order, *first_order, 0, 5, 5, *first_order[1:], 5)])


def assert_lags_hold(problem: SchedulingProblem, order: Sequence[Sequence[int]]) -> None:
    lags = MemoryLags.from_problem(replace(problem, capacity=tuple(compute_peaks(problem, order))))
    positions = [
        [k for k, c in enumerate(order[problem.rank_of[code // KINDS]]) if c == code]
        for code in range(KINDS * problem.shape.stages)
    ]
    for later_kind, earlier_kind, stage_lags in (
        (F, I, lags.F_after_I),
        (F, W, lags.F_after_W),
        (I, W, lags.I_after_W),
    ):
        for s, q, lag in stage_lags:
            later_positions, earlier_positions = (
                positions[KINDS * s + later_kind],
                positions[KINDS * q + earlier_kind],
            )
            assert all(
                earlier_positions[j - lag] < later_positions[j]
                for j in range(lag, len(later_positions))
            )


@settings(max_examples=150)
@given(st.data())
def test_crossing_delays_bound_delays_of_microbatches(data: st.DataObject) -> None:
    """For microbatches in a row on a stage, one of the options is a lower bound of their delays."""
    k = data.draw(st.integers(2, 4))
    shape = PipelineShape(data.draw(st.integers(2, 5)), data.draw(st.integers(k + 1, 3 * k + 2)))
    even = st.builds(Costs, F=st.just(1), I=st.integers(1, 2), W=st.integers(0, 1))
    drawn_costs = data.draw(st.one_of(even, costs(shape)))
    draft = schedir.greedy_schedule(
        shape, data.draw(st.sampled_from(["FIW", "IFW", "WIF"])), k, drawn_costs
    )
    try:
        problem = make_problem(shape, drawn_costs, max_in_flight=k)
    except CostsError:  # all costs are 0
        reject()
    order, paths = (
        order_of_program(draft, split_backward=True),
        MicrobatchLatency.from_problem(problem),
    )
    started = compute_starts(problem, order)
    assert started is not None
    for s in range(shape.ranks - 1):
        begins, backward_starts = (
            [t for t, code in zip(started[s], order[s], strict=True) if code == KINDS * s + kind]
            for kind in (F, I)
        )
        latency = problem.F[s] + paths.forward_to_backward[s]
        round_trip = latency + problem.I[s] + problem.W[s]
        delays = [i - f - latency for f, i in zip(begins, backward_starts, strict=True)]
        options = [*crossing_delays(problem, paths, s, round_trip)]
        for j in range(shape.microbatches - k):
            extra = begins[j + k] - begins[j] - round_trip  # delay and waiting time
            assert extra >= delays[j] - 1e-9
            for i in range(1, k):
                sum_of_three = extra + delays[j + i] + delays[j + k] + 1e-9
                assert any(delays[j + i] + 1e-9 >= x and sum_of_three >= y for x, y in options)


@st.composite
def problems(draw: st.DrawFn, shape: PipelineShape, split: bool) -> SchedulingProblem:
    """Draw scheduling problems without a memory limit."""
    drawn_costs = replace(draw(costs(shape)), step=draw(st.integers(0, 4)))
    try:
        problem = make_problem(
            shape, drawn_costs, split_backward=split, objective=draw(st.sampled_from(OBJECTIVES))
        )
    except CostsError:  # all costs are 0
        problem = make_problem(shape, split_backward=split)
    saved = [draw(st.integers(1, 4)) for _ in range(shape.stages)]
    tape = [draw(st.integers(0, s + 1)) if split else 0 for s in saved]
    joint = [draw(st.integers(max(s, t), s + t)) for s, t in zip(saved, tape, strict=True)]
    saved_sizes, deferred_sizes, joint_sizes = (
        tuple(map(float, size)) for size in (saved, tape, joint)
    )
    return replace(
        problem, saved=saved_sizes, deferred_wgrad=deferred_sizes, saved_and_deferred=joint_sizes
    )


@pytest.mark.parametrize("saved", [3948874965.6583247, 1.1, 7e9 / 3])
def test_rounded_sums_of_bytes_keep_bound(saved: float) -> None:
    """A limit of three saved activations allows three, also if sums of bytes are rounded."""
    for tape in (0.77 * saved, 0.0):
        in_bytes = Sizes(saved=saved, deferred_wgrad=tape), 3 * saved
        in_units = Sizes(saved=1.0, deferred_wgrad=tape / saved), 3.0
        even_costs = Costs(F=2, I=2, W=2, send=0.1)
        for shape in (PipelineShape(4, 8), PipelineShape(1, 5, 3), PipelineShape(2, 5, 2)):
            for seconds in (1e-9, 1.0):
                bound_in_bytes, bound_in_units = (
                    lower_bound(shape, even_costs, *limits, time_limit=seconds)
                    for limits in (in_bytes, in_units)
                )
                assert bound_in_bytes.value == pytest.approx(bound_in_units.value, rel=1e-9)


# ---------------------------------------------------------------- against all orders


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_exhaustive_optimum_is_not_below_bound(data: st.DataObject) -> None:
    shape = data.draw(
        st.sampled_from(
            [
                PipelineShape(2, 2),
                PipelineShape(1, 3),
                PipelineShape(1, 2, 2),
                PipelineShape(3, 1),
                PipelineShape(2, 3),
            ]
        )
    )
    problem = data.draw(problems(shape, data.draw(st.booleans())))
    capacity = [
        problem.get_min_capacity(r) + data.draw(st.integers(0, 4)) for r in range(shape.ranks)
    ]
    problem = replace(problem, capacity=tuple(capacity))
    optimum = find_shortest_length(problem)
    assert compute_closed_bound(problem).value * TOLERANCE <= optimum
    assert compute_bound(problem, 1.0).value * TOLERANCE <= optimum


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_bound_of_small_shape_is_exact(in_flight: int, objective: Objective) -> None:
    for priced in (Costs(), Costs(F=2, I=3, W=1, send=1), Costs(F=(3, 1), I=2, W=(0, 4))):
        problem = make_problem(
            PipelineShape(2, 3), priced, max_in_flight=in_flight, objective=objective
        )
        assert compute_bound(problem).value == pytest.approx(find_shortest_length(problem))


@pytest.mark.parametrize(
    ("shape", "priced", "given"),
    [
        (PipelineShape(1, 1), Costs(), {}),
        (PipelineShape(1, 5), Costs(W=0), {"max_in_flight": 1}),
        (PipelineShape(4, 1), Costs(send=1), {"max_in_flight": 1}),
        (PipelineShape(4, 9), Costs(F=(0, 0, 100, 0), I=0, W=0), {}),
        (PipelineShape(3, 4, 2, "vee"), Costs(F=0, I=0, W=1), {"max_in_flight": 4}),
        (PipelineShape(2, 3), Costs(), {"memory_limit": float("inf"), "sizes": Sizes(saved=1)}),
        (PipelineShape(2, 3), Costs(), {"memory_limit": 5.0, "sizes": Sizes(saved=0)}),
    ],
)
@pytest.mark.parametrize("split", [True, False])
def test_bound_exists_for_extreme_inputs(
    shape: PipelineShape, priced: Costs, given: dict[str, Any], split: bool
) -> None:
    bound = lower_bound(shape, priced, **given, split_backward=split)
    draft = schedir.greedy_schedule(
        shape, "FIW" if split else "BF", len(shape.stages_on_rank[0]), priced
    )
    assert 0 < bound.value <= simulate(draft, priced).span
    assert bound.explanation


# ---------------------------------------------------------------- bounds of programs


def test_program_bound_of_1f1b() -> None:
    """1F1B is optimal with full backwards at its memory. Split backwards shorten the span."""
    shape, unit_costs = PipelineShape(4, 8), Costs()
    program = schedir.compile(schedules.one_f_one_b, shape)
    span = simulate(program, unit_costs).span
    full_bound, split_bound = (
        compute_program_bound(program, unit_costs, split_backward=split) for split in (None, True)
    )
    assert full_bound is not None
    assert split_bound is not None
    assert full_bound.value == span
    assert (
        split_bound.value
        == simulate(schedir.compile(schedules.zb_h1, shape), unit_costs).span
        < span
    )


def test_program_bound_in_bytes() -> None:
    program = schedir.compile(schedules.zb_h1, PipelineShape(4, 8))
    in_bytes = compute_program_bound(
        program, sizes=Sizes(saved=2e9, deferred_wgrad=2e9, model_states=(3e9, 0, 0, 0))
    )
    assert in_bytes is not None
    counted = lower_bound(PipelineShape(4, 8), max_in_flight=lambda rank: 4 if rank == 0 else 5)
    assert in_bytes.value == counted.value


def test_program_bound_uses_least_microbatch_cost() -> None:
    program = schedir.compile(schedules.zb_h1, PipelineShape(2, 3))
    uneven = compute_program_bound(program, Costs(F=((1, 2, 5),)))
    assert uneven == compute_program_bound(program, Costs(F=1))


def test_unsupported_programs_have_no_bound() -> None:
    zb, chimera = schedules.zb_h1, schedules.chimera
    assert compute_program_bound(schedir.compile(zb, PipelineShape(4, 8), frozen_stages=1)) is None
    assert compute_program_bound(schedir.compile(zb, PipelineShape(4, 8), recompute="all")) is None
    assert (
        compute_program_bound(schedir.compile(chimera, PipelineShape(4, 8, placement="mirror")))
        is None
    )
    assert (
        compute_program_bound(schedir.compile(schedules.forward_only, PipelineShape(4, 8))) is None
    )
    assert (
        compute_program_bound(schedir.compile(zb, PipelineShape(4, 8)), Costs(F=0, I=0, W=0))
        is None
    )
    paired = schedir.compile(schedules.dualpipe_v, PipelineShape(2, 8, 2, "vee"))
    assert compute_program_bound(paired, Costs()) is not None
    assert compute_program_bound(paired, Costs(FB=2)) is None
