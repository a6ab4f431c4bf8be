"""Handlers of OffloadGrads, HostOptimizerStep and ReloadWeights."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from schedir.ir.isa.instructions import Instr, Opcode
from schedir.runtime.handlers.reduction_handlers import judged
from schedir.runtime.offload.cpu_optimizer import CpuOptimizer
from schedir.runtime.rank_state import Call, State


def _steps(state: State) -> CpuOptimizer | None:
    """What steps on the host; None for a rank without an optimizer, which has nothing to step."""
    steps = state.held.states
    assert steps is None or isinstance(steps, CpuOptimizer), "the program says so"
    return steps


def offload_grads(state: State, i: Instr) -> Call:
    def run() -> None:
        if (steps := _steps(state)) is not None:
            steps.offload(i.stage, first=not i.mb, marks=state.on_lane())

    return Call(state.wait_for_reductions, run)


def _arrived(state: State) -> None:
    """Wait until all gradients are reduced, and copies of them are on the host."""
    state.wait_for_reductions()
    if (steps := _steps(state)) is not None:
        steps.arrived()


def _judge(state: State, update: int) -> None:
    """Tell the host by what it steps an update."""
    state.verdict = judged(state, update)
    may = state.verdict if state.held.may_step else torch.zeros_like(state.verdict)
    if (steps := _steps(state)) is not None:
        steps.judge(may, state.shrink)
    state.shrink = None


def release_grads(state: State, i: Instr) -> Call:
    def run() -> None:
        _judge(state, i.mb)
        if i.mb < state.shape.optimizer_steps - 1:  # the last one's gradients are left to look at
            state.begin_update()

    return Call(partial(_arrived, state), run)


def step_host(state: State, i: Instr) -> Call:
    fails = partial(state.failed, state.index_of[i])

    def run() -> None:
        steps = _steps(state)
        if state.verdict is None:
            _judge(state, i.mb)
        if steps is not None:
            steps.begin(i.stage, fails, state.on_lane())

    return Call(partial(_arrived, state), run)


def reload_weights(state: State, i: Instr) -> Call:
    last = i.mb == state.shape.optimizer_steps - 1

    def run() -> None:
        if (steps := _steps(state)) is not None:
            steps.reload(i.stage, last=last, marks=state.on_lane())

    return Call(None, run)


HANDLERS: Final = {
    Opcode.OffloadGrads: offload_grads,
    Opcode.HostOptimizerStep: step_host,
    Opcode.ReloadWeights: reload_weights,
    Opcode.CheckGradsFinite: release_grads,
}
