"""Tests of the sentence that names a schedule with the same span and less memory."""

from __future__ import annotations

import pytest

import schedir
from schedir import Costs
from schedir.commands.common.least_memory import describe_least_memory
from tests.commands import run_command

LEAST = "in flight, the least for this span"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("gpipe", f"the built-in one_f_one_b is as short with 4 instead of 8 {LEAST}"),
        ("zb_h2", f"the built-in zb_h1 is as short with 4 instead of 7 {LEAST}"),
        ("zb_h1", ""),
        ("one_f_one_b", ""),
        ("looped_bfs", "the built-in interleaved is as short with 11 instead of 16 in flight"),
        (
            "gpipe --sizes activation=1GB,saved=2GB",
            "the built-in one_f_one_b is as short with 38 GB instead of 48 GB",
        ),
    ],
)
def test_simulate_names_schedule_with_less_memory(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run_command(capsys, "simulate", *arguments.split(), "--ranks=4", "--microbatches=8")
    lines = text.splitlines()
    (proof_line,) = [k for k, line in enumerate(lines) if line.endswith("proved shortest")]
    next_line = lines[proof_line + 1] if proof_line + 1 < len(lines) else ""
    assert next_line == sentence or (not sentence and "is as short" not in text)
    if not sentence.endswith("GB"):
        assert sentence in run_command(
            capsys, "draw", *arguments.split(), "--ranks=4", "--microbatches=8"
        )


def test_search_names_schedule_with_less_memory(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ("--no-split-backward", "--max-in-flight=8", "--time-limit=5")
    text = run_command(capsys, "search", "--ranks=4", "--microbatches=8", *limits)
    assert "\nthe built-in one_f_one_b is as short with 4 instead of " in text


def test_least_memory_is_claimed_only_if_proved() -> None:
    """A schedule with 6 in flight can have the same span, so 7 is not the least."""
    program = schedir.compile("gpipe", ranks=4, microbatches=8)
    costs = Costs(F=1, B=2)
    timeline = schedir.simulate(program, costs)
    other_timelines = [
        schedir.simulate(schedir.compile(name, ranks=4, microbatches=8), costs)
        for name in ("eager_1f1b", "forward_only", "zb_h1", "gpipe")
    ]
    text = describe_least_memory(timeline, costs, other_timelines)
    assert text == "the built-in eager_1f1b is as short with 7 instead of 8 in flight"
    assert describe_least_memory(timeline, costs, other_timelines[1:]) == ""
