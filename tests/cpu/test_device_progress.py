"""Tests of the position of a virtual GPU when the host has issued a whole step."""

from __future__ import annotations

import math
from functools import partial
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
from schedir.ir.program import Program
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.rank_state import Call
from schedir.runtime.recording.gpu_progress import GpuProgress, describe_wait
from schedir.runtime.step_inputs import StepInputs
from schedir.schedules import dualpipe, gpipe, one_f_one_b
from schedir.testing import tiny_model
from schedir.training.processes import watchdog
from schedir.training.processes.process_exit import RunMember
from schedir.training.processes.watchdog import Watchdog, make_stall_error
from schedir.transports.p2p_groups import EdgeGroups, GroupedMessages
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import batch, gpt_executor
from tests.cpu.virtual_gpu import VirtualGPU, charge, install

COSTS = Costs(F=1.0, B=2.0)
NORM = "reduce_norm", "waits for all ranks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> VirtualGPU:
    return install(monkeypatch)


def ranks_of(program: Program, gpu: VirtualGPU) -> tuple[InProcessExecutor, list[GpuProgress]]:
    stages = tiny_model.make_tiny_stages(program.shape.stages)
    boundary = Boundary((2, tiny_model.WIDTH), torch.float64)
    ranks = InProcessExecutor(
        program,
        stages,
        loss=tiny_model.squared_error,
        boundary=boundary,
        execution=ExecutionOptions(record_timestamps=False),
    )
    charge(ranks, gpu, COSTS)
    return ranks, [GpuProgress(rank) for rank in ranks.executors]


def hang(ranks: InProcessExecutor, gpu: VirtualGPU, instr: Instr, rank: int) -> None:
    """Make an instruction never end."""
    one = ranks.executors[rank]
    k = one.state.index_of[instr]
    call = one.runner.calls[k]

    def run() -> None:
        gpu.work(math.inf)
        call.run()

    one.runner.calls[k] = Call(call.wait, run)


def step(ranks: InProcessExecutor, gpu: VirtualGPU) -> None:
    ranks.step(*tiny_model.make_batch(ranks.program.shape.microbatches))


def said(ranks: InProcessExecutor, rank: int, progress: GpuProgress) -> list[tuple[str, str]]:
    """Return the instructions and notes of the watchdog's error for a rank."""
    one = ranks.executors[rank]
    error = make_stall_error("it stands", one, 9, progress, progress.get_progress())
    return [(str(site.instr), site.note) for site in error.sites]


def test_a_hang_is_told_from_what_has_ended_and_not_from_where_the_host_is(
    gpu: VirtualGPU,
) -> None:
    program = schedir.compile(one_f_one_b, PipelineShape(2, 4), progress_model="per_edge")
    ranks, progress = ranks_of(program, gpu)
    hang(ranks, gpu, Instr(Opcode.Forward, 1, 1), rank=1)
    step(ranks, gpu)
    gpu.host = 1000.0
    for rank in ranks.executors:  # where the host is
        assert rank.runner.position == len(rank.runner.calls) - 1
    assert said(ranks, 1, progress[1]) == [("F 1.1", "in step 1, computes")]
    # Lanes run in parallel. Of their current instructions, the first of the Stream comes first.
    assert said(ranks, 0, progress[0]) == [
        ("send_act 0.2", "in step 1, waits for rank 1 to receive"),
        ("recv_grad 0.1", "in step 1, waits for rank 1 to send"),
    ]
    # Without progress of the GPU, the last instruction of a Stream is reported.
    error = make_stall_error("it stands", ranks.executors[1], 1, None, None)
    assert [site.index for site in error.sites] == [len(ranks.executors[1].runner.calls) - 1]


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_rank_that_hangs_computes_and_all_others_wait_for_its_side(
    gpu: VirtualGPU, schedule: Any, overlap: bool
) -> None:
    program = schedir.compile(
        schedule,
        PipelineShape(4, 8),
        progress_model="per_edge",
        overlap=overlap,
        clip_grad_norm=True,
    )
    ranks, progress = ranks_of(program, gpu)
    hang(ranks, gpu, Instr(Opcode.Backward, 2, 3), rank=2)
    step(ranks, gpu)
    gpu.host = 1000.0
    assert said(ranks, 2, progress[2])[0] == ("B 2.3", "in step 1, computes")
    for rank, nearer in ((0, 1), (1, 2), (3, 2)):
        stood = said(ranks, rank, progress[rank])
        assert f"waits for rank {nearer} to" in stood[0][1]
        assert all(
            f"waits for rank {nearer} to" in note or (instr, note[11:]) == NORM
            for instr, note in stood
        )


