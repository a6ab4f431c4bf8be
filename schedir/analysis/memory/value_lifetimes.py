"""Find when values without a static buffer use memory, and how many bytes they use."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.host_waits import find_known_ends
from schedir.analysis.memory.buffer_slots import find_slot_reuses, number_groups
from schedir.ir.cost.per_stage_values import look_up
from schedir.ir.cost.sizes import Sizes
from schedir.ir.cost.zero_states import is_sharded
from schedir.ir.dataflow import Dataflow, ValueStates
from schedir.ir.instruction_index import NO_POSITION, InstructionIndex, Positions
from schedir.ir.isa.instructions import INSTRUCTIONS, VALUES, Lane, Value
from schedir.ir.program import Program
from schedir.ir.value_chains import NO_FORM


class ValueLifetimes(NamedTuple):
    """Changes of the memory of one kind of value.

    Attributes:
        positions: Positions of the instructions that make the changes.
        order_key: Sort key of each change: twice the number of the instruction's group, plus 1 if
            the change is at the end of the instruction.
        count_change: Change of the number of values.
        byte_change: Change of the bytes.
    """

    positions: NDArray[np.int64]
    order_key: NDArray[np.int64]
    count_change: NDArray[np.int64]
    byte_change: NDArray[np.float64]


def compute_value_lifetimes(
    program: Program,
    kind: Value,
    sizes: Sizes,
    tier: int,
    worst_case: bool,
    moved: bool | None = None,
) -> ValueLifetimes:
    """Return the changes of the memory of one kind of value on a tier.

    If an instruction changes the form of a value that stays on the tier, the bytes of the value
    change. This change is at the start of the instruction if the value grows, and at the end
    otherwise.

    Args:
        program: The program.
        kind: The kind of value.
        sizes: The sizes of values.
        tier: Index into `TIERS`.
        worst_case: True for an upper bound that is valid for all durations of instructions. See
            `compute_footprints`.
        moved: True for the values that are on another tier at some time, False for the others, None
            for all.
    """
    index, shape = InstructionIndex.from_program(program), program.shape
    states = _select_states(program, kind, moved)
    begin, end, at_tier, _, is_created, is_freed = states
    size = _compute_sizes(program, kind, sizes, states)
    is_on_tier = at_tier == tier
    stay_end = end
    if worst_case and tier:  # a move on another lane may end as late as the next use of the value
        is_on_tier, stay_end = _find_longest_stays(program, kind, states, tier)
    elif worst_case:
        lanes = np.array([row.lane for row in INSTRUCTIONS])[index.op]
        is_on_tier = is_on_tier | (lanes[begin] != Lane.COMPUTE)
    group = number_groups(index).astype(np.int64)
    has_previous, has_next = _has_neighbors(begin, end, is_on_tier, is_created, is_freed)
    is_start, is_end = is_on_tier & ~has_previous, is_on_tier & ~has_next
    ones = np.ones(len(begin), np.int64)
    added_bytes = size.copy()
    conversions = np.empty(0, np.intp)
    if source := VALUES[kind].converted_from:
        # While a value is converted, its source still exists. So only the additional bytes are
        # added.
        conversions = np.flatnonzero(is_start & is_created)
        extra_sizes = sizes.per_microbatch(source[1], shape) - sizes.per_microbatch(
            VALUES[source[0]].size, shape
        )
        added_bytes[conversions] = look_up(
            extra_sizes, index.stage[begin[conversions]], index.mb[begin[conversions]]
        )
    start, release = begin, stay_end.copy()
    order_key = 2 * group[begin]
    if worst_case:
        start = _find_earliest_starts(program, kind, begin, is_created)
        order_key = 2 * group[start] + (start != begin) * (
            start != program.offsets[index.rank[start]]
        )
    if tier == 0:  # the host frees device memory when it has observed the end of the instruction
        release[is_freed] = find_known_ends(program, end[is_freed], count_drains=not worst_case)
        if VALUES[kind].initial_tier:
            release = _find_host_releases(program, kind, end, worst_case)
    changes = [
        (start[is_start], order_key[is_start], ones[is_start], added_bytes[is_start]),
        (
            begin[conversions],
            2 * group[begin[conversions]] + 1,
            0 * ones[conversions],
            (size - added_bytes)[conversions],
        ),
        (
            release[is_end],
            (2 * group[release] + (release == end))[is_end],
            -ones[is_end],
            -size[is_end],
        ),
    ]
    form_changes = np.flatnonzero(is_on_tier & has_next)  # values that only change their form
    if len(form_changes):
        next_state = np.searchsorted(begin, end[form_changes])
        growth = size[next_state] - size[form_changes]
        order_key = 2 * group[end[form_changes]] + (growth < 0)
        changes.append((end[form_changes], order_key, 0 * ones[form_changes], growth))
    return ValueLifetimes(*map(np.concatenate, zip(*changes, strict=True)))


def _select_states(program: Program, kind: Value, moved: bool | None) -> ValueStates:
    """Return the states of values of a kind.

    `moved` is True for the values that leave the device, False for the others, and None for all.
    """
    states = Dataflow.from_program(program).find_states(kind)
    index = InstructionIndex.from_program(program)
    if moved is None:
        return states
    key = index.compute_keys(
        VALUES[kind].scope, states.begin, index.mb[states.begin].astype(np.int64)
    )
    is_selected = np.isin(key, key[states.tier > 0]) == moved
    return ValueStates(*(field[is_selected] for field in states))


def _compute_sizes(
    program: Program, kind: Value, sizes: Sizes, states: ValueStates
) -> NDArray[np.float64]:
    """Return the bytes of a value in each of its states."""
    index = InstructionIndex.from_program(program)
    chains = Dataflow.from_program(program).get_chains(kind)
    names = [VALUES[kind].size, *(chains.forms if chains else ())]
    address = index.stage[states.begin], index.mb[states.begin]
    # With ZeRO, each replica may have only a shard of a value that exists from the start.
    is_shard = VALUES[kind].initial_tier and is_sharded(VALUES[kind].size, program.zero)
    shard_count = program.dp if is_shard else 1
    form_sizes = [
        look_up(sizes.per_microbatch(name, program.shape), *address) / shard_count for name in names
    ]
    return form_sizes[0] if len(names) == 1 else np.choose(states.form - NO_FORM, form_sizes)


def _find_longest_stays(
    program: Program, kind: Value, states: ValueStates, tier: int
) -> tuple[NDArray[np.bool_], Positions]:
    """Return a mask of the states in which a value may be on a tier, and the end of each state.

    In the worst case, a value is on the tier from the first to the last of its states on this tier.
    The value has certainly left the tier when an instruction has used the value on the device
    again.
    """
    index = InstructionIndex.from_program(program)
    key = index.compute_keys(
        VALUES[kind].scope, states.begin, index.mb[states.begin].astype(np.int64)
    )
    order = np.lexsort((states.begin, key))
    key, end, at_tier = key[order], states.end[order], states.tier[order]
    lifetime = np.cumsum(np.append(False, key[1:] != key[:-1])[: len(key)])
    state = np.arange(len(key))
    first_state = np.full(len(key), len(key))
    last_state = np.full(len(key), -1)
    states_on_tier = np.flatnonzero(at_tier == tier)
    np.minimum.at(first_state, lifetime[states_on_tier], states_on_tier)
    np.maximum.at(last_state, lifetime[states_on_tier], states_on_tier)
    is_on_tier = (state >= first_state[lifetime]) & (state <= last_state[lifetime])
    device_states = np.flatnonzero(at_tier == 0)
    next_device = np.append(device_states, len(key))[np.searchsorted(device_states, states_on_tier)]
    has_next = np.append(lifetime, -1)[next_device] == lifetime[states_on_tier]
    stay_end = end.copy()
    stay_end[states_on_tier[has_next]] = end[next_device[has_next]]
    unsorted_mask, unsorted_end = np.empty(len(key), bool), np.empty_like(end)
    unsorted_mask[order], unsorted_end[order] = is_on_tier, stay_end
    return unsorted_mask, unsorted_end


def compute_moved_sizes(
    program: Program, kind: Value, sizes: Sizes, tier: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return, for each rank, the bytes of the largest and the smallest moved value on a tier.

    Args:
        program: The program.
        kind: The kind of value.
        sizes: The sizes of values.
        tier: Index into `TIERS`.

    Returns:
        Largest and smallest bytes, shape (ranks,) each; 0 for a rank without such values.
    """
    states = _select_states(program, kind, True)
    size = _compute_sizes(program, kind, sizes, states)
    is_on_tier = states.tier == tier
    rank = InstructionIndex.from_program(program).rank[states.begin[is_on_tier]]
    largest = np.zeros(program.shape.ranks)
    smallest = np.full(program.shape.ranks, np.inf)
    np.maximum.at(largest, rank, size[is_on_tier])
    np.minimum.at(smallest, rank, size[is_on_tier])
    return largest, np.where(np.isinf(smallest), 0.0, smallest)


