"""Insert the moves and the steps of optimizer states that are not on the device between steps.

`OPTIMIZER_TIERS` maps the attribute `optimizer_placement` of a program to two tiers: the tier of
the state between steps, and the tier of the optimizer step.

- If the device steps the state, the rank reloads, steps and offloads the state of one stage after
  the other. ZeRO-Offload keeps the state on the host. ZeRO-Infinity can keep it on the disk. Then
  the rank reads one state from the disk while it updates another one and writes a third one.
- If the host steps the state, the state stays there. The rank copies gradients to the host and new
  weights back, as ZeRO-Offload does. With several updates, the host runs the step of one update
  while the device computes the next update with older weights (delayed parameter update).

References:
    ZeRO-Offload, arXiv 2101.06840, sections 4 and 5.2.
    ZeRO-Infinity, arXiv 2104.07857, sections 5.1.1 and 5.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from schedir.ir.dataflow import Dataflow
from schedir.ir.instruction_index import NO_POSITION, InstructionIndex
from schedir.ir.isa.instructions import (
    INSTRUCTIONS,
    OPTIMIZER_STEP_OPS,
    Opcode,
    Scope,
    Value,
    find_possible_givers,
    find_producers,
)
from schedir.ir.pipeline.field_schema import make_integer_type
from schedir.ir.pipeline.pipeline_shape import MAX_STAGES
from schedir.ir.pipeline.program_attributes import OPTIMIZER_TIERS
from schedir.ir.program import (
    HOST_SLOT_VALUES,
    OP_SHIFT,
    UNSHARED_SLOTS,
    Program,
    StreamSlices,
    pack,
)
from schedir.passes.insertion import append_to_streams, insert_at_positions
from schedir.passes.pass_types import ExpectedInstructions, Options, Pass, PresenceQuery
from schedir.passes.update_boundaries import find_update_ends

_STATE_OPS: Final = (Opcode.ReloadState, Opcode.StageOptimizerStep, Opcode.OffloadState)
_DISK_OPS: Final = (Opcode.ReadStateFromDisk, Opcode.WriteStateToDisk)
_HOST_STEP_OPS: Final = (Opcode.OffloadGrads, Opcode.HostOptimizerStep, Opcode.ReloadWeights)
_RANK_OPS: Final = tuple(row.op for row in INSTRUCTIONS if row.scope is Scope.RANK)
_DEVICE_SLOTS: Final = Value.STATE.name.lower()
_HOST_SLOTS: Final = next(name for name, kind in HOST_SLOT_VALUES.items() if kind is Value.STATE)
_BUFFER_COUNT_TYPE: Final = make_integer_type(1, MAX_STAGES)
# Number of buffers on each tier. On the device, the step of one stage overlaps with the reload of
# the next stage. On the host, the read of one stage overlaps with the write of the previous stage.
DEFAULT_BUFFERS: Final = 2
# Placements with which the states come to the device stage by stage.
_OFFLOAD_PLACEMENTS: Final = tuple(
    placement
    for placement, tiers in OPTIMIZER_TIERS.items()
    if tiers.stepped_at == "device" and tiers.tier != "device"
)
_HOST_STEP_PLACEMENTS: Final = tuple(
    placement for placement, tiers in OPTIMIZER_TIERS.items() if tiers.stepped_at == "host"
)
# Option -> values of `optimizer_placement` with which the option has an effect.
_PLACEMENTS_BY_OPTION: Final = {
    "optimizer_device_buffers": _OFFLOAD_PLACEMENTS,
    "optimizer_host_buffers": ("disk",),
}


def _order_stages(
    program: Program, rank: int, last_producers: NDArray[np.intp]
) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Return the trained stages of a rank in the order in which their gradients are ready.

    Args:
        program: The program.
        rank: The rank.
        last_producers: The position of the last producer of the gradient, by stage replica.

    Returns:
        The stages, and the position of the last producer for each of them.
    """
    shape = program.shape
    stages = np.array([s for s in shape.stages_on_rank[rank] if s >= program.frozen_stages], int)
    positions = last_producers[shape.replica_row_of_stage(stages, rank), stages]
    order = np.argsort(positions, kind="stable")
    return stages[order], positions[order]


