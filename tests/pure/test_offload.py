"""Offload: what goes to the host and comes back, when, how much is where, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedir.compiler.compile import compile
from schedir.errors import PlanError, UsageError
from schedir.ir.costs import Costs
from schedir.ir.ops import Opcode
from schedir.ir.plan import Plan
from schedir.ir.program import Program
from schedir.ir.sizes import Sizes
from schedir.ir.text import parse, show
from schedir.predict.simulate import simulate
from schedir.schedules import built_in, forward_only, gpipe, interleaved, one_f_one_b
from schedir.verify.check import check
from tests.laws import ZOO, least, plan_of

SIZES = Sizes(saved=10, checkpoint=1)
COSTS = Costs(F=1, I=1, W=1, offload=1, reload=1, spill=0.5, fetch=0.5)
TRAINED = {name: each for name, each in ZOO.items() if each is not built_in()["forward_only"]}


def moved(program: Program, op: Opcode = Opcode.Offload) -> list[list[tuple[int, int]]]:
    """What each rank moves, in its order."""
    return [[(i.stage, i.mb) for i in stream if i.op is op] for stream in program.streams]


def of(schedule: Any, P: int = 4, m: int = 8) -> Plan:
    return plan_of(schedule, P, max(m, least(schedule, P)))


# ---------------------------------------------------------------- where it stands, and when


@pytest.mark.parametrize("schedule", TRAINED.values(), ids=TRAINED)
def test_all_that_fits_on_the_lanes_costs_nothing(schedule: Any) -> None:
    plan, costs = of(schedule), Costs(F=1, I=1, W=1, send=0.125, offload=0.5, reload=0.5)
    plain = simulate(compile(schedule, plan, costs=costs), costs, sizes=SIZES)
    for how in ("all", "half"):
        program = compile(schedule, plan, costs=costs, offload=how, debug=True)
        assert parse(show(program)) == program == check(program)
        run = simulate(program, costs, sizes=SIZES)
        assert run.span <= plain.span * (1 + 1e-9)
        assert (run.peak_memory <= plain.peak_memory).all()
        if how == "all":
            assert run.peak_memory.sum() < plain.peak_memory.sum()
        if how == "half":
            assert not any(mb % 2 for own in moved(program) for _, mb in own)


def test_memory_is_that_counted_by_hand() -> None:
    """GPipe's forwards keep two: one goes while the next is made; the last rank's come back so."""
    how: list[dict[str, Any]] = [{}, {"offload": "all"}, {"offload": "half"}]
    runs = [
        simulate(compile(gpipe, Plan(2, 8), costs=COSTS, **each), COSTS, sizes=SIZES)
        for each in how
    ]
    assert [run.span for run in runs] == [27, 27, 27]
    assert [run.peak_memory.tolist() for run in runs] == [[80, 80], [20, 30], [50, 60]]
    host = [max(curve.held) for curve in runs[1].memory_on("host")]
    assert host == [80, 70]


def test_what_comes_back_ends_as_late_as_it_may() -> None:
    """Each Reload of GPipe ends as its B starts, or a slot is short and it ends earlier still."""
    program = compile(gpipe, Plan(1, 4), costs=COSTS, offload="all")
    spans = simulate(program, COSTS).spans
    back = {s["mb"]: s["end"] for s in spans if s["op"] == Opcode.Reload}
    used = {s["mb"]: s["start"] for s in spans if s["op"] == Opcode.Backward}
    assert all(back[mb] <= used[mb] for mb in back)
    assert [int(s["mb"]) for s in spans if s["op"] == Opcode.Reload] == sorted(back)


def test_nothing_goes_that_is_needed_at_once() -> None:
    program = compile(one_f_one_b, Plan(4, 8), costs=COSTS, offload="all")
    assert [len(own) for own in moved(program)] == [8, 8, 8, 0]
    slow = Costs(F=1, B=2, offload=4, reload=4)
    program = compile(one_f_one_b, Plan(4, 8), costs=slow, offload="all")
    assert [len(own) for own in moved(program)] == [8, 0, 0, 0] or moved(program)[2] == []
    named = compile(one_f_one_b, Plan(4, 8), costs=slow, offload=[2, (3, 0)])
    assert [len(own) for own in moved(named)] == [0, 0, 8, 0]


def test_spilled_goes_on_and_comes_back_through_the_host() -> None:
    program = compile(gpipe, Plan(2, 8), costs=COSTS, offload="all", spill="half", debug=True)
    assert moved(program, Opcode.Spill) == moved(program, Opcode.Fetch)
    assert {mb for own in moved(program, Opcode.Spill) for _, mb in own} == {0, 2, 4, 6}
    run = simulate(program, COSTS, sizes=SIZES)
    assert max(max(curve.held) for curve in run.memory_on("disk")) > 0
    assert all(curve.held[-1] == 0 for curve in run.memory_on("host"))


def test_what_is_recomputed_moves_its_checkpoint() -> None:
    program = compile(gpipe, Plan(2, 4), costs=COSTS, offload="all", recompute="all", debug=True)
    run = simulate(program, COSTS, sizes=SIZES)
    assert max(run.memory_on("host")[0].held) <= 4 * 1
    order = [i.op.name for i in program.streams[0] if i.mb == 1 and i.op.name != "SendAct"]
    assert order[:4] == ["Forward", "Offload", "Reload", "Recompute"]


def test_moves_that_nobody_prices_are_planned_as_if_they_took_time() -> None:
    program = compile(gpipe, Plan(1, 8), offload="all")
    assert program.slots[0].saved == 3
    late = simulate(program, Costs(F=1, B=2, offload=0.5, reload=0.5))
    assert late.span == simulate(compile(gpipe, Plan(1, 8)), Costs(F=1, B=2)).span


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ({"offload": 4}, UsageError, "offload is"),
        ({"offload": "some"}, UsageError, "offload is"),
        ({"offload": [4]}, UsageError, "no stage 4 to offload"),
        ({"offload": [(0, 8)]}, UsageError, "no microbatch 8 to offload"),
        ({"offload": [0], "frozen": 1}, UsageError, "stage 0 is frozen"),
    ],
)
def test_what_says_nothing_is_refused(how: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        compile(one_f_one_b, Plan(4, 8), **how)


def test_forwards_alone_save_nothing() -> None:
    with pytest.raises(PlanError, match="no backward"):
        compile(forward_only, Plan(2, 4), offload="all")


def test_a_program_says_what_it_was_lowered_with() -> None:
    from schedir.compiler.again import compute_of, options_of

    program = compile(interleaved, Plan(2, 4, 2), costs=COSTS, offload="half", spill=[0])
    again = compile(compute_of(program), costs=COSTS, **options_of(program, "device"))
    assert moved(again) == moved(program)
    assert moved(again, Opcode.Fetch) == moved(program, Opcode.Fetch)
    assert np.array_equal(again.slots, program.slots)
