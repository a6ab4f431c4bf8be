"""Handlers of Offload, Reload, OffloadToDisk and ReloadFromDisk.

All but the disk's are copies on lanes of their own (`runtime/offload/copy_lanes.py`).  Who computes
with what was moved waits until it is back, and who takes the slot that it has left on the device
until it has gone; nobody else waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from torch import Tensor, nn
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
    SavedActivations,
    UnpackedMicrobatches,
    get_storage_keys,
)
from schedir.runtime.offload.copy_lanes import LaneJob
from schedir.runtime.rank_state import Call, Handler, State, chain_calls

_SAVED: Final = Value.SAVED
_SAVED_PRODUCERS: Final = tuple(row.op for row in INSTRUCTIONS if _SAVED in row.gives)
_SAVED_COMPUTE_OPS: Final = tuple(
    row.op
    for row in INSTRUCTIONS
    if row.lane is Lane.COMPUTE and _SAVED in {*row.needs, *row.gives}
)

_TO_HOST_OPS: Final = (Opcode.Offload, Opcode.ReloadFromDisk)  # to the host


def offload(state: State, i: Instr) -> Call:
    k, tiers = state.index_of[i], state.resources.memory_tiers
    slot, value = state.find_slot(_SAVED, i.stage, i.mb, k), _get_saved_activations(state, i)
    rooms, has = _count_host_buffers(state), _make_resident_finder(state, i)

    def run() -> None:
        kept = slot.peek()
        if isinstance(kept, Checkpoint):  # reloaded tensors have other version counters
            kept.require_unwritten(i.stage, i.mb)
            kept = kept._replace(input_versions=())
        state.offload_moves.slot_values[i[1:]] = kept
        slot.free()
        held = _get_slot_tensors(kept)
        value.prepare_offload(held, has() if held else ())
        room = value.block = tiers.host_arena.acquire(value.block_size, value.nbytes, rooms)
        at_once = not state.resources.copy_lanes.uses_streams
        copy = partial(value.copy_to_block, room, tiers.poisons_sources, is_synchronous=at_once)
        value.offload_job = value.arrival_job = _start_copy(
            state, k, value, copy, room.pending_jobs
        )
        if not state.offload_moves.has_fixed_slots:
            state.offload_moves.offloading.append(value)

    return Call(None, run)


def reload(state: State, i: Instr) -> Call:
    k, tiers = state.index_of[i], state.resources.memory_tiers
    slot, value = state.find_slot(_SAVED, i.stage, i.mb, k), _get_saved_activations(state, i)
    left = _find_offloaded_occupants(state, k)
    on_disk = _find_previous_change(state, k) is Opcode.ReloadFromDisk

    def run() -> None:
        slot.fill(state.offload_moves.slot_values.pop(i[1:]))
        (room, value.block), there = (value.block, None), value.arrival_job
        assert room is not None and there is not None, "the checker proves that it is on the host"
        on_streams, after = state.resources.copy_lanes.uses_streams, [there]
        if on_streams and on_disk:  # for which nobody but the host can let a stream wait
            there.finish()
            after = []
        copy: Callable[[], None] = partial(value.copy_from_block, room, tiers.poisons_sources)
        if on_streams or all(one.is_offloaded for one in left):
            _allocate_on_device(
                left, value
            )  # not on the lane, which would hold up what is computed
        else:
            after += [one.offload_job for one in left if one.offload_job is not None]
            copy = chain_calls(partial(_allocate_on_device, left, value), copy)

        value.reload_job = _start_copy(state, k, value, copy, after)
        tiers.host_arena.release(room, value.nbytes, value.reload_job)

    return Call(None, run)


def _allocate_on_device(occupants: Sequence[SavedActivations], value: SavedActivations) -> None:
    """Make memory on the device for a value, when it is let go of what had its slot."""
    for one in (*occupants, value):
        one.release_device_memory()
    value.allocate_reload_targets()


def offload_to_disk(state: State, i: Instr) -> Call:
    k, tiers, value = (
        state.index_of[i],
        state.resources.memory_tiers,
        _get_saved_activations(state, i),
    )
    spills = tiers.spill_file
    assert spills is not None, "an executor of what spills has a folder"
    most = _count_max_on_disk(state)

    def run() -> None:
        room, there = value.block, value.arrival_job
        assert room is not None and there is not None, "the checker proves that it is on the host"
        try:
            for _ in range(0 if spills.arena.allocated_bytes else most):
                spills.arena.add_block(value.block_size)
            place = value.block = spills.arena.acquire(value.block_size, value.nbytes)
        except OSError as error:
            raise state.wrap_error(k, error) from error
        memory = room.location[: value.block_size]

        def write() -> None:
            spills.write(place.location, memory)
            if tiers.poisons_sources:
                memory.fill_(POISON_BYTE)

        value.arrival_job = _start_copy(state, k, value, write, [there, *place.pending_jobs])
        tiers.host_arena.release(room, value.nbytes, value.arrival_job)

    return Call(None, run)


def reload_from_disk(state: State, i: Instr) -> Call:
    k, tiers, value = (
        state.index_of[i],
        state.resources.memory_tiers,
        _get_saved_activations(state, i),
    )
    spills = tiers.spill_file
    assert spills is not None
    rooms = _count_host_buffers(state)

    def run() -> None:
        place, there = value.block, value.arrival_job
        assert place is not None and there is not None, "the checker proves that it is on the disk"
        room = value.block = tiers.host_arena.acquire(value.block_size, value.nbytes, rooms)
        read = partial(spills.read, place.location, room.location[: value.block_size])
        value.arrival_job = _start_copy(state, k, value, read, [there, *room.pending_jobs])
        spills.arena.release(place, value.nbytes, value.arrival_job)

    return Call(None, run)


def _start_copy(
    state: State,
    k: int,
    value: SavedActivations,
    copy: Callable[[], None],
    after: Sequence[LaneJob],
) -> LaneJob:
    """Start an instruction's copy on its lane; what it raises says which one it is of."""

    def run() -> None:
        try:
            copy()
        except Exception as error:
            raise state.wrap_error(k, error) from error

    lane = INSTRUCTIONS[state.stream[k].op].lane
    return state.resources.copy_lanes.start(
        lane, run, value.nbytes, after, state.get_lane_observer()
    )


