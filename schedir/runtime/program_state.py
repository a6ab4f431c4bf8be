"""`ProgramState`: the values, messages and step inputs of one program on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn

from schedir.analysis.memory.buffer_slots import (
    SLOT_KINDS,
    SlotAssignment,
    assign_slots,
    count_slots,
)
from schedir.errors import CommandHint, ExecutionError, InstructionSite, describe_exception
from schedir.ir.isa.instructions import LOCAL_HANDOVER, Instr, Value
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program, Stream
from schedir.runtime.autograd.random_streams import RandomStreams, list_stream_numbers
from schedir.runtime.boundaries.microbatch_boundaries import BoundaryTable
from schedir.runtime.model_checks.first_step_checks import OUTPUT_KINDS, FirstStepChecks
from schedir.runtime.model_checks.memory_overlap import has_same_storage
from schedir.runtime.model_checks.tensor_fingerprint import get_versions
from schedir.runtime.offload.copy_lanes import LaneObserver
from schedir.runtime.rank_resources import RankOptions, RankResources, RankService
from schedir.runtime.services.service import Service, find_or_create
from schedir.runtime.stage_state import StageState
from schedir.runtime.step_inputs import StepInputs
from schedir.runtime.value_slots import OutputSlot, Slot, SlotTable
from schedir.transports.transport import Transport, describe_peer_error


class Call(NamedTuple):
    """The functions with which a rank executes one instruction of its stream.

    Attributes:
        wait: Waits until the inputs of the instruction have arrived. None if the instruction needs
            no wait.
        run: Runs the instruction.
    """

    wait: Callable[[], None] | None
    run: Callable[[], None]


Handler = Callable[["ProgramState", Instr], Call]  # returns the call of an instruction


Callback = Callable[[], None]


@overload
def chain_calls(first: Callback, /, *others: Callback | None) -> Callback: ...
@overload
def chain_calls(*calls: Callback | None) -> Callback | None: ...
def chain_calls(*calls: Callback | None) -> Callback | None:
    """Return a function that calls the given functions in order.

    Args:
        *calls: Functions without arguments. None entries are skipped.

    Returns:
        A function, or None if there are no functions. A single function is returned unchanged. For
        two functions the result has no loop, to save time in every step.
    """
    present_calls = [call for call in calls if call is not None]
    if len(present_calls) < 2:
        return present_calls[0] if present_calls else None
    first, *middle, last = present_calls

    def call_both() -> None:
        first()
        last()

    def call_all() -> None:
        for call in present_calls:
            call()

    return call_all if middle else call_both


def run_all(calls: Sequence[Callback]) -> None:
    """Call all functions in order, even if some of them raise an error.

    The last error is raised. The earlier errors are its context, and so is the error that the
    caller handles. An `ExitStack` would drop the error that the caller handles.

    Args:
        calls: Functions without arguments.
    """
    if calls:
        try:
            calls[0]()
        finally:
            run_all(calls[1:])


_ProgramKind = TypeVar("_ProgramKind", bound="ProgramService")
_RankKind = TypeVar("_RankKind", bound=RankService)


class WorkObserver:
    """Observes the work that instructions start. This base class observes nothing."""

    def attribute_to(self, k: int) -> AbstractContextManager[object]:
        """Return a context. Work that starts within the context belongs to instruction `k`.

        Args:
            k: The index of the instruction in the stream.
        """
        return nullcontext()

    def make_lane_observer(self) -> LaneObserver | None:
        """Return the observer of the current instruction's work on a lane of the rank."""
        return None


