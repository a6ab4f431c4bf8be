"""Handlers that move the optimizer state of a stage, and step the parameters of the stage.

See `handler_registry` for the arguments and the result of a handler.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from schedir.ir.isa.instructions import Instr, Opcode, Value
from schedir.ir.program import UNSHARED_SLOTS
from schedir.runtime.autograd.random_streams import UPDATE
from schedir.runtime.offload.disk_optimizer_state import DiskOptimizerState, ErrorWrapper
from schedir.runtime.offload.host_optimizer_state import HostOptimizerState
from schedir.runtime.rank_state import Call, State
from schedir.runtime.services.optimizer_placement import OptimizerPlacement
from schedir.runtime.services.pending_reductions import PendingReductions
from schedir.runtime.services.update_checks import OptimizerSteps, UpdateChecks
from schedir.runtime.value_slots import find_freeing_instructions


def _get_host_state(state: State) -> HostOptimizerState:
    optimizer_state = state.service(OptimizerPlacement).optimizer_state
    assert optimizer_state is not None, "the rank has an optimizer"
    return optimizer_state


def _get_disk_state(state: State) -> DiskOptimizerState:
    optimizer_state = _get_host_state(state)
    assert isinstance(optimizer_state, DiskOptimizerState), "the program keeps the state on disk"
    return optimizer_state


def read_state_from_disk(state: State, i: Instr) -> Call:
    """Return the call of ReadStateFromDisk: read a stage's optimizer state into a host buffer."""
    slots, wrap_error = state.program.slots, _make_error_wrapper(state, i)
    optimizer_state = state.service(OptimizerPlacement).optimizer_state
    if isinstance(optimizer_state, DiskOptimizerState):
        buffer_count = slots[state.rank].state_host if slots else UNSHARED_SLOTS
        stage_count = len(state.shape.stages_on_rank[state.rank])
        buffer_count = min(buffer_count, 2 * stage_count)
        optimizer_state.buffer_count = max(optimizer_state.buffer_count, buffer_count)

    def run() -> None:
        if state.resources.optimizer is not None:
            _get_disk_state(state).fetch(i.stage, state.observer.make_lane_observer(), wrap_error)

    return Call(None, run)


def write_state_to_disk(state: State, i: Instr) -> Call:
    """Return the call of WriteStateToDisk: write the optimizer state of a stage to the disk."""
    wrap_error = _make_error_wrapper(state, i)

    def run() -> None:
        if state.resources.optimizer is not None:
            _get_disk_state(state).spill(i.stage, state.observer.make_lane_observer(), wrap_error)

    return Call(None, run)


def _make_error_wrapper(state: State, i: Instr) -> ErrorWrapper:
    """Return a function that adds the instruction and a hint to an error."""

    def wrap_error(error: Exception) -> Exception:
        wrapped_error = state.wrap_error(state.index_of[i], error)
        wrapped_error.hint = wrapped_error.hint or _PARTIAL_UPDATE_HINT
        return wrapped_error

    return wrap_error


_PARTIAL_UPDATE_HINT: Final = (
    "the update may be incomplete, with some stages not stepped: resume from a checkpoint"
)


def reload_state(state: State, i: Instr) -> Call:
    """Return the call of ReloadState: copy the optimizer state of a stage to the device."""
    freed_by = find_freeing_instructions(state.program, state.rank, Value.STATE).get(
        state.index_of[i]
    )

    def run() -> None:
        if state.resources.optimizer is not None:
            if freed_by is not None:
                _get_host_state(state).finish_store(state.stream[freed_by].stage)
            _get_host_state(state).load(i.stage, state.observer.make_lane_observer())

    return Call(None, run)


def stage_optimizer_step(state: State, i: Instr) -> Call:
    """Return the call of StageOptimizerStep: step the parameters of a stage on the device."""
    checks = state.service(UpdateChecks)
    optimizer_steps = state.service(OptimizerSteps)

    def run() -> None:
        if state.resources.optimizer is not None:
            _get_host_state(state).finish_load(i.stage)
        is_finite = checks.check_once(i.mb)
        if state.resources.optimizer is not None:
            optimizer_steps.run(is_finite, partial(_get_host_state(state).step, i.stage))

    update = state.shape.microbatches + i.mb
    run_seeded = state.random_streams.make_seeded(UPDATE, i.stage, update, run)
    return Call(state.service(PendingReductions).wait, run_seeded)


def offload_state(state: State, i: Instr) -> Call:
    """Return the call of OffloadState: copy the optimizer state of a stage to the host."""
    wrap_error = _make_error_wrapper(state, i)

    def run() -> None:
        if state.resources.optimizer is not None:
            try:
                _get_host_state(state).store(i.stage, state.observer.make_lane_observer())
            except OSError as error:
                raise wrap_error(error) from error

    return Call(None, run)


HANDLERS: Final = {
    Opcode.ReloadState: reload_state,
    Opcode.StageOptimizerStep: stage_optimizer_step,
    Opcode.OffloadState: offload_state,
    Opcode.ReadStateFromDisk: read_state_from_disk,
    Opcode.WriteStateToDisk: write_state_to_disk,
}
