"""Handlers of sends, receives, scatters and gathers.

See `handler_registry` for the arguments and the result of a handler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from torch import Tensor

from schedir.ir.isa.instructions import (
    BOUNDARY_COLLECTIVE_OPS,
    BOUNDARY_GATHER_OPS,
    EP_COLLECTIVE_OPS,
    FORM_CHANGE_OPS,
    INSTRUCTIONS,
    RECV_OPS,
    SEND_OPS,
    TP_SPLIT_OPS,
    Form,
    Instr,
    Opcode,
    Value,
    find_form_changes,
)
from schedir.runtime.model_checks.tensor_fingerprint import get_versions
from schedir.runtime.program_state import Call, ProgramState
from schedir.runtime.services.message_buffers import MessageBuffers
from schedir.runtime.services.pending_sends import PendingSends
from schedir.runtime.value_slots import OutputSlot
from schedir.transports.transport import ChainedWork, CompletedWork, allocate_bytes, view_tp_shard

_RECEIVE_OF_KIND = {INSTRUCTIONS[op].gives[0]: op for op in RECV_OPS}
# Form of a value (for example packed) -> a function that takes the memory of the value. It returns
# the part that a message in this form uses, as a flat tensor. A form without a function uses all of
# the memory. The module with the handlers of a form adds the function.
FORM_LAYOUTS: Final[dict[Form, Callable[[Tensor], Tensor]]] = {}


def send(state: ProgramState, i: Instr) -> Call:
    """Return the call of a send: start to send the value of a slot to the peer rank."""
    mb, row, k = i.mb, INSTRUCTIONS[i.op], state.index_of[i]
    kind = row.needs[0]
    slot = state.find_slot(kind, i.stage, mb)
    assert isinstance(slot, OutputSlot)
    peer = state.program.peer_rank(i)
    start, works, lane = state.transport.send, state.service(PendingSends).works, row.lane

    def run() -> None:
        tensor = slot.peek().contiguous()
        work = start(tensor, peer, lane)
        if state.first_step_checks.is_active:
            work = ChainedWork(work, partial(expect_unwritten, tensor, get_versions((tensor,))))
        # Keep a reference until the send has ended, because freed memory may be reused.
        works[k] = (work, tensor)
        slot.free()

    def expect_unwritten(tensor: Tensor, versions: list[int]) -> None:
        if get_versions((tensor,)) != versions:
            raise state.wrap_error(k, slot.overwrite_error())

    return Call(None, run)


def make_value_writer(
    state: ProgramState, i: Instr, kind: Value
) -> Callable[[Sequence[Tensor]], None]:
    """Return a function that fills the output slot of a value, in the layout for its receiver.

    If the receiver is on this rank, the tensors get the layout of a received message. Otherwise the
    tensors are copied to the static send buffer, if there is one. Without a static send buffer,
    several tensors are copied into one uint8 tensor. If later instructions change the form of the
    value, only the last of these instructions fills the static send buffer.

    Args:
        state: The state of the rank.
        i: The instruction that computes the value.
        kind: The kind of the value.

    Returns:
        A function that takes the tensors of the value.
    """
    slot = state.find_slot(kind, i.stage, i.mb)
    layout = state.boundaries[i.mb].get_value_tensors(kind, i.stage)
    if state.find_local_stage(state.program.peer_stage(kind, i.stage), i.mb) is not None:
        converters = [tensor.to_message_layout for tensor in layout.tensors]
        return lambda values: slot.fill(
            tuple([convert(value) for convert, value in zip(converters, values, strict=True)])
        )
    buffers = state.service(MessageBuffers)
    buffer = (
        None
        if _list_form_changes(state, i, kind)
        else buffers.get_send_buffer(kind, slot.number, ())
    )
    if buffer is None and layout.is_single_tensor:
        return lambda values: slot.fill(values[0])
    device, size = state.device, layout.nbytes

    def fill(memory: Tensor, values: Sequence[Tensor]) -> None:
        full_value, views = layout.place_tensors(memory)
        for view, value in zip(views, values, strict=True):
            view.copy_(value)
        slot.fill(full_value)

    if buffer is None:
        return lambda values: fill(allocate_bytes(device, size), values)
    return partial(fill, buffer)


def recv(state: ProgramState, i: Instr) -> Call:
    """Return the call of a receive: start to receive a message into the slot of a value."""
    mb, row = i.mb, INSTRUCTIONS[i.op]
    kind = row.gives[0]
    slot = state.find_slot(kind, i.stage, mb)
    peer = state.program.peer_rank(i)
    full_value, tensors = _get_receive_memory(state, i, kind)
    message = _view_in_form(state, full_value, _list_form_changes(state, i, kind))
    state.first_step_checks.buffers = state.service(MessageBuffers).received
    start, arrivals, lane = state.transport.recv, state.stages[i.stage].arrivals, row.lane

    def run() -> None:
        slot.fill(tensors)
        arrivals[kind, mb] = start(message, peer, lane)

    return Call(None, run)


def _get_receive_memory(
    state: ProgramState, i: Instr, kind: Value
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the receive buffer of a full value, and the tensors in it."""
    number = state.find_slot(kind, i.stage, i.mb).number
    return (
        state.boundaries[i.mb]
        .get_value_tensors(kind, i.stage)
        .place_tensors(state.service(MessageBuffers).received[kind, number])
    )


def _list_form_changes(state: ProgramState, i: Instr, kind: Value) -> tuple[Opcode, ...]:
    """Return, in order, the opcodes that change the form of a stage's value for a microbatch."""
    return tuple(op for op in find_form_changes(kind) if (op, i.stage, i.mb) in state.index_of)


