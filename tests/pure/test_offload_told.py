"""What is told of offload: which waits are for the host and its disk, and what would help."""

from __future__ import annotations

import numpy as np
import pytest

from schedir import Costs, Plan, Timeline, check, compile, parse, schedules, show, simulate
from schedir.ir.ops import Opcode
from schedir.predict.bubble_causes import Cause, by_cause, idleness
from schedir.predict.what_if import advise
from tests.offloaded import offloaded


def run(costs: Costs, *, spilled: bool = False, **options: object) -> Timeline:
    plain = compile(schedules.one_f_one_b, Plan(1, 3), **options)  # type: ignore[arg-type]
    return simulate(check(offloaded(plain, spilled=spilled)), costs)


def causes(timeline: Timeline) -> dict[Cause, float]:
    table = by_cause(idleness(timeline), timeline.ranks).sum(0)
    return {c: round(float(table[c]), 9) for c in Cause if table[c]}


def test_waits_for_the_host_and_for_the_disk_are_told_apart() -> None:
    """One rank, F B F B F B: before each B it waits for both copies, or all four."""
    costs = Costs(F=1, B=2, offload=0.5, reload=0.25, spill=3, fetch=1)
    assert causes(run(costs)) == {Cause.OFFLOAD: 3 * 0.75}
    assert causes(run(costs, spilled=True)) == {Cause.OFFLOAD: 3 * 0.75, Cause.DISK: 3 * 4}
    found = run(costs, spilled=True)
    idle = idleness(found)
    for cause, ops in (
        (Cause.OFFLOAD, {Opcode.Offload, Opcode.Reload}), (Cause.DISK, {Opcode.Spill, Opcode.Fetch})
    ):  # fmt: skip
        awaited = found.spans["op"][idle["awaits"][idle["cause"] == cause]]
        assert {*awaited.tolist()} == ops


def test_snapshots_on_the_same_lane_are_none_of_them() -> None:
    costs = Costs(F=1, B=2, offload=0.5, reload=0.25, snapshot=20)
    found = causes(run(costs, snapshots=True))
    assert found[Cause.SNAPSHOT] > 0 and found[Cause.OFFLOAD] > 0
    assert found[Cause.SNAPSHOT] + found[Cause.OFFLOAD] == pytest.approx(sum(found.values()))
    assert Cause.OFFLOAD not in causes(run(Costs(F=1, B=2, snapshot=20), snapshots=True))


def test_a_forward_that_waits_for_room_waits_for_the_offload_that_leaves_it() -> None:
    text = show(offloaded(compile(schedules.gpipe, Plan(1, 4))), folded=False).replace(
        "\nrank 0\n", "\nrank 0  saved 1\n"
    )
    found = simulate(check(parse(text)), Costs(F=1, B=2, offload=0.5, reload=0.25))
    assert causes(found) == {Cause.OFFLOAD: 4 * 0.75}
    assert found.span == 4 * 3.75


def test_free_copies_are_tried_and_free_snapshots_are_not_they() -> None:
    costs = Costs(F=1, B=2, offload=0.5, reload=0.25, snapshot=0.1)
    timeline = run(costs, snapshots=True)
    told = {change.what: change.saves for change in advise(timeline, costs).changes}
    (copies,) = [saves for what, saves in told.items() if "copies to the host" in what]
    (kept,) = [saves for what, saves in told.items() if "snapshots" in what]
    free = simulate(timeline.program, Costs(F=1, B=2, snapshot=0.1))
    assert copies == pytest.approx(1 - free.span / timeline.span)
    assert copies > 0.1 and np.isclose(kept, 0, atol=0.05)
