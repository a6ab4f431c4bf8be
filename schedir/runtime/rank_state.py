"""State: the values, messages and linked calls of one program on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple, Self, TypeVar, overload

import torch
from torch import Tensor

from schedir.analysis.memory.buffer_slots import (
    SLOT_KINDS,
    assign_slots,
    count_slots,
    find_slot_reuses,
)
from schedir.errors import ExecutionError, InstructionSite, describe_exception
from schedir.ir.isa.instructions import (
    INSTRUCTIONS,
    LOCAL_HANDOVER,
    SEND_OPS,
    TP_SPLIT_OPS,
    Instr,
    Opcode,
    PeerRule,
    Value,
)
from schedir.ir.program import Program
from schedir.runtime.autograd.random_streams import list_stream_numbers
from schedir.runtime.boundaries.boundary_table import BoundaryTable
from schedir.runtime.model_checks.first_step_checks import OUTPUT_KINDS, FirstStepChecks
from schedir.runtime.model_checks.memory_overlap import has_same_storage
from schedir.runtime.model_checks.tensor_fingerprint import get_versions
from schedir.runtime.offload.copy_lanes import LaneObserver
from schedir.runtime.parameters.mixed_precision import OptimizerLike
from schedir.runtime.rank_resources import RankResources, RankService
from schedir.runtime.services.service import Service, find_or_create
from schedir.runtime.stage_state import StageState
from schedir.runtime.step_inputs import StepInputs
from schedir.runtime.value_slots import OutputSlot, Slot, SlotTable
from schedir.transports.transport import Transport, Work, allocate_bytes, describe_peer_error

# ---------------------------------------------------------------- implied acknowledgements

# Gloo has no query for the completion of a send, only a wait. A wait that comes too early may block
# the receiver. But a message from the receiver, sent after it used the first message, proves that
# the first message has arrived.


# For each opcode, the send opcodes whose values it consumes, with the direction of their stage.
_SENDS_BY_CONSUMER: Final = {
    row.op: [
        (send, LOCAL_HANDOVER[token][1])
        for token in row.needs
        for send in SEND_OPS
        if token in LOCAL_HANDOVER and LOCAL_HANDOVER[token][0] in INSTRUCTIONS[send].needs
    ]
    for row in INSTRUCTIONS
}


def find_implied_acks(program: Program, rank: int) -> dict[int, list[int]]:
    """Return, for each receive of a rank, the sends whose arrival it proves.

    Args:
        program: The program.
        rank: The pipeline rank.

    Returns:
        By the index of a receive in the stream, the indices of the sends. Each send is listed once,
        with the first receive that proves its arrival, if there is one.
    """
    stream = program.streams[rank]
    neighbors = {hop: program.neighbor_stages(hop).tolist() for hop in PeerRule}
    index_of: dict[tuple[int | None, ...], int] = {instr: k for k, instr in enumerate(stream)}
    peers = {program.peer_rank(i) for i in stream if i.op in SEND_OPS}
    acks: dict[int, list[int]] = {}
    for peer in peers:
        used: list[int] = []  # Sends that the peer used since its last send to this rank.
        for op, stage, mb in program.streams[peer]:
            row = INSTRUCTIONS[op]
            for send, hop in _SENDS_BY_CONSUMER[op]:
                k = index_of.pop((send, neighbors[hop][stage], mb), None)
                used += [k] if k is not None else []
            if row.peer and op in SEND_OPS and used:
                receive = index_of.get((row.partner, neighbors[row.peer][stage], mb))
                if receive is not None:
                    acks[receive], used = used, []
    return acks


class Call(NamedTuple):
    """A linked instruction.

    Attributes:
        wait: Waits until the inputs of the instruction have arrived. None if it needs no wait.
        run: Runs the instruction.
    """

    wait: Callable[[], None] | None
    run: Callable[[], None]


Handler = Callable[["State", Instr], Call]  # Links an instruction.


Callback = Callable[[], None]


@overload
def chain_calls(first: Callback, /, *others: Callback | None) -> Callback: ...
@overload
def chain_calls(*calls: Callback | None) -> Callback | None: ...
def chain_calls(*calls: Callback | None) -> Callback | None:
    """Return a function that makes the given calls in order.

    Args:
        *calls: Functions without arguments. None entries are skipped.

    Returns:
        None if there are no calls. A single call is returned as it is. A chain of two has no loop,
        because it runs in every step.
    """
    present = [call for call in calls if call is not None]
    if len(present) < 2:
        return present[0] if present else None
    first, *between, last = present

    def both() -> None:
        first()
        last()

    def all_of() -> None:
        for call in present:
            call()

    return all_of if between else both


_ProgramKind = TypeVar("_ProgramKind", bound="ProgramService")
_RankKind = TypeVar("_RankKind", bound=RankService)


class State:
    """The state of one program on a rank: its slots, pending messages and step inputs.

    Handlers link instructions to this state. `resources` has the state that all programs of the
    rank share. `index_of` maps an instruction (op, stage, mb) to its index in the stream.

    Args:
        program: The program.
        resources: The resources of the rank.
        transport: The transport, which may be a wrapper that records timestamps.
        boundaries: The tensors that pass between stages.
        program_number: The index of the program among those of the rank.
    """

    def __init__(
        self,
        program: Program,
        resources: RankResources,
        transport: Transport,
        boundaries: BoundaryTable,
        program_number: int = 0,
    ) -> None:
        self.program, self.shape = program, program.shape
        self.rank = rank = resources.rank
        self.resources, self.transport, self.boundaries = resources, transport, boundaries
        self.program_number = program_number
        self.stages, self.random_streams, self.device = (
            resources.stages,
            resources.random_streams,
            resources.device,
        )
        self.loss, self.tied_weights, self.shard_spec = (
            resources.loss,
            resources.tied_weights,
            resources.shard_spec,
        )
        self.loss_scale = resources.loss_scale
        self.accumulate_grads, self.debug = resources.accumulate_grads, resources.debug
        self.stream, self.has_backward = program.streams[rank], program.has_backward
        self.is_evaluating = self.has_evaluated = False  # `has_evaluated`: at least once.
        self.services: dict[type[Service], Service] = {}
        self.batch = StepInputs()
        self.losses = [torch.zeros((), device=self.device)] * self.shape.microbatches
        # Sends that may not have arrived, by index in the stream, with the sent tensor.
        self.pending_sends: dict[int, tuple[Work, Tensor]] = {}
        # Within the context `record_as(k)`, the recorder attributes started work to instruction k.
        self.record_as: Callable[[int], AbstractContextManager[object]] = nullcontext
        # Returns the observer of the begin and end of an instruction's work on a lane of the rank.
        self.get_lane_observer: Callable[[], LaneObserver | None] = lambda: None
        # For each receive, the sends whose arrival it proves. Both are indices in the stream.
        self.implied_acks = find_implied_acks(program, rank)
        self.index_of: dict[tuple[int, ...], int] = {i: k for k, i in enumerate(self.stream)}
        self.slot_assignment = assign_slots(program, rank)
        self.slot_tables = dict(
            zip(SLOT_KINDS, map(SlotTable, count_slots(program)[rank].tolist()), strict=True)
        )
        self.receive_buffers = resources.receive_buffers
        self.first_step_checks = FirstStepChecks(
            self.slot_tables, self.slot_assignment, self.receive_buffers, self.device
        )
        self.sends_before_reuse = _find_sends_before_reuse(program, rank)

    @property
    def optimizer(self) -> OptimizerLike | None:
        """The optimizer of the rank."""
        return self.resources.optimizer

    @overload
    def service(self, kind: type[_ProgramKind]) -> _ProgramKind: ...
    @overload
    def service(self, kind: type[_RankKind]) -> _RankKind: ...
    def service(self, kind: Any) -> Any:
        """Return the service of a kind, which the first call creates.

        Args:
            kind: A subclass of `ProgramService`, whose service only this program has, or of
                `RankService`, whose service all programs of the rank share.
        """
        if issubclass(kind, RankService):
            return self.resources.service(kind)
        return find_or_create(self.services, kind, self)

    def list_services(self) -> list[Service]:
        """Return the services of the rank and those of the program, in order of creation."""
        return [*self.resources.services.values(), *self.services.values()]

    def require_inputs(self, batch: StepInputs) -> None:
        """Check that the inputs of a step are complete for this rank.

        Args:
            batch: The inputs of the step.

        Raises:
            ExecutionError: An input, target or keyword mapping of a microbatch is missing.
        """
        first, last = (s in self.stages for s in (0, self.shape.stages - 1))
        batch.require_complete(self.program, self.rank, has_first_stage=first, has_last_stage=last)

    def begin_step(self, batch: StepInputs) -> None:
        """Prepare a step or an evaluation.

        Args:
            batch: The inputs of the step.
        """
        microbatches = self.shape.microbatches
        numbers = list_stream_numbers(
            microbatches, self.shard_spec.replica * microbatches, self.shape.optimizer_steps
        )
        if self.is_evaluating:
            self.random_streams.begin_without_update(numbers)
        else:
            self.random_streams.begin_step(numbers)
        self.transport.on_step_begin(self.program_number)
        self.first_step_checks.begin_step()
        self.batch = batch
        for shared, copy in self.resources.parameter_copies.items():
            if copy is not shared:
                copy.detach().copy_(shared.detach())
        self.begin_update()
        for service in self.list_services():
            service.begin_step()

    def finish_step(self) -> Tensor | None:
        """End a step or an evaluation: wait for pending sends, and restore the parameters.

        Returns:
            The sum of the losses, 0-dimensional, on a rank with the last stage, and None on other
            ranks.

        Raises:
            ModelError: A check of the first step failed, or a stage wrote to weights that it must
                not write to.
        """
        for work, _ in self.pending_sends.values():
            work.wait()
        self.pending_sends.clear()
        total = None
        if self.shape.stages - 1 in self.stages:
            # Sum by microbatch, so the order of execution does not change the bits. Sum before
            # `on_step_end`, because a loss may be in receive memory.
            total = sum(self.losses, torch.zeros((), device=self.device))
        for service in self.list_services():
            service.finish_step()
        self.transport.on_step_end()
        self.restore_parameters()
        self.first_step_checks.end_step(self.losses)
        return total

    def save_loss(self, mb: int, loss: Tensor, inputs: Sequence[Tensor]) -> None:
        """Store the loss of a microbatch, or a copy if it shares memory with the stage's inputs.

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
        """Prepare an update: set gradients to zero, and prepare the sharded weights."""
        for alias, one in self.resources.aliases.items():
            # The caller may have replaced the `data` of the Parameter.
            if not self.shard_spec.zero and alias.data_ptr() != one.data_ptr():
                alias.data = one.data
            if self.accumulate_grads:
                alias.grad = None
        for service in self.list_services():
            service.begin_update()
        for stage in () if self.is_evaluating else self.stages.values():
            stage.gradients.zero()

    def find_slot(self, kind: Value, stage: int, mb: int, index: int | None = None) -> Slot:
        """Return the slot of a value.

        Args:
            kind: The kind of the value.
            stage: The stage.
            mb: The microbatch.
            index: The index in the stream of the instruction that reads or fills the slot. A value
                may be in several slots, one after the other. The default is the last one.
        """
        fills = self.slot_assignment[kind, stage, mb]
        last = max(fill for fill in fills if index is None or fill <= index)
        if kind in OUTPUT_KINDS:
            return OutputSlot(self.slot_tables[kind], fills[last], kind, stage, mb)
        return Slot(self.slot_tables[kind], fills[last])

    def get_send_buffer(
        self, kind: Value, number: int, form_changes: tuple[Opcode, ...]
    ) -> Tensor | None:
        """Return the memory from which the value in a slot is sent. It is allocated once.

        Args:
            kind: The kind of the value.
            number: The number of its slot.
            form_changes: The opcodes that changed the form of the value.

        Returns:
            A flat uint8 tensor, or None if the transport sends a value from the memory in which it
            was computed. The next instruction that fills the slot waits for the send, or runs in a
            later step.
        """
        buffers = self.resources.send_buffers
        if self.transport.uses_static_buffers and (kind, number, form_changes) not in buffers:
            split = any(op in TP_SPLIT_OPS for op in form_changes)
            size = self.resources.buffer_sizes[kind][number] // (self.program.tp if split else 1)
            buffers[kind, number, form_changes] = allocate_bytes(self.device, size)
        return buffers.get((kind, number, form_changes))

    def get_outgoing_tensors(self, kind: Value, stage: int, mb: int) -> Sequence[Tensor]:
        """Return the tensors of a value that is in its slot, before it is sent or handed over.

        Args:
            kind: The kind of the value, an output or the gradient of an input.
            stage: The stage that computed it.
            mb: The microbatch.
        """
        value = self.find_slot(kind, stage, mb).peek()
        if isinstance(value, tuple):
            return value
        carried = self.boundaries[mb].get_value_tensors(kind, stage)
        return (value,) if carried.is_single_tensor else carried.place_tensors(value)[1]

    def complete_send(self, send: int) -> None:
        """Wait for a send if it is pending, and then free the sent tensor.

        Args:
            send: The index of the send in the stream.
        """
        if send in self.pending_sends:
            work, tensor = self.pending_sends.pop(send)
            work.wait()
            del tensor  # Not before the wait: on a GPU the memory may be reused at once.

    def restore_parameters(self) -> None:
        """Restore the parameters of all modules to their state between steps."""
        for service in self.list_services():
            service.restore()
        for stage in self.stages.values():
            stage.restore_parameters()

    def abort_step(self, *, has_begun: bool) -> None:
        """Clean up after an error in a step.

        Modules get their own parameters back. An update that is not validated is undone if the step
        had begun, and stays guarded if it had not.

        Args:
            has_begun: True if an instruction of the step had begun.
        """
        self.restore_parameters()
        for service in self.list_services():
            service.fail(has_begun=has_begun)

    def require_no_failed_step(self) -> None:
        """Raise ExecutionError if an earlier step failed."""
        if self.resources.is_in_step:
            raise ExecutionError(
                f"an earlier step failed on rank {self.rank}, so messages may still be in transit",
                program=self.program.name,
                hint="create a new executor and a new transport",
            )

    def wrap_error(self, index: int, error: Exception) -> ExecutionError:
        """Return an error as the `ExecutionError` of an instruction.

        An `ExecutionError` that already names an instruction keeps it. It comes from an earlier
        instruction whose work failed later on its lane.

        Args:
            index: The index of the current instruction in the stream.
            error: The error.
        """
        if isinstance(error, ExecutionError) and error.sites:
            return ExecutionError(
                error.fact, program=error.program, sites=error.sites, hint=error.hint
            )
        return ExecutionError(
            describe_peer_error(error) or describe_exception(error),
            program=self.program.name,
            sites=[InstructionSite(self.rank, index, self.stream[index], "failed")],
            hint=getattr(error, "hint", ""),
        )

    def find_local_stage(self, stage: int, mb: int) -> StageState | None:
        """Return a stage if this rank runs it for a microbatch, and None otherwise.

        Values between two such stages are handed over without a message.

        Args:
            stage: The number of the stage.
            mb: The microbatch.
        """
        if stage not in self.stages or self.shape.rank_of_stage(stage, mb) != self.rank:
            return None
        return self.stages[stage]