def _view_in_form(state: ProgramState, memory: Tensor, form_opcodes: Sequence[Opcode]) -> Tensor:
    """Return the part of a value's memory that a message with these forms uses."""
    for op in reversed(form_opcodes):  # the order in which the sender applied them
        form = INSTRUCTIONS[op].form
        if form in FORM_LAYOUTS:
            memory = FORM_LAYOUTS[form](memory)
    is_split = any(op in TP_SPLIT_OPS for op in form_opcodes)
    return view_tp_shard(state.transport, memory) if is_split else memory


class ReceivedValue(NamedTuple):
    """The memory of a received value, for an instruction that removes a form such as packed.

    Attributes:
        encoded: A flat tensor with the value in this form. It begins at the address of `decoded`.
        decoded: A flat tensor for the value after the form is removed.
        wait: A function that waits for the message in `encoded`.
    """

    encoded: Tensor
    decoded: Tensor
    wait: Callable[[], None]


def make_early_wait(state: ProgramState, i: Instr, kind: Value) -> Callable[[], None]:
    """Return a function that waits for a message.

    An instruction between the receive and the compute instruction calls this function.

    Args:
        state: The state of the rank.
        i: An instruction of the message's stage and microbatch.
        kind: The kind of the value.
    """
    arrivals, key = state.stages[i.stage].arrivals, (kind, i.mb)

    def wait() -> None:
        arrivals[key].wait()
        # A Work allows one wait, and the compute instruction waits again.
        arrivals[key] = CompletedWork()

    return wait


def get_received_value(state: ProgramState, i: Instr) -> ReceivedValue:
    """Return the memory of a received value, for an instruction that removes a form from it.

    Args:
        state: The state of the rank.
        i: The instruction.
    """
    (kind,) = INSTRUCTIONS[i.op].gives
    full_value, _ = _get_receive_memory(state, i, kind)
    form_changes = _list_form_changes(state, i, kind)
    k = form_changes.index(i.op)
    encoded = _view_in_form(state, full_value, form_changes[k:]).view(-1)
    decoded = _view_in_form(state, full_value, form_changes[k + 1 :]).view(-1)
    return ReceivedValue(encoded, decoded, make_early_wait(state, i, kind))


def make_message_wait(state: ProgramState, i: Instr, kind: Value) -> Callable[[], None] | None:
    """Return a function that waits for an input from a message or a collective.

    The arrival of a message may prove that earlier sends have arrived. The function also completes
    these sends.

    Args:
        state: The state of the rank.
        i: The instruction that needs the input.
        kind: The kind of the value.

    Returns:
        The function, or None if the input comes from neither a message nor a collective.
    """
    arrivals, key = state.stages[i.stage].arrivals, (kind, i.mb)
    receive = state.index_of.get((_RECEIVE_OF_KIND[kind], i.stage, i.mb))
    collectives = BOUNDARY_COLLECTIVE_OPS + EP_COLLECTIVE_OPS
    ops = (op for op in collectives if kind in INSTRUCTIONS[op].gives)
    has_collective = any((op, i.stage, i.mb) in state.index_of for op in ops)
    if receive is None and not has_collective:
        return None
    sends = state.service(PendingSends)
    acknowledged_sends = sends.implied_acks.get(receive, ()) if receive is not None else ()

    def wait() -> None:
        arrivals.pop(key).wait()
        for position in acknowledged_sends:
            sends.complete(position)

    return wait


def tp_scatter(state: ProgramState, i: Instr) -> Call:
    """Return the call of a scatter: replace a value by this tensor-parallel rank's shard of it."""
    kind = INSTRUCTIONS[i.op].gives[0]
    slot = state.find_slot(kind, i.stage, i.mb)
    form_changes = _list_form_changes(state, i, kind)
    buffer = None
    if form_changes[-1] is i.op:  # only the last change fills the send buffer
        buffers = state.service(MessageBuffers)
        buffer = buffers.get_send_buffer(kind, slot.number, form_changes)
    if buffer is not None:
        layout = state.boundaries[i.mb].get_value_tensors(kind, i.stage)
        buffer = layout.slice_part(buffer)

    def run() -> None:
        shard = _copy_local_shard(state, slot.peek(), buffer)
        slot.free()
        slot.fill(shard)

    return Call(None, run)


def _copy_local_shard(state: ProgramState, tensor: Tensor, buffer: Tensor | None) -> Tensor:
    """Return a copy of this rank's shard, because a view would keep the full tensor alive."""
    shard = view_tp_shard(state.transport, tensor.contiguous())
    return shard.clone() if buffer is None else buffer.copy_(shard)


def gather_message(state: ProgramState, i: Instr) -> Call:
    """Return the call of a gather: gather the shards of a value from tensor-parallel ranks."""
    kind = INSTRUCTIONS[i.op].gives[0]
    full_value, _ = _get_receive_memory(state, i, kind)
    flat = full_value.view(-1)
    shard = view_tp_shard(state.transport, full_value)
    arrivals, key = state.stages[i.stage].arrivals, (kind, i.mb)
    side_stream, start = state.transport.side_stream, state.transport.start_collective

    def wait() -> None:
        with side_stream():
            arrivals[key].wait()

    def run() -> None:
        with side_stream():
            # From now on the stage waits for the gather instead of the message.
            arrivals[key] = start("all_gather", "tp", flat, shard)

    return Call(wait, run)


HANDLERS: Final = (
    dict.fromkeys(SEND_OPS, send)
    | dict.fromkeys(RECV_OPS, recv)
    | {
        op: tp_scatter
        for op in FORM_CHANGE_OPS
        if INSTRUCTIONS[op].form is Form.TP_SHARD and op not in BOUNDARY_GATHER_OPS
    }
)
