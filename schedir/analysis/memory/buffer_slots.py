"""Assign values to slots, and find which instruction must free a slot before its reuse.

A value uses a slot of its rank and kind, from the start of its producer to the end of the
instruction that frees it. Slots are assigned along the Stream. An instruction that starts a value
fills a slot. It uses the slot that was freed earliest. So with c slots of a kind, the k-th
instruction that fills a slot uses the slot that the (k-c)-th freeing instruction has freed. The
number of slots determines the slot of each value, and the instruction that each fill waits for.
This is interval colouring: c slots suffice if and only if at most c values exist at the same time.

Receives fill slots of inputs (ACT_IN, GRAD_IN). Compute fills slots of outputs (ACT_OUT, GRAD_OUT).
The slots of outputs are read by a send, or by the compute of the neighbour stage on the same rank.
If messages send values from a slot, the slot has the size of a value in the form that is sent.

The host has slots, too, for offloaded activations and for optimizer states on the disk. The
instruction that moves a value to the host waits for a slot, and the instruction that moves the
value from the host frees the slot. Without offload, only compute fills and frees the slots of SAVED
and DEFERRED_WGRAD. A rank runs its compute in order, so the smallest possible number of these slots
makes no program slower. So a program need not specify the number.

With ZeRO, a slot of UNSHARDED_PARAMS or WGRAD is not a static buffer. The number of slots limits
how many stages are unsharded at the same time. By default each stage has one separate slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

# (kind, stage, microbatch) -> the index in the Stream of an instruction that fills a slot with this
# value -> the slot.
SlotAssignment = dict[tuple[Value, int, int], dict[int, int]]
# Passes choose the numbers of slots of SLOT_VALUES.  Other kinds have the smallest possible number.
SLOT_KINDS: Final = tuple(dict.fromkeys((*SLOT_VALUES, *NON_BOUNDARY_VALUES)))


def count_min_slots(program: Program, kinds: Sequence[Value] = SLOT_KINDS) -> NDArray[np.int64]:
    """Return the smallest possible number of slots of each rank and kind.

    Args:
        program: The program.
        kinds: The kinds of values.

    Returns:
        Numbers of shape (ranks, kinds).
    """
    flow = Dataflow.from_program(program)
    group = number_groups(InstructionIndex.from_program(program))
    return np.stack([flow.find_lifetimes(kind).count_peak(group) for kind in kinds], 1)


def number_groups(index: InstructionIndex) -> Positions:
    """Return the number of each instruction's group. The host issues a whole group at once.

    Args:
        index: The index of the program.

    Returns:
        Ascending numbers from 1 on, shape (n,).
    """
    return np.cumsum(~index.joined, dtype=np.int32)


def find_slot_reuses(program: Program) -> dict[Value, tuple[Positions, Positions]]:
    """Return the instructions that fill a device slot again, and those that freed the slot.

    Args:
        program: The program.

    Returns:
        Kind of value -> (positions that fill a slot again, positions that freed the slot). There is
        no entry for a kind whose slots are not reused.
    """
    flow, reuses = Dataflow.from_program(program), {}
    given_counts = _read_slot_counts(program)
    for kind in SLOT_VALUES:
        count = given_counts.get(kind, np.full(program.shape.ranks, UNSHARED_SLOTS))
        if (count == UNSHARED_SLOTS).all() and VALUES[kind].scope is not Scope.STAGE:
            continue
        lives = flow.find_lifetimes(kind)
        if not len(lives.filled_at):
            continue
        previous_free = _find_previous_users(lives, count)
        if VALUES[kind].scope is Scope.STAGE:
            # One lane frees all these values in order. So a fill waits only for the later of two
            # instructions: the one that freed the slot, and the one that freed the previous value
            # of the stage.
            previous_free = np.maximum(previous_free, _find_previous_frees(program, lives))
        if (is_reuse := previous_free != NO_POSITION).any():
            reuses[kind] = lives.filled_at[is_reuse], previous_free[is_reuse]
    return reuses


def find_host_slot_reuses(program: Program) -> dict[str, tuple[Positions, Positions]]:
    """Return the instructions that fill a host slot again, and those that freed the slot.

    A value uses a host slot from the start of its move to the host until the end of its move from
    the host.

    Args:
        program: The program.

    Returns:
        Name of the slots -> (positions that fill a slot again, positions that freed the slot).
        There is no entry for slots that are not reused.
    """
    reuses = {}
    for name in HOST_SLOT_VALUES:
        count = np.array([getattr(slots, name) for slots in program.slots], np.int64)
        if (count == UNSHARED_SLOTS).all():
            continue
        lives = find_host_values(program, name)
        previous_free = _find_previous_users(lives, count)
        if (is_reuse := previous_free != NO_POSITION).any():
            reuses[name] = lives.filled_at[is_reuse], previous_free[is_reuse]
    return reuses


def find_host_values(program: Program, slot_name: str = "host") -> ValueLives:
    """Return the lifetimes of the values in a kind of host slots.

    Args:
        program: The program.
        slot_name: The kind of slots, as a key of `HOST_SLOT_VALUES`.
    """
    return Dataflow.from_program(program).find_lifetimes(
        HOST_SLOT_VALUES[slot_name], TIERS.index("host")
    )


def _find_previous_users(lives: ValueLives, slot_counts: NDArray[np.int64]) -> Positions:
    """Return, for each value, the instruction that freed its slot; -1 if the slot is new."""
    value_counts = np.diff(lives.rank_offsets)
    slot_count = np.repeat(
        np.where(slot_counts == UNSHARED_SLOTS, value_counts, slot_counts), value_counts
    )
    free_index = np.arange(len(lives.filled_at)) - slot_count
    is_reuse = free_index >= np.repeat(lives.rank_offsets[:-1], value_counts)
    previous_free = np.full(len(lives.filled_at), NO_POSITION, np.int32)
    previous_free[is_reuse] = lives.sorted_freed_at[free_index[is_reuse]]
    return previous_free


def _read_slot_counts(program: Program) -> dict[Value, NDArray[np.int64]]:
    """Return a dict from the kind of value to the numbers of slots that the program specifies."""
    return dict(zip(SLOT_VALUES, np.array(program.slots, np.int64).T, strict=False))


def _find_previous_frees(program: Program, lives: ValueLives) -> Positions:
    """Return the instruction that freed the previous value of the same stage; -1 for the first."""
    index = InstructionIndex.from_program(program)
    previous_free = np.full(len(lives.filled_at), NO_POSITION, np.int32)
    key = index.compute_keys(Scope.STAGE, lives.filled_at)
    order = np.argsort(key, kind="stable")
    repeats = np.flatnonzero(key[order][1:] == key[order][:-1])
    previous_free[order[repeats + 1]] = lives.freed_at[order[repeats]]
    return previous_free


def find_stages(program: Program, kind: Value, rank: int) -> NDArray[np.int64]:
    """Return the stages with values of a kind on a rank, ascending.

    Args:
        program: The program.
        kind: The kind of value.
        rank: The rank.
    """
    lives = Dataflow.from_program(program).find_lifetimes(kind)
    return np.unique(
        InstructionIndex.from_program(program).stage[lives.filled_at[lives.get_rank_slice(rank)]]
    ).astype(np.int64)


def count_slots(program: Program, kinds: Sequence[Value] = SLOT_KINDS) -> NDArray[np.int64]:
    """Return the number of slots of each rank and kind.

    If the program does not specify a number, each value has a separate slot. A kind whose values
    belong to a stage and not to a microbatch has one slot for each stage. A kind that only compute
    fills and frees has the smallest possible number of slots.

    Args:
        program: The program.
        kinds: The kinds of values.

    Returns:
        Numbers of shape (ranks, kinds).
    """
    flow = Dataflow.from_program(program)
    group = number_groups(InstructionIndex.from_program(program))
    given_counts = _read_slot_counts(program)
    columns = []
    for kind in kinds:
        lives = flow.find_lifetimes(kind)
        value_counts = np.diff(lives.rank_offsets)
        if VALUES[kind].scope is Scope.STAGE and len(lives.filled_at):
            stage_counts = (
                len(find_stages(program, kind, rank)) for rank in range(program.shape.ranks)
            )
            value_counts = np.array([*stage_counts], np.int64)
        slot_counts = value_counts if program.has_static_buffers(kind) else lives.count_peak(group)
        if kind in given_counts:
            slot_counts = np.where(
                given_counts[kind] == UNSHARED_SLOTS,
                slot_counts,
                np.minimum(given_counts[kind], value_counts),
            )
        columns.append(slot_counts)
    return np.stack(columns, 1)


def assign_slots(program: Program, rank: int) -> SlotAssignment:
    """Return the slot of each value of a rank.

    Args:
        program: The program.
        rank: The rank.

    Returns:
        (kind, stage, microbatch) -> index in the Stream of the instruction that fills a slot -> the
        slot. The slots of each kind are numbered from 0. A value that leaves the device and comes
        back fills two slots.
    """
    slots: SlotAssignment = {}
    flow = Dataflow.from_program(program)
    index = InstructionIndex.from_program(program)
    stream_start = int(program.offsets[rank])
    for kind, count in zip(SLOT_KINDS, count_slots(program)[rank].tolist(), strict=True):
        lives = flow.find_lifetimes(kind)
        fills = lives.filled_at[lives.get_rank_slice(rank)].tolist()
        for position, slot in zip(fills, _assign_rank_slots(lives, rank, count), strict=True):
            value = kind, int(index.stage[position]), int(index.mb[position])
            slots.setdefault(value, {})[position - stream_start] = slot
    return slots


def _assign_rank_slots(lives: ValueLives, rank: int, count: int) -> list[int]:
    """Return the slot of each value of a rank: unused slots first, then slots as they are freed."""
    order = np.argsort(lives.freed_at[lives.get_rank_slice(rank)], kind="stable").tolist()
    slots = list(range(min(count, len(order))))
    for k in range(count, len(order)):
        slots.append(slots[order[k - count]])
    return slots


def is_sent(program: Program, kind: Value) -> NDArray[np.bool_]:
    """Return a mask of the values of a kind that a message sends.

    Args:
        program: The program.
        kind: The kind of value.

    Returns:
        A mask in the order of `Dataflow.find_lifetimes`.
    """
    return InstructionIndex.from_program(program).is_op(SEND_OPS)[
        Dataflow.from_program(program).find_lifetimes(kind).freed_at
    ]


def group_by_form(
    program: Program, kind: Value, positions: Positions
) -> Iterator[tuple[tuple[Opcode, ...], NDArray[np.bool_]]]:
    """Group values of a kind by the form in which messages send them.

    Args:
        program: The program.
        kind: A kind of output.
        positions: For each value, the position of an instruction with the value's stage and
            microbatch.

    Yields:
        The opcodes that change the form of some of the values, in execution order; and a mask of
        these values, in the shape of `positions`.
    """
    index = InstructionIndex.from_program(program)
    form_code = np.zeros(len(positions), np.int64)
    change_ops = [op for op in find_form_changes(kind) if op in index.position_by_key]
    for k, op in enumerate(change_ops):
        form_code |= (index.find_positions(op, index.key[positions]) != NO_POSITION).astype(
            np.int64
        ) << k
    for code in np.unique(form_code).tolist():
        yield tuple(op for k, op in enumerate(change_ops) if code >> k & 1), form_code == code


def compute_form_sizes(
    program: Program,
    kind: Value,
    change_ops: tuple[Opcode, ...],
    sizes: Sizes,
    positions: Positions,
) -> NDArray[np.float64]:
    """Return the bytes of values of a kind after some changes of their form.

    Args:
        program: The program.
        kind: The kind of value.
        change_ops: The opcodes that change the form.
        sizes: The sizes of values.
        positions: For each value, the position of an instruction with its stage and microbatch.

    Returns:
        Bytes, of the shape of `positions`.
    """
    forms = [FORMS[form] for op in change_ops if (form := INSTRUCTIONS[op].form) is not None]
    form_sizes = [form.size for form in forms if form.size and sizes.is_specified(form.size)]
    size = _look_up_sizes(program, kind, [VALUES[kind].size, *form_sizes][-1], sizes, positions)
    return size / program.tp if any(form.is_tp_split for form in forms) else size


def count_send_slots(program: Program, kind: Value) -> dict[tuple[Opcode, ...], NDArray[np.int64]]:
    """Return the number of slots from which messages are sent, for each form.

    Args:
        program: The program.
        kind: A kind of output.

    Returns:
        Opcodes that change the form -> numbers of slots, shape (ranks,).
    """
    lives = Dataflow.from_program(program).find_lifetimes(kind)
    is_sent_value = is_sent(program, kind)
    ranks, value_counts = program.shape.ranks, np.diff(lives.rank_offsets)
    rank_of_value = np.repeat(range(ranks), value_counts)
    slot_counts = count_slots(program, [kind])[:, 0]
    slots_by_form = {}
    for change_ops, is_member in group_by_form(program, kind, lives.filled_at):
        is_member = is_member & is_sent_value
        sent_counts = np.bincount(rank_of_value[is_member], minlength=ranks)
        slots = np.minimum(sent_counts, slot_counts)
        # On the ranks of this loop, sent values of this form may share slots with other values. So
        # the number of their slots depends on the assignment of slots.
        for rank in np.flatnonzero(
            (sent_counts > 0) & (sent_counts < value_counts) & (slot_counts < value_counts)
        ).tolist():
            slot_of_value = np.array(_assign_rank_slots(lives, rank, int(slot_counts[rank])))
            slots[rank] = len(np.unique(slot_of_value[is_member[lives.get_rank_slice(rank)]]))
        slots_by_form[change_ops] = slots
    return slots_by_form


def compute_full_sizes(
    program: Program, kind: Value, sizes: Sizes, positions: Positions
) -> NDArray[np.float64]:
    """Return the bytes of values of a kind before any change of their form.

    Args:
        program: The program.
        kind: The kind of value.
        sizes: The sizes of values.
        positions: For each value, the position of an instruction with its stage and microbatch.

    Returns:
        Bytes, of the shape of `positions`.
    """
    return _look_up_sizes(program, kind, VALUES[kind].size, sizes, positions)


def _look_up_sizes(
    program: Program, kind: Value, size_name: str, sizes: Sizes, positions: Positions
) -> NDArray[np.float64]:
    """Return the size `size_name` of the value at each position."""
    row = VALUES[kind]
    index = InstructionIndex.from_program(program)
    size_table = sizes.per_microbatch(size_name, program.shape)
    # `Sizes` lists the bytes of a boundary under the earlier of its two stages.
    if row.peer is not None and not row.peer.is_downstream:
        size_table = size_table[program.neighbor_stages(row.peer)]
    return look_up(size_table, index.stage[positions], index.mb[positions])


def compute_message_sizes(program: Program, sizes: Sizes, sends: Positions) -> NDArray[np.float64]:
    """Return the bytes that each send transmits.

    Args:
        program: The program.
        sizes: The sizes of values.
        sends: Positions of sends.

    Returns:
        Bytes in the form in which the value is sent, of the shape of `sends`.
    """
    index = InstructionIndex.from_program(program)
    size = np.zeros(len(sends))
    for op in SEND_OPS:
        send_indices = np.flatnonzero(index.op[sends] == op)
        (kind,) = INSTRUCTIONS[op].needs
        positions = sends[send_indices]
        for change_ops, is_member in group_by_form(program, kind, positions):
            size[send_indices[is_member]] = compute_form_sizes(
                program, kind, change_ops, sizes, positions[is_member]
            )
    return size