def _find_last_producers(
    program: Program, index: InstructionIndex, ops: Sequence[Opcode]
) -> NDArray[np.intp]:
    """Return the last position of the opcodes in each update, by update and stage replica."""
    shape = program.shape
    positions = index.find_all_positions(ops)
    last_by_key = np.full(shape.replica_ranks.size * shape.optimizer_steps, NO_POSITION)
    np.maximum.at(last_by_key, index.compute_keys(Scope.STAGE, positions), positions)
    return last_by_key.reshape(shape.optimizer_steps, *shape.replica_ranks.shape)


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
    (last_producers,) = _find_last_producers(program, index, find_producers(Value.GRAD))
    device_count, host_count = (
        DEFAULT_BUFFERS if count is None else _BUFFER_COUNT_TYPE.resolve(option, count, shape)
        for option, count in zip(_PLACEMENTS_BY_OPTION, (device_buffers, host_buffers), strict=True)
    )
    ranks, words = [], []
    for rank in range(shape.ranks):
        trained_stages, _ = _order_stages(program, rank, last_producers)
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


def insert_host_steps(program: Program) -> Program:
    """Insert the copies of gradients, the steps on the host, and the copies of weights.

    Each trained stage has one instruction of each kind in every update. If a gradient is
    not summed over processes or tied stages, it is copied right after its ReduceGrads, during
    backwards of other stages. Otherwise the gradient is copied at the end of the update, where the
    host waits for the reduction in any case. The steps are in the order in which the gradients are
    ready. With several updates, a CheckGradsFinite comes before the steps. After this check, the
    next update can add to the gradients.

    Args:
        program: A program with gradient reductions.
    """
    shape, index = program.shape, InstructionIndex.from_program(program)
    grad_ops = find_possible_givers(Opcode.OffloadGrads, Value.GRAD)
    last_producers = _find_last_producers(program, index, grad_ops)
    tied_stages = [s for stages in program.trained_ties for s in stages]
    ends = find_update_ends(program)
    positions, ranks, words = [], [], []
    for update in range(shape.optimizer_steps):
        for rank in range(shape.ranks):
            trained_stages, grad_positions = _order_stages(program, rank, last_producers[update])
            is_local_sum = (index.op[grad_positions] == Opcode.ReduceGrads) & (program.dp == 1)
            is_local_sum &= ~np.isin(trained_stages, tied_stages)
            offloads, steps, reloads = (pack(op, trained_stages, update) for op in _HOST_STEP_OPS)
            # With several updates, the next update may add to the gradients after this check. So
            # each update has a check with its number.
            check_numbers = [update] if shape.optimizer_steps > 1 else []
            checks = pack(Opcode.CheckGradsFinite, 0, np.array(check_numbers, int))
            words += [offloads, checks, steps, reloads]
            end = ends[update, rank]
            positions += [
                np.where(is_local_sum, grad_positions + 1, end),
                np.full(len(checks) + 2 * len(grad_positions), end),
            ]
            ranks += [np.full(len(checks) + 3 * len(grad_positions), rank)]
    return insert_at_positions(program, *map(np.concatenate, (positions, ranks, words)))


