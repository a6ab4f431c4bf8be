"""Handlers of Offload, Reload, OffloadToDisk and ReloadFromDisk.

Each copy runs on a lane (`runtime/offload/copy_lanes.py`). An instruction that uses reloaded
activations waits for the reload. An instruction that fills a slot waits for the offload of the
slot's earlier value. Other instructions do not wait for a copy.

See `handler_registry` for the arguments and the result of a handler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from torch import Tensor
from torch.utils._pytree import tree_leaves

from schedir.ir.isa.instructions import (
    INSTRUCTIONS,
    OPS_OFF_COMPUTE_LANE,
    Instr,
    Lane,
    Opcode,
    Value,
)
from schedir.ir.program import UNSHARED_SLOTS
from schedir.runtime.autograd.activation_checkpoint import Checkpoint
from schedir.runtime.offload.activation_offloader import (
    POISON_BYTE,
    OffloadMoves,
    SavedActivations,
    UnpackedMicrobatches,
    get_storage_keys,
)
from schedir.runtime.offload.copy_lanes import CopyLanes, LaneJob
from schedir.runtime.offload.memory_tiers import MemoryTiers
from schedir.runtime.program_state import Call, Handler, ProgramState, chain_calls

_SAVED: Final = Value.SAVED
_SAVED_PRODUCERS: Final = tuple(row.op for row in INSTRUCTIONS if _SAVED in row.gives)
_SAVED_COMPUTE_OPS: Final = tuple(
    row.op
    for row in INSTRUCTIONS
    if row.lane is Lane.COMPUTE and _SAVED in {*row.needs, *row.gives}
)

_TO_HOST_OPS: Final = (Opcode.Offload, Opcode.ReloadFromDisk)


def offload(state: ProgramState, i: Instr) -> Call:
    """Return the call of Offload: copy the saved activations of a microbatch to the host."""
    k, tiers = state.index_of[i], state.service(MemoryTiers)
    slot = state.find_slot(_SAVED, i.stage, i.mb, k)
    value = _get_saved_activations(state, i)
    moves = state.service(OffloadMoves)
    lanes = state.service(CopyLanes)
    max_blocks = _count_host_buffers(state)
    find_resident = _make_resident_finder(state, i)

    def run() -> None:
        slot_value = slot.peek()
        if isinstance(slot_value, Checkpoint):
            # A reload changes version counters, so check them now.
            slot_value.require_unwritten(i.stage, i.mb)
            slot_value = slot_value._replace(input_versions=())
        moves.slot_values[i[1:]] = slot_value
        slot.free()
        tensors = _get_slot_tensors(slot_value)
        value.prepare_offload(tensors, find_resident() if tensors else ())
        block = value.block = tiers.host_arena.acquire(value.block_size, value.nbytes, max_blocks)
        is_synchronous_copy = not lanes.uses_streams
        copy = partial(
            value.copy_to_block, block, tiers.poisons_sources, is_synchronous=is_synchronous_copy
        )
        value.offload_job = value.arrival_job = _start_copy(
            state, k, value, copy, block.pending_jobs
        )
        if not moves.has_fixed_slots:
            moves.offloading.append(value)

    return Call(None, run)


def reload(state: ProgramState, i: Instr) -> Call:
    """Return the call of Reload: copy the saved activations of a microbatch to the device."""
    k, tiers = state.index_of[i], state.service(MemoryTiers)
    slot = state.find_slot(_SAVED, i.stage, i.mb, k)
    value = _get_saved_activations(state, i)
    moves = state.service(OffloadMoves)
    lanes = state.service(CopyLanes)
    occupants = _find_offloaded_occupants(state, k)
    was_on_disk = _find_adjacent_changes(state, k)[0] == Opcode.ReloadFromDisk

    def run() -> None:
        slot.fill(moves.slot_values.pop(i[1:]))
        block, arrival_job = value.get_copy()
        value.block = None
        uses_streams, prior_jobs = lanes.uses_streams, [arrival_job]
        # A stream cannot wait for the disk lane, which is a thread.
        if uses_streams and was_on_disk:
            arrival_job.finish()
            prior_jobs = []
        copy: Callable[[], None] = partial(value.copy_from_block, block, tiers.poisons_sources)
        if uses_streams or all(occupant.is_offloaded for occupant in occupants):
            # Allocate now, because an allocation on the lane would delay the computation.
            _allocate_on_device(occupants, value)
        else:
            prior_jobs += [
                occupant.offload_job for occupant in occupants if occupant.offload_job is not None
            ]
            copy = chain_calls(partial(_allocate_on_device, occupants, value), copy)

        value.reload_job = _start_copy(state, k, value, copy, prior_jobs)
        tiers.host_arena.release(block, value.nbytes, value.reload_job)

    return Call(None, run)


def _allocate_on_device(occupants: Sequence[SavedActivations], value: SavedActivations) -> None:
    """Release the device memory of the slot's earlier values, and allocate memory for a reload."""
    for activations in (*occupants, value):
        activations.release_device_memory()
    value.allocate_reload_targets()


