"""Tests of black boxes, and of the processes that they blame."""

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


def seen(
    process: int, at: int, *, turn: int = 5, phase: ProcessPhase = ProcessPhase.STEP,
    state: ProcessState = "runs", waits: bool = False, said: str = "",
) -> BlackBoxSnapshot:  # fmt: skip
    """Return a snapshot of the black box of a process at some position."""
    box = BlackBox(process=process, world=4)
    box.enter_phase(phase, 3)
    (
        box.values[BlackBoxField.PHASE_COUNT],
        box.values[POSITION_FIELD],
        box.values[BlackBoxField.IS_WAITING],
    ) = turn, at, waits
    if said:
        box.report_failure(said, 1)
    return BlackBoxSnapshot(bytes(box.memory), monotonic_ns(), state)


def standstill(program: Program, stuck: int, at: int) -> dict[int, BlackBoxSnapshot]:
    """Return the snapshots of all processes if one does not end an instruction.

    The others have gone on as far as the dependency graph allows.
    """
    graph = Graph.from_program(program, "per_edge")
    offsets = program.offsets.tolist()
    stands = [0] * program.shape.ranks
    moved = True
    while moved:
        moved = False
        for rank in range(program.shape.ranks):
            lo, hi = offsets[rank : rank + 2]
            while lo + stands[rank] < hi and not (rank == stuck and stands[rank] == at):
                k = lo + stands[rank]
                if not all(
                    _came(graph, int(n), stands)
                    for n in graph.local_waits[:, k]
                    if n != NO_POSITION
                ):
                    break
                stands[rank] += 1
                moved = True
    return {
        rank: seen(rank, k) if k < len(program.streams[rank])
        else seen(rank, 0, turn=6, phase=ProcessPhase.REPORT, waits=True)
        for rank, k in enumerate(stands)
    }  # fmt: skip


def _came(graph: Graph, need: int, stands: list[int]) -> bool:
    """Return whether all partners of an instruction of a rank have begun it too."""
    op = graph.index.op[need]
    if INSTRUCTIONS[op].peer:
        others = [int(graph.partner[need])]
        if op in SEND_OPS:  # it writes to its own memory, without its receiver
            return True
    elif INSTRUCTIONS[op].group:
        others = next(m for m in graph.collective_groups if need in m).tolist()
    else:
        return True
    return all(graph.index.locate(one)[1] < stands[graph.index.locate(one)[0]] for one in others)


@given(
    st.sampled_from(["gpipe", "one_f_one_b", "zb_h1", "interleaved"]),
    st.integers(0, 3), st.floats(0, 0.999), st.booleans(),
)  # fmt: skip
def test_who_is_stuck_is_blamed(schedule: str, stuck: int, where: float, clip: bool) -> None:
    v = 2 if schedule == "interleaved" else 1
    program = compile(
        getattr(schedules, schedule),
        PipelineShape(4, 4, stages_per_rank=v),
        progress_model="per_edge",
        clip_grad_norm=clip,
    )
    at = int(where * len(program.streams[stuck]))
    found = StalledRun(standstill(program, stuck, at), ProcessLayout(4, 1, 1), program).find_cause()
    assert (
        found is not None
        and found.process == stuck
        and found.kind is StallKind.BUSY
        and found.is_certain
    )
    assert f"process {stuck} (pipeline rank {stuck})" in found.fact
    assert f"in step 3 at #{at} {program.streams[stuck][at]}" in found.fact


PROGRAM = compile(
    schedules.one_f_one_b, PipelineShape(4, 4), progress_model="per_edge", clip_grad_norm=True
)


