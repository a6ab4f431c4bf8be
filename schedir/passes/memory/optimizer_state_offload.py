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

from schedir.analysis.memory.buffer_slots import (
    SLOT_KINDS,
    count_min_slots,
    count_slots,
    find_host_values,
    number_groups,
)
from schedir.errors import UsageError
from schedir.ir.instruction_index import NO_POSITION, InstructionIndex
from schedir.ir.isa.instructions import Opcode, Scope, Value, find_producers
from schedir.ir.pipeline.field_schema import make_integer_type
from schedir.ir.pipeline.pipeline_shape import MAX_STAGES
from schedir.ir.program import HOST_SLOT_VALUES, OP_SHIFT, UNSHARED_SLOTS, Program, SlotCounts, pack
from schedir.passes.insertion import append_to_streams
from schedir.passes.pass_types import ExpectedInstructions, Options, Pass, PresenceQuery

_STATE_OPS: Final = (Opcode.ReloadState, Opcode.StageOptimizerStep, Opcode.OffloadState)
_DISK_OPS: Final = (Opcode.ReadStateFromDisk, Opcode.WriteStateToDisk)
_DEVICE_SLOTS: Final = Value.STATE.name.lower()
_HOST_SLOTS: Final = next(name for name, kind in HOST_SLOT_VALUES.items() if kind is Value.STATE)
_BUFFER_COUNT_TYPE: Final = make_integer_type(1, MAX_STAGES)
# One is stepped while the next is loaded; on the host one is read while the one before is written.
DEFAULT_BUFFERS: Final = 2


def insert_state_offload(
    program: Program, device_buffers: int | None = None, host_buffers: int | None = None
) -> Program:
    """End the Stream of each rank with a load, a step and a store of each of its trained stages.

    Stages come in the order in which their gradients are reduced.  `device_buffers` (two) are
    loaded ahead. A load stands behind the store that leaves it room, and a stage later where it
    can: a host that waits for that store has issued the next step by then.  Where states lie on the
    disk, each stage's is fetched before it is loaded, and spilled when it is stored: `host_buffers`
    (two) of them are on the host at once, of which one is left to what is stored.  Raises
    ShapeError for less than one slot.
    """
    shape, index = program.shape, InstructionIndex.from_program(program)
    given = index.find_all_positions(find_producers(Value.GRAD))
    last = np.full(shape.replica_ranks.size, NO_POSITION)
    key = index.compute_keys(Scope.STAGE, given, np.zeros(len(given), np.int64))
    np.maximum.at(last, key, given)
    reduced = last.reshape(shape.replica_ranks.shape)
    room = (
        DEFAULT_BUFFERS
        if device_buffers is None
        else _BUFFER_COUNT_TYPE.resolve("optimizer_device_buffers", device_buffers, shape)
    )
    rooms = (
        DEFAULT_BUFFERS
        if host_buffers is None
        else _BUFFER_COUNT_TYPE.resolve("optimizer_host_buffers", host_buffers, shape)
    )
    ranks, words = [], []
    for rank, own in enumerate(shape.stages_on_rank):
        trained = np.array([s for s in own if s >= program.frozen_stages], np.int64)
        trained = trained[
            np.argsort(reduced[shape.replica_row_of_stage(trained, rank), trained], kind="stable")
        ]
        load, step, store = (pack(op, trained, 0) for op in _STATE_OPS)
        turns, later = [*load[:room]], min(room - 1, 1)
        for k in range(len(trained)):
            turns += [step[k], store[k]]
            if k >= later:
                turns += [*load[k - later + room :][:1]]
        if program.optimizer_placement == "disk":
            # One room is left to what is stored, which too few that still come leave anyway.
            ahead = rooms - (len(trained) - room >= rooms - 1)
            turns = _add_disk_moves(turns, trained, ahead)
        ranks += [rank] * len(turns)
        words += turns
    return append_to_streams(program, np.array(ranks, np.int64), np.array(words, np.int64))


def _add_disk_moves(
    rank_words: Sequence[int], trained: NDArray[np.int64], reads_ahead: int
) -> list[int]:
    """The turns of a rank with fetches and spills: so many fetches ahead of loads, and with none
    each before its own."""
    fetch, spill = (iter(pack(op, trained, 0).tolist()) for op in _DISK_OPS)
    found = [*islice(fetch, reads_ahead)]
    for turn in rank_words:
        op = turn >> OP_SHIFT
        if op == Opcode.ReloadState and not reads_ahead:
            found += islice(fetch, 1)
        found.append(turn)
        if op == Opcode.OffloadState:
            found += islice(spill, 1)
        elif op == Opcode.ReloadState and reads_ahead:
            found += islice(fetch, 1)
    return found


