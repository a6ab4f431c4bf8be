"""Tests of the default number of stages per rank, and that every command prints it."""

from __future__ import annotations

import json
from functools import partial

import pytest

from schedir.schedules import interleaved, one_f_one_b, zb_v
from schedir.schedules.schedule_algebra import EMPTY, RankSchedule, Schedule, get_stages_per_rank
from tests.commands import run_command


def test_default_stages_per_rank() -> None:
    def mine(r: int, P: int, m: int, v: int = 3) -> RankSchedule:
        return EMPTY

    expected: dict[Schedule, int] = {
        one_f_one_b: 1,
        interleaved: 2,
        zb_v: 2,
        mine: 3,
        partial(mine, v=4): 4,
    }
    assert {s: get_stages_per_rank(s) for s in expected} == expected


def test_commands_print_default_stages_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """A schedule with a parameter `v` has two stages per rank by default."""
    two = "2 stages per rank"
    shape = ("--ranks=2", "--microbatches=2")
    for name in ("simulate", "draw", "check", "explain"):
        assert two in run_command(capsys, name, "interleaved", *shape)
        single_stage = run_command(capsys, name, "interleaved", *shape, "--stages-per-rank=1")
        assert two not in single_stage.split("\n")[0]
        assert "3 stages per rank" in run_command(capsys, name, "interleaved(v=3)", *shape)
    assert "stages_per_rank 2" in run_command(capsys, "print", "interleaved")
    assert "stages_per_rank 1" in run_command(capsys, "print", "interleaved", "--placement=0,1,2,3")
    facts = json.loads(
        run_command(capsys, "compare", "one_f_one_b", "interleaved", "zb_v", "--json")
    )
    assert [fact["stages_per_rank"] for fact in facts] == [1, 2, 2]
    assert [fact["stages"] for fact in facts] == [4, 8, 8]
    assert "set by the schedule" in run_command(capsys, "train", "--help")
    outputs = [
        run_command(capsys, "compare", "interleaved", *options)
        for options in ((), ("--stages-per-rank=2",))
    ]
    assert outputs[0] == outputs[1]
