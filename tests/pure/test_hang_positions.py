"""Tests that hang diagnosis finds the instruction at which a rank was stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from schedir import PipelineShape, Program, check, compile, from_text, schedules
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.errors import DeadlockError, SchedirError, UsageError
from schedir.hang_diagnosis.hang_report import describe_job, describe_program
from schedir.hang_diagnosis.program_matching import match_program
from schedir.hang_diagnosis.rank_positions import ChainEnd, ProgramVerdict, diagnose_copies
from schedir.hang_diagnosis.wait_graph import DistributedJob, WaitReason
from schedir.ir.isa.instructions import TRANSFER_OPS
from tests.cases import cases
from tests.flight_recorder_dumps import (
    Recorder,
    layout_with_group_per_edge,
    layout_with_one_group,
    record,
    stop_at,
    write_and_read_dumps,
)
from tests.museum.cases import cases as museum_cases

GOLDEN = Path(__file__).parents[1] / "golden"
PROGRAMS = {
    "gpipe": PipelineShape(3, 4),
    "one_f_one_b": PipelineShape(4, 6),
    "interleaved": PipelineShape(2, 4, stages_per_rank=2),
    "zb_h1": PipelineShape(3, 5),
    "zb_v": PipelineShape(2, 6, stages_per_rank=2, placement="vee"),
    "dualpipe": PipelineShape(4, 8, placement="mirror"),
}


def compile_case(name: str, overlap: bool = False) -> Program:
    return compile(getattr(schedules, name), PROGRAMS[name], overlap=overlap)


def diagnose(
    job: DistributedJob, program: Program, progress_model: ProgressModel | None = None
) -> list[ProgramVerdict]:
    return diagnose_copies(program, match_program(job, program), progress_model)


def list_cause_ranks(verdict: ProgramVerdict) -> set[int]:
    """Return the ranks that the diagnosis names as the cause."""
    return {
        int(verdict.positioned.rank_of[position])
        for cause in verdict.causes
        for position in cause.positions
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(st.data())
def test_stopped_rank_is_cause_at_any_instruction(tmp_path: Path, data: st.DataObject) -> None:
    """Draw the progress model, the kind of host, the number of steps and the process groups."""
    program = compile_case(data.draw(st.sampled_from([*PROGRAMS])), data.draw(st.booleans()))
    groups = data.draw(st.sampled_from([layout_with_one_group, layout_with_group_per_edge]))
    model: ProgressModel = (
        data.draw(st.sampled_from(MODELS)) if groups is layout_with_one_group else "per_edge"
    )
    blocks = data.draw(st.booleans())
    graph = Graph(program, model, blocking_hosts=blocks)
    stop = data.draw(st.integers(0, len(program) - 1))
    is_in_kernel = not blocks and data.draw(st.booleans())
    state = stop_at(graph, stop, blocks, is_in_kernel)
    transfers = [k for k in range(len(program)) if graph.index.op[k] in TRANSFER_OPS]
    assume(not all(state.ended[k] for k in transfers))
    steps_before = data.draw(st.sampled_from([0, 0, 3]))
    ranks = range(program.shape.ranks)
    recorders = record(state, before=steps_before, layout=groups(ranks))
    job = write_and_read_dumps(tmp_path, recorders, as_json=data.draw(st.booleans()))
    (verdict,) = diagnose(job, program, model)
    placed, rank = verdict.positioned, int(graph.index.rank[stop])
    # The diagnosis matches all recorded transfers to the program.
    assert verdict.matched.step == steps_before
    for k in transfers:
        group = placed._list_group(k)
        assert verdict.matched.issued_mask[k] == state.issued[k]
        assert verdict.matched.ended_mask[k] == all(state.ended[k_of_group] for k_of_group in group)
    # Only the stopped rank is the cause. If it computes on its device, the dumps show only that it
    # has one side of a message, and not which one.
    assert not verdict.is_deadlock
    has_waits = any(state.issued[k] and not state.ended[k] for k in transfers)
    assert bool(verdict.causes) or not has_waits
    if has_waits and (graph.index.has_joined or program.shape.placement_rows > 1):
        assert rank in list_cause_ranks(verdict)
    elif is_in_kernel:  # a message may wait for a compute, so both of its ranks may be the cause
        cause_lines = [line for line in describe_program(job, [verdict]) if " is the cause" in line]
        assert all(line.startswith(f"rank {rank} ") for line in cause_lines)
    elif has_waits:
        for cause in verdict.causes:
            owners = {int(placed.rank_of[k]) for k in cause.positions}
            assert owners == {rank} or (cause.kind is ChainEnd.BUSY and rank in owners)
            assert len(owners) <= 2
    # The stopped rank is at its instruction. Each rank that waits is at one of its transfers.
    for rank_position in verdict.positions:
        if rank_position.position is not None and rank_position.is_late:
            first, last = rank_position.compute_range
            is_stopped_here = rank_position.rank == rank and (
                first <= stop <= last or stop in placed._list_group(rank_position.position)
            )
            assert is_stopped_here or program.shape.placement_rows > 1
        elif rank_position.position is not None:
            assert not placed.ended_mask[rank_position.position]
    for cause in verdict.causes:
        if cause.kind is ChainEnd.BUSY and not is_in_kernel:
            assert any(graph.index.rank[k] == rank and stop <= k for k in cause.positions)
            assert not placed.surely_ended[stop]


CASES = {case.name: case for case in museum_cases()}
DEADLOCKS = [
    (name, model)
    for name, case in CASES.items()
    for model in MODELS
    if case.expected(model)[:1] == ["DeadlockError"] and not case.replicas
]


@pytest.mark.parametrize(("name", "progress_model"), DEADLOCKS)
def test_museum_deadlocks_have_same_cycle_as_check(
    name: str, progress_model: ProgressModel, tmp_path: Path
) -> None:
    """The diagnosis finds the cycle that `check` finds, with its text, also without a program."""
    program = CASES[name].made()
    graph = Graph(program, progress_model)
    job = write_and_read_dumps(tmp_path, record(stop_at(graph, None, False)))
    (verdict,) = diagnose(job, program, progress_model)
    with pytest.raises(DeadlockError) as caught:
        check(program, progress_model)
    assert verdict.is_deadlock
    ranks = {int(graph.index.rank[link.position]) for link in verdict.cycle}
    assert ranks == {wait.rank for wait in caught.value.cycle}
    lines = describe_program(job, [verdict])
    error_lines = str(caught.value).splitlines()
    assert lines[2 : 2 + len(error_lines)] == error_lines
    assert {wait.rank for wait in job.cycle} == ranks


def test_museum_has_deadlocks() -> None:
    assert len({name for name, _ in DEADLOCKS}) >= 3


def test_rank_without_dump_is_cause(tmp_path: Path) -> None:
    program = compile_case("one_f_one_b")
    graph = Graph(program, "per_device", blocking_hosts=True)
    state = stop_at(graph, int(program.offsets[2]) + 8, True)
    recorders = [recorder for recorder in record(state) if recorder.rank != 2]
    job = write_and_read_dumps(tmp_path, recorders)
    (verdict,) = diagnose(job, program)
    assert job.ranks_without_dump == (2,) and job.root_ranks == (2,)
    assert {cause.kind for cause in verdict.causes} == {ChainEnd.NO_DUMP}
    assert list_cause_ranks(verdict) == {2}
    assert [rank_position.rank for rank_position in verdict.positions] == [0, 1, 3]


@pytest.mark.parametrize("overlap", cases([True], [False]))
def test_positions_from_dumps_with_lost_entries(tmp_path: Path, overlap: bool) -> None:
    program = compile_case("zb_h1", overlap)
    graph = Graph(program, "per_device", blocking_hosts=True)
    state = stop_at(graph, int(program.offsets[1]) + 12, True)
    complete = diagnose(write_and_read_dumps(tmp_path, record(state, before=12)), program)
    for last in (40, 9, 5):
        job = write_and_read_dumps(tmp_path, record(state, before=12), last)
        assert all(dump.num_lost for dump in job.dumps.values())
        (verdict,) = diagnose(job, program)
        assert verdict.matched.step == 12
        assert (verdict.positions, verdict.causes) == (complete[0].positions, complete[0].causes)
        assert job.root_ranks == (1,)


def test_counters_give_position_without_other_entries(tmp_path: Path) -> None:
    """If a dump has only sends, the counters determine the position of the first rank."""
    program = compile(schedules.gpipe, PipelineShape(2, 8))
    graph = Graph(program, "per_device", blocking_hosts=True)
    stop = next(k for k in range(len(program)) if str(graph.index.locate(k)[2]) == "F 0.6")
    recorders = record(stop_at(graph, stop, True), before=5)
    (verdict,) = diagnose(write_and_read_dumps(tmp_path, recorders, last=4), program)
    assert verdict.matched.counter_ranks == (0, 1) and verdict.matched.step == 5
    assert verdict.positions[0].position is not None and list_cause_ranks(verdict) == {0}
    assert str(graph.index.locate(verdict.positions[0].position)[2]) == "send_act 0.6"
    assert any(
        "the position comes from counters" in line
        for line in describe_program(DistributedJob({}), [verdict])
    )
    (verdict,) = diagnose(write_and_read_dumps(tmp_path, recorders, last=30), program)
    assert verdict.matched.counter_ranks == () and verdict.matched.step == 5
    # Counters that also count other messages do not determine the position.
    for recorder in recorders:
        recorder.entries[-2]["op_id"] += 1
        recorder.entries[-1]["op_id"] += 1
    with pytest.raises(UsageError):
        diagnose(write_and_read_dumps(tmp_path, recorders, last=4), program)


def test_unused_process_group_belongs_to_current_step(tmp_path: Path) -> None:
    """If a dump has all activations and no gradients, the rank is in the middle of a step."""
    program = compile(schedules.gpipe, PipelineShape(2, 4))
    graph = Graph(program, "per_edge", blocking_hosts=True)
    stop = next(k for k in range(len(program)) if str(graph.index.locate(k)[2]) == "B 1.0")
    recorders = record(stop_at(graph, stop, True), layout=layout_with_group_per_edge(range(2)))
    (verdict,) = diagnose(write_and_read_dumps(tmp_path, recorders[1:]), program)
    assert verdict.matched.step == 0
    rank_position = verdict.positions[0]
    assert (
        rank_position.is_late
        and rank_position.compute_range[0] <= stop <= rank_position.compute_range[1]
    )


def test_dumps_that_contradict_queue_order_are_refused(tmp_path: Path) -> None:
    """Under per_device, transfers end in the order of the queue. These dumps have another order."""
    program = compile_case("interleaved")
    edge, device = Graph(program, "per_edge"), Graph(program, "per_device")
    contradictions = 0
    for stop in range(0, len(program), 3):
        state, predecessor = stop_at(edge, stop, False), device.queue_predecessor
        ended = [
            k for k in range(len(program)) if state.ended[k] and device.index.op[k] in TRANSFER_OPS
        ]
        if all(predecessor[k] < 0 or state.ended[predecessor[k]] for k in ended):
            continue
        contradictions += 1
        job = write_and_read_dumps(tmp_path, record(state))
        with pytest.raises(UsageError) as caught:
            diagnose(job, program, "per_device")
        assert caught.value.fields == ("progress_model",)
        assert diagnose(job, program)[0].progress_model != "per_device"
    assert contradictions


def test_other_order_of_computes_does_not_match(tmp_path: Path) -> None:
    """On two ranks, GPipe and 1F1B send equal messages, but their computes have another order."""
    gpipe, other = (
        compile(s, PipelineShape(2, 4)) for s in (schedules.gpipe, schedules.one_f_one_b)
    )
    job = write_and_read_dumps(tmp_path, record(stop_at(Graph.from_program(gpipe), None, False)))
    with pytest.raises(UsageError) as caught:
        match_program(job, other)
    assert "after the compute that needs it" in caught.value.fact


def test_message_pattern_gives_position(tmp_path: Path) -> None:
    """Messages with shapes also count, so only the pattern of messages determines the position."""
    program = compile_case("one_f_one_b")
    graph = Graph(program, "per_device", blocking_hosts=True)
    state = stop_at(graph, int(program.offsets[2]) + 8, True)
    recorders = record(state, before=5)
    for recorder in recorders:
        entry_30 = dict(recorder.entries[30])
        recorder.entries.insert(30, entry_30 | {"input_dtypes": ["Long"]})
        for number, entry in enumerate(recorder.entries):
            entry["record_id"] = number
            entry["op_id"] += number >= 30
    complete = diagnose(write_and_read_dumps(tmp_path, recorders), program)
    assert complete[0].matched.step == 5 and complete[0].matched.num_ignored == 4
    (verdict,) = diagnose(write_and_read_dumps(tmp_path, recorders, last=40), program)
    assert verdict.matched.step is None
    assert (verdict.positions, verdict.causes) == (complete[0].positions, complete[0].causes)
    with pytest.raises(UsageError):  # too few entries to determine a position
        diagnose(
            write_and_read_dumps(tmp_path, recorders, last=3)
            and _record_last_entries(tmp_path, recorders),
            program,
        )


def _record_last_entries(tmp_path: Path, recorders: Sequence[Recorder]) -> DistributedJob:
    """Return the job of the last three entries of each rank, one with an integer tensor."""
    for recorder in recorders:
        recorder.entries[-3]["input_dtypes"] = ["Long"]
    return write_and_read_dumps(tmp_path, recorders, last=3)


def test_pipelines_of_tensor_and_data_parallel_ranks(tmp_path: Path) -> None:
    """Four pipelines run the program. Their process groups show which ranks form a pipeline."""
    program = compile_case("gpipe")
    graph = Graph(program, "per_device", blocking_hosts=True)
    stopped_state = stop_at(graph, int(program.offsets[1]) + 4, True)
    pipelines = [(0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11)]
    recorders = []
    for k, ranks in enumerate(pipelines):
        state = stopped_state if k == 2 else stop_at(graph, None, True)
        recorders += record(state, ranks, before=1, layout=layout_with_one_group(ranks, f"pp{k}"))
    job = write_and_read_dumps(tmp_path, recorders)
    verdicts = diagnose(job, program)
    assert [v.matched.ranks for v in verdicts] == pipelines
    assert [bool(v.causes) for v in verdicts] == [False, False, True, False]
    assert list_cause_ranks(verdicts[2]) == {1} and job.root_ranks == (6,)
    # Pipeline ranks have the order of the process group, which may be any order.
    reordered = (9, 3, 5)
    job = write_and_read_dumps(tmp_path, record(stopped_state, reordered))
    assert [v.matched.ranks for v in diagnose(job, program)] == [reordered]
    assert job.root_ranks == (3,)


def test_missing_member_of_collective_is_cause(tmp_path: Path) -> None:
    """A late rank waits in a collective. The rank that has not issued it is the cause."""
    program = compile_case("gpipe")
    graph = Graph(program, "per_device", blocking_hosts=True)
    recorders = record(stop_at(graph, int(program.offsets[1]) + 4, True))
    recorders[1].group("tp", (1, 3), "tp")
    recorders[1].collective("tp", "all_reduce", ended=False)
    other = Recorder(3)
    other.group("tp", (1, 3), "tp")
    job = write_and_read_dumps(tmp_path, [*recorders, other])
    assert job.root_ranks == (3,)
    assert [(w.rank, w.awaited_rank, w.reason) for w in job.waits[1]] == [
        (1, 3, WaitReason.NOT_ISSUED)
    ]
    lines = describe_program(job, diagnose(job, program))
    assert any("it waits in all_reduce 1 of tp" in line and "rank 3" in line for line in lines)


POSTED_EARLY = """
schedir 1
program posted_early
ranks 2  microbatches 2  stages_per_rank 1  placement loop

