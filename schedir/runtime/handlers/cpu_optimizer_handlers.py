"""Handlers of OffloadGrads, HostOptimizerStep and ReloadWeights."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from schedir.ir.isa.instructions import Instr, Opcode
from schedir.runtime.handlers.reduction_handlers import check_and_clip_grads
from schedir.runtime.offload.cpu_optimizer import CpuOptimizer
from schedir.runtime.rank_state import Call, State


def _get_cpu_optimizer(state: State) -> CpuOptimizer | None:
    """What steps on the host; None for a rank without an optimizer, which has nothing to step."""
    steps = state.resources.host_optimizer_state
    assert steps is None or isinstance(steps, CpuOptimizer), "the program says so"
    return steps


def offload_grads(state: State, i: Instr) -> Call:
    def run() -> None:
        if (steps := _get_cpu_optimizer(state)) is not None:
            steps.offload_gradient(
                i.stage, is_first_update=not i.mb, observer=state.get_lane_observer()
            )

    return Call(state.wait_for_reductions, run)


def _wait_for_host_grads(state: State) -> None:
    """Wait until all gradients are reduced, and copies of them are on the host."""
    state.wait_for_reductions()
    if (steps := _get_cpu_optimizer(state)) is not None:
        steps.wait_for_gradients()


def _decide_update(state: State, update: int) -> None:
    """Tell the host by what it steps an update."""
    state.is_update_finite = check_and_clip_grads(state, update)
    may = (
        state.is_update_finite
        if state.resources.can_step
        else torch.zeros_like(state.is_update_finite)
    )
    if (steps := _get_cpu_optimizer(state)) is not None:
        steps.set_grad_check(may, state.clip_factor)
    state.clip_factor = None


def check_grads_finite(state: State, i: Instr) -> Call:
    def run() -> None:
        _decide_update(state, i.mb)
        if i.mb < state.shape.optimizer_steps - 1:  # the last one's gradients are left to look at
            state.begin_update()

    return Call(partial(_wait_for_host_grads, state), run)


def host_optimizer_step(state: State, i: Instr) -> Call:
    fails = partial(state.wrap_error, state.index_of[i])

    def run() -> None:
        steps = _get_cpu_optimizer(state)
        if state.is_update_finite is None:
            _decide_update(state, i.mb)
        if steps is not None:
            steps.begin_step(i.stage, fails, state.get_lane_observer())

    return Call(partial(_wait_for_host_grads, state), run)


def reload_weights(state: State, i: Instr) -> Call:
    last = i.mb == state.shape.optimizer_steps - 1

    def run() -> None:
        if (steps := _get_cpu_optimizer(state)) is not None:
            steps.reload_weights(i.stage, is_last_update=last, observer=state.get_lane_observer())

    return Call(None, run)


HANDLERS: Final = {
    Opcode.OffloadGrads: offload_grads,
    Opcode.HostOptimizerStep: host_optimizer_step,
    Opcode.ReloadWeights: reload_weights,
    Opcode.CheckGradsFinite: check_grads_finite,
}