class ProgramService(Service):
    """The state of a feature that each program of a rank has for itself.

    Args:
        state: The state of the program.
    """

    def __init__(self, state: State) -> None:
        self.state = state

    @classmethod
    def create(cls, owner: State) -> Self:
        """Create the service of a program.

        Args:
            owner: The state of the program.
        """
        return cls(owner)


def _find_sends_before_reuse(program: Program, rank: int) -> dict[int, list[int]]:
    """Return, for each instruction that reuses slots, the sends that must end first (indices)."""
    sends: dict[int, list[int]] = {}
    stream = program.streams[rank]
    for _, fill, free in _find_slot_reuses(program, rank):
        if stream[free].op in SEND_OPS:
            sends.setdefault(fill, []).append(free)
    return sends


def find_freeing_instructions(program: Program, rank: int, kind: Value) -> dict[int, int]:
    """Return, for each instruction that reuses a slot, the instruction that freed the slot.

    Args:
        program: The program.
        rank: The pipeline rank.
        kind: The kind of values in the slots.

    Returns:
        Both instructions as indices in the stream of the rank.
    """
    return {fill: free for _, fill, free in _find_slot_reuses(program, rank, kind)}


def _find_slot_reuses(
    program: Program, rank: int, *kinds: Value
) -> Iterator[tuple[Value, int, int]]:
    """Yield (kind, fill, free) for each reuse of a slot of these kinds; by default of all kinds.

    `fill` is the index in the stream of the instruction that fills the slot again, and `free` the
    index of the one that freed it.
    """
    lo, end = map(int, program.offsets[rank : rank + 2])
    for kind, (fills, frees) in find_slot_reuses(program).items():
        for fill, free in zip(fills.tolist(), frees.tolist(), strict=True):
            if lo <= fill < end and (kind in kinds or not kinds):
                yield kind, fill - lo, free - lo
