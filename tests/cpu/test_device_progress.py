"""Tests of the reported position of a virtual GPU whose host has issued a whole step."""

from __future__ import annotations

import math
from functools import partial
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest
import torch

import schedir
from schedir import Costs, PipelineShape
from schedir.hang_diagnosis.stall_cause import ProcessLayout
from schedir.io.black_box import POSITION_FIELD, ProcessPhase
from schedir.ir.isa.instructions import Instr, Opcode
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.program_state import Call
from schedir.runtime.recording.gpu_progress import GpuProgress, describe_wait
from schedir.runtime.step_inputs import StepInputs
from schedir.schedules import dualpipe, gpipe, one_f_one_b
from schedir.testing import tiny_model
from schedir.training.processes import watchdog
from schedir.training.processes.process_exit import RunMember
from schedir.training.processes.watchdog import Watchdog, make_stall_error
from schedir.transports.p2p_groups import EdgeGroups, GroupedMessages
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import gpt_executor, make_batch
from tests.cpu.virtual_gpu import VirtualGPU, charge_instructions, install_virtual_gpu

COSTS = Costs(F=1.0, B=2.0)
NORM = "reduce_norm", "waits for all ranks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> VirtualGPU:
    return install_virtual_gpu(monkeypatch)


def make_charged_ranks(
    gpu: VirtualGPU, schedule: Any, *shape: Any, **options: Any
) -> tuple[InProcessExecutor, list[GpuProgress]]:
    program = schedir.compile(schedule, PipelineShape(*shape), progress_model="per_edge", **options)
    stages = tiny_model.make_tiny_stages(program.shape.stages)
    boundary = Boundary((2, tiny_model.WIDTH), torch.float64)
    ranks = InProcessExecutor(
        program, stages, loss=tiny_model.squared_error, boundary=boundary,
        execution=ExecutionOptions(record_timestamps=False),
    )  # fmt: skip
    charge_instructions(ranks, gpu, COSTS)
    return ranks, [GpuProgress(rank) for rank in ranks.executors]


def make_instruction_hang(
    ranks: InProcessExecutor, gpu: VirtualGPU, instr: Instr, rank: int
) -> None:
    """Make the virtual GPU never finish an instruction."""
    executor = ranks.executors[rank]
    k = executor.state.index_of[instr]
    call = executor.runner.calls[k]

    def run_forever() -> None:
        gpu.work(math.inf)
        call.run()

    executor.runner.calls[k] = Call(call.wait, run_forever)


def run_step(ranks: InProcessExecutor, gpu: VirtualGPU) -> None:
    ranks.step(*tiny_model.make_batch(ranks.program.shape.microbatches))


def read_stall_error(
    ranks: InProcessExecutor, rank: int, progress: GpuProgress
) -> list[tuple[str, str]]:
    """Return the instructions and notes of the watchdog's error for a rank."""
    executor = ranks.executors[rank]
    error = make_stall_error("it stands", executor, 9, progress, progress.get_progress())
    return [(str(site.instr), site.note) for site in error.sites]


