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
from schedir.ir.instruction_index import NONE, InstructionIndex, Positions
from schedir.ir.isa.instructions import (
    FORMS,
    KEPT,
    ROWS,
    SENDS,
    SLOTTED,
    TIERS,
    VALUES,
    Opcode,
    Scope,
    Value,
    form_changes,
)
from schedir.ir.program import ON_HOST, OWN, Program

# Of the slotted the number is a choice; of the others there are the fewest.
KINDS: Final = tuple(dict.fromkeys((*SLOTTED, *KEPT)))


def minimum_slots(program: Program) -> NDArray[np.int64]:
    """The fewest slots of each rank and kind, shape (ranks, kinds), kinds as in KINDS."""
    flow, group = Dataflow.of(program), groups(InstructionIndex.of(program))
    return np.stack([flow.lives(kind).peak(group) for kind in KINDS], 1)


def groups(index: InstructionIndex) -> Positions:
    """The number of each instruction's group: of those that are issued as one."""
    return np.cumsum(~index.joined, dtype=np.int32)


def reuses(program: Program) -> dict[Value, tuple[Positions, Positions]]:
    """By kind, who fills a slot that had a value before, and who frees it."""
    flow, found = Dataflow.of(program), {}
    said = _said(program)
    for kind in SLOTTED:
        count = said.get(kind, np.full(program.shape.ranks, OWN))
        if (count == OWN).all() and VALUES[kind].per is not Scope.STAGE:
            continue
        lives = flow.lives(kind)
        left = _left(lives, count)
        if VALUES[kind].per is Scope.STAGE:  # one lane frees them: the later of two has both behind
            left = np.maximum(left, _before_it(program, lives))
        if (again := left != NONE).any():
            found[kind] = lives.fill[again], left[again]
    return found


def reuses_on_host(program: Program) -> dict[str, tuple[Positions, Positions]]:
    """By name of the host's slots, who fills one that had a value before, and who has left it: a
    value is there from the start of what brings it to the end of what takes it away."""
    found = {}
    for name in ON_HOST:
        count = np.array([getattr(slots, name) for slots in program.slots], np.int64)
        if (count == OWN).all():
            continue
        lives = on_host(program, name)
        left = _left(lives, count)
        if (again := left != NONE).any():
            found[name] = lives.fill[again], left[again]
    return found


def on_host(program: Program, name: str = "host") -> ValueLives:
    """The values in the host's slots of a name."""
    return Dataflow.of(program).lives(ON_HOST[name], TIERS.index("host"))


def _left(lives: ValueLives, count: NDArray[np.int64]) -> Positions:
    """Who has left the slot that each fill takes, of so many slots of each rank; NONE of one that
    was empty."""
    values = np.diff(lives.first)
    room = np.repeat(np.where(count == OWN, values, count), values)
    taken = np.arange(len(lives.fill)) - room
    again = taken >= np.repeat(lives.first[:-1], values)
    left = np.full(len(lives.fill), NONE, np.int32)
    left[again] = lives.free[taken[again]]
    return left


def _said(program: Program) -> dict[Value, NDArray[np.int64]]:
    """How many slots each rank has by kind, as the program says."""
    return dict(zip(SLOTTED, np.array(program.slots, np.int64).T, strict=False))


def _before_it(program: Program, lives: ValueLives) -> Positions:
    """Who has freed the value of the same stage that was there before each one; NONE of a first."""
    index, left = InstructionIndex.of(program), np.full(len(lives.fill), NONE, np.int32)
    key = index.keys(Scope.STAGE, lives.fill)
    order = np.argsort(key, kind="stable")
    again = np.flatnonzero(key[order][1:] == key[order][:-1])
    left[order[again + 1]] = lives.freed[order[again]]
    return left


def stages_in(program: Program, kind: Value, rank: int) -> NDArray[np.int64]:
    """The stages of which a rank has values of a kind."""
    lives = Dataflow.of(program).lives(kind)
    return np.unique(InstructionIndex.of(program).stage[lives.fill[lives.of(rank)]]).astype(
        np.int64
    )


def counts(program: Program) -> NDArray[np.int64]:
    """How many slots each rank has of each kind, shape (ranks, kinds), kinds as in KINDS.

    Where the program does not say, each value has its own, or each stage, and there are never more;
    of what compute alone fills and frees there are the fewest.
    """
    flow, group = Dataflow.of(program), groups(InstructionIndex.of(program))
    said = _said(program)
    columns = []
    for kind in KINDS:
        lives = flow.lives(kind)
        values = np.diff(lives.first)
        if VALUES[kind].per is Scope.STAGE and len(lives.fill):
            each = (len(stages_in(program, kind, rank)) for rank in range(program.shape.ranks))
            values = np.array([*each], np.int64)
        most = values if program.in_slots(kind) else lives.peak(group)
        if kind in said:
            most = np.where(said[kind] == OWN, most, np.minimum(said[kind], values))
        columns.append(most)
    return np.stack(columns, 1)


