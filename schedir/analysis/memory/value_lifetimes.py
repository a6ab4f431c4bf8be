"""Find when a rank holds values that have no static buffer, and how many bytes they take."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.host_waits import heard_of
from schedir.analysis.memory.buffer_slots import groups, reuses
from schedir.ir.cost.per_stage_values import look_up
from schedir.ir.cost.sizes import Sizes
from schedir.ir.cost.zero_states import is_cut
from schedir.ir.dataflow import Dataflow, ValueStates
from schedir.ir.instruction_index import NONE, InstructionIndex, Positions
from schedir.ir.isa.instructions import ROWS, VALUES, Lane, Value
from schedir.ir.program import Program
from schedir.ir.value_chains import NO_FORM


class ValueLifetimes(NamedTuple):
    """Changes of what is kept: positions, when along the Streams, number and bytes."""

    at: NDArray[np.int64]
    when: NDArray[np.int64]
    number: NDArray[np.int64]
    bytes: NDArray[np.float64]


def kept_of(
    program: Program, kind: Value, sizes: Sizes, tier: int, late: bool, moved: bool | None = None
) -> ValueLifetimes:
    """What a kind of value holds on a tier, from when it comes there until it goes.

    What takes another form without leaving does so at the start of the change if it grows, else at
    its end.  With `moved` only those that are elsewhere meanwhile, or that are not.
    """
    index, shape = InstructionIndex.of(program), program.shape
    states = _states(program, kind, moved)
    begin, end, at_tier, _, made, over = states
    size = _sizes(program, kind, sizes, states)
    here = at_tier == tier
    left = end
    if late and tier:  # nobody knows when another lane has moved it, until that is used
        here, left = _as_long(program, kind, states, tier)
    elif late:
        lanes = np.array([row.lane for row in ROWS])[index.op]
        here = here | (lanes[begin] != Lane.COMPUTE)
    group = groups(index).astype(np.int64)
    before, after = _neighbours(begin, end, here, made, over)
    comes, goes = here & ~before, here & ~after
    one, adds, first = np.ones(len(begin), np.int64), size.copy(), np.empty(0, np.intp)
    if made_of := VALUES[
        kind
    ].converted_from:  # while it is made, it counts as what it adds to that
        first = np.flatnonzero(comes & made)
        more = sizes.each(made_of[1], shape) - sizes.each(VALUES[made_of[0]].size, shape)
        adds[first] = look_up(more, index.stage[begin[first]], index.mb[begin[first]])
    came, gone = begin, left.copy()
    when = 2 * group[begin]
    if late:
        came = _as_early(program, kind, begin, made)
        when = 2 * group[came] + (came != begin) * (came != program.offsets[index.rank[came]])
    if tier == 0:  # memory of a device is the host's to let go
        gone[over] = heard_of(program, end[over], drains=not late)
        if VALUES[kind].initial_tier:
            gone = _left(program, kind, end, late)
    changes = [
        (came[comes], when[comes], one[comes], adds[comes]),
        (begin[first], 2 * group[begin[first]] + 1, 0 * one[first], (size - adds)[first]),
        (gone[goes], (2 * group[gone] + (gone == end))[goes], -one[goes], -size[goes]),
    ]
    stays = np.flatnonzero(here & after)  # from one form to the next
    if len(stays):
        following = np.searchsorted(begin, end[stays])
        grows = size[following] - size[stays]
        when = 2 * group[end[stays]] + (grows < 0)
        changes.append((end[stays], when, 0 * one[stays], grows))
    return ValueLifetimes(*map(np.concatenate, zip(*changes, strict=True)))


def _states(program: Program, kind: Value, moved: bool | None) -> ValueStates:
    """What values of a kind are; only of those that are elsewhere meanwhile, or of the others."""
    states, index = Dataflow.of(program).states(kind), InstructionIndex.of(program)
    if moved is None:
        return states
    key = index.keys(VALUES[kind].per, states.begin, index.mb[states.begin].astype(np.int64))
    own = np.isin(key, key[states.tier > 0]) == moved
    return ValueStates(*(each[own] for each in states))


def _sizes(program: Program, kind: Value, sizes: Sizes, states: ValueStates) -> NDArray[np.float64]:
    """Bytes of each piece, in its form."""
    index, chains = InstructionIndex.of(program), Dataflow.of(program).chains(kind)
    names = [VALUES[kind].size, *(chains.forms if chains else ())]
    at = index.stage[states.begin], index.mb[states.begin]
    # Of what lies somewhere from the start replicas have parts from a level of ZeRO on.
    part = VALUES[kind].initial_tier and is_cut(VALUES[kind].size, program.zero)
    parts = program.dp if part else 1
    of_form = [look_up(sizes.each(name, program.shape), *at) / parts for name in names]
    return of_form[0] if len(names) == 1 else np.choose(states.form - NO_FORM, of_form)


def _as_long(
    program: Program, kind: Value, states: ValueStates, tier: int
) -> tuple[NDArray[np.bool_], Positions]:
    """Which pieces of values may be on a tier, from the first that is, and where each is known to
    have left it: where somebody uses what is on the device again."""
    index = InstructionIndex.of(program)
    key = index.keys(VALUES[kind].per, states.begin, index.mb[states.begin].astype(np.int64))
    order = np.lexsort((states.begin, key))
    key, end, at_tier = key[order], states.end[order], states.tier[order]
    life = np.cumsum(np.append(False, key[1:] != key[:-1])[: len(key)])
    place = np.arange(len(key))
    first, last = np.full(len(key), len(key)), np.full(len(key), -1)
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


def moved_sizes(
    program: Program, kind: Value, sizes: Sizes, tier: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bytes of the largest and of the smallest value of a kind on a tier of each rank, of those
    that are elsewhere meanwhile."""
    states = _states(program, kind, True)
    size, here = _sizes(program, kind, sizes, states), states.tier == tier
    rank = InstructionIndex.of(program).rank[states.begin[here]]
    most, least = np.zeros(program.shape.ranks), np.full(program.shape.ranks, np.inf)
    np.maximum.at(most, rank, size[here])
    np.minimum.at(least, rank, size[here])
    return most, np.where(np.isinf(least), 0.0, least)


