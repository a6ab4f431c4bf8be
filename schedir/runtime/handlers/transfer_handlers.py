"""Handlers of sends, receives, scatters and gathers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from torch import Tensor

from schedir.ir.isa.instructions import (
    BOUNDARY_COLLECTIVES,
    FORM_CHANGES,
    GATHERS,
    RECEIVES,
    ROWS,
    SENDS,
    SPLIT_CHANGES,
    Form,
    Instr,
    Opcode,
    Value,
    form_changes,
)
from schedir.runtime.model_checks.tensor_fingerprint import versions_of
from schedir.runtime.rank_state import Call, State
from schedir.runtime.value_slots import OutputSlot
from schedir.transports.transport import ChainedWork, CompletedWork, bytes_on, own_part

_RECEIVES = {ROWS[op].gives[0]: op for op in RECEIVES}
# By form, a function that returns the part of a value's memory that the message uses, as a flat
# tensor. The module with the handlers of a form adds the function. A form without one uses all of
# the memory. No form uses more.
LAYOUTS: Final[dict[Form, Callable[[Tensor], Tensor]]] = {}


def send(state: State, i: Instr) -> Call:
    mb, row, k = i.mb, ROWS[i.op], state.index_of[i]
    kind = row.needs[0]
    out = state.slot(kind, i.stage, mb)
    assert isinstance(out, OutputSlot)
    peer = state.program.peer(i)
    start, sending, lane = state.transport.send, state.sending, row.lane

    def run() -> None:
        tensor = out.look().contiguous()
        work = start(tensor, peer, lane)
        if state.checks.active:
            work = ChainedWork(work, partial(expect_unwritten, tensor, versions_of((tensor,))))
        # The reference stays until the send has ended: freed earlier, it may be reused.
        sending[k] = (work, tensor)
        out.free()

    def expect_unwritten(tensor: Tensor, versions: list[int]) -> None:
        if versions_of((tensor,)) != versions:
            raise state.failed(k, out.overwritten())

    return Call(None, run)


def put_out(state: State, i: Instr, kind: Value) -> Callable[[Sequence[Tensor]], None]:
    """Fills the slot of a value that an instruction puts out, laid as its taker wants it.

    A stage on this rank takes the tensors as a message would bring them, a message one tensor from
    static memory where there is some, and several as bytes, one behind the other.  If instructions
    change the form of the value, the last of them fills the static memory.
    """
    out, carried = state.slot(kind, i.stage, i.mb), state.passing[i.mb].carried(kind, i.stage)
    if state.local_stage(state.program.other(kind, i.stage), i.mb) is not None:
        layouts = [one.as_sent for one in carried.tensors]
        return lambda values: out.fill(
            tuple([as_sent(value) for as_sent, value in zip(layouts, values, strict=True)])
        )
    own = None if _changed(state, i, kind) else state.outgoing(kind, out.number, ())
    if own is None and carried.alone:
        return lambda values: out.fill(values[0])
    device, size = state.device, carried.nbytes

    def fill(memory: Tensor, values: Sequence[Tensor]) -> None:
        whole, places = carried.lay(memory)
        for place, value in zip(places, values, strict=True):
            place.copy_(value)
        out.fill(whole)

    if own is None:
        return lambda values: fill(bytes_on(device, size), values)
    return partial(fill, own)


def recv(state: State, i: Instr) -> Call:
    mb, row = i.mb, ROWS[i.op]
    kind = row.gives[0]
    given, peer = state.slot(kind, i.stage, mb), state.program.peer(i)
    whole, tensors = _received(state, i, kind)
    message = _in_form(state, whole, _changed(state, i, kind))
    start, arrivals, lane = state.transport.recv, state.stages[i.stage].arrivals, row.lane

    def run() -> None:
        given.fill(tensors)
        arrivals[kind, mb] = start(message, peer, lane)

    return Call(None, run)


def _received(state: State, i: Instr, kind: Value) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Where a message comes in, or is made whole, and the tensors in it."""
    number = state.slot(kind, i.stage, i.mb).number
    return state.passing[i.mb].carried(kind, i.stage).lay(state.buffers[kind, number])


