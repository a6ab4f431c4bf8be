"""Tests of the hang positions of ranks in real steps of torch.distributed.pipelining.

Gloo has no flight recorder for messages. The processes record the operations that torch issues, in
this order, like NCCL's recorder. One rank stops in the forward of a microbatch, in its second step.
"""

from __future__ import annotations

import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs

from schedir import PipelineShape, Program, compile, schedules
from schedir.analysis.dependency_graph import Graph
from schedir.compiler.compile import finish_lowering
from schedir.hang_diagnosis.flight_recorder import read_dumps
from schedir.hang_diagnosis.program_matching import match_program
from schedir.hang_diagnosis.rank_positions import diagnose_copies
from schedir.hang_diagnosis.wait_graph import DistributedJob
from schedir.io import torch_csv
from schedir.ir.instruction_index import InstructionIndex
from tests.cpu.gloo_processes import run
from tests.cpu.torch_schedules import SINGLE, lower_torch_schedule
from tests.flight_recorder_dumps import Recorder, record, stop_at

STOPPED_RANK, STEP, STAGE, MICROBATCH = 1, 1, 1, 2
PLANS = {
    "ScheduleGPipe": PipelineShape(3, 4),
    "Schedule1F1B": PipelineShape(3, 5),
    "ScheduleInterleaved1F1B": PipelineShape(2, 4, stages_per_rank=2),
}


OTHER_ORDER = SINGLE  # torch receives later than our programs of these schedules


class _RecordedWork:
    """A message that torch has issued. It is complete when `wait` has returned."""

    def __init__(self, work: Any, entry: dict[str, Any]) -> None:
        self.work, self.entry = work, entry

    def wait(self) -> bool:
        done: bool = self.work.wait()
        self.entry["state"] = "completed"
        return done


class _StoppingStage(nn.Module):
    """A layer that waits for an event in one of its forwards."""

    def __init__(
        self, stop_count: int, is_stopped: threading.Event | None, may_continue: threading.Event
    ) -> None:
        super().__init__()
        self.layer, self.count, self.stop_count = nn.Linear(4, 4), 0, stop_count
        self.is_stopped, self.may_continue = is_stopped, may_continue

    def forward(self, x: Tensor) -> Tensor:
        if self.is_stopped is not None and self.count == self.stop_count:
            self.is_stopped.set()
            self.may_continue.wait(60)
        self.count += 1
        out: Tensor = self.layer(x)
        return out


def _train_and_record(rank: int, name: str, shape: PipelineShape, folder: str) -> None:
    recorder = Recorder(rank)
    recorder.group("0", range(shape.ranks), "default_pg")
    original_batch_p2p = theirs._batch_p2p

    def batch_p2p(ops: list[dist.P2POp], desc: str | None = None) -> list[Any]:
        sides = [("send" if op.op is dist.isend else "recv", op.peer) for op in ops]
        shapes = [list(op.tensor.shape) for op in ops]
        works = original_batch_p2p(ops, desc)
        first = len(recorder.entries)
        if len({kind for kind, _ in sides}) > 1:
            recorder.messages("0", sides, False, shape=shapes[0])
            entries = recorder.entries[first:-1]
            return [_RecordedWork(work, recorder.entries[-1]) for work in works] if entries else []
        for (kind, peer), shape in zip(sides, shapes, strict=True):
            recorder.messages("0", [(kind, peer)], kind == "send", shape=shape)
        return [_RecordedWork(w, e) for w, e in zip(works, recorder.entries[first:], strict=True)]

    vars(theirs)["_batch_p2p"] = batch_p2p
    may_continue = threading.Event()
    is_stopped = threading.Event() if rank == STOPPED_RANK else None
    store = dist.distributed_c10d._get_default_store()

    def write() -> None:
        """Write the record of this process after it has not changed for half a second."""
        if is_stopped is not None:
            is_stopped.wait(60)
            store.set("stands", "")
        store.wait(["stands"])
        before: Any = None
        while before != (before := [entry["state"] for entry in recorder.entries]):
            time.sleep(0.5)
        recorder.save(Path(folder))
        store.set(f"written {rank}", "")
        store.wait([f"written {other}" for other in range(shape.ranks)])
        may_continue.set()

    writer = threading.Thread(target=write)
    writer.start()
    stop_count = STEP * shape.microbatches + MICROBATCH
    stop_count += 1  # torch runs one more forward before its first step, to learn the shapes
    local_stages = shape.stages_on_rank[rank]
    stages = []
    for s in local_stages:
        stage = _StoppingStage(stop_count, is_stopped if s == STAGE else None, may_continue)
        stages.append(PipelineStage(stage, s, shape.stages, torch.device("cpu")))
    kind: Any = getattr(theirs, name)
    pipe = kind(stages[0] if name in SINGLE else stages, shape.microbatches, nn.functional.mse_loss)
    x, target = torch.randn(2, 2 * shape.microbatches, 4).unbind()
    for _ in range(STEP + 1):
        inputs = (x,) if 0 in local_stages else ()
        pipe.step(*inputs, **({"target": target} if shape.stages - 1 in local_stages else {}))
    writer.join()


