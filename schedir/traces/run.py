"""Run: the traces of all ranks as a Program and its Timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from glob import glob
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.graph import Graph
from schedir.analysis.models import MODELS, Model
from schedir.compiler.compile import finish, lower
from schedir.errors import CompletenessError, ProgramError, TraceError, UsageError
from schedir.io.torch_csv import placed
from schedir.ir.index import NONE, Index
from schedir.ir.ops import BY_TEXT, COMPUTE, RECEIVES, SENDS, TRANSFERS
from schedir.ir.program import JOINED, OP, STAGE, Program, Stream
from schedir.predict.observed import timeline_of
from schedir.predict.timeline import Timeline
from schedir.traces.clocks import align
from schedir.traces.instructions import Seen, repetitions
from schedir.traces.kineto import Trace, read_trace
from schedir.verify.check import check

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_NAMES: Final = ("*.json", "*.json.gz")
_ALL: Final = (-(2**63), 2**63 - 1)
_STEP: Final = BY_TEXT["step"]
# The models under which a run may have finished, the strictest first: it did finish.
_OVER_NCCL: Final = tuple(model for model in reversed(MODELS) if model != "serial")


@dataclass(frozen=True)
class Imported:
    """What traces say: the run, which step of which it is, and what else is to be told of it."""

    timeline: Timeline
    step: str
    steps: tuple[str, ...]
    notes: list[str] = field(default_factory=list)


class _Rank(NamedTuple):
    """A pipeline rank: its traces, one for each stretch of time, oldest first."""

    number: int
    traces: list[Trace]


def files_of(sources: Iterable[str | Path]) -> list[Path]:
    """The files that are named: files, folders of them, and patterns like `trace/rank*.json.gz`.

    Raises UsageError for a name that names none.
    """
    found: list[Path] = []
    for source in sources:
        path = Path(source)
        if path.is_dir():
            own = sorted({file for name in _NAMES for file in path.glob(name)})
            if not own:
                below = sorted({f.parent for name in _NAMES for f in path.glob(f"**/{name}")})
                raise UsageError(
                    f"{source} has no traces: no {' or '.join(_NAMES)}",
                    hint=f"{below[-1]} has some" if below else "",
                )
        elif path.exists():
            own = [path]
        else:
            own = [Path(name) for name in sorted(glob(str(source)))]
            if not own:
                raise UsageError(f"cannot read {source}: no such file")
        found += [each for each in own if each not in found]
    return found


def read_run(
    sources: Sequence[str | Path],
    *,
    step: int | None = None,
    model: Model | None = None,
    name: str = "imported",
    traits: dict[str, Any] | None = None,
    seen: Callable[[Path], object] | None = None,
) -> Imported:
    """The run whose ranks left these traces of torch.profiler, in any order.

    `sources` are files, folders and patterns.  `step` is the number of a ProfilerStep, the last
    whole one unless told; of a step that ran its schedule several times, the last time.  Without
    `model` it is the strictest under which the program finishes, as it did.  `traits` are fields of
    the program that traces do not tell, as `tp`.  `seen` is called with each file that was read.

    Replicas, which hold the same stages, are read once: that of the smallest rank.

    Raises UsageError for what cannot be read, TraceError for what is no trace or marks no
    instructions, for clocks that cannot be aligned and for a step that is not there, and what
    `check` raises for a program that is not whole.

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
    traces = []
    for path in files_of(sources):
        traces.append(read_trace(path))
        if seen is not None:
            seen(path)
    return _Assembly(traces, name, traits or {}, model).imported(step)


