"""Handlers of Snapshot, and of the instructions that wait for its copies.

See `handler_registry` for the arguments and the result of a handler.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from schedir.ir.isa.instructions import Instr, Opcode, Value, find_consumers
from schedir.runtime.offload.snapshot_copies import SnapshotCopies
from schedir.runtime.program_state import Call, Handler, ProgramState, chain_calls


def snapshot(state: ProgramState, i: Instr) -> Call:
    """Return the call of Snapshot: start the requested copies of a stage for a checkpoint."""
    return Call(None, partial(state.service(SnapshotCopies).begin_stage, i.stage))


def _wait_for_snapshot(handler: Handler, state: ProgramState, i: Instr) -> Call:
    """Let an instruction that changes state wait for the requested copies of the state.

    If the program has no Snapshot instructions, the instruction cancels the requested copies.
    """
    call = handler(state, i)
    if not state.program.checkpoint_snapshots:
        return call._replace(
            wait=chain_calls(call.wait, state.service(SnapshotCopies).cancel_request)
        )
    return call._replace(wait=chain_calls(call.wait, state.service(SnapshotCopies).wait))


HANDLERS: Final = {Opcode.Snapshot: snapshot}
WRAPPERS: Final = {op: _wait_for_snapshot for op in find_consumers(Value.SNAPSHOT)}
