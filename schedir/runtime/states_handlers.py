"""States: handlers of what loads, steps and stores a stage's part of the optimizer's state."""

from __future__ import annotations

from typing import Final

from schedir.ir.ops import Instr, Opcode, Token
from schedir.runtime.host_states import HostStates
from schedir.runtime.random import UPDATE
from schedir.runtime.rank import Call, State, freed_before
from schedir.runtime.reduction_handlers import judged


def _states(state: State) -> HostStates:
    assert state.held.states is not None, "the program says so"
    return state.held.states


def load_state(state: State, i: Instr) -> Call:
    left = freed_before(state.program, state.rank, Token.STATE).get(state.index_of[i])

    def run() -> None:
        if state.optimizer is not None:
            if left is not None:
                _states(state).leave(state.stream[left].stage)
            _states(state).load(i.stage, state.on_lane())

    return Call(None, run)


def step_stage(state: State, i: Instr) -> Call:
    def run() -> None:
        if state.optimizer is not None:
            _states(state).arrive(i.stage)
        if state.verdict is None:
            state.verdict = judged(state)
        state.let_step(state.verdict, i.stage)

    update = state.plan.microbatches + i.mb
    seeded = state.draws.seeded(UPDATE, i.stage, update, run)
    return Call(state.wait_for_reductions, seeded)


def store_state(state: State, i: Instr) -> Call:
    def run() -> None:
        if state.optimizer is not None:
            _states(state).store(i.stage, state.on_lane())

    return Call(None, run)


HANDLERS: Final = {
    Opcode.LoadState: load_state,
    Opcode.StepStage: step_stage,
    Opcode.StoreState: store_state,
}