@pytest.mark.parametrize(("since", "slow"), [(0.6, True), (2.9, False)])
def test_who_has_moved_while_others_waited_is_not_said_to_stand(since: float, slow: bool) -> None:
    all_of = standstill(PROGRAM, 1, 4)
    now = monotonic_ns()
    for process, one in all_of.items():
        words = bytearray(one.data)
        for word in (BlackBoxField.POSITION_TIME, BlackBoxField.PHASE_TIME):
            ago = since if process == 1 else 3.0
            words[word * 8 : word * 8 + 8] = (now - int(ago * 1e9)).to_bytes(8, "little")
        all_of[process] = replace(one, data=bytes(words), read_time=now)
    found = StalledRun(all_of, ProcessLayout(4, 1, 1), PROGRAM)
    blame = found.find_cause()
    assert blame is not None and blame.process == 1 and found.is_slow(1) is slow
    assert ("is slow, or has stopped a short time ago" in blame.fact) is slow
    assert ("makes no progress" in blame.fact) is not slow


def test_who_has_died_or_is_stopped_is_blamed_before_who_is_busy() -> None:
    states: list[tuple[ProcessState, StallKind]] = [
        ("gone", StallKind.DIED),
        ("stopped", StallKind.STOPPED),
    ]
    for state, kind in states:
        all_of = standstill(PROGRAM, 1, 4)
        all_of[2] = replace(all_of[2], state=state)
        found = StalledRun(all_of, ProcessLayout(4, 1, 1), PROGRAM).find_cause()
        assert found is not None and (found.process, found.kind) == (2, kind)


def test_who_has_said_why_is_blamed_and_not_who_left_because_of_it() -> None:
    all_of = standstill(PROGRAM, 1, 4)
    all_of[1] = replace(seen(1, 4, said="ValueError"), state="gone")
    left = BlackBox(process=0, world=4)
    left.report_failure("", 1)
    all_of[0] = BlackBoxSnapshot(bytes(left.memory), monotonic_ns(), "gone")
    found = StalledRun(all_of, ProcessLayout(4, 1, 1), PROGRAM).find_cause()
    assert found is not None and (found.process, found.kind) == (1, StallKind.FAILED)


def test_of_tensor_parallel_processes_the_one_in_no_collective_is_blamed() -> None:
    program = compile(
        schedules.one_f_one_b,
        PipelineShape(2, 4),
        progress_model="per_edge",
        tp=2,
        clip_grad_norm=True,
    )
    stands = standstill(program, 1, 4)
    all_of = {
        2 * r + t: seen(2 * r + t, stands[r][POSITION_FIELD]) for r in range(2) for t in range(2)
    }
    all_of[2] = seen(2, stands[1][POSITION_FIELD], waits=True)
    found = StalledRun(all_of, ProcessLayout(2, 2, 1), program).find_cause()
    assert found is not None and found.process == 3
    assert found.fact.startswith("process 3 (pipeline rank 1, tp 1) ")
    assert any(
        "waits for process 3" in line for line in found.lines if line.startswith("process 2")
    )


@pytest.mark.parametrize("ahead", [0, 1])
def test_of_an_expert_parallel_group_the_one_that_has_not_come_is_blamed(ahead: int) -> None:
    """The others wait in their dispatch, or for an all-to-all that one process has not started."""
    program = compile(
        schedules.one_f_one_b, PipelineShape(1, 4), progress_model="per_edge", dp=4, ep=2,
        stage_segments="dc",
    )  # fmt: skip
    at = [*map(str, program.streams[0])].index("dispatch 1.0")
    all_of = {process: seen(process, at + ahead) for process in range(4)}
    all_of[3] = seen(3, at - 1)
    found = StalledRun(all_of, ProcessLayout(1, 1, 4), program)
    assert {wait.awaited_process for wait in found.waits_of[2]} == {3}
    assert found.waits_of[0] == found.waits_of[1] == found.waits_of[3] == []
    cause = found.find_cause()
    assert cause is not None and cause.process == 3


