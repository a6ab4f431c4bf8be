"""Find the pipeline's ranks and steps in traces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from schedir.errors import TraceError
from schedir.io.profiler_range_names import is_torch_range
from schedir.ir.isa.instructions import BACKWARD_OPS, COMPUTE_OPS
from schedir.traces.instruction_times import ExecutedSpan, split_repetitions
from schedir.traces.kineto import ProfilerRange, Trace

_ALL_TIME: Final = (-(2**63), 2**63 - 1)
_ORDINALS: Final = ("first", "second", "third")


class ScheduleRun(NamedTuple):
    """One run of the schedule on a pipeline rank.

    Attributes:
        trace: The trace of the rank.
        spans: The instructions with their times, in the order of issue.
    """

    trace: Trace
    spans: list[ExecutedSpan]

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that the rank computes, ascending."""
        actions = (action for span in self.spans for action in span.actions)
        return tuple(sorted({action.stage for action in actions if action.op in COMPUTE_OPS}))

    @property
    def has_only_forwards(self) -> bool:
        """Return whether operators ran in forwards, and none in backwards.

        In an evaluation, torch's runtime also marks backwards, but these contain no operators.
        """
        has_operators: dict[bool, bool] = {}
        for span in self.spans:
            if span.actions[0].op in COMPUTE_OPS:
                is_backward = all(action.op in BACKWARD_OPS for action in span.actions)
                has_operators[is_backward] = (
                    has_operators.get(is_backward, False) or span.has_operators
                )
        return has_operators.get(False, False) and not has_operators.get(True, False)


class ScheduleExecution(NamedTuple):
    """One run of the schedule on all ranks of a pipeline.

    Attributes:
        description: The step, in words.
        ranks: The runs of the ranks, in the order of their stages.
        num_replica_traces: The number of traces that were left out, because they are of other
            replicas.
        is_one_pipeline: True if the ranks surely are one pipeline. False if they may be processes
            of different replicas.
    """

    description: str
    ranks: list[ScheduleRun]
    num_replica_traces: int
    is_one_pipeline: bool

    @property
    def is_evaluation(self) -> bool:
        """Return whether every rank ran operators in forwards only."""
        return all(run.has_only_forwards for run in self.ranks)

    @property
    def has_backwards(self) -> bool:
        """Return whether any trace has a range of a backward."""
        spans = (span for run in self.ranks for span in run.spans)
        return any(action.op in BACKWARD_OPS for span in spans for action in span.actions)


