"""Tests of recorded Timelines of virtual ranks, on this CPU and on a virtual GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import schedir
from schedir import Costs, PipelineShape, Timeline
from schedir.analysis.dependency_graph import Graph
from schedir.ir.isa.instructions import SEND_OPS, Lane, Opcode
from schedir.ir.program import JOINED_BIT, Program, Stream
from schedir.passes.pass_types import BufferSharing
from schedir.predict.bubble_causes import IdleCause, idleness, sum_by_cause
from schedir.predict.calibrate import calibrate
from schedir.runtime import in_process
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.recording.recorder import (
    EVENT_RESOLUTION,
    EventTimestamps,
    HostTimestamps,
    RecordedTransport,
    read_step_times,
)
from schedir.schedules import dualpipe, dualpipe_v, gpipe, interleaved, one_f_one_b
from schedir.schedules.schedule_algebra import Schedule
from schedir.testing import tiny_model
from schedir.transports.in_process import mailbox
from schedir.transports.in_process.mailbox import Mailbox, MailboxHub
from schedir.transports.transport import Work
from tests.cases import cases
from tests.cpu.virtual_gpu import (
    VirtualGPU,
    assert_runs_as_predicted,
    charge_instructions,
    charge_messages,
    install_virtual_gpu,
)
from tests.laws import ZOO, find_min_microbatches, make_shape
from tests.timeline_legality import find_early_instructions

BOUNDARY = Boundary((2, tiny_model.WIDTH), torch.float64)
PAIRED = (dualpipe, dualpipe_v)


def make_executor(program: Program) -> InProcessExecutor:
    stages = tiny_model.make_tiny_stages(program.shape.stages)
    return InProcessExecutor(program, stages, loss=tiny_model.squared_error, boundary=BOUNDARY)


def make_min_shape(schedule: Schedule, ranks: int = 2) -> PipelineShape:
    return make_shape(schedule, ranks, max(ranks + 1, find_min_microbatches(schedule, ranks)))


@pytest.mark.parametrize(("seed", "count"), cases([(1, 2)], [(None, 4), (1, 4), (2, 4)]))
def test_recorded_cpu_timeline_is_legal(seed: int | None, count: int) -> None:
    """The schedules run on `count` ranks, in the order of `seed`."""
    for name, schedule in ZOO.items():
        shape = make_min_shape(schedule, count)
        program = schedir.compile(
            schedule, shape, progress_model="per_edge", overlap=True, buffer_sharing="minimal"
        )
        ranks = make_executor(program)
        ranks.step(*tiny_model.make_batch(shape.microbatches), order_seed=seed)
        timeline = ranks.timeline()
        assert (timeline.kind, timeline.unit, timeline.start_time) == ("measured", "s", 0.0)
        for k, stream in enumerate(program.streams):
            recorded = [timeline.instruction_at(k, n)[0] for n in range(len(stream))]
            assert recorded == [*stream]
        compute = timeline.spans["lane"] == Lane.COMPUTE
        assert (timeline.spans["end"] > timeline.spans["start"])[compute].all()
        if schedule not in PAIRED:  # a pair may begin before all its inputs exist
            assert not find_early_instructions(timeline), name
        assert not timeline.causality_warning, name


def test_too_early_detects_violated_dependency() -> None:
    program = schedir.compile(one_f_one_b, PipelineShape(2, 3), progress_model="per_edge")
    timeline = schedir.simulate(program, Costs(send=1.0), progress_model="per_edge")
    assert not find_early_instructions(timeline)
    spans = timeline.spans.copy()
    spans["start"][spans["start"].argmax()] -= 1e-3
    assert find_early_instructions(replace(timeline, spans=spans))


def run_on_virtual_gpu(
    program: Program, costs: Costs, host: float = 0.0
) -> tuple[Timeline, InProcessExecutor, VirtualGPU]:
    """Return the Timeline of the second step on a virtual GPU, the ranks, and the GPU.

    `host` is the time of the host per instruction.
    """
    with pytest.MonkeyPatch.context() as patch:
        gpu = install_virtual_gpu(patch)
        ranks = make_executor(program)
        charge_instructions(ranks, gpu, costs, host)
        for _ in range(2):
            gpu.host = gpu.over
            with charge_messages(gpu, costs):
                ranks.step(*tiny_model.make_batch(program.shape.microbatches))
            assert not gpu.forked
        return ranks.timeline(), ranks, gpu


@st.composite
def draw_programs(draw: st.DrawFn) -> tuple[Program, Costs]:
    schedule = draw(st.sampled_from([s for s in ZOO.values() if s not in PAIRED]))
    shape = make_min_shape(schedule)

    def per_stage() -> tuple[float, ...]:
        times = st.lists(st.integers(1, 5), min_size=shape.stages, max_size=shape.stages)
        return tuple(map(float, draw(times)))

    costs = Costs(F=per_stage(), I=per_stage(), W=per_stage(), send=float(draw(st.integers(0, 3))))
    slots: BufferSharing | None = draw(st.sampled_from([None, "minimal"]))
    program = schedir.compile(
        schedule, shape, progress_model="per_edge", costs=costs, buffer_sharing=slots
    )
    return program, costs


@settings(max_examples=25)
@given(draw_programs())
def test_gpu_streams_run_no_earlier_than_predicted(case: tuple[Program, Costs]) -> None:
    program, costs = case
    timeline, _, _ = run_on_virtual_gpu(program, costs)
    predicted = schedir.simulate(program, costs, progress_model="per_edge")
    assert not find_early_instructions(timeline, 1e-9)
    assert (timeline.spans["end"] >= predicted.spans["end"] - 1e-9).all()
    compute = timeline.spans["lane"] == Lane.COMPUTE
    durations = (timeline.spans["end"] - timeline.spans["start"])[compute]
    predicted_durations = (predicted.spans["end"] - predicted.spans["start"])[compute]
    np.testing.assert_allclose(durations, predicted_durations, atol=1e-9)


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b, interleaved])
def test_early_receives_make_streams_run_as_predicted(schedule: Schedule) -> None:
    costs = Costs(F=2.0, I=2.0, W=1.0, send=0.25)
    program = schedir.compile(
        schedule, make_min_shape(schedule, 4), progress_model="per_edge", costs=costs, overlap=True
    )
    timeline, _, _ = run_on_virtual_gpu(program, costs)
    assert_runs_as_predicted(timeline, costs)
    calibrated = schedir.simulate(program, calibrate(timeline), progress_model="per_edge")
    assert calibrated.span == pytest.approx(timeline.span)


def test_slow_host_causes_host_idle_time() -> None:
    costs = Costs(F=1.0, B=2.0)
    program = schedir.compile(gpipe, PipelineShape(1, 8), progress_model="per_edge")
    fast_timeline, _, _ = run_on_virtual_gpu(program, costs, host=0.25)
    slow_timeline, _, _ = run_on_virtual_gpu(program, costs, host=3.0)
    assert sum_by_cause(idleness(fast_timeline), 1)[0, IdleCause.HOST] == 0
    # Each instruction waits for the host as long as the previous one was too short to hide it.
    assert sum_by_cause(idleness(slow_timeline), 1)[0, IdleCause.HOST] == pytest.approx(
        7 * 2 + 2 + 7 * 1 + 4
    )


def test_message_ends_at_its_arrival() -> None:
    costs = Costs(F=(1.0, 10.0), B=2.0, send=0.5)
    program = schedir.compile(gpipe, PipelineShape(2, 3), progress_model="per_edge", overlap=True)
    timeline, _, _ = run_on_virtual_gpu(program, costs)
    sends = np.flatnonzero(np.isin(timeline.spans["op"], SEND_OPS))
    send_spans = timeline.spans[sends[:2]]
    # The second message arrives long before the forward that uses it.
    np.testing.assert_allclose(send_spans["end"], [1.5, 2.5])


class EndedWork:
    """Completed work without a query: it can only be waited for."""

    def wait(self) -> None:
        pass


class SlowMailbox(Mailbox):
    """A mailbox whose collectives can only be waited for."""

    def start_collective(self, *_: Any) -> Work:
        return EndedWork()


def test_wait_within_instruction_extends_its_end_time() -> None:
    stamps, tensor = HostTimestamps(1), torch.zeros(1)
    transport = RecordedTransport(SlowMailbox(MailboxHub(), 0, {}, "per_edge"), stamps)
    stamps.begin_instruction(0)
    for _ in range(2):
        work = transport.start_collective("all_reduce", "model", tensor, tensor)
        stamps.end_times[0] = 0.0
        work.wait()
        assert stamps.end_times[0] > 0


def test_events_are_created_before_step() -> None:
    program = schedir.compile(
        one_f_one_b, PipelineShape(2, 3), progress_model="per_edge", clip_grad_norm=True
    )
    # The virtual GPU refuses events that are created later.
    _, _, gpu = run_on_virtual_gpu(program, Costs())
    assert gpu.timed >= 2 * len(program)


class LibraryWork:
    """Work on a stream of a library such as NCCL, which can only be waited for."""

    def __init__(self, gpu: VirtualGPU, over: float) -> None:
        self.gpu, self.over = gpu, over

    def wait(self) -> None:
        self.gpu.stream.now = max(self.gpu.stream.now, self.over)


class LibraryMailbox(Mailbox):
    """A mailbox whose messages arrive at 3, 4, 5, and so on."""

    def __init__(self, gpu: VirtualGPU) -> None:
        super().__init__(MailboxHub(), 1, {}, "per_edge")
        self.gpu, self.count = gpu, 0

    def recv(self, tensor: torch.Tensor, peer: int, lane: Lane) -> Work:
        self.count += 1
        return LibraryWork(self.gpu, 2.0 + self.count)


def test_library_work_is_timed_on_separate_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install_virtual_gpu(monkeypatch)
    program = schedir.compile(gpipe, PipelineShape(2, 4), progress_model="per_edge")
    sender, receiver = program.streams
    words = receiver.words[np.argsort(receiver.op != Opcode.RecvAct, kind="stable")].copy()
    words[2] |= JOINED_BIT  # all four receives come first, and two of them are a group
    program = replace(program, streams=(sender, Stream(words)))
    stamps = EventTimestamps(program, 1, "per_edge", torch.device("cpu"))
    transport = RecordedTransport(LibraryMailbox(gpu), stamps)

    def receive(k: int) -> None:
        stamps.begin_instruction(k)
        transport.recv(torch.zeros(1), 0, Lane.ACT)
        stamps.end_instruction(k)

    receive(0)
    transport.start_group()
    receive(1)
    receive(2)
    transport.end_group()
    receive(3)
    assert gpu.stream.now == 0  # no stream has waited
    assert gpu.forked
    stamps.end_step()
    assert gpu.stream.now == 6 and not gpu.forked
    (times,), error = read_step_times([stamps])
    assert times.end[:4].tolist() == [3, 4, 5, 6]
    assert times.start[:4].tolist() == [0, 3, 3, 5]  # groups run one after the other
    assert error == EVENT_RESOLUTION


@pytest.mark.parametrize("schedule", ZOO.values(), ids=ZOO)
def test_round_robin_keeps_order_of_each_stream(schedule: Schedule) -> None:
    """Work must be issued after the work that it waits for: a stream cannot wait for later work."""
    shape = make_min_shape(schedule)
    program = schedir.compile(
        schedule, shape, progress_model="per_edge", tied_weights=True, clip_grad_norm=True,
        overlap=True,
    )  # fmt: skip
    order = list(in_process._iterate_round_robin(Graph(program, "per_edge")))
    assert len(order) == len(program)
    for rank, stream in enumerate(program.streams):
        assert [k for r, k in order if r == rank] == [*range(len(stream))]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_all_reduce_sum_is_independent_of_arrival_order(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank starts both of its all-reduces before the next rank starts its first."""
    sums = set()
    for order in permutations(range(4)):
        if on_gpu:
            install_virtual_gpu(monkeypatch)
        ranks = mailbox.make_mailboxes(
            schedir.compile(gpipe, PipelineShape(4, 1)), "per_edge", False, []
        )
        first = [torch.tensor(part) for part in (1e16, 1.0, -1e16, 3.0)]
        second = [torch.tensor(float(rank)) for rank in range(4)]
        for rank in order:
            for parts in (first, second):
                ranks[rank].start_collective("all_reduce", "model", parts[rank], parts[rank])
        sums |= {float(part) for part in first}
        assert {float(part) for part in second} == {6.0}
    assert len(sums) == 1
