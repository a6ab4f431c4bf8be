"""Handlers of Snapshot, and of the step that waits for it."""

from __future__ import annotations

from functools import partial
from typing import Final

from schedir.ir.isa.instructions import Instr, Opcode, Value, consumers
from schedir.runtime.rank_state import Call, Handler, State, in_turn


def snapshot(state: State, i: Instr) -> Call:
    return Call(None, partial(state.held.snapshots.begin, i.stage))


def _waiting(handler: Handler, state: State, i: Instr) -> Call:
    """As the handler, of what changes what may be being copied."""
    call = handler(state, i)
    if not state.program.checkpoint_snapshots:
        return call._replace(wait=in_turn(call.wait, state.held.snapshots.forget))
    return call._replace(wait=in_turn(call.wait, state.held.snapshots.wait))


HANDLERS: Final = {Opcode.Snapshot: snapshot}
WRAPPERS: Final = {op: partial(partial, _waiting) for op in consumers(Value.SNAPSHOT)}
