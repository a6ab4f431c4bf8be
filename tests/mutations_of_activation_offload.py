"""Mutations of activation offload: moves of saved activations between device, host and disk."""

from __future__ import annotations

import random
from dataclasses import replace

from schedir.analysis.memory.buffer_slots import (
    SLOT_KINDS,
    count_min_slots,
    find_host_values,
    number_groups,
)
from schedir.ir.instruction_index import InstructionIndex
from schedir.ir.isa.instructions import Opcode, Value
from schedir.ir.program import ADDRESS_MASK, JOINED_BIT, Program
from tests.edits import (
    MUTATIONS,
    Edit,
    at,
    bare,
    move,
    move_to_other_rank,
    op,
    pull,
    push,
    set_slot_counts,
    stage,
    swap,
    swap_with_other,
    whole,
    with_op,
)
from tests.mutations import B, I
from tests.oracle_activation_offload import MOVED, ROOMS

O = Opcode
_EARLIER_MUTATIONS = {*MUTATIONS}
USES = (O.Recompute, B, I)
MOVE_CHAINS = (
    (O.Offload, O.Reload),
    (O.Offload, O.Reload),
    (O.Offload, O.OffloadToDisk, O.ReloadFromDisk, O.Reload),
)


def offload_activations(program: Program, rng: random.Random) -> Program:
    """Return a program that offloads some saved activations between two of their uses.

    Some of the programs limit the slots on the device or the host to enough slots or one more.
    """
    e, share = Edit.of(program, rng), rng.choice([0.3, 0.7, 1])
    for own in e.lists:
        for forward_word in [
            bare(w) for w in own if op(w) is O.Forward and stage(w) >= program.frozen_stages
        ]:
            if rng.random() < share:
                _insert_moves(own, forward_word, rng)
    program = e.result()
    least = {
        "saved": count_min_slots(program)[:, SLOT_KINDS.index(Value.SAVED)],
        "host": find_host_values(program).count_peak(
            number_groups(InstructionIndex.from_program(program))
        ),
    }
    for tier, counts in least.items():
        if rng.random() < 0.5:
            program = set_slot_counts(program, tier, (counts + rng.choice([0, 0, 1])).tolist())
    return program


def _insert_moves(own: list[int], forward_word: int, rng: random.Random) -> None:
    """Insert moves of the activations of a forward between two instructions that use them."""
    uses = [k for k, w in enumerate(own) if bare(w) == forward_word or _uses(w, forward_word)]
    if len(uses) < 2:
        return
    first = rng.randrange(len(uses) - 1)
    gaps = [k for k in range(uses[first] + 1, uses[first + 1] + 1) if not own[k] & JOINED_BIT]
    if not gaps:
        return
    ops = rng.choice(MOVE_CHAINS)
    places = sorted(rng.choices(gaps, k=len(ops)))
    if rng.random() < 0.5:
        places[0], places[-1] = gaps[0], gaps[-1]
    for k, o in [*zip(places, ops, strict=True)][::-1]:
        own.insert(k, with_op(forward_word, o))


def _uses(w: int, forward_word: int) -> bool:
    return op(w) in USES and w & ADDRESS_MASK == forward_word & ADDRESS_MASK


def find_uses(e: Edit) -> list[int]:
    """Return the indices of the instructions that need the current value on the device."""
    return [k for k in e.here(*USES) if _uses(e.own[k], e.word)]


@at(*MOVED)
def drop_move(e: Edit) -> None:
    pull(e.own, e.at)


@at(*MOVED)
def duplicate_move(e: Edit) -> None:
    push(e.own, e.rng.randint(0, len(e.own)), e.word)


@at(*MOVED)
def swap_moves(e: Edit) -> bool | None:
    return swap_with_other(e, *MOVED)


