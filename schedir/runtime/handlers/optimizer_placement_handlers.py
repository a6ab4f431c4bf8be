"""Handlers that move and step optimizer states, and copy gradients and weights for host steps.

See `handler_registry` for the arguments and the result of a handler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from schedir.ir.isa.instructions import Instr, Opcode, Value
from schedir.ir.program import UNSHARED_SLOTS
from schedir.runtime.autograd.random_streams import UPDATE
from schedir.runtime.offload.optimizer_state_file import StateFile
from schedir.runtime.program_state import Call, ProgramState
from schedir.runtime.services.optimizer_placement import OptimizerPlacement, StartDiskJob
from schedir.runtime.services.pending_reductions import PendingReductions
from schedir.runtime.services.update_checks import RankOptimizer, UpdateChecks
from schedir.runtime.value_slots import find_freeing_instructions

_PARTIAL_UPDATE_HINT: Final = (
    "the update may be incomplete, with some stages not stepped: resume from a checkpoint"
)


def read_state_from_disk(state: ProgramState, i: Instr) -> Call:
    """Return the call of ReadStateFromDisk: read a stage's optimizer state into a host buffer."""
    placement, start = state.service(OptimizerPlacement), _make_disk_starter(state, i)
    slots, file = state.program.slots, state.service(StateFile)
    buffer_count = slots[state.rank].state_host if slots else UNSHARED_SLOTS
    stage_count = len(state.shape.stages_on_rank[state.rank])
    file.buffer_count = max(file.buffer_count, min(buffer_count, 2 * stage_count))

    return Call(None, partial(placement.read_from_disk, i.stage, start))


def write_state_to_disk(state: ProgramState, i: Instr) -> Call:
    """Return the call of WriteStateToDisk: write the optimizer state of a stage to the disk."""
    placement, start = state.service(OptimizerPlacement), _make_disk_starter(state, i)
    return Call(None, partial(placement.write_to_disk, i.stage, start))


def _make_disk_starter(state: ProgramState, i: Instr) -> StartDiskJob:
    """Return the function with which an instruction starts its job on the disk lane."""
    return state.service(OptimizerPlacement).make_disk_starter(
        state.observer.make_lane_observer, _make_error_wrapper(state, i)
    )


def _make_error_wrapper(state: ProgramState, i: Instr) -> Callable[[Exception], Exception]:
    """Return a function that adds the instruction and a hint to an error."""

    def wrap_error(error: Exception) -> Exception:
        wrapped_error = state.wrap_error(state.index_of[i], error)
        wrapped_error.hint = wrapped_error.hint or _PARTIAL_UPDATE_HINT
        return wrapped_error

    return wrap_error


def reload_state(state: ProgramState, i: Instr) -> Call:
    """Return the call of ReloadState: copy the optimizer state of a stage to the device."""
    placement = state.service(OptimizerPlacement)
    freed_by = find_freeing_instructions(state.program, state.rank, Value.STATE).get(
        state.index_of[i]
    )

    def run() -> None:
        if freed_by is not None:
            placement.finish_offload(state.stream[freed_by].stage)
        placement.reload(i.stage, state.observer.make_lane_observer())

    return Call(None, run)


def stage_optimizer_step(state: ProgramState, i: Instr) -> Call:
    """Return the call of StageOptimizerStep: step the parameters of a stage on the device."""
    placement = state.service(OptimizerPlacement)
    checks = state.service(UpdateChecks)
    optimizer_steps = state.service(RankOptimizer)

    def run() -> None:
        placement.finish_reload(i.stage)
        optimizer_steps.run(checks.check_once(i.mb), partial(placement.step, i.stage))

    update = state.shape.microbatches + i.mb
    run_seeded = state.random_streams.make_seeded(UPDATE, i.stage, update, run)
    return Call(state.service(PendingReductions).wait, run_seeded)


def offload_state(state: ProgramState, i: Instr) -> Call:
    """Return the call of OffloadState: copy the optimizer state of a stage to the host."""
    placement, wrap_error = state.service(OptimizerPlacement), _make_error_wrapper(state, i)

    def run() -> None:
        try:
            placement.offload(i.stage, state.observer.make_lane_observer())
        except OSError as error:
            raise wrap_error(error) from error

    return Call(None, run)


def offload_grads(state: ProgramState, i: Instr) -> Call:
    """Return the call of OffloadGrads: copy the reduced gradients of a stage to the host."""
    placement = state.service(OptimizerPlacement)

    def run() -> None:
        placement.offload_gradients(
            i.stage, is_first_update=not i.mb, observer=state.observer.make_lane_observer()
        )

    return Call(state.service(PendingReductions).wait, run)


def _wait_for_host_grads(state: ProgramState) -> None:
    state.service(PendingReductions).wait()
    state.service(OptimizerPlacement).wait_for_gradients()


def check_grads_finite(state: ProgramState, i: Instr) -> Call:
    """Return the call of CheckGradsFinite: check the gradients of an update.

    The call also clears the gradients, except after the last update of a step.
    """
    checks = state.service(UpdateChecks)

    def run() -> None:
        checks.check_once(i.mb)
        # Keep the gradients of the last update, because the caller may read them.
        if i.mb < state.shape.optimizer_steps - 1:
            state.begin_update()

    return Call(partial(_wait_for_host_grads, state), run)


def host_optimizer_step(state: ProgramState, i: Instr) -> Call:
    """Return the call of HostOptimizerStep: step the parameters of a stage on the host."""
    placement, checks = state.service(OptimizerPlacement), state.service(UpdateChecks)
    make_error = partial(state.wrap_error, state.index_of[i])

    def run() -> None:
        checks.check_once(i.mb)
        placement.start_host_step(i.stage, make_error, state.observer.make_lane_observer())

    return Call(partial(_wait_for_host_grads, state), run)


def reload_weights(state: ProgramState, i: Instr) -> Call:
    """Return the call of ReloadWeights: copy the stepped weights of a stage back to the device."""
    placement = state.service(OptimizerPlacement)
    is_last_update = i.mb == state.shape.optimizer_steps - 1

    def run() -> None:
        placement.reload_weights(
            i.stage, is_last_update=is_last_update, observer=state.observer.make_lane_observer()
        )

    return Call(None, run)


HANDLERS: Final = {
    Opcode.ReadStateFromDisk: read_state_from_disk,
    Opcode.ReloadState: reload_state,
    Opcode.StageOptimizerStep: stage_optimizer_step,
    Opcode.OffloadState: offload_state,
    Opcode.WriteStateToDisk: write_state_to_disk,
    Opcode.OffloadGrads: offload_grads,
    Opcode.CheckGradsFinite: check_grads_finite,
    Opcode.HostOptimizerStep: host_optimizer_step,
    Opcode.ReloadWeights: reload_weights,
}
