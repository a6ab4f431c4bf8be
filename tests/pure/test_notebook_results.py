"""Tests of the display of results in a notebook, and of the table of a timeline."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

import schedir
from schedir import Costs, PipelineShape
from schedir.extras import MissingPackageError
from tests.pure.test_planner_command import PLAN

TIMELINE = schedir.simulate("zb_h1", Costs(send=0.5), ranks=2, microbatches=4)


def test_search_result_shows_its_lower_bound() -> None:
    result = schedir.search_schedule(PipelineShape(2, 4), time_limit=1.0)
    text = result._repr_html_()
    assert "<svg" in text and f"length {result.span:.6g}, proved shortest" in text
    longer = replace(result, stop_reason="limit", bound=result.span / 2)
    assert f"lower bound {result.span / 2:.6g}" in longer._repr_html_()


def test_memory_frontier_is_a_table() -> None:
    frontier = schedir.memory_frontier(PipelineShape(2, 4), time_limit=1.0)
    text = frontier._repr_html_()
    assert text.count("<tr>") == 1 + len(frontier.levels) and "in flight" in text


def test_plan_is_a_table() -> None:
    text = replace(PLAN, explanation="a < b")._repr_html_()
    for text_part in ("<td>interleaved</td>", "<td>41 GB</td>", "a &lt; b", "<td>recompute</td>"):
        assert text_part in text
    assert "<td>rank_order</td>" not in text  # it has its default value


def test_timeline_converts_to_dataframe() -> None:
    if find_spec("pandas") is None:
        with pytest.raises(MissingPackageError, match=r"schedir\[notebook\]"):
            TIMELINE.to_dataframe()
        return
    frame = TIMELINE.to_dataframe()
    assert [*frame.columns] == ["rank", "lane", "op", "stage", "microbatch", "start", "end"]
    assert len(frame) == len(TIMELINE)
    assert frame["end"].max() - frame["start"].min() == TIMELINE.span
    forwards = frame[(frame["op"] == "F") & (frame["rank"] == 1)]
    assert forwards["microbatch"].tolist() == [0, 1, 2, 3]
    assert {*forwards["lane"]} == {"compute"}
