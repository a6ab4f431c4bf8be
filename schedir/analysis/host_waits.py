"""Find the instructions that a blocking host has waited for before it issues an instruction."""

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
    """Return the instructions that a blocking host has waited for before each instruction.

    There is a row for each lane at which the host waits (`LaneRow.host_action`):

    - The host runs the instructions of some lanes itself. The row contains, for each instruction,
      the last instruction of the lane before it.
    - On other lanes, the host waits for the inputs of an instruction and then starts it. An example
      is the gather of a received activation. When the host starts the gather, the message and the
      earlier instructions of the lane have ended. Nothing else can delay the gather, so the row
      contains the last instruction that the host started. Collectives between segments are left
      out, because the host computes their inputs itself.
    - Before some instructions, the host waits until their lane is empty (`Row.host_sync`). Then all
      earlier instructions of the lane have ended.
    - Some instructions wait for another lane (`Row.host_sync_lanes`). After such an instruction,
      all earlier instructions of the other lane have ended.

    Instructions of one lane run in order in any case. So the row of a lane has no entries for
    instructions of the same lane.

    Args:
        program: The program.
        entry_nodes: The node at which each instruction starts, shape (n,). Instructions of one
            group do not wait for each other.
        host_device_sync: True to add rows for a host that waits for its device. See `Graph`.

    Returns:
        Positions of shape (k, n); -1 where the host has waited for nothing.
    """
    index = InstructionIndex.from_program(program)
    line = LINE_BY_OPCODE[index.op]
    rows = [_find_lane_waits(program, row.lane, line) for row in LANES]
    rows += _find_device_waits(program, entry_nodes) if host_device_sync else []
    return np.stack([row for row in rows if row is not None])


def find_known_ends(
    program: Program, positions: Positions, *, count_drains: bool = True
) -> Positions:
    """Return the position at which a blocking host first observes the end of each instruction.

    If the host runs the instruction itself, the result is the position of the instruction. If the
    host only starts the instruction, the result is the first instruction that waits for this
    instruction or for a later one of the same lane. If there is no such instruction, the result is
    the last instruction of the Stream.

    Args:
        program: The program.
        positions: Positions of the instructions.
        count_drains: True to include the waits of the host until a lane is empty. Hosts that do not
            block have no such waits.

    Returns:
        Positions, in the shape of `positions`.
    """
    index = InstructionIndex.from_program(program)
    flow = Dataflow.from_program(program)
    is_async = np.array([LANES[row.lane].host_action == "starts" for row in INSTRUCTIONS])[index.op]
    known_ends = positions.copy()
    if not is_async[positions].any():
        return known_ends
    line = LINE_BY_OPCODE[index.op]
    edges = [(np.arange(len(index)), giver) for giver in flow.givers] + [
        *find_slot_reuses(program).values()
    ]
    edges = [(needer[~is_async[needer]], giver[~is_async[needer]]) for needer, giver in edges]
    first_needs = np.full(len(index), len(index))
    for number in np.unique(line[positions[is_async[positions]]]):
        members = np.flatnonzero(line == number)
        lane = INSTRUCTIONS[index.op[members[0]]].lane
        is_drain = index.is_op(_find_drain_ops(program, lane) if count_drains else ())[members[1:]]
        for needer, giver in [*edges, (members[1:][is_drain], members[:-1][is_drain])]:
            is_on_line = (giver != NO_POSITION) & (line[giver] == number)
            np.minimum.at(first_needs, giver[is_on_line], needer[is_on_line])
        first_needs[members] = np.minimum.accumulate(first_needs[members][::-1])[::-1]
    last_of_rank = program.offsets[index.rank[positions] + 1] - 1
    return np.where(
        is_async[positions], np.minimum(first_needs[positions], last_of_rank), positions
    ).astype(np.int32)


def _find_device_waits(program: Program, entry_nodes: Positions) -> list[Positions]:
    """Return the rows for a host that waits for its device at each launch.

    A launch waits for the previous launch, and for each message since then. A message is issued
    after the waits of the last launch before it. Each row has one predecessor per instruction.
    """
    index = InstructionIndex.from_program(program)
    positions = np.arange(len(index), dtype=np.int32)
    stream_start = program.offsets[index.rank].astype(np.int32)
    is_launch = ~index.is_op(TRANSFER_OPS)
    last_launch = np.full_like(positions, NO_POSITION)
    last_launch[1:] = np.maximum.accumulate(np.where(is_launch, positions, np.int32(NO_POSITION)))[
        :-1
    ]
    last_launch[last_launch < stream_start] = NO_POSITION
    distance = positions - np.maximum(last_launch, stream_start - 1) - 1
    rows = [last_launch] + [
        np.where(distance >= offset, positions - offset, np.int32(NO_POSITION))
        for offset in range(1, int(distance[is_launch].max(initial=0)) + 1)
    ]
    rows = [np.where(entry_nodes[row] == entry_nodes, np.int32(NO_POSITION), row) for row in rows]
    waiter = np.where(is_launch, positions, last_launch)
    return [np.where(waiter == NO_POSITION, np.int32(NO_POSITION), row[waiter]) for row in rows]


def _find_drain_ops(program: Program, lane: Lane) -> list[Opcode]:
    """Return the opcodes of a lane before which a host waits until the lane is empty."""
    return [
        row.op for row in INSTRUCTIONS
        if row.lane is lane and row.host_sync
        and (row.host_sync == "always" or program.dp > 1)
    ]  # fmt: skip


def _find_lane_waits(program: Program, lane: Lane, lines: NDArray[np.int64]) -> Positions | None:
    """Return the last instruction of a lane that a host has waited for before each instruction.

    The result has the shape (n,), with -1 if there is no earlier wait. The result is None if the
    host never waits for the lane.
    """
    index = InstructionIndex.from_program(program)
    drain_ops = _find_drain_ops(program, lane)
    wait_ops = [row.op for row in INSTRUCTIONS if lane in row.host_sync_lanes]
    if LANES[lane].host_action == "starts" and program.used_opcodes.isdisjoint(
        (*drain_ops, *wait_ops)
    ):
        return None
    last_observed = np.full(len(index), NO_POSITION, np.int32)
    members = np.flatnonzero(lines == LINE_BY_LANE[lane])
    if LANES[lane].host_action == "starts":
        last_observed[members[1:]] = np.where(
            index.is_op(drain_ops)[members[1:]], members[:-1], NO_POSITION
        )
    else:  # the host produces the inputs of a collective between segments itself
        last_observed[members] = np.where(
            index.is_op(find_segment_collectives(program.sequence_parallel))[members],
            NO_POSITION,
            members,
        )
    if len(waits := index.find_all_positions(wait_ops)) and len(members):
        last_observed[waits] = np.append(members, NO_POSITION)[np.searchsorted(members, waits) - 1]
    last_wait = np.full_like(last_observed, NO_POSITION)
    last_wait[1:] = np.maximum.accumulate(last_observed)[:-1]
    has_wait = (last_wait >= program.offsets[index.rank]) & (lines != LINE_BY_LANE[lane])
    return np.where(has_wait, last_wait, np.int32(NO_POSITION))
