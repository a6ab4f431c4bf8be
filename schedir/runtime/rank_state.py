"""State: the values, messages and linked calls of one program on one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, NamedTuple, overload

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
from schedir.ir.program import UNSHARED_SLOTS, Program
from schedir.runtime.autograd.random_streams import list_stream_numbers
from schedir.runtime.boundaries.boundary_table import BoundaryTable
from schedir.runtime.model_checks.first_step_checks import OUTPUT_KINDS, FirstStepChecks
from schedir.runtime.model_checks.memory_overlap import has_same_storage
from schedir.runtime.model_checks.tensor_fingerprint import get_versions
from schedir.runtime.offload.activation_offloader import OffloadMoves
from schedir.runtime.offload.copy_lanes import LaneObserver
from schedir.runtime.parameters.mixed_precision import step_if_finite
from schedir.runtime.parameters.overlapped_reduction import (
    GradientReduction,
    find_last_accumulations,
)
from schedir.runtime.parameters.sharded_parameters import guard_shard_step
from schedir.runtime.parameters.weight_versions import WeightVersions
from schedir.runtime.rank_resources import RankResources
from schedir.runtime.stage_state import StageState
from schedir.runtime.step_inputs import StepInputs
from schedir.runtime.value_slots import OutputSlot, Slot, SlotTable
from schedir.transports.transport import Transport, Work, allocate_bytes, describe_peer_error

# ---------------------------------------------------------------- implied arrivals

# Gloo cannot tell whether a send has ended.  It can only wait for it, and a wait that comes too
# early may block the receiver.  But a message from the receiver, sent after it used the first
# message, proves that the first one has arrived.


# Who takes in what another stage sent: which sends these are, and where their stage is.
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
    """For receives of a rank, the sends that have arrived when it has; both by index.

    Each send is there once, with the first receive that proves it, if there is one.
    """
    own, there = (
        program.streams[rank],
        {hop: program.neighbor_stages(hop).tolist() for hop in PeerRule},
    )
    where: dict[tuple[int | None, ...], int] = {instr: k for k, instr in enumerate(own)}
    peers = {program.peer_rank(i) for i in own if i.op in SEND_OPS}
    known: dict[int, list[int]] = {}
    for peer in peers:
        used: list[int] = []  # since the peer's last send to this rank
        for op, stage, mb in program.streams[peer]:
            row = INSTRUCTIONS[op]
            for send, hop in _SENDS_BY_CONSUMER[op]:
                k = where.pop((send, there[hop][stage], mb), None)
                used += [k] if k is not None else []
            if row.peer and op in SEND_OPS and used:
                back = where.get((row.partner, there[row.peer][stage], mb))
                if back is not None:
                    known[back], used = used, []
    return known


_TIED_RANDOM_WARNING = (
    "an optimizer draws random numbers, others for each copy of a tied weight: they drift apart"
)


class Call(NamedTuple):
    """A linked instruction: first wait for what must have arrived, if anything, then run."""

    wait: Callable[[], None] | None
    run: Callable[[], None]


Handler = Callable[["State", Instr], Call]  # links an instruction


Callback = Callable[[], None]


@overload
def chain_calls(first: Callback, /, *others: Callback | None) -> Callback: ...
@overload
def chain_calls(*calls: Callback | None) -> Callback | None: ...
def chain_calls(*calls: Callback | None) -> Callback | None:
    """What makes those of these calls that there are, one after the other; None if there are none.

    In a step nothing is looked up any more: two are called as they are.
    """
    made = [call for call in calls if call is not None]
    if len(made) < 2:
        return made[0] if made else None
    first, *between, last = made

    def both() -> None:
        first()
        last()

    def all_of() -> None:
        for call in made:
            call()

    return all_of if between else both


class State:
    """A program on a rank: slots of its values, what is on its way, and what the step was given.

    This is what handlers link instructions to.  What the rank has, whatever it runs, is
    `resources`.
    `index_of` finds an instruction (op, stage, mb) in the rank's Stream.
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
        self.program_number = program_number  # of the program, among those that the rank runs
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
        self.optimizer, self.loss_scale = resources.optimizer, resources.loss_scale
        self.optimistic_step = (
            resources.optimistic_step if program.norm_check == "after_step" else None
        )
        self.accumulate_grads, self.debug = resources.accumulate_grads, resources.debug
        self.stream, self.has_backward = program.streams[rank], program.has_backward
        self.is_evaluating = self.has_evaluated = (
            False  # between steps, where nothing is changed; or it has
        )
        self.weight_versions: dict[int, WeightVersions] = {}  # of weights, by stage
        for s, stage in (
            self.stages.items() if self.has_backward and self.shape.optimizer_steps > 1 else ()
        ):
            if s >= program.frozen_stages:
                own = ((k, i) for k, i in enumerate(self.stream) if i.stage == s)
                self.weight_versions[s] = stage.create_weight_versions(self.shape, own)
        self.batch = StepInputs()
        self.grad_scale: float | Tensor = 1.0  # by which sums of gradients are multiplied
        self.loss_gradient: Tensor | None = None  # with which backwards begin, where it is not 1
        self.losses = [torch.zeros((), device=self.device)] * self.shape.microbatches
        self.grad_norm = torch.zeros((), dtype=torch.float64, device=self.device)
        # Of updates that nobody has judged, the sum of squares of all gradients: a rank that adds
        # to none may be told that of the next one before.
        self.squared_norms: dict[int, Tensor] = {}
        self.finite_updates = torch.ones(
            self.shape.optimizer_steps, dtype=torch.bool, device=self.device
        )
        # Under way: what is sent, by index in the Stream, as long as it may not have arrived, and
        # reductions that nobody has waited for.
        self.pending_sends: dict[int, tuple[Work, Tensor]] = {}
        self.pending_reductions: list[Work] = []
        self.pending_reduce_scatters: deque[tuple[int, list[Work]]] = (
            deque()
        )  # by index, the first first
        # Sums over replicas, and what each begins under, unless they are `reduce_after_backward`.
        self.reductions: dict[Instr, GradientReduction] = {}
        self.overlapped_reductions = find_last_accumulations(self.stream) if program.dp > 1 else {}
        self.reduce_after_backward = False
        # Within `as_of(k)` the recorder counts what is started as instruction k's.
        self.record_as: Callable[[int], AbstractContextManager[object]] = nullcontext
        # Whom an instruction tells when it begins and ends on a lane of the rank's, if anybody.
        self.get_lane_observer: Callable[[], LaneObserver | None] = lambda: None
        # For receives, by index in the Stream, the sends that have arrived when they have.
        self.implied_acks = find_implied_acks(program, rank)
        self.index_of: dict[tuple[int, ...], int] = {i: k for k, i in enumerate(self.stream)}
        self.slot_assignment = assign_slots(program, rank)
        self.slot_tables = dict(
            zip(SLOT_KINDS, map(SlotTable, count_slots(program)[rank].tolist()), strict=True)
        )
        self.receive_buffers = resources.receive_buffers
        parts = [
            stage.sharded_parameters
            for stage in self.stages.values()
            if stage.sharded_parameters is not None
        ]
        self.first_step_checks = FirstStepChecks(
            self.slot_tables, self.slot_assignment, self.receive_buffers, parts, self.device
        )
        self.sends_before_reuse = _find_sends_before_reuse(program, rank)
        # For what adds to a gradient that is whole anew, the reduction whose room that takes.
        self.gradient_freed_by = find_freeing_instructions(program, rank, Value.WGRAD)
        self.is_update_finite: Tensor | None = None  # on an update that is made stage by stage
        self.clip_factor: Tensor | None = None  # what an update's gradients were multiplied by
        # For what fills a slot of what forwards save, who has left it; and what of that is moved.
        self.saved_freed_by = find_freeing_instructions(program, rank, Value.SAVED)
        self.offload_moves = OffloadMoves(
            has_fixed_slots=bool(program.slots) and program.slots[rank].saved != UNSHARED_SLOTS
        )

    def require_inputs(self, batch: StepInputs) -> None:
        """Raise ExecutionError where the rank takes microbatches, and is not given all."""
        first, last = (s in self.stages for s in (0, self.shape.stages - 1))
        batch.require_complete(self.program, self.rank, has_first_stage=first, has_last_stage=last)

    def begin_step(self, batch: StepInputs) -> None:
        """Make ready for a step, or to look at what there is."""
        own = self.shape.microbatches
        numbers = list_stream_numbers(
            own, self.shard_spec.replica * own, self.shape.optimizer_steps
        )
        if self.is_evaluating:
            self.random_streams.begin_without_update(numbers)
        else:
            self.random_streams.begin_step(numbers)
        self.is_update_finite = None
        self.transport.on_step_begin(self.program_number)
        self.first_step_checks.begin_step()
        self.batch, self.grad_scale = batch, batch.grad_scale
        if self.loss_scale is not None:
            gradient = (self.loss_scale.value * self.grad_scale).float()
            if self.loss_gradient is None:
                self.loss_gradient = gradient
            else:  # in its place, where a graph reads it
                self.loss_gradient.copy_(gradient)
            self.grad_scale = self.loss_scale.inverse
        for shared, copy in self.resources.parameter_copies.items():
            if copy is not shared:
                copy.detach().copy_(shared.detach())
        if self.resources.host_optimizer_state is not None:
            self.resources.host_optimizer_state.to_resting_state()
        self.begin_update()
        for versions in self.weight_versions.values():
            versions.begin_step()

    def finish_step(self) -> Tensor | None:
        """End a step: wait for what is still on its way out; returns the sum of losses on the rank
        of the last stage, and None elsewhere."""
        for work, _ in self.pending_sends.values():
            work.wait()
        self.pending_sends.clear()
        total = None
        if self.shape.stages - 1 in self.stages:
            # By microbatch, whatever their order was; a loss may lie in what was received.
            total = sum(self.losses, torch.zeros((), device=self.device))
        if not self.is_evaluating:
            self.resources.get_last_update_result = self.get_update_result
        for stage in self.stages.values() if self.is_evaluating else ():
            if stage.sharded_parameters is not None:
                stage.sharded_parameters.require_unwritten()
        for versions in self.weight_versions.values():
            versions.end_step()
        self.transport.on_step_end()
        self.restore_parameters()
        self.first_step_checks.end_step(self.losses)
        return total

    def save_loss(self, mb: int, loss: Tensor, inputs: Sequence[Tensor]) -> None:
        """Keep the loss of a microbatch, or a copy if it shares memory with the stage's inputs."""
        value = loss.detach()
        if any(has_same_storage(value, x) for x in inputs):
            value = value.clone()
        self.losses[mb] = value
        if self.first_step_checks.is_active:
            self.first_step_checks.loss_versions[mb] = get_versions((value,))

    def begin_update(self) -> None:
        """Make ready for an update: no gradients, and whole weights where they are to be."""
        for alias, one in self.resources.aliases.items():
            if (
                not self.shard_spec.zero and alias.data_ptr() != one.data_ptr()
            ):  # its `data` is another
                alias.data = one.data
            if self.accumulate_grads:
                alias.grad = None
        for stage in self.stages.values():
            if stage.sharded_parameters is not None:
                stage.sharded_parameters.begin_step(has_backward=self.has_backward)
            if not self.is_evaluating:
                stage.gradients.zero()

    def save_weight_version(self, step: Instr) -> None:
        """Keep the weights as a step has made them, for what computes the next updates."""
        for versions in self.weight_versions.values():
            versions.keep_version(step.mb + 1, self.index_of[step])

    def step_optimizer(self, finite: Tensor, stage: int | None = None) -> None:
        """Let the optimizer step if `finite_updates`, 0-dim bool, is true: all, or one of the
        stages whose states lie on the host."""
        finite = finite if self.resources.can_step else torch.zeros_like(finite)
        if self.optimizer is not None:
            draws = (
                self.random_streams.warn_of_draws(_TIED_RANDOM_WARNING)
                if self.resources.has_separate_copies
                else nullcontext()
            )
            with draws, guard_shard_step(self.optimizer, self.shard_spec.zero):
                if stage is None:
                    step_if_finite(finite, self.optimizer)
                elif self.resources.host_optimizer_state is not None:
                    self.resources.host_optimizer_state.step(stage, finite)

    def get_update_result(self) -> tuple[Tensor, Tensor]:
        """Of the last step, as `Executor.norm` and `Executor.finite` have it."""
        if self.optimistic_step is None:
            return self.grad_norm, self.finite_updates
        norm = self.optimistic_step.get_last_norm()
        return norm, norm.isfinite().view(1)

    def find_slot(self, kind: Value, stage: int, mb: int, index: int | None = None) -> Slot:
        """Where a value lives; as the instruction at an index of the Stream finds or fills it."""
        fills = self.slot_assignment[kind, stage, mb]
        last = max(fill for fill in fills if index is None or fill <= index)
        if kind in OUTPUT_KINDS:
            return OutputSlot(self.slot_tables[kind], fills[last], kind, stage, mb)
        return Slot(self.slot_tables[kind], fills[last])

    def get_send_buffer(
        self, kind: Value, number: int, form_changes: tuple[Opcode, ...]
    ) -> Tensor | None:
        """Return the memory from which the value in a slot is sent, as bytes; it is made once.

        Args:
            kind: The value.
            number: The number of its slot.
            form_changes: The instructions that have changed its form.

        Returns:
            None if the transport sends a value from the memory in which it was computed. The next
            instruction that fills the slot waits for the send, or runs in a later step.
        """
        own = self.resources.send_buffers
        if self.transport.uses_static_buffers and (kind, number, form_changes) not in own:
            split = any(op in TP_SPLIT_OPS for op in form_changes)
            size = self.resources.buffer_sizes[kind][number] // (self.program.tp if split else 1)
            own[kind, number, form_changes] = allocate_bytes(self.device, size)
        return own.get((kind, number, form_changes))

    def get_outgoing_tensors(self, kind: Value, stage: int, mb: int) -> Sequence[Tensor]:
        """The tensors of a value in its slot, that is handed over or about to be sent."""
        value = self.find_slot(kind, stage, mb).peek()
        if isinstance(value, tuple):
            return value
        carried = self.boundaries[mb].get_value_tensors(kind, stage)
        return (value,) if carried.is_single_tensor else carried.place_tensors(value)[1]

    def compute_loss_gradient(self, mb: int) -> Tensor:
        """The gradient of a loss: NaN where it is not finite, so that all who step with it know;
        where gradients are added to others and nothing is scaled later, the scale."""
        loss = self.losses[mb]
        if self.accumulate_grads:
            return torch.as_tensor(self.grad_scale, dtype=loss.dtype, device=loss.device)
        return loss - loss + (1.0 if self.loss_gradient is None else self.loss_gradient)

    def complete_send(self, send: int) -> None:
        """Wait for a send, unless somebody has, and then let go what was sent."""
        if send in self.pending_sends:
            work, tensor = self.pending_sends.pop(send)
            work.wait()
            del tensor  # not before: on a GPU what comes next may take its memory

    def wait_for_reductions(self) -> None:
        """Wait until every reduction that was begun has ended."""
        while self.pending_reduce_scatters:
            self._wait_for_reduce_scatter()
        for work in self.pending_reductions:
            work.wait()
        self.pending_reductions.clear()

    def allocate_gradient(self, stage: int, index: int) -> None:
        """Let there be a stage's whole gradient, for the instruction at an index to add to: when
        that is reduced whose slot it takes."""
        gradients = self.stages[stage].gradients
        if gradients.is_allocated:
            return
        while self.pending_reduce_scatters and self.pending_reduce_scatters[0][
            0
        ] <= self.gradient_freed_by.get(index, -1):
            self._wait_for_reduce_scatter()
        gradients.allocate()

    def _wait_for_reduce_scatter(self) -> None:
        """Wait for the first reduction to parts that nobody has waited for."""
        _, works = self.pending_reduce_scatters.popleft()
        for work in works:
            work.wait()

    def restore_parameters(self) -> None:
        """Let the modules have their parameters as between steps."""
        for s, stage in self.stages.items():
            stage.restore_parameters(self.weight_versions.get(s))

    def abort_step(self, *, has_begun: bool) -> None:
        """After an error, where a step was `has_begun` or was to begin: no module keeps what stands
        in, and nobody takes an update for right that is not validated."""
        self.restore_parameters()
        if self.resources.host_optimizer_state is not None:
            self.resources.host_optimizer_state.fail()
        if self.optimistic_step is not None:
            self.optimistic_step.fail(has_begun=has_begun)

    def wrap_error(self, index: int, error: Exception) -> ExecutionError:
        """An error as that of the instruction at index k of the Stream, unless it says already of
        which one it is: of what was started before, and has failed on its lane."""
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
        """The stage if this rank runs it for the microbatch: then values are handed over."""
        if stage not in self.stages or self.shape.rank_of_stage(stage, mb) != self.rank:
            return None
        return self.stages[stage]


def _find_sends_before_reuse(program: Program, rank: int) -> dict[int, list[int]]:
    """For what fills slots that sends must have left, these sends; by index in the Stream."""
    found: dict[int, list[int]] = {}
    stream = program.streams[rank]
    for _, fill, free in _find_slot_reuses(program, rank):
        if stream[free].op in SEND_OPS:
            found.setdefault(fill, []).append(free)
    return found


def find_freeing_instructions(program: Program, rank: int, kind: Value) -> dict[int, int]:
    """For what fills a slot of a kind that had a value before, who has freed it; by index in a
    rank's Stream."""
    return {fill: free for _, fill, free in _find_slot_reuses(program, rank, kind)}


def _find_slot_reuses(
    program: Program, rank: int, *kinds: Value
) -> Iterator[tuple[Value, int, int]]:
    """Who fills a slot that had a value before, and who frees it, by index in a rank's Stream; of
    some kinds, or of all."""
    lo, end = map(int, program.offsets[rank : rank + 2])
    for kind, (fills, frees) in find_slot_reuses(program).items():
        for fill, free in zip(fills.tolist(), frees.tolist(), strict=True):
            if lo <= fill < end and (kind in kinds or not kinds):
                yield kind, fill - lo, free - lo
