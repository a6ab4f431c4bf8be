"""`compile` takes a schedule by name, a shape by its fields, and the defaults of the schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import PipelineShape, schedules
from schedir.__main__ import main
from schedir.errors import UsageError
from schedir.io.command_line import option_words
from schedir.schedules import built_in
from schedir.schedules.schedule_algebra import shape_for

NAMES = sorted(built_in())


@given(st.sampled_from(NAMES), st.sampled_from((2, 4)), st.sampled_from((8, 12)))
def test_a_name_is_its_function(name: str, ranks: int, microbatches: int) -> None:
    by_name = schedir.compile(name, ranks=ranks, microbatches=microbatches)
    shape = PipelineShape(ranks, microbatches)
    assert by_name == schedir.compile(getattr(schedules, name), shape)


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_those_of_the_command_line(name: str, tmp_path: Path) -> None:
    file = tmp_path / "x.sched"
    size = {"ranks": 4, "microbatches": 8} | ({"updates": 2} if name == "pipedream_2bw" else {})
    options = [word for key, value in size.items() for word in option_words(key, str(value))]
    assert main(["print", name, *options, "-o", str(file)]) == 0
    assert schedir.from_text(file.read_text()) == schedir.compile(name, **size)  # type: ignore[arg-type]


def test_stages_that_are_given_stay() -> None:
    one = PipelineShape(4, 8, stages_per_rank=1)
    assert one == PipelineShape(4, 8) and one.defaulted == {"placement", "delay"}
    assert shape_for(schedules.interleaved, one) is one
    assert schedir.compile(schedules.interleaved, one).plan.stages_per_rank == 1
    assert schedir.compile(schedules.interleaved, PipelineShape(4, 8)).plan.stages_per_rank == 2


def refused(**given: object) -> UsageError:
    with pytest.raises(UsageError) as caught:
        schedir.compile(**given)  # type: ignore[arg-type]
    return caught.value


def test_what_does_not_go_together_is_refused() -> None:
    error = refused(schedule="zb-v", ranks=4, microbatches=8)
    assert "no built-in schedule 'zb-v'" in str(error) and error.hint == "did you mean 'zb_v'?"
    error = refused(schedule="gpipe", ranks=4)
    assert "compile needs microbatches beside ranks" in str(error)
    error = refused(schedule="gpipe", shape=PipelineShape(2, 2), ranks=3)
    assert "a shape is given, and ranks beside it" in str(error)
    assert "takes a PipelineShape, not None" in str(refused(schedule="gpipe"))
