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
LONG = 5 * 10**9
Capture = pytest.CaptureFixture[str]
Change = Callable[[memoryview], None]


def leave(folder: Path, process: int, at: int, *changes: Change, ago: int = LONG) -> BlackBox:
    """Write the box of one of two processes, which is in step 3, with some changes."""
    box = BlackBox(folder / BLACK_BOX_DIRECTORY / str(process), process=process, world=2)
    (folder / BLACK_BOX_DIRECTORY / PROGRAM_FILE).write_text(to_text(PROGRAM_RUN))
    box.enter_phase(ProcessPhase.STEP, 3)
    box.values[POSITION_FIELD], box.values[BlackBoxField.PHASE_TIME] = at, monotonic_ns() - ago
    box.values[BlackBoxField.POSITION_TIME] = monotonic_ns() - ago
    for change in changes:
        change(box.values)
    return box


def gone(words: memoryview) -> None:
    with subprocess.Popen(["true"]) as process:
        words[BlackBoxField.PID] = process.pid


def where(capsys: Capture, *given: str) -> list[str]:
    assert main(["diagnose", *given]) == 0
    return capsys.readouterr().out.splitlines()


def test_of_a_run_that_stands_the_cause_and_who_waits(tmp_path: Path, capsys: Capture) -> None:
    at = [str(instr) for instr in PROGRAM_RUN.streams[0]].index("B 0.0")
    leave(tmp_path, 0, at)
    leave(tmp_path, 1, 1)
    said = where(capsys, str(tmp_path))
    assert said[0].startswith("one_f_one_b: no process has made progress for 5.")
    assert (
        "process 1 (pipeline rank 1) waits for no process, and makes no progress: in step 3"
        in said[0]
    )
    assert said[1:] == [
        f"  process 0 (pipeline rank 0)  in step 3 at #{at} B 0.0, "
        "waits for process 1 to reach #4 send_grad 1.0"
    ]
    assert where(capsys, str(tmp_path / BLACK_BOX_DIRECTORY))[1:] == said[1:]
    facts = json.loads("\n".join(where(capsys, str(tmp_path), "--json")))
    assert facts["cause"] == {"process": 1, "kind": "busy", "is_certain": True}
    assert [one["position"] for one in facts["processes"]] == [at, 1]
    assert facts["processes_without_box"] == []
    assert "leave out --program" in run_refused_command(
        capsys, "diagnose", str(tmp_path), "--program", "gpipe"
    )


def test_a_run_that_goes_on_has_no_cause(tmp_path: Path, capsys: Capture) -> None:
    leave(tmp_path, 0, 3)
    leave(tmp_path, 1, 1, ago=0)
    said = where(capsys, str(tmp_path))
    assert said[0].startswith("the run makes progress: ") and len(said) == 3


def test_who_has_died_is_told_apart_from_processes_that_were_ended(
    tmp_path: Path, capsys: Capture
) -> None:
    def before(words: memoryview) -> None:
        words[BlackBoxField.HEARTBEAT] -= LONG

    leave(tmp_path, 0, 3, gone)
    leave(tmp_path, 1, 1, gone)
    assert where(capsys, str(tmp_path))[0].startswith(
        "no process is the cause: all 2 processes ended"
    )
    leave(tmp_path, 1, 1, gone, before)
    said = where(capsys, str(tmp_path))
    assert said[0].startswith("process 1 (pipeline rank 1) has died without a message, in step 3")
    write_verdict(
        tmp_path / BLACK_BOX_DIRECTORY, compute_run_id(os.getppid()), "process 1 had no luck"
    )
    said = where(capsys, str(tmp_path))
    assert said[0] == "process 1 had no luck" and len(said) == 3
    boxes = tmp_path / BLACK_BOX_DIRECTORY
    (boxes / VERDICT_FILE).rename(boxes / FORMER_VERDICT_FILE)
    assert where(capsys, str(tmp_path)) == said
    (boxes / FORMER_VERDICT_FILE).unlink()
    write_verdict(tmp_path / BLACK_BOX_DIRECTORY, 1, "of another run")
    assert where(capsys, str(tmp_path))[0].startswith("process 1 (pipeline rank 1) has died")
    leave(tmp_path, 0, 3).report_failure("process 0: why\n  process 1 somewhere", 1)
    assert where(capsys, str(tmp_path)) == ["process 0: why", "  process 1 somewhere"]


def test_boxes_of_an_earlier_run_are_not_looked_at(tmp_path: Path, capsys: Capture) -> None:
    def earlier(words: memoryview) -> None:
        (
            words[BlackBoxField.RUN_ID],
            words[BlackBoxField.START_TIME],
            words[BlackBoxField.HEARTBEAT],
        ) = 1, 1, 1

    leave(tmp_path, 0, 3, gone, earlier)
    leave(tmp_path, 1, 1)
    said = where(capsys, str(tmp_path))
    assert said[-1] == "no black box here of 1 processes: 0" and "process 0 (" not in "".join(said)


def test_boxes_of_another_machine(tmp_path: Path, capsys: Capture) -> None:
    def elsewhere(words: memoryview) -> None:
        words[BlackBoxField.NAMESPACE_ID] = 7
        for word in (
            BlackBoxField.PHASE_TIME,
            BlackBoxField.POSITION_TIME,
            BlackBoxField.HEARTBEAT,
        ):
            words[word] -= 10**15

    leave(tmp_path, 0, 3, elsewhere)
    leave(tmp_path, 1, 1, elsewhere)
    said = where(capsys, str(tmp_path))
    assert "for 5.0 s" in said[0] or "for 4.9 s" in said[0] or "for 5.1 s" in said[0]
    assert "on another machine" in said[-1]


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
def test_boxes_of_no_run_are_refused(
    tmp_path: Path, capsys: Capture, word: BlackBoxField, value: int
) -> None:
    def odd(words: memoryview) -> None:
        words[word] = value

    leave(tmp_path, 0, 3, odd)
    assert "do not belong to one run of " in run_refused_command(capsys, "diagnose", str(tmp_path))