def delay_host_steps(program: Program) -> Program:
    """Move OptimizerStep and ReloadWeights of each update right before their result is first used.

    Until then, the host runs its steps, and the rank computes the next update with the older
    weights. The first use is a forward with the new weights, a gradient copy that reuses the buffer
    on the host, or the end of the next update.

    Args:
        program: A program with several updates and steps on the host.
    """
    index = InstructionIndex.from_program(program)
    n = len(program)
    updates = program.shape.optimizer_steps
    # Position of an instruction -> position of the first user of its results, or n without a user.
    first_user = np.full(n, n)
    for producer in Dataflow.from_program(program).givers:
        # `check` refuses a program in which a producer comes after its user.
        users = np.flatnonzero((producer != NO_POSITION) & (producer < np.arange(n)))
        np.minimum.at(first_user, producer[users], users)
    # The rank and the update of each instruction that has an update, as one number.
    key = index.rank.astype(np.int64) * updates + index.mb
    ends, steps = (index.find_all_positions(ops) for ops in (_RANK_OPS, OPTIMIZER_STEP_OPS))
    # Key -> position of the instruction before which the step must come: the first instruction that
    # ends the next update, or the first user of the step. The last update has no next update.
    deadline = np.full(program.shape.ranks * updates + 1, n)
    np.minimum.at(deadline, key[ends] - 1, ends)
    deadline[updates - 1 :: updates] = n
    np.minimum.at(deadline, key[steps], first_user[steps])
    group_start = np.append(np.maximum.accumulate(np.where(index.joined, 0, np.arange(n))), n)
    moves = index.find_all_positions((Opcode.ReloadWeights, *OPTIMIZER_STEP_OPS))
    target = deadline[key[moves]]
    # The sort key 2p keeps an instruction at position p. The sort key 2p - 1 puts it right before
    # the group that starts at position p.
    sort_key = 2 * np.arange(n)
    sort_key[moves] = np.where(target < n, 2 * group_start[target] - 1, sort_key[moves])
    order = np.argsort(sort_key, kind="stable")
    return replace(program, streams=StreamSlices.from_words(program.words[order], program.offsets))


def _list_expected(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    placement = program.optimizer_placement
    is_trained = np.tile(
        (np.arange(program.shape.stages) >= program.frozen_stages) & program.has_backward,
        program.shape.placement_rows,
    )
    reason = f"the program has 'optimizer_placement {placement}'"
    has_host_steps = program.has_backward and placement in _HOST_STEP_PLACEMENTS
    has_several_updates = program.shape.optimizer_steps > 1
    for ops, placements, hint in _STAGE_OPS:
        for op in ops:
            yield ExpectedInstructions(op, is_trained & (placement in placements), reason, hint)
    yield ExpectedInstructions(
        Opcode.CheckGradsFinite,
        np.full(program.shape.ranks, has_host_steps and has_several_updates),
        "the program has one update only" if has_host_steps and not has_several_updates else reason,
        "each rank needs one check_grads_finite in each update",
    )


# Instructions of each trained stage, the placements that need them, and a hint if one is missing.
_STAGE_OPS: Final = (
    (
        _HOST_STEP_OPS,
        _HOST_STEP_PLACEMENTS,
        "each trained stage needs one offload_grads, one host_step and one reload_weights in each "
        "update",
    ),
    (
        _STATE_OPS,
        _OFFLOAD_PLACEMENTS,
        "each trained stage needs one reload_state, one stage_step and one offload_state",
    ),
    (
        _DISK_OPS,
        ("disk",),
        "each trained stage needs one read_state_from_disk and one write_state_to_disk",
    ),
)


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
    if program.optimizer_placement in _HOST_STEP_PLACEMENTS:
        return insert_host_steps(program)
    return insert_state_offload(
        program, *(options.extra_options.get(name) for name in _PLACEMENTS_BY_OPTION)
    )


def _should_run(program: Program, options: Options) -> bool:
    """Return whether moves and steps of states are missing, or `_lower` must refuse an option."""
    if _find_useless_option(program, options) is not None:
        return True
    return (
        program.has_backward
        and program.optimizer_placement != "device"
        and program.used_opcodes.isdisjoint((*_STATE_OPS, *_HOST_STEP_OPS))
    )


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
        "delayed_host_steps",
        "ends",
        lambda program, options: delay_host_steps(program),
        should_run=lambda program, options: (
            program.has_backward
            and program.optimizer_placement in _HOST_STEP_PLACEMENTS
            and program.shape.optimizer_steps > 1
        ),
        order=11,
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
