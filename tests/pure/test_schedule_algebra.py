"""Tests of the schedule algebra, shapes and costs: their meaning, and their refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir.analysis.critical_path.longest_path import compute_earliest_times
from schedir.analysis.dependency_graph import Graph
from schedir.compiler.compile import compile
from schedir.errors import CostsError, ScheduleError, ShapeError, UsageError
from schedir.io import torch_csv
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import INSTRUCTIONS, Opcode, Scope
from schedir.ir.pipeline.pipeline_shape import MAX_MICROBATCHES, PipelineShape
from schedir.ir.text_format import to_text
from schedir.predict.simulate import simulate
from schedir.schedules import one_f_one_b
from schedir.schedules.schedule_algebra import (
    EMPTY,
    B,
    F,
    I,
    RankSchedule,
    W,
    overlapped_pair,
    weave,
    with_weight_delay,
)
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.verify.check import check


def expand_to_text(rank_schedule: RankSchedule, shape: PipelineShape | None = None) -> str:
    shape = shape or PipelineShape(1, 9, 2)
    return " ".join(map(str, expand_schedule(lambda r, P, m: rank_schedule, shape).streams[0]))


def test_letters_number_microbatches_in_order() -> None:
    assert expand_to_text(2 * F + B + F) == "F 0.0 F 0.1 B 0.0 F 0.2"
    assert expand_to_text(F[1] + F + F[1]) == "F 1.0 F 0.0 F 1.1"
    assert expand_to_text((F + B)[1] * 2) == "F 1.0 B 1.0 F 1.1 B 1.1"
    assert expand_to_text(F.at(5) + F) == "F 0.5 F 0.1"
    assert expand_to_text(B + I + B) == "B 0.0 I 0.1 B 0.2"
    assert expand_to_text(sum([F, F])) == "F 0.0 F 0.1"  # type: ignore[arg-type]
    assert expand_to_text(F + sum([])) == expand_to_text(sum([]) + F) == "F 0.0"
    assert expand_to_text(EMPTY + 0 * F) == ""


@pytest.mark.parametrize("three", [np.int64(3), np.uint8(3), np.array(3), 3])
def test_numpy_integers_are_accepted(three: Any) -> None:
    for word in (three * F, F * three):
        assert isinstance(word, RankSchedule) and expand_to_text(word) == "F 0.0 F 0.1 F 0.2"
    assert expand_to_text(F[np.int64(1)].at(three)) == "F 1.3"


@pytest.mark.parametrize("kind", [bool, np.bool_])
def test_bool_factor_keeps_or_drops_letters(kind: Any) -> None:
    assert expand_to_text(kind(True) * F + F * kind(False) + kind(False) * B) == "F 0.0"


@pytest.mark.parametrize("n", [-1, np.int64(-1), 2**63, 10**30])
def test_impossible_repeat_count_is_refused(n: Any) -> None:
    with pytest.raises(ValueError, match=r"n \*"):
        n * F
    with pytest.raises(ValueError, match=r"n \*"):
        n * EMPTY


@pytest.mark.parametrize("n", [2.0, np.float64(2), None, "3", np.arange(3), F])
def test_non_integer_is_refused(n: Any) -> None:
    for call in (lambda: n * F, lambda: F * n, lambda: F[n], lambda: F.at(n)):
        with pytest.raises(TypeError, match="takes an integer"):
            call()


def test_weight_backwards_follow_input_backwards_in_order() -> None:
    assert expand_to_text(I.at(3) + I[1] + 2 * W) == "I 0.3 I 1.0 W 0.3 W 1.0"
    assert expand_to_text(I.at(3) + I[1].at(2) + W[1] + W[0]) == "I 0.3 I 1.2 W 1.2 W 0.3"
    assert expand_to_text(I + W.at(0), PipelineShape(1, 1)) == "I 0.0 W 0.0"
    with pytest.raises(ScheduleError):
        expand_to_text(I + I + W + W[0])
    with pytest.raises(ScheduleError):
        expand_to_text(I + 2 * W)


def test_weave_and_overlapped_pair() -> None:
    assert expand_to_text(weave(3 * F, 3 * B, 1)) == "F 0.0 F 0.1 B 0.0 F 0.2 B 0.1 B 0.2"
    assert expand_to_text(weave(2 * F, 2 * B, 9)) == "F 0.0 F 0.1 B 0.0 B 0.1"
    cell = expand_schedule(
        lambda r, P, m: F + overlapped_pair(F, B) + B, PipelineShape(1, 2)
    ).streams[0]
    assert cell.joined.tolist() == [False, False, True, False]
    with pytest.raises(ValueError, match="overlapped_pair needs two schedules of equal length"):
        overlapped_pair(F, 2 * B)


def test_schedules_as_generators_lists_and_partials() -> None:
    def pairs(r: int, P: int, m: int, size: int = 2) -> Iterator[RankSchedule]:
        for _ in range(m // size):
            yield size * F
            yield size * B

    def stages(r: int, P: int, m: int, v: int) -> RankSchedule:
        return sum(((F[j] + B[j]) for j in range(v)), EMPTY)

    def listed(r: int, P: int, m: int) -> list[RankSchedule]:
        return [F] * m + [B] * m

    assert len(expand_schedule(listed, PipelineShape(1, 4)).streams[0]) == 8
    assert expand_schedule(partial(pairs, size=1), PipelineShape(1, 2)).name == "pairs"
    assert len(expand_schedule(pairs, PipelineShape(1, 4)).streams[0]) == 8
    assert len(expand_schedule(stages, PipelineShape(1, 1, 3)).streams[0]) == 6
    assert len(expand_schedule(partial(stages, v=2), PipelineShape(1, 1, 3)).streams[0]) == 4


def endless(r: int, P: int, m: int) -> Iterator[RankSchedule]:
    while True:
        yield F


def silent(r: int, P: int, m: int) -> Iterator[RankSchedule]:
    while True:
        yield EMPTY


def returns_and_yields(r: int, P: int, m: int) -> Any:
    if r == 0:
        return m * F + m * B
    yield m * F + m * B


async def later(r: int, P: int, m: int) -> RankSchedule:
    return m * F + m * B


async def one_by_one(r: int, P: int, m: int) -> AsyncIterator[RankSchedule]:
    yield m * F + m * B


def raises(r: int, P: int, m: int) -> RankSchedule:
    raise ZeroDivisionError("no")


@pytest.mark.parametrize(
    "schedule",
    [
        raises,
        endless,
        silent,
        returns_and_yields,
        later,
        one_by_one,
        lambda r, P, m: None,
        lambda r, P, m: 3,
        lambda r, P, m: "FB",
        lambda r, P, m: 2**40 * F,
        lambda r, P, m: [F, "B"],
        lambda r, P, m: F[1],
        lambda r, P, m: F[-1],
        lambda r, P, m: 1.5 * F,  # type: ignore[operator]
        lambda r, P, m: F + 1,
        lambda r, P: F,
        lambda r, P, m, w: F,
        3,
    ],
)
def test_bad_schedules_are_refused(schedule: object) -> None:
    with pytest.raises(ScheduleError) as caught:
        expand_schedule(schedule, PipelineShape(2, 2))  # type: ignore[arg-type]
    assert "\n" not in caught.value.fact


@given(st.integers(1, 6), st.integers(1, 4))
def test_loop_and_vee_placement(ranks: int, v: int) -> None:
    loop, vee = PipelineShape(ranks, 1, v), PipelineShape(ranks, 1, 2 * v, "vee")
    assert loop.first_rank_per_stage.tolist() == [*range(ranks)] * v
    assert vee.first_rank_per_stage.tolist() == [*range(ranks), *reversed(range(ranks))] * v
    for shape in (
        loop,
        vee,
        PipelineShape(ranks, 1, placement=tuple(vee.first_rank_per_stage.tolist())),
    ):
        for rank, rank_stages in enumerate(shape.stages_on_rank):
            assert list(rank_stages) == sorted(rank_stages)
            assert (shape.first_rank_per_stage[list(rank_stages)] == rank).all()


def test_uneven_placement() -> None:
    shape = PipelineShape(2, 1, placement=[0, 1, 1])  # type: ignore[arg-type]
    assert (shape.stages, shape.stages_per_rank, shape.stages_on_rank) == (3, 2, ((0,), (1, 2)))
    assert PipelineShape(3, 1, placement="vee").stages == 6


@pytest.mark.parametrize("bad", [0, -1, 1.5, "4", None, True, MAX_MICROBATCHES + 1, 10**30])
@pytest.mark.parametrize("field", ["ranks", "microbatches", "stages_per_rank"])
def test_bad_shape_numbers_are_refused(bad: object, field: str) -> None:
    with pytest.raises(ShapeError) as caught:
        PipelineShape(**{"ranks": 2, "microbatches": 4, field: bad})  # type: ignore[arg-type]
    assert field in caught.value.fact


def test_costs_fill_defaults_and_refuse_bad_values() -> None:
    costs = Costs(F=2, I=(1, 2), W=1.5, send=(0.1, 0.2))
    table = {op: costs.for_opcode(op, PipelineShape(1, 4, 2))[:, 0] for op in Opcode}
    assert table[Opcode.Backward].tolist() == [2.5, 3.5]
    assert table[Opcode.SendAct].tolist() == table[Opcode.SendGrad].tolist() == [0.1, 0.2]
    assert not table[Opcode.RecvAct].any() and not table[Opcode.OptimizerStep].any()
    for bad in (-1, float("nan"), float("inf"), "x", "12", b"1", object(), (), (1, -1)):
        with pytest.raises(CostsError) as caught:
            Costs(F=bad)  # type: ignore[arg-type]
        assert "cost F" in caught.value.fact
    with pytest.raises(CostsError):
        Costs(F=(1, 2)).for_opcode(Opcode.Forward, PipelineShape(1, 1, 3))


def test_overlapped_pair_takes_pair_cost() -> None:
    program = expand_schedule(lambda r, P, m: F + overlapped_pair(F, B) + B, PipelineShape(1, 2))
    assert compute_earliest_times(Graph(program), Costs(F=1, B=2)).end.max() == 6
    assert compute_earliest_times(Graph(program), Costs(F=1, B=2, FB=2.5)).end.max() == 5.5
    program = expand_schedule(
        lambda r, P, m: F + overlapped_pair(I, F) + I + 2 * W, PipelineShape(1, 2)
    )
    assert compute_earliest_times(Graph(program), Costs(FB=1.25)).end.max() == 1 + 1.25 + 1 + 2


def test_pair_cost_applies_to_forward_and_backward_only() -> None:
    priced, plain = Costs(F=1, B=2, FB=0.5), Costs(F=1, B=2)
    for schedule in (
        lambda r, P, m: overlapped_pair(F, F) + overlapped_pair(B, B),
        lambda r, P, m: 2 * F + I + overlapped_pair(I, W) + W,
        lambda r, P, m: F + I + overlapped_pair(W, F) + I + W,
    ):
        program = expand_schedule(schedule, PipelineShape(1, 2))
        assert (
            compute_earliest_times(Graph(program), priced).end.max()
            == compute_earliest_times(Graph(program), plain).end.max()
        )


def test_instruction_table_rows_match_opcodes() -> None:
    assert [row.op for row in INSTRUCTIONS] == list(Opcode)
    assert len({row.text for row in INSTRUCTIONS}) == len(INSTRUCTIONS)
    for row in INSTRUCTIONS:
        assert (row.peer is not None) <= (row.scope is Scope.MICROBATCH and row.partner is not None)
        if row.partner is not None:
            assert INSTRUCTIONS[row.partner].partner is row.op
            assert INSTRUCTIONS[row.partner].peer is (row.peer and row.peer.opposite)


def test_reduction_in_microbatch_order_is_detected() -> None:
    shape = PipelineShape(1, 2)
    assert compile(one_f_one_b, shape).reduces_in_microbatch_order
    assert not expand_schedule(
        lambda r, P, m: 2 * F + B.at(1) + B.at(0), shape
    ).reduces_in_microbatch_order
    assert not expand_schedule(
        lambda r, P, m: 2 * F + 2 * I + W.at(1) + W.at(0), shape
    ).reduces_in_microbatch_order
    assert expand_schedule(lambda r, P, m: 2 * F + I + W + B, shape).reduces_in_microbatch_order
    # W 0.0 follows B 0.1 here.
    assert not expand_schedule(lambda r, P, m: 2 * F + I + B + W, shape).reduces_in_microbatch_order


def test_bad_options_are_refused() -> None:
    with pytest.raises(UsageError):
        compile(one_f_one_b, PipelineShape(1, 1), progress_model="ring")  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        compile(one_f_one_b, PipelineShape(1, 1), boundary="split")  # type: ignore[arg-type]
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ShapeError):
            compile(one_f_one_b, PipelineShape(1, 1), tp=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda: compile(one_f_one_b(0, 1, 1), PipelineShape(1, 1)),  # type: ignore[arg-type]
        lambda: torch_csv.to_csv(one_f_one_b),  # type: ignore[arg-type]
        lambda: compile(one_f_one_b, 1, tp=1),  # type: ignore[arg-type]
        lambda: compile(one_f_one_b, PipelineShape(1, 1), costs={"F": 1}),  # type: ignore[arg-type]
        lambda: simulate(compile(one_f_one_b, PipelineShape(1, 1)), {"F": 1}),  # type: ignore[arg-type]
        lambda: simulate(one_f_one_b),
        lambda: check(one_f_one_b),  # type: ignore[arg-type]
        lambda: to_text(one_f_one_b),  # type: ignore[arg-type]
    ],
)
def test_wrong_argument_types_are_refused(call: Any) -> None:
    with pytest.raises((UsageError, ScheduleError)) as caught:
        call()
    assert caught.value.hint


def test_instruction_words_are_read_only() -> None:
    program = expand_schedule(one_f_one_b, PipelineShape(2, 2))
    with pytest.raises(ValueError, match="read-only"):
        program.streams[0].words[0] = 1
    assert isinstance(program.streams[0][1:], type(program.streams[0]))
    assert np.array_equal(program.words[: program.offsets[1]], program.streams[0].words)


@pytest.mark.parametrize("bad", [{0: 1, 1: 0}, {1, 0}, frozenset({1, 0}), b"\0\1", True], ids=repr)
def test_unordered_collection_per_stage_is_refused(bad: Any) -> None:
    """Iterating over a mapping gives its keys, and a set has no order."""
    with pytest.raises(CostsError, match="a number or one per stage"):
        Costs(F=bad)
    with pytest.raises(UsageError, match="a number or one per stage"):
        Sizes(saved=bad)
    with pytest.raises(ShapeError, match="placement must be"):
        PipelineShape(2, 4, placement=bad)
    with pytest.raises(ShapeError, match="delay must be"):
        PipelineShape(2, 4, optimizer_steps=2, weight_delay=bad)
    with pytest.raises(TypeError, match="@with_weight_delay takes"):
        with_weight_delay(bad)
