"""Choose where offload and reload instructions stand, and how many buffers they need."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.critical_path.longest_path import walk
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.memory.buffer_slots import KINDS, counts, groups, minimum_slots, on_host
from schedir.analysis.memory.footprint import held
from schedir.ir.cost.cost_fields import FIELD
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import ample
from schedir.ir.dataflow import Dataflow
from schedir.ir.instruction_index import InstructionIndex
from schedir.ir.isa.instructions import (
    COMPUTE,
    FORWARD,
    ROWS,
    SLOTTED,
    TIERS,
    Opcode,
    Value,
    changes,
)
from schedir.ir.program import ADDRESS, OP, Program, SlotCounts, Words
from schedir.passes.insertion import at_places
from schedir.passes.memory.buffer_sharing import MESSAGE, fewer_in_parts
from schedir.passes.pass_types import Options
from schedir.passes.selection import stages_of

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Positions = NDArray[np.intp]
_LEADS: Final = 4  # how often what comes back too late is tried earlier


class OffloadRoundTrip(NamedTuple):
    """There and back: the two instructions that move a value to another tier, and back."""

    there: Opcode
    back: Opcode


_MOVES: Final = {  # of what a forward saved, by from where to where
    (change.before, change.after): row.op
    for row in ROWS for change in row.changes
    if change.value is Value.SAVED and change.before in TIERS
}  # fmt: skip
HOST: Final = OffloadRoundTrip(_MOVES["device", "host"], _MOVES["host", "device"])
DISK: Final = OffloadRoundTrip(_MOVES["host", "disk"], _MOVES["disk", "host"])


def priced(program: Program, options: Options) -> Options:
    """The options with costs at which moving takes time: if they say none, half a forward."""
    costs = options.costs or Costs()
    usual = MESSAGE * float(costs.of(FORWARD, program.shape).mean())
    free = {FIELD[op]: usual for op in _MOVES.values() if not costs.of(op, program.shape).any()}
    return replace(options, costs=replace(costs, **free))


class ForwardLifetimes(NamedTuple):
    """Where forwards stand, and the first who uses what each saved, of each of some addresses."""

    address: Words
    made: Positions
    used: Positions


def lives(program: Program) -> ForwardLifetimes:
    """Of all that is saved and used again, where it is made and first used on the compute lane."""
    own = Dataflow.of(program).lives(Value.SAVED)
    address = program.words & ADDRESS
    made = own.fill.astype(np.intp)
    first = {
        int(address[at]): at
        for op in reversed((*changes(Value.SAVED),))
        if op in COMPUTE
        for at in np.flatnonzero(program.op == op).tolist()
    }
    used = [first.get(int(address[m]), f) for m, f in zip(made, own.freed.tolist(), strict=True)]
    return ForwardLifetimes(address[made], made, np.array(used, np.intp))


def cost_of(program: Program, op: Opcode, addresses: Words, options: Options) -> Floats:
    assert options.costs is not None
    table = options.costs.of(op, program.shape)
    stage, mb = stages_of(addresses)
    return np.asarray(table[stage, mb if table.shape[1] > 1 else 0])


# ---------------------------------------------------------------- where they stand


def placed(program: Program, chosen: Words, spilled: Words, options: Options) -> Program:
    """The program with what moves some addresses to the host, and some of these to the disk."""
    if not len(chosen):
        return program
    own = lives(program)
    there = np.isin(own.address, chosen)
    program = _moved(program, HOST, own.made[there], own.used[there], options)
    if len(spilled):
        back = lives(program)
        back = ForwardLifetimes(*(each[program.op[back.made] == HOST.back] for each in back))
        address = program.words & ADDRESS
        spills = np.isin(address, spilled)
        gone, used = (np.flatnonzero((program.op == op) & spills) for op in HOST)
        gone, used = (at[np.argsort(address[at], kind="stable")] for at in (gone, used))
        program = _moved(program, DISK, gone, used, options, back)
    return program


def _moved(
    program: Program,
    trip: OffloadRoundTrip,
    made: Positions,
    used: Positions,
    options: Options,
    back: ForwardLifetimes | None = None,
) -> Program:
    """The program with what moves values away behind some positions, and back before others.

    Where these others are moves themselves, `back` has all of them, and who uses what they bring:
    they need not begin before that asks for it.
    """
    order = np.argsort(used, kind="stable")
    made, used = made[order], used[order]
    address = (program.words & ADDRESS)[made]
    groups = np.append(np.flatnonzero(~program.joined), len(program))
    leaves = groups[np.searchsorted(groups, made, side="right")]
    needed = groups[np.searchsorted(groups, used, side="right") - 1]
    rank = _rank(program, made)
    words = [address | int(op) << OP for op in trip]

    def back_at(place: Positions) -> Program:
        at, ranks = np.concatenate([leaves, place]), np.concatenate([rank, rank])
        return at_places(program, at, ranks, np.concatenate(words))

    def times(found: Program) -> tuple[Floats, Floats, Program]:
        """When what was there before starts and ends."""
        reached = walk(Graph.of(found, options.progress_model), options.costs)
        old = ~np.isin(found.op, trip) | ~np.isin(found.words & ADDRESS, address)
        return reached.start[old], reached.end[old], found

    def as_late_as(start: Floats, end: Floats, lead: int) -> Program:
        """In front of what is computed when it must begin, to end at these times, or earlier by so
        many times what moving takes."""
        if back is not None:
            takes = cost_of(program, HOST.back, back.address, options)
            start = start.copy()
            start[back.made] = _latest(start[back.used], takes, _rank(program, back.made))
        takes = cost_of(program, trip.back, address, options)
        late = _latest(start[used], takes, rank) - lead * takes
        place, compute = needed.copy(), np.isin(program.op, COMPUTE)
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
    for lead, (start, end, _) in product(range(_LEADS), (last, ideal)):
        _, tried, found = times(as_late_as(start, end, lead))
        if tried.max(initial=0.0) <= least:
            return found
    return best


def _rank(program: Program, at: Positions) -> Positions:
    return np.searchsorted(program.offsets, at, side="right") - 1


def _latest(start: Floats, takes: Floats, rank: Positions) -> Floats:
    """When each of some moves, in order on the lane of their rank, may start at the latest to end
    by the start of what they are for."""
    found = np.empty(len(start))
    for one in np.unique(rank).tolist():
        here = rank == one
        before = np.cumsum(takes[here])
        latest = start[here] - before
        found[here] = np.minimum.accumulate(latest[::-1])[::-1] + before - takes[here]
    return found


# ---------------------------------------------------------------- how many are there at once

Tier = Literal["device", "host"]
_FIELD: Final[dict[Tier, str]] = {"device": "saved", "host": "host"}


class SlotRange(NamedTuple):
    """On a tier, the fewest slots that each rank can have, and the most that are of any use."""

    tier: Tier
    least: Counts
    most: Counts

    @classmethod
    def of(cls, program: Program, tier: Tier) -> SlotRange:
        """The room that a program can have, without any said of it."""
        if tier == "host":
            own = on_host(program)
            return cls(tier, own.peak(groups(InstructionIndex.of(program))), np.diff(own.first))
        least = minimum_slots(program)[:, SLOTTED.index(Value.SAVED)]
        return cls(tier, least, counts(program)[:, KINDS.index(Value.SAVED)])

    def said(self, program: Program, number: Counts) -> Program:
        """The program with so many slots."""
        told = program.slots or [SlotCounts.unsaid()] * program.shape.ranks
        return program.with_slots(
            [own._replace(**{_FIELD[self.tier]: n})
             for own, n in zip(told, number.tolist(), strict=True)]
        )  # fmt: skip

    def within(self, program: Program, options: Options, limit: float | None) -> Counts:
        """The most of each rank with which it holds no more than a limit; the fewest where nothing
        helps."""
        if limit is None or options.sizes is None:
            return self.most
        low, high = self.least, self.most + 1  # of which the first is taken, whether it helps
        while (high - low > 1).any():
            middle = (low + high) // 2
            holds = held_most(self.said(program, middle), options, self.tier)
            fits = holds <= ample(limit)
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
            high = np.maximum(high, low + 1)
        return low

    def enough(self, program: Program, options: Options, most: Counts) -> Counts:
        """The fewest that keep the predicted time with the most."""
        least = self.least
        span = span_of(self.said(program, most), options) * (1 + 1e-9)

        def keeps(number: Counts) -> bool:
            return span_of(self.said(program, number), options) <= span

        low, high = -1, int((most - least).max(initial=0))
        while high - low > 1:  # as many more than the fewest on all ranks
            middle = (low + high) // 2
            kept = keeps(np.minimum(least + middle, most))
            low, high = (low, middle) if kept else (middle, high)
        return fewer_in_parts(np.minimum(least + high, most), least, keeps)


def held_most(program: Program, options: Options, tier: Tier) -> Floats:
    """The most that each rank holds on a tier, whatever takes how long, in what becomes of a
    program."""
    assert options.sizes is not None
    lowered = options.rest(program)
    return np.array([own.bytes.max() for own in held(lowered, options.sizes, tier, late=True)])


def span_of(program: Program, options: Options) -> float:
    """The predicted time."""
    end = walk(Graph(program, options.progress_model), options.costs).end
    return float(end.max(initial=0.0))
