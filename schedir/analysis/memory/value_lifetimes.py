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
    change. They change at the start of the instruction if the value grows, and at its end
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
    begin, end, at_tier, _, made, over = states
    size = _compute_sizes(program, kind, sizes, states)
    here = at_tier == tier
    left = end
    if worst_case and tier:  # a move on another lane may end as late as the next use of the value
        here, left = _find_longest_stays(program, kind, states, tier)
    elif worst_case:
        lanes = np.array([row.lane for row in INSTRUCTIONS])[index.op]
        here = here | (lanes[begin] != Lane.COMPUTE)
    group = number_groups(index).astype(np.int64)
    before, after = _has_neighbors(begin, end, here, made, over)
    comes, goes = here & ~before, here & ~after
    one = np.ones(len(begin), np.int64)
    adds = size.copy()
    first = np.empty(0, np.intp)
    if made_of := VALUES[
        kind
    ].converted_from:  # while it is converted, only its bytes beyond those of the source count
        first = np.flatnonzero(comes & made)
        more = sizes.per_microbatch(made_of[1], shape) - sizes.per_microbatch(
            VALUES[made_of[0]].size, shape
        )
        adds[first] = look_up(more, index.stage[begin[first]], index.mb[begin[first]])
    came, gone = begin, left.copy()
    when = 2 * group[begin]
    if worst_case:
        came = _find_earliest_starts(program, kind, begin, made)
        when = 2 * group[came] + (came != begin) * (came != program.offsets[index.rank[came]])
    if tier == 0:  # the host frees device memory when it has observed the end of the instruction
        gone[over] = find_known_ends(program, end[over], count_drains=not worst_case)
        if VALUES[kind].initial_tier:
            gone = _find_host_releases(program, kind, end, worst_case)
    changes = [
        (came[comes], when[comes], one[comes], adds[comes]),
        (begin[first], 2 * group[begin[first]] + 1, 0 * one[first], (size - adds)[first]),
        (gone[goes], (2 * group[gone] + (gone == end))[goes], -one[goes], -size[goes]),
    ]
    stays = np.flatnonzero(here & after)  # values that only change their form
    if len(stays):
        following = np.searchsorted(begin, end[stays])
        grows = size[following] - size[stays]
        when = 2 * group[end[stays]] + (grows < 0)
        changes.append((end[stays], when, 0 * one[stays], grows))
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
    own = np.isin(key, key[states.tier > 0]) == moved
    return ValueStates(*(each[own] for each in states))


def _compute_sizes(
    program: Program, kind: Value, sizes: Sizes, states: ValueStates
) -> NDArray[np.float64]:
    """Return the bytes of a value in each of its states."""
    index = InstructionIndex.from_program(program)
    chains = Dataflow.from_program(program).get_chains(kind)
    names = [VALUES[kind].size, *(chains.forms if chains else ())]
    at = index.stage[states.begin], index.mb[states.begin]
    # With ZeRO, each replica may have only a shard of a value that exists from the start.
    part = VALUES[kind].initial_tier and is_sharded(VALUES[kind].size, program.zero)
    parts = program.dp if part else 1
    of_form = [look_up(sizes.per_microbatch(name, program.shape), *at) / parts for name in names]
    return of_form[0] if len(names) == 1 else np.choose(states.form - NO_FORM, of_form)


