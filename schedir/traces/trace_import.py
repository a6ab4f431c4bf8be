"""Convert the traces of all ranks into a program and a timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import ProgressModel
from schedir.compiler.compile import finish_lowering, lower
from schedir.errors import (
    CompletenessError,
    OrderError,
    ReductionError,
    SchedirError,
    ShapeError,
    TraceError,
)
from schedir.io.torch_csv import find_shape
from schedir.ir.dataflow import Dataflow
from schedir.ir.instruction_index import NO_POSITION, InstructionIndex
from schedir.ir.isa.instructions import (
    COMPUTE_OPS,
    OPCODE_BY_TEXT,
    RECV_OPS,
    SEND_OPS,
    TRANSFER_OPS,
)
from schedir.ir.program import JOINED_BIT, OP_SHIFT, STAGE_SHIFT, Program, Stream
from schedir.predict.recorded_timeline import build_timeline
from schedir.predict.timeline import Timeline
from schedir.traces.clock_alignment import align_clocks
from schedir.traces.instruction_times import ExecutedSpan
from schedir.traces.step_detection import ScheduleExecution, ScheduleRun, TracedProcesses
from schedir.traces.trace_files import find_trace_files, read_traces
from schedir.verify.check import check

Floats = NDArray[np.float64]

_STEP_OP: Final = OPCODE_BY_TEXT["step"]
# Progress models to try, the strictest first. The run did finish, so its program must finish under
# one of these models. "torch_lazy" is the last, because it depends on which communicators exist at
# the start of the step, and a trace does not record this.
_GPU_MODELS: Final[tuple[ProgressModel, ...]] = (
    "per_device",
    "per_direction",
    "per_pair",
    "per_edge",
    "torch_lazy",
)
_CPU_MODELS: Final[tuple[ProgressModel, ...]] = ("per_edge",)


@dataclass(frozen=True)
class ImportedRun:
    """A run that was read from traces.

    Args:
        timeline: The recorded timeline, with its program.
        step: The step that was read, in words.
        steps: The ProfilerSteps that could be read instead.
        notes: Facts that limit the accuracy or completeness of the timeline, in words.

    Example:
        >>> from schedir import PipelineShape, compile, schedules, simulate
        >>> from schedir.traces import ImportedRun
        >>> run = simulate(compile(schedules.gpipe, PipelineShape(ranks=2, microbatches=4)))
        >>> read = ImportedRun(
        ...     run, "ProfilerStep 3", steps=(2, 3), notes=("messages are not marked",)
        ... )
        >>> print(f"{read.step}: {read.timeline.bubble:.1%} idle; {read.notes[0]}")
        ProfilerStep 3: 20.0% idle; messages are not marked
    """

    timeline: Timeline
    step: str
    steps: tuple[int, ...]
    notes: tuple[str, ...]


def read_run(
    sources: Sequence[str | Path],
    *,
    step: int | None = None,
    progress_model: ProgressModel | None = None,
    name: str = "imported",
    program_attributes: Mapping[str, Any] | None = None,
    on_read: Callable[[Path], object] | None = None,
) -> ImportedRun:
    """Read the run of a pipeline from the traces of its ranks.

    If there are replicas, which have the same stages, only the replica that contains the smallest
    rank is read. A run of the schedule without operators in backwards is an evaluation, not a step.
    An evaluation without profiler ranges of backwards is read if nothing else can be read.

    Args:
        sources: Files, directories and patterns of traces of torch.profiler, in any order.
        step: The number of the ProfilerStep. By default the last complete step. If a step ran its
            schedule several times, the last of these runs is read.
        progress_model: The progress model of the transport. By default the strictest model under
            which the program finishes.
        name: The name of the program.
        program_attributes: Attributes of the program that traces do not contain, such as `tp`.
        on_read: A function that is called with each file after the file was read.

    Returns:
        The timeline, its step, and notes.

    Raises:
        UsageError: A source cannot be read.
        TraceError: A file is not a trace, or no file marks an instruction. Or the clocks cannot be
            aligned, or the step does not exist.
        SchedirError: The program is incomplete, see `check`.

    Example:
        >>> import json
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from schedir.traces import read_run
        >>> marked = {"PP:0F0": (0, 10), "PP:0F1": (15, 10), "PP:0B0": (30, 20), "PP:0B1": (50, 20)}
        >>> events = [
        ...     {"ph": "X", "cat": "user_annotation", "name": name, "tid": 1, "ts": ts, "dur": dur}
        ...     for name, (ts, dur) in marked.items()
        ... ]
        >>> with TemporaryDirectory() as folder:
        ...     _ = Path(folder, "rank0.json").write_text(json.dumps({"traceEvents": events}))
        ...     read_run([folder]).timeline
        <measured Timeline of imported: span 7e-05s, bubble 14.3%>
    """
    traces = read_traces(find_trace_files(sources), on_read)
    marked_traces = [trace for trace in traces if trace.instruction_ranges]
    notes = _note_unread(
        len(traces) - len(marked_traces), len(traces), "files without instructions"
    )
    processes = TracedProcesses(marked_traces)
    steps = processes.steps
    if step is not None and step not in steps:
        raise TraceError(
            f"the traces of the ranks do not all have ProfilerStep {step}",
            hint=f"they have {', '.join(map(str, steps))}"
            if steps
            else "leave out the step: these traces have no ProfilerStep",
        )
    first_error: SchedirError | None = None
    step_numbers: Sequence[int | None] = [step] if step is not None else steps[::-1] or [None]
    skip_notes: list[str] = []
    # Evaluations without ranges of backwards. They are read if no training step can be read.
    deferred: list[ScheduleExecution] = []
    runs = (execution for number in step_numbers for execution in processes.list_executions(number))
    for execution in chain(runs, deferred):
        skip_note = f"skipped {execution.description}: it is an evaluation"
        if skip_note in skip_notes:
            skip_notes.remove(skip_note)
        elif execution.is_evaluation:
            first_error = first_error or TraceError(
                f"{execution.description} is an evaluation: its backwards contain no operators"
            )
            skip_notes.append(skip_note)
            if not execution.has_backwards:
                deferred.append(execution)
            continue
        try:
            timeline, timeline_notes = _build_timeline(
                execution.ranks, name, program_attributes or {}, progress_model
            )
        except (CompletenessError, OrderError, ShapeError) as error:  # Traces may be cut off.
            first_error = first_error or error
            skip_notes.append(f"skipped {execution.description}: it is not complete")
            if isinstance(error, ReductionError) and not program_attributes:
                error.add_note(
                    "traces do not contain tp, dp, tied_weights and clip_grad_norm: set them"
                )
            continue
        num_traces = execution.num_replica_traces + len(execution.ranks)
        reason = "traces of replicas with the same stages as others"
        notes += [
            *skip_notes,
            *_note_unread(execution.num_replica_traces, num_traces, reason),
            *timeline_notes,
        ]
        if not execution.is_one_pipeline:
            notes.append(
                "no group of processes in the traces has each stage once: the processes may be of "
                "several replicas, which do not communicate with each other"
            )
        if "" in {run.trace.host for run in execution.ranks} and len(execution.ranks) > 1:
            notes.append("some traces have no host name: they are assumed to have the same clock")
        return ImportedRun(timeline, execution.description, tuple(steps), tuple(notes))
    assert first_error is not None
    first_error.add_note("no step in these traces is complete")
    if not steps:
        first_error.add_note(
            "hint: mark steps with profile(schedule=...), or begin the trace before a step"
        )
    raise first_error


def _note_unread(count: int, total: int, reason: str) -> list[str]:
    return [f"skipped {count} of {total} {reason}"] if count else []


def _build_timeline(
    ranks: list[ScheduleRun],
    name: str,
    program_attributes: Mapping[str, Any],
    progress_model: ProgressModel | None,
) -> tuple[Timeline, list[str]]:
    """Return the timeline of one run of a schedule, and notes about it."""
    notes = []
    is_gpu = any(run.trace.kernels is not None for run in ranks)
    if is_gpu and (cpu_paths := [p.trace.path for p in ranks if p.trace.kernels is None]):
        raise TraceError(
            f"{cpu_paths[0]} has no kernels, but other traces have kernels: its ranges have only "
            "the times when the host launched instructions"
        )
    marked_program = replace(_build_marked_program(ranks, name), **program_attributes)
    if marked_program.used_opcodes.isdisjoint(TRANSFER_OPS) and marked_program.shape.ranks > 1:
        notes.append(
            "messages have no ranges: schedir has added them in its own order, at times between "
            "the instructions around them"
        )
        compute_streams = tuple(
            Stream(s.words[np.isin(s.op, COMPUTE_OPS)]) for s in marked_program.streams
        )
        program = lower(replace(marked_program, name=f"{name}-lowered", streams=compute_streams))
    else:
        program = (
            marked_program
            if _STEP_OP in marked_program.used_opcodes
            else finish_lowering(marked_program)
        )
    program, progress_model = _check_under_models(
        program,
        (progress_model,) if progress_model else _GPU_MODELS if is_gpu else _CPU_MODELS,
        is_gpu,
    )
    start, end = _instruction_times(program, ranks)
    error = _align_host_clocks(program, [run.trace.host for run in ranks], start, end)
    if len({run.trace.host for run in ranks}) > 1:
        notes.append(f"clocks of hosts are aligned by their messages, to within {error:.2g} s")
    _fill_missing_times(program, start, end)
    timeline = build_timeline(program, start, end, progress_model, blocking_hosts=not is_gpu)
    wait_time = sum(span.wait_time for run in ranks for span in run.spans) / 1e9
    if wait_time:
        notes.append(
            f"{wait_time / (wait_time + timeline.busy.sum()):.1%} of the time in forwards and "
            "backwards was a wait for messages: it counts as idle"
        )
    notes += _note_missing_times([span for run in ranks for span in run.spans], is_gpu)
    return replace(timeline, clock_error=error), notes


def _note_missing_times(spans: Sequence[ExecutedSpan], is_gpu: bool) -> list[str]:
    """Return notes about messages, forwards and backwards that have no times in the traces."""
    num_unseen = sum(span.end is None for span in spans)
    if not is_gpu:
        return [
            f"the arrival times of {num_unseen} messages are unknown: if a forward or backward "
            "waited for them inside its range, this wait counts as compute"
        ] * bool(num_unseen)
    num_empty = sum(s.end == s.start for s in spans if s.actions[0].op in COMPUTE_OPS)
    return [
        f"{num_unseen} messages have no kernel: they are assumed to have arrived before they were "
        "needed"
    ] * bool(num_unseen) + [
        f"{num_empty} forwards and backwards have no kernel: they take no time"
    ] * bool(num_empty)


# ---------------------------------------------------------------- the program


def _encode_stream_words(run: ScheduleRun) -> list[int]:
    """Return the instructions of a rank that have profiler ranges, encoded as in a `Stream`."""
    return [
        int(action.op) << OP_SHIFT
        | action.stage << STAGE_SHIFT
        | action.mb
        | (JOINED_BIT if k or span.is_joined else 0)
        for span in run.spans
        for k, action in enumerate(span.actions)
    ]


def _build_marked_program(ranks: list[ScheduleRun], name: str) -> Program:
    """Return a program of only the instructions that have profiler ranges."""
    rank_of = {stage: rank for rank, run in enumerate(ranks) for stage in run.stages}
    stages = max(rank_of) + 1
    if missing := [stage for stage in range(stages) if stage not in rank_of]:
        raise TraceError(
            f"the traces have stage {stages - 1}, but not stage {missing[0]}",
            hint="is the trace of a rank missing?",
        )
    actions = [a for run in ranks for span in run.spans for a in span.actions]
    microbatches = max(action.mb for action in actions if action.op in COMPUTE_OPS) + 1
    shape = find_shape(len(ranks), microbatches, [rank_of[stage] for stage in range(stages)])
    streams = tuple(Stream(np.array(_encode_stream_words(run), np.int64)) for run in ranks)
    return Program(name, shape, streams)


def _check_under_models(
    program: Program, models: Sequence[ProgressModel], is_gpu: bool
) -> tuple[Program, ProgressModel]:
    """Return the checked program, and the first progress model under which it finishes."""
    error: SchedirError | None = None
    for model in models:
        try:
            return check(program, model, blocking_hosts=not is_gpu), model
        except CompletenessError:
            raise
        except SchedirError as refusal:
            error = refusal
    assert error is not None
    raise error


# ---------------------------------------------------------------- the times of instructions


def _instruction_times(program: Program, ranks: list[ScheduleRun]) -> tuple[Floats, Floats]:
    """Return the start and the end of each instruction, in seconds. NaN means not recorded."""
    first_start = min(span.start for run in ranks for span in run.spans)
    start, end = np.full((2, len(program)), np.nan)
    for stream, run, offset in zip(program.streams, ranks, program.offsets, strict=False):
        words = stream.words & ~np.int64(JOINED_BIT)
        order = np.argsort(words, kind="stable")
        marked_words = np.array(_encode_stream_words(run), np.int64) & ~np.int64(JOINED_BIT)
        positions = np.searchsorted(words, marked_words, sorter=order)
        is_found = positions < len(words)
        is_found[is_found] = words[order[positions[is_found]]] == marked_words[is_found]
        positions = order[positions[is_found]] + offset
        sizes = [len(span.actions) for span in run.spans]
        for times, values in (
            (start, [span.start - first_start for span in run.spans]),
            (end, [np.nan if s.end is None else s.end - first_start for s in run.spans]),
        ):
            times[positions] = np.repeat(values, sizes)[is_found] / 1e9
    return start, end


def _align_host_clocks(program: Program, hosts: list[str], start: Floats, end: Floats) -> float:
    """Align the times of all hosts in place, and return the remaining error in seconds."""
    names = [*dict.fromkeys(hosts)]
    if len(names) == 1:
        return 0.0
    index = InstructionIndex.from_program(program)
    graph = Graph.from_program(program, "per_edge")
    host = np.array([names.index(name) for name in hosts])[index.rank]
    sends = np.flatnonzero(index.is_op(SEND_OPS))
    sends = sends[graph.partner[sends] != NO_POSITION]
    receives = graph.partner[sends]
    min_send_start, max_receive_end = start.copy(), end.copy()
    # A message without times was sent after the instruction that produces its value had started.
    # The message arrived before the instruction that uses the value ended.
    for giver in Dataflow.from_program(program).givers:
        taker = np.flatnonzero(giver != NO_POSITION)
        unmarked_sends = taker[np.isnan(start[taker]) & index.is_op(SEND_OPS)[taker]]
        min_send_start[unmarked_sends] = np.fmax(
            min_send_start[unmarked_sends], start[giver[unmarked_sends]]
        )
        unmarked_uses = taker[np.isnan(end[giver[taker]]) & index.is_op(RECV_OPS)[giver[taker]]]
        np.fmin.at(max_receive_end, giver[unmarked_uses], end[unmarked_uses])
    transfer_times = max_receive_end[receives] - min_send_start[sends]
    is_between_hosts = (host[sends] != host[receives]) & np.isfinite(transfer_times)
    offsets = align_clocks(
        names,
        host[sends][is_between_hosts],
        host[receives][is_between_hosts],
        transfer_times[is_between_hosts],
    )
    for times in (start, end):
        times -= offsets.offsets[host]
    return offsets.error


def _fill_missing_times(program: Program, start: Floats, end: Floats) -> None:
    """Fill in the times that traces do not contain, within the limits that other times set.

    An instruction without a profiler range starts when all instructions before it on its rank have
    ended, and takes no time. A message without a recorded arrival is assumed to arrive when its
    value is used.
    """
    index = InstructionIndex.from_program(program)
    dataflow = Dataflow.from_program(program)
    has_no_start = np.isnan(start)
    for lo, hi in pairwise(program.offsets.tolist()):
        is_unmarked, is_compute = has_no_start[lo:hi], index.is_op(COMPUTE_OPS)[lo:hi]
        first_start = start[lo:hi][is_compute].min()
        ends = np.where(index.is_op(TRANSFER_OPS)[lo:hi] | is_unmarked, first_start, end[lo:hi])
        start[lo:hi][is_unmarked] = np.maximum.accumulate(ends)[is_unmarked]
    has_no_end = np.isnan(end)
    end[has_no_end] = start[has_no_end]
    is_unseen_receive = has_no_end & index.is_op(RECV_OPS)
    for giver in dataflow.givers:
        taker = np.flatnonzero(giver != NO_POSITION)
        taker = taker[is_unseen_receive[giver[taker]]]
        np.maximum.at(end, giver[taker], start[taker])
