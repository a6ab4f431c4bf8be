"""Assign values to static buffers, and find which instruction must free a buffer before its reuse.

A value lives in a slot of its rank and kind, from the start of the instruction that gives it to
the end of the one that frees it.  Slots are taken along the Stream, each fill taking the slot
that was freed earliest.  So of a kind with c slots the k-th fill takes what the (k-c)-th free
has left, and how many slots there are says all: which slot each value gets, and whom each fill
waits for.  That is interval colouring: c slots do if and only if no more than c values overlap.

What is taken in (ACT_IN, GRAD_IN) is filled by receives.  What is put out (ACT_OUT, GRAD_OUT) is
filled by compute and read by a send, or by the neighbouring stage's compute on the same rank.
A slot from which messages leave has room for the value in the form in which it is sent.
On the host there are slots, too, of what forwards saved and is offloaded, and of states that lie on
the disk: who brings one there waits for one, who takes it away leaves one.
SAVED and TAPE are filled and freed by compute alone, which is in order anyway: for them the
fewest slots cost nothing, and nobody has to say how many there are.

Of what there is for each stage (FULL, WGRAD, where replicas hold parts) a slot is no memory that is
made once, but leave to be whole: as many stages are at once as there are slots.  Unless told each
stage has its own.  Of one stage there are never two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.ir.cost.per_stage_values import look_up
from schedir.ir.cost.sizes import Sizes
from schedir.ir.dataflow import Dataflow, ValueLives
from schedir.ir.instruction_index import NO_POSITION, InstructionIndex, Positions
from schedir.ir.isa.instructions import (
    FORMS,
    INSTRUCTIONS,
    NON_BOUNDARY_VALUES,
    SEND_OPS,
    SLOT_VALUES,
    TIERS,
    VALUES,
    Opcode,
    Scope,
    Value,
    find_form_changes,
)
from schedir.ir.program import HOST_SLOT_VALUES, UNSHARED_SLOTS, Program

# Of the slotted the number is a choice; of the others there are the fewest.
SLOT_KINDS: Final = tuple(dict.fromkeys((*SLOT_VALUES, *NON_BOUNDARY_VALUES)))


def count_min_slots(program: Program) -> NDArray[np.int64]:
    """The fewest slots of each rank and kind, shape (ranks, kinds), kinds as in KINDS."""
    flow, group = (
        Dataflow.from_program(program),
        number_groups(InstructionIndex.from_program(program)),
    )
    return np.stack([flow.find_lifetimes(kind).count_peak(group) for kind in SLOT_KINDS], 1)


def number_groups(index: InstructionIndex) -> Positions:
    """The number of each instruction's group: of those that are issued as one."""
    return np.cumsum(~index.joined, dtype=np.int32)


def find_slot_reuses(program: Program) -> dict[Value, tuple[Positions, Positions]]:
    """By kind, who fills a slot that had a value before, and who frees it."""
    flow, found = Dataflow.from_program(program), {}
    said = _read_slot_counts(program)
    for kind in SLOT_VALUES:
        count = said.get(kind, np.full(program.shape.ranks, UNSHARED_SLOTS))
        if (count == UNSHARED_SLOTS).all() and VALUES[kind].scope is not Scope.STAGE:
            continue
        lives = flow.find_lifetimes(kind)
        left = _find_previous_users(lives, count)
        if (
            VALUES[kind].scope is Scope.STAGE
        ):  # one lane frees them: the later of two has both behind
            left = np.maximum(left, _find_previous_frees(program, lives))
        if (again := left != NO_POSITION).any():
            found[kind] = lives.filled_at[again], left[again]
    return found


def find_host_slot_reuses(program: Program) -> dict[str, tuple[Positions, Positions]]:
    """By name of the host's slots, who fills one that had a value before, and who has left it: a
    value is there from the start of what brings it to the end of what takes it away."""
    found = {}
    for name in HOST_SLOT_VALUES:
        count = np.array([getattr(slots, name) for slots in program.slots], np.int64)
        if (count == UNSHARED_SLOTS).all():
            continue
        lives = find_host_values(program, name)
        left = _find_previous_users(lives, count)
        if (again := left != NO_POSITION).any():
            found[name] = lives.filled_at[again], left[again]
    return found


def find_host_values(program: Program, slot_name: str = "host") -> ValueLives:
    """The values in the host's slots of a name."""
    return Dataflow.from_program(program).find_lifetimes(
        HOST_SLOT_VALUES[slot_name], TIERS.index("host")
    )


