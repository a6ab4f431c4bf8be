"""Comparisons of two schedules in the studio: costs per stage, and the command that it copies."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir.commands.studio import DEFAULTS
from schedir.commands.studio.answers import Studio
from schedir.commands.studio.state import scale_stage_values
from tests.commands import run_command

STUDIO = Studio()
SCHEDULES = ["one_f_one_b", "gpipe", "interleaved", "zb_v", "v_half", "looped_bfs", "dualpipe"]


def ask(schedule: str, other: str = "", **options: str) -> dict[str, Any]:
    """Return the answer for a schedule, compared with another one."""
    state = {"schedule": schedule, "other": other, "options": DEFAULTS | options}
    return STUDIO.answer({"state": state})


@settings(max_examples=50)
@given(
    names=st.lists(st.sampled_from(SCHEDULES), min_size=2, max_size=2),
    costs=st.sampled_from(["F=1,B=2", "F=2,B=3,I=1,W=2,send=0.3", "B=3,step=1", "send=1", ""]),
    sizes=st.sampled_from(["saved=1GB", "saved=2GB,params=3GB,activation=0.5GB", ""]),
)
def test_comparison_keeps_times_of_shown_schedule(names: list[str], costs: str, sizes: str) -> None:
    alone, reverse = (ask(name, costs=costs, sizes=sizes) for name in names)
    answer = ask(*names, costs=costs, sizes=sizes)
    assert "error" not in answer
    this_run, other_run = answer["runs"]
    assert this_run["span"] == alone["runs"][0]["span"]
    assert this_run["peakMemory"] == alone["runs"][0]["peakMemory"]
    factor = alone["stages"] / reverse["stages"]
    own_options = scale_stage_values({"costs": costs, "sizes": sizes}, factor)
    expected = ask(names[1], **own_options)["runs"][0]
    assert other_run["span"] == pytest.approx(expected["span"])
    assert other_run["peakMemory"] == expected["peakMemory"]
    assert any("same model" in note for note in answer["notes"]) == (factor != 1)


@pytest.mark.parametrize(
    ("one", "other", "options"),
    [
        ("interleaved", "one_f_one_b", {"costs": "F=1,B=2,send=0.1"}),
        ("one_f_one_b", "zb_v", {"costs": "F=1:2:1:1,B=2"}),
        ("zb_v", "gpipe", {"costs": "send=0.2", "frozen_stages": ""}),
        ("one_f_one_b", "gpipe", {"stage_segments": "3", "tp": "2", "costs": "F=1,B=3"}),
        ("one_f_one_b", "gpipe", {"microbatch_chunks": "2", "costs": "F=1,B=3,send=0.5"}),
        ("one_f_one_b", "gpipe", {"stage_segments": "3,1,3,1", "tp": "2", "costs": "F=1,B=3"}),
        ("one_f_one_b", "zb_v", {"sizes": "saved=0.00001GB"}),
        ("interleaved", "looped_bfs", {"stages_per_rank": "4"}),
        ("zb_v", "gpipe", {"stages_per_rank": "2", "placement": "vee"}),
        ("one_f_one_b", "interleaved", {"stages_per_rank": "1"}),
    ],
)
def test_copied_command_prints_the_same_spans(
    capsys: pytest.CaptureFixture[str], one: str, other: str, options: dict[str, str]
) -> None:
    answer = ask(one, other, **options)
    spans = [run["span"] for run in answer["runs"]]
    words = shlex.split(answer["command"])
    assert words[:4] == ["schedir", "compare", one, other]
    rows = json.loads(run_command(capsys, *words[1:], "--json"))
    printed = {row["program"]: row["span"] for row in rows}
    assert [printed[one], printed[other]] == pytest.approx(spans)


def test_copied_command_of_edited_program_has_its_shape(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = DEFAULTS | {"microbatches": "12", "zero": "1", "dp": "2"}
    state = {"schedule": "interleaved", "other": "zb_h1", "options": options}
    answer = STUDIO.answer({"state": state, "move": [0, 1, 8]})
    exported = STUDIO.answer({"state": answer["state"], "export": "sched"})
    monkeypatch.chdir(tmp_path)
    Path(exported["file"]).write_text(exported["text"])
    rows = json.loads(run_command(capsys, *shlex.split(answer["command"])[1:], "--json"))
    spans = [run["span"] for run in answer["runs"]]
    assert [row["span"] for row in rows] == pytest.approx(spans)
    assert [row["microbatches"] for row in rows] == [12, 12]


def test_comparison_without_command_copies_none() -> None:
    answer = ask("looped_dfs", "looped_bfs", placement="vee")
    assert len(answer["runs"]) == 2 and answer["command"] == ""
    state = {"other": "gpipe", "options": DEFAULTS | {"recompute": "all"}}
    assert ask("one_f_one_b", "gpipe", recompute="all")["command"]
    assert STUDIO.answer({"state": state, "move": [0, 0, 4]})["command"] == ""


def test_option_without_value_per_rank_is_refused() -> None:
    answer = ask("interleaved", "one_f_one_b", frozen_stages="1")
    assert answer["error"]["fields"] == ["other", "frozen_stages"]
    costs = f"F={':'.join('123456789123')}"
    answer = ask("one_f_one_b", "gpipe", stage_segments="3", tp="2", costs=costs)
    assert answer["error"]["fields"] == ["other", "costs"]


def test_error_of_other_schedule_names_it() -> None:
    error = ask("one_f_one_b", "gpipe", memory_limit="4GB")["error"]
    assert error["fact"] == "gpipe: rank 0 needs 8 GB, but the limit is 4 GB"
    assert error["fields"] == ["other"] and error["sites"] and not error["picture"]
    assert ask("one_f_one_b", "gpip")["error"]["fact"] == "'gpip' is not a built-in schedule"


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("zb_v", {"frozen_stages": "1"}),
        ("one_f_one_b", {"stage_segments": "3", "tp": "2", "recompute": "half"}),
        ("pipedream_2bw", {}),
    ],
)
def test_only_edited_programs_have_edited_titles(schedule: str, options: dict[str, str]) -> None:
    state = {"schedule": schedule, "options": DEFAULTS | options}
    text = STUDIO.answer({"state": state, "export": "sched"})["text"]
    assert STUDIO.answer({"state": {"program": text}})["title"] == schedule
    moved = STUDIO.answer({"state": {"schedule": schedule, "options": DEFAULTS}, "move": [0, 0, 4]})
    assert moved["title"] == f"{schedule}, edited"
