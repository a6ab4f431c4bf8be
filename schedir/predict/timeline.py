"""Timeline: the predicted or measured start and end of every instruction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import lcm
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.dependency_graph import Graph
from schedir.analysis.memory.footprint import (
    Footprint,
    compute_footprints,
    compute_static_memory,
    count_in_flight,
    count_peak_versions,
    peak_in_flight,
)
from schedir.analysis.progress_models import ProgressModel
from schedir.errors import UsageError, require_type
from schedir.ir.cost.sizes import Sizes
from schedir.ir.instruction_index import NO_POSITION, Positions
from schedir.ir.isa.instructions import COMPUTE_OPS, INSTRUCTIONS, RECV_OPS, TIERS, Instr, Lane
from schedir.ir.notebook_repr import render_html
from schedir.ir.program import OPCODES, WORD_DTYPE, Program

Spans = NDArray[Any]  # structured: SPAN
Times = NDArray[np.float64]
TimelineKind = Literal["predicted", "measured"]

TIMELINE_KINDS: Final[tuple[TimelineKind, ...]] = get_args(TimelineKind)
# Units of time that a Timeline may be in, those of the costs and seconds, and how finely its
# clocks tell it: CUDA's events tell half a microsecond.
TIME_UNITS: Final = {"": 0.0, "s": 1e-6}
MAX_TIME: Final = 1e300  # the latest time; sums over ranks of later times may overflow a float

SPAN_DTYPE: Final = np.dtype(
    [("rank", "i4"), ("stage", "i4"), ("mb", "i4"), ("lane", "i2"), ("op", "i2"),
     ("start", "f8"), ("end", "f8")]
)  # fmt: skip


def build_spans(program: Program, start: NDArray[np.float64], end: NDArray[np.float64]) -> Spans:
    """Spans of all instructions of a program, rank by rank, from their starts and ends."""
    fields, lanes = (
        program.words.view(WORD_DTYPE),
        np.array([row.lane for row in INSTRUCTIONS], np.int16),
    )
    spans = np.empty(len(fields), SPAN_DTYPE)
    for rank, (lo, hi) in enumerate(pairwise(program.offsets.tolist())):
        own, given = spans[lo:hi], fields[lo:hi]
        own["rank"], own["lane"] = rank, lanes[given["op"]]
        for name in ("op", "stage", "mb"):
            own[name] = given[name]
    spans["start"], spans["end"] = start, end
    return spans


def require_timelines(timelines: object) -> None:
    """Raise UsageError for what is no sequence of Timelines, and for an empty one."""
    run = "schedir.simulate(program)"
    require_type(timelines, Sequence, f"[{run}]")
    assert isinstance(timelines, Sequence)
    if not timelines:
        raise UsageError("this takes a Timeline or more, not none")
    for each in timelines:
        require_type(each, Timeline, run)


class CausalityViolations(NamedTuple):
    """By how much each instruction comes before a cause of it, 0 where it does not, and which cause
    that is (an index into spans, or -1); each of shape (n,)."""

    amount: NDArray[np.float64]
    cause: NDArray[np.int64]


class MemoryHistory(NamedTuple):
    """A step curve: from `times[i]` on, `held[i]` is held, of which `by_kind` has the parts."""

    times: NDArray[np.float64]
    total: NDArray[np.float64]
    by_kind: dict[str, NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of every instruction.

    `spans` is a structured array with one entry per instruction, in the order of the program
    (rank by rank, each in Stream order): rank, lane (a Lane), op (an Opcode), stage, mb, and
    start and end in `unit` ("" for the units of the costs, "s" for a measured run).
    `progress_model` is the progress model under which it was predicted, or that its transport
    gives.
    `clock_error` says by how much the clocks of two ranks may differ, in `unit`: 0 in a
    prediction, and where all ranks read one clock.  `sizes` are those of the values, where
    memory is to be told in bytes.

    Raises UsageError for a unit that is none of UNITS.

    >>> from schedir import Costs, PipelineShape, compile, schedules, simulate
    >>> program = compile(schedules.one_f_one_b, PipelineShape(ranks=2, microbatches=4))
    >>> run = simulate(program, Costs(F=1, B=2))
    >>> run.span, run.bubble, run.idle, run.peak_in_flight
    (15.0, 0.2, array([3., 3.]), array([2, 1]))
    >>> for instr, start, end in [run.instruction_at(rank=1, index=k) for k in range(4)]:
    ...     print(f"{start:g} to {end:g}: {instr}")
    1 to 1: recv_act 1.0
    1 to 2: F 1.0
    2 to 2: recv_act 1.1
    2 to 4: B 1.0
    >>> run.critical_path[:4]  # what decides the span: indices into `spans`
    array([ 0, 18, 19, 21])
    """

    program: Program
    spans: Spans
    kind: TimelineKind = "predicted"
    unit: str = ""
    progress_model: ProgressModel = "per_device"
    clock_error: float = 0.0
    sizes: Sizes | None = None
    blocking_hosts: bool = False

    def __post_init__(self) -> None:
        if self.unit not in TIME_UNITS:
            known = " or ".join(map(repr, TIME_UNITS))
            raise UsageError(
                f"the unit of a Timeline is {known} (units of cost), not {self.unit!r:.60}"
            )

    def __len__(self) -> int:
        return len(self.spans)

    def __repr__(self) -> str:
        return (
            f"<{self.kind} Timeline of {self.program.name}: span {self.span:g}{self.unit}, "
            f"bubble {self.bubble:.1%}{self.causality_warning and f', {self.causality_warning}'}>"
        )

    def _repr_html_(self) -> str:
        return render_html(self)

    @property
    def ranks(self) -> int:
        """How many pipeline ranks there are."""
        return self.program.shape.ranks

    @cached_property
    def start_time(self) -> float:
        """When the first instruction starts."""
        return float(self.spans["start"].min()) if len(self) else 0.0

    @cached_property
    def span(self) -> float:
        """From the start of the first instruction to the end of the last (the makespan)."""
        return float(self.spans["end"].max()) - self.start_time if len(self) else 0.0

    @cached_property
    def busy(self) -> NDArray[np.float64]:
        """Time that each rank's compute lane is in use, shape (ranks,).

        A pair run together counts once.
        """
        return self._sum_busy_time(self.spans["lane"] == Lane.COMPUTE)

    def _sum_busy_time(self, mask: NDArray[np.bool_]) -> NDArray[np.float64]:
        own = self.spans[mask & ~self.is_second_of_pair]
        busy = np.zeros(self.ranks)
        np.add.at(busy, own["rank"], own["end"] - own["start"])
        return busy

    @cached_property
    def is_second_of_pair(self) -> NDArray[np.bool_]:
        """Whether each span is the second of a pair run together, whose time is the first's."""
        second: NDArray[np.bool_] = self.program.joined & np.isin(self.spans["op"], COMPUTE_OPS)
        return second

    @cached_property
    def idle(self) -> NDArray[np.float64]:
        """Time within the span that each rank's compute lane is not in use, shape (ranks,)."""
        return self.span - self.busy

    @property
    def bubble(self) -> float:
        """Idle share of ranks x span, from 0 to 1."""
        whole = self.span * self.ranks
        return float(self.idle.sum()) / whole if whole else 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """Idle over busy time: the papers' bubble, (P-1)/m for 1F1B (SC21, section 2.2.1)."""
        ideal = float(self.busy.sum())
        return float(self.idle.sum()) / ideal if ideal else 0.0

    @cached_property
    def active_span(self) -> NDArray[np.float64]:
        """From first start to last end of F, B, I, W on each rank, shape (ranks,)."""
        work = np.isin(self.spans["op"], COMPUTE_OPS)
        first, last = np.full(self.ranks, np.inf), np.full(self.ranks, -np.inf)
        np.minimum.at(first, self.spans["rank"][work], self.spans["start"][work])
        np.maximum.at(last, self.spans["rank"][work], self.spans["end"][work])
        return np.where(last >= first, last - first, 0.0)

    @cached_property
    def idle_in_active_span(self) -> NDArray[np.float64]:
        """Idle time of each rank within its own span: the zero-bubble papers' measure.

        arXiv 2401.10241, section 5: what is left when ranks need not end together.
        """
        return self.active_span - self._sum_busy_time(np.isin(self.spans["op"], COMPUTE_OPS))

    @cached_property
    def peak_activations(self) -> float:
        """The most that a rank holds, in activations of a whole rank and of whole microbatches;
        half a rank's is half, and of a stage in pieces each has as much of them."""
        program = self.program
        pieces, peak = program.segments_per_stage, self.peak_in_flight
        if (whole := lcm(*pieces)) > 1:
            peak = peak_in_flight(program, np.repeat([whole // one for one in pieces], pieces))
        of_a_rank = program.chunks_per_microbatch * whole * len(pieces) / program.shape.ranks
        return int(peak.max(initial=0)) / of_a_rank

    @cached_property
    def peak_in_flight(self) -> NDArray[np.int64]:
        """Per rank, the most (stage, mb) alive at once: from F until B, or until W."""
        return peak_in_flight(self.program)

    @cached_property
    def peak_weight_versions(self) -> NDArray[np.int64]:
        """Per rank, the most versions of its weights that are of use at once."""
        return count_peak_versions(self.program)

    @cached_property
    def memory(self) -> tuple[MemoryHistory, ...]:
        """What each rank holds as time passes: in bytes, or, without sizes, in activations."""
        if self.sizes is None:
            curves = (self.count_in_flight(rank) for rank in range(self.ranks))
            alive = np.float64(self.program.has_backward)
            return tuple(
                MemoryHistory(times, counts * alive, {"activations": counts * alive})
                for times, counts in curves
            )
        return self.memory_on("device")

    def memory_on(self, tier: str) -> tuple[MemoryHistory, ...]:
        """What each rank holds on a tier as time passes, in bytes: "device", "host" or "disk".

        Raises UsageError for another tier, and where no sizes are known.
        """
        if tier not in TIERS:
            raise UsageError(f"there is no tier {tier!r:.60}: they are {', '.join(TIERS)}")
        if self.sizes is None:
            raise UsageError(
                "memory in bytes needs the sizes of what is held",
                hint="simulate(program, sizes=Sizes(...))",
            )
        return tuple(
            self._build_memory_history(rank, own)
            for rank, own in enumerate(compute_footprints(self.program, self.sizes, tier))
        )

    def _build_memory_history(self, rank: int, footprint: Footprint) -> MemoryHistory:
        spans = self.spans[int(self.program.offsets[rank]) :][footprint.positions]
        times = np.where(footprint.is_at_start, spans["start"], spans["end"])
        times[0] = self.start_time
        if (spans["lane"][1:] != Lane.COMPUTE).any():  # what other lanes change, in order of time
            footprint, times = footprint.order_by_time(times), np.unique(times)
        parts = {
            name: np.full(len(times), size) for name, (_, size) in footprint.static_memory.items()
        }
        parts |= {name: size for name, (_, size) in footprint.dynamic_memory.items()}
        return MemoryHistory(times, footprint.total_bytes, parts)

    @property
    def static_memory(self) -> dict[str, NDArray[np.float64]]:
        """Per rank, the bytes that are held all the time, by the parts that `sizes` tells apart."""
        if self.sizes is None or not self.sizes.specified_parts:
            return {}
        return compute_static_memory(self.program, self.sizes)

    @cached_property
    def peak_memory(self) -> NDArray[np.float64]:
        """Per rank, the most that is held at once.

        In bytes; without sizes, in activations of one (stage, mb).
        """
        return np.array([curve.total.max(initial=0.0) for curve in self.memory])

    @property
    def peak_over_all_ranks(self) -> float:
        """The most that all ranks hold at once: of virtual ranks that share one device."""
        changes = [np.diff(curve.total, prepend=0.0) for curve in self.memory]
        at = np.argsort(np.concatenate([curve.times for curve in self.memory]), kind="stable")
        return float(np.cumsum(np.concatenate(changes)[at]).max(initial=0.0))

    def count_in_flight(self, rank: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Times and counts of (stage, mb) alive on a rank: a step curve."""
        lo, hi = self.program.offsets[rank : rank + 2]
        at, count = count_in_flight(self.program.streams[rank], self.program.frozen_stages)
        own = self.spans[lo:hi][at]
        grows = np.diff(count, prepend=0) > 0
        return np.where(grows, own["start"], own["end"]), count

    @cached_property
    def critical_path(self) -> NDArray[np.int64]:
        """The chain of instructions that decides the span: indices into `spans`, in order."""
        if not len(self):
            return np.empty(0, np.int64)
        return self.critical_path_to(int(self.spans["end"].argmax()))

    def critical_path_to(self, position: int) -> NDArray[np.int64]:
        """The chain that decides when an instruction starts: indices into `spans`, it last.

        Each one's predecessor is, of all that it waited for, what ended last.
        """
        path = [position]
        while (before := int(self.critical_predecessor[path[-1]])) >= 0:
            path.append(before)
        return np.array(path[::-1], np.int64)

    @cached_property
    def critical_predecessor(self) -> NDArray[np.int64]:
        """For each span, of all that it waited for, what ended last: its index, or -1."""
        return self.graph.find_last_predecessors(self.spans["end"])

    @cached_property
    def causality_violations(self) -> CausalityViolations:
        """Which instructions come before what causes them: of such a run, times cannot be right.

        What an instruction needs has ended before it starts; of a measured message or reduction it
        is only known that it has begun, for its end may be noted late, and of a measured pair that
        runs together that each half was over.  A message begins at its sender, and nobody leaves a
        collective before all have come; that is by the clocks of two ranks, which may differ by
        `clock_error`.
        """
        spans, graph, seen = self.spans, self.graph, self.kind == "measured"
        start, end, rank = spans["start"], spans["end"], spans["rank"]
        given = np.where(seen & (spans["lane"] != Lane.COMPUTE), start, end)
        pair = self.is_second_of_pair & seen
        pair[:-1] |= pair[1:]
        taken = np.where(pair, end, start)
        by, cause = np.zeros(len(self)), np.full(len(self), NO_POSITION, np.int64)
        fine = max(TIME_UNITS[self.unit], 1e-9 * self.span)
        error = self.clock_error if seen else 0.0

        def wait(time: Times, effect: Positions, source: Positions, since: Times) -> None:
            late = since[source] - time[effect] - error * (rank[source] != rank[effect])
            more = late > np.maximum(by[effect], fine)
            by[effect[more]], cause[effect[more]] = late[more], source[more]

        for giver in graph.needs:
            needer = np.flatnonzero(giver != NO_POSITION).astype(np.int32)
            wait(taken, needer, giver[needer], given)
            sent = graph.partner[giver[needer]]
            far = sent != NO_POSITION
            wait(taken, needer[far], sent[far], start)
        got = np.flatnonzero(graph.index.is_op(RECV_OPS) & (graph.partner != NO_POSITION)).astype(
            np.int32
        )
        wait(end, got, graph.partner[got], start)
        for members in graph.collective_groups:
            last = members[start[members].argmax()]
            wait(end, members.astype(np.int32), np.full(len(members), last, np.int32), start)
        return CausalityViolations(by, cause)

    @property
    def causality_warning(self) -> str:
        """What is to be said of times that cannot be right, or nothing."""
        worst = float(self.causality_violations.amount.max(initial=0.0))
        return f"effects up to {worst:.3g} {self.unit}".rstrip() + " before causes" if worst else ""

    @property
    def description(self) -> str:
        """What views say beside the name: predicted or measured, and how many stages per rank."""
        shape = self.program.shape
        return self.kind + (f", {shape.stages_per_rank_text}" if shape.stages_per_rank > 1 else "")

    @property
    def caption(self) -> str:
        """`description`, and the doubt if there is one, which no view may leave out."""
        return ", ".join(filter(None, [self.description, self.causality_warning]))

    @cached_property
    def graph(self) -> Graph:
        """The dependency graph of the program, under the run's model."""
        return Graph.from_program(
            self.program, self.progress_model, blocking_hosts=self.blocking_hosts
        )

    def instruction_at(self, rank: int, index: int) -> tuple[Instr, float, float]:
        """The instruction at an index of a rank's Stream, with its start and end."""
        s = self.spans[int(self.program.offsets[rank]) + index]
        instr = Instr(OPCODES[int(s["op"])], int(s["stage"]), int(s["mb"]))
        return instr, float(s["start"]), float(s["end"])