class TracedProcesses:
    """The traces of a run, grouped by process and by step.

    A process may have several files, each of a different time. If the rank of any file is unknown,
    each file is assumed to be of a separate process.

    Args:
        traces: The traces.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        traces_by_process: dict[int, list[Trace]] = defaultdict(list)
        has_all_ranks = all(trace.rank is not None for trace in traces)
        for k, trace in enumerate(traces):
            process = trace.rank if has_all_ranks and trace.rank is not None else k
            traces_by_process[process].append(trace)
        self.traces_by_process = dict(sorted(traces_by_process.items()))
        groups = {group for trace in traces for group in trace.groups} if has_all_ranks else set()
        # Only groups whose ranks all have a trace, sorted by their ranks.
        self.groups = sorted(group for group in groups if self.traces_by_process.keys() >= {*group})

    @property
    def steps(self) -> list[int]:
        """The numbers of the ProfilerSteps in the traces of all processes.

        Empty if no trace has a ProfilerStep.

        Raises:
            TraceError: There are ProfilerSteps, but none is in the traces of all processes.
        """
        steps_of_process = [
            {step for trace in traces for step in trace.steps}
            for traces in self.traces_by_process.values()
        ]
        common_steps = sorted(set.intersection(*steps_of_process))
        if not common_steps and any(steps_of_process):
            fewest_steps = min(steps_of_process, key=len)
            other_steps = (
                steps for steps in steps_of_process if not fewest_steps or not fewest_steps <= steps
            )
            raise TraceError(
                "the traces of the ranks have no ProfilerStep in common",
                hint=" and ".join(
                    f"one trace has {sorted(steps) or 'none'}"
                    for steps in (fewest_steps, next(other_steps))
                ),
            )
        return common_steps

    def _infer_stages(self) -> dict[int, int]:
        """Return the stage of each process, for ranges that do not name a stage.

        The stage is the position of the process in a process group. In forwards, the first process
        of this group only sends, the last process only receives, and the others do both. Without
        such a group, the stages are numbered in the order of processes. If the traces have
        operators but no messages, all stages are 0.
        """
        directions = {
            number: _has_receives_and_sends(traces)
            for number, traces in self.traces_by_process.items()
        }
        stage_of_process: dict[int, int] = {}
        for group in (tuple(self.traces_by_process), *self.groups):
            last_stage = len(group) - 1
            if last_stage and all(
                directions[n] == (k > 0, k < last_stage) for k, n in enumerate(group)
            ):
                for k, number in enumerate(group):
                    stage_of_process.setdefault(number, k)
        if len(stage_of_process) == len(self.traces_by_process):
            return stage_of_process
        all_traces = [trace for traces in self.traces_by_process.values() for trace in traces]
        has_no_messages = all(trace.op_end_times and not trace.messages for trace in all_traces)
        return {
            number: 0 if has_no_messages else k for k, number in enumerate(self.traces_by_process)
        }

    def _choose_pipeline(
        self, stages_of_process: dict[int, tuple[int, ...]]
    ) -> tuple[dict[tuple[int, ...], int], bool]:
        """Return one process for each set of stages, and a flag.

        The flag is True if these processes surely form one pipeline.
        """
        first_process: dict[tuple[int, ...], int] = {}
        for number, stages in stages_of_process.items():
            first_process.setdefault(stages, number)
        if len(first_process) == len(stages_of_process) or len(first_process) == 1:
            return first_process, True
        for group in self.groups:
            process_of_stages = {stages_of_process[number]: number for number in group}
            if (
                len(process_of_stages) == len(group)
                and process_of_stages.keys() == first_process.keys()
            ):
                return process_of_stages, True
        return first_process, False

    def list_executions(self, step: int | None) -> Iterator[ScheduleExecution]:
        """Yield each run of the schedule in a step, the last one first.

        Args:
            step: The number of the ProfilerStep. None means the complete traces.

        Raises:
            TraceError: Ranks ran the schedule a different number of times. Or two traces of one
                process contain the step, or a process computed nothing in it.
        """
        stages = self._infer_stages()
        runs_by_process = dict[int, list[ScheduleRun]]()
        stages_of_process: dict[int, tuple[int, ...]] = {}
        for number, traces in self.traces_by_process.items():
            runs = [ScheduleRun(*run) for run in self._split_runs(traces, step, stages[number])]
            stages_of_process[number] = tuple(
                sorted({stage for run in runs for stage in run.stages})
            )
            if not stages_of_process[number]:
                raise TraceError(
                    f"{traces[0].path} contains no forward and no backward in this step"
                )
            runs_by_process[number] = runs
        process_of_stages, is_one_pipeline = self._choose_pipeline(stages_of_process)
        ranks = {stages: runs_by_process[number] for stages, number in process_of_stages.items()}
        fewest_runs, most_runs = (f(ranks.values(), key=len) for f in (min, max))
        if len(fewest_runs) != len(most_runs):
            raise TraceError(
                f"{most_runs[0].trace.path} contains {len(most_runs)} runs of the schedule, but "
                f"{fewest_runs[0].trace.path} contains {len(fewest_runs)}",
                hint=""
                if step is not None
                else "mark steps with profile(schedule=...) and profiler.step()",
            )
        description = "the complete trace" if step is None else f"ProfilerStep {step}"
        for k in reversed(range(len(most_runs))):
            ordinal = _ORDINALS[k] if k < len(_ORDINALS) else f"{k + 1}th"
            occurrence = f", the {ordinal} of {len(most_runs)} times that it ran the schedule" * (
                len(most_runs) > 1
            )
            pipeline = [ranks[stages_of_process][k] for stages_of_process in sorted(ranks)]
            yield ScheduleExecution(
                description + occurrence,
                pipeline,
                len(self.traces_by_process) - len(ranks),
                is_one_pipeline,
            )

    def _split_runs(
        self, traces: list[Trace], step: int | None, default_stage: int
    ) -> Iterator[tuple[Trace, list[ExecutedSpan]]]:
        """Yield the trace and the spans of one process, for each time that it ran its schedule."""
        step_traces = [trace for trace in traces if step is None or step in trace.steps]
        if len(step_traces) > 1:
            step_text = "" if step is None else f" and have ProfilerStep {step}"
            raise TraceError(
                f"{step_traces[0].path} and {step_traces[1].path} are traces of the same "
                f"rank{step_text}"
            )
        (trace,) = step_traces
        for spans in split_repetitions(
            trace, _ALL_TIME if step is None else trace.steps[step], default_stage
        ):
            yield trace, spans


def _has_receives_and_sends(traces: Sequence[Trace]) -> tuple[bool, bool]:
    """Return whether a process receives in its forwards, and whether it sends in them.

    Only ranges that do not name a stage count as forwards.
    """
    forwards = [
        profiler_range
        for trace in traces
        for profiler_range in trace.instruction_ranges
        if not is_torch_range(profiler_range.name)
    ]
    forwards = [
        profiler_range for profiler_range in forwards if profiler_range.name.startswith("Forward")
    ]
    kinds = {
        message.name
        for trace in traces
        for message in trace.messages
        if _is_inside(message, forwards)
    }
    return "recv" in kinds, "send" in kinds


def _is_inside(message: ProfilerRange, ranges: Sequence[ProfilerRange]) -> bool:
    return any(r.thread == message.thread and r.start <= message.start < r.end for r in ranges)
