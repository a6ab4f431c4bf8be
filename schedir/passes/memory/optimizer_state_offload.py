"""Keep the optimizer state on the host or disk, and reload, step and offload it stage by stage.

ZeRO-Offload keeps the state on the host. ZeRO-Infinity can keep it on the disk, and brings it to
the device in parts, through a few buffers on the host. It reads one part while it updates another
part and writes a third part. In this module, a part is the state of one stage.

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
# Number of buffers on each tier. On the device, the step of one stage overlaps with the reload of
# the next stage. On the host, the read of one stage overlaps with the write of the previous stage.
DEFAULT_BUFFERS: Final = 2
# Placements with which the states come to the device stage by stage.
_OFFLOAD_PLACEMENTS: Final = ("host", "disk")
# Option -> values of `optimizer_placement` with which the option has an effect.
_PLACEMENTS_BY_OPTION: Final = {
    "optimizer_device_buffers": _OFFLOAD_PLACEMENTS,
    "optimizer_host_buffers": ("disk",),
}


def insert_state_offload(
    program: Program, device_buffers: int | None = None, host_buffers: int | None = None
) -> Program:
    """Append a reload, a step and an offload of each trained stage to the Streams of its ranks.

    Stages are in the order in which their gradients are reduced. A reload comes after the offload
    that frees its buffer. With two or more buffers, the step of the next stage comes between this
    offload and the reload. So a blocking host issues the step before it waits for the offload. With
    the state on the disk, each stage has a read before its reload, and a write after its offload.
    Reads leave one buffer on the host for offloads.

    Args:
        program: A program with gradient reductions.
        device_buffers: Number of stages whose state is on the device at the same time; 2 by
            default.
        host_buffers: Number of stages whose state is on the host at the same time, if the states
            are on the disk; 2 by default.

    Raises:
        ShapeError: A number of buffers is not in range.
    """
    shape, index = program.shape, InstructionIndex.from_program(program)
    producers = index.find_all_positions(find_producers(Value.GRAD))
    last_by_key = np.full(shape.replica_ranks.size, NO_POSITION)
    np.maximum.at(last_by_key, index.compute_keys(Scope.STAGE, producers), producers)
    last_producers = last_by_key.reshape(shape.replica_ranks.shape)
    device_count, host_count = (
        DEFAULT_BUFFERS if count is None else _BUFFER_COUNT_TYPE.resolve(option, count, shape)
        for option, count in zip(_PLACEMENTS_BY_OPTION, (device_buffers, host_buffers), strict=True)
    )
    ranks, words = [], []
    for rank, rank_stages in enumerate(shape.stages_on_rank):
        trained_stages = np.array([s for s in rank_stages if s >= program.frozen_stages], np.int64)
        row = shape.replica_row_of_stage(trained_stages, rank)
        order = np.argsort(last_producers[row, trained_stages], kind="stable")
        trained_stages = trained_stages[order]
        reload, step, offload = (pack(op, trained_stages, 0) for op in _STATE_OPS)
        delay = min(device_count - 1, 1)  # steps between an offload and the reload into its buffer
        rank_words = [*reload[:device_count]]
        for k in range(len(trained_stages)):
            rank_words += [step[k], offload[k]]
            if k >= delay:
                rank_words += [*reload[k - delay + device_count :][:1]]
        if program.optimizer_placement == "disk":
            # Reads must leave one buffer for offloads. With few stages, one buffer is free in any
            # case.
            must_leave_one = len(trained_stages) - device_count >= host_count - 1
            reads_ahead = host_count - 1 if must_leave_one else host_count
            rank_words = _add_disk_moves(rank_words, trained_stages, reads_ahead)
        ranks += [rank] * len(rank_words)
        words += rank_words
    return append_to_streams(program, np.array(ranks, np.int64), np.array(words, np.int64))


def _add_disk_moves(
    rank_words: Sequence[int], trained_stages: NDArray[np.int64], reads_ahead: int
) -> list[int]:
    """Insert reads and writes of the disk into the instructions of a rank.

    `reads_ahead` reads come before the first reload. If `reads_ahead` is 0, each read comes just
    before the reload of its stage.
    """
    reads, writes = (iter(pack(op, trained_stages, 0).tolist()) for op in _DISK_OPS)
    words = [*islice(reads, reads_ahead)]
    for word in rank_words:
        op = word >> OP_SHIFT
        if op == Opcode.ReloadState and not reads_ahead:
            words += islice(reads, 1)
        words.append(word)
        if op == Opcode.OffloadState:
            words += islice(writes, 1)
        elif op == Opcode.ReloadState and reads_ahead:
            words += islice(reads, 1)
    return words


def set_device_buffers(program: Program) -> Program:
    """Set the number of buffers for states on the device.

    The number is the smallest that the order of the Stream allows. The program is returned
    unchanged if each state needs a separate buffer.

    Args:
        program: A program with reloads and offloads of states.
    """
    kinds = [Value.STATE]
    min_slots, max_slots = count_min_slots(program, kinds)[:, 0], count_slots(program, kinds)[:, 0]
    if (min_slots >= max_slots).all():
        return program
    return program.with_slot_counts(_DEVICE_SLOTS, min_slots)


def set_host_buffers(program: Program) -> Program:
    """Set the number of buffers on the host for states that move from or to the disk.

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
    has_ops = program.has_backward and program.optimizer_placement in _OFFLOAD_PLACEMENTS
    required = np.tile(
        (np.arange(program.shape.stages) >= program.frozen_stages) & has_ops,
        program.shape.placement_rows,
    )
    reason = f"the program has 'optimizer_placement {program.optimizer_placement}'"
    for op in _STATE_OPS:
        yield ExpectedInstructions(
            op, required, reason,
            "each trained stage needs one reload_state, one stage_step and one offload_state",
        )  # fmt: skip
    for op in _DISK_OPS:
        yield ExpectedInstructions(
            op, required & (program.optimizer_placement == "disk"), reason,
            "each trained stage needs one read_state_from_disk and one write_state_to_disk",
        )  # fmt: skip