def offload_to_disk(state: ProgramState, i: Instr) -> Call:
    """Return the call of OffloadToDisk: write the saved activations on the host to the disk."""
    k = state.index_of[i]
    tiers = state.service(MemoryTiers)
    value = _get_saved_activations(state, i)
    spill_file = tiers.open_spill_file(state.program.name)
    max_on_disk = _count_max_on_disk(state)

    def run() -> None:
        block, arrival_job = value.get_copy()
        try:
            for _ in range(0 if spill_file.arena.allocated_bytes else max_on_disk):
                spill_file.arena.add_block(value.block_size)
            disk_block = value.block = spill_file.arena.acquire(value.block_size, value.nbytes)
        except OSError as error:
            raise state.wrap_error(k, error) from error
        memory = block.location[: value.block_size]

        def write() -> None:
            spill_file.write(disk_block.location, memory)
            if tiers.poisons_sources:
                memory.fill_(POISON_BYTE)

        value.arrival_job = _start_copy(
            state, k, value, write, [arrival_job, *disk_block.pending_jobs]
        )
        tiers.host_arena.release(block, value.nbytes, value.arrival_job)

    return Call(None, run)


def reload_from_disk(state: ProgramState, i: Instr) -> Call:
    """Return the call of ReloadFromDisk: read saved activations from the disk to the host."""
    k = state.index_of[i]
    tiers = state.service(MemoryTiers)
    value = _get_saved_activations(state, i)
    spill_file = tiers.open_spill_file(state.program.name)
    max_blocks = _count_host_buffers(state)

    def run() -> None:
        disk_block, arrival_job = value.get_copy()
        block = value.block = tiers.host_arena.acquire(value.block_size, value.nbytes, max_blocks)
        read = partial(spill_file.read, disk_block.location, block.location[: value.block_size])
        value.arrival_job = _start_copy(state, k, value, read, [arrival_job, *block.pending_jobs])
        spill_file.arena.release(disk_block, value.nbytes, value.arrival_job)

    return Call(None, run)


def _start_copy(
    state: ProgramState,
    k: int,
    value: SavedActivations,
    copy: Callable[[], None],
    prior_jobs: Sequence[LaneJob],
) -> LaneJob:
    """Start the copy of instruction k on its lane. Errors of the copy name the instruction."""

    def run() -> None:
        try:
            copy()
        except Exception as error:
            raise state.wrap_error(k, error) from error

    lane = INSTRUCTIONS[state.stream[k].op].lane
    lanes = state.service(CopyLanes)
    observer = state.observer.make_lane_observer()
    return lanes.start(lane, run, value.nbytes, prior_jobs, observer)


def _get_saved_activations(state: ProgramState, i: Instr) -> SavedActivations:
    return state.service(OffloadMoves).values.setdefault(
        (i.stage, i.mb), SavedActivations(i.stage, state.device)
    )


def _find_offloaded_occupants(state: ProgramState, k: int) -> list[SavedActivations]:
    """Return a list with the value that was offloaded from the slot that instruction k fills.

    The list is empty if the slot was not freed by an Offload.
    """
    free_index = state.service(OffloadMoves).freed_by.get(k)
    is_offload = free_index is not None and state.stream[free_index].op == Opcode.Offload
    if free_index is None or not is_offload:
        return []
    return [_get_saved_activations(state, state.stream[free_index])]


def _find_adjacent_changes(state: ProgramState, k: int) -> tuple[int | None, int | None]:
    """Return the opcodes of the changes of an instruction's saved activations around it.

    A change is an instruction that computes or moves the activations. The opcodes are that of the
    last change before instruction k and that of the first change after it.
    """
    _, stage, mb = state.stream[k]
    indices = {op: state.index_of.get((op, stage, mb), k) for op in _SAVED_PRODUCERS}
    earlier = [(index, op) for op, index in indices.items() if index < k]
    later = [(index, op) for op, index in indices.items() if index > k]
    return max(earlier, default=(k, None))[1], min(later, default=(k, None))[1]