def _find_longest_stays(
    program: Program, kind: Value, states: ValueStates, tier: int
) -> tuple[NDArray[np.bool_], Positions]:
    """Return a mask of the states in which a value may be on a tier, and the end of each state.

    A value may be on the tier from its first state there to its last. It has certainly left the
    tier when an instruction has used it on the device again.
    """
    index = InstructionIndex.from_program(program)
    key = index.compute_keys(
        VALUES[kind].scope, states.begin, index.mb[states.begin].astype(np.int64)
    )
    order = np.lexsort((states.begin, key))
    key, end, at_tier = key[order], states.end[order], states.tier[order]
    life = np.cumsum(np.append(False, key[1:] != key[:-1])[: len(key)])
    place = np.arange(len(key))
    first = np.full(len(key), len(key))
    last = np.full(len(key), -1)
    there = np.flatnonzero(at_tier == tier)
    np.minimum.at(first, life[there], there)
    np.maximum.at(last, life[there], there)
    here = (place >= first[life]) & (place <= last[life])
    device = np.flatnonzero(at_tier == 0)
    back = np.append(device, len(key))[np.searchsorted(device, there)]
    known = np.append(life, -1)[back] == life[there]
    left = end.copy()
    left[there[known]] = end[back[known]]
    found = np.empty(len(key), bool), np.empty_like(end)
    found[0][order], found[1][order] = here, left
    return found


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
    size, here = _compute_sizes(program, kind, sizes, states), states.tier == tier
    rank = InstructionIndex.from_program(program).rank[states.begin[here]]
    most = np.zeros(program.shape.ranks)
    least = np.full(program.shape.ranks, np.inf)
    np.maximum.at(most, rank, size[here])
    np.minimum.at(least, rank, size[here])
    return most, np.where(np.isinf(least), 0.0, least)


def _find_earliest_starts(
    program: Program, kind: Value, begin: Positions, made: NDArray[np.bool_]
) -> Positions:
    """Return the position from which each value can use memory at the earliest.

    If a compute instruction makes the value, the position is that of this instruction. If an
    instruction of another lane makes it, the position is that of the instruction that frees its
    slot, or the first instruction of the Stream if a slot is always free.

    A value with an initial tier cannot use memory before the instruction that moves it can start.
    That instruction needs inputs, and the instructions that produce these inputs need inputs, too.
    The position is not before the latter inputs are produced.
    """
    index = InstructionIndex.from_program(program)
    has_initial_tier = bool(VALUES[kind].initial_tier)
    off = (made | has_initial_tier) & (
        np.array([row.lane for row in INSTRUCTIONS])[index.op[begin]] != Lane.COMPUTE
    )
    early = program.offsets[index.rank[begin]].astype(np.int32)
    if has_initial_tier and len(begin):
        needs = np.append(
            Dataflow.from_program(program).givers, np.full((1, len(index)), NO_POSITION), 0
        )
        given = needs[:, begin].max(0)
        computed = np.where(given == NO_POSITION, NO_POSITION, needs[:, given].max(0))
        early = np.maximum(early, computed).astype(np.int32)
    fills, left = find_slot_reuses(program).get(kind, (begin[:0], begin[:0]))
    among = np.isin(fills, begin)
    again = np.searchsorted(begin, fills[among])
    early[again] = np.maximum(early[again], left[among])
    return np.where(off, np.maximum.accumulate(early), begin)


def _find_host_releases(
    program: Program, kind: Value, end: Positions, worst_case: bool
) -> Positions:
    """Return the positions at which hosts free device memory of values that have been moved.

    Before an instruction that reuses the slot, the host waits until the value has been moved. With
    `worst_case`, the memory is free when the move has ended, because the next value in the slot
    counts from that time on.
    """
    heard, again = find_known_ends(program, end), {}
    if kind in (found := find_slot_reuses(program)):
        fills, left = (each.tolist() for each in found[kind])
        again = dict(zip(left, left if worst_case else fills, strict=True))
    taken = [again.get(at, last) for at, last in zip(end.tolist(), heard.tolist(), strict=True)]
    return np.minimum(heard, np.array(taken, np.int32)).astype(np.int32)


def _has_neighbors(
    begin: NDArray[np.int32], end: NDArray[np.int32], here: NDArray[np.bool_],
    made: NDArray[np.bool_], over: NDArray[np.bool_],
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:  # fmt: skip
    """Return masks of the states whose previous state, and whose next state, is on the tier.

    `here` is the mask of the states that are on the tier.
    """
    before, after = np.zeros_like(here), np.zeros_like(here)
    goes_on = np.flatnonzero(~over & np.isin(end, begin))
    following = np.searchsorted(begin, end[goes_on])
    after[goes_on], before[following] = here[following], here[goes_on]
    return before, after
