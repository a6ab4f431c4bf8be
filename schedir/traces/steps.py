"""Steps: which processes are the pipeline's ranks, and what each of them did in a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from schedir.errors import TraceError
from schedir.ir.ops import COMPUTE
from schedir.traces.instructions import Seen, repetitions
from schedir.traces.kineto import Trace

_ALL: Final = (-(2**63), 2**63 - 1)
_ORDINALS: Final = ("first", "second", "third")


class Part(NamedTuple):
    """What a pipeline rank did while its schedule ran once, and the trace that says so."""

    trace: Trace
    seen: list[Seen]

    @property
    def held(self) -> tuple[int, ...]:
        """The stages that it computes, in order."""
        actions = (action for seen in self.seen for action in seen.actions)
        return tuple(sorted({action.stage for action in actions if action.op in COMPUTE}))


class Once(NamedTuple):
    """One run of the schedule: of which step, in words, its ranks in their order, and how many
    traces of replicas were left out."""

    said: str
    ranks: list[Part]
    replicas: int


class Processes:
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

    @property
    def steps(self) -> list[int]:
        """The ProfilerSteps of which all processes have a trace, and none where none is marked."""
        each = [{step for trace in own for step in trace.steps} for own in self.of.values()]
        common = sorted(set.intersection(*each))
        if not common and any(each):
            few = min(each, key=len)
            raise TraceError(
                "no ProfilerStep is in the traces of all ranks",
                hint=" and ".join(f"one has {sorted(one) or 'none'}" for one in (few, max(each))),
            )
        return common

    def times(self, step: int | None) -> Iterator[Once]:
        """Each time that the schedule ran in a step, or in all of the traces, the last one first.

        Raises TraceError where ranks ran it unlike often, and for two traces of one process.
        """
        ranks: dict[tuple[int, ...], list[Part]] = {}
        for k, own in enumerate(self.of.values()):
            parts = [Part(*each) for each in self._parts(own, step, k)]
            held = tuple(sorted({stage for part in parts for stage in part.held}))
            if not held:
                raise TraceError(f"{own[0].path} has no forward and no backward in this step")
            ranks.setdefault(held, parts)
        few, most = (f(ranks.values(), key=len) for f in (min, max))
        if len(few) != len(most):
            raise TraceError(
                f"{most[0].trace.path} has the schedule {len(most)} times, "
                f"{few[0].trace.path} {len(few)} times"
            )
        said = "the whole trace" if step is None else f"ProfilerStep {step}"
        for k in reversed(range(len(most))):
            nth = _ORDINALS[k] if k < len(_ORDINALS) else f"{k + 1}th"
            which = f", the {nth} of {len(most)} times that it ran the schedule" * (len(most) > 1)
            pipeline = [ranks[held][k] for held in sorted(ranks)]
            yield Once(said + which, pipeline, len(self.of) - len(ranks))

    def _parts(
        self, own: list[Trace], step: int | None, number: int
    ) -> Iterator[tuple[Trace, list[Seen]]]:
        """What one process did, once for each time that it ran its schedule."""
        within = [trace for trace in own if step is None or step in trace.steps]
        if len(within) > 1:
            of = "" if step is None else f" and have ProfilerStep {step}"
            raise TraceError(f"{within[0].path} and {within[1].path} are of one rank{of}")
        (trace,) = within
        for seen in repetitions(trace, _ALL if step is None else trace.steps[step], number):
            yield trace, seen