def test_stall_error_reports_gpu_position_not_host_position(gpu: VirtualGPU) -> None:
    ranks, progress = make_charged_ranks(gpu, one_f_one_b, 2, 4)
    make_instruction_hang(ranks, gpu, Instr(Opcode.Forward, 1, 1), rank=1)
    run_step(ranks, gpu)
    gpu.host = 1000.0
    for rank in ranks.executors:  # where the host is
        assert rank.runner.position == len(rank.runner.calls) - 1
    assert read_stall_error(ranks, 1, progress[1]) == [("F 1.1", "in step 1, computes")]
    # Lanes run in parallel. Of their current instructions, the first of the Stream comes first.
    assert read_stall_error(ranks, 0, progress[0]) == [
        ("send_act 0.2", "in step 1, waits for rank 1 to receive"),
        ("recv_grad 0.1", "in step 1, waits for rank 1 to send"),
    ]
    # Without progress of the GPU, the last instruction of a Stream is reported.
    error = make_stall_error("it stands", ranks.executors[1], 1, None, None)
    assert [site.index for site in error.sites] == [len(ranks.executors[1].runner.calls) - 1]


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
@pytest.mark.parametrize("overlap", [False, True])
def test_stall_error_points_towards_hanging_rank(
    gpu: VirtualGPU, schedule: Any, overlap: bool
) -> None:
    ranks, progress = make_charged_ranks(gpu, schedule, 4, 8, overlap=overlap, clip_grad_norm=True)
    make_instruction_hang(ranks, gpu, Instr(Opcode.Backward, 2, 3), rank=2)
    run_step(ranks, gpu)
    gpu.host = 1000.0
    assert read_stall_error(ranks, 2, progress[2])[0] == ("B 2.3", "in step 1, computes")
    for rank, nearer in ((0, 1), (1, 2), (3, 2)):
        sites = read_stall_error(ranks, rank, progress[rank])
        assert f"waits for rank {nearer} to" in sites[0][1]
        assert all(
            f"waits for rank {nearer} to" in note or (instr, note[11:]) == NORM
            for instr, note in sites
        )


def test_stall_is_reported_while_host_issues_next_step(gpu: VirtualGPU) -> None:
    """Each step has its own events."""
    ranks, progress = make_charged_ranks(gpu, one_f_one_b, 2, 4)
    run_step(ranks, gpu)
    gpu.host = gpu.over
    assert [p.get_progress() for p in progress] == [None, None]
    make_instruction_hang(ranks, gpu, Instr(Opcode.Backward, 1, 2), rank=1)
    run_step(ranks, gpu)
    run_step(ranks, gpu)
    gpu.host += 1000.0
    assert read_stall_error(ranks, 1, progress[1]) == [("B 1.2", "in step 2, computes")]


def test_progress_advances_as_instructions_end(gpu: VirtualGPU) -> None:
    ranks, (progress, _) = make_charged_ranks(gpu, one_f_one_b, 2, 4)
    run_step(ranks, gpu)
    unfinished_counts = []
    while (position := progress.get_progress()) is not None:
        assert position.issued == position.unfinished and position.step == 1
        unfinished_counts.append(len(position.unfinished))
        gpu.host += 1.0
    assert unfinished_counts == sorted(unfinished_counts, reverse=True)
    assert len({*unfinished_counts}) > 4


def test_stalled_host_is_reported(gpu: VirtualGPU) -> None:
    """Instructions that the host has not issued cannot end, so its current one is reported."""
    ranks, (progress,) = make_charged_ranks(gpu, gpipe, 1, 3)
    executor = ranks.executors[0]
    inputs, targets = tiny_model.make_batch(3)
    executor.runner.begin_step(StepInputs(inputs, targets))
    with executor.random_streams.preserve_generators():  # like a step
        for k in range(2):
            executor.runner.run_instruction(k)
    executor.runner.progress[POSITION_FIELD] = 2
    gpu.host = 1000.0
    assert read_stall_error(ranks, 0, progress) == [("F 0.2", "in step 1, computes")]


def test_progress_follows_order_of_issue(gpu: VirtualGPU) -> None:
    """Warmup steps are undone, so the next step has the same number."""
    ranks, (progress,) = make_charged_ranks(gpu, gpipe, 1, 3)
    executor = ranks.executors[0]
    inputs, targets = tiny_model.make_batch(3)
    for _ in range(3):
        executor.runner.begin_step(StepInputs(inputs, targets))
        order = [1, 0, *range(2, len(executor.runner.calls))]
        with executor.random_streams.preserve_generators():
            for k in order:
                executor.runner.run_instruction(k)
                position = progress.get_progress()
                assert position is not None and position.step == 1
                assert {*position.issued} == {*order[: order.index(k) + 1]}
        executor.runner.finish_step()
        gpu.host = gpu.over
        assert progress.get_progress() is None
        executor.random_streams.step -= 1