def _count_host_buffers(state: ProgramState) -> int | None:
    """Return the number of host buffers for activations, or None if the program sets no limit.

    The number is at most the number of values that the rank moves to the host.
    """
    slots = state.program.slots[state.rank].host if state.program.slots else UNSHARED_SLOTS
    moves_to_host = sum(op in _TO_HOST_OPS for op, _, _ in state.stream)
    return None if slots == UNSHARED_SLOTS else min(slots, moves_to_host)


def _count_max_on_disk(state: ProgramState) -> int:
    """Return the largest number of values that are on the rank's disk at the same time."""
    num_on_disk = max_on_disk = 0
    for op, _, _ in state.stream:
        num_on_disk += (op == Opcode.OffloadToDisk) - (op == Opcode.ReloadFromDisk)
        max_on_disk = max(max_on_disk, num_on_disk)
    return max_on_disk


def _wrap_compute(handler: Handler, state: ProgramState, i: Instr) -> Call:
    """Extend the handler of a compute instruction, if the program moves activations.

    The call then waits for copies, and records the saved tensors of a forward.
    """
    call = handler(state, i)
    if state.program.used_opcodes.isdisjoint(OPS_OFF_COMPUTE_LANE[_SAVED]):
        return call
    k, waits = state.index_of[i], [call.wait]
    run = call.run
    waits += [occupant.release_device_memory for occupant in _find_offloaded_occupants(state, k)]
    previous_op, next_op = _find_adjacent_changes(state, k)
    if previous_op == Opcode.Reload:
        waits.append(_get_saved_activations(state, i).finish_reload)
    moves = state.service(OffloadMoves)
    if i.op == Opcode.Forward and not moves.has_fixed_slots:
        waits.append(moves.release_copied)
    if _SAVED in INSTRUCTIONS[i.op].gives and next_op == Opcode.Offload:
        run = partial(
            _record_saved_tensors,
            state,
            _get_saved_activations(state, i),
            _make_resident_finder(state, i),
            run,
        )
    return Call(chain_calls(*waits), run)


def _record_saved_tensors(
    state: ProgramState,
    value: SavedActivations,
    find_resident: Callable[[], set[int]],
    run: Callable[[], None],
) -> None:
    """Run a forward whose activations are offloaded later, and record its saved tensors.

    `find_resident` returns the keys of the storages that stay on the device in any case.
    """
    batch = state.batch
    if not isinstance(batch.inputs, UnpackedMicrobatches):
        state.batch = batch.view(UnpackedMicrobatches)
    with value.record_saved():
        run()
    value.mark_resident(find_resident())


def _get_slot_tensors(value: object) -> list[Tensor]:
    """Return the tensors of a slot that have memory: leaves, or the tensors of a checkpoint."""
    if isinstance(value, Checkpoint):
        return [*value.inputs, *(buffer for *_, buffer in value.buffers)]
    assert isinstance(value, tuple)
    return [x for x in value[0] if 0 not in x.stride()]  # the leaf of a copied input has no memory


def _make_resident_finder(state: ProgramState, i: Instr) -> Callable[[], set[int]]:
    """Return a function that finds the storages that stay on the device: weights and the batch."""
    modules = [*state.stages[i.stage].module.modules()]
    for loss in state.options.loss_modules if i.stage == state.shape.stages - 1 else ():
        modules += loss.modules()

    def find_resident() -> set[int]:
        batch = state.batch
        views = (batch.inputs, batch.targets, batch.keywords)
        tensors = tree_leaves(
            [view.unpacked.get(i.mb) for view in views if isinstance(view, UnpackedMicrobatches)]
        )
        for module in modules:
            tensors += (*module._parameters.values(), *module._buffers.values())
        return get_storage_keys(tensors)

    return find_resident


HANDLERS: Final = {
    Opcode.Offload: offload,
    Opcode.Reload: reload,
    Opcode.OffloadToDisk: offload_to_disk,
    Opcode.ReloadFromDisk: reload_from_disk,
}
WRAPPERS: Final = {op: _wrap_compute for op in _SAVED_COMPUTE_OPS}