def _get_saved_activations(state: State, i: Instr) -> SavedActivations:
    """What is moved of a forward."""
    return state.offload_moves.values.setdefault(
        (i.stage, i.mb), SavedActivations(i.stage, state.device)
    )


def _find_offloaded_occupants(state: State, k: int) -> list[SavedActivations]:
    """What was offloaded from the slot that an instruction fills, if that was."""
    free = state.saved_freed_by.get(k)
    moved = free is not None and state.stream[free].op == Opcode.Offload
    return [_get_saved_activations(state, state.stream[free])] if free is not None and moved else []


def _list_saved_changes(state: State, stage: int, mb: int) -> Iterator[tuple[int, Opcode]]:
    """What gives and changes what a forward saved, in the order of the Stream."""
    ops = (Opcode(op) for op in _SAVED_PRODUCERS)
    at = [(k, op) for op in ops if (k := state.index_of.get((op, stage, mb))) is not None]
    return iter(sorted(at))


def _find_previous_change(state: State, k: int) -> Opcode | None:
    """Who changed last what an instruction of a microbatch takes."""
    i = state.stream[k]
    ops = [op for at, op in _list_saved_changes(state, i.stage, i.mb) if at < k]
    return ops[-1] if ops else None


def _find_next_change(state: State, k: int) -> Opcode | None:
    """Who changes next what an instruction of a microbatch gives."""
    i = state.stream[k]
    return next((op for at, op in _list_saved_changes(state, i.stage, i.mb) if at > k), None)


