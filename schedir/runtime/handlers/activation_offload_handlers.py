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

from schedir.ir.isa.instructions import OFF_COMPUTE, ROWS, Instr, Lane, Opcode, Value
from schedir.ir.program import OWN
from schedir.runtime.autograd.activation_checkpoint import Checkpoint
from schedir.runtime.offload.activation_offloader import (
    POISON,
    SavedActivations,
    UnpackedMicrobatches,
    keys_of,
)
from schedir.runtime.offload.copy_lanes import LaneJob
from schedir.runtime.rank_state import Call, Handler, State, in_turn

_SAVED: Final = Value.SAVED
_GIVES: Final = tuple(row.op for row in ROWS if _SAVED in row.gives)
_COMPUTES: Final = tuple(
    row.op for row in ROWS if row.lane is Lane.COMPUTE and _SAVED in {*row.needs, *row.gives}
)

_BRINGS: Final = (Opcode.Offload, Opcode.ReloadFromDisk)  # to the host


def offload(state: State, i: Instr) -> Call:
    k, tiers = state.index_of[i], state.held.tiers
    slot, value = state.slot(_SAVED, i.stage, i.mb, k), _value_of(state, i)
    rooms, has = _rooms_on_host(state), _has_anyway(state, i)

    def run() -> None:
        kept = slot.look()
        if isinstance(kept, Checkpoint):  # reloaded tensors have other version counters
            kept.require_unwritten(i.stage, i.mb)
            kept = kept._replace(versions=())
        state.away.kept[i[1:]] = kept
        slot.free()
        held = _held(kept)
        value.leave(held, has() if held else ())
        room = value.room = tiers.host.take(value.room_size, value.nbytes, rooms)
        at_once = not state.held.lanes.on_streams
        copy = partial(value.copy_out, room, tiers.poisons, at_once=at_once)
        value.leaving = value.there = _start(state, k, value, copy, room.after)
        if not state.away.said:
            state.away.leaving.append(value)

    return Call(None, run)


def reload(state: State, i: Instr) -> Call:
    k, tiers = state.index_of[i], state.held.tiers
    slot, value = state.slot(_SAVED, i.stage, i.mb, k), _value_of(state, i)
    left = _left_by(state, k)
    on_disk = _before(state, k) is Opcode.ReloadFromDisk

    def run() -> None:
        slot.fill(state.away.kept.pop(i[1:]))
        (room, value.room), there = (value.room, None), value.there
        assert room is not None and there is not None, "the checker proves that it is on the host"
        on_streams, after = state.held.lanes.on_streams, [there]
        if on_streams and on_disk:  # for which nobody but the host can let a stream wait
            there.finish()
            after = []
        copy: Callable[[], None] = partial(value.copy_back, room, tiers.poisons)
        if on_streams or all(one.has_left for one in left):
            _make_room(left, value)  # not on the lane, which would hold up what is computed
        else:
            after += [one.leaving for one in left if one.leaving is not None]
            copy = in_turn(partial(_make_room, left, value), copy)

        value.coming = _start(state, k, value, copy, after)
        tiers.host.give_back(room, value.nbytes, value.coming)

    return Call(None, run)


def _make_room(left: Sequence[SavedActivations], value: SavedActivations) -> None:
    """Make memory on the device for a value, when it is let go of what had its slot."""
    for one in (*left, value):
        one.let_go()
    value.make_room()


def spill(state: State, i: Instr) -> Call:
    k, tiers, value = state.index_of[i], state.held.tiers, _value_of(state, i)
    spills = tiers.spills
    assert spills is not None, "an executor of what spills has a folder"
    most = _most_on_disk(state)

    def run() -> None:
        room, there = value.room, value.there
        assert room is not None and there is not None, "the checker proves that it is on the host"
        try:
            for _ in range(0 if spills.arena.made else most):
                spills.arena.add(value.room_size)
            place = value.room = spills.arena.take(value.room_size, value.nbytes)
        except OSError as error:
            raise state.failed(k, error) from error
        memory = room.place[: value.room_size]

        def write() -> None:
            spills.write(place.place, memory)
            if tiers.poisons:
                memory.fill_(POISON)

        value.there = _start(state, k, value, write, [there, *place.after])
        tiers.host.give_back(room, value.nbytes, value.there)

    return Call(None, run)


def fetch(state: State, i: Instr) -> Call:
    k, tiers, value = state.index_of[i], state.held.tiers, _value_of(state, i)
    spills = tiers.spills
    assert spills is not None
    rooms = _rooms_on_host(state)

    def run() -> None:
        place, there = value.room, value.there
        assert place is not None and there is not None, "the checker proves that it is on the disk"
        room = value.room = tiers.host.take(value.room_size, value.nbytes, rooms)
        read = partial(spills.read, place.place, room.place[: value.room_size])
        value.there = _start(state, k, value, read, [there, *room.after])
        spills.arena.give_back(place, value.nbytes, value.there)

    return Call(None, run)