def _find_useless_option(program: Program, options: Options) -> str | None:
    """Return the first option that is given although the placement makes it useless, or None."""
    for name, placements in _PLACEMENTS_BY_OPTION.items():
        is_given = options.extra_options.get(name) is not None
        if is_given and program.optimizer_placement not in placements:
            return name
    return None


def _lower(program: Program, options: Options) -> Program:
    name = _find_useless_option(program, options)
    if name is not None:
        raise UsageError(
            f"{name} is {options.extra_options[name]}, but optimizer_placement is "
            f"{program.optimizer_placement!r}",
            hint=f'optimizer_placement="{_PLACEMENTS_BY_OPTION[name][0]}", or leave {name} out',
            fields=[name, "optimizer_placement"],
        )
    return insert_state_offload(
        program, *(options.extra_options.get(name) for name in _PLACEMENTS_BY_OPTION)
    )


def _should_run(program: Program, options: Options) -> bool:
    """Return whether the moves of states are missing, or `_lower` must refuse an option."""
    if _find_useless_option(program, options) is not None:
        return True
    is_offloaded = program.optimizer_placement in _OFFLOAD_PLACEMENTS
    return program.has_backward and is_offloaded and program.used_opcodes.isdisjoint(_STATE_OPS)


def _read_options(program: Program) -> dict[str, int]:
    """Return the options that describe the numbers of slots for states in a program."""
    options = {}
    for option, name in zip(_PLACEMENTS_BY_OPTION, (_DEVICE_SLOTS, _HOST_SLOTS), strict=True):
        slot_counts = [
            n for slots in program.slots if (n := getattr(slots, name)) != UNSHARED_SLOTS
        ]
        if slot_counts and program.optimizer_placement in _PLACEMENTS_BY_OPTION[option]:
            options[option] = max(slot_counts)
    return options


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
