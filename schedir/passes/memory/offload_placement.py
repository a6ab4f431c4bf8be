"""Choose the positions of offload and reload instructions, and the number of buffers.

An address is the stage and the microbatch of an instruction, as the low bits of its word
(`ADDRESS_MASK`).
"""

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
from schedir.ir.program import ADDRESS_MASK, Program, Words, replace_opcode
from schedir.passes.insertion import insert_at_positions
from schedir.passes.memory.buffer_sharing import DEFAULT_MESSAGE_COST, reduce_slots
from schedir.passes.pass_types import Options
from schedir.passes.selection import split_addresses

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Positions = NDArray[np.intp]
_MAX_LEADS: Final = 4  # number of positions that are tried for reloads that end too late


class OffloadRoundTrip(NamedTuple):
    """The two opcodes that move a value to another tier and back.

    Attributes:
        offload_op: The opcode that moves the value to the other tier.
        reload_op: The opcode that moves the value back.
    """

    offload_op: Opcode
    reload_op: Opcode


_MOVE_OPS: Final = {  # (tier before, tier after) -> opcode that moves saved activations
    (change.before, change.after): row.op
    for row in INSTRUCTIONS for change in row.changes
    if change.value is Value.SAVED and change.before in TIERS
}  # fmt: skip
HOST_TRIP: Final = OffloadRoundTrip(_MOVE_OPS["device", "host"], _MOVE_OPS["host", "device"])
DISK_TRIP: Final = OffloadRoundTrip(_MOVE_OPS["host", "disk"], _MOVE_OPS["disk", "host"])


def fill_move_costs(program: Program, options: Options) -> Options:
    """Set the cost of moves whose cost is 0 to half a forward.

    Args:
        program: The program.
        options: The options of the lowering.
    """
    costs = options.costs or Costs()
    usual = DEFAULT_MESSAGE_COST * float(costs.for_opcode(FORWARD, program.shape).mean())
    free = {
        COST_BY_OPCODE[op]: usual
        for op in _MOVE_OPS.values()
        if not costs.for_opcode(op, program.shape).any()
    }
    return replace(options, costs=replace(costs, **free))


class ForwardLifetimes(NamedTuple):
    """The producer and the first user of the saved activations of each address.

    Attributes:
        address: The addresses, shape (k,).
        producer: The position of the instruction that produces the activations.
        first_user: The position of the first instruction on the compute lane that uses them.
    """

    address: Words
    producer: Positions
    first_user: Positions


def find_lifetimes(program: Program) -> ForwardLifetimes:
    """Return the producer and the first user of the saved activations of each address.

    Args:
        program: The program.
    """
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
    """Return the cost of a move for each address.

    Args:
        program: The program.
        op: The opcode of the move.
        addresses: The addresses, shape (k,).
        options: The options of the lowering, with costs.

    Returns:
        Costs of shape (k,).
    """
    assert options.costs is not None
    table = options.costs.for_opcode(op, program.shape)
    stage, mb = split_addresses(addresses)
    return np.asarray(table[stage, mb if table.shape[1] > 1 else 0])


# ---------------------------------------------------------------- placement


def place_offloads(program: Program, offloaded: Words, spilled: Words, options: Options) -> Program:
    """Insert the offloads and reloads of the given addresses.

    Args:
        program: The program.
        offloaded: The addresses whose activations move to the host.
        spilled: The addresses of `offloaded` whose activations move on to the disk.
        options: The options of the lowering, with costs.
    """
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
    """Insert a move after each producer, and a move back before each user.

    If the users are reloads from the host, `reloads` lists these reloads with the users of their
    values. A move back must then end before the latest time at which its reload can start.
    """
    order = np.argsort(users, kind="stable")
    producers, users = producers[order], users[order]
    address = (program.words & ADDRESS_MASK)[producers]
    groups = np.append(np.flatnonzero(~program.joined), len(program))
    leaves = groups[np.searchsorted(groups, producers, side="right")]
    needed = groups[np.searchsorted(groups, users, side="right") - 1]
    rank = _find_ranks(program, producers)
    words = [replace_opcode(address, op) for op in trip]

    def back_at(place: Positions) -> Program:
        at = np.concatenate([leaves, place])
        ranks = np.concatenate([rank, rank])
        return insert_at_positions(program, at, ranks, np.concatenate(words))

    def times(found: Program) -> tuple[Floats, Floats, Program]:
        """Return starts and ends in `found`, and `found`.

        The starts and ends are those of the instructions that are also in `program`.
        """
        reached = compute_earliest_times(
            Graph.from_program(found, options.progress_model), options.costs
        )
        old = ~np.isin(found.op, trip) | ~np.isin(found.words & ADDRESS_MASK, address)
        return reached.start[old], reached.end[old], found

    def as_late_as(start: Floats, end: Floats, lead: int) -> Program:
        """Return the program with reloads as late as possible.

        A reload must start so early that it ends at the start of its user. It is inserted before
        the compute that runs when it must start. `lead` moves each reload earlier by `lead` times
        the duration of the reload.
        """
        if reloads is not None:
            takes = compute_move_costs(program, HOST_TRIP.reload_op, reloads.address, options)
            start = start.copy()
            start[reloads.producer] = _compute_latest_starts(
                start[reloads.first_user], takes, _find_ranks(program, reloads.producer)
            )
        takes = compute_move_costs(program, trip.reload_op, address, options)
        late = _compute_latest_starts(start[users], takes, rank) - lead * takes
        place = needed.copy()
        compute = np.isin(program.op, COMPUTE_OPS)
        for one in np.unique(rank).tolist():
            mine = np.arange(*program.offsets[one : one + 2])
            mine, here = mine[compute[mine]], rank == one
            first = np.searchsorted(end[mine], late[here], side="right")
            # If no compute ends later, this is the last compute.
            place[here] = mine[np.minimum(first, len(mine) - 1)]
        place = groups[np.searchsorted(groups, place, side="right") - 1]
        return back_at(np.maximum.accumulate(np.clip(place, leaves, needed)))

    # Two predictions give the times of users: one with reloads right before their users, and one
    # without moves. The second prediction helps if moves wait for each other. If all resulting
    # positions make the step longer, reloads stay right before their users.
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
    """Return the latest start of each move with which it ends before its user starts.

    The moves of a rank run one after the other, because they are on one lane.
    """
    found = np.empty(len(start))
    for one in np.unique(rank).tolist():
        here = rank == one
        before = np.cumsum(durations[here])
        latest = start[here] - before
        found[here] = np.minimum.accumulate(latest[::-1])[::-1] + before - durations[here]
    return found


