"""The handler of Recompute."""

from __future__ import annotations

from functools import partial
from typing import Final

from schedir.ir.isa.instructions import FORWARD as F
from schedir.ir.isa.instructions import Instr, Opcode, Value
from schedir.runtime.autograd.activation_checkpoint import Checkpoint, Checkpoints
from schedir.runtime.autograd.random_streams import FORWARD
from schedir.runtime.autograd.stage_context import on_version
from schedir.runtime.handlers.compute_handlers import StageRun, is_ours, taken_by
from schedir.runtime.rank_state import Call, State


def recompute(state: State, i: Instr) -> Call:
    stage_run, checkpoints = StageRun(state, i), Checkpoints(state, i)
    ours = is_ours(taken_by(state, i._replace(op=F)))
    saved = state.slot(Value.SAVED, i.stage, i.mb, state.index_of[i])
    last = i.stage == state.shape.stages - 1

    def run() -> None:
        checkpoint: Checkpoint = saved.look()
        # New leaves: hooks that the first run registered on its inputs must not run as well.
        leaves = [x.detach() for x in checkpoint.xs]
        ys, xs = checkpoints.again(partial(stage_run, leaves, ours), checkpoint)
        if last:  # the same number, of which nobody need keep two
            state.keep_loss(i.mb, ys[0], xs)
        saved.free()
        saved.fill(stage_run.saved(xs, ys))

    # Not `around`: what the first run of it may change, this one does not.
    seeded = state.draws.seeded(FORWARD, i.stage, i.mb, run)
    return Call(None, on_version(state, i, seeded))


HANDLERS: Final = {Opcode.Recompute: recompute}
