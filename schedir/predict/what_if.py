"""Simulate changes of a run, and report their effects.

`_Table` yields the changes: `rows` those that may take less time, and `rows_of_what_is_held` those
of what ranks hold in memory.  A row changes the costs, the progress model, options of `compile` or
the draft, and describes the change in words.  To try another change, add a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from schedir.analysis.memory.footprint import require_memory_limit, tiers_of
from schedir.analysis.progress_models import ProgressModel
from schedir.compiler.relower import Lowering, built_in_schedule_of, compute_of, without_recompute
from schedir.errors import MemoryLimitError, SchedirError, format_bytes
from schedir.ir.cost.cost_fields import FIELD
from schedir.ir.cost.costs import OF_A_STAGE, Cost, Costs
from schedir.ir.cost.per_stage_values import cut, evened, from_grid, grid, is_array, of_whole
from schedir.ir.cost.zero_states import CUT_FROM, is_cut
from schedir.ir.isa.instructions import (
    BACKWARD,
    BACKWARD_INPUT,
    COMPUTE,
    FORWARD,
    ROWS,
    Lane,
    Value,
)
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.passes.memory.offload_placement import HOST
from schedir.passes.splitting.stage_segmentation import cut_like
from schedir.predict.calibrate import MISSED, calibrate, completed, missed_by, repriced, rounded
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline, expect_runs
from schedir.schedules import built_in, looped_bfs
from schedir.schedules.greedy import greedy_schedule
from schedir.schedules.schedule_algebra import Schedule, delay_for, placed_for
from schedir.schedules.schedule_expansion import expand_schedule

LEAST: Final = 0.005  # share of a time or of bytes: smaller differences are not reported
LARGE: Final = 100_000  # instructions: of a longer program no changed program is compiled
_I: Final = BACKWARD_INPUT
_WORK: Final = (*(FIELD[op] for op in COMPUTE), "FB")
_SUMMED: Final = "sums of pieces"
# The row of `_FREE` that also makes `tp_gather` free, by `program.sequence_parallel`.  With a
# shared sequence a gather is a part of the sums, and without one a part of a message.
_GATHERED: Final = {False: "messages", True: _SUMMED}
_COPIES: Final = (Lane.D2H, Lane.H2D, Lane.DISK)
# By what takes no time in a row, in words: the costs that the row sets to 0.
_FREE: Final[dict[str, tuple[str, ...]]] = {
    "messages": ("send", "tp_scatter"),
    _SUMMED: ("tp_reduce",),
    "reductions": tuple(
        FIELD[row.op] for row in ROWS if row.lane is Lane.DP or Value.GRAD in row.gives
    ),
    "gathers of weights": tuple(FIELD[row.op] for row in ROWS if row.lane is Lane.PARAMS),
    "snapshots": tuple(FIELD[row.op] for row in ROWS if Value.SNAPSHOT in row.gives),
    "copies to the host and its disk, and back,": tuple(
        FIELD[row.op] for row in ROWS if row.lane in _COPIES and Value.SNAPSHOT not in row.gives
    ),
}
# Options of `compile` that change what ranks hold: what forwards save, and the parts of ZeRO.
# Rows that `compile` refuses are not reported, such as "fit" without a limit, or more active stages
# than a rank has.
_OPTIONS: Final[tuple[dict[str, Any], ...]] = (
    {}, {"offload": "half"}, {"offload": "all"}, {"recompute": "all"},
    {"offload": "all", "recompute": "all"},
    {"offload": "fit"}, {"recompute": "fit"}, {"offload": "fit", "recompute": "fit"},
    *({"unsharded_stages": stages} for stages in (1, 2, 3, 4, 6, 8, 12, 16)),
    {"unshard_prefetch": 0}, {"unshard_prefetch": 2}, {"reduce_scatter_at": "update_end"},
    {"reduce_scatter_at": "each_backward"},
    {"zero": 0, "reduce_scatter_at": "update_end"}, {"zero": 1, "reduce_scatter_at": "update_end"},
    {"zero": 2},
    {"zero": 3}, {"zero": 3, "unsharded_stages": 1},
)  # fmt: skip
_OF_SAVED: Final[dict[str, Any]] = {"recompute": None, "offload": None, "offload_to_disk": None}
_OF_ZERO_3: Final[dict[str, Any]] = {"unsharded_stages": None, "unshard_prefetch": None}


class ChangeRow(NamedTuple):
    """One change of the run.

    Args:
        kind: What the row is compared with: of all rows of a kind the one that saves most is
            reported.
        what: The change in words.
        costs: The costs at which the changed run is simulated.
        draft: The draft to compile, or None to keep the program.
        order: The costs for which `compile` orders the transfers of `expand_schedule`.
        options: The options of `compile` that differ from those of the program.
        progress_model: The progress model, or None to keep that of the run.
        activations: The largest peak of activations at which the row is reported.
        beats: Another kind, whose rows come earlier.  The row is reported only if it takes less
            time than the best of these.
    """

    kind: str
    what: str
    costs: Costs
    draft: Program | None = None
    order: Costs | None = None
    options: Mapping[str, Any] = {}
    progress_model: ProgressModel | None = None
    activations: float = np.inf
    beats: str = ""


@dataclass(frozen=True)
class SimulatedChange:
    """A row that was simulated.

    Args:
        row: The row.
        run: The simulation of the changed run.
        saves: The share of the time per microbatch that the change saves.  It is negative if the
            changed run takes longer.
    """

    row: ChangeRow
    run: Timeline
    saves: float

    @property
    def what(self) -> str:
        """The change in words."""
        return self.row.what

    @property
    def memory(self) -> dict[str, float]:
        """The peak bytes of the fullest rank on each tier; empty if the sizes are not known."""
        if self.run.sizes is None:
            return {}
        return {
            tier: max(float(curve.held.max(initial=0.0)) for curve in self.run.memory_on(tier))
            for tier in tiers_of(self.run.program)
        }

    def in_words(self) -> str:
        """Return span, bubble and peak memory in words."""
        unit = self.run.unit and f" {self.run.unit}"
        words = [f"span {self.run.span:.4g}{unit}", f"bubble {self.run.bubble:.1%}"]
        for tier, most in self.memory.items():
            words.append(f"{format_bytes(most)} on the fullest {tier}")
        return ", ".join(words)


class Advice(NamedTuple):
    """A simulation of the run without a change, and of its changes.

    Args:
        base: The simulation without a change.
        error: The relative error of the span of `base` against the run; 0 for a prediction.  If
            it is above MISSED or below -MISSED, no change is simulated.
        changes: The best change of each kind, in descending order of what they save.
        held: The changes of what ranks hold that take less time or less memory of the device, in
            ascending order of their time.
        fits: Whether the run without a change is within the limit.
    """

    base: Timeline
    error: float
    changes: list[SimulatedChange]
    held: list[SimulatedChange]
    fits: bool = True

    @property
    def given(self) -> bool:
        """Whether the simulation is close enough to the run for changes to be simulated."""
        return abs(self.error) <= MISSED

    @property
    def now(self) -> SimulatedChange:
        """The run without a change, as a `SimulatedChange`."""
        return SimulatedChange(ChangeRow("now", "held now", Costs()), self.base, 0.0)


def advise(
    timeline: Timeline,
    costs: Costs | None = None,
    schedule: Schedule | None = None,
    memory_limit: float | None = None,
) -> Advice:
    """Simulate changes of a run.

    Args:
        timeline: A predicted or measured run.
        costs: The costs of a prediction.  If None, `calibrate` finds the costs of the run.
        schedule: The schedule from which the program was compiled.  If None, a built-in schedule
            that gives the same program takes its place.  If there is none, more microbatches are
            not tried.
        memory_limit: The most bytes that a rank may hold on the device.  Changes of what ranks hold
        are
            reported only if they are within this limit.
    """
    expect_runs([timeline])
    program, sizes = timeline.program, timeline.sizes
    costs = completed(costs or calibrate(timeline), program)
    base = simulate(
        program,
        costs,
        progress_model=timeline.progress_model,
        blocking_hosts=timeline.blocking_hosts,
        sizes=sizes,
    )
    base = replace(base, unit=timeline.unit)
    advice = Advice(base, missed_by(base, timeline), [], [])
    if not advice.given:
        return advice
    if memory_limit is not None and sizes is not None:
        try:
            require_memory_limit(program, sizes, memory_limit)
        except MemoryLimitError:
            advice = advice._replace(fits=False)
    table = _Table(base, costs, schedule or built_in_schedule_of(program), memory_limit)
    best: dict[str, SimulatedChange] = {}
    for row in table.rows():
        change = table.simulated(row)
        if change is None or change.run.peak_activations > row.activations:
            continue
        before, other = best.get(row.kind), best.get(row.beats)
        if other is not None and change.run.span > other.run.span * (1 - LEAST):
            continue
        if before is None or change.saves > before.saves + 1e-9:
            best[row.kind] = change
    found = sorted(best.values(), key=lambda change: -change.saves)
    return advice._replace(changes=found, held=_unbeaten(advice.now, table, fits=advice.fits))


def _unbeaten(now: SimulatedChange, table: _Table, *, fits: bool) -> list[SimulatedChange]:
    """Return the changes of what ranks hold that no other change beats in both time and memory.

    Changes in ascending order of time hold ever less memory.  Of changes that take the same time,
    the one that holds least on other tiers than the device comes first.
    """
    seen, tried = {now.run.program.digest}, []
    for row in table.rows_of_what_is_held():
        change = table.simulated(row)
        if change is not None and change.run.program.digest not in seen:
            seen.add(change.run.program.digest)
            tried.append(change)

    def by_time(change: SimulatedChange) -> tuple[float, float, float]:
        device, *elsewhere = change.memory.values() or (0.0,)
        return float(f"{change.run.span:.9g}"), sum(elsewhere), device

    unbeaten: list[SimulatedChange] = []
    own = now.memory.get("device", 0.0)
    for change in sorted(tried, key=by_time):
        most = change.memory.get("device", 0.0)
        is_shorter = change.run.span <= now.run.span * (1 - LEAST)
        is_better = is_shorter or most < own * (1 - LEAST) or not fits
        if is_better and all(most < other.memory.get("device", 0.0) for other in unbeaten):
            unbeaten.append(change)
    return unbeaten


class _Table:
    """The table of changes to try for one run."""

    def __init__(
        self, base: Timeline, costs: Costs, schedule: Schedule | None, memory_limit: float | None
    ) -> None:
        self.base, self.costs, self.schedule = base, costs.usual(), schedule
        self.limit, self.program, self.shape = memory_limit, base.program, base.program.shape
        self.compute = compute_of(self.program)
        self.lowering = Lowering(self.program, base.progress_model)

    def rows(self) -> Iterator[ChangeRow]:
        """Yield the changes that `Advice.changes` may contain."""
        yield from self._even_stages()
        for what, names in _FREE.items():
            if what != _SUMMED or self.program.segment_boundaries:
                free = (
                    *names,
                    *["tp_gather"] * (what == _GATHERED[self.program.sequence_parallel]),
                )
                yield self._priced(what, f"{what} that take no time", **dict.fromkeys(free, 0.0))
        if len(self.program) <= LARGE:
            yield from self._other_programs()
        if self.base.progress_model != "per_edge":
            what = "the same program with a communicator per edge"
            yield ChangeRow("queues", what, self.costs, progress_model="per_edge")

    def _other_programs(self) -> Iterator[ChangeRow]:
        """Yield changes that need another program."""
        for which in ("W", "F", "all") if self.program.segment_boundaries else ():
            what = f"fill_collective_waits={which}, which computes while pieces are summed"
            yield self._lowered("fill", what, self.compute, fill_collective_waits=which)
        what = "the same compute with other transfers"
        orders = None, rounded(self.costs)
        for order in orders:
            yield ChangeRow("transfers", what, self.costs, self.compute, order, {"overlap": False})
        grouped = ChangeRow("grouped", f"{what}, opposite ones grouped", self.costs, self.compute)
        for order in orders:
            yield grouped._replace(order=order, options={"overlap": True}, beats="transfers")
        yield from self._more_microbatches()
        yield from self._other_schedules()
        yield from self._greedy_orders()

    def rows_of_what_is_held(self) -> Iterator[ChangeRow]:
        """Yield the changes that `Advice.held` may contain."""
        if len(self.program) > LARGE:
            return
        sizes, zero = self.base.sizes, self.program.zero
        has_saved = sizes is not None and self.program.trains
        has_copies = {FIELD[op] for op in HOST} <= {*self.costs.told}
        tells_states = sizes is not None and not {*sizes.told_apart}.isdisjoint(CUT_FROM)
        has_parts = self.program.dp > 1 and (zero > 0 or tells_states)
        kept = without_recompute(self.compute)
        for options in _OPTIONS:
            what = ", ".join(f"{name}={json.dumps(value)}" for name, value in options.items())
            is_of_saved = options.keys() <= _OF_SAVED.keys()
            if is_of_saved and has_saved and (has_copies or "offload" not in options):
                yield self._held(what or "all kept", kept, _OF_SAVED | options)
            if not is_of_saved and has_parts:
                others = _OF_ZERO_3 if "zero" in options else {}
                yield self._held(what, self.compute, others | options)
        if has_parts and is_cut("params", zero):
            with suppress(SchedirError):
                yield self._held(
                    "looped_bfs, breadth-first", expand_schedule(looped_bfs, self.shape), {}
                )

    def simulated(self, row: ChangeRow) -> SimulatedChange | None:
        """Compile and simulate a row.  Return None if its program or its costs are refused."""
        program, sizes = self.program, self.base.sizes
        model = row.progress_model or self.base.progress_model
        try:
            if row.draft is not None:
                program = self.lowering.of(row.draft, row.order, **row.options)
            costs = repriced(row.costs, self.program, program.zero, sizes)
            if program.shape != self.shape:  # the sizes are those of another shape
                sizes = None
            run = simulate(
                program,
                costs,
                progress_model=model,
                blocking_hosts=self.base.blocking_hosts,
                sizes=sizes,
            )
        except SchedirError:
            return None
        now = self.base.span / self.shape.microbatches
        took = run.span / program.shape.microbatches
        return (
            SimulatedChange(row, replace(run, unit=self.base.unit), 1 - took / now) if now else None
        )

    def _priced(self, kind: str, what: str, **costs: Cost) -> ChangeRow:
        """Return a row of the same program at other costs."""
        return ChangeRow(kind, what, replace(self.costs, **costs))

    def _lowered(self, kind: str, what: str, drafted: Program, **options: Any) -> ChangeRow:
        """Return a row of a draft at the costs of the run."""
        return ChangeRow(kind, what, self.costs, drafted, self.costs, options)

    def _held(self, what: str, drafted: Program, options: Mapping[str, Any]) -> ChangeRow:
        """Return a row of a draft compiled with other options for what ranks hold."""
        limit = (
            {"sizes": self.base.sizes, "memory_limit": self.limit} if self.limit is not None else {}
        )
        return ChangeRow("held", what, self.costs, drafted, self.costs, {**options, **limit})

    def _even_stages(self) -> Iterator[ChangeRow]:
        """Yield a row in which every stage takes the mean time, if one takes longer now."""
        table = self.costs.of(FORWARD, self.shape) + self.costs.of(BACKWARD, self.shape)
        pieces = self.program.pieces
        each = of_whole(table, pieces).mean(1)
        worst, mean = int(each.argmax()), float(each.mean())
        if not mean or each[worst] <= 1.01 * mean:
            return
        even = {name: evened(c, pieces) for name, c in self.costs.told.items() if name in _WORK}
        first, last = sum(pieces[:worst]), sum(pieces[: worst + 1]) - 1
        holders = " and ".join(map(str, self.shape.holders[:, first].tolist()))
        which = f"stage {first}" if first == last else f"stage of pieces {first} to {last}"
        longer = f"({which} on rank {holders} takes {each[worst] / mean:.2f}x)"
        yield self._priced("even", f"stages that all take the mean {longer}", **even)

    def _more_microbatches(self) -> Iterator[ChangeRow]:
        """Yield a row with twice as many microbatches, if the schedule is known."""
        if self.schedule is None:
            return
        whole, costs = self.program.whole, _twice(self.costs)
        with suppress(SchedirError):
            drafted = expand_schedule(
                self.schedule, replace(whole, microbatches=2 * whole.microbatches)
            )
            drafted = cut_like(drafted, self.program)
            what = "twice as many microbatches of this size"
            yield ChangeRow("microbatches", what, costs, drafted, costs)

    def _other_schedules(self) -> Iterator[ChangeRow]:
        """Yield a row for each built-in schedule.  It must not hold more activations."""
        whole, room = self.program.whole, self.base.peak_activations
        for name, schedule in built_in().items():
            placement, fixed = placed_for(schedule)
            for v in {fixed} if fixed else {1, whole.stages_per_rank}:
                with suppress(SchedirError):
                    shape = PipelineShape(
                        self.shape.ranks, whole.microbatches, v, placement or "loop",
                        self.shape.optimizer_steps, delay_for(schedule) or 0,
                        self.shape.sequence_chunks,
                    )  # fmt: skip
                    drafted = cut_like(expand_schedule(schedule, shape), self.program)
                    same = name == self.program.name or drafted.trains != self.program.trains
                    if same or shape.rows != self.shape.rows:  # the number of copies of the model
                        continue
                    costs = self._cut_into(drafted.shape.stages)
                    what = f"{name} with {v} stage{'s' * (v > 1)} per rank"
                    what += ", which holds no more activations"
                    if _I in drafted.ops and _I not in self.program.ops:
                        what += "; I and W each half of B"
                    yield ChangeRow("schedule", what, costs, drafted, costs, activations=room)

    def _cut_into(self, stages: int) -> Costs:
        """Return costs of the same model cut into another number of stages."""
        now = {name: c for name, c in self.costs.told.items() if name in OF_A_STAGE}
        own = self.shape.stages
        return replace(self.costs, **{k: cut(c, own, stages) for k, c in now.items()})

    def _greedy_orders(self) -> Iterator[ChangeRow]:
        """Yield greedy orders with as many activations on each rank, and with one more."""
        if not self.program.trains:
            return
        letters = "IFW" if _I in self.program.ops else "BF"
        peak = self.base.peak_in_flight
        most = [np.count_nonzero(s.op == FORWARD) for s in self.program.streams]
        for more, what in (
            (0, "a greedy order, which holds no more activations"),
            (1, "one more activation in flight on each rank, in greedy order"),
        ):
            if more and (peak == most).all():
                return
            room, frozen = (peak + more).tolist(), self.program.frozen_stages
            with suppress(SchedirError):
                drafted = greedy_schedule(
                    self.shape, letters, room.__getitem__, self.costs, frozen_stages=frozen
                )
                yield self._lowered("greedy", what, drafted)


def _twice(costs: Costs) -> Costs:
    """Return the costs for twice as many microbatches: those of each microbatch are repeated."""
    again = {name: from_grid(np.tile(grid(c), 2)) for name, c in costs.told.items() if is_array(c)}
    return replace(costs, **again)
