"""What is told of offload: which waits are for the host and its disk, and what would help."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest

from schedir import Costs, Plan, Sizes, Timeline, check, compile, parse, schedules, show, simulate
from schedir.__main__ import main
from schedir.errors import MemoryLimitError
from schedir.ir.ops import Opcode
from schedir.predict.bubble_causes import Cause, by_cause, idleness
from schedir.predict.late_moves import faster, late_moves
from schedir.predict.offloading import Way, format_ways, ways
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


# ---------------------------------------------------------------- what is late, and by how much


def test_the_latest_copy_is_told_and_by_how_much() -> None:
    """F B F B F B on one rank: each B waits for both copies; the last one's take 2 and 4."""
    costs = Costs(F=1, B=2, offload=((0.5, 0.5, 2),), reload=((0.25, 0.25, 4),))
    (one,) = late_moves(timeline := run(costs))
    assert (one.tier, one.waits, one.total, one.by) == ("host", 3, 0.75 * 2 + 6, 6)
    told = [str(timeline.of(0, at)[0]) for at in (one.user, one.move)]
    assert told == ["B 0.2", "reload 0.2"]
    costs = Costs(F=1, B=2, offload=0.5, reload=0.25, spill=3, fetch=1)
    host, disk = late_moves(run(costs, spilled=True))
    assert (host.waits, host.total, disk.waits, disk.total) == (3, 2.25, 3, 12)


@pytest.mark.parametrize("times", [0.01, 0.25, 2.0])
def test_the_bandwidth_that_is_enough(times: float) -> None:
    """Nothing overlaps with one slot: 64 F, B and copies there and back, of which those may take
    half a percent of the rest."""
    text = show(offloaded(compile(schedules.gpipe, Plan(1, 64))), folded=False)
    program = check(parse(text.replace("\nrank 0\n", "\nrank 0  saved 1\n")))
    costs = Costs(F=1, B=2, offload=times, reload=times)
    found = faster(base := simulate(program, costs), costs, "host")
    assert base.span == pytest.approx(64 * (3 + 2 * times))
    assert found.times == pytest.approx(max(1.0, 2 * times / (3 * 0.005)), rel=0.02)
    assert found.run.span <= 64 * 3 * 1.005 * (1 + 1e-9)


# ---------------------------------------------------------------- what is proposed


def proposed(
    schedule: Any, move: float, limit: float | None = None, **options: Any
) -> tuple[list[Way], str]:
    costs = Costs(F=1, B=2, offload=move, reload=move)
    program = compile(schedule, Plan(2, 8), costs=costs, **options)
    found = ways(simulate(program, costs, sizes=Sizes(saved=10, checkpoint=1)), costs, limit)
    return found, "\n".join(format_ways(found, limit))


def test_offload_is_proposed_where_it_costs_nothing() -> None:
    (now, *others), told = proposed(schedules.gpipe, 1)
    assert now.what == "all kept" and others[0].run.span == now.run.span
    (best,) = [way for way in others if way.options == {"offload": "all"}]
    assert best.most() < now.most() and best.most("host") > 0
    assert 'offload="all"' in told and "for nothing" in told and "+0.0%" in told
    for way in others:  # each is what compile makes of its options
        costs = Costs(F=1, B=2, offload=1, reload=1)
        program = compile(schedules.gpipe, Plan(2, 8), costs=costs, **way.options)  # type: ignore[arg-type]
        assert program == way.run.program


def test_offload_is_not_proposed_where_it_costs_time() -> None:
    (now, *others), told = proposed(schedules.gpipe, 6)
    assert told.startswith("offload spares no device memory here, and is not proposed: +")
    least = min(way.run.span for way in others if "recompute" not in way.options)
    assert f"{least / now.run.span - 1:+.1%}" in told and least > now.run.span
    slow = Way({"offload": "all"}, others[0].run)  # as if it spared some
    few = slow._replace(run=simulate(slow.run.program, Costs(F=9, B=9), sizes=Sizes(saved=1)))
    (line,) = format_ways([now, few])
    assert line.startswith("offload costs time here, and is not proposed: +")
    found, told = proposed(schedules.gpipe, 6, offload=[0, 1])
    assert found[0].options == {"offload": "some"}
    first = told.splitlines()[1]
    assert "all kept" in first and first.split()[0].startswith("-")


def test_within_a_limit_is_proposed_what_fits() -> None:
    (now, *others), told = proposed(schedules.gpipe, 1, limit=35)
    assert not now.fits and [way for way in others if "offload" in way.options]
    assert all(way.most() <= 35 for way in others)
    assert told.startswith("what is held does not fit into 35 B") and 'offload="all"' in told
    _, told = proposed(schedules.gpipe, 1, limit=50)  # of what takes as long what moves least
    assert told.splitlines()[1].split()[:2] == ["+0.0%", 'offload="fit":']
    (now, *others), told = proposed(schedules.gpipe, 1, limit=5)
    assert not now.fits and not others and told.endswith("nothing that was tried does")