# ---------------------------------------------------------------- number of slots

Tier = Literal["device", "host"]
_SLOT_FIELDS: Final[dict[Tier, str]] = {"device": "saved", "host": "host"}


class SlotRange(NamedTuple):
    """The possible numbers of slots of each rank on a tier.

    Attributes:
        tier: The tier.
        min_slots: The smallest possible numbers, shape (ranks,).
        max_slots: The largest useful numbers, shape (ranks,).
    """

    tier: Tier
    min_slots: Counts
    max_slots: Counts

    @classmethod
    def from_program(cls, program: Program, tier: Tier) -> SlotRange:
        """Compute the range of slots for a program that does not specify their numbers.

        Args:
            program: The program.
            tier: The tier.
        """
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
        """Return the program with these numbers of slots.

        Args:
            program: The program.
            slots: The numbers, shape (ranks,).
        """
        return program.with_slot_counts(_SLOT_FIELDS[self.tier], slots)

    def find_max_within_limit(
        self, program: Program, options: Options, limit: float | None
    ) -> Counts:
        """Return the largest numbers of slots with which each rank stays within a memory limit.

        Args:
            program: The program.
            options: The options of the lowering.
            limit: The limit in bytes; None for no limit.

        Returns:
            Numbers of shape (ranks,). A rank that exceeds the limit with any number has
            `min_slots`.
        """
        if limit is None or options.sizes is None:
            return self.max_slots
        low = self.min_slots  # This is the result even if it exceeds the limit.
        high = self.max_slots + 1
        while (high - low > 1).any():
            middle = (low + high) // 2
            holds = compute_peak_memory(self.set_slots(program, middle), options, self.tier)
            fits = holds <= add_tolerance(limit)
            low = np.where(fits, middle, low)
            high = np.where(fits, high, middle)
            high = np.maximum(high, low + 1)
        return low

    def find_sufficient_slots(
        self, program: Program, options: Options, max_slots: Counts
    ) -> Counts:
        """Return the smallest numbers of slots that do not increase the predicted time.

        The time is compared with the predicted time for `max_slots`.

        Args:
            program: The program.
            options: The options of the lowering.
            max_slots: The largest numbers, shape (ranks,).
        """
        least = self.min_slots
        span = predict_span(self.set_slots(program, max_slots), options) * (1 + 1e-9)

        def keeps(number: Counts) -> bool:
            return predict_span(self.set_slots(program, number), options) <= span

        low, high = -1, int((max_slots - least).max(initial=0))
        while high - low > 1:  # a binary search for an increment that is equal on all ranks
            middle = (low + high) // 2
            kept = keeps(np.minimum(least + middle, max_slots))
            low, high = (low, middle) if kept else (middle, high)
        return reduce_slots(np.minimum(least + high, max_slots), least, keeps)


def compute_peak_memory(program: Program, options: Options, tier: Tier) -> Floats:
    """Return the peak memory of each rank on a tier after lowering, in bytes.

    The peak is the worst case over all durations of instructions.

    Args:
        program: The program.
        options: The options of the lowering, with sizes.
        tier: The tier.
    """
    assert options.sizes is not None
    lowered = options.run_later_passes(program)
    return np.array(
        [
            own.total_bytes.max()
            for own in compute_footprints(lowered, options.sizes, tier, worst_case=True)
        ]
    )


def predict_span(program: Program, options: Options) -> float:
    """Predict the span of a program, in the time unit of the costs.

    Args:
        program: The program.
        options: The options of the lowering.
    """
    end = compute_earliest_times(Graph(program, options.progress_model), options.costs).end
    return float(end.max(initial=0.0))