rank 0
  F 0.0; send_act 0.0; recv_grad 0.0; F 0.1; send_act 0.1; B 0.0; recv_grad 0.1; B 0.1
  reduce_grads 0; step

rank 1
  recv_act 1.0; F 1.0; recv_act 1.1; F 1.1; B 1.0; send_grad 1.0; B 1.1; send_grad 1.1
  reduce_grads 1; step
"""


def test_early_receive_is_no_deadlock(tmp_path: Path) -> None:
    """Rank 0 has posted a receive early and still computes. Only the program shows this."""
    program = check(from_text(POSTED_EARLY), "per_edge", blocking_hosts=True)
    graph = Graph(program, "per_edge", blocking_hosts=True)
    assert str(graph.index.locate(3)[2]) == "F 0.1"
    job = write_and_read_dumps(tmp_path, record(stop_at(graph, 3, True)))
    assert {wait.rank for wait in job.cycle} == {0, 1}
    assert any("may still compute" in line for line in describe_job(job))
    (verdict,) = diagnose(job, program, "per_edge")
    assert not verdict.is_deadlock and list_cause_ranks(verdict) == {0}


def test_dumps_contradict_progress_model(tmp_path: Path) -> None:
    """Dumps with a process group per edge contradict per_device, which has a single queue."""
    program = compile_case("one_f_one_b")
    graph = Graph(program, "per_edge", blocking_hosts=True)
    state = stop_at(graph, int(program.offsets[2]) + 8, True)
    job = write_and_read_dumps(tmp_path, record(state, layout=layout_with_group_per_edge(range(4))))
    with pytest.raises(UsageError) as caught:
        diagnose(job, program, "per_device")
    assert caught.value.fields == ("progress_model",)
    assert diagnose(job, program)[0].progress_model == "per_edge"
    assert (
        diagnose(write_and_read_dumps(tmp_path, record(state)), program)[0].progress_model
        == "per_device"
    )


def test_dumps_of_another_program_are_refused(tmp_path: Path) -> None:
    program = compile_case("one_f_one_b")
    job = write_and_read_dumps(tmp_path, record(stop_at(Graph(program), None, False)))
    for other, fields in (
        (compile(schedules.gpipe, PipelineShape(4, 6)), ("program",)),
        (compile(schedules.one_f_one_b, PipelineShape(3, 6)), ("ranks",)),
    ):
        with pytest.raises(UsageError) as caught:
            diagnose(job, other)
        assert caught.value.fields == fields
    with pytest.raises(SchedirError):
        diagnose(job, replace(program, streams=program.streams[:3] + program.streams[:1]))


def test_collectives_alone_do_not_match_program(tmp_path: Path) -> None:
    recorders = Recorder(0), Recorder(1)
    for recorder in recorders:
        recorder.group("0", (0, 1), "default_pg")
        recorder.collective("0", "all_reduce", recorder.rank == 0)
    with pytest.raises(UsageError):
        diagnose(
            write_and_read_dumps(tmp_path, recorders), compile(schedules.gpipe, PipelineShape(2, 4))
        )
