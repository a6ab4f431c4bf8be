"""Track what each blocking host has waited for before it issues an instruction."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.channels import LINE_OF, LINES
from schedir.analysis.memory.buffer_slots import reuses
from schedir.ir.dataflow import Dataflow
from schedir.ir.instruction_index import NONE, InstructionIndex, Positions
from schedir.ir.isa.instructions import LANES, ROWS, TRANSFERS, Lane, Opcode, between_segments
from schedir.ir.program import Program


def host_waits(program: Program, enter: Positions, host_device_sync: bool) -> NDArray[np.int32]:
    """What a host that blocks has waited for before it issues each instruction, shape (k, n).

    A row for each lane at which it waits (`LaneRow.host`).  What it runs itself, it has run: of
    all before an instruction, that is the one before.  What it waits for and then starts, as a
    gather, stands for its message and those before it on the lane: once they are there, nothing
    else can keep it.  Of a lane where instructions drain it first (`Row.drains`), that has
    ended which stands before the last of these.  The instructions of a lane itself follow each
    other anyway.  Behind what waits for another lane (`Row.waits`) all has ended that stands before
    that on the lane.

    With `host_device_sync` it also waits for its device (`Graph`).  `enter` are the nodes by which
    instructions are entered: what runs together does not wait for itself.
    """
    index = InstructionIndex.of(program)
    line = LINE_OF[index.op]
    rows = [_waited(program, row.lane, line) for row in LANES]
    rows += _device_waited(program, enter) if host_device_sync else []
    return np.stack([row for row in rows if row is not None])


def heard_of(program: Program, at: Positions, *, drains: bool = True) -> Positions:
    """Where a host that blocks first knows that each of some instructions has ended.

    What it runs itself, it knows of at once: where it stands.  What it starts, and goes on, it
    knows of before the first that waits for it, or for what stands behind it on its lane; where
    nobody does, at the end of the Stream.  Without `drains` that it drains a lane counts for
    nothing, as of hosts that do not block.
    """
    index, flow = InstructionIndex.of(program), Dataflow.of(program)
    left = np.array([LANES[row.lane].host == "starts" for row in ROWS])[index.op]
    heard = at.copy()
    if not left[at].any():
        return heard
    line = LINE_OF[index.op]
    edges = [(np.arange(len(index)), giver) for giver in flow.needs] + [*reuses(program).values()]
    edges = [(needer[~left[needer]], giver[~left[needer]]) for needer, giver in edges]
    first = np.full(len(index), len(index))
    for one in np.unique(line[at[left[at]]]):
        own = np.flatnonzero(line == one)
        lane = ROWS[index.op[own[0]]].lane
        waits = index.is_op(_drains(program, lane) if drains else ())[own[1:]]
        for needer, giver in [*edges, (own[1:][waits], own[:-1][waits])]:
            known = (giver != NONE) & (line[giver] == one)
            np.minimum.at(first, giver[known], needer[known])
        first[own] = np.minimum.accumulate(first[own][::-1])[::-1]
    last = program.offsets[index.rank[at] + 1] - 1
    return np.where(left[at], np.minimum(first[at], last), at).astype(np.int32)


def _device_waited(program: Program, enter: Positions) -> list[Positions]:
    """What a host that waits for its device has waited for, a row for each at a time.

    Who launches something waits for the last who did, and for each message since; a message is
    issued when the last who launched something has waited.
    """
    index = InstructionIndex.of(program)
    own = np.arange(len(index), dtype=np.int32)
    begin = program.offsets[index.rank].astype(np.int32)
    launches = ~index.is_op(TRANSFERS)
    last = np.full_like(own, NONE)
    last[1:] = np.maximum.accumulate(np.where(launches, own, np.int32(NONE)))[:-1]
    last[last < begin] = NONE
    since = own - np.maximum(last, begin - 1) - 1
    rows = [last] + [
        np.where(since >= back, own - back, np.int32(NONE))
        for back in range(1, int(since[launches].max(initial=0)) + 1)
    ]
    rows = [np.where(enter[row] == enter, np.int32(NONE), row) for row in rows]
    who = np.where(launches, own, last)
    return [np.where(who == NONE, np.int32(NONE), row[who]) for row in rows]


def _drains(program: Program, lane: Lane) -> list[Opcode]:
    """What on a lane a host drains it for first."""
    return [
        row.op for row in ROWS
        if row.lane is lane and row.drains_lane
        and (row.drains_lane == "always" or program.dp > 1)
    ]  # fmt: skip


def _waited(program: Program, lane: Lane, line: NDArray[np.int64]) -> Positions | None:
    """What a host has waited for on a lane before each instruction; None if it never waits."""
    index = InstructionIndex.of(program)
    drains, waits = _drains(program, lane), [row.op for row in ROWS if lane in row.waits_for_lanes]
    if LANES[lane].host == "starts" and program.ops.isdisjoint((*drains, *waits)):
        return None
    waited = np.full(len(index), NONE, np.int32)
    own = np.flatnonzero(line == LINES[lane])
    if LANES[lane].host == "starts":
        waited[own[1:]] = np.where(index.is_op(drains)[own[1:]], own[:-1], NONE)
    else:  # what pieces give the host has made itself
        waited[own] = np.where(
            index.is_op(between_segments(program.sequence_parallel))[own], NONE, own
        )
    if len(at := index.where_all(waits)) and len(own):
        waited[at] = np.append(own, NONE)[np.searchsorted(own, at) - 1]
    before = np.full_like(waited, NONE)
    before[1:] = np.maximum.accumulate(waited)[:-1]
    here = (before >= program.offsets[index.rank]) & (line != LINES[lane])
    return np.where(here, before, np.int32(NONE))
