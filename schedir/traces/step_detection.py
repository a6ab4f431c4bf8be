"""Find the pipeline's ranks and steps in traces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from schedir.errors import TraceError
from schedir.io.profiler_range_names import is_pp
from schedir.ir.isa.instructions import BACKWARDS, COMPUTE
from schedir.traces.instruction_times import ExecutedSpan, repetitions
from schedir.traces.kineto import ProfilerRange, Trace

_ALL: Final = (-(2**63), 2**63 - 1)
_ORDINALS: Final = ("first", "second", "third")


class ScheduleRun(NamedTuple):
    """What a pipeline rank did while its schedule ran once, and the trace that says so."""

    trace: Trace
    seen: list[ExecutedSpan]

    @property
    def held(self) -> tuple[int, ...]:
        """The stages that it computes, in order."""
        actions = (action for seen in self.seen for action in seen.actions)
        return tuple(sorted({action.stage for action in actions if action.op in COMPUTE}))

    @property
    def only_forwards(self) -> bool:
        """Whether forwards ran something and backwards, if they are marked, nothing: torch's
        runtime marks those of an evaluation, too."""
        ran: dict[bool, bool] = {}
        for seen in self.seen:
            if seen.actions[0].op in COMPUTE:
                back = all(action.op in BACKWARDS for action in seen.actions)
                ran[back] = ran.get(back, False) or seen.ran
        return ran.get(False, False) and not ran.get(True, False)


class ScheduleExecution(NamedTuple):
    """One run of the schedule: of which step, in words, its ranks in their order, how many traces
    of replicas were left out, and whether these ranks are known to talk to each other."""

    said: str
    ranks: list[ScheduleRun]
    replicas: int
    known: bool

    @property
    def evaluates(self) -> bool:
        """Whether no backward ran anything."""
        return all(part.only_forwards for part in self.ranks)

    @property
    def has_backwards(self) -> bool:
        """Whether any backward is marked."""
        seen = (seen for part in self.ranks for seen in part.seen)
        return any(action.op in BACKWARDS for one in seen for action in one.actions)


class TracedProcesses:
    """The traces of a run by process, and by its steps.

    A process may have several files, of one stretch of time each.  Where no file says whose it is,
    each is one process's.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        of: dict[int, list[Trace]] = defaultdict(list)
        known = all(trace.rank is not None for trace in traces)
        for k, trace in enumerate(traces):
            of[trace.rank if known and trace.rank is not None else k].append(trace)
        self.of = dict(sorted(of.items()))
        groups = {group for trace in traces for group in trace.groups} if known else set()
        # Those of which all are here, that of the smallest ranks first.
        self.groups = sorted(group for group in groups if self.of.keys() >= {*group})

    @property
    def steps(self) -> list[int]:
        """The ProfilerSteps of which all processes have a trace, and none where none is marked."""
        each = [{step for trace in own for step in trace.steps} for own in self.of.values()]
        common = sorted(set.intersection(*each))
        if not common and any(each):
            few = min(each, key=len)
            raise TraceError(
                "no ProfilerStep is in the traces of all ranks",
                hint=" and ".join(
                    f"one has {sorted(one) or 'none'}"
                    for one in (few, next(one for one in each if not few or not few <= one))
                ),
            )
        return common

    def _stages(self) -> dict[int, int]:
        """The stage of each process whose marks say none: its place in a group of which the first
        receives nothing in forwards, and the last sends nothing.

        Where no group is such, the processes are the stages in their order.
        """
        ends = {number: _ends(own) for number, own in self.of.items()}
        found: dict[int, int] = {}
        for group in (tuple(self.of), *self.groups):
            last = len(group) - 1
            if last and all(ends[n] == (k > 0, k < last) for k, n in enumerate(group)):
                for k, number in enumerate(group):
                    found.setdefault(number, k)
        if len(found) == len(self.of):
            return found
        files = [trace for own in self.of.values() for trace in own]
        alone = all(trace.ops and not trace.messages for trace in files)
        return {number: 0 if alone else k for k, number in enumerate(self.of)}

    def _pipeline(
        self, held: dict[int, tuple[int, ...]]
    ) -> tuple[dict[tuple[int, ...], int], bool]:
        """One process for each set of stages, and whether these are known to be one pipeline."""
        first: dict[tuple[int, ...], int] = {}
        for number, stages in held.items():
            first.setdefault(stages, number)
        if len(first) == len(held) or len(first) == 1:
            return first, True
        for group in self.groups:
            of = {held[number]: number for number in group}
            if len(of) == len(group) and of.keys() == first.keys():
                return of, True
        return first, False

    def times(self, step: int | None) -> Iterator[ScheduleExecution]:
        """Each time that the schedule ran in a step, or in all of the traces, the last one first.

        Raises TraceError where ranks ran it unlike often, and for two traces of one process.
        """
        stages, each = self._stages(), dict[int, list[ScheduleRun]]()
        held: dict[int, tuple[int, ...]] = {}
        for number, own in self.of.items():
            parts = [ScheduleRun(*part) for part in self._parts(own, step, stages[number])]
            held[number] = tuple(sorted({stage for part in parts for stage in part.held}))
            if not held[number]:
                raise TraceError(f"{own[0].path} has no forward and no backward in this step")
            each[number] = parts
        numbers, known = self._pipeline(held)
        ranks = {stages: each[number] for stages, number in numbers.items()}
        few, most = (f(ranks.values(), key=len) for f in (min, max))
        if len(few) != len(most):
            raise TraceError(
                f"{most[0].trace.path} has the schedule {len(most)} times, "
                f"{few[0].trace.path} {len(few)} times",
                hint=""
                if step is not None
                else "profile(schedule=...) and profiler.step() mark steps",
            )
        said = "the whole trace" if step is None else f"ProfilerStep {step}"
        for k in reversed(range(len(most))):
            nth = _ORDINALS[k] if k < len(_ORDINALS) else f"{k + 1}th"
            which = f", the {nth} of {len(most)} times that it ran the schedule" * (len(most) > 1)
            pipeline = [ranks[held][k] for held in sorted(ranks)]
            yield ScheduleExecution(said + which, pipeline, len(self.of) - len(ranks), known)

    def _parts(
        self, own: list[Trace], step: int | None, stage: int
    ) -> Iterator[tuple[Trace, list[ExecutedSpan]]]:
        """What one process did, once for each time that it ran its schedule."""
        within = [trace for trace in own if step is None or step in trace.steps]
        if len(within) > 1:
            of = "" if step is None else f" and have ProfilerStep {step}"
            raise TraceError(f"{within[0].path} and {within[1].path} are of one rank{of}")
        (trace,) = within
        for seen in repetitions(trace, _ALL if step is None else trace.steps[step], stage):
            yield trace, seen


def _ends(own: Sequence[Trace]) -> tuple[bool, bool]:
    """Whether a process whose marks say no stage receives in its forwards, and whether it sends."""
    forwards = [each for trace in own for each in trace.marked if not is_pp(each.name)]
    forwards = [each for each in forwards if each.name.startswith("Forward")]
    kinds = {
        each.name for trace in own for each in trace.messages if _inside(each, forwards)
    }  # fmt: skip
    return "recv" in kinds, "send" in kinds


def _inside(each: ProfilerRange, ranges: Sequence[ProfilerRange]) -> bool:
    return any(r.thread == each.thread and r.start <= each.start < r.end for r in ranges)