def _find_previous_users(lives: ValueLives, slot_counts: NDArray[np.int64]) -> Positions:
    """Who has left the slot that each fill takes, of so many slots of each rank; NONE of one that
    was empty."""
    values = np.diff(lives.rank_offsets)
    room = np.repeat(np.where(slot_counts == UNSHARED_SLOTS, values, slot_counts), values)
    taken = np.arange(len(lives.filled_at)) - room
    again = taken >= np.repeat(lives.rank_offsets[:-1], values)
    left = np.full(len(lives.filled_at), NO_POSITION, np.int32)
    left[again] = lives.sorted_freed_at[taken[again]]
    return left


def _read_slot_counts(program: Program) -> dict[Value, NDArray[np.int64]]:
    """How many slots each rank has by kind, as the program says."""
    return dict(zip(SLOT_VALUES, np.array(program.slots, np.int64).T, strict=False))


def _find_previous_frees(program: Program, lives: ValueLives) -> Positions:
    """Who has freed the value of the same stage that was there before each one; NONE of a first."""
    index, left = (
        InstructionIndex.from_program(program),
        np.full(len(lives.filled_at), NO_POSITION, np.int32),
    )
    key = index.compute_keys(Scope.STAGE, lives.filled_at)
    order = np.argsort(key, kind="stable")
    again = np.flatnonzero(key[order][1:] == key[order][:-1])
    left[order[again + 1]] = lives.freed_at[order[again]]
    return left


def find_stages(program: Program, kind: Value, rank: int) -> NDArray[np.int64]:
    """The stages of which a rank has values of a kind."""
    lives = Dataflow.from_program(program).find_lifetimes(kind)
    return np.unique(
        InstructionIndex.from_program(program).stage[lives.filled_at[lives.get_rank_slice(rank)]]
    ).astype(np.int64)


def count_slots(program: Program) -> NDArray[np.int64]:
    """How many slots each rank has of each kind, shape (ranks, kinds), kinds as in KINDS.

    Where the program does not say, each value has its own, or each stage, and there are never more;
    of what compute alone fills and frees there are the fewest.
    """
    flow, group = (
        Dataflow.from_program(program),
        number_groups(InstructionIndex.from_program(program)),
    )
    said = _read_slot_counts(program)
    columns = []
    for kind in SLOT_KINDS:
        lives = flow.find_lifetimes(kind)
        values = np.diff(lives.rank_offsets)
        if VALUES[kind].scope is Scope.STAGE and len(lives.filled_at):
            each = (len(find_stages(program, kind, rank)) for rank in range(program.shape.ranks))
            values = np.array([*each], np.int64)
        most = values if program.has_static_buffers(kind) else lives.count_peak(group)
        if kind in said:
            most = np.where(said[kind] == UNSHARED_SLOTS, most, np.minimum(said[kind], values))
        columns.append(most)
    return np.stack(columns, 1)


def assign_slots(program: Program, rank: int) -> dict[tuple[Value, int, int], dict[int, int]]:
    """The slots of each value of a rank, by kind, stage and microbatch; from 0 in each kind.

    By the index in the Stream of what fills one: a value that leaves the device and comes back has
    two.
    """
    slots: dict[tuple[Value, int, int], dict[int, int]] = {}
    flow, index, begin = (
        Dataflow.from_program(program),
        InstructionIndex.from_program(program),
        int(program.offsets[rank]),
    )
    for kind, count in zip(SLOT_KINDS, count_slots(program)[rank].tolist(), strict=True):
        lives = flow.find_lifetimes(kind)
        fills = lives.filled_at[lives.get_rank_slice(rank)].tolist()
        for at, place in zip(fills, _assign_rank_slots(lives, rank, count), strict=True):
            value = kind, int(index.stage[at]), int(index.mb[at])
            slots.setdefault(value, {})[at - begin] = place
    return slots


def _assign_rank_slots(lives: ValueLives, rank: int, count: int) -> list[int]:
    """The slot of each of a rank's fills: first those never used, then as they free."""
    order = np.argsort(lives.freed_at[lives.get_rank_slice(rank)], kind="stable").tolist()
    place = list(range(min(count, len(order))))
    for k in range(count, len(order)):
        place.append(place[order[k - count]])
    return place


