"""The predicted or measured start and end of every instruction of a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import lcm
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

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
from schedir.extras import require_package
from schedir.ir.cost.sizes import Sizes
from schedir.ir.instruction_index import NO_POSITION, Positions
from schedir.ir.isa.instructions import COMPUTE_OPS, INSTRUCTIONS, RECV_OPS, TIERS, Instr, Lane
from schedir.ir.notebook_repr import render_html
from schedir.ir.program import OPCODES, WORD_DTYPE, Program
from schedir.retired_names import raise_attribute_error

if TYPE_CHECKING:
    from pandas import DataFrame

# A structured array with the fields of SPAN_DTYPE. It is not NDArray[Any], because mypy takes up to
# seconds for a line with arithmetic of two such fields.
Spans = Any
Times = NDArray[np.float64]
TimelineKind = Literal["predicted", "measured"]

TIMELINE_KINDS: Final[tuple[TimelineKind, ...]] = get_args(TimelineKind)
# Unit of a Timeline -> resolution of its clocks in this unit. "" is the unit of the costs. For
# seconds, the value is above the resolution of CUDA events, which is half a microsecond.
TIME_UNITS: Final = {"": 0.0, "s": 1e-6}
MAX_TIME: Final = 1e300  # The latest possible time. Sums of later times may overflow a float.

SPAN_DTYPE: Final = np.dtype(
    [("rank", "i4"), ("stage", "i4"), ("mb", "i4"), ("lane", "i2"), ("op", "i2"),
     ("start", "f8"), ("end", "f8")]
)  # fmt: skip


def build_spans(program: Program, start: NDArray[np.float64], end: NDArray[np.float64]) -> Spans:
    """Return the spans of all instructions of a program, rank by rank.

    Args:
        program: The program.
        start: The start of each instruction, shape (n,).
        end: The end of each instruction, shape (n,).

    Returns:
        A structured array with the fields of `SPAN_DTYPE`.
    """
    fields = program.words.view(WORD_DTYPE)
    lanes = np.array([row.lane for row in INSTRUCTIONS], np.int16)
    spans = np.empty(len(fields), SPAN_DTYPE)
    for rank, (lo, hi) in enumerate(pairwise(program.offsets.tolist())):
        rank_spans, rank_fields = spans[lo:hi], fields[lo:hi]
        rank_spans["rank"], rank_spans["lane"] = rank, lanes[rank_fields["op"]]
        for name in ("op", "stage", "mb"):
            rank_spans[name] = rank_fields[name]
    spans["start"], spans["end"] = start, end
    return spans


def require_timeline(timeline: object, name: str) -> None:
    """Refuse a value that is not a Timeline.

    Args:
        timeline: The value.
        name: Name of the argument, for the error message.

    Raises:
        UsageError: `timeline` is not a Timeline.
    """
    require_type(timeline, name, Timeline, "schedir.simulate(program)")


def require_timelines(timelines: object) -> None:
    """Refuse a value that is not a sequence of at least one Timeline.

    Args:
        timelines: The value.

    Raises:
        UsageError: `timelines` is not a sequence, is empty, or has an entry that is not a Timeline.
    """
    require_type(timelines, "timelines", Sequence, "[schedir.simulate(program)]")
    assert isinstance(timelines, Sequence)
    if not timelines:
        raise UsageError("timelines is empty: at least one Timeline is needed")
    for index, timeline in enumerate(timelines):
        require_timeline(timeline, f"timelines[{index}]")


class CausalityViolations(NamedTuple):
    """The instructions that start or end before one of their causes.

    Attributes:
        amount: For each instruction with a violation, the time from the instruction to its cause,
            which comes later. 0 for all other instructions. Shape (n,).
        cause: The index in `spans` of this cause, or -1 for an instruction without a violation.
            Shape (n,).
    """

    amount: NDArray[np.float64]
    cause: NDArray[np.int64]


class MemoryHistory(NamedTuple):
    """The memory of a rank over time.

    Attributes:
        times: The times of changes, ascending.
        total: The memory from each of these times on.
        by_kind: Kind of memory -> the memory from each of these times on. The kinds add up to
            `total`.
    """

    times: NDArray[np.float64]
    total: NDArray[np.float64]
    by_kind: dict[str, NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class Timeline:
    """The predicted or measured start and end of every instruction.

    Args:
        program: The program.
        spans: A structured array with one entry per instruction: rank, lane (a Lane), op (an
            Opcode), stage, mb, start and end. The entries are in order of rank. The entries of one
            rank are in the order of its Stream.
        kind: "predicted" or "measured".
        unit: The unit of times: "" for the unit of the costs, or "s" for seconds.
        progress_model: The progress model of the prediction, or of the transport of a measured run.
        clock_error: The largest difference between the clocks of two ranks, in `unit`. The error of
            a prediction is 0. The error of a measured run is 0 if all ranks read the same clock.
        sizes: The sizes of values. With sizes, memory is in bytes. Without sizes, memory is a
            number of activations.
        blocking_hosts: True if hosts are blocking, as on CPUs.

    Raises:
        UsageError: `unit` is not one of `TIME_UNITS`.

    Example:
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
        >>> run.critical_path[:4]  # indices into `spans`
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

    if not TYPE_CHECKING:  # A type checker would allow any attribute.
        __getattr__ = raise_attribute_error

    def __post_init__(self) -> None:
        if self.unit not in TIME_UNITS:
            fact = f"unit must be {' or '.join(map(repr, TIME_UNITS))}, not {self.unit!r:.60}"
            raise UsageError(f"{fact}; '' means the time unit of the costs")

    def __len__(self) -> int:
        return len(self.spans)

    def __repr__(self) -> str:
        return (
            f"<{self.kind} Timeline of {self.program.name}: span {self.span:g}{self.unit}, "
            f"bubble {self.bubble:.1%}{self.causality_warning and f', {self.causality_warning}'}>"
        )

    def _repr_html_(self) -> str:
        return render_html(self)

    def to_dataframe(self) -> DataFrame:
        """Return a pandas DataFrame with a row for each instruction, rank by rank.

        Returns:
            The columns rank, lane, op, stage, microbatch, start and end. The times are in `unit`.
            For an instruction that belongs to a rank and not to a stage, `stage` is 0. For an
            instruction that does not belong to a microbatch, `microbatch` is the number of the
            update or of the occurrence.

        Raises:
            schedir.extras.MissingPackageError: pandas is not installed.
        """
        require_package("pandas", "to_dataframe")
        from pandas import DataFrame

        spans = self.spans
        return DataFrame(
            {
                "rank": spans["rank"],
                "lane": [Lane(lane).name.lower() for lane in spans["lane"].tolist()],
                "op": [INSTRUCTIONS[op].text for op in spans["op"].tolist()],
                "stage": spans["stage"],
                "microbatch": spans["mb"],
                "start": spans["start"],
                "end": spans["end"],
            }
        )

    @property
    def ranks(self) -> int:
        """The number of pipeline ranks."""
        return self.program.shape.ranks

    @cached_property
    def start_time(self) -> float:
        """The time when the first instruction starts."""
        return float(self.spans["start"].min()) if len(self) else 0.0

    @cached_property
    def span(self) -> float:
        """The time from the first start to the last end of all instructions (the makespan)."""
        return float(self.spans["end"].max()) - self.start_time if len(self) else 0.0

    @cached_property
    def busy(self) -> NDArray[np.float64]:
        """The time in which each rank's compute lane is busy, shape (ranks,).

        The time of two instructions that run together is counted once.
        """
        return self._sum_busy_time(self.spans["lane"] == Lane.COMPUTE)

    def _sum_busy_time(self, mask: NDArray[np.bool_]) -> NDArray[np.float64]:
        counted = self.spans[mask & ~self.is_second_of_pair]
        busy = np.zeros(self.ranks)
        np.add.at(busy, counted["rank"], counted["end"] - counted["start"])
        return busy

    @cached_property
    def is_second_of_pair(self) -> NDArray[np.bool_]:
        """A mask of the second instruction of each pair that runs together, shape (n,).

        Both instructions have the same start and end. So sums of busy time leave out the second
        instruction.
        """
        is_second: NDArray[np.bool_] = self.program.joined & np.isin(self.spans["op"], COMPUTE_OPS)
        return is_second

    @cached_property
    def idle(self) -> NDArray[np.float64]:
        """The time within the span in which each rank's compute lane is idle, shape (ranks,)."""
        return self.span - self.busy

    @property
    def bubble(self) -> float:
        """The idle time of all ranks as a share of ranks x span, from 0 to 1."""
        total = self.span * self.ranks
        return float(self.idle.sum()) / total if total else 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """The idle time of all ranks divided by their busy time.

        Papers call this the bubble: (P-1)/m for 1F1B (Narayanan et al., SC21, section 2.2.1).
        """
        ideal = float(self.busy.sum())
        return float(self.idle.sum()) / ideal if ideal else 0.0

    @cached_property
    def active_span(self) -> NDArray[np.float64]:
        """The time from the first start to the last end of compute on each rank, shape (ranks,).

        Compute is F, B, I, W and R.
        """
        is_compute = np.isin(self.spans["op"], COMPUTE_OPS)
        first = np.full(self.ranks, np.inf)
        last = np.full(self.ranks, -np.inf)
        np.minimum.at(first, self.spans["rank"][is_compute], self.spans["start"][is_compute])
        np.maximum.at(last, self.spans["rank"][is_compute], self.spans["end"][is_compute])
        return np.where(last >= first, last - first, 0.0)

    @cached_property
    def idle_in_active_span(self) -> NDArray[np.float64]:
        """The idle time of each rank within its active span, shape (ranks,).

        This is the bubble of the zero-bubble papers (arXiv 2401.10241, section 5), in which ranks
        need not end at the same time.
        """
        return self.active_span - self._sum_busy_time(np.isin(self.spans["op"], COMPUTE_OPS))

    @cached_property
    def peak_activations(self) -> float:
        """The largest activation memory of a rank, in microbatches.

        A microbatch in all stages of a rank is counted as 1, and a microbatch in half of the stages
        as 0.5. Each segment of a stage has an equal share of the stage's activations.
        """
        program = self.program
        segments, peak = program.segments_per_stage, self.peak_in_flight
        if (common := lcm(*segments)) > 1:
            peak = peak_in_flight(
                program, np.repeat([common // count for count in segments], segments)
            )
        units_per_rank = (
            program.chunks_per_microbatch * common * len(segments) / program.shape.ranks
        )
        return int(peak.max(initial=0)) / units_per_rank

    @cached_property
    def peak_in_flight(self) -> NDArray[np.int64]:
        """The largest number of (stage, microbatch) pairs in flight on each rank, shape (ranks,).

        A pair is in flight from F to B, or to W if the backward is split.
        """
        return peak_in_flight(self.program)

    @cached_property
    def peak_weight_versions(self) -> NDArray[np.int64]:
        """The largest number of weight versions that each rank needs at the same time, (ranks,)."""
        return count_peak_versions(self.program)

    @cached_property
    def memory(self) -> tuple[MemoryHistory, ...]:
        """The device memory of each rank over time.

        With `sizes`, the unit is bytes. Without `sizes`, the unit is a number of activations: one
        for each (stage, microbatch) pair in flight.
        """
        if self.sizes is None:
            curves = (self.count_in_flight(rank) for rank in range(self.ranks))
            value_of_activation = np.float64(self.program.has_backward)
            return tuple(
                MemoryHistory(
                    times,
                    counts * value_of_activation,
                    {"activations": counts * value_of_activation},
                )
                for times, counts in curves
            )
        return self.memory_on("device")

    def memory_on(self, tier: str) -> tuple[MemoryHistory, ...]:
        """Return the memory of each rank on a tier over time, in bytes.

        Args:
            tier: "device", "host" or "disk".

        Raises:
            UsageError: There is no such tier, or the Timeline has no sizes.
        """
        if tier not in TIERS:
            raise UsageError(f"tier must be one of {', '.join(TIERS)}, not {tier!r:.60}")
        if self.sizes is None:
            raise UsageError(
                "this Timeline has no sizes of values, so its memory in bytes is unknown",
                hint="simulate(program, sizes=Sizes(...))",
            )
        footprints = (
            self.footprints
            if tier == TIERS[0]
            else compute_footprints(self.program, self.sizes, tier)
        )
        return tuple(
            self._build_memory_history(rank, footprint) for rank, footprint in enumerate(footprints)
        )

    @cached_property
    def footprints(self) -> list[Footprint]:
        """The device memory of each rank, in the order of its Stream. Empty without sizes."""
        return [] if self.sizes is None else compute_footprints(self.program, self.sizes)

    def _build_memory_history(self, rank: int, footprint: Footprint) -> MemoryHistory:
        spans = self.spans[int(self.program.offsets[rank]) :][footprint.positions]
        times = np.where(footprint.is_at_start, spans["start"], spans["end"])
        times[0] = self.start_time
        # The other lanes run in parallel to compute. So the order of their changes in time can
        # differ from the order in the Stream.
        if (spans["lane"][1:] != Lane.COMPUTE).any():
            footprint = footprint.order_by_time(times)
            times = np.unique(times)
        parts = {
            name: np.full(len(times), size) for name, (_, size) in footprint.static_memory.items()
        }
        parts |= {name: size for name, (_, size) in footprint.dynamic_memory.items()}
        return MemoryHistory(times, footprint.total_bytes, parts)

    @property
    def static_memory(self) -> dict[str, NDArray[np.float64]]:
        """The bytes that each rank uses during the full step, shape (ranks,), by part of `sizes`.

        The keys are names of `Sizes`, or labels of sharded states. The dict is empty without sizes,
        or if `sizes` has only `model_states` and not its parts.
        """
        if self.sizes is None or not self.sizes.specified_parts:
            return {}
        return compute_static_memory(self.program, self.sizes)

    @cached_property
    def peak_memory(self) -> NDArray[np.float64]:
        """The peak of `memory` of each rank, in the same unit, shape (ranks,)."""
        return np.array([curve.total.max(initial=0.0) for curve in self.memory])

    @property
    def peak_over_all_ranks(self) -> float:
        """The peak of the sum of all ranks' memory, for virtual ranks that share one device."""
        changes = [np.diff(curve.total, prepend=0.0) for curve in self.memory]
        time_order = np.argsort(
            np.concatenate([curve.times for curve in self.memory]), kind="stable"
        )
        return float(np.cumsum(np.concatenate(changes)[time_order]).max(initial=0.0))

    def count_in_flight(self, rank: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the number of (stage, microbatch) pairs in flight on a rank over time.

        Args:
            rank: The rank.

        Returns:
            The times of changes, and the count from each of these times on.
        """
        begin, end = self.program.offsets[rank : rank + 2]
        positions, count = count_in_flight(self.program.streams[rank], self.program.frozen_stages)
        changes = self.spans[begin:end][positions]
        grows = np.diff(count, prepend=0) > 0
        return np.where(grows, changes["start"], changes["end"]), count

    @cached_property
    def critical_path(self) -> NDArray[np.int64]:
        """The instructions that determine the span: indices into `spans`, in order of time."""
        if not len(self):
            return np.empty(0, np.int64)
        return self.critical_path_to(int(self.spans["end"].argmax()))

    def critical_path_to(self, position: int) -> NDArray[np.int64]:
        """Return the instructions that determine when an instruction starts.

        Each instruction of the path is preceded by its `critical_predecessor`.

        Args:
            position: The index of the instruction in `spans`.

        Returns:
            Indices into `spans`, in order of time; the last is `position`.
        """
        path = [position]
        while (before := int(self.critical_predecessor[path[-1]])) >= 0:
            path.append(before)
        return np.array(path[::-1], np.int64)

    @cached_property
    def critical_predecessor(self) -> NDArray[np.int64]:
        """For each instruction, the index of the predecessor that ended last, or -1; shape (n,)."""
        return self.graph.find_last_predecessors(self.spans["end"])

    @cached_property
    def causality_violations(self) -> CausalityViolations:
        """The instructions that come before one of their causes. Such times must be wrong.

        Correct times follow these rules:

        - The inputs of an instruction end before it starts.
        - The end of a measured message or reduction may be recorded late. So only its start must
          come before the instruction that waits for it.
        - The inputs of a measured pair that runs together end before the pair ends.
        - A receive does not end before its send starts.
        - A collective does not end before its last member starts.

        The clocks of two ranks may differ by `clock_error`. Differences below the clock's
        resolution are ignored.
        """
        spans, graph, is_measured = self.spans, self.graph, self.kind == "measured"
        start, end, rank = spans["start"], spans["end"], spans["rank"]
        output_time = np.where(is_measured & (spans["lane"] != Lane.COMPUTE), start, end)
        is_in_pair = self.is_second_of_pair & is_measured
        is_in_pair[:-1] |= is_in_pair[1:]
        input_time = np.where(is_in_pair, end, start)
        amount = np.zeros(len(self))
        cause = np.full(len(self), NO_POSITION, np.int64)
        resolution = max(TIME_UNITS[self.unit], 1e-9 * self.span)
        error = self.clock_error if is_measured else 0.0

        def record_violations(
            effect_time: Times, effect: Positions, source: Positions, cause_time: Times
        ) -> None:
            delay = (
                cause_time[source] - effect_time[effect] - error * (rank[source] != rank[effect])
            )
            is_larger = delay > np.maximum(amount[effect], resolution)
            amount[effect[is_larger]] = delay[is_larger]
            cause[effect[is_larger]] = source[is_larger]

        for giver in graph.needs:
            needer = np.flatnonzero(giver != NO_POSITION).astype(np.int32)
            record_violations(input_time, needer, giver[needer], output_time)
            sends = graph.partner[giver[needer]]
            has_partner = sends != NO_POSITION
            record_violations(input_time, needer[has_partner], sends[has_partner], start)
        receives = np.flatnonzero(
            graph.index.is_op(RECV_OPS) & (graph.partner != NO_POSITION)
        ).astype(np.int32)
        record_violations(end, receives, graph.partner[receives], start)
        for members in graph.collective_groups:
            last_member = members[start[members].argmax()]
            record_violations(
                end, members.astype(np.int32), np.full(len(members), last_member, np.int32), start
            )
        return CausalityViolations(amount, cause)

    @property
    def causality_warning(self) -> str:
        """A warning if times must be wrong (`causality_violations`), or an empty string."""
        worst = float(self.causality_violations.amount.max(initial=0.0))
        return f"effects up to {worst:.3g} {self.unit}".rstrip() + " before causes" if worst else ""

    @property
    def description(self) -> str:
        """The text that charts show after the name: the kind, and the number of stages per rank."""
        shape = self.program.shape
        return self.kind + (f", {shape.stages_per_rank_text}" if shape.stages_per_rank > 1 else "")

    @property
    def caption(self) -> str:
        """The description and the causality warning, which every chart must show."""
        scope = "forward only" * (not self.program.has_backward)
        return ", ".join(filter(None, [self.description, scope, self.causality_warning]))

    @cached_property
    def graph(self) -> Graph:
        """The dependency graph of the program, under the progress model of the run."""
        return Graph.from_program(
            self.program, self.progress_model, blocking_hosts=self.blocking_hosts
        )

    def instruction_at(self, rank: int, index: int) -> tuple[Instr, float, float]:
        """Return an instruction of a rank with its start and end.

        Args:
            rank: The rank.
            index: The index in the Stream of the rank.
        """
        span = self.spans[int(self.program.offsets[rank]) + index]
        instr = Instr(OPCODES[int(span["op"])], int(span["stage"]), int(span["mb"]))
        return instr, float(span["start"]), float(span["end"])