def _find_earliest_starts(
    program: Program, kind: Value, begin: Positions, is_created: NDArray[np.bool_]
) -> Positions:
    """Return the earliest position at which each value can use memory.

    If a compute instruction makes the value, the position is that of this instruction. If an
    instruction of another lane makes the value, the position is that of the instruction that frees
    the slot of the value. If the slot is always free, the position is the first one of the Stream.

    A value with an initial tier cannot use memory before the instruction that moves it can start.
    The move waits for the last instruction that gives it an input. That instruction also waits for
    the last instruction that gives it an input. The position is not before the latter instruction.
    """
    index = InstructionIndex.from_program(program)
    has_initial_tier = bool(VALUES[kind].initial_tier)
    can_start_early = (is_created | has_initial_tier) & (
        np.array([row.lane for row in INSTRUCTIONS])[index.op[begin]] != Lane.COMPUTE
    )
    earliest = program.offsets[index.rank[begin]].astype(np.int32)
    if has_initial_tier and len(begin):
        givers = np.append(
            Dataflow.from_program(program).givers, np.full((1, len(index)), NO_POSITION), 0
        )
        giver = givers[:, begin].max(0)
        second_giver = np.where(giver == NO_POSITION, NO_POSITION, givers[:, giver].max(0))
        earliest = np.maximum(earliest, second_giver).astype(np.int32)
    fills, frees = find_slot_reuses(program).get(kind, (begin[:0], begin[:0]))
    is_refill = np.isin(fills, begin)
    refills = np.searchsorted(begin, fills[is_refill])
    earliest[refills] = np.maximum(earliest[refills], frees[is_refill])
    return np.where(can_start_early, np.maximum.accumulate(earliest), begin)


