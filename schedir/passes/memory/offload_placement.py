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
    count_min_slots,
    count_slots,
    find_host_values,
    number_groups,
)
from schedir.analysis.memory.footprint import compute_peak_bytes
from schedir.ir.cost.cost_fields import COST_BY_OPCODE
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import add_tolerance
from schedir.ir.dataflow import Dataflow
from schedir.ir.instruction_index import InstructionIndex
from schedir.ir.isa.instructions import (
    COMPUTE_OPS,
    FORWARD,
    INSTRUCTIONS,
    TIERS,
    Opcode,
    Value,
    find_modifiers,
)
from schedir.ir.program import ADDRESS_MASK, Program, Words, replace_opcode
from schedir.passes.insertion import find_ranks, insert_at_positions
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
    default_cost = DEFAULT_MESSAGE_COST * float(costs.for_opcode(FORWARD, program.shape).mean())
    default_costs = {
        COST_BY_OPCODE[op]: default_cost
        for op in _MOVE_OPS.values()
        if not costs.for_opcode(op, program.shape).any()
    }
    return replace(options, costs=replace(costs, **default_costs))


class ForwardLifetimes(NamedTuple):
    """The producer and the first user of the saved activations of each (stage, microbatch) pair.

    Attributes:
        address: The pairs as packed words, see `ADDRESS_MASK`, shape (k,).
        producer: The position of the instruction that produces the activations, shape (k,).
        first_user: The position of the first instruction on the compute lane that uses them, shape
            (k,).
    """

    address: Words
    producer: Positions
    first_user: Positions


def find_lifetimes(program: Program) -> ForwardLifetimes:
    """Return the lifetimes of the saved activations of a program.

    Args:
        program: The program.
    """
    lifetimes = Dataflow.from_program(program).find_lifetimes(Value.SAVED)
    address = program.words & ADDRESS_MASK
    producers = lifetimes.filled_at.astype(np.intp)
    first_use = {
        int(address[position]): position
        for op in reversed((*find_modifiers(Value.SAVED),))
        if op in COMPUTE_OPS
        for position in np.flatnonzero(program.op == op).tolist()
    }
    users = [
        first_use.get(int(address[producer]), freed_at)
        for producer, freed_at in zip(producers, lifetimes.freed_at.tolist(), strict=True)
    ]
    return ForwardLifetimes(address[producers], producers, np.array(users, np.intp))


def compute_move_costs(program: Program, op: Opcode, addresses: Words, options: Options) -> Floats:
    """Return the cost of a move for each (stage, microbatch) pair.

    Args:
        program: The program.
        op: The opcode of the move.
        addresses: The (stage, microbatch) pairs of the moves as packed words, shape (k,).
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
    lifetimes = find_lifetimes(program)
    is_offloaded = np.isin(lifetimes.address, offloaded)
    program = _insert_round_trip(
        program,
        HOST_TRIP,
        lifetimes.producer[is_offloaded],
        lifetimes.first_user[is_offloaded],
        options,
    )
    if len(spilled):
        lifetimes = find_lifetimes(program)
        is_reload = program.op[lifetimes.producer] == HOST_TRIP.reload_op
        reloads = ForwardLifetimes(*(column[is_reload] for column in lifetimes))
        address = program.words & ADDRESS_MASK
        is_spilled = np.isin(address, spilled)
        producers, users = (np.flatnonzero((program.op == op) & is_spilled) for op in HOST_TRIP)
        producers, users = (
            positions[np.argsort(address[positions], kind="stable")]
            for positions in (producers, users)
        )
        program = _insert_round_trip(program, DISK_TRIP, producers, users, options, reloads)
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
    values. A move back must then end before the latest time at which the reload of the value can
    start.
    """
    order = np.argsort(users, kind="stable")
    producers, users = producers[order], users[order]
    address = (program.words & ADDRESS_MASK)[producers]
    groups = np.append(np.flatnonzero(~program.joined), len(program))
    offload_positions = groups[np.searchsorted(groups, producers, side="right")]
    latest_positions = groups[np.searchsorted(groups, users, side="right") - 1]
    producer_ranks = find_ranks(program, producers)
    words = [replace_opcode(address, op) for op in trip]

    def insert_moves(reload_positions: Positions) -> Program:
        positions = np.concatenate([offload_positions, reload_positions])
        ranks = np.concatenate([producer_ranks, producer_ranks])
        return insert_at_positions(program, positions, ranks, np.concatenate(words))

    def predict_times(trial: Program) -> tuple[Floats, Floats, Program]:
        """Return the starts and ends of instructions in `trial`, and `trial` itself.

        The starts and ends belong to the instructions that are also in `program`.
        """
        earliest_times = compute_earliest_times(
            Graph.from_program(trial, options.progress_model), options.costs
        )
        is_original = ~np.isin(trial.op, trip) | ~np.isin(trial.words & ADDRESS_MASK, address)
        return earliest_times.start[is_original], earliest_times.end[is_original], trial

    def place_reloads(start: Floats, end: Floats, lead: int) -> Program:
        """Return the program with reloads as late as possible.

        A reload must end before its user starts, so the reload has a latest start. The reload is
        inserted before the compute that runs at this time. `lead` moves each reload earlier by
        `lead` times the duration of the reload.
        """
        if reloads is not None:
            host_durations = compute_move_costs(
                program, HOST_TRIP.reload_op, reloads.address, options
            )
            start = start.copy()
            start[reloads.producer] = _compute_latest_starts(
                start[reloads.first_user], host_durations, find_ranks(program, reloads.producer)
            )
        durations = compute_move_costs(program, trip.reload_op, address, options)
        latest_starts = _compute_latest_starts(start[users], durations, producer_ranks)
        latest_starts = latest_starts - lead * durations
        reload_positions = latest_positions.copy()
        is_compute = np.isin(program.op, COMPUTE_OPS)
        for rank in np.unique(producer_ranks).tolist():
            positions = np.arange(*program.offsets[rank : rank + 2])
            computes = positions[is_compute[positions]]
            is_on_rank = producer_ranks == rank
            next_compute = np.searchsorted(end[computes], latest_starts[is_on_rank], side="right")
            # If no compute ends later, the reload comes before the last compute.
            next_compute = np.minimum(next_compute, len(computes) - 1)
            reload_positions[is_on_rank] = computes[next_compute]
        reload_positions = groups[np.searchsorted(groups, reload_positions, side="right") - 1]
        reload_positions = np.clip(reload_positions, offload_positions, latest_positions)
        return insert_moves(np.maximum.accumulate(reload_positions))

    # Two predictions give the times of users: one with reloads right before their users, and one
    # without moves. The second prediction helps if moves wait for each other. If all resulting
    # positions make the step longer, reloads stay right before their users.
    late_times = predict_times(insert_moves(latest_positions))
    ideal_times = predict_times(program)
    best, max_span = late_times[2], float(late_times[1].max(initial=0.0)) * (1 + 1e-9)
    for lead, (start, end, _) in product(range(_MAX_LEADS), (late_times, ideal_times)):
        _, ends, trial = predict_times(place_reloads(start, end, lead))
        if ends.max(initial=0.0) <= max_span:
            return trial
    return best


