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
        actions = (action for seen in self.spans for action in seen.actions)
        return tuple(sorted({action.stage for action in actions if action.op in COMPUTE_OPS}))

    @property
    def has_only_forwards(self) -> bool:
        """Return whether operators ran in forwards, and none in backwards.

        In an evaluation, torch's runtime also marks backwards, but these contain no operators.
        """
        ran: dict[bool, bool] = {}
        for seen in self.spans:
            if seen.actions[0].op in COMPUTE_OPS:
                is_backward = all(action.op in BACKWARD_OPS for action in seen.actions)
                ran[is_backward] = ran.get(is_backward, False) or seen.has_operators
        return ran.get(False, False) and not ran.get(True, False)


class ScheduleExecution(NamedTuple):
    """One run of the schedule on all ranks of a pipeline.

    Attributes:
        description: The step, in words.
        ranks: The runs of the ranks, in the order of their stages.
        num_replica_traces: The number of traces of replicas that were left out.
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
        return all(part.has_only_forwards for part in self.ranks)

    @property
    def has_backwards(self) -> bool:
        """Return whether any backward is marked."""
        seen = (seen for part in self.ranks for seen in part.spans)
        return any(action.op in BACKWARD_OPS for one in seen for action in one.actions)


class TracedProcesses:
    """The traces of a run, grouped by process and by step.

    A process may have several files, each of a different time. If the rank of any file is unknown,
    each file is assumed to be of a separate process.

    Args:
        traces: The traces.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        of: dict[int, list[Trace]] = defaultdict(list)
        known = all(trace.rank is not None for trace in traces)
        for k, trace in enumerate(traces):
            of[trace.rank if known and trace.rank is not None else k].append(trace)
        self.traces_by_process = dict(sorted(of.items()))
        groups = {group for trace in traces for group in trace.groups} if known else set()
        # Only groups whose ranks all have a trace, sorted by their ranks.
        self.groups = sorted(group for group in groups if self.traces_by_process.keys() >= {*group})

    @property
    def steps(self) -> list[int]:
        """The numbers of the ProfilerSteps in the traces of all processes.

        Empty if no step is marked.

        Raises:
            TraceError: Steps are marked, but none is in the traces of all processes.
        """
        each = [
            {step for trace in own for step in trace.steps}
            for own in self.traces_by_process.values()
        ]
        common = sorted(set.intersection(*each))
        if not common and any(each):
            few = min(each, key=len)
            raise TraceError(
                "the traces of the ranks have no ProfilerStep in common",
                hint=" and ".join(
                    f"one trace has {sorted(one) or 'none'}"
                    for one in (few, next(one for one in each if not few or not few <= one))
                ),
            )
        return common

    def _infer_stages(self) -> dict[int, int]:
        """Return the stage of each process, for ranges that do not name one.

        The stage is the position of the process in a process group. In forwards, the first process
        of this group only sends, the last process only receives, and the others do both. Without
        such a group, the stages are numbered in the order of processes. If the traces have
        operators but no messages, all stages are 0.
        """
        ends = {
            number: _has_receives_and_sends(own) for number, own in self.traces_by_process.items()
        }
        stage_of_process: dict[int, int] = {}
        for group in (tuple(self.traces_by_process), *self.groups):
            last = len(group) - 1
            if last and all(ends[n] == (k > 0, k < last) for k, n in enumerate(group)):
                for k, number in enumerate(group):
                    stage_of_process.setdefault(number, k)
        if len(stage_of_process) == len(self.traces_by_process):
            return stage_of_process
        files = [trace for own in self.traces_by_process.values() for trace in own]
        alone = all(trace.op_end_times and not trace.messages for trace in files)
        return {number: 0 if alone else k for k, number in enumerate(self.traces_by_process)}

    def _choose_pipeline(
        self, stages_of_process: dict[int, tuple[int, ...]]
    ) -> tuple[dict[tuple[int, ...], int], bool]:
        """Return one process for each set of stages, and whether they surely are one pipeline."""
        first: dict[tuple[int, ...], int] = {}
        for number, stages in stages_of_process.items():
            first.setdefault(stages, number)
        if len(first) == len(stages_of_process) or len(first) == 1:
            return first, True
        for group in self.groups:
            of = {stages_of_process[number]: number for number in group}
            if len(of) == len(group) and of.keys() == first.keys():
                return of, True
        return first, False

    def list_executions(self, step: int | None) -> Iterator[ScheduleExecution]:
        """Yield each run of the schedule in a step, the last one first.

        Args:
            step: The number of the ProfilerStep. None uses the complete traces.

        Raises:
            TraceError: Ranks ran the schedule a different number of times. Or two traces of one
                process contain the step, or a process computed nothing in it.
        """
        stages = self._infer_stages()
        each = dict[int, list[ScheduleRun]]()
        stages_of_process: dict[int, tuple[int, ...]] = {}
        for number, own in self.traces_by_process.items():
            parts = [ScheduleRun(*part) for part in self._split_runs(own, step, stages[number])]
            stages_of_process[number] = tuple(
                sorted({stage for part in parts for stage in part.stages})
            )
            if not stages_of_process[number]:
                raise TraceError(f"{own[0].path} contains no forward and no backward in this step")
            each[number] = parts
        numbers, known = self._choose_pipeline(stages_of_process)
        ranks = {stages: each[number] for stages, number in numbers.items()}
        few, most = (f(ranks.values(), key=len) for f in (min, max))
        if len(few) != len(most):
            raise TraceError(
                f"{most[0].trace.path} contains {len(most)} runs of the schedule, but "
                f"{few[0].trace.path} contains {len(few)}",
                hint=""
                if step is not None
                else "mark steps with profile(schedule=...) and profiler.step()",
            )
        description = "the complete trace" if step is None else f"ProfilerStep {step}"
        for k in reversed(range(len(most))):
            nth = _ORDINALS[k] if k < len(_ORDINALS) else f"{k + 1}th"
            which = f", the {nth} of {len(most)} times that it ran the schedule" * (len(most) > 1)
            pipeline = [ranks[stages_of_process][k] for stages_of_process in sorted(ranks)]
            yield ScheduleExecution(
                description + which, pipeline, len(self.traces_by_process) - len(ranks), known
            )

    def _split_runs(
        self, traces: list[Trace], step: int | None, default_stage: int
    ) -> Iterator[tuple[Trace, list[ExecutedSpan]]]:
        """Yield the trace and the spans of one process, for each time that it ran its schedule."""
        within = [trace for trace in traces if step is None or step in trace.steps]
        if len(within) > 1:
            of = "" if step is None else f" and have ProfilerStep {step}"
            raise TraceError(
                f"{within[0].path} and {within[1].path} are traces of the same rank{of}"
            )
        (trace,) = within
        for seen in split_repetitions(
            trace, _ALL_TIME if step is None else trace.steps[step], default_stage
        ):
            yield trace, seen


def _has_receives_and_sends(traces: Sequence[Trace]) -> tuple[bool, bool]:
    """Return whether a process receives in its forwards, and whether it sends in them.

    Only ranges that do not name a stage count as forwards.
    """
    forwards = [
        each
        for trace in traces
        for each in trace.instruction_ranges
        if not is_torch_range(each.name)
    ]
    forwards = [each for each in forwards if each.name.startswith("Forward")]
    kinds = {
        each.name for trace in traces for each in trace.messages if _is_inside(each, forwards)
    }  # fmt: skip
    return "recv" in kinds, "send" in kinds


def _is_inside(each: ProfilerRange, ranges: Sequence[ProfilerRange]) -> bool:
    return any(r.thread == each.thread and r.start <= each.start < r.end for r in ranges)