def test_a_step_that_hangs_is_told_while_the_host_is_in_the_next_one(gpu: VirtualGPU) -> None:
    """The events of the step are not those of the next step."""
    program = schedir.compile(one_f_one_b, PipelineShape(2, 4), progress_model="per_edge")
    ranks, progress = ranks_of(program, gpu)
    step(ranks, gpu)
    gpu.host = gpu.over
    assert [p.get_progress() for p in progress] == [None, None]
    hang(ranks, gpu, Instr(Opcode.Backward, 1, 2), rank=1)
    step(ranks, gpu)
    step(ranks, gpu)
    gpu.host += 1000.0
    assert said(ranks, 1, progress[1]) == [("B 1.2", "in step 2, computes")]


def test_it_moves_as_instructions_end(gpu: VirtualGPU) -> None:
    program = schedir.compile(one_f_one_b, PipelineShape(2, 4), progress_model="per_edge")
    ranks, (progress, _) = ranks_of(program, gpu)
    step(ranks, gpu)
    seen = []
    while (standing := progress.get_progress()) is not None:
        assert standing.issued == standing.unfinished and standing.step == 1
        seen.append(len(standing.unfinished))
        gpu.host += 1.0
    assert seen == sorted(seen, reverse=True) and len({*seen}) > 4


def test_a_host_that_stands_itself_is_told(gpu: VirtualGPU) -> None:
    """Instructions that the host has not issued cannot end, so its current one is reported."""
    program = schedir.compile(gpipe, PipelineShape(1, 3), progress_model="per_edge")
    ranks, (progress,) = ranks_of(program, gpu)
    one = ranks.executors[0]
    inputs, targets = tiny_model.make_batch(3)
    one.runner.begin_step(StepInputs(inputs, targets))
    with one.random_streams.preserve_generators():  # like a step
        for k in range(2):
            one.runner.run_instruction(k)
    one.runner.progress[POSITION_FIELD] = 2
    gpu.host = 1000.0
    assert said(ranks, 0, progress) == [("F 0.2", "in step 1, computes")]


def test_a_step_in_another_order_is_one_step(gpu: VirtualGPU) -> None:
    """Warmup steps are undone, so the next step has the same number."""
    program = schedir.compile(gpipe, PipelineShape(1, 3), progress_model="per_edge")
    ranks, (progress,) = ranks_of(program, gpu)
    one = ranks.executors[0]
    inputs, targets = tiny_model.make_batch(3)
    for _ in range(3):
        one.runner.begin_step(StepInputs(inputs, targets))
        order = [1, 0, *range(2, len(one.runner.calls))]
        with one.random_streams.preserve_generators():
            for k in order:
                one.runner.run_instruction(k)
                standing = progress.get_progress()
                assert standing is not None and standing.step == 1
                assert {*standing.issued} == {*order[: order.index(k) + 1]}
        one.runner.finish_step()
        gpu.host = gpu.over
        assert progress.get_progress() is None
        one.random_streams.step -= 1


