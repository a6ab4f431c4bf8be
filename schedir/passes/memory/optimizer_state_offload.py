"""Keep the optimizer state on the host or disk: load, step and store it stage by stage.

ZeRO-Offload (arXiv 2101.06840) keeps it on the host; ZeRO-Infinity (arXiv 2104.07857, sections
5.1.1 and 5.2.2) on the disk, too, and brings it to the device part by part through a few buffers of
the host: the next is read while one is stepped, and the one before is written.  Here a part is a
stage's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.memory.buffer_slots import KINDS, counts, groups, minimum_slots, on_host
from schedir.errors import UsageError
from schedir.ir.instruction_index import NONE, InstructionIndex
from schedir.ir.isa.instructions import Opcode, Scope, Value, producers
from schedir.ir.pipeline.field_schema import whole_number
from schedir.ir.pipeline.pipeline_shape import MAX_STAGES
from schedir.ir.program import ON_HOST, OP, OWN, Program, SlotCounts, pack
from schedir.passes.insertion import at_ends
from schedir.passes.pass_types import ExpectedInstructions, Options, Pass, Present

_ROWS: Final = (Opcode.ReloadState, Opcode.StageOptimizerStep, Opcode.OffloadState)
_OF_DISK: Final = (Opcode.ReadStateFromDisk, Opcode.WriteStateToDisk)
_SLOT: Final = Value.STATE.name.lower()
_ON_HOST: Final = next(name for name, kind in ON_HOST.items() if kind is Value.STATE)
_NUMBER: Final = whole_number(1, MAX_STAGES)
# One is stepped while the next is loaded; on the host one is read while the one before is written.
USUAL: Final = 2


def states(program: Program, slots: int | None = None, on_host: int | None = None) -> Program:
    """End the Stream of each rank with a load, a step and a store of each of its trained stages.

    Stages come in the order in which their gradients are reduced.  `slots` (two) are loaded ahead.
    A load stands behind the store that leaves it room, and a stage later where it can: a host that
    waits for that store has issued the next step by then.  Where states lie on the disk, each
    stage's is fetched before it is loaded, and spilled when it is stored: `on_host` (two) of them
    are on the host at once, of which one is left to what is stored.  Raises ShapeError for less
    than one slot.
    """
    shape, index = program.shape, InstructionIndex.of(program)
    given = index.where_all(producers(Value.GRAD))
    last = np.full(shape.holders.size, NONE)
    key = index.keys(Scope.STAGE, given, np.zeros(len(given), np.int64))
    np.maximum.at(last, key, given)
    reduced = last.reshape(shape.holders.shape)
    room = USUAL if slots is None else _NUMBER.settle("optimizer_device_buffers", slots, shape)
    rooms = USUAL if on_host is None else _NUMBER.settle("optimizer_host_buffers", on_host, shape)
    ranks, words = [], []
    for rank, own in enumerate(shape.stages_of):
        trained = np.array([s for s in own if s >= program.frozen_stages], np.int64)
        trained = trained[np.argsort(reduced[shape.row_of(trained, rank), trained], kind="stable")]
        load, step, store = (pack(op, trained, 0) for op in _ROWS)
        turns, later = [*load[:room]], min(room - 1, 1)
        for k in range(len(trained)):
            turns += [step[k], store[k]]
            if k >= later:
                turns += [*load[k - later + room :][:1]]
        if program.optimizer_placement == "disk":
            # One room is left to what is stored, which too few that still come leave anyway.
            ahead = rooms - (len(trained) - room >= rooms - 1)
            turns = _through_host(turns, trained, ahead)
        ranks += [rank] * len(turns)
        words += turns
    return at_ends(program, np.array(ranks, np.int64), np.array(words, np.int64))


def _through_host(turns: Sequence[int], trained: NDArray[np.int64], ahead: int) -> list[int]:
    """The turns of a rank with fetches and spills: so many fetches ahead of loads, and with none
    each before its own."""
    fetch, spill = (iter(pack(op, trained, 0).tolist()) for op in _OF_DISK)
    found = [*islice(fetch, ahead)]
    for turn in turns:
        op = turn >> OP
        if op == Opcode.ReloadState and not ahead:
            found += islice(fetch, 1)
        found.append(turn)
        if op == Opcode.OffloadState:
            found += islice(spill, 1)
        elif op == Opcode.ReloadState and ahead:
            found += islice(fetch, 1)
    return found


def leave_slots(program: Program) -> Program:
    """Say how many stages' states are on the device at once, where not all of a rank's may be: as
    few as the order of the Stream asks for."""
    column = KINDS.index(Value.STATE)
    room, most = minimum_slots(program)[:, column], counts(program)[:, column]
    return program if (room >= most).all() else _told(program, _SLOT, room)


def leave_rooms(program: Program) -> Program:
    """The same of the host, through which they pass on their way from the disk and to it."""
    return _told(
        program, _ON_HOST, on_host(program, _ON_HOST).peak(groups(InstructionIndex.of(program)))
    )


def _told(program: Program, name: str, room: NDArray[np.int64]) -> Program:
    """The program with a number of slots of each rank."""
    said = program.slots or [SlotCounts.unsaid()] * program.shape.ranks
    each = zip(said, room.tolist(), strict=True)
    return program.with_slots([slots._replace(**{name: n}) for slots, n in each])


def _each(program: Program, present: Present) -> Iterator[ExpectedInstructions]:
    there = program.trains and program.optimizer_placement in _MOVED
    once = np.tile(
        (np.arange(program.shape.stages) >= program.frozen_stages) & there, program.shape.rows
    )
    why = f"the program says 'optimizer_placement {program.optimizer_placement}'"
    for op in _ROWS:
        yield ExpectedInstructions(
            op, once, why, "each trained stage is loaded, stepped and stored once"
        )
    for op in _OF_DISK:
        yield ExpectedInstructions(
            op, once & (program.optimizer_placement == "disk"), why,
            "each trained stage's state is fetched and spilled once",
        )  # fmt: skip


def _states(program: Program, options: Options) -> Program:
    for name, where in _WHERE.items():
        said = options.more.get(name)
        if said is not None and program.optimizer_placement not in where:
            stay = (
                "stay on the device"
                if program.optimizer_placement == "device"
                else "lie on the host"
            )
            raise UsageError(
                f"{name} is {said}, and the optimizer's states {stay}",
                hint=f'optimizer_placement="{where[0]}", or leave {name} out',
                fields=[name, "optimizer_placement"],
            )
    return states(program, *(options.more.get(name) for name in _WHERE))


def _wanted(program: Program, options: Options) -> bool:
    wrong = any(
        options.more.get(name) is not None and program.optimizer_placement not in where
        for name, where in _WHERE.items()
    )
    there = program.optimizer_placement in _MOVED and program.ops.isdisjoint(_ROWS)
    return wrong or (program.trains and there)


def _options(program: Program) -> dict[str, int]:
    """How many slots of states the ranks of a program have, if it says so."""
    found = {}
    for option, name in zip(_WHERE, (_SLOT, _ON_HOST), strict=True):
        said = [n for slots in program.slots if (n := getattr(slots, name)) != OWN]
        if said and program.optimizer_placement in _WHERE[option]:
            found[option] = max(said)
    return found


# Where states lie that are brought to the device stage by stage; and by option, where it is of use.
_MOVED: Final = ("host", "disk")
_WHERE: Final = {"optimizer_device_buffers": _MOVED, "optimizer_host_buffers": ("disk",)}


PASSES: Final = (
    Pass(
        "states",
        "ends",
        _states,
        _wanted,
        _each,
        lambda program, model: _options(program),
        options=tuple(_WHERE),
        applies=lambda program: program.optimizer_placement in _MOVED,
        kinds=dict.fromkeys(_WHERE, _NUMBER),
        abouts={
            "optimizer_device_buffers": "with optimizer_placement host or disk: how many "
            "stages of a "
            "rank have their optimizer state on the device at once (2)",
            "optimizer_host_buffers": "with optimizer_placement disk: how many have it on the "
            "host, on "
            "its way (2)",
        },
        section="memory",
        order=8,
    ),
    Pass(
        "leave_slots",
        "memory",
        lambda program, options: leave_slots(program),
        lambda program, options: (
            not program.ops.isdisjoint(_ROWS)
            and options.buffer_sharing is None
            and not any(_SLOT in slots.said() for slots in program.slots)
        ),
        order=3,
    ),
    Pass(
        "leave_rooms",
        "memory",
        lambda program, options: leave_rooms(program),
        lambda program, options: (
            not program.ops.isdisjoint(_OF_DISK)
            and not any(_ON_HOST in slots.said() for slots in program.slots)
        ),
        order=3,
    ),
)
