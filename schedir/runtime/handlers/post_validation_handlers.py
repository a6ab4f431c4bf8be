"""Handlers of ReduceNormAfterStep, and of OptimizerStep before the global norm is known.

See `handler_registry` for the arguments and the result of a handler.
"""

from __future__ import annotations

from typing import Final

from schedir.ir.isa.instructions import Instr, Opcode
from schedir.runtime.handlers.gradient_norm_handlers import make_local_squared_norm
from schedir.runtime.parameters.post_validation import PostValidation
from schedir.runtime.program_state import Call, Handler, ProgramState, chain_calls
from schedir.runtime.services.update_checks import UpdateChecks


def reduce_norm_after_step(state: ProgramState, i: Instr) -> Call:
    """Return the call of ReduceNormAfterStep: sum the squares of all gradients after the update."""
    start, post_validation = state.transport.start_collective, state.service(PostValidation)
    checks = state.service(UpdateChecks)

    def run() -> None:
        squared_norm = checks.grad_norm
        work = start("all_reduce", "model", squared_norm, squared_norm)
        post_validation.track_norm(squared_norm, work)

    return Call(None, run)


def _step_before_norm(handler: Handler, state: ProgramState, i: Instr) -> Call:
    """If norm_check is "after_step", let OptimizerStep run before the global norm is known."""
    call = handler(state, i)
    if state.program.norm_check != "after_step":
        return call
    post_validation = state.service(PostValidation)
    checks = state.service(UpdateChecks)
    post_validation.apply_update = call.run
    compute_squares = make_local_squared_norm(state)

    def run() -> None:
        checks.grad_norm = compute_squares()
        post_validation.step(checks.grad_norm)

    return Call(chain_calls(call.wait, post_validation.wait_for_previous_norm), run)


HANDLERS: Final = {Opcode.ReduceNormAfterStep: reduce_norm_after_step}
WRAPPERS: Final = {Opcode.OptimizerStep: _step_before_norm}
