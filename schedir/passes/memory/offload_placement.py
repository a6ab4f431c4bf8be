"""Choose where offload and reload instructions stand, and how many buffers they need."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.critical_path.longest_path import compute_earliest_times
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.memory.buffer_slots import (
    SLOT_KINDS,
    count_min_slots,
    count_slots,
    find_host_values,
    number_groups,
)
from schedir.analysis.memory.footprint import compute_footprints
from schedir.ir.cost.cost_fields import COST_BY_OPCODE
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import add_tolerance
from schedir.ir.dataflow import Dataflow
from schedir.ir.instruction_index import InstructionIndex
from schedir.ir.isa.instructions import (
    COMPUTE_OPS,
    FORWARD,
    INSTRUCTIONS,
    SLOT_VALUES,
    TIERS,
    Opcode,
    Value,
    find_modifiers,
)
from schedir.ir.program import ADDRESS_MASK, OP_SHIFT, Program, SlotCounts, Words
from schedir.passes.insertion import insert_at_positions
from schedir.passes.memory.buffer_sharing import DEFAULT_MESSAGE_COST, reduce_slots
from schedir.passes.pass_types import Options
from schedir.passes.selection import split_addresses

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Positions = NDArray[np.intp]
_MAX_LEADS: Final = 4  # how often what comes back too late is tried earlier


class OffloadRoundTrip(NamedTuple):
    """There and back: the two instructions that move a value to another tier, and back."""

    offload_op: Opcode
    reload_op: Opcode


_MOVE_OPS: Final = {  # of what a forward saved, by from where to where
    (change.before, change.after): row.op
    for row in INSTRUCTIONS for change in row.changes
    if change.value is Value.SAVED and change.before in TIERS
}  # fmt: skip
HOST_TRIP: Final = OffloadRoundTrip(_MOVE_OPS["device", "host"], _MOVE_OPS["host", "device"])
DISK_TRIP: Final = OffloadRoundTrip(_MOVE_OPS["host", "disk"], _MOVE_OPS["disk", "host"])


def fill_move_costs(program: Program, options: Options) -> Options:
    """The options with costs at which moving takes time: if they say none, half a forward."""
    costs = options.costs or Costs()
    usual = DEFAULT_MESSAGE_COST * float(costs.for_opcode(FORWARD, program.shape).mean())
    free = {
        COST_BY_OPCODE[op]: usual
        for op in _MOVE_OPS.values()
        if not costs.for_opcode(op, program.shape).any()
    }
    return replace(options, costs=replace(costs, **free))


class ForwardLifetimes(NamedTuple):
    """Where forwards stand, and the first who uses what each saved, of each of some addresses."""

    address: Words
    producer: Positions
    first_user: Positions


def find_lifetimes(program: Program) -> ForwardLifetimes:
    """Of all that is saved and used again, where it is made and first used on the compute lane."""
    own = Dataflow.from_program(program).find_lifetimes(Value.SAVED)
    address = program.words & ADDRESS_MASK
    made = own.filled_at.astype(np.intp)
    first = {
        int(address[at]): at
        for op in reversed((*find_modifiers(Value.SAVED),))
        if op in COMPUTE_OPS
        for at in np.flatnonzero(program.op == op).tolist()
    }
    used = [first.get(int(address[m]), f) for m, f in zip(made, own.freed_at.tolist(), strict=True)]
    return ForwardLifetimes(address[made], made, np.array(used, np.intp))


def compute_move_costs(program: Program, op: Opcode, addresses: Words, options: Options) -> Floats:
    assert options.costs is not None
    table = options.costs.for_opcode(op, program.shape)
    stage, mb = split_addresses(addresses)
    return np.asarray(table[stage, mb if table.shape[1] > 1 else 0])


# ---------------------------------------------------------------- where they stand


def place_offloads(program: Program, offloaded: Words, spilled: Words, options: Options) -> Program:
    """The program with what moves some addresses to the host, and some of these to the disk."""
    if not len(offloaded):
        return program
    own = find_lifetimes(program)
    there = np.isin(own.address, offloaded)
    program = _insert_round_trip(
        program, HOST_TRIP, own.producer[there], own.first_user[there], options
    )
    if len(spilled):
        back = find_lifetimes(program)
        back = ForwardLifetimes(
            *(each[program.op[back.producer] == HOST_TRIP.reload_op] for each in back)
        )
        address = program.words & ADDRESS_MASK
        spills = np.isin(address, spilled)
        gone, used = (np.flatnonzero((program.op == op) & spills) for op in HOST_TRIP)
        gone, used = (at[np.argsort(address[at], kind="stable")] for at in (gone, used))
        program = _insert_round_trip(program, DISK_TRIP, gone, used, options, back)
    return program


def _insert_round_trip(
    program: Program,
    trip: OffloadRoundTrip,
    producers: Positions,
    users: Positions,
    options: Options,
    reloads: ForwardLifetimes | None = None,
) -> Program:
    """The program with what moves values away behind some positions, and back before others.

    Where these others are moves themselves, `reloads` has all of them, and who uses what they
    bring: they need not begin before that asks for it.
    """
    order = np.argsort(users, kind="stable")
    producers, users = producers[order], users[order]
    address = (program.words & ADDRESS_MASK)[producers]
    groups = np.append(np.flatnonzero(~program.joined), len(program))
    leaves = groups[np.searchsorted(groups, producers, side="right")]
    needed = groups[np.searchsorted(groups, users, side="right") - 1]
    rank = _find_ranks(program, producers)
    words = [address | int(op) << OP_SHIFT for op in trip]

    def back_at(place: Positions) -> Program:
        at, ranks = np.concatenate([leaves, place]), np.concatenate([rank, rank])
        return insert_at_positions(program, at, ranks, np.concatenate(words))

    def times(found: Program) -> tuple[Floats, Floats, Program]:
        """When what was there before starts and ends."""
        reached = compute_earliest_times(
            Graph.from_program(found, options.progress_model), options.costs
        )
        old = ~np.isin(found.op, trip) | ~np.isin(found.words & ADDRESS_MASK, address)
        return reached.start[old], reached.end[old], found

    def as_late_as(start: Floats, end: Floats, lead: int) -> Program:
        """In front of what is computed when it must begin, to end at these times, or earlier by so
        many times what moving takes."""
        if reloads is not None:
            takes = compute_move_costs(program, HOST_TRIP.reload_op, reloads.address, options)
            start = start.copy()
            start[reloads.producer] = _compute_latest_starts(
                start[reloads.first_user], takes, _find_ranks(program, reloads.producer)
            )
        takes = compute_move_costs(program, trip.reload_op, address, options)
        late = _compute_latest_starts(start[users], takes, rank) - lead * takes
        place, compute = needed.copy(), np.isin(program.op, COMPUTE_OPS)
        for one in np.unique(rank).tolist():
            mine = np.arange(*program.offsets[one : one + 2])
            mine, here = mine[compute[mine]], rank == one
            first = np.searchsorted(end[mine], late[here], side="right")
            place[here] = mine[np.minimum(first, len(mine) - 1)]  # the last may take no time
        place = groups[np.searchsorted(groups, place, side="right") - 1]
        return back_at(np.maximum.accumulate(np.clip(place, leaves, needed)))

    # The times of uses are those where moving takes its time; or, where moves wait for each other,
    # those without it.  Where neither does, they come back as they are asked for.
    last, ideal = times(back_at(needed)), times(program)
    best, least = last[2], float(last[1].max(initial=0.0)) * (1 + 1e-9)
    for lead, (start, end, _) in product(range(_MAX_LEADS), (last, ideal)):
        _, tried, found = times(as_late_as(start, end, lead))
        if tried.max(initial=0.0) <= least:
            return found
    return best


def _find_ranks(program: Program, positions: Positions) -> Positions:
    return np.searchsorted(program.offsets, positions, side="right") - 1


def _compute_latest_starts(start: Floats, durations: Floats, rank: Positions) -> Floats:
    """When each of some moves, in order on the lane of their rank, may start at the latest to end
    by the start of what they are for."""
    found = np.empty(len(start))
    for one in np.unique(rank).tolist():
        here = rank == one
        before = np.cumsum(durations[here])
        latest = start[here] - before
        found[here] = np.minimum.accumulate(latest[::-1])[::-1] + before - durations[here]
    return found


# ---------------------------------------------------------------- how many are there at once

Tier = Literal["device", "host"]
_SLOT_FIELDS: Final[dict[Tier, str]] = {"device": "saved", "host": "host"}


class SlotRange(NamedTuple):
    """On a tier, the fewest slots that each rank can have, and the most that are of any use."""

    tier: Tier
    min_slots: Counts
    max_slots: Counts

    @classmethod
    def from_program(cls, program: Program, tier: Tier) -> SlotRange:
        """The room that a program can have, without any said of it."""
        if tier == "host":
            own = find_host_values(program)
            return cls(
                tier,
                own.count_peak(number_groups(InstructionIndex.from_program(program))),
                np.diff(own.rank_offsets),
            )
        least = count_min_slots(program)[:, SLOT_VALUES.index(Value.SAVED)]
        return cls(tier, least, count_slots(program)[:, SLOT_KINDS.index(Value.SAVED)])

    def set_slots(self, program: Program, slots: Counts) -> Program:
        """The program with so many slots."""
        told = program.slots or [SlotCounts.unspecified()] * program.shape.ranks
        return program.with_slots(
            [own._replace(**{_SLOT_FIELDS[self.tier]: n})
             for own, n in zip(told, slots.tolist(), strict=True)]
        )  # fmt: skip

    def find_max_within_limit(
        self, program: Program, options: Options, limit: float | None
    ) -> Counts:
        """The most of each rank with which it holds no more than a limit; the fewest where nothing
        helps."""
        if limit is None or options.sizes is None:
            return self.max_slots
        low, high = (
            self.min_slots,
            self.max_slots + 1,
        )  # of which the first is taken, whether it helps
        while (high - low > 1).any():
            middle = (low + high) // 2
            holds = compute_peak_memory(self.set_slots(program, middle), options, self.tier)
            fits = holds <= add_tolerance(limit)
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
            high = np.maximum(high, low + 1)
        return low

    def find_sufficient_slots(
        self, program: Program, options: Options, max_slots: Counts
    ) -> Counts:
        """The fewest that keep the predicted time with the most."""
        least = self.min_slots
        span = predict_span(self.set_slots(program, max_slots), options) * (1 + 1e-9)

        def keeps(number: Counts) -> bool:
            return predict_span(self.set_slots(program, number), options) <= span

        low, high = -1, int((max_slots - least).max(initial=0))
        while high - low > 1:  # as many more than the fewest on all ranks
            middle = (low + high) // 2
            kept = keeps(np.minimum(least + middle, max_slots))
            low, high = (low, middle) if kept else (middle, high)
        return reduce_slots(np.minimum(least + high, max_slots), least, keeps)


def compute_peak_memory(program: Program, options: Options, tier: Tier) -> Floats:
    """The most that each rank holds on a tier, whatever takes how long, in what becomes of a
    program."""
    assert options.sizes is not None
    lowered = options.run_later_passes(program)
    return np.array(
        [
            own.total_bytes.max()
            for own in compute_footprints(lowered, options.sizes, tier, worst_case=True)
        ]
    )


def predict_span(program: Program, options: Options) -> float:
    """The predicted time."""
    end = compute_earliest_times(Graph(program, options.progress_model), options.costs).end
    return float(end.max(initial=0.0))