def _as_early(
    program: Program, kind: Value, begin: Positions, made: NDArray[np.bool_]
) -> Positions:
    """What each value can come behind at the earliest: who leaves it room, if another lane than
    compute makes it, or the first of the Stream where there always is some.

    What lies elsewhere from the start comes behind what it needs: what compute gave, or what was
    made of that.
    """
    index, lies = InstructionIndex.of(program), bool(VALUES[kind].initial_tier)
    off = (made | lies) & (np.array([row.lane for row in ROWS])[index.op[begin]] != Lane.COMPUTE)
    early = program.offsets[index.rank[begin]].astype(np.int32)
    if lies and len(begin):
        needs = np.append(Dataflow.of(program).needs, np.full((1, len(index)), NONE), 0)
        given = needs[:, begin].max(0)
        computed = np.where(given == NONE, NONE, needs[:, given].max(0))
        early = np.maximum(early, computed).astype(np.int32)
    fills, left = reuses(program).get(kind, (begin[:0], begin[:0]))
    among = np.isin(fills, begin)
    again = np.searchsorted(begin, fills[among])
    early[again] = np.maximum(early[again], left[among])
    return np.where(off, np.maximum.accumulate(early), begin)


def _left(program: Program, kind: Value, end: Positions, late: bool) -> Positions:
    """Where hosts let go of what has been moved from the device: who takes its slot waits for that
    on the host.  Whoever does, whenever that is, comes when it has gone: `late` says it so."""
    heard, again = heard_of(program, end), {}
    if kind in (found := reuses(program)):
        fills, left = (each.tolist() for each in found[kind])
        again = dict(zip(left, left if late else fills, strict=True))
    taken = [again.get(at, last) for at, last in zip(end.tolist(), heard.tolist(), strict=True)]
    return np.minimum(heard, np.array(taken, np.int32)).astype(np.int32)


def _neighbours(
    begin: NDArray[np.int32], end: NDArray[np.int32], here: NDArray[np.bool_],
    made: NDArray[np.bool_], over: NDArray[np.bool_],
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:  # fmt: skip
    """Whether the piece of a value before each one, and the one after it, is here, too."""
    before, after = np.zeros_like(here), np.zeros_like(here)
    goes_on = np.flatnonzero(~over & np.isin(end, begin))
    following = np.searchsorted(begin, end[goes_on])
    after[goes_on], before[following] = here[following], here[goes_on]
    return before, after
