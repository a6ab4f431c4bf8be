"""Tests of the report on a hanging job, with its program and without one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from schedir import PipelineShape, Program, check, compile, schedules
from schedir.analysis.dependency_graph import Graph
from schedir.errors import UsageError
from schedir.hang_diagnosis.flight_recorder import read_dumps
from schedir.hang_diagnosis.hang_report import describe_job, describe_program
from schedir.hang_diagnosis.program_matching import match_program
from schedir.hang_diagnosis.rank_positions import diagnose_copies
from schedir.hang_diagnosis.wait_graph import DistributedJob, WaitReason
from schedir.ir.isa.instructions import RECV_OPS
from schedir.ir.stream import Stream
from tests.commands import run_command, run_refused_command
from tests.flight_recorder_dumps import Recorder, record, stop_at, write_and_read_dumps
from tests.museum.cases import cases

GOLDEN = Path(__file__).parents[1] / "golden"
(LATE_RECEIVES,) = [case for case in cases() if case.name == "receives_moved_late"]


def _record_message(rank: int, shape: Sequence[int] = (2, 8), dtype: str = "Float") -> Recorder:
    recorder = Recorder(rank)
    recorder.group("1", (0, 1))
    side = ("recv", 0) if rank else ("send", 1)
    recorder.messages("1", [side], False, shape=shape, dtype=dtype)
    return recorder


def _record_collective(
    rank: int, title: str = "all_reduce", shape: Sequence[int] = (4,)
) -> Recorder:
    recorder = Recorder(rank)
    recorder.group("1", (0, 1))
    recorder.collective("1", title, False, shape)
    return recorder


@pytest.mark.parametrize(
    "other",
    [
        lambda: [_record_message(0), _record_message(1, (2, 4))],
        lambda: [_record_message(0), _record_message(1, dtype="Half")],
        lambda: [_record_collective(0), _record_collective(1, "broadcast")],
        lambda: [_record_collective(0), _record_collective(1, shape=(5,))],
    ],
    ids=["sizes", "dtypes", "names", "sizes of a collective"],
)
def test_mismatched_operations_are_reported(
    other: Callable[[], list[Recorder]], tmp_path: Path
) -> None:
    job = write_and_read_dumps(tmp_path, other())
    assert {wait.reason for wait in job.unmatched} == {WaitReason.MISMATCH} and not job.cycle
    assert any("does not match rank" in line for line in describe_job(job))


def test_kept_entries_are_paired_in_order(tmp_path: Path) -> None:
    """The first open send is paired with the first open receive, for any number of lost entries."""
    recorders = Recorder(0), Recorder(1)
    for recorder, ended_count in zip(recorders, (9, 7), strict=True):
        recorder.group("1", (0, 1))
        for k in range(ended_count + 2):
            shape = (2, 8) if k != ended_count + 1 else (3, 3)
            side = ("recv", 0) if recorder.rank else ("send", 1)
            recorder.messages("1", [side], k < ended_count, shape=shape)
    job = write_and_read_dumps(tmp_path, recorders, last=5)
    assert all(dump.num_lost for dump in job.dumps.values())
    assert {wait.reason for wait in job.unmatched} == {WaitReason.ISSUED} and not job.cycle


def test_open_entries_of_different_ring_lengths_are_paired(tmp_path: Path) -> None:
    for rank, last in ((0, 5), (1, 4)):
        recorder = Recorder(rank)
        recorder.group("1", (0, 1))
        for k in range(11):
            side = ("recv", 0) if rank else ("send", 1)
            recorder.messages("1", [side], k < 9, shape=(2, 8) if k < 10 else (3, 3))
        recorder.save(tmp_path, last)
    job = DistributedJob(read_dumps([str(tmp_path)])[0])
    assert [dump.num_lost for dump in job.dumps.values()] == [6, 7]
    assert {wait.reason for wait in job.unmatched} == {WaitReason.ISSUED}


def test_only_awaited_rank_with_old_dump_may_be_cause(tmp_path: Path) -> None:
    recorders = Recorder(0), Recorder(1)
    for recorder in recorders:
        recorder.group("1", (0, 1))
        recorder.collective("1", "all_reduce", ended=True)
    recorders[0].collective("1", "all_reduce", ended=True)
    recorders[0].collective("1", "all_reduce", ended=False)
    job = write_and_read_dumps(tmp_path, recorders)
    assert job.old_dump_ranks == job.root_ranks == (1,)
    assert describe_job(job)[0].startswith("rank 1 may be the cause")


def test_issued_message_that_has_not_ended_has_no_cause(tmp_path: Path) -> None:
    job = write_and_read_dumps(tmp_path, [_record_message(0), _record_message(1)])
    assert (
        {wait.reason for wait in job.unmatched} == {WaitReason.ISSUED}
        and not job.cycle
        and not job.root_ranks
    )


def move_receives_before_use(program: Program) -> Program:
    """Return the same computes, with each receive just before the instruction that needs it."""
    graph = Graph.from_program(program)
    first_use = {
        int(position): k for row in graph.needs for k, position in enumerate(row) if position >= 0
    }
    receives = graph.index.is_op(RECV_OPS)
    key = [first_use[k] - 0.5 if receives[k] else float(k) for k in range(len(program))]
    streams = []
    for lo, hi in pairwise(program.offsets.tolist()):
        streams.append(Stream(program.words[sorted(range(lo, hi), key=key.__getitem__)]))
    return check(replace(program, streams=tuple(streams)), "per_edge", blocking_hosts=True)


def test_message_in_batch_and_alone_is_reported(tmp_path: Path) -> None:
    """torch issues the last send of a warmup of one microbatch in this way."""
    recorders = Recorder(0), Recorder(1)
    for recorder in recorders:
        recorder.group("1", (0, 1))
    recorders[0].messages("1", [("send", 1), ("recv", 1)], False)
    recorders[1].messages("1", [("recv", 0)], False)
    (line,) = [
        line
        for line in describe_job(write_and_read_dumps(tmp_path, recorders))
        if "in a batch" in line
    ]
    assert "rank 0 has issued it in a batch, and rank 1 alone" in line
    recorders[0].entries.clear()
    recorders[0].messages("1", [("send", 1)], False)
    assert not any(
        "in a batch" in line for line in describe_job(write_and_read_dumps(tmp_path, recorders))
    )


def _write_dumps(folder: Path, name: str) -> list[str]:
    """Write the dumps of a golden text, and return the other arguments of its command."""
    if name.startswith("late"):
        program = compile(schedules.one_f_one_b, PipelineShape(4, 6))
        program = move_receives_before_use(program) if "other" in name else program
        graph = Graph(program, "per_edge" if "other" in name else "per_device", blocking_hosts=True)
        stop = next(k for k in range(len(program)) if str(graph.index.locate(k)[2]) == "B 2.0")
        write_and_read_dumps(folder, record(stop_at(graph, stop, True), before=3))
        return ["--program", "one_f_one_b", "--microbatches", "6"] * ("program" in name)
    if name.startswith("deadlock"):
        (folder / "moved.sched").write_text(LATE_RECEIVES.program.lstrip())
        write_and_read_dumps(folder, record(stop_at(Graph(LATE_RECEIVES.made()), None, False)))
        return ["--program", str(folder / "moved.sched")] * ("program" in name)
    write_and_read_dumps(folder, record_collectives())
    return []


def record_collectives() -> list[Recorder]:
    """Return the recorders of four of five ranks: three in an all-reduce, one in an all-gather."""
    recorders = [Recorder(rank) for rank in range(4)]
    for recorder in recorders:
        recorder.group("0", range(5), "default_pg")
        recorder.collective("0", "all_reduce", ended=True)
        recorder.collective("0", "all_gather" if recorder.rank == 2 else "all_reduce", False)
    return recorders


REPORTS = dict(
    part.split("\n", 1)
    for part in re.split(r"^== ", (GOLDEN / "where.txt").read_text(), flags=re.M)[1:]
)


def test_page_shows_golden_reports() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "find-a-hang.md").read_text()
    code_blocks = {block.partition("\n")[2] for block in page.split("```")[1::2]}
    assert {REPORTS["late"], REPORTS["late, with its program"]} <= code_blocks
    assert f"`{REPORTS['deadlock, with its program'].splitlines()[1]}`" in page


@pytest.mark.parametrize("name", REPORTS)
def test_hang_report_matches_golden_text(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = _write_dumps(tmp_path, name)
    pattern = str(tmp_path / "nccl_*")
    assert run_command(capsys, "diagnose", pattern, *arguments) == REPORTS[name]
    facts: dict[str, Any] = json.loads(
        run_command(capsys, "diagnose", pattern, *arguments, "--json")
    )
    assert len(facts["dumps"]) == len([*tmp_path.glob("nccl_*")])
    if "program" in name:
        deadlock_flags = [copy["is_deadlock"] for copy in facts["copies"]]
        assert deadlock_flags == [name.startswith("deadlock")] * ("other" not in name)


def test_report_of_many_ranks_is_short_and_names_cause(tmp_path: Path) -> None:
    recorders = [Recorder(rank) for rank in range(60)]
    for recorder in recorders:
        recorder.group("0", range(60), "default_pg")
        if recorder.rank != 41:
            recorder.collective("0", "barrier", ended=False)
    lines = describe_job(write_and_read_dumps(tmp_path, recorders))
    assert len(lines) < 25 and any("rank 41 is the cause" in line for line in lines)


def test_diagnose_refuses_missing_or_invalid_dumps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = run_refused_command(capsys, "diagnose", str(tmp_path))
    assert "no file whose name ends in a rank" in refusal
    assert "the run ended without an error and left no black boxes" in refusal
    _write_dumps(tmp_path, "late, program")
    assert "do not match gpipe" in run_refused_command(
        capsys, "diagnose", str(tmp_path), "--program", "gpipe", "--microbatches", "6"
    )
    (tmp_path / "nccl_trace_rank_1").write_bytes(b"\x80\x02cos\nsystem\n.")
    assert "TraceError" in run_refused_command(capsys, "diagnose", str(tmp_path))


def test_rank_computing_before_open_receive_may_be_cause(tmp_path: Path) -> None:
    """On NCCL, a receive waits for earlier kernels of its rank, even if its sender has finished."""
    program = compile(schedules.gpipe, PipelineShape(3, 4))
    graph = Graph(program)
    stop = next(k for k in range(len(program)) if str(graph.index.locate(k)[2]) == "F 2.2")
    recorders = record(stop_at(graph, stop, False, kernels=True))
    job = write_and_read_dumps(tmp_path, recorders)
    lines = describe_program(job, diagnose_copies(program, match_program(job, program)))
    assert any(line.startswith("rank 1 or rank 2 may be the cause") for line in lines)
    # If the dumps record which kernels have started, only one of the two remains.
    scheduled = [e for e in recorders[1].entries if e["state"] == "scheduled"]
    scheduled[0]["state"] = "started"
    job = write_and_read_dumps(tmp_path, recorders)
    lines = describe_program(job, diagnose_copies(program, match_program(job, program)))
    assert any(line.startswith("rank 2 is the cause: #6 recv_act 2.3") for line in lines)
    assert any("has started on rank 1: rank 2 may be" in line for line in describe_job(job))


def test_kernels_of_previous_step_may_be_cause(tmp_path: Path) -> None:
    """Both sides of a step's first message may wait for kernels.

    These are the sender's compute, or the receiver's last compute of the previous step.
    """
    program = compile(schedules.one_f_one_b, PipelineShape(2, 4))
    for before, is_ambiguous in ((0, False), (2, True)):
        job = write_and_read_dumps(
            tmp_path, record(stop_at(Graph(program), 0, False), before=before)
        )
        lines = describe_program(job, diagnose_copies(program, match_program(job, program)))
        assert any("rank 0 or rank 1 may be the cause" in line for line in lines) is is_ambiguous
        assert any(line.startswith("rank 0 is the cause") for line in lines) is not is_ambiguous


def test_older_dump_is_reported_without_cause(tmp_path: Path) -> None:
    """Other ranks have received messages that rank 2 issued only after it wrote its dump."""
    program = compile(schedules.one_f_one_b, PipelineShape(4, 6))
    graph = Graph(program, blocking_hosts=True)
    early, late = (
        record(stop_at(graph, int(program.offsets[rank]) + position, True))
        for rank, position in ((2, 8), (1, 17))
    )
    job = write_and_read_dumps(tmp_path, [*late[:2], early[2], late[3]])
    assert job.old_dump_ranks == (2,)
    for lines in (
        describe_job(job),
        describe_program(job, diagnose_copies(program, match_program(job, program))),
    ):
        assert any("the dump of rank 2 is older" in line for line in lines)
        assert not any("is the cause" in line for line in lines)
    recorders = [_record_collective(0), _record_collective(1)]
    recorders[0].collective("1", "all_reduce", ended=True)
    job = write_and_read_dumps(tmp_path, recorders)
    assert job.old_dump_ranks == (1,)
    recorders[0].entries[-1]["profiling_name"] = "nccl:broadcast"  # its root waits for no rank
    assert write_and_read_dumps(tmp_path, recorders).old_dump_ranks == ()


def test_overwritten_position_is_reported_without_cause(tmp_path: Path) -> None:
    program = compile(schedules.gpipe, PipelineShape(2, 6))
    graph = Graph(program)
    job = write_and_read_dumps(tmp_path, record(stop_at(graph, 0, False), before=2), last=4)
    assert any(
        "the operation at which the rank waits may be lost" in line for line in describe_job(job)
    )
    assert not any("is the cause" in line for line in describe_job(job))
    with pytest.raises(UsageError) as caught:
        match_program(job, program)
    assert "the position of the rank may be overwritten" in caught.value.fact


def test_partly_started_collective_names_possible_cause(tmp_path: Path) -> None:
    recorders = [_record_collective(0), _record_collective(1)]
    recorders[0].entries[0]["state"] = "started"
    lines = describe_job(write_and_read_dumps(tmp_path, recorders))
    assert any("has started on rank 0: rank 1 may be the cause" in line for line in lines)
    recorders[1].entries[0]["state"] = "completed"
    lines = describe_job(write_and_read_dumps(tmp_path, recorders))
    assert any("has ended on rank 1: rank 0 may be the cause" in line for line in lines)