def _count_host_buffers(state: State) -> int | None:
    """How many rooms the host has, if the program says how many slots: no more than there are
    values."""
    said = state.program.slots[state.rank].host if state.program.slots else UNSHARED_SLOTS
    brings = sum(op in _TO_HOST_OPS for op, _, _ in state.stream)
    return None if said == UNSHARED_SLOTS else min(said, brings)


def _count_max_on_disk(state: State) -> int:
    """The most values that are on the rank's disk at once, in the order of its Stream."""
    now = most = 0
    for op, _, _ in state.stream:
        now += (op == Opcode.OffloadToDisk) - (op == Opcode.ReloadFromDisk)
        most = max(most, now)
    return most


def _wrap_compute(handler: Handler, state: State, i: Instr) -> Call:
    """As the handler, of what makes or uses what a forward saved, in a program that moves it."""
    call = handler(state, i)
    if state.program.used_opcodes.isdisjoint(OPS_OFF_COMPUTE_LANE[_SAVED]):
        return call
    k, waits = state.index_of[i], [call.wait]
    run = call.run
    waits += [one.release_device_memory for one in _find_offloaded_occupants(state, k)]
    if _find_previous_change(state, k) is Opcode.Reload:
        waits.append(_get_saved_activations(state, i).finish_reload)
    if i.op == Opcode.Forward and not state.offload_moves.has_fixed_slots:
        waits.append(state.offload_moves.release_copied)
    if _SAVED in INSTRUCTIONS[i.op].gives and _find_next_change(state, k) is Opcode.Offload:
        run = partial(
            _record_saved_tensors,
            state,
            _get_saved_activations(state, i),
            _make_resident_finder(state, i),
            run,
        )
    return Call(chain_calls(*waits), run)


def _record_saved_tensors(
    state: State,
    value: SavedActivations,
    find_resident: Callable[[], set[int]],
    run: Callable[[], None],
) -> None:
    """Run what makes what is moved later; `find_resident` says what the rank has anyway."""
    batch = state.batch
    if not isinstance(batch.inputs, UnpackedMicrobatches):
        state.batch = batch._replace(
            inputs=UnpackedMicrobatches(batch.inputs),
            targets=UnpackedMicrobatches(batch.targets),
            keywords=UnpackedMicrobatches(batch.keywords),
        )
    with value.record_saved():
        run()
    value.mark_resident(find_resident())


def _get_slot_tensors(value: object) -> list[Tensor]:
    """The tensors with memory that a value in a slot has itself: leaves, or a checkpoint's."""
    if isinstance(value, Checkpoint):
        return [*value.inputs, *(buffer for *_, buffer in value.buffers)]
    assert isinstance(value, tuple)
    return [x for x in value[0] if 0 not in x.stride()]  # of a copy the leaf has none


def _make_resident_finder(state: State, i: Instr) -> Callable[[], set[int]]:
    """What tells the storages that the rank has anyway while it runs a stage."""
    modules = [*state.stages[i.stage].module.modules()]
    if i.stage == state.shape.stages - 1 and isinstance(state.loss, nn.Module):
        modules += state.loss.modules()

    def has() -> set[int]:
        batch = state.batch
        given = (batch.inputs, batch.targets, batch.keywords)
        found = tree_leaves(
            [each.unpacked.get(i.mb) for each in given if isinstance(each, UnpackedMicrobatches)]
        )
        for module in modules:
            found += (*module._parameters.values(), *module._buffers.values())
        return get_storage_keys(found)

    return has


HANDLERS: Final = {
    Opcode.Offload: offload,
    Opcode.Reload: reload,
    Opcode.OffloadToDisk: offload_to_disk,
    Opcode.ReloadFromDisk: reload_from_disk,
}
WRAPPERS: Final = {op: partial(partial, _wrap_compute) for op in _SAVED_COMPUTE_OPS}
