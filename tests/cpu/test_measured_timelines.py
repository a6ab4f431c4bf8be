"""Tests of measured timelines: one span per group, and all times on the clock of process 0."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import schedir
from schedir import PipelineShape
from schedir.errors import ExecutionError, ModelError
from schedir.io.profiler_range_names import format_range_name
from schedir.ir.instruction_index import InstructionIndex
from schedir.ir.isa.instructions import Opcode
from schedir.ir.program import Program
from schedir.models import gpt
from schedir.predict.recorded_timeline import build_timeline
from schedir.predict.timeline import Timeline
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.recording import clock_sync as runtime_clock
from schedir.runtime.recording import recorder as runtime_stamps
from schedir.runtime.recording.measured_timeline import gather_timeline
from schedir.runtime.recording.recorder import read_step_times
from schedir.schedules import one_f_one_b
from schedir.transports.gloo import GlooTransport
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import BOUNDARY, gpt_stages, make_batch, paired_1f1b

PROGRAM = schedir.compile(
    one_f_one_b, PipelineShape(2, 3),
    progress_model="per_edge", tied_weights=True, clip_grad_norm=True,
)  # fmt: skip


def _make_timeline(program: Program, **delays: float) -> Timeline:
    """Return a Timeline in which instruction k runs from k to k + 0.5, plus its delay."""
    start = np.arange(len(program), dtype=float)
    end = start + 0.5
    index = InstructionIndex(program)
    for position in range(len(program)):
        instr = str(index.locate(position)[2]).replace(" ", "_").replace(".", "_")
        start[position] += delays.get(instr, 0.0)
        end[position] += delays.get(instr, 0.0)
    return build_timeline(program, start, end, "per_edge")


def test_grouped_messages_have_one_common_span() -> None:
    program = schedir.compile(paired_1f1b, PipelineShape(2, 4), progress_model="per_edge")
    timeline = _make_timeline(program)
    second = np.flatnonzero(program.words >> 56)
    assert len(second) > 0
    start, end = timeline.spans["start"], timeline.spans["end"]
    for k in second.tolist():
        assert start[k] == start[k - 1] == k - 1
        assert end[k] == end[k - 1] == k + 0.5


def test_message_starts_when_both_ranks_have_started() -> None:
    program = schedir.compile(one_f_one_b, PipelineShape(2, 2), progress_model="per_edge")
    for delays in ({"send_act_0_1": 100.0}, {"recv_act_1_1": 100.0}):
        spans = _make_timeline(program, **delays).spans
        act = (spans["op"] == Opcode.SendAct) | (spans["op"] == Opcode.RecvAct)
        send, recv = spans[act & (spans["mb"] == 1)]
        assert send["start"] == recv["start"] >= 100
        assert send["end"] == recv["end"] >= send["start"]


def _run_with_shifted_clock(rank: int) -> Any:
    """Run a step. The clock of rank 1 is 1000 s ahead, as on another machine."""

    def clock() -> float:
        return time.perf_counter() + 1000 * rank

    for module in (runtime_stamps, runtime_clock):
        module.perf_counter = clock  # type: ignore[attr-defined]
    runtime_clock.socket.gethostname = lambda: f"host{rank}"  # type: ignore[attr-defined]
    transport = GlooTransport(PROGRAM, timeout=77.0)
    stage = {rank: gpt_stages(2)[rank]}
    executor = Executor(PROGRAM, rank, stage, transport, loss=gpt.loss, boundary=BOUNDARY)
    executor.step(*make_batch(3))
    (times,), _ = read_step_times([executor.timestamps])
    reductions = {
        i.op: (times.start[k] - 1000 * rank, times.end[k] - 1000 * rank)
        for k, i in enumerate(executor.state.stream)
        if i.op in (Opcode.ReduceTied, Opcode.ReduceNorm)
    }
    timeouts = [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for group in (transport.pipeline_group, transport.groups["model"], transport.groups[0, 1])
    ]
    timeline = gather_timeline(executor, transport)
    return timeline, reductions, timeouts, runtime_clock.measure_clock_offset()


def test_gathered_timeline_corrects_clock_offsets() -> None:
    results = run(_run_with_shifted_clock, 2)
    timeline = results[0][0]
    assert results[1][0] is None
    # With the wrong sign of the offset the ranks would be 2000 s apart, and without it 1000 s.
    assert 0 < timeline.span < 500
    for op in (Opcode.ReduceTied, Opcode.ReduceNorm):
        last_start = max(reductions[op][0] for _, reductions, *_ in results)
        assert all(reductions[op][1] >= last_start for _, reductions, *_ in results), op
    assert [timeouts for *_, timeouts, _ in results] == [[77.0] * 3] * 2
    # The error of the offset is within its stated error, which is not 0.
    assert results[0][3] == (0, 0)
    offset, error = results[1][3]
    assert abs(offset - 1000) <= error < 1
    assert 0 < timeline.clock_error < 1


def _make_ranks(record: bool = True) -> InProcessExecutor:
    execution = ExecutionOptions(record_timestamps=record)
    return InProcessExecutor(
        PROGRAM, gpt_stages(2, True), loss=gpt.loss, boundary=BOUNDARY, execution=execution
    )


def test_steps_without_recording_read_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    without_recorder, disabled, enabled = _make_ranks(record=False), _make_ranks(), _make_ranks()
    for rank in disabled.executors:
        rank.record_timestamps = False

    def fail_to_read_clock() -> float:
        raise AssertionError("the clock must not be read")

    monkeypatch.setattr(runtime_stamps, "perf_counter", fail_to_read_clock)
    for ranks in (without_recorder, disabled):
        ranks.step(*make_batch(3))
        with pytest.raises(ModelError, match="no step has been recorded"):
            ranks.timeline()
    with pytest.raises(ExecutionError, match="the clock must not be read"):
        enabled.step(*make_batch(3))


def test_profiler_ranges_name_instructions() -> None:
    ranks = _make_ranks()
    ranks.step(*make_batch(3))
    with torch.profiler.profile(acc_events=True) as profile:  # without acc_events torch 2.11 warns
        ranks.step(*make_batch(3))
    count = {event.key: event.count for event in profile.key_averages()}
    named = [format_range_name(instr) for stream in ranks.program.streams for instr in stream]
    assert {name: n for name, n in count.items() if name.startswith("PP:")} == Counter(named)
    assert count["PP:0F2"] == count["PP:1SEND_B0"] == count["PP:1REDUCE_GRAD"] == 1
    assert count["PP:step"] == count["PP:reduce_norm"] == 2