@at(*MOVED)
def swap_moves_of_a_value(e: Edit) -> bool | None:
    same = [k for k in e.here(*MOVED) if k != e.at and not (e.own[k] ^ e.word) & ADDRESS_MASK]
    if not same:
        return False
    swap(e.own, e.at, e.rng.choice(same))
    return None


@at(*MOVED)
def swap_move_with_neighbor(e: Edit) -> None:
    swap(e.own, max(e.at - 1, 0), e.at)


@at(*MOVED)
def put_move_anywhere(e: Edit) -> None:
    move(e.own, e.at, e.rng.randint(0, len(e.own)))


@at(*MOVED)
def put_move_near(e: Edit) -> None:
    move(e.own, e.at, e.at + e.rng.choice([-3, -2, -1, 2, 3, 4]))


@at(*MOVED)
def change_move(e: Edit) -> None:
    e.put(with_op(e.word, e.rng.choice([o for o in MOVED if o is not op(e.word)])))


@at(*MOVED)
def change_value_of_move(e: Edit) -> bool | None:
    others = [e.own[k] for k in e.here(O.Forward) if (e.own[k] ^ e.word) & ADDRESS_MASK]
    if not others:
        return False
    e.put(with_op(e.rng.choice(others), op(e.word)))
    return None


@at(*MOVED)
def move_on_other_rank(e: Edit) -> bool | None:
    return move_to_other_rank(e)


@at(O.Reload)
def reload_after_use(e: Edit) -> None:
    move(e.own, e.at, e.rng.choice(find_uses(e)) + 1)


@at(O.Offload)
def use_while_offloaded(e: Edit) -> bool | None:
    """Move the next use of a value right after its offload, before its reload."""
    later = [k for k in find_uses(e) if k > e.at]
    if not later:
        return False
    move(e.own, later[0], e.at + 1)
    return None


@at(O.Offload)
def use_before_offload(e: Edit) -> bool | None:
    """Move the next use of a value right before its offload."""
    later = [k for k in find_uses(e) if k > e.at]
    if not later:
        return False
    move(e.own, later[0], e.at)
    return None


@at(O.Offload)
def offload_once_more(e: Edit) -> None:
    """Insert another offload and reload of a value anywhere."""
    k = e.rng.randint(0, len(e.own))
    push(e.own, k, with_op(e.word, O.Reload))
    push(e.own, k, e.word)


@at(O.OffloadToDisk)
def stay_on_host(e: Edit) -> bool | None:
    """Keep a value on the host instead of the disk. This is legal without a limit on the host."""
    back = [k for k in e.here(O.ReloadFromDisk) if not (e.own[k] ^ e.word) & ADDRESS_MASK]
    limited_tiers = e.program.slots[e.rank].specified() if e.program.slots else {}
    if len(back) != 1 or "host" in limited_tiers:
        return False
    for k in sorted((back[0], e.at), reverse=True):
        pull(e.own, k)
    return None


@whole
def remove_slot(e: Edit) -> bool | None:
    counts_by_slot = [
        (rank, tier, number - 1)
        for rank, slots in enumerate(e.program.slots)
        for tier, number in slots.specified().items()
        if tier in ROOMS.values() and number
    ]
    if not counts_by_slot:
        return False
    rank, tier, number = e.rng.choice(counts_by_slot)
    slots = [*e.program.slots]
    slots[rank] = slots[rank]._replace(**{tier: number})
    e.program = replace(e.program, slots=tuple(slots))
    return None


@whole
def change_slots(e: Edit) -> None:
    """Set the number of slots of each rank to any number, on the device or the host."""
    forwards = (sum(op(w) is O.Forward for w in own) for own in e.lists)
    counts = [e.rng.randint(0, number) for number in forwards]
    e.program = set_slot_counts(e.program, e.rng.choice([*ROOMS.values()]), counts)


# The mutations that need a program with activation offload.
ACTIVATION_OFFLOAD_MUTATIONS = tuple(name for name in MUTATIONS if name not in _EARLIER_MUTATIONS)
