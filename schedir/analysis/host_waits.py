"""Track what each blocking host has waited for before it issues an instruction."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.channels import LINE_BY_LANE, LINE_BY_OPCODE
from schedir.analysis.memory.buffer_slots import find_slot_reuses
from schedir.ir.dataflow import Dataflow
from schedir.ir.instruction_index import NO_POSITION, InstructionIndex, Positions
from schedir.ir.isa.instructions import (
    INSTRUCTIONS,
    LANES,
    TRANSFER_OPS,
    Lane,
    Opcode,
    find_segment_collectives,
)
from schedir.ir.program import Program


def find_host_waits(
    program: Program, entry_nodes: Positions, host_device_sync: bool
) -> NDArray[np.int32]:
    """What a host that blocks has waited for before it issues each instruction, shape (k, n).

    A row for each lane at which it waits (`LaneRow.host`).  What it runs itself, it has run: of
    all before an instruction, that is the one before.  What it waits for and then starts, as a
    gather, stands for its message and those before it on the lane: once they are there, nothing
    else can keep it.  Of a lane where instructions drain it first (`Row.drains`), that has
    ended which stands before the last of these.  The instructions of a lane itself follow each
    other anyway.  Behind what waits for another lane (`Row.waits`) all has ended that stands before
    that on the lane.

    With `host_device_sync` it also waits for its device (`Graph`).  `entry_nodes` are the nodes by
    which instructions are entered: what runs together does not wait for itself.
    """
    index = InstructionIndex.from_program(program)
    line = LINE_BY_OPCODE[index.op]
    rows = [_find_lane_waits(program, row.lane, line) for row in LANES]
    rows += _find_device_waits(program, entry_nodes) if host_device_sync else []
    return np.stack([row for row in rows if row is not None])


def find_known_ends(
    program: Program, positions: Positions, *, count_drains: bool = True
) -> Positions:
    """Where a host that blocks first knows that each of some instructions has ended.

    What it runs itself, it knows of at once: where it stands.  What it starts, and goes on, it
    knows of before the first that waits for it, or for what stands behind it on its lane; where
    nobody does, at the end of the Stream.  Without `count_drains` that it drains a lane counts for
    nothing, as of hosts that do not block.
    """
    index, flow = InstructionIndex.from_program(program), Dataflow.from_program(program)
    left = np.array([LANES[row.lane].host_action == "starts" for row in INSTRUCTIONS])[index.op]
    heard = positions.copy()
    if not left[positions].any():
        return heard
    line = LINE_BY_OPCODE[index.op]
    edges = [(np.arange(len(index)), giver) for giver in flow.givers] + [
        *find_slot_reuses(program).values()
    ]
    edges = [(needer[~left[needer]], giver[~left[needer]]) for needer, giver in edges]
    first = np.full(len(index), len(index))
    for one in np.unique(line[positions[left[positions]]]):
        own = np.flatnonzero(line == one)
        lane = INSTRUCTIONS[index.op[own[0]]].lane
        waits = index.is_op(_find_drain_ops(program, lane) if count_drains else ())[own[1:]]
        for needer, giver in [*edges, (own[1:][waits], own[:-1][waits])]:
            known = (giver != NO_POSITION) & (line[giver] == one)
            np.minimum.at(first, giver[known], needer[known])
        first[own] = np.minimum.accumulate(first[own][::-1])[::-1]
    last = program.offsets[index.rank[positions] + 1] - 1
    return np.where(left[positions], np.minimum(first[positions], last), positions).astype(np.int32)


def _find_device_waits(program: Program, entry_nodes: Positions) -> list[Positions]:
    """What a host that waits for its device has waited for, a row for each at a time.

    Who launches something waits for the last who did, and for each message since; a message is
    issued when the last who launched something has waited.
    """
    index = InstructionIndex.from_program(program)
    own = np.arange(len(index), dtype=np.int32)
    begin = program.offsets[index.rank].astype(np.int32)
    launches = ~index.is_op(TRANSFER_OPS)
    last = np.full_like(own, NO_POSITION)
    last[1:] = np.maximum.accumulate(np.where(launches, own, np.int32(NO_POSITION)))[:-1]
    last[last < begin] = NO_POSITION
    since = own - np.maximum(last, begin - 1) - 1
    rows = [last] + [
        np.where(since >= back, own - back, np.int32(NO_POSITION))
        for back in range(1, int(since[launches].max(initial=0)) + 1)
    ]
    rows = [np.where(entry_nodes[row] == entry_nodes, np.int32(NO_POSITION), row) for row in rows]
    who = np.where(launches, own, last)
    return [np.where(who == NO_POSITION, np.int32(NO_POSITION), row[who]) for row in rows]


def _find_drain_ops(program: Program, lane: Lane) -> list[Opcode]:
    """What on a lane a host drains it for first."""
    return [
        row.op for row in INSTRUCTIONS
        if row.lane is lane and row.host_sync
        and (row.host_sync == "always" or program.dp > 1)
    ]  # fmt: skip


def _find_lane_waits(program: Program, lane: Lane, lines: NDArray[np.int64]) -> Positions | None:
    """What a host has waited for on a lane before each instruction; None if it never waits."""
    index = InstructionIndex.from_program(program)
    drains, waits = (
        _find_drain_ops(program, lane),
        [row.op for row in INSTRUCTIONS if lane in row.host_sync_lanes],
    )
    if LANES[lane].host_action == "starts" and program.used_opcodes.isdisjoint((*drains, *waits)):
        return None
    waited = np.full(len(index), NO_POSITION, np.int32)
    own = np.flatnonzero(lines == LINE_BY_LANE[lane])
    if LANES[lane].host_action == "starts":
        waited[own[1:]] = np.where(index.is_op(drains)[own[1:]], own[:-1], NO_POSITION)
    else:  # what pieces give the host has made itself
        waited[own] = np.where(
            index.is_op(find_segment_collectives(program.sequence_parallel))[own], NO_POSITION, own
        )
    if len(at := index.find_all_positions(waits)) and len(own):
        waited[at] = np.append(own, NO_POSITION)[np.searchsorted(own, at) - 1]
    before = np.full_like(waited, NO_POSITION)
    before[1:] = np.maximum.accumulate(waited)[:-1]
    here = (before >= program.offsets[index.rank]) & (lines != LINE_BY_LANE[lane])
    return np.where(here, before, np.int32(NO_POSITION))