class ProgramState:
    """The state of one program on a rank: its slots, pending messages and step inputs.

    Handlers read this state when they create the calls of instructions. `resources` has the state
    that all programs of the rank share. `index_of` maps an instruction (op, stage, mb) to its index
    in the stream.

    Args:
        program: The program.
        resources: The resources of the rank.
        transport: The transport, which may be a wrapper that records timestamps.
        boundaries: The boundaries of the program, by microbatch.
        observer: Observes the work that instructions start. By default there is no observer.
    """

    def __init__(
        self,
        program: Program,
        resources: RankResources,
        transport: Transport,
        boundaries: BoundaryTable,
        observer: WorkObserver | None = None,
    ) -> None:
        self.program = program
        self.shape: PipelineShape = program.shape
        self.resources = resources
        self.transport = transport
        self.boundaries = boundaries
        self.observer: WorkObserver = observer or WorkObserver()
        self.rank: int = resources.rank
        self.device: torch.device = resources.device
        self.stages: dict[int, StageState] = resources.stages
        self.random_streams: RandomStreams = resources.random_streams
        self.stream: Stream = program.streams[resources.rank]
        self.index_of: dict[tuple[int, ...], int] = {i: k for k, i in enumerate(self.stream)}
        self.services: dict[type[Service], Service] = {}
        self.is_evaluating = False
        self.batch: StepInputs = StepInputs()
        self.losses: list[Tensor] = [torch.zeros((), device=self.device)] * self.shape.microbatches
        self.slot_assignment: SlotAssignment = assign_slots(program, self.rank)
        slot_counts = count_slots(program)[self.rank].tolist()
        self.slot_tables: dict[Value, SlotTable] = dict(
            zip(SLOT_KINDS, map(SlotTable, slot_counts), strict=True)
        )
        self.first_step_checks: FirstStepChecks = FirstStepChecks(
            self.slot_tables, self.slot_assignment, self.device
        )

    @property
    def options(self) -> RankOptions:
        """The loss and the options of the rank."""
        return self.resources.options

    @overload
    def service(self, kind: type[_ProgramKind]) -> _ProgramKind: ...
    @overload
    def service(self, kind: type[_RankKind]) -> _RankKind: ...
    def service(self, kind: Any) -> Any:
        """Return the service of a class. The first call creates it.

        Args:
            kind: The class: a subclass of `ProgramService` for a service of this program, or of
                `RankService` for a service that all programs of the rank share.
        """
        if issubclass(kind, RankService):
            return self.resources.service(kind)
        return find_or_create(self.services, kind, self)

    def list_services(self) -> list[Service]:
        """Return the services of the rank, and then the services of the program."""
        return [*self.resources.services.values(), *self.services.values()]

    def list_modules(self) -> list[nn.Module]:
        """Return the modules of the local stages, and the loss if it is a module."""
        return [*(stage.module for stage in self.stages.values()), *self.options.loss_modules]

    def require_inputs(self, batch: StepInputs) -> None:
        """Check that the inputs of a step are complete for this rank.

        Args:
            batch: The inputs of the step.

        Raises:
            ExecutionError: An input, target or keyword mapping of a microbatch is missing.
        """
        batch.require_complete(
            self.program,
            self.rank,
            has_first_stage=0 in self.stages,
            has_last_stage=self.shape.stages - 1 in self.stages,
        )

    def begin_step(self, batch: StepInputs) -> None:
        """Prepare a step or an evaluation.

        Args:
            batch: The inputs of the step.
        """
        microbatches = self.shape.microbatches
        stream_numbers = list_stream_numbers(
            microbatches,
            self.resources.shard_spec.replica * microbatches,
            self.shape.optimizer_steps,
        )
        if self.is_evaluating:
            self.random_streams.begin_without_update(stream_numbers)
        else:
            self.random_streams.begin_step(stream_numbers)
        self.first_step_checks.begin_step()
        self.batch = batch
        self.resources.ties.copy_shared_parameters()
        self.begin_update()
        for service in self.list_services():
            service.begin_step()

    def finish_step(self) -> Tensor | None:
        """End a step or an evaluation: finish all services, and restore the parameters.

        Returns:
            The sum of the losses, 0-dimensional, on a rank with the last stage, and None on other
            ranks.

        Raises:
            ModelError: A check of the first step failed, or a stage wrote to weights that it must
                not change.
        """
        total_loss = None
        if self.shape.stages - 1 in self.stages:
            # Sum in the order of microbatches, so that the order of execution does not change the
            # bits of the sum. Sum before `on_step_end`, because a loss may be in the memory of a
            # received message, which a peer may then overwrite.
            total_loss = sum(self.losses, torch.zeros((), device=self.device))
        for service in self.list_services():
            service.finish_step()
        self.transport.on_step_end()
        self.restore_parameters()
        self.first_step_checks.end_step(self.losses)
        return total_loss

    def save_loss(self, mb: int, loss: Tensor, inputs: Sequence[Tensor]) -> None:
        """Store the loss of a microbatch. Copy it if it shares memory with the stage's inputs.

        Args:
            mb: The microbatch.
            loss: The loss, 0-dimensional.
            inputs: The inputs of the last stage.
        """
        value = loss.detach()
        if any(has_same_storage(value, x) for x in inputs):
            value = value.clone()
        self.losses[mb] = value
        if self.first_step_checks.is_active:
            self.first_step_checks.loss_versions[mb] = get_versions((value,))

    def begin_update(self) -> None:
        """Prepare an update: call `begin_update` of services, and set gradients to zero."""
        self.resources.ties.begin_update()
        for service in self.list_services():
            service.begin_update()
        for number, stage in () if self.is_evaluating else self.stages.items():
            stage.gradients.zero(f" of stage {number}")

    def find_slot(self, kind: Value, stage: int, mb: int, index: int | None = None) -> Slot:
        """Return the slot of a value.

        If another stage of this rank computes the value, the result is the output slot of that
        stage.

        Args:
            kind: The kind of the value.
            stage: The number of the stage.
            mb: The microbatch.
            index: The index in the stream of the instruction that reads or fills the slot. The
                index matters only if the value is in several slots, one after the other. By default
                the method returns the last of these slots.
        """
        if (kind, stage, mb) not in self.slot_assignment and kind in LOCAL_HANDOVER:
            stage = self.program.peer_stage(kind, stage)
            kind, _ = LOCAL_HANDOVER[kind]
        fills = self.slot_assignment[kind, stage, mb]
        last_fill = max(fill for fill in fills if index is None or fill <= index)
        if kind in OUTPUT_KINDS:
            return OutputSlot(self.slot_tables[kind], fills[last_fill], kind, stage, mb)
        return Slot(self.slot_tables[kind], fills[last_fill])

    def get_outgoing_tensors(self, kind: Value, stage: int, mb: int) -> Sequence[Tensor]:
        """Return the tensors of a value that a stage computed for another stage.

        No send and no other stage may have used the value yet. No instruction may have sliced or
        packed it yet.

        Args:
            kind: The kind of the value: an output, or the gradient of an input.
            stage: The stage that computed the value.
            mb: The microbatch.
        """
        value = self.find_slot(kind, stage, mb).peek()
        if isinstance(value, tuple):
            return value
        layout = self.boundaries[mb].get_value_tensors(kind, stage)
        return (value,) if layout.is_single_tensor else layout.place_tensors(value)[1]

    def restore_parameters(self) -> None:
        """Restore the parameters of all modules to their state between steps."""
        run_all(
            [
                *(service.restore for service in self.list_services()),
                *(stage.local_ties.restore for stage in self.stages.values()),
            ]
        )

    def abort_step(self, step_number: int, *, has_begun: bool) -> None:
        """Clean up after an error in a step.

        Modules get their original parameters back. If an instruction of the step had begun, the
        method also undoes the last update, unless it is validated. If no instruction had begun,
        this update stays, and the next step has the number of this step.

        Args:
            step_number: The number of the step, which determines the step's random numbers.
            has_begun: True if an instruction of the step had begun before the error.
        """
        if not has_begun:
            self.random_streams.step = step_number
        fail_calls = [partial(s.fail, has_begun=has_begun) for s in self.list_services()]
        run_all([self.restore_parameters, *fail_calls])

    def require_no_failed_step(self) -> None:
        """Raise ExecutionError if an earlier step failed."""
        if self.resources.is_in_step:
            raise ExecutionError(
                f"an earlier step failed on rank {self.rank}, so messages may still be in transit",
                program=self.program.name,
                hint="create a new executor and a new transport",
            )

    def wrap_error(self, index: int | None, error: Exception) -> ExecutionError:
        """Convert an error to an `ExecutionError` that names an instruction.

        An error that already names an instruction keeps this instruction. Such an error comes from
        an earlier instruction, whose work failed on its lane.

        Args:
            index: The index of the current instruction in the stream. None if all instructions
                have ended.
            error: The error.
        """
        if isinstance(error, ExecutionError) and error.sites:
            return ExecutionError(
                error.fact, program=error.program, sites=error.sites, hint=error.hint
            )
        peer_fact = describe_peer_error(error)
        fact, sites, hint = peer_fact or describe_exception(error), [], getattr(error, "hint", "")
        fact += "".join(f"; {note}" for note in getattr(error, "__notes__", ()) if len(note) < 300)
        if peer_fact:
            hint = hint or CommandHint(
                "if another process failed, its error is the cause; otherwise all processes must "
                "call step and evaluate equally often",
                "another process failed: its error is the cause",
            )
        if index is None:
            fact = f"after the last instruction of rank {self.rank}: {fact}"
        else:
            sites = [InstructionSite(self.rank, index, self.stream[index], "failed")]
        return ExecutionError(fact, program=self.program.name, sites=sites, hint=hint)

    def find_local_stage(self, stage: int, mb: int) -> StageState | None:
        """Return a stage if this rank runs it for a microbatch, and None otherwise.

        Values between two local stages need no message.

        Args:
            stage: The number of the stage.
            mb: The microbatch.
        """
        if stage not in self.stages or self.shape.rank_of_stage(stage, mb) != self.rank:
            return None
        return self.stages[stage]


class ProgramService(Service):
    """The state of a feature for one program of a rank.

    Args:
        state: The state of the program.
    """

    def __init__(self, state: ProgramState) -> None:
        self.state = state