def set_device_buffers(program: Program) -> Program:
    """Say how many stages' states are on the device at once, where not all of a rank's may be: as
    few as the order of the Stream asks for."""
    column = SLOT_KINDS.index(Value.STATE)
    room, most = count_min_slots(program)[:, column], count_slots(program)[:, column]
    return program if (room >= most).all() else _set_slot_counts(program, _DEVICE_SLOTS, room)


def set_host_buffers(program: Program) -> Program:
    """The same of the host, through which they pass on their way from the disk and to it."""
    return _set_slot_counts(
        program,
        _HOST_SLOTS,
        find_host_values(program, _HOST_SLOTS).count_peak(
            number_groups(InstructionIndex.from_program(program))
        ),
    )


def _set_slot_counts(program: Program, slot_name: str, slot_counts: NDArray[np.int64]) -> Program:
    """The program with a number of slots of each rank."""
    said = program.slots or [SlotCounts.unspecified()] * program.shape.ranks
    each = zip(said, slot_counts.tolist(), strict=True)
    return program.with_slots([slots._replace(**{slot_name: n}) for slots, n in each])


def _list_expected(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    there = program.has_backward and program.optimizer_placement in _OFFLOAD_PLACEMENTS
    once = np.tile(
        (np.arange(program.shape.stages) >= program.frozen_stages) & there,
        program.shape.placement_rows,
    )
    why = f"the program says 'optimizer_placement {program.optimizer_placement}'"
    for op in _STATE_OPS:
        yield ExpectedInstructions(
            op, once, why, "each trained stage is loaded, stepped and stored once"
        )
    for op in _DISK_OPS:
        yield ExpectedInstructions(
            op, once & (program.optimizer_placement == "disk"), why,
            "each trained stage's state is fetched and spilled once",
        )  # fmt: skip


def _lower(program: Program, options: Options) -> Program:
    for name, where in _PLACEMENTS_BY_OPTION.items():
        said = options.extra_options.get(name)
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
    return insert_state_offload(
        program, *(options.extra_options.get(name) for name in _PLACEMENTS_BY_OPTION)
    )


def _should_run(program: Program, options: Options) -> bool:
    wrong = any(
        options.extra_options.get(name) is not None and program.optimizer_placement not in where
        for name, where in _PLACEMENTS_BY_OPTION.items()
    )
    there = program.optimizer_placement in _OFFLOAD_PLACEMENTS and program.used_opcodes.isdisjoint(
        _STATE_OPS
    )
    return wrong or (program.has_backward and there)


def _read_options(program: Program) -> dict[str, int]:
    """How many slots of states the ranks of a program have, if it says so."""
    found = {}
    for option, name in zip(_PLACEMENTS_BY_OPTION, (_DEVICE_SLOTS, _HOST_SLOTS), strict=True):
        said = [n for slots in program.slots if (n := getattr(slots, name)) != UNSHARED_SLOTS]
        if said and program.optimizer_placement in _PLACEMENTS_BY_OPTION[option]:
            found[option] = max(said)
    return found


# Where states lie that are brought to the device stage by stage; and by option, where it is of use.
_OFFLOAD_PLACEMENTS: Final = ("host", "disk")
_PLACEMENTS_BY_OPTION: Final = {
    "optimizer_device_buffers": _OFFLOAD_PLACEMENTS,
    "optimizer_host_buffers": ("disk",),
}


PASSES: Final = (
    Pass(
        "states",
        "ends",
        _lower,
        _should_run,
        _list_expected,
        lambda program, model: _read_options(program),
        option_names=tuple(_PLACEMENTS_BY_OPTION),
        applies_to=lambda program: program.optimizer_placement in _OFFLOAD_PLACEMENTS,
        option_types=dict.fromkeys(_PLACEMENTS_BY_OPTION, _BUFFER_COUNT_TYPE),
        option_descriptions={
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
        lambda program, options: set_device_buffers(program),
        lambda program, options: (
            not program.used_opcodes.isdisjoint(_STATE_OPS)
            and options.buffer_sharing is None
            and not any(_DEVICE_SLOTS in slots.specified() for slots in program.slots)
        ),
        order=3,
    ),
    Pass(
        "leave_rooms",
        "memory",
        lambda program, options: set_host_buffers(program),
        lambda program, options: (
            not program.used_opcodes.isdisjoint(_DISK_OPS)
            and not any(_HOST_SLOTS in slots.specified() for slots in program.slots)
        ),
        order=3,
    ),
)
