"""Handlers that load, step and store the optimizer state of a stage."""

from __future__ import annotations

from typing import Final

from schedir.ir.isa.instructions import Instr, Opcode, Value
from schedir.ir.program import OWN
from schedir.runtime.autograd.random_streams import UPDATE
from schedir.runtime.handlers.reduction_handlers import judged
from schedir.runtime.offload.disk_optimizer_state import DiskOptimizerState, Told
from schedir.runtime.offload.host_optimizer_state import HostOptimizerState
from schedir.runtime.rank_state import Call, State, freed_before


def _states(state: State) -> HostOptimizerState:
    assert state.held.states is not None, "the program says so"
    return state.held.states


def _on_disk(state: State) -> DiskOptimizerState:
    assert isinstance(state.held.states, DiskOptimizerState), "the program says so"
    return state.held.states


def fetch_state(state: State, i: Instr) -> Call:
    said, told = state.program.slots, _told(state, i)
    if isinstance(states := state.held.states, DiskOptimizerState):
        rooms = said[state.rank].state_host if said else OWN
        stages = len(state.shape.stages_of[state.rank])
        states.rooms = max(states.rooms, min(rooms, 2 * stages))

    def run() -> None:
        if state.optimizer is not None:
            _on_disk(state).fetch(i.stage, state.on_lane(), told)

    return Call(None, run)


def spill_state(state: State, i: Instr) -> Call:
    told = _told(state, i)

    def run() -> None:
        if state.optimizer is not None:
            _on_disk(state).spill(i.stage, state.on_lane(), told)

    return Call(None, run)


def _told(state: State, i: Instr) -> Told:
    """An error of a disk as that of an instruction, in the middle of an update."""

    def told(error: Exception) -> Exception:
        failed = state.failed(state.index_of[i], error)
        failed.hint = failed.hint or _HALF
        return failed

    return told


_HALF: Final = "of the update some stages may be stepped, and others not: go on from a checkpoint"


def load_state(state: State, i: Instr) -> Call:
    left = freed_before(state.program, state.rank, Value.STATE).get(state.index_of[i])

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
            state.verdict = judged(state, i.mb)
        state.let_step(state.verdict, i.stage)

    update = state.shape.microbatches + i.mb
    seeded = state.draws.seeded(UPDATE, i.stage, update, run)
    return Call(state.wait_for_reductions, seeded)


def store_state(state: State, i: Instr) -> Call:
    told = _told(state, i)

    def run() -> None:
        if state.optimizer is not None:
            try:
                _states(state).store(i.stage, state.on_lane())
            except OSError as error:
                raise told(error) from error

    return Call(None, run)


HANDLERS: Final = {
    Opcode.ReloadState: load_state,
    Opcode.StageOptimizerStep: step_stage,
    Opcode.OffloadState: store_state,
    Opcode.ReadStateFromDisk: fetch_state,
    Opcode.WriteStateToDisk: spill_state,
}
