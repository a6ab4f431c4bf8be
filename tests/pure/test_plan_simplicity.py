"""The planner prefers a simple plan to one that is barely faster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from schedir.planner import prefer_simplest
from schedir.planner.plan_simplicity import measure_complexity
from tests.commands import run_command
from tests.pure.test_planner_command import AT, PLAN

SIMPLE = replace(PLAN, schedule="one_f_one_b", stages_per_rank=1, recompute="none", zero=0)


@pytest.mark.parametrize(
    ("slowdown", "is_preferred"), [(0.0, True), (0.006, True), (0.0199, True), (0.0201, False)]
)
def test_simple_plan_within_two_percent_is_preferred(slowdown: float, is_preferred: bool) -> None:
    simple = replace(SIMPLE, step_time=PLAN.step_time * (1 + slowdown))
    assert prefer_simplest([PLAN, simple]) == ([simple, PLAN] if is_preferred else [PLAN, simple])
    assert prefer_simplest([]) == []


@pytest.mark.parametrize(
    "change",
    [
        {"schedule": "zb_h1"}, {"stages_per_rank": 2}, {"recompute": "full"}, {"zero": 2},
        {"sequence_parallel": True}, {"cp": 2}, {"ep": 2}, {"offload": "fit"},
        {"optimizer_placement": "host"},
    ],
)  # fmt: skip
def test_each_mechanism_increases_complexity(change: dict[str, object]) -> None:
    complex_plan = replace(SIMPLE, **change)  # type: ignore[arg-type]
    assert measure_complexity(complex_plan) > measure_complexity(SIMPLE)


def test_fewer_stages_then_shorter_step_then_less_memory_comes_first() -> None:
    """ZeRO 1 does not count as a mechanism, since it saves memory without more communication."""
    two, eight = (replace(PLAN, stages_per_rank=v) for v in (2, 8))
    assert prefer_simplest([eight, two]) == [two, eight]
    smaller_memory = PLAN.memory._replace(optimizer=PLAN.memory.optimizer - 1)
    plain, sharded = replace(PLAN, zero=0), replace(PLAN, zero=1, memory=smaller_memory)
    assert prefer_simplest([plain, sharded])[0] == sharded
    slower = replace(sharded, step_time=1.01 * plain.step_time)
    assert prefer_simplest([plain, slower])[0] == plain
    assert prefer_simplest([replace(PLAN, zero=2, memory=smaller_memory), plain])[0] == plain


def test_command_prints_preferred_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command also writes the preferred plan."""
    text = run_command(capsys, *AT, "-o", str(tmp_path / "plan.toml"))
    assert (
        "\nplan 1 comes first because it is the simplest plan within 2 % of the fastest; " in text
    )
    plans = json.loads(run_command(capsys, *AT, "--json"))["plans"]
    steps = [plan["step_time"] for plan in plans]
    assert min(steps) == steps[1] < steps[0] <= 1.02 * steps[1]
    written = (tmp_path / "plan.toml").read_text()
    assert f"ranks = {plans[0]['pp']}\n" in written and plans[0]["zero"] < plans[1]["zero"]
    only = run_command(capsys, *AT, "--top=1")
    assert "within 2 % of the fastest" in only
    fastest = run_command(capsys, *AT, "--zero=1", "--schedules=one_f_one_b", "--pp=1", "--tp=1")
    assert "within 2 % of the fastest" not in fastest
