"""States: the optimizer's state lies on the host, and each stage's is loaded, stepped and stored.

ZeRO-Offload (arXiv 2101.06840) keeps it there; ZeRO-Infinity (arXiv 2104.07857, section 5.2.2)
brings it to the device part by part, and reads the next while one is stepped.  Here a part is a
stage's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from schedir.analysis.slots import KINDS, counts, minimum_slots
from schedir.errors import UsageError
from schedir.ir.fields import whole_number
from schedir.ir.index import NONE, Index
from schedir.ir.ops import Opcode, Per, Token, producers
from schedir.ir.plan import MAX_STAGES
from schedir.ir.program import OWN, Program, Slots, pack
from schedir.passes.insert import at_ends
from schedir.passes.record import Expected, Options, Pass, Present

_ROWS: Final = (Opcode.LoadState, Opcode.StepStage, Opcode.StoreState)
_SLOT: Final = Token.STATE.name.lower()
_NUMBER: Final = whole_number(1, MAX_STAGES)
USUAL: Final = 2  # one is stepped while the next is loaded


def states(program: Program, slots: int | None = None) -> Program:
    """End the Stream of each rank with a load, a step and a store of each of its trained stages.

    Stages come in the order in which their gradients are reduced.  `slots` (two) are loaded ahead.
    A load stands behind the store that leaves it room, and a stage later where it can: a host that
    waits for that store has issued the next step by then.  Raises PlanError for less than one slot.
    """
    plan, index = program.plan, Index.of(program)
    given = index.where_all(producers(Token.GRAD))
    last = np.full(plan.holders.size, NONE)
    key = index.keys(Per.STAGE, given, np.zeros(len(given), np.int64))
    np.maximum.at(last, key, given)
    reduced = last.reshape(plan.holders.shape)
    room = USUAL if slots is None else _NUMBER.settle("state_slots", slots, plan)
    ranks, words = [], []
    for rank, own in enumerate(plan.stages_of):
        trained = np.array([s for s in own if s >= program.frozen], np.int64)
        trained = trained[np.argsort(reduced[plan.row_of(trained, rank), trained], kind="stable")]
        load, step, store = (pack(op, trained, 0) for op in _ROWS)
        turns, later = [*load[:room]], min(room - 1, 1)
        for k in range(len(trained)):
            turns += [step[k], store[k]]
            if k >= later:
                turns += [*load[k - later + room :][:1]]
        ranks += [rank] * len(turns)
        words += turns
    return at_ends(program, np.array(ranks, np.int64), np.array(words, np.int64))


def leave_slots(program: Program) -> Program:
    """Say how many stages' states are on the device at once, where not all of a rank's may be: as
    few as the order of the Stream asks for."""
    column = KINDS.index(Token.STATE)
    room, most = minimum_slots(program)[:, column], counts(program)[:, column]
    if (room >= most).all():
        return program
    said = program.slots or [Slots.unsaid()] * program.plan.ranks
    each = zip(said, room.tolist(), strict=True)
    return program.with_slots([slots._replace(**{_SLOT: n}) for slots, n in each])


def _each(program: Program, present: Present) -> Iterator[Expected]:
    there = program.closes and program.states == "host"
    once = np.tile((np.arange(program.plan.stages) >= program.frozen) & there, program.plan.rows)
    why = (
        "the program says 'open yes'"
        if program.open
        else f"the program says 'states {program.states}'"
    )
    for op in _ROWS:
        yield Expected(op, once, why, "each trained stage is loaded, stepped and stored once")


def _states(program: Program, options: Options) -> Program:
    slots = options.more.get("state_slots")
    if program.states != "host":
        raise UsageError(
            f"state_slots is {slots}, and the optimizer's states stay on the device",
            hint='states="host", or leave state_slots out',
            fields=["state_slots", "states"],
        )
    return states(program, slots)


def _wanted(program: Program, options: Options) -> bool:
    if program.states != "host":
        return options.more.get("state_slots") is not None
    there = program.ops.isdisjoint(_ROWS)
    return program.closes and there


def _options(program: Program) -> int | None:
    """How many slots of states the ranks of a program have, if it says so."""
    column = Slots._fields.index(_SLOT)
    said = [slots[column] for slots in program.slots if slots[column] != OWN]
    return max(said) if said else None


PASSES: Final = (
    Pass(
        "states",
        "ends",
        _states,
        _wanted,
        _each,
        lambda program, model: {} if (n := _options(program)) is None else {"state_slots": n},
        options=("state_slots",),
        applies=lambda program: program.states == "host",
        kinds={"state_slots": _NUMBER},
        about="how many stages of a rank have their optimizer's state on the device at once (2)",
        section="memory",
        order=8,
    ),
    Pass(
        "leave_slots",
        "memory",
        lambda program, options: leave_slots(program),
        lambda program, options: (
            not program.ops.isdisjoint(_ROWS)
            and options.slots is None
            and not any(_SLOT in slots.said() for slots in program.slots)
        ),
        order=3,
    ),
)