def test_describe_wait_names_peers() -> None:
    program = schedir.compile(
        one_f_one_b, PipelineShape(2, 2), tied_weights=True, clip_grad_norm=True, dp=2, tp=2
    )
    bidirectional = schedir.compile(dualpipe, PipelineShape(2, 4, placement="mirror"))
    words = {str(i): describe_wait(program, i) for stream in program.streams for i in stream}
    bidirectional_instrs = [i for stream in bidirectional.streams for i in stream if i.stage == 0]
    words |= {str(i): describe_wait(bidirectional, i) for i in bidirectional_instrs}
    assert words["F 0.0"] == "computes"
    assert words["send_act 0.1"] == "waits for rank 1 to receive"
    assert {text.partition(" rank ")[0] for text in words.values()} == {
        "computes", "waits for", "waits for all ranks",
        "waits for all stages that share its weights",
        "waits for its tensor-parallel group", "waits for the other replicas",
        "waits for all replicas of its stage",
    }  # fmt: skip


def test_watchdog_reports_gpu_position(
    gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    causes: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(watchdog, "exit_with_cause", lambda member, cause: causes.put(str(cause)))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    ranks, _ = make_charged_ranks(gpu, one_f_one_b, 2, 4)
    executor = ranks.executors[0]
    monkeypatch.setattr(executor.state, "device", torch.device("cuda"))
    make_instruction_hang(ranks, gpu, Instr(Opcode.Forward, 1, 1), rank=1)
    member = RunMember(tmp_path, ProcessLayout(2, 1, 1), 0)
    member.black_box.enter_phase(ProcessPhase.STEP, 1)
    with Watchdog(member, 0.2) as running_watchdog, running_watchdog.watch(executor):
        run_step(ranks, gpu)
        gpu.host = 1000.0
        while not causes.empty():  # results from before the clock moved
            causes.get()
        *_, last = [causes.get(timeout=60) for _ in range(3)]
        first, *lines = last.splitlines()
        assert first.startswith(
            "one_f_one_b: no process has made progress for 0.2 s: process 0 (pipeline"
        )
        assert lines == [
            "  on its GPU:",
            "  rank 0 #7   send_act 0.2   in step 1, waits for rank 1 to receive",
            "  rank 0 #8   recv_grad 0.1  in step 1, waits for rank 1 to send",
        ]


class _BlockedProgress:
    """Progress of a GPU whose driver does not answer."""

    def __init__(self) -> None:
        self.asked, self.over = 0, Event()

    def get_progress(self) -> None:
        self.asked += 1
        self.over.wait()


def test_blocked_driver_does_not_block_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "GPU_ANSWER_TIMEOUT", 0.01)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    blocked: Any = _BlockedProgress()
    queried = watchdog._Device(blocked, torch.device("cuda"))
    assert [queried.query_step() for _ in range(3)] == [None] * 3
    assert blocked.asked == 1  # only one thread waits
    blocked.over.set()


def _query_progress_on_rank(
    process: int, transport: type[EdgeGroups] | type[GroupedMessages], tp: int
) -> list[Any]:
    program = schedir.compile(
        one_f_one_b, PipelineShape(2, 4), tp=tp, tied_weights=True, clip_grad_norm=True,
        progress_model=transport.progress_model, overlap=True,
    )  # fmt: skip
    execution = ExecutionOptions(record_timestamps=False)
    executor = gpt_executor(program, transport(program), execution=execution)
    progress, positions = GpuProgress(executor), []
    for _ in range(3):
        executor.step(*make_batch(4))
        positions.append(progress.get_progress())
    works = [*chain.from_iterable(progress.step_events[-1].works)]
    return [positions, len(works), all(hasattr(work, "is_completed") for work in works)]


@pytest.mark.parametrize(("transport", "tp"), [(EdgeGroups, 2), (GroupedMessages, 1)])
def test_progress_queries_works_of_all_transports(
    transport: type[EdgeGroups] | type[GroupedMessages], tp: int
) -> None:
    """Messages, grouped messages, gathers and reductions can be queried."""
    query_progress = partial(_query_progress_on_rank, transport=transport, tp=tp)
    for positions, count, can_query in run(query_progress, 2 * tp):
        assert positions == [None] * 3 and count > 8 and can_query