class _Assembly:
    """Puts the traces of ranks together."""

    def __init__(
        self, traces: list[Trace], name: str, traits: dict[str, Any], model: Model | None
    ) -> None:
        self.name, self.traits, self.model = name, traits, model
        self.notes: list[str] = []
        marked = [trace for trace in traces if trace.marked]
        if not marked:
            whose = traces[0].path if len(traces) == 1 else f"none of {len(traces)} files"
            has = "has no range that marks" if len(traces) == 1 else "has a range that marks"
            raise TraceError(
                f"{whose} {has} an instruction, such as PP:0F3",
                hint="schedir.instrument() before the schedule is made marks those of torch, "
                "Megatron-LM and DeepSpeed that do not mark themselves",
            )
        if lost := len(traces) - len(marked):
            self.notes.append(f"{lost} of {len(traces)} files mark no instruction: not read")
        self.ranks = self._ranks(marked)

    def _ranks(self, traces: list[Trace]) -> list[_Rank]:
        """Traces by process; where no file says whose it is, each is one process's."""
        of: dict[int, list[Trace]] = defaultdict(list)
        unknown = any(trace.rank is None for trace in traces)
        for k, trace in enumerate(traces):
            of[k if unknown or trace.rank is None else trace.rank].append(trace)
        return [
            _Rank(number, sorted(own, key=lambda each: each.marked[0].start))
            for number, own in sorted(of.items())
        ]

    # ------------------------------------------------------------ which step

    def imported(self, step: int | None) -> Imported:
        """The step that is asked for, or the last that is whole."""
        steps = self._steps()
        if step is not None and step not in steps:
            known = ", ".join(str(each) for each in steps if each is not None)
            raise TraceError(
                f"there is no ProfilerStep {step} of which all ranks have a trace",
                hint=f"there are {known}" if known else "these traces have no ProfilerStep at all",
            )
        failed: ProgramError | None = None
        for number in [step] if step is not None else reversed(steps):
            for which, parts in self._parts(number):
                notes = list(self.notes)
                try:
                    timeline = self._timeline(parts)
                except CompletenessError as error:  # it may have been cut off
                    failed = failed or error
                    self.notes = notes
                    continue
                others = tuple(str(each) for each in steps if each is not None)
                said = f"ProfilerStep {number}" if number is not None else "the whole trace"
                return Imported(timeline, said + which, others, self.notes)
        assert failed is not None
        failed.add_note("no step in these traces is whole")
        raise failed

    def _steps(self) -> list[int | None]:
        """The steps of which all ranks have a trace; [None] where none is marked as one."""
        of = [{n for trace in rank.traces for n in trace.steps} for rank in self.ranks]
        common = sorted(set.intersection(*of))
        if not common and any(of):
            raise TraceError(
                "no ProfilerStep is in the traces of all ranks",
                hint=f"rank {self.ranks[0].number} has {sorted(of[0])}, "
                f"rank {self.ranks[-1].number} has {sorted(of[-1])}",
            )
        return [*common] or [None]

    def _parts(self, step: int | None) -> list[tuple[str, list[tuple[Trace, list[Seen]]]]]:
        """What all pipeline ranks did in a step, once for each time that it ran the schedule."""
        found: list[tuple[Trace, list[list[Seen]]]] = []
        for k, rank in enumerate(self.ranks):
            traces = [t for t in rank.traces if step is None or step in t.steps]
            if len(traces) > 1:
                raise TraceError(
                    f"{traces[0].path} and {traces[1].path} are both of rank {rank.number}"
                    + (f" and have ProfilerStep {step}" if step is not None else "")
                )
            own = traces[0]
            found.append((own, repetitions(own, _ALL if step is None else own.steps[step], k)))
        found = self._pipeline(found)
        times = {len(parts) for _, parts in found}
        if len(times) > 1:
            few, most = (f(found, key=lambda each: len(each[1])) for f in (min, max))
            raise TraceError(
                f"{most[0].path} has the schedule {len(most[1])} times, "
                f"{few[0].path} {len(few[1])} times"
            )
        (count,) = times
        return [
            (
                f", the {_ordinal(k)} of {count} times that it ran the schedule" * (count > 1),
                [(trace, parts[k]) for trace, parts in found],
            )
            for k in reversed(range(count))
        ]

    def _pipeline(
        self, found: list[tuple[Trace, list[list[Seen]]]]
    ) -> list[tuple[Trace, list[list[Seen]]]]:
        """One process for each pipeline rank, in their order: that of the stages they hold."""
        by_stages: dict[tuple[int, ...], tuple[Trace, list[list[Seen]]]] = {}
        replicas = 0
        for trace, parts in found:
            held = tuple(sorted({a.stage for p in parts for s in p for a in s.actions if _has(a)}))
            if not held:
                raise TraceError(f"{trace.path} has no forward and no backward in this step")
            replicas += held in by_stages
            by_stages.setdefault(held, (trace, parts))
        if replicas:
            self.notes.append(
                f"{replicas} of {len(found)} traces are of replicas, which hold the same stages: "
                "that of the smallest rank is read"
            )
        return [by_stages[held] for held in sorted(by_stages)]

    # ------------------------------------------------------------ as a Timeline

    def _timeline(self, ranks: list[tuple[Trace, list[Seen]]]) -> Timeline:
        gpu = any(trace.kernels is not None for trace, _ in ranks)
        marked = self._program([seen for _, seen in ranks])
        program, model = self._checked(marked, gpu)
        began, ended = _times(marked, program, [seen for _, seen in ranks])
        known = began >= 0
        origin = int(began[known].min())
        start = np.where(known, (began - origin) / 1e9, np.nan)
        end = np.where(known, (ended - origin) / 1e9, np.nan)
        error = self._align(program, [trace for trace, _ in ranks], start, end)
        _fill(program, start, end)
        self._tell([seen for _, seen in ranks])
        timeline = timeline_of(program, start, end, model, blocks=not gpu)
        return replace(timeline, clock_error=error)

    def _program(self, ranks: list[list[Seen]]) -> Program:
        """What the marks say, and nothing else."""
        words = [
            [
                int(a.op) << OP | a.stage << STAGE | a.mb | (JOINED if k else 0)
                for seen in rank
                for k, a in enumerate(seen.actions)
            ]
            for rank in ranks
        ]
        actions = [a for rank in ranks for seen in rank for a in seen.actions]
        rank_of = {
            a.stage: r for r, rank in enumerate(ranks) for s in rank for a in s.actions if _has(a)
        }
        stages = max(rank_of) + 1
        if missing := [stage for stage in range(stages) if stage not in rank_of]:
            raise TraceError(
                f"stage {stages - 1} is there, and stage {missing[0]} is not",
                hint="is the trace of a rank missing?",
            )
        m = max(a.mb for a in actions if a.op in COMPUTE) + 1
        plan = placed(len(ranks), m, [rank_of[stage] for stage in range(stages)])
        streams = tuple(Stream(np.array(own, np.int64)) for own in words)
        return replace(Program(self.name, plan, streams), **self.traits)

    def _checked(self, marked: Program, gpu: bool) -> tuple[Program, Model]:
        """The whole program, and the model under which it ran."""
        if marked.ops.isdisjoint(TRANSFERS) and marked.plan.ranks > 1:
            self.notes.append(
                "messages are not marked: their order is schedir's own, and when they went is what "
                "the instructions leave room for"
            )
            compute = tuple(Stream(s.words[np.isin(s.op, COMPUTE)]) for s in marked.streams)
            program = lower(replace(marked, name=f"{marked.name}-lowered", streams=compute))
        else:
            program = marked if _STEP in marked.ops else finish(marked)
        models = [self.model] if self.model else (_OVER_NCCL if gpu else ("edge",))
        error: ProgramError | None = None
        for model in models:
            try:
                return check(program, model, blocks=not gpu), model
            except CompletenessError:
                raise
            except ProgramError as refused:
                error = refused
        assert error is not None
        raise error

    def _align(self, program: Program, traces: list[Trace], start: Floats, end: Floats) -> float:
        """Make times those of one clock; returns by how much two of them may still differ."""
        names = list(dict.fromkeys(trace.host for trace in traces))
        host = np.array([names.index(trace.host) for trace in traces])
        if len(names) == 1:
            return 0.0
        graph, rank = Graph.of(program, "edge"), Index.of(program).rank
        sends = np.flatnonzero(Index.of(program).is_op(SENDS))
        sends = sends[(graph.partner[sends] != NONE) & np.isfinite(start[sends])]
        got = graph.partner[sends]
        sender, receiver, took = host[rank[sends]], host[rank[got]], end[got] - start[sends]
        far = (sender != receiver) & np.isfinite(took)
        offsets = align(len(names), sender[far], receiver[far], took[far])
        own = offsets.of[host[rank]]
        start -= own
        end -= own
        self.notes.append(
            f"the clocks of {len(names)} hosts are aligned by their messages, to within "
            f"{offsets.error:.2g} s"
        )
        return offsets.error

    def _tell(self, ranks: list[list[Seen]]) -> None:
        waited = sum(seen.waited for rank in ranks for seen in rank)
        took = sum(s.ended - s.began for rank in ranks for s in rank if _has(s.actions[0]))
        if waited:
            self.notes.append(
                f"{waited / (waited + took):.1%} of the time in forwards and backwards was a wait "
                "for messages: it counts as idle"
            )