def _find_host_releases(
    program: Program, kind: Value, end: Positions, worst_case: bool
) -> Positions:
    """Return the positions at which hosts free device memory of values that have been moved.

    Before an instruction that reuses the slot, the host waits until the value has been moved. With
    `worst_case`, the memory is free when the move has ended, because the next value in the slot
    uses memory from that time on.
    """
    known_ends, release_by_free = find_known_ends(program, end), {}
    if kind in (reuses := find_slot_reuses(program)):
        fills, frees = (positions.tolist() for positions in reuses[kind])
        release_by_free = dict(zip(frees, frees if worst_case else fills, strict=True))
    releases = [
        release_by_free.get(position, known_end)
        for position, known_end in zip(end.tolist(), known_ends.tolist(), strict=True)
    ]
    return np.minimum(known_ends, np.array(releases, np.int32)).astype(np.int32)


def _has_neighbors(
    begin: NDArray[np.int32], end: NDArray[np.int32], is_on_tier: NDArray[np.bool_],
    is_created: NDArray[np.bool_], is_freed: NDArray[np.bool_],
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:  # fmt: skip
    """Return two masks of states: the previous state is on the tier, the next state is on the tier.

    `is_on_tier` is the mask of the states that are on the tier.
    """
    has_previous, has_next = np.zeros_like(is_on_tier), np.zeros_like(is_on_tier)
    inner_states = np.flatnonzero(~is_freed & np.isin(end, begin))
    next_state = np.searchsorted(begin, end[inner_states])
    has_next[inner_states] = is_on_tier[next_state]
    has_previous[next_state] = is_on_tier[inner_states]
    return has_previous, has_next
