"""What replicas could hold instead: each line is a program that is made anew, and simulated."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import Costs, Plan, Sizes, Timeline, compile, draft, schedules, simulate
from schedir.predict.residencies import format_residencies, repriced, residencies
from schedir.predict.what_if import Lowering
from tests.commands import said

PLAN = Plan(2, 6, 3)
COSTS = Costs(F=1, B=2, unshard=0.5, reduce_scatter=0.5, reduce_grads=1, step=2)
SIZES = Sizes(activation=1e7, saved=1e8, params=1e9, grads=1e9, optimizer=6e9)


def run(zero: int, sizes: Sizes | None = SIZES, dp: int = 4, **more: Any) -> Timeline:
    program = compile(schedules.interleaved, PLAN, dp=dp, zero=zero, **more)
    return simulate(program, COSTS, sizes=sizes)


TOLD = """\
replicas hold zero 3, 1 stage whole, gradients reduced at the end: 70, 11.3 GB on the fullest \
rank, 23 gathers; they could, by simulation:
   -14.3%  zero 1: 60, 11.8 GB on the fullest rank, 3 gathers
   -11.4%  looped_bfs, breadth-first: 62, 10.8 GB on the fullest rank, 5 gathers
    +0.0%  gradients reduced each turn: 70, 10.3 GB on the fullest rank, 23 gathers"""


def test_what_a_person_is_told() -> None:
    found = residencies(run(3, active=1), COSTS)
    assert "\n".join(format_residencies(found)) == TOLD


@pytest.mark.parametrize("zero", range(4))
def test_each_line_is_a_simulation_and_none_is_beaten(zero: int) -> None:
    here = run(zero)
    now, *others = residencies(here, COSTS)
    assert now.run.span == here.span and now.most == here.peak_memory.max()
    assert others
    for one in others:
        program = one.run.program
        assert program.proofs and (program.zero, program.reduce) in {
            (0, "end"), (1, "end"), (2, "end"), (2, "turn"), (3, "end"), (3, "turn")
        }  # fmt: skip
        again = simulate(program, repriced(COSTS, here.program, program.zero, SIZES), sizes=SIZES)
        assert (again.span, again.peak_memory.max()) == (one.run.span, one.most)
        assert one.run.span < now.run.span or one.most < now.most
        alike = [other for other in others if other.run.program.name == program.name]
        assert not any(other.run.span < one.run.span and other.most <= one.most for other in alike)


def test_above_a_limit_nothing_is_told() -> None:
    """More memory where it leaves room, and else none."""
    here = run(3, active=1)
    free = residencies(here, COSTS)
    most = max(one.most for one in free[1:])
    assert [one.what for one in residencies(here, COSTS, most)] == [one.what for one in free]
    least = residencies(here, COSTS, here.peak_memory.max())
    assert all(one.most <= here.peak_memory.max() for one in least) and len(least) < len(free)


def test_a_schedule_that_gathers_less_often() -> None:
    found = {one.what: one for one in residencies(run(3, active=1), COSTS)}
    now, breadth = next(iter(found.values())), found["looped_bfs, breadth-first"]
    assert breadth.gathers == 5 < now.gathers
    assert breadth.run.span < now.run.span


def test_where_nothing_is_said() -> None:
    assert residencies(run(3, dp=1), COSTS) == []
    assert residencies(run(0, sizes=None), COSTS) == []
    assert residencies(run(0, sizes=Sizes(weights=1e9)), COSTS) == []
    assert format_residencies(residencies(run(3, sizes=None), replace(COSTS, unshard=0))) == []


def test_without_sizes_it_is_time_that_is_told() -> None:
    now, *others = residencies(run(3, sizes=None, active=1), COSTS)
    assert others and all(one.run.span < now.run.span for one in others)
    assert "GB" not in "".join(format_residencies([now, *others]))


# ---------------------------------------------------------------- costs of another level


@given(st.floats(0.1, 100), st.floats(0, 100), st.sampled_from([2, 3, 64]), st.integers(1, 3))
def test_an_all_reduce_is_two_halves(whole: float, step: float, dp: int, zero: int) -> None:
    """arXiv 1910.02054, section 7.1; there and back."""
    program = compile(schedules.gpipe, Plan(2, 2), dp=dp)
    plain = Costs(F=1, B=2, reduce_grads=whole, step=step)
    costs = repriced(plain, program, zero)
    assert costs.reduce_scatter == costs.unshard == pytest.approx(whole / 2)
    assert costs.step == pytest.approx(step / dp)
    there = replace(costs, reduce_grads=None)
    back = repriced(there, compile(schedules.gpipe, Plan(2, 2), dp=dp, zero=zero), 0)
    assert back.reduce_grads == pytest.approx(whole) and back.step == pytest.approx(step)
    assert repriced(plain, program, 0) == plain


def test_what_is_told_stays_and_bytes_say_the_rest() -> None:
    program = compile(schedules.gpipe, Plan(2, 2), dp=2)
    plain = Costs(F=1, B=2, reduce_grads=(4, 8), reduce_scatter=3)
    costs = repriced(plain, program, 1, Sizes(params=(1e9, 2e9), grads=4e9))
    assert costs.reduce_scatter == 3 and costs.unshard == (0.5, 2.0)


# ---------------------------------------------------------------- advice beside it


def test_other_plans_keep_no_more_stages_whole_than_they_have() -> None:
    """A schedule with a stage per rank can be tried, though two are whole here."""
    program = compile(schedules.interleaved, PLAN, dp=2, zero=3, active=2)
    lowering = Lowering(program, "device")
    assert lowering.options["active"] == 2
    other = lowering.of(draft(schedules.one_f_one_b, Plan(2, 6)), COSTS)
    assert other.zero == 3 and [slots.full for slots in other.slots] == [1, 1]


@pytest.mark.parametrize("command", ["best", "compare one_f_one_b interleaved"])
def test_schedules_with_fewer_stages_are_ranked_beside_others(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--active 2`, of those with one stage per rank that one is whole."""
    shape = ["--ranks=2", "--microbatches=4", "--dp=2", "--zero=3", "--active=2", "--json"]
    found = {row["program"]: row for row in json.loads(said(capsys, *command.split(), *shape))}
    assert {"one_f_one_b", "interleaved"} <= found.keys()


def test_the_command_tells_it(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["explain", "interleaved", "--ranks=2", "--microbatches=6", "--stages-per-rank=3",
             "--dp=4", "--zero=3", "--active=1",
             "--costs=F=1,B=2,unshard=0.5,reduce_scatter=0.5,reduce_grads=1,step=2",
             "--sizes=activation=10MB,saved=100MB,params=1GB,grads=1GB,optimizer=6GB"]  # fmt: skip
    assert TOLD in said(capsys, *shape)
    found = json.loads(said(capsys, *shape, "--json"))
    assert found["held_by_replicas"]["gathers"] == 23
    could = [row["what"] for row in found["could_be_held"]]
    assert could == ["zero 1", "looped_bfs, breadth-first", "gradients reduced each turn"]