def _has(action: Any) -> bool:
    return action.op in COMPUTE


def _ordinal(k: int) -> str:
    return {0: "first", 1: "second", 2: "third"}.get(k, f"{k + 1}th")


def _times(marked: Program, program: Program, ranks: list[list[Seen]]) -> tuple[Ints, Ints]:
    """When each instruction of the whole program began and ended, -1 for what is not marked."""
    began, ended = np.full((2, len(program)), -1, np.int64)
    for rank, seen in enumerate(ranks):
        stream = program.streams[rank].words & ~np.int64(JOINED)
        order = np.argsort(stream, kind="stable")
        own = marked.streams[rank].words & ~np.int64(JOINED)
        at = order[np.searchsorted(stream[order], own)] + program.offsets[rank]
        sizes = [len(each.actions) for each in seen]
        began[at] = np.repeat([each.began for each in seen], sizes)
        ended[at] = np.repeat([each.ended for each in seen], sizes)
    return began, ended


def _fill(program: Program, start: Floats, end: Floats) -> None:
    """Times of what is not marked, as much as those of forwards and backwards leave room for.

    A receive is under way from when its rank is free until the next compute begins there; all else
    takes no time, and comes when the compute before it has ended.
    """
    lacking = np.isnan(start)
    index = Index.of(program)
    for lo, hi in pairwise(program.offsets.tolist()):
        compute, own = index.is_op(COMPUTE)[lo:hi], lacking[lo:hi]
        first = start[lo:hi][compute].min()
        over = np.where(index.is_op(TRANSFERS)[lo:hi] | own, first, end[lo:hi])
        free = np.maximum.accumulate(over)
        ahead = np.where(compute, start[lo:hi], np.inf)[::-1]
        taken = np.minimum.accumulate(ahead)[::-1]
        late = index.is_op(RECEIVES)[lo:hi] & np.isfinite(taken)
        start[lo:hi][own] = free[own]
        end[lo:hi][own] = np.where(late, np.maximum(free, taken), free)[own]
