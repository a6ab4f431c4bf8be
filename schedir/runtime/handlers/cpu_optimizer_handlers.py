"""Handlers of OffloadGrads, HostOptimizerStep, ReloadWeights and CheckGradsFinite.

See `handler_registry` for the arguments and the result of a handler.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from schedir.ir.isa.instructions import Instr, Opcode
from schedir.runtime.offload.cpu_optimizer import CpuOptimizer
from schedir.runtime.rank_state import Call, State
from schedir.runtime.services.optimizer_placement import OptimizerPlacement
from schedir.runtime.services.pending_reductions import PendingReductions
from schedir.runtime.services.update_checks import OptimizerSteps, UpdateChecks


def _get_cpu_optimizer(state: State) -> CpuOptimizer | None:
    """Return the CPU optimizer, or None for a rank without an optimizer."""
    optimizer = state.service(OptimizerPlacement).optimizer_state
    assert optimizer is None or isinstance(optimizer, CpuOptimizer), "the program steps on the host"
    return optimizer


def offload_grads(state: State, i: Instr) -> Call:
    """Return the call of OffloadGrads: copy the reduced gradients of a stage to the host."""

    def run() -> None:
        if (optimizer := _get_cpu_optimizer(state)) is not None:
            optimizer.offload_gradient(
                i.stage, is_first_update=not i.mb, observer=state.observer.make_lane_observer()
            )

    return Call(state.service(PendingReductions).wait, run)


def _wait_for_host_grads(state: State) -> None:
    state.service(PendingReductions).wait()
    if (optimizer := _get_cpu_optimizer(state)) is not None:
        optimizer.wait_for_gradients()


def _decide_update(state: State, update: int) -> None:
    """Decide whether to make an update, and pass the decision and clip factor to the optimizer."""
    checks = state.service(UpdateChecks)
    is_finite = checks.check_once(update)
    can_step = state.service(OptimizerSteps).can_step
    can_update = is_finite if can_step else torch.zeros_like(is_finite)
    if (optimizer := _get_cpu_optimizer(state)) is not None:
        optimizer.set_grad_check(can_update, checks.clip_factor)
    checks.clip_factor = None


def check_grads_finite(state: State, i: Instr) -> Call:
    """Return the call of CheckGradsFinite: check the gradients of an update.

    The call also clears the gradients, except after the last update of a step.
    """

    def run() -> None:
        _decide_update(state, i.mb)
        # Keep the gradients of the last update, because the caller may read them.
        if i.mb < state.shape.optimizer_steps - 1:
            state.begin_update()

    return Call(partial(_wait_for_host_grads, state), run)


def host_optimizer_step(state: State, i: Instr) -> Call:
    """Return the call of HostOptimizerStep: step the parameters of a stage on the host."""
    make_error = partial(state.wrap_error, state.index_of[i])

    def run() -> None:
        optimizer = _get_cpu_optimizer(state)
        if state.service(UpdateChecks).is_finite is None:
            _decide_update(state, i.mb)
        if optimizer is not None:
            optimizer.begin_step(i.stage, make_error, state.observer.make_lane_observer())

    return Call(partial(_wait_for_host_grads, state), run)


def reload_weights(state: State, i: Instr) -> Call:
    """Return the call of ReloadWeights: copy the stepped weights of a stage back to the device."""
    is_last_update = i.mb == state.shape.optimizer_steps - 1

    def run() -> None:
        if (optimizer := _get_cpu_optimizer(state)) is not None:
            optimizer.reload_weights(
                i.stage, is_last_update=is_last_update, observer=state.observer.make_lane_observer()
            )

    return Call(None, run)


HANDLERS: Final = {
    Opcode.OffloadGrads: offload_grads,
    Opcode.HostOptimizerStep: host_optimizer_step,
    Opcode.ReloadWeights: reload_weights,
    Opcode.CheckGradsFinite: check_grads_finite,
}