def is_sent(program: Program, kind: Value) -> NDArray[np.bool_]:
    """Return whether a message takes each value of a kind, in the order of `Dataflow.lives`."""
    return InstructionIndex.from_program(program).is_op(SEND_OPS)[
        Dataflow.from_program(program).find_lifetimes(kind).freed_at
    ]


def group_by_form(
    program: Program, kind: Value, positions: Positions
) -> Iterator[tuple[tuple[Opcode, ...], NDArray[np.bool_]]]:
    """Group values of a kind by the form in which messages take them.

    Args:
        program: The program.
        kind: A value that stages put out.
        positions: Positions of instructions, each of the stage and the microbatch of one value.

    Yields:
        The instructions that change the form of some of the values, in execution order; and a
        mask of these values, of the shape of `positions`.
    """
    index, code = InstructionIndex.from_program(program), np.zeros(len(positions), np.int64)
    changed = [op for op in find_form_changes(kind) if op in index.position_by_key]
    for k, op in enumerate(changed):
        code |= (index.find_positions(op, index.key[positions]) != NO_POSITION).astype(
            np.int64
        ) << k
    for each in np.unique(code).tolist():
        yield tuple(op for k, op in enumerate(changed) if each >> k & 1), code == each


def compute_form_sizes(
    program: Program,
    kind: Value,
    change_ops: tuple[Opcode, ...],
    sizes: Sizes,
    positions: Positions,
) -> NDArray[np.float64]:
    """Return the bytes of values of a kind after `change_ops` have changed their form; `positions`
    has the position of an instruction of each value."""
    forms = [FORMS[form] for op in change_ops if (form := INSTRUCTIONS[op].form) is not None]
    told = [form.size for form in forms if form.size and sizes.is_specified(form.size)]
    size = _look_up_sizes(program, kind, [VALUES[kind].size, *told][-1], sizes, positions)
    return size / program.tp if any(form.is_tp_split for form in forms) else size


def count_send_slots(program: Program, kind: Value) -> dict[tuple[Opcode, ...], NDArray[np.int64]]:
    """Return the number of slots from which messages are sent, shape (ranks,), by the instructions
    that change the form of the value."""
    lives, sent = Dataflow.from_program(program).find_lifetimes(kind), is_sent(program, kind)
    ranks, values = program.shape.ranks, np.diff(lives.rank_offsets)
    rank_of, count = (
        np.repeat(range(ranks), values),
        count_slots(program)[:, SLOT_KINDS.index(kind)],
    )
    found = {}
    for changed, some in group_by_form(program, kind, lives.filled_at):
        some = some & sent
        number = np.bincount(rank_of[some], minlength=ranks)
        slots = np.minimum(number, count)
        # Some of a rank's values share slots with others, which no message takes.
        for rank in np.flatnonzero((number > 0) & (number < values) & (count < values)).tolist():
            places = np.array(_assign_rank_slots(lives, rank, int(count[rank])))
            slots[rank] = len(np.unique(places[some[lives.get_rank_slice(rank)]]))
        found[changed] = slots
    return found


def compute_full_sizes(
    program: Program, kind: Value, sizes: Sizes, positions: Positions
) -> NDArray[np.float64]:
    """Bytes, whole, of the value of a kind that each of some instructions is for."""
    return _look_up_sizes(program, kind, VALUES[kind].size, sizes, positions)


def _look_up_sizes(
    program: Program, kind: Value, size_name: str, sizes: Sizes, positions: Positions
) -> NDArray[np.float64]:
    """The size of a name, of the value of a kind that each of some instructions is for."""
    row, index, each = (
        VALUES[kind],
        InstructionIndex.from_program(program),
        sizes.per_microbatch(size_name, program.shape),
    )
    if row.peer is not None and not row.peer.is_downstream:  # told for the earlier stage
        each = each[program.neighbor_stages(row.peer)]
    return look_up(each, index.stage[positions], index.mb[positions])


def compute_message_sizes(program: Program, sizes: Sizes, sends: Positions) -> NDArray[np.float64]:
    """Bytes on the wire of each of some sends, in the form that each finds its value in."""
    index, size = InstructionIndex.from_program(program), np.zeros(len(sends))
    for op in SEND_OPS:
        own = np.flatnonzero(index.op[sends] == op)
        (kind,) = INSTRUCTIONS[op].needs
        at = sends[own]
        for changed, some in group_by_form(program, kind, at):
            size[own[some]] = compute_form_sizes(program, kind, changed, sizes, at[some])
    return size
