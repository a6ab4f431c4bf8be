"""Tests of the output of commands about offload: waits for host and disk, and memory."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from schedir import (
    Costs,
    PipelineShape,
    Sizes,
    Timeline,
    check,
    compile,
    from_text,
    schedules,
    simulate,
    to_text,
)
from schedir.__main__ import main
from schedir.errors import MemoryLimitError
from schedir.ir.isa.instructions import Opcode
from schedir.predict.bubble_causes import IdleCause, idleness, sum_by_cause
from schedir.predict.what_if import Advice, advise
from tests.offload_programs import offload_everything


def simulate_offloaded(costs: Costs, *, spilled: bool = False, **options: object) -> Timeline:
    plain = compile(schedules.one_f_one_b, PipelineShape(1, 3), **options)  # type: ignore[arg-type]
    return simulate(check(offload_everything(plain, spilled=spilled)), costs)


def sum_idle_by_cause(timeline: Timeline) -> dict[IdleCause, float]:
    table = sum_by_cause(idleness(timeline), timeline.ranks).sum(0)
    return {c: round(float(table[c]), 9) for c in IdleCause if table[c]}


def test_idle_causes_distinguish_host_and_disk_copies() -> None:
    """One rank runs F B F B F B, and waits for two or four copies before each B."""
    costs = Costs(F=1, B=2, offload=0.5, reload=0.25, offload_to_disk=3, reload_from_disk=1)
    assert sum_idle_by_cause(simulate_offloaded(costs)) == {IdleCause.OFFLOAD: 3 * 0.75}
    assert sum_idle_by_cause(simulate_offloaded(costs, spilled=True)) == {
        IdleCause.OFFLOAD: 3 * 0.75,
        IdleCause.DISK: 3 * 4,
    }
    timeline = simulate_offloaded(costs, spilled=True)
    idle = idleness(timeline)
    for cause, ops in (
        (IdleCause.OFFLOAD, {Opcode.Offload, Opcode.Reload}),
        (IdleCause.DISK, {Opcode.OffloadToDisk, Opcode.ReloadFromDisk}),
    ):  # fmt: skip
        awaited = timeline.spans["op"][idle["awaited_span"][idle["cause"] == cause]]
        assert {*awaited.tolist()} == ops


def test_snapshot_waits_have_their_own_idle_cause() -> None:
    costs = Costs(F=1, B=2, offload=0.5, reload=0.25, snapshot=20)
    idle = sum_idle_by_cause(simulate_offloaded(costs, checkpoint_snapshots=True))
    assert idle[IdleCause.SNAPSHOT] > 0 and idle[IdleCause.OFFLOAD] > 0
    assert idle[IdleCause.SNAPSHOT] + idle[IdleCause.OFFLOAD] == pytest.approx(sum(idle.values()))
    assert IdleCause.OFFLOAD not in sum_idle_by_cause(
        simulate_offloaded(Costs(F=1, B=2, snapshot=20), checkpoint_snapshots=True)
    )


def test_forward_without_free_slot_waits_for_offload() -> None:
    text = to_text(
        offload_everything(compile(schedules.gpipe, PipelineShape(1, 4))), folded=False
    ).replace("\nrank 0\n", "\nrank 0  saved 1\n")
    timeline = simulate(check(from_text(text)), Costs(F=1, B=2, offload=0.5, reload=0.25))
    assert sum_idle_by_cause(timeline) == {IdleCause.OFFLOAD: 4 * 0.75}
    assert timeline.span == 4 * 3.75


def test_advice_tries_free_copies_and_free_snapshots_apart() -> None:
    costs = Costs(F=1, B=2, offload=0.5, reload=0.25, snapshot=0.1)
    timeline = simulate_offloaded(costs, checkpoint_snapshots=True)
    saved_shares = {
        change.description: change.saved_share for change in advise(timeline, costs).changes
    }
    (copies,) = [
        saves for description, saves in saved_shares.items() if "copies to the host" in description
    ]
    (snapshots,) = [
        saves for description, saves in saved_shares.items() if "snapshots" in description
    ]
    without_copies = simulate(timeline.program, Costs(F=1, B=2, snapshot=0.1))
    assert copies == pytest.approx(1 - without_copies.span / timeline.span)
    assert copies > 0.1 and np.isclose(snapshots, 0, atol=0.05)


# ---------------------------------------------------------------- memory advice

SHAPE = PipelineShape(2, 4)
COPY_COSTS = Costs(F=1, B=2, offload=1, reload=1)
SIZES = Sizes(saved=10, recompute_inputs=1)


def advise_gpipe(costs: Costs, **options: Any) -> Advice:
    program = compile(schedules.gpipe, SHAPE, costs=costs, **options)
    return advise(simulate(program, costs, sizes=SIZES), costs)


@pytest.fixture(scope="module")
def unlimited_advice() -> Advice:
    return advise_gpipe(COPY_COSTS)


def test_offload_without_extra_time_is_proposed(unlimited_advice: Advice) -> None:
    advice = unlimited_advice
    (best,) = [change for change in advice.memory_changes if change.description == 'offload="all"']
    assert best.run.span == advice.baseline.span
    assert best.memory["device"] < advice.current.memory["device"] and best.memory["host"] > 0
    for change in advice.memory_changes:  # each is a program compiled with its options
        options = {k: v for k, v in change.row.options.items() if v is not None}
        program = compile(schedules.gpipe, SHAPE, costs=COPY_COSTS, **options)
        assert program == change.run.program


def test_dominated_memory_change_is_not_proposed(unlimited_advice: Advice) -> None:
    slow = replace(COPY_COSTS, offload=6, reload=6)
    advice = advise_gpipe(slow)
    assert [change.description for change in advice.memory_changes] == ['recompute="all"']
    best_change, *_ = advise_gpipe(slow, offload=[0, 1]).memory_changes
    assert best_change.description == "all saved activations kept" and best_change.saved_share > 0
    peaks = [change.memory["device"] for change in unlimited_advice.memory_changes]
    assert peaks == sorted(peaks, reverse=True) and len({*peaks}) == len(peaks)


def test_offload_advice_needs_copy_costs_and_sizes() -> None:
    program, free_costs = compile(schedules.gpipe, PipelineShape(2, 8)), Costs(F=1, B=2)
    held = advise(simulate(program, free_costs, sizes=SIZES), free_costs).memory_changes
    assert not any("offload" in change.description for change in held)
    assert advise(simulate(program, COPY_COSTS), COPY_COSTS).memory_changes == []  # no sizes


def test_explain_prints_memory_changes(capsys: pytest.CaptureFixture[str]) -> None:
    head = "explain gpipe --ranks 2 --microbatches 4 --sizes saved=10MB --costs F=1,B=2"
    assert main(f"{head},offload=1,reload=1 --memory-limit 30MB".split()) == 0
    assert "the program does not fit into 30 MB: span " in capsys.readouterr().out
    assert main(f"{head},offload=1,reload=1 --memory-limit 5MB".split()) == 0
    assert capsys.readouterr().out.endswith("; no tried change fits\n")
    assert main(f"{head},offload=1,reload=1 --memory-limit 30MB --json".split()) == 0
    facts = json.loads(capsys.readouterr().out)
    assert not facts["fits_memory"] and facts["current"]["memory"]["device"] > 30e6
    assert all(change["memory"]["device"] <= 30e6 for change in facts["memory_changes"])
    # "fit" takes the same time as "all", with fewer copies.
    best_change, *_ = facts["memory_changes"]
    assert best_change["description"] == 'offload="fit"'
    assert best_change["span"] == facts["current"]["span"]


def test_simulate_and_check_print_offloaded_activations(capsys: pytest.CaptureFixture[str]) -> None:
    shape = (
        "gpipe --ranks 2 --microbatches 4 --sizes saved=10MB,recompute_inputs=1MB --costs F=1,B=2"
    )
    offload_options = (
        f"{shape},offload=0.5,reload=0.5,offload_to_disk=0.5,reload_from_disk=0.5 -O offload=all"
    )
    offload_options += " -O offload_to_disk=0.1,0.2"
    assert main(f"simulate {offload_options} --json".split()) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["peak_on_disk"] == [20e6, 0] and len(facts["peak_on_host"]) == 2
    for command in ("simulate", "check"):
        assert main(f"{command} {offload_options}".split()) == 0
        output = capsys.readouterr().out
        assert "\nspilled: 2 of 8 forwards: mb 1-2 of stage 0\n" in f"\n{output}"
        assert "offloaded: " in output and ("peak on disk" in output) == (command == "simulate")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"offload": [3, 0]},
            "offload selects 3, but moves no activation of this selection: no compute runs",
        ),
        (
            {"offload": [(3, 1), (0, 0)]},
            "offload selects 3.1, but moves no activation of this selection",
        ),
        (
            {"offload": [0], "offload_to_disk": [1, (2, 3)]},
            "offload_to_disk selects 1, 2.3, .*offload does not move the activations to the host",
        ),
        (
            {"offload": [0], "offload_to_disk": [(1, k) for k in range(6)]},
            "1.3 and 2 more, but moves no activation",
        ),
    ],
)
def test_selection_that_moves_no_activation_warns(how: dict[str, Any], message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        program = compile(schedules.one_f_one_b, PipelineShape(4, 8), **how)
    assert Opcode.Offload in program.used_opcodes
    assert Opcode.OffloadToDisk not in program.used_opcodes


def test_command_prints_warning_as_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []

    def record_warning(*warning: Any, **more: Any) -> None:
        messages.append(warnings.formatwarning(*warning[:4]))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", record_warning)
        assert (
            main(["check", "one_f_one_b", "--ranks=4", "--microbatches=8", "-O", "offload=3"]) == 0
        )
    (message,) = messages
    assert message.startswith(
        "warning: offload selects 3, but moves no activation of this selection: "
    )
    assert message.endswith("the use of the activations\n")


def test_memory_limit_error_suggests_offload() -> None:
    shape, sizes = PipelineShape(4, 8), Sizes(saved=10, model_states=7)
    costs = Costs(F=1, B=2, offload=1, reload=1)
    with pytest.raises(MemoryLimitError) as caught:
        compile(schedules.one_f_one_b, shape, sizes=sizes, memory_limit=40)
    assert caught.value.hint.startswith('40 B are saved activations: offload="fit" moves')
    compile(schedules.one_f_one_b, shape, sizes=sizes, memory_limit=40, costs=costs, offload="fit")
    with pytest.raises(MemoryLimitError) as caught:  # offload would not help
        compile(schedules.one_f_one_b, shape, sizes=sizes, memory_limit=6)
    assert not caught.value.hint


def test_host_instructions_without_cost_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """`simulate` and `explain` print the option that gives the missing costs."""
    for command in ("simulate", "explain"):
        argv = [
            command,
            "one_f_one_b",
            "--ranks=2",
            "--microbatches=2",
            "-O",
            "optimizer_placement=cpu_step",
        ]
        assert not main([*argv, "--costs=F=1,B=2,offload_grads=1"])
        (line,) = [
            text_line
            for text_line in capsys.readouterr().out.splitlines()
            if "without a cost" in text_line
        ]
        assert "without a cost, and so free: host_step, reload_weights; " in line
        assert "--costs host_step=0.5,reload_weights=0.5" in line
        assert not main([*argv, "--costs=F=1,B=2,offload_grads=1,reload_weights=1,host_step=1"])
        assert "without a cost" not in capsys.readouterr().out