def _compute_latest_starts(start: Floats, durations: Floats, ranks: Positions) -> Floats:
    """Return the latest start at which each move still ends before its user starts.

    The moves of a rank run one after the other, because they are on one lane.
    """
    latest_starts = np.empty(len(start))
    for rank in np.unique(ranks).tolist():
        is_on_rank = ranks == rank
        total_durations = np.cumsum(durations[is_on_rank])
        first_start = start[is_on_rank] - total_durations
        first_start = np.minimum.accumulate(first_start[::-1])[::-1]
        latest_starts[is_on_rank] = first_start + total_durations - durations[is_on_rank]
    return latest_starts


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
            host_values = find_host_values(program)
            return cls(
                tier,
                host_values.count_peak(number_groups(InstructionIndex.from_program(program))),
                np.diff(host_values.rank_offsets),
            )
        kinds = [Value.SAVED]
        return cls(tier, count_min_slots(program, kinds)[:, 0], count_slots(program, kinds)[:, 0])

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
        low = self.min_slots  # The result if all numbers exceed the limit.
        high = self.max_slots + 1
        while (high - low > 1).any():
            middle = (low + high) // 2
            peak_memory = compute_peak_memory(self.set_slots(program, middle), options, self.tier)
            is_within_limit = peak_memory <= add_tolerance(limit)
            low = np.where(is_within_limit, middle, low)
            high = np.where(is_within_limit, high, middle)
            high = np.maximum(high, low + 1)
        return low

    def find_sufficient_slots(
        self, program: Program, options: Options, max_slots: Counts
    ) -> Counts:
        """Search for the smallest numbers of slots that do not increase the predicted time.

        The time is compared with the predicted time for `max_slots`.

        Args:
            program: The program.
            options: The options of the lowering.
            max_slots: The largest numbers, shape (ranks,).
        """
        min_slots = self.min_slots
        span = predict_span(self.set_slots(program, max_slots), options) * (1 + 1e-9)

        def keeps_time(slots: Counts) -> bool:
            return predict_span(self.set_slots(program, slots), options) <= span

        low, high = -1, int((max_slots - min_slots).max(initial=0))
        while high - low > 1:  # a binary search for an increment that is equal on all ranks
            middle = (low + high) // 2
            is_sufficient = keeps_time(np.minimum(min_slots + middle, max_slots))
            low, high = (low, middle) if is_sufficient else (middle, high)
        return reduce_slots(np.minimum(min_slots + high, max_slots), min_slots, keeps_time)


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
    return compute_peak_bytes(lowered, options.sizes, tier)


def evaluate_program(lowered: Program, options: Options) -> tuple[float, float]:
    """Return the bytes above the memory limit, and the predicted time.

    Without a limit, the number of bytes is 0.

    Args:
        lowered: The program after the later passes.
        options: The options of the lowering.
    """
    excess = 0.0
    if options.sizes is not None and options.memory_limit is not None:
        peak_bytes = float(compute_peak_bytes(lowered, options.sizes).max())
        excess = max(0.0, peak_bytes - add_tolerance(options.memory_limit))
    return excess, predict_span(lowered, options)


def predict_span(program: Program, options: Options) -> float:
    """Predict the span of a program, in the time unit of the costs.

    Args:
        program: The program.
        options: The options of the lowering.
    """
    end = compute_earliest_times(Graph(program, options.progress_model), options.costs).end
    return float(end.max(initial=0.0))