def _changed(state: State, i: Instr, kind: Value) -> tuple[Opcode, ...]:
    """The instructions that change the form of a value of `i`'s stage and microbatch, in order."""
    return tuple(op for op in form_changes(kind) if (op, i.stage, i.mb) in state.index_of)


def _in_form(state: State, whole: Tensor, changed: Sequence[Opcode]) -> Tensor:
    """The part of the memory of a whole value that holds it before `changed` take its forms."""
    for op in reversed(changed):  # in the order in which the sender has given the forms
        form = ROWS[op].form
        if form in LAYOUTS:
            whole = LAYOUTS[form](whole)
    split = any(op in SPLIT_CHANGES for op in changed)
    return own_part(state.transport, whole) if split else whole


class ReceivedValue(NamedTuple):
    """A value that came by message, for the instruction that takes a form from it.

    Attributes:
        before: The memory of the value in its form, flat. It begins at the address of `after`.
        after: The memory of the value without the form, flat.
        wait: Waits for the message in `before`.
    """

    before: Tensor
    after: Tensor
    wait: Callable[[], None]


def first_wait(state: State, i: Instr, kind: Value) -> Callable[[], None]:
    """Return a function that waits for a message before the stage of `i` waits for it."""
    arrivals, key = state.stages[i.stage].arrivals, (kind, i.mb)

    def wait() -> None:
        arrivals[key].wait()
        arrivals[key] = CompletedWork()  # a message can be awaited once

    return wait


def received(state: State, i: Instr) -> ReceivedValue:
    """Return the memory and the wait for an instruction that takes a form from a value."""
    (kind,) = ROWS[i.op].gives
    whole, _ = _received(state, i, kind)
    changed = _changed(state, i, kind)
    place = changed.index(i.op)
    before, after = (_in_form(state, whole, changed[k:]).view(-1) for k in (place, place + 1))
    return ReceivedValue(before, after, first_wait(state, i, kind))


def message_wait(state: State, i: Instr, kind: Value) -> Callable[[], None] | None:
    """Waits until what an instruction takes in is there, if it comes by message, or ranks meet.

    Then what the message proves to have arrived is let go.
    """
    arrivals, key = state.stages[i.stage].arrivals, (kind, i.mb)
    k = state.index_of.get((_RECEIVES[kind], i.stage, i.mb))
    ops = (op for op in BOUNDARY_COLLECTIVES if kind in ROWS[op].gives)
    met = any((op, i.stage, i.mb) in state.index_of for op in ops)
    if k is None and not met:
        return None
    known = state.implied_acks.get(k, ()) if k is not None else ()

    def wait() -> None:
        arrivals.pop(key).wait()
        for send in known:
            state.let_go(send)

    return wait


def scatter(state: State, i: Instr) -> Call:
    kind = ROWS[i.op].gives[0]
    out = state.slot(kind, i.stage, i.mb)
    changed = _changed(state, i, kind)
    own = state.outgoing(kind, out.number, changed) if changed[-1] is i.op else None
    carried = state.passing[i.mb].carried(kind, i.stage)
    into = None if own is None else carried.part(own)

    def run() -> None:
        shard = _own_copy(state, out.look(), into)
        out.free()
        out.fill(shard)

    return Call(None, run)


def _own_copy(state: State, whole: Tensor, into: Tensor | None = None) -> Tensor:
    """This rank's part, not a view: the whole is not kept alive by what is sent of it."""
    part = own_part(state.transport, whole.contiguous())
    return part.clone() if into is None else into.copy_(part)


def gather(state: State, i: Instr) -> Call:
    kind = ROWS[i.op].gives[0]
    whole, _ = _received(state, i, kind)
    flat, part = whole.view(-1), own_part(state.transport, whole)
    arrivals, key = state.stages[i.stage].arrivals, (kind, i.mb)
    aside, start = state.transport.aside, state.transport.collective

    def wait() -> None:
        with aside():
            arrivals[key].wait()

    def run() -> None:
        with aside():
            # The boundary waits for this from now on, and no longer for its message.
            arrivals[key] = start("all_gather", "tp", flat, part)

    return Call(wait, run)


HANDLERS: Final = (
    dict.fromkeys(SENDS, send)
    | dict.fromkeys(RECEIVES, recv)
    | {op: scatter for op in FORM_CHANGES if ROWS[op].form is Form.PART and op not in GATHERS}
)
