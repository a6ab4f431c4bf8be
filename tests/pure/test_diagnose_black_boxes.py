"""Tests of the output of `schedir diagnose` for the black boxes in a run's folder."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns

import pytest

from schedir import PipelineShape, compile, schedules, to_text
from schedir.__main__ import main
from schedir.hang_diagnosis.post_mortem import write_verdict
from schedir.io.black_box import (
    BLACK_BOX_DIRECTORY,
    FORMER_VERDICT_FILE,
    POSITION_FIELD,
    PROGRAM_FILE,
    VERDICT_FILE,
    BlackBox,
    BlackBoxField,
    ProcessPhase,
    compute_run_id,
)
from tests.commands import run_refused_command

PROGRAM_RUN = compile(schedules.one_f_one_b, PipelineShape(2, 2), progress_model="per_edge")
LONG_AGO_NS = 5 * 10**9
Capture = pytest.CaptureFixture[str]
Change = Callable[[memoryview], None]


def write_black_box(
    folder: Path, process: int, position: int, *changes: Change, ago: int = LONG_AGO_NS
) -> BlackBox:
    """Write the black box of one of two processes, in step 3, and apply `changes` to it."""
    box = BlackBox(folder / BLACK_BOX_DIRECTORY / str(process), process=process, world=2)
    (folder / BLACK_BOX_DIRECTORY / PROGRAM_FILE).write_text(to_text(PROGRAM_RUN))
    box.enter_phase(ProcessPhase.STEP, 3)
    box.values[POSITION_FIELD] = position
    box.values[BlackBoxField.PHASE_TIME] = monotonic_ns() - ago
    box.values[BlackBoxField.POSITION_TIME] = monotonic_ns() - ago
    for change in changes:
        change(box.values)
    return box


def mark_as_ended(values: memoryview) -> None:
    with subprocess.Popen(["true"]) as process:
        values[BlackBoxField.PID] = process.pid


def run_diagnose(capsys: Capture, *arguments: str) -> list[str]:
    assert main(["diagnose", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_diagnose_prints_cause_and_waiting_processes(tmp_path: Path, capsys: Capture) -> None:
    position = [str(instr) for instr in PROGRAM_RUN.streams[0]].index("B 0.0")
    write_black_box(tmp_path, 0, position)
    write_black_box(tmp_path, 1, 1)
    lines = run_diagnose(capsys, str(tmp_path))
    assert lines[0].startswith("one_f_one_b: no process has made progress for 5.")
    assert (
        "process 1 (pipeline rank 1) waits for no process, and makes no progress: in step 3"
        in lines[0]
    )
    assert lines[1:] == [
        f"  process 0 (pipeline rank 0)  in step 3 at #{position} B 0.0, "
        "waits for process 1 to reach #4 send_grad 1.0"
    ]
    assert run_diagnose(capsys, str(tmp_path / BLACK_BOX_DIRECTORY))[1:] == lines[1:]
    facts = json.loads("\n".join(run_diagnose(capsys, str(tmp_path), "--json")))
    assert facts["cause"] == {"process": 1, "kind": "busy", "is_certain": True}
    assert [process["position"] for process in facts["processes"]] == [position, 1]
    assert facts["processes_without_box"] == []
    assert "leave out --program" in run_refused_command(
        capsys, "diagnose", str(tmp_path), "--program", "gpipe"
    )


def test_running_run_has_no_cause(tmp_path: Path, capsys: Capture) -> None:
    write_black_box(tmp_path, 0, 3)
    write_black_box(tmp_path, 1, 1, ago=0)
    lines = run_diagnose(capsys, str(tmp_path))
    assert lines[0].startswith("the run makes progress: ") and len(lines) == 3


def test_diagnose_distinguishes_dead_from_ended_processes(tmp_path: Path, capsys: Capture) -> None:
    def end_earlier(values: memoryview) -> None:
        values[BlackBoxField.HEARTBEAT] -= LONG_AGO_NS

    write_black_box(tmp_path, 0, 3, mark_as_ended)
    write_black_box(tmp_path, 1, 1, mark_as_ended)
    assert run_diagnose(capsys, str(tmp_path))[0].startswith(
        "no process is the cause: all 2 processes ended"
    )
    write_black_box(tmp_path, 1, 1, mark_as_ended, end_earlier)
    lines = run_diagnose(capsys, str(tmp_path))
    assert lines[0].startswith("process 1 (pipeline rank 1) has died without a message, in step 3")
    write_verdict(
        tmp_path / BLACK_BOX_DIRECTORY, compute_run_id(os.getppid()), "process 1 had no luck"
    )
    lines = run_diagnose(capsys, str(tmp_path))
    assert lines[0] == "process 1 had no luck" and len(lines) == 3
    folder = tmp_path / BLACK_BOX_DIRECTORY
    (folder / VERDICT_FILE).rename(folder / FORMER_VERDICT_FILE)
    assert run_diagnose(capsys, str(tmp_path)) == lines
    (folder / FORMER_VERDICT_FILE).unlink()
    write_verdict(tmp_path / BLACK_BOX_DIRECTORY, 1, "of another run")
    assert run_diagnose(capsys, str(tmp_path))[0].startswith("process 1 (pipeline rank 1) has died")
    write_black_box(tmp_path, 0, 3).report_failure("process 0: why\n  process 1 somewhere", 1)
    assert run_diagnose(capsys, str(tmp_path)) == ["process 0: why", "  process 1 somewhere"]


def test_black_boxes_of_earlier_run_are_ignored(tmp_path: Path, capsys: Capture) -> None:
    def mark_as_earlier_run(values: memoryview) -> None:
        (
            values[BlackBoxField.RUN_ID],
            values[BlackBoxField.START_TIME],
            values[BlackBoxField.HEARTBEAT],
        ) = 1, 1, 1

    write_black_box(tmp_path, 0, 3, mark_as_ended, mark_as_earlier_run)
    write_black_box(tmp_path, 1, 1)
    lines = run_diagnose(capsys, str(tmp_path))
    assert lines[-1] == "no black box here of 1 processes: 0"
    assert "process 0 (" not in "".join(lines)


def test_black_boxes_of_another_machine_are_marked(tmp_path: Path, capsys: Capture) -> None:
    def mark_as_other_machine(values: memoryview) -> None:
        values[BlackBoxField.NAMESPACE_ID] = 7
        for word in (
            BlackBoxField.PHASE_TIME,
            BlackBoxField.POSITION_TIME,
            BlackBoxField.HEARTBEAT,
        ):
            values[word] -= 10**15

    write_black_box(tmp_path, 0, 3, mark_as_other_machine)
    write_black_box(tmp_path, 1, 1, mark_as_other_machine)
    lines = run_diagnose(capsys, str(tmp_path))
    assert "for 5.0 s" in lines[0] or "for 4.9 s" in lines[0] or "for 5.1 s" in lines[0]
    assert "on another machine" in lines[-1]


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (BlackBoxField.WORLD_SIZE, 2**62),
        (BlackBoxField.WORLD_SIZE, 0),
        (BlackBoxField.PROCESS, 9),
        (BlackBoxField.PROCESS, -1),
        (BlackBoxField.TP, 2**40),
    ],
)
def test_inconsistent_black_boxes_are_refused(
    tmp_path: Path, capsys: Capture, word: BlackBoxField, value: int
) -> None:
    def set_invalid_value(values: memoryview) -> None:
        values[word] = value

    write_black_box(tmp_path, 0, 3, set_invalid_value)
    assert "do not belong to one run of " in run_refused_command(capsys, "diagnose", str(tmp_path))
