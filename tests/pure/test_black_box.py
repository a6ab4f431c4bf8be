"""Tests of black boxes, and of the cause of a stall that they give."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic_ns

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import PipelineShape, compile, schedules
from schedir.analysis.dependency_graph import Graph
from schedir.hang_diagnosis.stall_cause import ProcessLayout, StalledRun, StallKind
from schedir.io.black_box import (
    FILE_SIZE,
    POSITION_FIELD,
    BlackBox,
    BlackBoxField,
    BlackBoxSnapshot,
    ProcessPhase,
    ProcessState,
    read_black_box,
    read_black_boxes,
)
from schedir.ir.instruction_index import NO_POSITION
from schedir.ir.isa.instructions import INSTRUCTIONS, SEND_OPS
from schedir.ir.program import Program


def make_snapshot(
    process: int, position: int, *, phase_count: int = 5, phase: ProcessPhase = ProcessPhase.STEP,
    state: ProcessState = "runs", waits: bool = False, failure: str = "",
) -> BlackBoxSnapshot:  # fmt: skip
    """Return a snapshot of the black box of a process at a position."""
    box = BlackBox(process=process, world=4)
    box.enter_phase(phase, 3)
    (
        box.values[BlackBoxField.PHASE_COUNT],
        box.values[POSITION_FIELD],
        box.values[BlackBoxField.IS_WAITING],
    ) = phase_count, position, waits
    if failure:
        box.report_failure(failure, 1)
    return BlackBoxSnapshot(bytes(box.memory), monotonic_ns(), state)


def build_stalled_snapshots(
    program: Program, stuck: int, stuck_position: int
) -> dict[int, BlackBoxSnapshot]:
    """Return the snapshots of all processes if one of them does not end an instruction.

    The other processes advance as far as the dependency graph allows.
    """
    graph = Graph.from_program(program, "per_edge")
    offsets = program.offsets.tolist()
    positions = [0] * program.shape.ranks
    has_moved = True
    while has_moved:
        has_moved = False
        for rank in range(program.shape.ranks):
            first, end = offsets[rank : rank + 2]
            while first + positions[rank] < end and not (
                rank == stuck and positions[rank] == stuck_position
            ):
                k = first + positions[rank]
                if not all(
                    _has_partners_started(graph, int(n), positions)
                    for n in graph.local_waits[:, k]
                    if n != NO_POSITION
                ):
                    break
                positions[rank] += 1
                has_moved = True
    return {
        rank: make_snapshot(rank, k) if k < len(program.streams[rank])
        else make_snapshot(rank, 0, phase_count=6, phase=ProcessPhase.REPORT, waits=True)
        for rank, k in enumerate(positions)
    }  # fmt: skip


def _has_partners_started(graph: Graph, need: int, positions: list[int]) -> bool:
    """Return whether all partners of an instruction have started it."""
    op = graph.index.op[need]
    if INSTRUCTIONS[op].peer:
        partners = [int(graph.partner[need])]
        if op in SEND_OPS:  # a send only writes to the memory of its own rank
            return True
    elif INSTRUCTIONS[op].group:
        partners = next(m for m in graph.collective_groups if need in m).tolist()
    else:
        return True
    return all(
        graph.index.locate(partner)[1] < positions[graph.index.locate(partner)[0]]
        for partner in partners
    )


@given(
    st.sampled_from(["gpipe", "one_f_one_b", "zb_h1", "interleaved"]),
    st.integers(0, 3), st.floats(0, 0.999), st.booleans(),
)  # fmt: skip
def test_busy_process_is_cause_of_stall(
    schedule: str, stuck: int, where: float, clip: bool
) -> None:
    v = 2 if schedule == "interleaved" else 1
    program = compile(
        getattr(schedules, schedule),
        PipelineShape(4, 4, stages_per_rank=v),
        progress_model="per_edge",
        clip_grad_norm=clip,
    )
    position = int(where * len(program.streams[stuck]))
    cause = StalledRun(
        build_stalled_snapshots(program, stuck, position), ProcessLayout(4, 1, 1), program
    ).find_cause()
    assert cause is not None
    assert cause.process == stuck
    assert cause.kind is StallKind.BUSY
    assert cause.is_certain
    assert f"process {stuck} (pipeline rank {stuck})" in cause.fact
    assert f"in step 3 at #{position} {program.streams[stuck][position]}" in cause.fact


PROGRAM = compile(
    schedules.one_f_one_b, PipelineShape(4, 4), progress_model="per_edge", clip_grad_norm=True
)


@pytest.mark.parametrize(("since", "slow"), [(0.6, True), (2.9, False)])
def test_process_with_recent_progress_is_reported_as_slow(since: float, slow: bool) -> None:
    snapshots = build_stalled_snapshots(PROGRAM, 1, 4)
    now = monotonic_ns()
    for process, snapshot in snapshots.items():
        data = bytearray(snapshot.data)
        for field in (BlackBoxField.POSITION_TIME, BlackBoxField.PHASE_TIME):
            ago = since if process == 1 else 3.0
            data[field * 8 : field * 8 + 8] = (now - int(ago * 1e9)).to_bytes(8, "little")
        snapshots[process] = replace(snapshot, data=bytes(data), read_time=now)
    run = StalledRun(snapshots, ProcessLayout(4, 1, 1), PROGRAM)
    cause = run.find_cause()
    assert cause is not None and cause.process == 1 and run.is_slow(1) is slow
    assert ("is slow, or has stopped a short time ago" in cause.fact) is slow
    assert ("makes no progress" in cause.fact) is not slow


def test_dead_or_stopped_process_is_cause_before_busy_process() -> None:
    states: list[tuple[ProcessState, StallKind]] = [
        ("gone", StallKind.DIED),
        ("stopped", StallKind.STOPPED),
    ]
    for state, kind in states:
        snapshots = build_stalled_snapshots(PROGRAM, 1, 4)
        snapshots[2] = replace(snapshots[2], state=state)
        cause = StalledRun(snapshots, ProcessLayout(4, 1, 1), PROGRAM).find_cause()
        assert cause is not None and (cause.process, cause.kind) == (2, kind)


def test_process_with_failure_message_is_cause_before_ended_process() -> None:
    snapshots = build_stalled_snapshots(PROGRAM, 1, 4)
    snapshots[1] = replace(make_snapshot(1, 4, failure="ValueError"), state="gone")
    ended_box = BlackBox(process=0, world=4)
    ended_box.report_failure("", 1)
    snapshots[0] = BlackBoxSnapshot(bytes(ended_box.memory), monotonic_ns(), "gone")
    cause = StalledRun(snapshots, ProcessLayout(4, 1, 1), PROGRAM).find_cause()
    assert cause is not None and (cause.process, cause.kind) == (1, StallKind.FAILED)


def test_tensor_parallel_process_outside_collective_is_cause() -> None:
    program = compile(
        schedules.one_f_one_b,
        PipelineShape(2, 4),
        progress_model="per_edge",
        tp=2,
        clip_grad_norm=True,
    )
    by_rank = build_stalled_snapshots(program, 1, 4)
    snapshots = {
        2 * r + t: make_snapshot(2 * r + t, by_rank[r][POSITION_FIELD])
        for r in range(2)
        for t in range(2)
    }
    snapshots[2] = make_snapshot(2, by_rank[1][POSITION_FIELD], waits=True)
    cause = StalledRun(snapshots, ProcessLayout(2, 2, 1), program).find_cause()
    assert cause is not None and cause.process == 3
    assert cause.fact.startswith("process 3 (pipeline rank 1, tp 1) ")
    assert any(
        "waits for process 3" in line for line in cause.lines if line.startswith("process 2")
    )


@pytest.mark.parametrize("ahead", [0, 1])
def test_late_expert_parallel_process_is_cause(ahead: int) -> None:
    """The others wait in their dispatch, or for an all-to-all that one process has not started."""
    program = compile(
        schedules.one_f_one_b, PipelineShape(1, 4), progress_model="per_edge", dp=4, ep=2,
        stage_segments="dc",
    )  # fmt: skip
    dispatch_position = [*map(str, program.streams[0])].index("dispatch 1.0")
    snapshots = {process: make_snapshot(process, dispatch_position + ahead) for process in range(4)}
    snapshots[3] = make_snapshot(3, dispatch_position - 1)
    run = StalledRun(snapshots, ProcessLayout(1, 1, 4), program)
    assert {wait.awaited_process for wait in run.waits_of[2]} == {3}
    assert run.waits_of[0] == run.waits_of[1] == run.waits_of[3] == []
    cause = run.find_cause()
    assert cause is not None and cause.process == 3


def test_late_or_missing_process_is_cause_outside_steps() -> None:
    snapshots = {
        p: make_snapshot(p, 0, phase_count=2, phase=ProcessPhase.SET_UP, waits=True)
        for p in range(4)
    }
    snapshots[2] = make_snapshot(2, 0, phase_count=2, phase=ProcessPhase.SET_UP)
    cause = StalledRun(snapshots, ProcessLayout(4, 1, 1)).find_cause()
    assert cause is not None and (cause.process, cause.is_certain) == (2, True)
    del snapshots[2]
    cause = StalledRun(snapshots, ProcessLayout(4, 1, 1), missing=[2]).find_cause()
    assert cause is not None and (cause.process, cause.kind) == (2, StallKind.MISSING)


def test_process_in_earliest_phase_is_uncertain_cause() -> None:
    snapshots = {
        p: make_snapshot(p, 0, phase_count=3, phase=ProcessPhase.DATA_WAIT) for p in range(4)
    }
    snapshots[2] = make_snapshot(2, 0, phase_count=2, phase=ProcessPhase.SET_UP)
    cause = StalledRun(snapshots, ProcessLayout(4, 1, 1)).find_cause()
    assert cause is not None
    assert (cause.process, cause.kind, cause.is_certain) == (2, StallKind.BUSY, False)
    assert "; the cause may also be process " in cause.fact


# ---------------------------------------------------------------- files

STALLED_PROCESS = """\
import sys
from pathlib import Path
from schedir.io.black_box import POSITION_FIELD, BlackBox, ProcessPhase
box = BlackBox(Path(sys.argv[1]), process=3, world=4)
box.enter_phase(ProcessPhase.STEP, 7)
box.values[POSITION_FIELD] = 11
box.write_note("mine.py:3 in loss")
print("there", flush=True)
sys.stdin.read()
"""


def test_black_box_is_readable_after_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "boxes" / "3"
    command = [sys.executable, "-c", STALLED_PROCESS, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        states = []
        for signal_number in (None, signal.SIGSTOP, signal.SIGKILL):
            if signal_number is not None:
                os.kill(process.pid, signal_number)
            if signal_number is signal.SIGSTOP:
                os.waitpid(process.pid, os.WUNTRACED)
            if signal_number is signal.SIGKILL:
                process.wait()
            snapshot = read_black_box(path)
            assert snapshot is not None
            assert (snapshot.process, snapshot.position) == (3, 11)
            assert snapshot.note == "mine.py:3 in loss"
            assert snapshot.activity == "in step 7"
            states.append(snapshot.state)
    assert states == ["runs", "stopped", "gone"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_size == FILE_SIZE
    assert [*read_black_boxes(path.parent)] == [3]
    assert read_black_boxes(path.parent, 12345) == {}  # the boxes are of another run


@given(st.binary(max_size=200) | st.binary(min_size=FILE_SIZE, max_size=FILE_SIZE + 60))
def test_invalid_bytes_are_no_black_box(data: bytes) -> None:
    assert BlackBoxSnapshot.from_bytes(data) is None


FULL_DISK_PROCESS = """
import os, resource, signal, sys
from pathlib import Path
from schedir.io.black_box import FILE_SIZE, BlackBox, ProcessPhase
resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE // 2, FILE_SIZE // 2))
box = BlackBox(Path("boxes/0"))
box.enter_phase(ProcessPhase.STEP, 1)
box.report_failure("x" * FILE_SIZE, 1)
print(os.listdir("boxes"))
"""


def test_full_disk_does_not_stop_run(tmp_path: Path) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", FULL_DISK_PROCESS], cwd=tmp_path, capture_output=True, text=True
    )
    assert (completed.returncode, completed.stdout) == (0, "[]\n"), completed.stderr


def test_snapshot_bytes_round_trip(tmp_path: Path) -> None:
    snapshot = make_snapshot(1, 4, failure="why")
    assert BlackBoxSnapshot.from_bytes(snapshot.to_bytes()) == snapshot
    (tmp_path / "0").write_bytes(b"no box")
    assert read_black_boxes(tmp_path) == {}


def test_waiting_send_reports_unreachable_receiver() -> None:
    """A send may fail before any receive, if the other machine has ended."""
    program = compile(schedules.one_f_one_b, PipelineShape(2, 4), progress_model="per_edge")
    sends = [position for position, instr in enumerate(program.streams[0]) if instr.op in SEND_OPS]
    assert len(sends) == 4
    for position in sends:
        snapshots = {0: make_snapshot(0, position, waits=True)}
        run = StalledRun(snapshots, ProcessLayout(2, 1, 1), program, unreachable=[1])
        cause = run.find_cause()
        assert cause is not None and (cause.process, cause.kind) == (1, StallKind.UNREACHABLE)
        # A process that still sends does not wait for its receiver.
        run = StalledRun(
            {0: make_snapshot(0, position)}, ProcessLayout(2, 1, 1), program, unreachable=[1]
        )
        cause = run.find_cause()
        assert cause is not None and (cause.process, cause.kind) == (0, StallKind.BUSY)