def test_outside_of_steps_who_is_behind_is_blamed() -> None:
    all_of = {p: seen(p, 0, turn=2, phase=ProcessPhase.SET_UP, waits=True) for p in range(4)}
    all_of[2] = seen(2, 0, turn=2, phase=ProcessPhase.SET_UP)
    found = StalledRun(all_of, ProcessLayout(4, 1, 1)).find_cause()
    assert found is not None and (found.process, found.is_certain) == (2, True)
    del all_of[2]
    found = StalledRun(all_of, ProcessLayout(4, 1, 1), missing=[2]).find_cause()
    assert found is not None and (found.process, found.kind) == (2, StallKind.MISSING)


def test_of_several_at_work_the_one_that_is_furthest_behind_is_blamed() -> None:
    all_of = {p: seen(p, 0, turn=3, phase=ProcessPhase.DATA_WAIT) for p in range(4)}
    all_of[2] = seen(2, 0, turn=2, phase=ProcessPhase.SET_UP)
    found = StalledRun(all_of, ProcessLayout(4, 1, 1)).find_cause()
    assert found is not None and (found.process, found.kind, found.is_certain) == (
        2,
        StallKind.BUSY,
        False,
    )
    assert "; the cause may also be process " in found.fact


# ---------------------------------------------------------------- files

STANDS = """\
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


def test_a_box_outlives_its_process(tmp_path: Path) -> None:
    path = tmp_path / "boxes" / "3"
    command = [sys.executable, "-c", STANDS, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        states = []
        for what in (None, signal.SIGSTOP, signal.SIGKILL):
            if what is not None:
                os.kill(process.pid, what)
            if what is signal.SIGSTOP:
                os.waitpid(process.pid, os.WUNTRACED)
            if what is signal.SIGKILL:
                process.wait()
            one = read_black_box(path)
            assert one is not None and (one.process, one.position, one.note) == (
                3,
                11,
                "mine.py:3 in loss",
            )
            assert one.activity == "in step 7"
            states.append(one.state)
    assert states == ["runs", "stopped", "gone"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_size == FILE_SIZE
    assert [*read_black_boxes(path.parent)] == [3]
    assert read_black_boxes(path.parent, 12345) == {}  # from another run


@given(st.binary(max_size=200) | st.binary(min_size=FILE_SIZE, max_size=FILE_SIZE + 60))
def test_what_is_no_box_is_none(data: bytes) -> None:
    assert BlackBoxSnapshot.from_bytes(data) is None


FULL = """
import os, resource, signal, sys
from pathlib import Path
from schedir.io.black_box import FILE_SIZE, BlackBox, ProcessPhase
resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE // 2, FILE_SIZE // 2))
box = BlackBox(Path("boxes/0"))
box.enter_phase(ProcessPhase.STEP, 1)
box.report_failure("x" * FILE_SIZE, 1)
print(os.listdir("boxes"))
"""


def test_a_disk_that_has_no_room_for_a_box_keeps_no_run_from_going_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_box_goes_to_another_machine_and_back(tmp_path: Path) -> None:
    one = seen(1, 4, said="why")
    assert BlackBoxSnapshot.from_bytes(one.to_bytes()) == one
    (tmp_path / "0").write_bytes(b"no box")
    assert read_black_boxes(tmp_path) == {}


def test_a_send_that_failed_blames_its_receiver_of_which_nothing_is_known() -> None:
    """A send may fail before any receive, if the other machine has ended."""
    program = compile(schedules.one_f_one_b, PipelineShape(2, 4), progress_model="per_edge")
    sends = [at for at, instr in enumerate(program.streams[0]) if instr.op in SEND_OPS]
    assert len(sends) == 4
    for at in sends:
        all_of = {0: seen(0, at, waits=True)}
        run = StalledRun(all_of, ProcessLayout(2, 1, 1), program, unreachable=[1])
        found = run.find_cause()
        assert found is not None and (found.process, found.kind) == (1, StallKind.UNREACHABLE)
        # A process that still sends does not wait for its receiver.
        run = StalledRun({0: seen(0, at)}, ProcessLayout(2, 1, 1), program, unreachable=[1])
        found = run.find_cause()
        assert found is not None and (found.process, found.kind) == (0, StallKind.BUSY)
