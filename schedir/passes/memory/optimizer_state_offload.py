"""Keep the optimizer state on the host or disk, and load, step and store it stage by stage.

ZeRO-Offload keeps the state on the host. ZeRO-Infinity also keeps it on the disk, and brings it to
the device in parts, through a few buffers on the host. One part is read while another is stepped
and a third is written. Here a part is the state of a stage.

References:
    ZeRO-Offload, arXiv 2101.06840.
    ZeRO-Infinity, arXiv 2104.07857, sections 5.1.1 and 5.2.2.
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
from schedir.ir.program import HOST_SLOT_VALUES, OP_SHIFT, UNSHARED_SLOTS, Program, pack
from schedir.passes.insertion import append_to_streams
from schedir.passes.pass_types import ExpectedInstructions, Options, Pass, PresenceQuery

_STATE_OPS: Final = (Opcode.ReloadState, Opcode.StageOptimizerStep, Opcode.OffloadState)
_DISK_OPS: Final = (Opcode.ReadStateFromDisk, Opcode.WriteStateToDisk)
_DEVICE_SLOTS: Final = Value.STATE.name.lower()
_HOST_SLOTS: Final = next(name for name, kind in HOST_SLOT_VALUES.items() if kind is Value.STATE)
_BUFFER_COUNT_TYPE: Final = make_integer_type(1, MAX_STAGES)
# Buffers on each tier. On the device one is stepped while the next is loaded. On the host one is
# read while the previous one is written.
DEFAULT_BUFFERS: Final = 2


def insert_state_offload(
    program: Program, device_buffers: int | None = None, host_buffers: int | None = None
) -> Program:
    """Append a load, a step and a store of each trained stage to the Stream of each rank.

    Stages have the order in which their gradients are reduced. A load comes after the store that
    frees its buffer, and one stage later where possible. A blocking host that waits for that store
    has then issued the next step. With the state on the disk, each stage has a read before its
    load, and a write after its store. One buffer on the host is left for stores.

    Args:
        program: A program with gradient reductions.
        device_buffers: Number of stages with their state on the device at once; 2 by default.
        host_buffers: Number of stages with their state on the host at once, for states on the disk;
            2 by default.

    Raises:
        ShapeError: A number of buffers is not in range.
    """
    shape, index = program.shape, InstructionIndex.from_program(program)
    givers = index.find_all_positions(find_producers(Value.GRAD))
    last = np.full(shape.replica_ranks.size, NO_POSITION)
    key = index.compute_keys(Scope.STAGE, givers, np.zeros(len(givers), np.int64))
    np.maximum.at(last, key, givers)
    reduced = last.reshape(shape.replica_ranks.shape)
    device_count = (
        DEFAULT_BUFFERS
        if device_buffers is None
        else _BUFFER_COUNT_TYPE.resolve("optimizer_device_buffers", device_buffers, shape)
    )
    host_count = (
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
        rank_words, later = [*load[:device_count]], min(device_count - 1, 1)
        for k in range(len(trained)):
            rank_words += [step[k], store[k]]
            if k >= later:
                rank_words += [*load[k - later + device_count :][:1]]
        if program.optimizer_placement == "disk":
            # One buffer is left for stores, unless the remaining loads are so few that they leave
            # one anyway.
            reads_ahead = host_count - (len(trained) - device_count >= host_count - 1)
            rank_words = _add_disk_moves(rank_words, trained, reads_ahead)
        ranks += [rank] * len(rank_words)
        words += rank_words
    return append_to_streams(program, np.array(ranks, np.int64), np.array(words, np.int64))


def _add_disk_moves(
    rank_words: Sequence[int], trained: NDArray[np.int64], reads_ahead: int
) -> list[int]:
    """Return the instructions of a rank with reads and writes of the disk.

    `reads_ahead` reads come before the first load. If it is 0, each read comes before its own load.
    """
    reads, writes = (iter(pack(op, trained, 0).tolist()) for op in _DISK_OPS)
    found = [*islice(reads, reads_ahead)]
    for word in rank_words:
        op = word >> OP_SHIFT
        if op == Opcode.ReloadState and not reads_ahead:
            found += islice(reads, 1)
        found.append(word)
        if op == Opcode.OffloadState:
            found += islice(writes, 1)
        elif op == Opcode.ReloadState and reads_ahead:
            found += islice(reads, 1)
    return found


def set_device_buffers(program: Program) -> Program:
    """Set the number of states on the device, if it is less than the number of stages of a rank.

    The number is the smallest that the order of the Stream allows.

    Args:
        program: A program with loads and stores of states.
    """
    column = SLOT_KINDS.index(Value.STATE)
    fewest, most = count_min_slots(program)[:, column], count_slots(program)[:, column]
    return program if (fewest >= most).all() else program.with_slot_counts(_DEVICE_SLOTS, fewest)


def set_host_buffers(program: Program) -> Program:
    """Set the number of states on the host, on their way from and to the disk.

    The number is the smallest that the order of the Stream allows.

    Args:
        program: A program with reads and writes of states.
    """
    return program.with_slot_counts(
        _HOST_SLOTS,
        find_host_values(program, _HOST_SLOTS).count_peak(
            number_groups(InstructionIndex.from_program(program))
        ),
    )


def _list_expected(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    there = program.has_backward and program.optimizer_placement in _OFFLOAD_PLACEMENTS
    once = np.tile(
        (np.arange(program.shape.stages) >= program.frozen_stages) & there,
        program.shape.placement_rows,
    )
    why = f"the program has 'optimizer_placement {program.optimizer_placement}'"
    for op in _STATE_OPS:
        yield ExpectedInstructions(
            op, once, why, "each trained stage needs one load, one step and one store of its state"
        )
    for op in _DISK_OPS:
        yield ExpectedInstructions(
            op, once & (program.optimizer_placement == "disk"), why,
            "the state of each trained stage needs one read from the disk and one write to it",
        )  # fmt: skip


def _lower(program: Program, options: Options) -> Program:
    for name, where in _PLACEMENTS_BY_OPTION.items():
        value = options.extra_options.get(name)
        if value is not None and program.optimizer_placement not in where:
            raise UsageError(
                f"{name} is {value}, but optimizer_placement is {program.optimizer_placement!r}",
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
    """Return the specified numbers of slots for states as options."""
    found = {}
    for option, name in zip(_PLACEMENTS_BY_OPTION, (_DEVICE_SLOTS, _HOST_SLOTS), strict=True):
        slot_counts = [
            n for slots in program.slots if (n := getattr(slots, name)) != UNSHARED_SLOTS
        ]
        if slot_counts and program.optimizer_placement in _PLACEMENTS_BY_OPTION[option]:
            found[option] = max(slot_counts)
    return found


# Placements of states that come to the device stage by stage; and for each option, the placements
# for which it has an effect.
_OFFLOAD_PLACEMENTS: Final = ("host", "disk")
_PLACEMENTS_BY_OPTION: Final = {
    "optimizer_device_buffers": _OFFLOAD_PLACEMENTS,
    "optimizer_host_buffers": ("disk",),
}


PASSES: Final = (
    Pass(
        "optimizer_states",
        "ends",
        _lower,
        should_run=_should_run,
        list_expected=_list_expected,
        read_options=lambda program, model: _read_options(program),
        option_names=tuple(_PLACEMENTS_BY_OPTION),
        applies_to=lambda program: program.optimizer_placement in _OFFLOAD_PLACEMENTS,
        option_types=dict.fromkeys(_PLACEMENTS_BY_OPTION, _BUFFER_COUNT_TYPE),
        option_descriptions={
            "optimizer_device_buffers": "with optimizer_placement host or disk: number of stages "
            "per rank whose optimizer state is on the device at the same time (2)",
            "optimizer_host_buffers": "with optimizer_placement disk: number of stages per rank "
            "whose optimizer state is on the host at the same time (2)",
        },
        section="memory",
        order=8,
    ),
    Pass(
        "optimizer_state_device_slots",
        "memory",
        lambda program, options: set_device_buffers(program),
        should_run=lambda program, options: (
            not program.used_opcodes.isdisjoint(_STATE_OPS)
            and options.buffer_sharing is None
            and not any(_DEVICE_SLOTS in slots.specified() for slots in program.slots)
        ),
        order=4,
    ),
    Pass(
        "optimizer_state_host_slots",
        "memory",
        lambda program, options: set_host_buffers(program),
        should_run=lambda program, options: (
            not program.used_opcodes.isdisjoint(_DISK_OPS)
            and not any(_HOST_SLOTS in slots.specified() for slots in program.slots)
        ),
        order=3,
    ),
)