def _find_program(name: str, shape: PipelineShape) -> Program:
    """Return the program that torch reports, or our program of the same name if it reports none."""
    if name == "ScheduleGPipe":
        return compile(schedules.gpipe, shape)
    if name == "Schedule1F1B":
        return compile(schedules.one_f_one_b, shape)
    return finish_lowering(torch_csv.from_csv(lower_torch_schedule(name, shape)))


@pytest.mark.parametrize("name", PLANS)
def test_diagnosis_finds_forward_that_stopped(name: str, tmp_path: Path) -> None:
    shape = PLANS[name]
    run(_train_and_record, shape.ranks, name, shape, str(tmp_path))
    job = DistributedJob(read_dumps([str(tmp_path)])[0])
    program = _find_program(name, shape)
    index = InstructionIndex.from_program(program)
    (matched,) = match_program(job, program)
    assert matched.step == STEP and bool(matched.order_mismatch) == (name in OTHER_ORDER)
    # The rank has the input of that forward.
    ended = [op for op in job.dumps[STOPPED_RANK].ops if op.is_done and op.kind == "recv"]
    positions = [matched.position_of_message[STOPPED_RANK, op.number] for op in ended]
    names = [str(index.locate(position)[2]) for position in positions]
    assert f"recv_act {STAGE}.{MICROBATCH}" in names[-2:]
    if matched.order_mismatch:
        assert job.root_ranks == (STOPPED_RANK,)
        return
    (verdict,) = diagnose_copies(program, [matched])
    assert not verdict.is_deadlock
    places = [place for cause in verdict.causes for place in cause.positions]
    assert {int(index.rank[place]) for place in places} == {STOPPED_RANK}
    position = verdict.positions[STOPPED_RANK]
    assert position.is_late
    possible = [str(index.locate(place)[2]) for place in range(*position.compute_range)]
    assert f"F {STAGE}.{MICROBATCH}" in possible


def test_torch_reader_pairs_messages_of_test_recorder(tmp_path: Path) -> None:
    """All messages of a finished job are paired, and the reader reports no mismatch."""
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    loader = pytest.importorskip("torch.distributed.flight_recorder.components.loader")
    program = compile(schedules.interleaved, PipelineShape(2, 4, stages_per_rank=2))
    finished = stop_at(Graph.from_program(program), None, False)
    for recorder in record(finished, before=1):
        recorder.collective("1", "all_reduce", ended=True)
        recorder.save(tmp_path)
    options = Namespace(
        trace_dir=str(tmp_path), prefix="nccl_trace_rank_", allow_incomplete_ranks=False,
        just_print_entries=False, mismatch_cap=10, pg_filters=None, selected_ranks=None,
        verbose=False,
    )  # fmt: skip
    dumps, version = loader.read_dir(options)
    database = builder.build_db(dumps, options, version)
    job = DistributedJob(read_dumps([str(tmp_path)])[0])
    assert len(database.ncclcalls) == sum(len(dump.ops) for dump in job.dumps.values()) > 0
    assert all(call.collective_id is not None for call in database.ncclcalls)
    assert all(collective.pass_check for collective in database.collectives)
