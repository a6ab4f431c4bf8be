"""Tests that `compile` takes a schedule's name and shape fields, and uses its defaults."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import EMPTY, B, F, PipelineShape, schedules
from schedir.__main__ import main
from schedir.errors import SchedirError, ScheduleError, UsageError
from schedir.io.option_spelling import option_words
from schedir.io.program_request import Request
from schedir.io.source_loader import Source
from schedir.schedules import get_built_in_schedules
from schedir.schedules.schedule_algebra import RankSchedule, apply_schedule_defaults
from schedir.testing import assert_schedule

NAMES = sorted(get_built_in_schedules())


@given(st.sampled_from(NAMES), st.sampled_from((2, 4)), st.sampled_from((8, 12)))
def test_name_compiles_like_its_function(name: str, ranks: int, microbatches: int) -> None:
    by_name = schedir.compile(name, ranks=ranks, microbatches=microbatches)
    shape = PipelineShape(ranks, microbatches)
    assert by_name == schedir.compile(getattr(schedules, name), shape)


@pytest.mark.parametrize("name", NAMES)
def test_defaults_match_command_line(name: str, tmp_path: Path) -> None:
    file = tmp_path / "x.sched"
    size = {"ranks": 4, "microbatches": 8} | (
        {"optimizer_steps": 2} if name == "pipedream_2bw" else {}
    )
    options = [word for key, value in size.items() for word in option_words(key, str(value))]
    assert main(["print", name, *options, "-o", str(file)]) == 0
    assert schedir.from_text(file.read_text()) == schedir.compile(name, **size)  # type: ignore[arg-type]


def test_explicit_stages_per_rank_is_kept() -> None:
    explicit = PipelineShape(4, 8, stages_per_rank=1)
    assert explicit == PipelineShape(4, 8)
    assert explicit.default_fields == {"placement", "weight_delay"}
    assert apply_schedule_defaults(schedules.interleaved, explicit) is explicit
    assert schedir.compile(schedules.interleaved, explicit).shape.stages_per_rank == 1
    assert schedir.compile(schedules.interleaved, PipelineShape(4, 8)).shape.stages_per_rank == 2


def three_stages(rank: int, ranks: int, microbatches: int, v: int = 3) -> schedir.RankSchedule:
    """Return the schedule of a rank, with three stages per rank by default."""
    return sum((microbatches * F[j] for j in range(v)), EMPTY) + sum(
        (microbatches * B[v - 1 - j] for j in range(v)), EMPTY
    )


@pytest.mark.parametrize("placement", ["loop", "vee", "mirror-vee"])
@pytest.mark.parametrize("name", [*NAMES, "three"])
def test_placement_has_same_defaults_as_command_line(name: str, placement: str) -> None:
    """If only the placement is given, the stages per rank are those of the schedule."""
    schedule = three_stages if name == "three" else getattr(schedules, name)
    request = Request(
        Source.from_loaded(schedule, name),
        {"ranks": 4, "microbatches": 8, "placement": placement},
        {},
    )
    try:
        expected = request.shape
    except SchedirError:
        return
    assert apply_schedule_defaults(schedule, PipelineShape(4, 8, placement=placement)) == expected


def test_program_shape_has_no_default_fields() -> None:
    """A program compiled for one schedule has no defaults of another."""
    shape = schedir.compile("one_f_one_b", ranks=4, microbatches=8).shape
    assert (
        not shape.default_fields and schedir.compile("looped_bfs", shape).shape.stages_per_rank == 1
    )
    shape = PipelineShape(4, 8)
    assert shape.resolve_defaults() == shape and not shape.resolve_defaults().default_fields
    for shape_copy in (
        copy.copy(shape),
        pickle.loads(pickle.dumps(shape)),
        replace(shape, ranks=4),
    ):
        assert shape_copy == shape and shape_copy.default_fields == shape.default_fields


def test_draft_accepts_shape_with_default_fields() -> None:
    draft = schedir.expand_schedule(schedules.zb_v, PipelineShape(4, 8, 2, "vee"))
    assert schedir.compile(draft, ranks=4, microbatches=8).shape == draft.shape
    with pytest.raises(UsageError, match="the draft has the shape"):
        schedir.compile(draft, ranks=4, microbatches=4)


@pytest.mark.parametrize("v", [None, "x"])
def test_non_integer_default_of_v_is_ignored(v: object) -> None:
    def schedule_with_default_v(
        rank: int, ranks: int, microbatches: int, v: object = v
    ) -> schedir.RankSchedule:
        return microbatches * (F[0] + F[1]) + microbatches * (B[1] + B[0])

    assert (
        schedir.compile(schedule_with_default_v, ranks=2, microbatches=4).shape.stages_per_rank == 2
    )


def test_assert_schedule_uses_given_shape() -> None:
    with pytest.raises(AssertionError, match="needs placement 'vee'"):
        assert_schedule(schedules.zb_v, shapes=[PipelineShape(2, 4)])


def compile_refused(**arguments: object) -> UsageError:
    with pytest.raises(UsageError) as caught:
        schedir.compile(**arguments)  # type: ignore[arg-type]
    return caught.value


def test_conflicting_arguments_are_refused() -> None:
    error = compile_refused(schedule="zb-v", ranks=4, microbatches=8)
    assert "no built-in schedule 'zb-v'" in str(error) and error.hint == "did you mean 'zb_v'?"
    error = compile_refused(schedule="gpipe", ranks=4)
    assert "compile needs microbatches; given: ranks" in str(error)
    error = compile_refused(schedule="gpipe", shape=PipelineShape(2, 2), ranks=3)
    assert "shape and ranks cannot both be given" in str(error)
    assert "needs ranks and microbatches for this schedule" in str(
        compile_refused(schedule="gpipe")
    )
    assert compile_refused(schedule="gpipe", plan=PipelineShape(2, 2)).hint == "it is now shape"
    assert (
        compile_refused(schedule="gpipe", ranks=2, microbatches=2, zreo=2).hint
        == "did you mean 'zero'?"
    )


@pytest.mark.parametrize("name", NAMES)
def test_simulate_accepts_schedule_name_and_function(name: str) -> None:
    costs = schedir.Costs(F=1, B=2, send=0.25)
    program = schedir.compile(name, ranks=4, microbatches=8, costs=costs)
    expected = schedir.simulate(program, costs).span
    schedule = getattr(schedules, name)
    assert schedir.simulate(name, costs, ranks=4, microbatches=8).span == expected
    assert schedir.simulate(schedule, costs, ranks=4, microbatches=8).span == expected


def test_search_accepts_shape_fields_as_keywords() -> None:
    shape = PipelineShape(3, 4, stages_per_rank=2, placement="vee")
    fields = {"ranks": 3, "microbatches": 4, "stages_per_rank": 2, "placement": "vee"}
    result = schedir.search_schedule(**fields, max_evaluations=20)  # type: ignore[arg-type]
    assert result.span == schedir.search_schedule(shape, max_evaluations=20).span


def test_missing_or_duplicate_shape_is_refused() -> None:
    program = schedir.compile("gpipe", ranks=2, microbatches=4)
    with pytest.raises(UsageError, match="ranks cannot be applied to a program"):
        schedir.simulate(program, ranks=2)
    with pytest.raises(UsageError, match="needs microbatches"):
        schedir.simulate("gpipe", ranks=2)
    with pytest.raises(UsageError, match="simulate needs ranks and microbatches for this"):
        schedir.simulate("gpipe")
    with pytest.raises(UsageError, match="both be given"):
        schedir.search_schedule(PipelineShape(2, 4), ranks=2, microbatches=4)
    with pytest.raises(UsageError, match="search_schedule"):
        schedir.search_schedule()


class _ScheduleBuilder:
    def build(self, rank: int, ranks: int, microbatches: int) -> RankSchedule:
        return microbatches * F + microbatches * B


class ScheduleGPipe:  # the name of torch's class
    def __init__(self, *stages: object) -> None: ...


@pytest.mark.parametrize(
    ("schedule", "fact", "hint"),
    [
        (
            partial(cast("Any", schedules.interleaved), groups=4),
            "interleaved has no option 'groups'",
            "'group'",
        ),
        (
            partial(cast("Any", schedules.gpipe), depth=4),
            "gpipe has no option 'depth'",
            "it has no options",
        ),
        (_ScheduleBuilder.build, "but this one takes (self, rank", "MyClass().build"),
        (ScheduleGPipe, "not the class ScheduleGPipe", "did you mean 'gpipe'?"),
    ],
    ids=["wrong option", "no options", "unbound method", "class"],
)
def test_invalid_schedule_error_names_schedule(schedule: Any, fact: str, hint: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        schedir.compile(schedule, ranks=2, microbatches=4)
    assert fact in caught.value.fact and hint in caught.value.hint
