"""Tests that programs are recognized by the order of their compute."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import PipelineShape, compile, recognize
from schedir.compiler.relower import extract_compute
from schedir.compiler.schedule_recognition import Recognition
from schedir.errors import UsageError
from schedir.ir.program import Program
from schedir.ir.stream import Stream
from schedir.schedules import get_built_in_schedules
from schedir.schedules.schedule_expansion import expand_schedule
from tests.commands import run_command

SAME_WITHOUT_DELAY = {"pipedream_2bw": "one_f_one_b"}  # this program has one optimizer step


@pytest.mark.parametrize("name", get_built_in_schedules())
def test_built_in_schedules_are_recognized(name: str) -> None:
    shape = PipelineShape(4, 8)
    expected = SAME_WITHOUT_DELAY.get(name, name)
    for program in (
        expand_schedule(get_built_in_schedules()[name], shape),
        compile(name, shape, overlap=True),
    ):
        assert recognize(program).is_exact and str(recognize(program)) == f"this is {expected}"


@given(st.sampled_from(["zb_v", "one_f_one_b", "interleaved"]), st.data())
def test_first_difference_is_reported(name: str, data: st.DataObject) -> None:
    """Swap two compute instructions. The first of them is the first difference."""
    draft = expand_schedule(get_built_in_schedules()[name], PipelineShape(4, 8))
    rank = data.draw(st.integers(0, 3))
    swap_index = data.draw(st.integers(0, len(draft.streams[rank]) - 2))
    words = draft.streams[rank].words.copy()
    words[[swap_index, swap_index + 1]] = words[[swap_index + 1, swap_index]]
    streams = [*draft.streams]
    streams[rank] = Stream(words)
    recognition = recognize(replace(draft, streams=tuple(streams)))
    if recognition.schedule != name:  # another schedule agrees longer
        recognized = expand_schedule(get_built_in_schedules()[recognition.schedule], draft.shape)
        assert recognition.matching >= count_agreeing(draft, rank, swap_index)
        assert recognition.is_exact == (
            recognized == replace(draft, streams=tuple(streams), name=recognized.name)
        )
        return
    assert (recognition.rank, recognition.compute_index, recognition.is_exact) == (
        rank,
        swap_index,
        False,
    )
    assert recognition.expected == str(draft.streams[rank][swap_index])
    assert recognition.actual == str(draft.streams[rank][swap_index + 1])
    assert recognition.matching == count_agreeing(draft, rank, swap_index)


def count_agreeing(draft: Program, rank: int, first: int) -> int:
    return len(draft) - len(draft.streams[rank]) + first


def test_recomputes_are_ignored() -> None:
    program = compile("zb_h1", ranks=4, microbatches=8, recompute="all")
    plain = compile("zb_h1", ranks=4, microbatches=8)
    assert len(extract_compute(program)) > len(extract_compute(plain))
    assert str(recognize(program)) == "this is zb_h1"


def test_early_end_is_reported() -> None:
    draft = expand_schedule(get_built_in_schedules()["gpipe"], PipelineShape(2, 2))
    streams = draft.streams[0], Stream(draft.streams[1].words[:-1])
    recognition = recognize(replace(draft, streams=streams))
    assert (recognition.actual, recognition.expected, recognition.rank) == ("the end", "B 1.1", 1)


def test_unknown_schedule_is_not_recognized() -> None:
    draft = expand_schedule(get_built_in_schedules()["gpipe"], PipelineShape(2, 2))
    backwards_first = tuple(Stream(stream.words[::-1]) for stream in draft.streams)
    recognition = recognize(replace(draft, streams=backwards_first))
    assert recognition == Recognition("", 0, 8)
    assert str(recognition) == "no built-in schedule begins like this" and not recognition.is_exact
    with pytest.raises(UsageError, match="must be a Program"):
        recognize("zb_v")  # type: ignore[arg-type]


def test_recognize_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(capsys, "recognize", "examples/traced.timeline") == (
        "traced: this is interleaved\n"
    )
    facts = json.loads(run_command(capsys, "recognize", "zb_v", "--json"))
    assert (facts["schedule"], facts["is_exact"], facts["program"]) == ("zb_v", True, "zb_v")
