"""Compare every built-in schedule with its published formulas, and test where they hold.

Idle time has two measures: in the span of the run, and in the active span of a rank.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir.__main__ import main
from schedir.analysis.progress_models import MODELS
from schedir.compiler.compile import compile
from schedir.errors import ScheduleError, ShapeError
from schedir.ir.cost.costs import Costs
from schedir.ir.isa.instructions import INSTRUCTIONS, Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import JOINED_BIT
from schedir.predict.simulate import simulate
from schedir.schedules import (
    bitpipe,
    chimera,
    dualpipe,
    dualpipe_v,
    eager_1f1b,
    forward_only,
    interleaved,
    interleaved_zb,
    looped_bfs,
    looped_dfs,
    one_f_one_b,
    v_half,
    v_min,
    wave,
    zb_h1,
    zb_h2,
    zb_v,
)
from schedir.schedules.schedule_algebra import RankSchedule, Schedule
from schedir.schedules.schedule_expansion import expand_schedule
from tests.cases import each_value
from tests.laws import (
    TRIPLES,
    TWO_WAY,
    ZOO,
    find_min_microbatches,
    list_cases,
    make_shape,
    simulate_schedule,
)
from tests.zero_bubble_figures import PRINTED, Row, read_rows

# ------------------------------------------------------------------ full backwards


@pytest.mark.parametrize("schedule", [one_f_one_b, eager_1f1b])
def test_1f1b_has_published_idle_time(schedule: Schedule) -> None:
    for c in list_cases(schedule, lambda P: [P, 2 * P + 1]):
        microbatch_time = c.F + c.I + c.W
        assert c.idle == (c.P - 1) * microbatch_time
        assert c.own == [(c.P - 1 - r) * microbatch_time for r in range(c.P)]
        hops = 2 if schedule is eager_1f1b else 1
        assert c.peak == [min(hops * (c.P - 1 - r) + 1, c.m) for r in range(c.P)]


@pytest.mark.parametrize("send", [0.25, 1.0, 1.5])
def test_eager_1f1b_hides_messages(send: float) -> None:
    """In P microbatches, 1F1B waits for P - 1 messages each way. Eager 1F1B never waits."""
    costs, few_shape, many_shape = (
        Costs(F=1, B=2, send=send),
        PipelineShape(4, 12),
        PipelineShape(4, 32),
    )

    def compute_microbatch_time(schedule: Schedule) -> float:
        return (
            simulate_schedule(schedule, many_shape, costs).span
            - simulate_schedule(schedule, few_shape, costs).span
        ) / 20

    assert compute_microbatch_time(one_f_one_b) == 3 + 2 * send * 3 / 4
    assert compute_microbatch_time(eager_1f1b) == 3


def test_eager_1f1b_equals_interleaved_with_one_stage() -> None:
    for P, m in ((1, 1), (4, 8), (4, 3), (3, 6)):
        shape = PipelineShape(P, m, stages_per_rank=1)
        assert (
            expand_schedule(eager_1f1b, shape).streams
            == expand_schedule(interleaved, shape).streams
        )
        assert (
            expand_schedule(zb_h1, shape).streams == expand_schedule(interleaved_zb, shape).streams
        )


@pytest.mark.parametrize("v", [1, 2, 3])
def test_looped_schedules_have_published_idle_time(v: int) -> None:
    for c in list_cases(looped_bfs, lambda P: [max(P // 2, 1), P, 2 * P + 1], v):
        missing = (c.v - 1) * max(c.P - c.m, 0)
        assert c.idle == (c.P - 1 + missing) * (c.F + c.I + c.W)
        assert c.peak == [c.m * c.v] * c.P
    for schedule in (interleaved, looped_dfs):
        for c in list_cases(schedule, lambda P: [P, 3 * P], v):
            assert c.idle == (c.P - 1) * (c.F + c.I + c.W)
            assert schedule is interleaved or c.peak == [c.m * c.v] * c.P


@pytest.mark.parametrize("w", [1, 2])
def test_wave_has_published_idle_time(w: int) -> None:
    for c in list_cases(wave, lambda P: [P, 2 * P, 3 * P], 2 * w):
        B = c.I + c.W
        assert c.idle == (c.P - 1) * (2 * min(c.F, B) + 2 * (c.m // c.P) * abs(B - c.F))
        assert c.peak == [(c.v - 1) * c.P + r + 1 for r in range(c.P)]
    for P in (2, 3, 5):  # with F = B, the bubble equals that of interleaved
        costs = Costs(F=2, B=2)
        for schedule in (wave, interleaved):
            timeline = simulate_schedule(schedule, make_shape(schedule, P, 2 * P, 2 * w), costs)
            assert timeline.idle.tolist() == [4 * (P - 1)] * P


@pytest.mark.parametrize("P", [1, 2, 3, 5])
def test_forward_only_has_expected_idle_time(P: int) -> None:
    for placement, v, idle in (("loop", 1, P - 1), ("loop", 3, P - 1), ("vee", 2, 2 * (P - 1))):
        for m in (P, 2 * P + 1):
            timeline = simulate_schedule(
                forward_only, PipelineShape(P, m, v, placement), Costs(F=3)
            )
            assert timeline.idle.tolist() == [3 * idle] * P
            assert not timeline.program.has_backward
    ragged = PipelineShape(3, 4, placement=(2, 0, 1, 1, 0, 2, 1))
    assert len(expand_schedule(forward_only, ragged)) == 7 * 4
    compile(forward_only, ragged, progress_model="blocking_serial")


# ------------------------------------------------------------------ split backwards


@pytest.mark.parametrize("schedule, v", [(zb_h1, 1), (interleaved_zb, 2), (interleaved_zb, 3)])
def test_zb_h1_has_published_idle_time(schedule: Schedule, v: int) -> None:
    for c in list_cases(schedule, lambda P: [P, 3 * P] + [2 * P + 1] * (v == 1), v):
        x = c.I + max(c.F - c.W, 0)
        assert c.idle == (c.P - 1) * max(c.F, x)
        assert c.own == [(c.P - 1 - r) * x for r in range(c.P)]
        assert c.peak == [c.P * c.v] * c.P
        if c.W <= c.F <= x:
            assert c.idle == (c.P - 1) * (c.F + c.I - c.W)  # the published formula


def test_zb_h2_has_published_idle_time() -> None:
    for c in list_cases(zb_h2, lambda P: [2 * P - 1, 2 * P, 3 * P + 1]):
        published = max(0, c.F + c.I - 2 * c.W)
        x = max(published, c.I - c.F, c.I - c.W)
        assert c.idle == (c.P - 1) * max(c.F, x)
        assert c.own == [(c.P - 1 - r) * x for r in range(c.P)]
        assert c.peak == [2 * c.P - 1] * c.P
        if c.I <= c.W <= c.F:
            assert x == published


def has_cheap_input_backward(F: int, I: int, W: int) -> bool:
    return F == I >= W


def has_equal_costs(F: int, I: int, W: int) -> bool:
    return F == I == W


def test_zb_v_has_published_idle_time() -> None:
    for c in list_cases(
        zb_v, lambda P: [2 * P - 1, 2 * P, 3 * P + 1], when=has_cheap_input_backward
    ):
        x = 2 * (c.F - c.W)
        assert c.idle == (c.P - 1) * max(c.F, x)
        assert c.own == [(c.P - 1 - r) * x for r in range(c.P)]
        assert c.peak == [2 * c.P] * c.P


def test_dualpipe_v_has_published_idle_time() -> None:
    for c in list_cases(dualpipe_v, lambda P: [2 * P, 3 * P + 1], when=has_cheap_input_backward):
        B = c.I + c.W
        assert c.idle == (c.P - 1) * (c.F + B + B - 3 * c.W)
        assert c.own[0] == c.idle
        assert c.peak == [2 * c.P + 1] * c.P
    for c in list_cases(dualpipe_v, lambda P: [2 * P], when=lambda F, I, W: W <= F < I):
        assert c.idle <= (c.P - 1) * (c.F + 2 * c.I - c.W)
    for together in (4, 5, 6):  # ranks have different numbers of pairs, so idle times differ
        timeline = simulate_schedule(
            dualpipe_v, PipelineShape(4, 9, 2, "vee"), Costs(F=2, I=2, W=2, FB=together)
        )
        assert max(timeline.idle) == 3 * (together + 4 - 3 * 2)


# ------------------------------------------------------------------ two directions


def test_dualpipe_has_published_idle_time() -> None:
    for c in list_cases(
        dualpipe, lambda P: [2 * P, 3 * P + 2], when=has_cheap_input_backward, ranks=(2, 4, 6)
    ):
        B = c.I + c.W
        assert c.idle == (c.P // 2 - 1) * (c.F + B + B - 3 * c.W)
        assert c.own[0] == c.idle
        assert c.peak == [c.P + 1] * c.P
    for c in list_cases(
        dualpipe, lambda P: [2 * P], when=lambda F, I, W: W <= F < I, ranks=(2, 4, 6)
    ):
        assert c.idle <= (c.P // 2 - 1) * (c.F + 2 * c.I - c.W)
    for together in (4, 5, 6):
        timeline = simulate_schedule(
            dualpipe, make_shape(dualpipe, 8, 18), Costs(F=2, I=2, W=2, FB=together)
        )
        assert max(timeline.idle) == 3 * (together + 4 - 3 * 2)


@pytest.mark.parametrize("schedule", [dualpipe, dualpipe_v])
def test_dualpipe_without_overlapped_pairs(schedule: Schedule) -> None:
    def halves(r: int, P: int, m: int) -> RankSchedule:
        return RankSchedule(schedule(r, P, m).letters & ~JOINED_BIT)  # type: ignore[union-attr]

    for P, m in ((2, 8), (4, 10), (8, 20)):
        steps = (P // 2 if schedule is dualpipe else P) - 1
        for F, I, W in (t for t in TRIPLES if has_cheap_input_backward(*t)):
            timeline = simulate_schedule(halves, make_shape(schedule, P, m), Costs(F=F, I=I, W=W))
            assert timeline.idle.tolist() == [steps * (F + I - W)] * P


def test_two_directions_are_symmetric() -> None:
    """A rank and its mirror image have the same order for different halves of the microbatches."""
    for schedule in (dualpipe, chimera, bitpipe):
        for P, m in ((2, 4), (4, 8), (6, 14)):
            program = expand_schedule(schedule, make_shape(schedule, P, m))
            for r, stream in enumerate(program.streams):
                mirrored = [(op, s, (mb + m // 2) % m) for op, s, mb in stream]
                assert mirrored == [*program.streams[P - 1 - r]]
                first_direction = {r, 2 * P - 1 - r}  # the rank's stages in the first direction
                assert {(mb < m // 2) == (s in first_direction) for _, s, mb in stream} == {True}


@pytest.mark.parametrize(("schedule", "more"), [(chimera, 0), (bitpipe, 1)])
def test_interlocked_schedules_have_expected_idle_time(schedule: Schedule, more: int) -> None:
    """Test schedules that put a second 1F1B into the bubbles of a first one."""
    for c in list_cases(schedule, lambda P: [P, 2 * P, 3 * P], ranks=(2, 4, 6)):
        B = c.I + c.W
        assert c.idle == (c.P - 2) * (min(c.F, B) + c.m // c.P * abs(B - c.F))
        held = [more * c.P + c.P // 2 + 1 + min(r, c.P - 1 - r) for r in range(c.P)]
        assert c.peak == held


def test_bitpipe_matches_paper() -> None:
    """Compare the bubble for B = 2F and m = P, and the order in the figure of the paper."""
    for P in (2, 4, 6, 8):
        timeline = simulate_schedule(bitpipe, make_shape(bitpipe, P, P), Costs(F=1, B=2))
        assert timeline.bubble == pytest.approx((P - 2) / (3 * P + P - 2))
    for m, span in ((4, 28), (8, 54)):  # the figure of the paper has 53 instead of 54
        assert simulate_schedule(bitpipe, make_shape(bitpipe, 4, m), Costs(F=1, B=2)).span == span
    program = expand_schedule(bitpipe, make_shape(bitpipe, 4, 4))
    published_orders = {  # in the figure, microbatches count from 1, and colours show the stages
        0: "F1 F2 F3 F3 F4 F4 F1 B1 F2 B2 B3 B3 B4 B4 B1 B2",
        1: "F1 F3 F2 F4 F3 F1 F4 F2 B1 B3 B2 B4 B3 B1 B4 B2",
        2: "F3 F1 F4 F2 F1 F3 F2 F4 B3 B1 B4 B2 B1 B3 B2 B4",
        3: "F3 F4 F1 F1 F2 F2 F3 B3 F4 B4 B1 B1 B2 B2 B3 B4",
    }
    for rank, stream in enumerate(program.streams):
        assert [f"{INSTRUCTIONS[i.op].text}{i.mb + 1}" for i in stream] == published_orders[
            rank
        ].split()
    streams = compile(bitpipe, make_shape(bitpipe, 4, 4)).streams
    sent = [i for stream in streams for i in stream if i.op is Opcode.SendAct]
    # The last stage of the first half sends no message, because the next is on the same rank.
    assert len(sent) == 4 * (8 - 1 - 1)


# ------------------------------------------------------------------ slots


def test_v_half_has_half_memory() -> None:
    for c in list_cases(
        v_half, lambda P: [P, P + 1, 3 * P], when=has_equal_costs, ranks=(3, 4, 5, 7, 8, 14)
    ):
        assert c.idle == c.own[0] == (3 * c.P - (4 if c.P % 2 else 7)) * c.F
        assert max(c.peak) == 2 * (c.P // 2 + 1)
        assert c.idle < 6 * (c.P - 1) * c.F / 2  # less than half of the idle time of 1F1B


def test_v_min_has_third_of_memory() -> None:
    for c in list_cases(
        v_min, lambda P: [P, P + 1, 3 * P], when=has_equal_costs, ranks=(2, 3, 4, 5, 6, 8, 13)
    ):
        assert c.idle == c.own[0] == (4 * c.P - (5 if c.P % 3 == 1 else 7)) * c.F
        assert max(c.peak) == 2 * ((c.P + 1) // 3 + 1)
        assert c.idle <= 6 * (c.P - 1) * c.F * 2 / 3  # two thirds of the idle time of 1F1B


@pytest.mark.parametrize("P", [3, 4, 5, 8])
def test_unequal_costs_stall_v_half_and_v_min(P: int) -> None:
    """Test the idle time that each further microbatch adds in the steady phase."""
    few, many = 4 * P, 4 * P + 10
    for F, I, W in [*TRIPLES, (5, 6, 4)]:
        costs = Costs(F=F, I=I, W=W)

        def compute_idle_growth(schedule: Schedule, costs: Costs = costs) -> float:
            idle = [
                simulate_schedule(schedule, PipelineShape(P, m, 2, "vee"), costs).idle[0]
                for m in (few, many)
            ]
            return float(idle[1] - idle[0]) / (many - few)

        assert compute_idle_growth(v_half) == max(0, 2 * F - W - 2 * I, 2 * I - W - 2 * F)
        if max(F, I) >= W:
            assert compute_idle_growth(v_min) == 6 * max(F, I) - 2 * (F + I + W)


# ------------------------------------------------------------------ all schedules


@pytest.mark.parametrize(
    "row", read_rows(), ids=lambda row: f"{row.model}-{row.shape.microbatches}"
)
@pytest.mark.parametrize(
    "schedule, published",
    [(one_f_one_b, "rate_1F1B"), (zb_h1, "rate_ZB_H1"), (zb_h2, "rate_ZB_H2")],
)
def test_published_bubble_rates(row: Row, schedule: Schedule, published: str) -> None:
    timeline = simulate_schedule(schedule, row.shape, row.costs)
    rate = row.rate(timeline.active_span.max())
    assert rate == pytest.approx(row.rates[published], abs=PRINTED)


@pytest.mark.parametrize("name", ZOO)
def test_every_schedule_finishes_everywhere(name: str) -> None:
    """Test all progress models, even and uneven costs, and several numbers of microbatches."""
    schedule = ZOO[name]
    for P, m, model, is_even in each_value(
        [(1, 2), (2, 4), (3, 2), (3, 7), (4, 8)], MODELS, [True, False]
    ):
        if schedule in TWO_WAY:
            P, m = 2 * P, 2 * m
        shape = make_shape(schedule, P, max(m, find_min_microbatches(schedule, P)))
        uneven = tuple(1.0 + s * s % 5 for s in range(shape.stages))
        costs = Costs() if is_even else Costs(F=uneven, I=uneven[::-1], W=0.5, send=0.3)
        program = compile(schedule, shape, progress_model=model, costs=costs)
        assert program.reduces_in_microbatch_order or shape.placement_rows > 1
        simulate(program, costs, progress_model=model)


@settings(max_examples=60)
@given(st.sampled_from(sorted(ZOO)), st.integers(1, 6), st.integers(1, 20), st.integers(1, 2))
def test_any_number_of_microbatches_from_minimum(name: str, ranks: int, m: int, v: int) -> None:
    """A schedule runs with any number of microbatches from its minimum on, and refuses fewer."""
    schedule = ZOO[name]
    if schedule in TWO_WAY:
        ranks, m = 2 * ranks, m + 1 + (schedule is dualpipe and m % 2 == 0)
    shape = make_shape(schedule, ranks, m, 2 * v if schedule is wave else v)
    if m >= find_min_microbatches(schedule, ranks):
        simulate(expand_schedule(schedule, shape))
    else:
        with pytest.raises(ScheduleError, match=f"{find_min_microbatches(schedule, ranks)}"):
            expand_schedule(schedule, shape)


def test_two_direction_schedules_need_even_numbers() -> None:
    with pytest.raises(ScheduleError, match="microbatches must be even, not 9"):
        expand_schedule(dualpipe, PipelineShape(4, 9, placement="mirror"))
    for schedule in TWO_WAY:
        with pytest.raises(ShapeError, match="ranks must be even, not 3"):
            expand_schedule(schedule, PipelineShape(3, 8))
        for shape in (
            PipelineShape(4, 8, placement="loop"),
            PipelineShape(4, 8, placement="vee"),
            PipelineShape(4, 8, 4, "mirror"),
        ):
            with pytest.raises(ScheduleError, match="needs placement 'mirror"):
                expand_schedule(schedule, shape)


VEE = [s for s in ZOO.values() if getattr(s, "placed", ("loop",))[0] == "vee"]


@pytest.mark.parametrize("schedule", VEE)
def test_other_placements_are_refused(schedule: Schedule) -> None:
    for shape in (
        PipelineShape(3, 9, placement="loop"),
        PipelineShape(3, 9, 2, "loop"),
        PipelineShape(3, 9, 3, "vee"),
        PipelineShape(3, 9, placement=(0, 1, 2)),
    ):
        with pytest.raises(ScheduleError):
            expand_schedule(schedule, shape)
    vee = make_shape(schedule, 3, 9)
    same = PipelineShape(3, 9, placement=tuple(vee.first_rank_per_stage.tolist()))
    assert expand_schedule(schedule, same).streams == expand_schedule(schedule, vee).streams


def test_commands_use_placement_of_schedule() -> None:
    """Commands use the placement and the stages per rank that `with_placement` gives."""
    shape = ["--ranks", "2", "--microbatches", "4"]
    for name in ZOO:
        assert main(["check", name, *shape]) == 0
    assert main(["compare", "zb_h1", "interleaved", "zb_v", *shape, "--stages-per-rank", "3"]) == 0


@pytest.mark.parametrize("schedule", [interleaved, interleaved_zb])
def test_interleaved_needs_loop_placement(schedule: Schedule) -> None:
    with pytest.raises(ScheduleError, match="placement 'loop'"):
        expand_schedule(schedule, PipelineShape(3, 9, 2, "vee"))