def test_nothing_is_claimed_of_copies_that_nobody_prices() -> None:
    program = compile(schedules.gpipe, Plan(2, 8))
    assert ways(simulate(program, Costs(F=1, B=2), sizes=Sizes(saved=1)), Costs(F=1, B=2)) == []
    costs = Costs(F=1, B=2, offload=1, reload=1)
    assert ways(simulate(program, costs), costs) == []  # no sizes


def test_explain_tells_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    head = "explain gpipe --ranks 2 --microbatches 8 --sizes saved=10MB --costs F=1,B=2"
    assert main(f"{head},offload=4,reload=4 --offload 0,1".split()) == 0
    told = capsys.readouterr().out
    assert "instructions wait for the host" in told and "x the bandwidth of the host" in told
    assert main(f"{head},offload=1,reload=1 --limit 40MB --json".split()) == 0
    facts = json.loads(capsys.readouterr().out)
    now, *others = facts["ways"]
    assert not now["fits"] and all(way["memory"]["device"] <= 40e6 for way in others)
    assert {"offload": "all"} in [way["options"] for way in others]
    assert main(f"{head},offload=4,reload=4 --offload 0,1 --json".split()) == 0
    (late,) = json.loads(capsys.readouterr().out)["late_moves"]
    assert late["tier"] == "host" and late["bandwidth"] > 1 and late["longest"] > 0


def test_simulate_and_check_tell_what_goes_where(capsys: pytest.CaptureFixture[str]) -> None:
    shape = "gpipe --ranks 2 --microbatches 4 --sizes saved=10MB,checkpoint=1MB --costs F=1,B=2"
    moved = f"{shape},offload=0.5,reload=0.5,spill=0.5,fetch=0.5 --offload all --spill 0.1,0.2"
    assert main(f"simulate {moved} --json".split()) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["peak_on_disk"] == [20e6, 0] and len(facts["peak_on_host"]) == 2
    for command in ("simulate", "check"):
        assert main(f"{command} {moved}".split()) == 0
        told = capsys.readouterr().out
        assert "\nspilled: 2 of 8 forwards: of stage 0 1-2\n" in f"\n{told}"
        assert "offloaded: " in told and ("peak on disk" in told) == (command == "simulate")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"offload": [3, 0]}, "offload names 3, of which nothing moves: nothing is computed"),
        ({"offload": [(3, 1), (0, 0)]}, "offload names 3.1, of which"),
        ({"offload": [0], "spill": [1, (2, 3)]}, "spill names 1, 2.3, .*it is not offloaded"),
        ({"offload": [0], "spill": [(1, k) for k in range(6)]}, "1.3 and 2 more, of"),
    ],
)
def test_what_is_named_for_nothing_is_told(how: dict[str, Any], told: str) -> None:
    with pytest.warns(UserWarning, match=told):
        program = compile(schedules.one_f_one_b, Plan(4, 8), **how)
    assert Opcode.Offload in program.ops and Opcode.Spill not in program.ops


def test_the_command_warns_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def shown(*warning: Any, **more: Any) -> None:
        told.append(warnings.formatwarning(*warning[:4]))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", shown)
        assert main(["check", "one_f_one_b", "--ranks=4", "--microbatches=8", "--offload=3"]) == 0
    (own,) = told
    assert own.startswith("warning: offload names 3, of which nothing moves: ")
    assert own.endswith("its use\n")


def test_a_limit_says_what_moving_would_spare() -> None:
    plan, sizes = Plan(4, 8), Sizes(saved=10, weights=7)
    costs = Costs(F=1, B=2, offload=1, reload=1)
    with pytest.raises(MemoryLimitError) as caught:
        compile(schedules.one_f_one_b, plan, sizes=sizes, limit=40)
    assert caught.value.hint.startswith("40 B of it is what forwards saved: offload='fit' moves")
    compile(schedules.one_f_one_b, plan, sizes=sizes, limit=40, costs=costs, offload="fit")
    with pytest.raises(MemoryLimitError) as caught:  # which no offload would help
        compile(schedules.one_f_one_b, plan, sizes=sizes, limit=6)
    assert not caught.value.hint


def test_what_the_host_does_for_nothing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Its steps are not free, and how to say what they take is told, also of explain."""
    for command in ("simulate", "explain"):
        at = [command, "one_f_one_b", "--ranks=2", "--microbatches=2", "--states=cpu"]
        assert not main([*at, "--costs=F=1,B=2,offload_grads=1"])
        (line,) = [one for one in capsys.readouterr().out.splitlines() if "nobody tells" in one]
        assert "what reload_weights, step_host cost" in line
        assert "--costs reload_weights=0.5,step_host=0.5" in line
        assert not main([*at, "--costs=F=1,B=2,offload_grads=1,reload_weights=1,step_host=1"])
        assert "nobody tells" not in capsys.readouterr().out