def test_what_an_instruction_waits_for_in_words() -> None:
    tied = schedir.compile(
        one_f_one_b, PipelineShape(2, 2), tied_weights=True, clip_grad_norm=True, dp=2, tp=2
    )
    two = schedir.compile(dualpipe, PipelineShape(2, 4, placement="mirror"))
    words = {str(i): describe_wait(tied, i) for stream in tied.streams for i in stream}
    words |= {
        str(i): describe_wait(two, i) for stream in two.streams for i in stream if i.stage == 0
    }
    assert words["F 0.0"] == "computes"
    assert words["send_act 0.1"] == "waits for rank 1 to receive"
    assert {text.partition(" rank ")[0] for text in words.values()} == {
        "computes", "waits for", "waits for all ranks",
        "waits for all stages that share its weights",
        "waits for its tensor-parallel group", "waits for the other replicas",
        "waits for all replicas of its stage",
    }  # fmt: skip


def test_the_watchdog_asks_and_says_it(
    gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(watchdog, "exit_with_cause", lambda own, found: ended.put(str(found)))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    ranks, _ = ranks_of(
        schedir.compile(one_f_one_b, PipelineShape(2, 4), progress_model="per_edge"), gpu
    )
    one = ranks.executors[0]
    monkeypatch.setattr(one.state, "device", torch.device("cuda"))
    hang(ranks, gpu, Instr(Opcode.Forward, 1, 1), rank=1)
    own = RunMember(tmp_path, ProcessLayout(2, 1, 1), 0)
    own.black_box.enter_phase(ProcessPhase.STEP, 1)
    with Watchdog(own, 0.2) as dog, dog.watch(one):
        step(ranks, gpu)
        gpu.host = 1000.0
        while not ended.empty():  # results from before the clock moved
            ended.get()
        *_, last = [ended.get(timeout=60) for _ in range(3)]
        first, *lines = last.splitlines()
        assert first.startswith(
            "one_f_one_b: no process has made progress for 0.2 s: process 0 (pipeline"
        )
        assert lines == [
            "  on its GPU:",
            "  rank 0 #7   send_act 0.2   in step 1, waits for rank 1 to receive",
            "  rank 0 #8   recv_grad 0.1  in step 1, waits for rank 1 to send",
        ]


class _Busy:
    """Progress of a GPU whose driver does not answer."""

    def __init__(self) -> None:
        self.asked, self.over = 0, Event()

    def get_progress(self) -> None:
        self.asked += 1
        self.over.wait()


def test_a_driver_that_does_not_answer_holds_up_no_watchdog(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "GPU_ANSWER_TIMEOUT", 0.01)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    busy: Any = _Busy()
    asked = watchdog._Device(busy, torch.device("cuda"))
    assert [asked.query_step() for _ in range(3)] == [None] * 3
    assert busy.asked == 1  # only one thread waits
    busy.over.set()


def _over_processes(
    process: int, transport: type[EdgeGroups] | type[GroupedMessages], tp: int
) -> list[Any]:
    program = schedir.compile(
        one_f_one_b,
        PipelineShape(2, 4),
        tp=tp,
        tied_weights=True,
        clip_grad_norm=True,
        progress_model=transport.progress_model,
        overlap=True,
    )
    executor = gpt_executor(
        program, transport(program), execution=ExecutionOptions(record_timestamps=False)
    )
    progress, standing = GpuProgress(executor), []
    for _ in range(3):
        executor.step(*batch(4))
        standing.append(progress.get_progress())
    works = [work for each in progress.step_events[-1].works for work in each]
    return [standing, len(works), all(hasattr(work, "is_completed") for work in works)]


@pytest.mark.parametrize(("transport", "tp"), [(EdgeGroups, 2), (GroupedMessages, 1)])
def test_what_processes_have_started_is_asked(
    transport: type[EdgeGroups] | type[GroupedMessages], tp: int
) -> None:
    """Messages, gathers and reductions are queried, and grouped messages too."""
    asking = partial(_over_processes, transport=transport, tp=tp)
    for standing, count, asked in run(asking, 2 * tp):
        assert standing == [None] * 3 and count > 8 and asked
