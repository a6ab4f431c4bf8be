"""The handler of Recompute.

See `handler_registry` for the arguments and the result of a handler.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from schedir.ir.isa.instructions import FORWARD as F
from schedir.ir.isa.instructions import Instr, Opcode, Value
from schedir.runtime.autograd.activation_checkpoint import Checkpoint, Checkpoints
from schedir.runtime.autograd.random_streams import FORWARD
from schedir.runtime.autograd.stage_context import bind_weight_version
from schedir.runtime.handlers.compute_handlers import (
    StageRun,
    are_inputs_exclusive,
    find_input_slots,
)
from schedir.runtime.program_state import Call, ProgramState


def recompute(state: ProgramState, i: Instr) -> Call:
    """Return the call of Recompute: run the forward of a microbatch again for its backward."""
    stage_run = StageRun(state, i)
    checkpoints = Checkpoints(state, i)
    is_exclusive = are_inputs_exclusive(find_input_slots(state, i._replace(op=F)))
    saved_slot = state.find_slot(Value.SAVED, i.stage, i.mb, state.index_of[i])
    is_last_stage = i.stage == state.shape.stages - 1

    def run() -> None:
        checkpoint: Checkpoint = saved_slot.peek()
        # Create new leaves, because hooks that the first run registered on its inputs must not run.
        leaves = [x.detach() for x in checkpoint.inputs]
        ys, xs = checkpoints.recompute(partial(stage_run, leaves, is_exclusive), checkpoint)
        if is_last_stage:  # replaces the equal loss of the first run
            state.save_loss(i.mb, ys[0], xs)
        saved_slot.free()
        saved_slot.fill(stage_run.collect_saved(xs, ys))

    # The checks of `wrap_stage_run` are not needed here, because the first forward ran these
    # checks.
    run_seeded = state.random_streams.make_seeded(FORWARD, i.stage, i.mb, run)
    return Call(None, bind_weight_version(state, i, run_seeded))


HANDLERS: Final = {Opcode.Recompute: recompute}