def assign(program: Program, rank: int) -> dict[tuple[Value, int, int], dict[int, int]]:
    """The slots of each value of a rank, by kind, stage and microbatch; from 0 in each kind.

    By the index in the Stream of what fills one: a value that leaves the device and comes back has
    two.
    """
    slots: dict[tuple[Value, int, int], dict[int, int]] = {}
    flow, index, begin = (
        Dataflow.of(program),
        InstructionIndex.of(program),
        int(program.offsets[rank]),
    )
    for kind, count in zip(KINDS, counts(program)[rank].tolist(), strict=True):
        lives = flow.lives(kind)
        fills = lives.fill[lives.of(rank)].tolist()
        for at, place in zip(fills, _places(lives, rank, count), strict=True):
            value = kind, int(index.stage[at]), int(index.mb[at])
            slots.setdefault(value, {})[at - begin] = place
    return slots


def _places(lives: ValueLives, rank: int, count: int) -> list[int]:
    """The slot of each of a rank's fills: first those never used, then as they free."""
    order = np.argsort(lives.freed[lives.of(rank)], kind="stable").tolist()
    place = list(range(min(count, len(order))))
    for k in range(count, len(order)):
        place.append(place[order[k - count]])
    return place


def is_sent(program: Program, kind: Value) -> NDArray[np.bool_]:
    """Return whether a message takes each value of a kind, in the order of `Dataflow.lives`."""
    return InstructionIndex.of(program).is_op(SENDS)[Dataflow.of(program).lives(kind).freed]


def by_form(
    program: Program, kind: Value, at: Positions
) -> Iterator[tuple[tuple[Opcode, ...], NDArray[np.bool_]]]:
    """Group values of a kind by the form in which messages take them.

    Args:
        program: The program.
        kind: A value that stages put out.
        at: Positions of instructions, each of the stage and the microbatch of one value.

    Yields:
        The instructions that change the form of some of the values, in execution order; and a
        mask of these values, of the shape of `at`.
    """
    index, code = InstructionIndex.of(program), np.zeros(len(at), np.int64)
    changed = [op for op in form_changes(kind) if op in index.at]
    for k, op in enumerate(changed):
        code |= (index.where(op, index.key[at]) != NONE).astype(np.int64) << k
    for each in np.unique(code).tolist():
        yield tuple(op for k, op in enumerate(changed) if each >> k & 1), code == each


def form_sizes(
    program: Program, kind: Value, changed: tuple[Opcode, ...], sizes: Sizes, at: Positions
) -> NDArray[np.float64]:
    """Return the bytes of values of a kind after `changed` have changed their form; `at` has the
    position of an instruction of each value."""
    forms = [FORMS[form] for op in changed if (form := ROWS[op].form) is not None]
    told = [form.size for form in forms if form.size and sizes.tells(form.size)]
    size = _sizes(program, kind, [VALUES[kind].size, *told][-1], sizes, at)
    return size / program.tp if any(form.split for form in forms) else size


def sent_from(program: Program, kind: Value) -> dict[tuple[Opcode, ...], NDArray[np.int64]]:
    """Return the number of slots from which messages are sent, shape (ranks,), by the instructions
    that change the form of the value."""
    lives, sent = Dataflow.of(program).lives(kind), is_sent(program, kind)
    ranks, values = program.shape.ranks, np.diff(lives.first)
    rank_of, count = np.repeat(range(ranks), values), counts(program)[:, KINDS.index(kind)]
    found = {}
    for changed, some in by_form(program, kind, lives.fill):
        some = some & sent
        number = np.bincount(rank_of[some], minlength=ranks)
        slots = np.minimum(number, count)
        # Some of a rank's values share slots with others, which no message takes.
        for rank in np.flatnonzero((number > 0) & (number < values) & (count < values)).tolist():
            places = np.array(_places(lives, rank, int(count[rank])))
            slots[rank] = len(np.unique(places[some[lives.of(rank)]]))
        found[changed] = slots
    return found


def whole_sizes(program: Program, kind: Value, sizes: Sizes, at: Positions) -> NDArray[np.float64]:
    """Bytes, whole, of the value of a kind that each of some instructions is for."""
    return _sizes(program, kind, VALUES[kind].size, sizes, at)


def _sizes(
    program: Program, kind: Value, name: str, sizes: Sizes, at: Positions
) -> NDArray[np.float64]:
    """The size of a name, of the value of a kind that each of some instructions is for."""
    row, index, each = VALUES[kind], InstructionIndex.of(program), sizes.each(name, program.shape)
    if row.peer is not None and not row.peer.ahead:  # told for the earlier stage
        each = each[program.beside(row.peer)]
    return look_up(each, index.stage[at], index.mb[at])


def message_sizes(program: Program, sizes: Sizes, sends: Positions) -> NDArray[np.float64]:
    """Bytes on the wire of each of some sends, in the form that each finds its value in."""
    index, size = InstructionIndex.of(program), np.zeros(len(sends))
    for op in SENDS:
        own = np.flatnonzero(index.op[sends] == op)
        (kind,) = ROWS[op].needs
        at = sends[own]
        for changed, some in by_form(program, kind, at):
            size[own[some]] = form_sizes(program, kind, changed, sizes, at[some])
    return size
