"""Transfers: handlers of messages, and of what makes them parts or whole on their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import Tensor

from schedir.ir.ops import GATHERS, RECEIVES, ROWS, SCATTERS, Instr, Opcode, Token
from schedir.runtime.rank import Call, State
from schedir.transports.transport import own_part

# What is taken in is received, and made whole if it comes in parts.
_RECEIVES = {ROWS[op].gives[0]: op for op in RECEIVES}
_GATHERS = {ROWS[op].gives[0]: op for op in GATHERS}


def send(state: State, i: Instr) -> Call:
    mb, row, k = i.mb, ROWS[i.op], state.index_of[i]
    kind = row.needs[0]
    out = state.slot(kind, i.stage, mb)
    peer = state.program.peer(i)
    start, sending, lane = state.transport.send, state.sending, row.lane

    def run() -> None:
        tensor = out.look().contiguous()
        # The reference stays until the send has ended: freed earlier, it may be reused.
        sending[k] = (start(tensor, peer, lane), tensor)
        out.free()

    return Call(None, run)


def put_out(state: State, i: Instr, kind: Token, hop: int) -> Callable[[Tensor], None]:
    """Fills the slot of what an instruction puts out for stage + hop, laid as its taker wants it.

    A stage on this rank takes it as a message would bring it, a message from static memory where
    there is some.  A scatter takes it as it is, and puts a part into static memory.
    """
    out, as_sent = state.slot(kind, i.stage, i.mb), state.boundary.as_sent
    if state.local_stage(i.stage + hop, i.mb) is not None:
        return lambda value: out.fill(as_sent(value))
    scattered = (SCATTERS[kind], i.stage, i.mb) in state.index_of
    own = None if scattered else state.outgoing(kind, out.number, part=False)
    return out.fill if own is None else lambda value: out.fill(own.copy_(value))


def recv(state: State, i: Instr) -> Call:
    mb, row = i.mb, ROWS[i.op]
    kind = row.gives[0]
    given, peer = state.slot(kind, i.stage, mb), state.program.peer(i)
    whole = state.buffers[kind, given.number]
    scattered = (_GATHERS.get(kind), i.stage, mb) in state.index_of
    part = own_part(state.transport, whole) if scattered else whole
    start, arrivals, lane = state.transport.recv, state.stages[i.stage].arrivals, row.lane

    def run() -> None:
        given.fill(whole)
        arrivals[kind, mb] = start(part, peer, lane)

    return Call(None, run)


def message_wait(state: State, i: Instr, kind: Token) -> Callable[[], None] | None:
    """Waits until what an instruction takes in is there, if it comes by message.

    Then what the message proves to have arrived is let go.
    """
    k = state.index_of.get((_RECEIVES[kind], i.stage, i.mb))
    if k is None:
        return None
    arrivals, key = state.stages[i.stage].arrivals, (kind, i.mb)
    known = state.implied_acks.get(k, ())

    def wait() -> None:
        arrivals.pop(key).wait()
        for send in known:
            state.let_go(send)

    return wait


def scatter(state: State, i: Instr) -> Call:
    kind = ROWS[i.op].gives[0]
    out = state.slot(kind, i.stage, i.mb)
    own = state.outgoing(kind, out.number, part=True)

    def run() -> None:
        shard = _own_copy(state, out.look(), own)
        out.free()
        out.fill(shard)

    return Call(None, run)


def _own_copy(state: State, whole: Tensor, into: Tensor | None = None) -> Tensor:
    """This rank's part, not a view: the whole is not kept alive by what is sent of it."""
    part = own_part(state.transport, whole.contiguous())
    return part.clone() if into is None else into.copy_(part)


def gather(state: State, i: Instr) -> Call:
    kind = ROWS[i.op].gives[0]
    whole = state.buffers[kind, state.slot(kind, i.stage, i.mb).number]
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


HANDLERS: Final = {
    Opcode.SendAct: send,
    Opcode.RecvAct: recv,
    Opcode.SendGrad: send,
    Opcode.RecvGrad: recv,
    Opcode.Scatter: scatter,
    Opcode.Gather: gather,
    Opcode.ScatterGrad: scatter,
    Opcode.GatherGrad: gather,
}
