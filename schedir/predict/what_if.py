"""Simulate changes of a run, and report their effects.

`_Table` yields each change as a `ChangeRow`. `iter_time_changes` yields changes that may shorten
the run, and `iter_memory_changes` yields changes of the memory of ranks. A row describes the change
in words. Compared with the run, a row has different costs, a different progress model, different
options of `compile`, or a different draft. To try another change, add a row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, NamedTuple

import numpy as np

from schedir.analysis.memory.footprint import find_used_tiers, fits_memory_limit
from schedir.analysis.progress_models import ProgressModel
from schedir.compiler.relower import (
    Lowering,
    extract_compute,
    find_matching_schedule,
    remove_recompute,
)
from schedir.errors import SchedirError, format_bytes
from schedir.ir.cost.cost_fields import COST_BY_OPCODE
from schedir.ir.cost.costs import STAGE_COSTS, Cost, Costs
from schedir.ir.cost.per_stage_values import (
    average_stages,
    from_grid,
    is_per_microbatch,
    redistribute_stages,
    sum_segments,
    to_grid,
)
from schedir.ir.cost.zero_states import SHARDED_FROM_LEVEL, is_sharded
from schedir.ir.isa.instructions import (
    BACKWARD,
    BACKWARD_INPUT,
    COMPUTE_OPS,
    FORWARD,
    INSTRUCTIONS,
    RECOMPUTE,
    Lane,
    Row,
    Value,
)
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.passes.memory.offload_placement import HOST_TRIP
from schedir.passes.splitting.stage_segmentation import redistribute_values, split_like
from schedir.predict.calibrate import (
    MAX_PREDICTION_ERROR,
    adjust_for_zero,
    calibrate,
    compute_prediction_error,
    fill_missing_backwards,
    round_costs,
    simulate_at_mean_times,
)
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline, require_timeline
from schedir.schedules import get_built_in_schedules, looped_bfs
from schedir.schedules.greedy import greedy_schedule
from schedir.schedules.schedule_algebra import Schedule, get_placement_mark, get_weight_delay_mark
from schedir.schedules.schedule_expansion import expand_schedule

MIN_SAVING: Final = 0.005  # Share of a time or of bytes. Smaller differences are not reported.
# Number of instructions of a program. Compiling changes of a longer program takes too long.
MAX_COMPILED_INSTRUCTIONS: Final = 100_000
_I: Final = BACKWARD_INPUT
_COMPUTE_COSTS: Final = (*(COST_BY_OPCODE[op] for op in COMPUTE_OPS), "FB")
_SEGMENT_SUMS: Final = "sums of segments"
_ALL_TO_ALLS: Final = "all-to-alls of experts"
# `program.sequence_parallel` -> the row of `_FREE_COSTS` that also sets `tp_gather` to 0. With
# sequence parallelism, a gather is a part of a sum of segments. Without it, a gather is a part of a
# message (scatter-gather).
_FREE_GATHER_ROW: Final = {False: "messages", True: _SEGMENT_SUMS}
_COPY_LANES: Final = (Lane.D2H, Lane.H2D, Lane.DISK)


def _list_costs(is_included: Callable[[Row], bool]) -> tuple[str, ...]:
    return tuple(COST_BY_OPCODE[row.op] for row in INSTRUCTIONS if is_included(row))


# Name in the description of a row -> the costs that the row sets to 0.
_FREE_COSTS: Final[dict[str, tuple[str, ...]]] = {
    "messages": ("send", "tp_scatter"),
    _SEGMENT_SUMS: ("tp_reduce",),
    _ALL_TO_ALLS: ("dispatch", "combine"),
    "reductions": _list_costs(lambda row: row.lane is Lane.DP or Value.GRAD in row.gives),
    "gathers of weights": _list_costs(lambda row: row.lane is Lane.PARAMS),
    "snapshots": _list_costs(lambda row: Value.SNAPSHOT in row.gives),
    "copies to the host and its disk, and back,": _list_costs(
        lambda row: row.lane in _COPY_LANES and Value.SNAPSHOT not in row.gives
    ),
}
# Options of `compile` that change the memory of ranks: options for saved activations and for ZeRO.
# A row that `compile` refuses is not reported. For example, `compile` refuses "fit" without a
# memory limit, and more unsharded stages than a rank has.
_MEMORY_OPTIONS: Final[tuple[dict[str, Any], ...]] = (
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
_NO_ACTIVATION_OPTIONS: Final[dict[str, Any]] = {
    "recompute": None,
    "offload": None,
    "offload_to_disk": None,
}
_NO_ZERO_3_OPTIONS: Final[dict[str, Any]] = {"unsharded_stages": None, "unshard_prefetch": None}


class ChangeRow(NamedTuple):
    """One change of the run.

    Args:
        kind: The group of the row. From each group, only the row that saves the most time is
            reported.
        description: The change in words.
        costs: The costs with which the changed run is simulated.
        draft: The draft to compile, or None to keep the program.
        transfer_costs: The costs from which `compile` computes the order of the draft's transfers.
        options: The options of `compile` that differ from the options of the program.
        progress_model: The progress model, or None to keep the progress model of the run.
        max_activations: The row is reported only if the changed run's `peak_activations` is at most
            this number.
        baseline_kind: The kind of earlier rows with which this row is compared. This row is
            reported only if it takes less time than the best of these earlier rows. With "", this
            row is not compared with rows of another kind.
    """

    kind: str
    description: str
    costs: Costs
    draft: Program | None = None
    transfer_costs: Costs | None = None
    options: Mapping[str, Any] = {}
    progress_model: ProgressModel | None = None
    max_activations: float = np.inf
    baseline_kind: str = ""


@dataclass(frozen=True)
class SimulatedChange:
    """A change of the run, and its simulation.

    Args:
        row: The change.
        run: The simulation of the changed run.
        saved_share: The share of the time per microbatch that the change saves. It is negative if
            the changed run takes longer.
    """

    row: ChangeRow
    run: Timeline
    saved_share: float

    @property
    def description(self) -> str:
        """The change in words."""
        return self.row.description

    @property
    def memory(self) -> dict[str, float]:
        """The peak bytes of the fullest rank for each tier. Empty if the run has no sizes."""
        if self.run.sizes is None:
            return {}
        return {
            tier: max(float(curve.total.max(initial=0.0)) for curve in self.run.memory_on(tier))
            for tier in find_used_tiers(self.run.program)
        }

    def describe(self) -> str:
        """Return span, bubble and peak memory in words."""
        unit = self.run.unit and f" {self.run.unit}"
        words = [f"span {self.run.span:.4g}{unit}", f"bubble {self.run.bubble:.1%}"]
        for tier, peak_bytes in self.memory.items():
            words.append(f"{format_bytes(peak_bytes)} on the fullest {tier}")
        return ", ".join(words)


class Advice(NamedTuple):
    """The simulation of the unchanged run, and the simulations of changed runs.

    Args:
        baseline: The simulation without a change.
        relative_error: The relative error of the span of `baseline` compared with the span of the
            run. The error is 0 for a prediction. If its absolute value is above
            `MAX_PREDICTION_ERROR`, no change is simulated.
        changes: The best change of each kind, in descending order of the saved share.
        memory_changes: The changes of the memory of ranks that shorten the run or reduce its device
            memory, in ascending order of the span of the changed run.
        fits_memory: True if the run without a change is within the memory limit.
    """

    baseline: Timeline
    relative_error: float
    changes: list[SimulatedChange]
    memory_changes: list[SimulatedChange]
    fits_memory: bool = True

    @property
    def is_reliable(self) -> bool:
        """Return whether the simulation is close enough to the run to simulate changes."""
        return abs(self.relative_error) <= MAX_PREDICTION_ERROR

    @property
    def current(self) -> SimulatedChange:
        """The run without a change, as a `SimulatedChange`."""
        return SimulatedChange(ChangeRow("now", "as now", Costs()), self.baseline, 0.0)


def advise(
    timeline: Timeline,
    costs: Costs | None = None,
    schedule: Schedule | None = None,
    memory_limit: float | None = None,
) -> Advice:
    """Simulate changes of a run.

    Args:
        timeline: A predicted or measured run.
        costs: The costs from which a predicted run was computed. If None, `calibrate` computes the
            costs from the run.
        schedule: The schedule from which the program was compiled. If None, `advise` searches for a
            built-in schedule that compiles to the same program. Without a schedule, `advise` tries
            no change with more microbatches.
        memory_limit: The largest number of bytes that a rank may use on the device. Another program
            is reported only if every rank is within this limit.

    Raises:
        UsageError: `timeline` is not a Timeline.
    """
    require_timeline(timeline, "timeline")
    program, sizes = timeline.program, timeline.sizes
    costs = fill_missing_backwards(costs or calibrate(timeline), program)
    baseline = simulate_at_mean_times(timeline, costs)
    advice = Advice(baseline, compute_prediction_error(baseline, timeline), [], [])
    if not advice.is_reliable:
        return advice
    if memory_limit is not None and sizes is not None:
        advice = advice._replace(fits_memory=fits_memory_limit(program, sizes, memory_limit))
    table = _Table(baseline, costs, schedule or find_matching_schedule(program), memory_limit)
    best: dict[str, SimulatedChange] = {}
    for row in table.iter_time_changes():
        change = table.simulate_row(row)
        if change is None or change.run.peak_activations > row.max_activations:
            continue
        if row.draft is not None and table.exceeds_memory_limit(change.run.program):
            continue
        best_of_kind = best.get(row.kind)
        rival = best.get(row.baseline_kind)
        if rival is not None and change.run.span > rival.run.span * (1 - MIN_SAVING):
            continue
        if best_of_kind is None or change.saved_share > best_of_kind.saved_share + 1e-9:
            best[row.kind] = change
    changes = sorted(best.values(), key=lambda change: -change.saved_share)
    return advice._replace(
        changes=changes,
        memory_changes=_find_unbeaten(advice.current, table, fits_memory=advice.fits_memory),
    )


def _find_unbeaten(
    current: SimulatedChange, table: _Table, *, fits_memory: bool
) -> list[SimulatedChange]:
    """Return the changes that no other change beats in both time and device memory.

    The result is in ascending order of time, and so in descending order of device memory. If
    several changes take the same time, the one with the least memory on other tiers comes first.
    """
    seen_digests, candidates = {current.run.program.digest}, []
    for row in table.iter_memory_changes():
        change = table.simulate_row(row)
        if change is not None and change.run.program.digest not in seen_digests:
            seen_digests.add(change.run.program.digest)
            candidates.append(change)

    def by_time(change: SimulatedChange) -> tuple[float, float, float]:
        device, *other_tiers = change.memory.values() or (0.0,)
        return float(f"{change.run.span:.9g}"), sum(other_tiers), device

    unbeaten: list[SimulatedChange] = []
    current_memory = current.memory.get("device", 0.0)
    for change in sorted(candidates, key=by_time):
        device_memory = change.memory.get("device", 0.0)
        is_shorter = change.run.span <= current.run.span * (1 - MIN_SAVING)
        is_better = (
            is_shorter or device_memory < current_memory * (1 - MIN_SAVING) or not fits_memory
        )
        if is_better and all(device_memory < other.memory.get("device", 0.0) for other in unbeaten):
            unbeaten.append(change)
    return unbeaten


class _Table:
    """The table of changes to try for one run."""

    def __init__(
        self,
        baseline: Timeline,
        costs: Costs,
        schedule: Schedule | None,
        memory_limit: float | None,
    ) -> None:
        self.baseline = baseline
        self.costs = costs.with_defaults()
        self.schedule = schedule
        self.memory_limit = memory_limit
        self.program = baseline.program
        self.shape = baseline.program.shape
        self.compute = extract_compute(self.program)
        self.lowering = Lowering(self.program, baseline.progress_model)

    def iter_time_changes(self) -> Iterator[ChangeRow]:
        """Yield the changes that `Advice.changes` may contain."""
        yield from self._iter_even_stages()
        for description, names in _FREE_COSTS.items():
            if description not in (_SEGMENT_SUMS, _ALL_TO_ALLS) or self.program.segment_boundaries:
                free_costs = (
                    *names,
                    *["tp_gather"]
                    * (description == _FREE_GATHER_ROW[self.program.sequence_parallel]),
                )
                yield self._make_cost_row(
                    description,
                    f"{description} that take no time",
                    **dict.fromkeys(free_costs, 0.0),
                )
        if len(self.program) <= MAX_COMPILED_INSTRUCTIONS:
            yield from self._iter_other_programs()
        if self.baseline.progress_model != "per_edge":
            description = "the same program with a communicator per edge"
            yield ChangeRow("queues", description, self.costs, progress_model="per_edge")

    def _iter_other_programs(self) -> Iterator[ChangeRow]:
        """Yield changes for which another program is compiled."""
        for filler in ("W", "F", "all") if self.program.segment_boundaries else ():
            description = f"fill_collective_waits={filler}, in collectives between segments"
            yield self._make_draft_row(
                "fill", description, self.compute, fill_collective_waits=filler
            )
        description = "the same compute with other transfers"
        transfers = ChangeRow(
            "transfers", description, self.costs, self.compute, options={"overlap": False}
        )
        grouped = transfers._replace(
            kind="grouped", description=f"{description}, opposite ones grouped",
            options={"overlap": True}, baseline_kind="transfers",
        )  # fmt: skip
        for row, order in product((transfers, grouped), (None, round_costs(self.costs))):
            yield row._replace(transfer_costs=order)
        yield from self._iter_more_microbatches()
        yield from self._iter_other_schedules()
        yield from self._iter_greedy_orders()

    def iter_memory_changes(self) -> Iterator[ChangeRow]:
        """Yield the changes that `Advice.memory_changes` may contain."""
        if len(self.program) > MAX_COMPILED_INSTRUCTIONS:
            return
        sizes, zero = self.baseline.sizes, self.program.zero
        has_activation_sizes = sizes is not None and self.program.has_backward
        has_copies = {COST_BY_OPCODE[op] for op in HOST_TRIP} <= {*self.costs.specified}
        has_state_sizes = sizes is not None and not {*sizes.specified_parts}.isdisjoint(
            SHARDED_FROM_LEVEL
        )
        is_sharded_run = self.program.dp > 1 and (zero > 0 or has_state_sizes)
        compute_without_recompute = remove_recompute(self.compute)
        keeps_activations = self.program.used_opcodes.isdisjoint((RECOMPUTE, HOST_TRIP[0]))
        for options in _MEMORY_OPTIONS:
            description = ", ".join(
                f"{name}={json.dumps(value)}" for name, value in options.items()
            )
            is_for_activations = options.keys() <= _NO_ACTIVATION_OPTIONS.keys()
            if not options and keeps_activations:
                continue
            if (
                is_for_activations
                and has_activation_sizes
                and (has_copies or "offload" not in options)
            ):
                yield self._make_memory_row(
                    description or "all saved activations kept",
                    compute_without_recompute,
                    _NO_ACTIVATION_OPTIONS | options,
                )
            if not is_for_activations and is_sharded_run:
                reset_options = _NO_ZERO_3_OPTIONS if "zero" in options else {}
                yield self._make_memory_row(description, self.compute, reset_options | options)
        if is_sharded_run and is_sharded("params", zero):
            with suppress(SchedirError):
                yield self._make_memory_row(
                    "looped_bfs, breadth-first", expand_schedule(looped_bfs, self.shape), {}
                )

    def simulate_row(self, row: ChangeRow) -> SimulatedChange | None:
        """Compile and simulate a row. Return None if there is a SchedirError."""
        program, sizes = self.program, self.baseline.sizes
        model = row.progress_model or self.baseline.progress_model
        try:
            if row.draft is not None:
                program = self.lowering.compile_draft(row.draft, row.transfer_costs, **row.options)
            costs = adjust_for_zero(row.costs, self.program, program.zero, sizes)
            if program.shape != self.shape:  # `sizes` applies only to the shape of the run.
                sizes = None
            run = simulate(
                program,
                costs,
                progress_model=model,
                blocking_hosts=self.baseline.blocking_hosts,
                sizes=sizes,
            )
        except SchedirError:
            return None
        current_time = self.baseline.span / self.shape.microbatches
        changed_time = run.span / program.shape.microbatches
        if not current_time:
            return None
        run = replace(run, unit=self.baseline.unit)
        return SimulatedChange(row, run, 1 - changed_time / current_time)

    def exceeds_memory_limit(self, program: Program) -> bool:
        """Return whether a rank needs more memory than the limit. Without sizes, return False.

        Args:
            program: A changed program. Its stages may be another division of the run's model.
        """
        sizes = self.baseline.sizes
        if self.memory_limit is None or sizes is None:
            return False
        sizes = redistribute_values(sizes, self.shape.stages, program.shape.stages)
        return not fits_memory_limit(program, sizes, self.memory_limit)

    def _make_cost_row(self, kind: str, description: str, **costs: Cost) -> ChangeRow:
        """Return a row that simulates the same program with other costs."""
        return ChangeRow(kind, description, replace(self.costs, **costs))

    def _make_draft_row(
        self, kind: str, description: str, draft: Program, **options: Any
    ) -> ChangeRow:
        """Return a row that compiles a draft and simulates it with the costs of the run."""
        return ChangeRow(kind, description, self.costs, draft, self.costs, options)

    def _make_memory_row(
        self, description: str, draft: Program, options: Mapping[str, Any]
    ) -> ChangeRow:
        """Return a row that compiles a draft with other options for the memory of ranks."""
        limit = (
            {"sizes": self.baseline.sizes, "memory_limit": self.memory_limit}
            if self.memory_limit is not None
            else {}
        )
        return ChangeRow("memory", description, self.costs, draft, self.costs, {**options, **limit})

    def _iter_even_stages(self) -> Iterator[ChangeRow]:
        """Yield a row in which every stage takes the mean time, if a stage takes over 1 % more."""
        table = self.costs.for_opcode(FORWARD, self.shape) + self.costs.for_opcode(
            BACKWARD, self.shape
        )
        segments = self.program.segments_per_stage
        stage_times = sum_segments(table, segments).mean(1)
        slowest, mean_time = int(stage_times.argmax()), float(stage_times.mean())
        if not mean_time or stage_times[slowest] <= 1.01 * mean_time:
            return
        even_costs = {
            name: average_stages(c, segments)
            for name, c in self.costs.specified.items()
            if name in _COMPUTE_COSTS
        }
        first_segment = sum(segments[:slowest])
        last_segment = sum(segments[: slowest + 1]) - 1
        replicas = " and ".join(map(str, self.shape.replica_ranks[:, first_segment].tolist()))
        slow_stage = (
            f"stage {first_segment}"
            if first_segment == last_segment
            else f"the stage of segments {first_segment} to {last_segment}"
        )
        ratio = stage_times[slowest] / mean_time
        reason = f"(F and B of {slow_stage} on rank {replicas} take {ratio:.2f}x)"
        yield self._make_cost_row("even", f"stages that all take the mean {reason}", **even_costs)

    def _iter_more_microbatches(self) -> Iterator[ChangeRow]:
        """Yield a row with twice as many microbatches, if the schedule is known."""
        if self.schedule is None:
            return
        unsegmented, costs = self.program.unsegmented_shape, _double_microbatches(self.costs)
        with suppress(SchedirError):
            draft = expand_schedule(
                self.schedule, replace(unsegmented, microbatches=2 * unsegmented.microbatches)
            )
            draft = split_like(draft, self.program)
            description = "twice as many microbatches of this size"
            yield ChangeRow("microbatches", description, costs, draft, costs)

    def _iter_other_schedules(self) -> Iterator[ChangeRow]:
        """Yield rows for the built-in schedules.

        A row is reported only if the schedule needs no more activation memory than the run.
        """
        unsegmented = self.program.unsegmented_shape
        max_activations = self.baseline.peak_activations
        for name, schedule in get_built_in_schedules().items():
            placement, fixed_stages = get_placement_mark(schedule)
            for v in {fixed_stages} if fixed_stages else {1, unsegmented.stages_per_rank}:
                with suppress(SchedirError):
                    shape = PipelineShape(
                        self.shape.ranks, unsegmented.microbatches, v, placement or "loop",
                        optimizer_steps=self.shape.optimizer_steps,
                        weight_delay=get_weight_delay_mark(schedule) or 0,
                        sequence_chunks=self.shape.sequence_chunks,
                    )  # fmt: skip
                    draft = split_like(expand_schedule(schedule, shape), self.program)
                    is_excluded = (
                        name == self.program.name or draft.has_backward != self.program.has_backward
                    )
                    # A placement with a different number of rows has a different number of stage
                    # replicas.
                    if is_excluded or shape.placement_rows != self.shape.placement_rows:
                        continue
                    costs = self._split_costs_into(draft.shape.stages)
                    description = f"{name} with {v} stage{'s' * (v > 1)} per rank"
                    description += ", with no more activations"
                    if _I in draft.used_opcodes and _I not in self.program.used_opcodes:
                        description += "; I and W each half of B"
                    yield ChangeRow(
                        "schedule",
                        description,
                        costs,
                        draft,
                        costs,
                        max_activations=max_activations,
                    )

    def _split_costs_into(self, stages: int) -> Costs:
        """Return the costs of the run's model after its division into `stages` stages."""
        stage_costs = {name: c for name, c in self.costs.specified.items() if name in STAGE_COSTS}
        own_stages = self.shape.stages
        return replace(
            self.costs,
            **{k: redistribute_stages(c, own_stages, stages) for k, c in stage_costs.items()},
        )

    def _iter_greedy_orders(self) -> Iterator[ChangeRow]:
        """Yield greedy orders with the pairs in flight of the run, and with one more per rank."""
        if not self.program.has_backward:
            return
        letters = "IFW" if _I in self.program.used_opcodes else "BF"
        peak = self.baseline.peak_in_flight
        forward_counts = [np.count_nonzero(s.op == FORWARD) for s in self.program.streams]
        for extra, description in (
            (0, "a greedy order, with no more activations"),
            (1, "one more activation in flight on each rank, in greedy order"),
        ):
            if extra and (peak == forward_counts).all():
                return
            limits, frozen = (peak + extra).tolist(), self.program.frozen_stages
            with suppress(SchedirError):
                draft = greedy_schedule(
                    self.shape, letters, limits.__getitem__, self.costs, frozen_stages=frozen
                )
                yield self._make_draft_row("greedy", description, draft)


def _double_microbatches(costs: Costs) -> Costs:
    """Return the costs for twice as many microbatches. Costs per microbatch are repeated."""
    repeated = {
        name: from_grid(np.tile(to_grid(c), 2))
        for name, c in costs.specified.items()
        if is_per_microbatch(c)
    }
    return replace(costs, **repeated)