def _start(
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
            raise state.failed(k, error) from error

    lane = ROWS[state.stream[k].op].lane
    return state.held.lanes.start(lane, run, value.nbytes, after, state.on_lane())


def _value_of(state: State, i: Instr) -> SavedActivations:
    """What is moved of a forward."""
    return state.away.values.setdefault((i.stage, i.mb), SavedActivations(i.stage, state.device))


def _left_by(state: State, k: int) -> list[SavedActivations]:
    """What was offloaded from the slot that an instruction fills, if that was."""
    free = state.saved_after.get(k)
    moved = free is not None and state.stream[free].op == Opcode.Offload
    return [_value_of(state, state.stream[free])] if free is not None and moved else []


def _changes(state: State, stage: int, mb: int) -> Iterator[tuple[int, Opcode]]:
    """What gives and changes what a forward saved, in the order of the Stream."""
    ops = (Opcode(op) for op in _GIVES)
    at = [(k, op) for op in ops if (k := state.index_of.get((op, stage, mb))) is not None]
    return iter(sorted(at))


def _before(state: State, k: int) -> Opcode | None:
    """Who changed last what an instruction of a microbatch takes."""
    i = state.stream[k]
    ops = [op for at, op in _changes(state, i.stage, i.mb) if at < k]
    return ops[-1] if ops else None


def _after(state: State, k: int) -> Opcode | None:
    """Who changes next what an instruction of a microbatch gives."""
    i = state.stream[k]
    return next((op for at, op in _changes(state, i.stage, i.mb) if at > k), None)


def _rooms_on_host(state: State) -> int | None:
    """How many rooms the host has, if the program says how many slots: no more than there are
    values."""
    said = state.program.slots[state.rank].host if state.program.slots else OWN
    brings = sum(op in _BRINGS for op, _, _ in state.stream)
    return None if said == OWN else min(said, brings)


def _most_on_disk(state: State) -> int:
    """The most values that are on the rank's disk at once, in the order of its Stream."""
    now = most = 0
    for op, _, _ in state.stream:
        now += (op == Opcode.OffloadToDisk) - (op == Opcode.ReloadFromDisk)
        most = max(most, now)
    return most


def _computing(handler: Handler, state: State, i: Instr) -> Call:
    """As the handler, of what makes or uses what a forward saved, in a program that moves it."""
    call = handler(state, i)
    if state.program.ops.isdisjoint(OFF_COMPUTE[_SAVED]):
        return call
    k, waits = state.index_of[i], [call.wait]
    run = call.run
    waits += [one.let_go for one in _left_by(state, k)]
    if _before(state, k) is Opcode.Reload:
        waits.append(_value_of(state, i).arrive)
    if i.op == Opcode.Forward and not state.away.said:
        waits.append(state.away.look)
    if _SAVED in ROWS[i.op].gives and _after(state, k) is Opcode.Offload:
        run = partial(_noting, state, _value_of(state, i), _has_anyway(state, i), run)
    return Call(in_turn(*waits), run)


def _noting(
    state: State, value: SavedActivations, has: Callable[[], set[int]], run: Callable[[], None]
) -> None:
    """Run what makes what is moved later; `has` says what the rank has anyway."""
    batch = state.batch
    if not isinstance(batch.inputs, UnpackedMicrobatches):
        state.batch = batch._replace(
            inputs=UnpackedMicrobatches(batch.inputs),
            targets=UnpackedMicrobatches(batch.targets),
            keywords=UnpackedMicrobatches(batch.keywords),
        )
    with value.noting():
        run()
    value.noted(has())


def _held(value: object) -> list[Tensor]:
    """The tensors with memory that a value in a slot has itself: leaves, or a checkpoint's."""
    if isinstance(value, Checkpoint):
        return [*value.xs, *(buffer for *_, buffer in value.buffers)]
    assert isinstance(value, tuple)
    return [x for x in value[0] if 0 not in x.stride()]  # of a copy the leaf has none


def _has_anyway(state: State, i: Instr) -> Callable[[], set[int]]:
    """What tells the storages that the rank has anyway while it runs a stage."""
    modules = [*state.stages[i.stage].module.modules()]
    if i.stage == state.shape.stages - 1 and isinstance(state.loss, nn.Module):
        modules += state.loss.modules()

    def has() -> set[int]:
        batch = state.batch
        given = (batch.inputs, batch.targets, batch.keywords)
        found = tree_leaves(
            [each.found.get(i.mb) for each in given if isinstance(each, UnpackedMicrobatches)]
        )
        for module in modules:
            found += (*module._parameters.values(), *module._buffers.values())
        return keys_of(found)

    return has


HANDLERS: Final = {
    Opcode.Offload: offload,
    Opcode.Reload: reload,
    Opcode.OffloadToDisk: spill,
    Opcode.ReloadFromDisk: fetch,
}
WRAPPERS: Final = {op: partial(partial, _computing) for op in _COMPUTES}
