"""State: the values, messages and linked calls of one program on one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, NamedTuple, overload

import torch
from torch import Tensor

from schedir.analysis.memory.buffer_slots import KINDS, assign, counts, reuses
from schedir.errors import ExecutionError, InstructionSite, in_words
from schedir.ir.isa.instructions import (
    LOCAL_HANDOVER,
    ROWS,
    SENDS,
    SPLIT_CHANGES,
    Instr,
    Opcode,
    PeerRule,
    Value,
)
from schedir.ir.program import OWN, Program
from schedir.runtime.autograd.random_streams import numbers_of
from schedir.runtime.boundaries.boundary_table import BoundaryTable
from schedir.runtime.model_checks.first_step_checks import OUTPUTS, FirstStepChecks
from schedir.runtime.model_checks.memory_overlap import share_memory
from schedir.runtime.model_checks.tensor_fingerprint import versions_of
from schedir.runtime.offload.activation_offloader import OffloadMoves
from schedir.runtime.offload.copy_lanes import LaneObserver
from schedir.runtime.parameters.mixed_precision import step_if
from schedir.runtime.parameters.overlapped_reduction import GradientReduction, last_to_add
from schedir.runtime.parameters.sharded_parameters import stepping_pieces
from schedir.runtime.parameters.weight_versions import WeightVersions
from schedir.runtime.rank_resources import RankResources
from schedir.runtime.stage_state import StageState
from schedir.runtime.step_inputs import StepInputs
from schedir.runtime.value_slots import OutputSlot, Slot, SlotTable
from schedir.transports.transport import Transport, Work, bytes_on, of_peers

# ---------------------------------------------------------------- implied arrivals

# Gloo cannot tell whether a send has ended.  It can only wait for it, and a wait that comes too
# early may block the receiver.  But a message from the receiver, sent after it used the first
# message, proves that the first one has arrived.


# Who takes in what another stage sent: which sends these are, and where their stage is.
_SENT: Final = {
    row.op: [
        (send, LOCAL_HANDOVER[token][1])
        for token in row.needs
        for send in SENDS
        if token in LOCAL_HANDOVER and LOCAL_HANDOVER[token][0] in ROWS[send].needs
    ]
    for row in ROWS
}


def implied_acks(program: Program, rank: int) -> dict[int, list[int]]:
    """For receives of a rank, the sends that have arrived when it has; both by index.

    Each send is there once, with the first receive that proves it, if there is one.
    """
    own, there = program.streams[rank], {hop: program.beside(hop).tolist() for hop in PeerRule}
    where: dict[tuple[int | None, ...], int] = {instr: k for k, instr in enumerate(own)}
    peers = {program.peer(i) for i in own if i.op in SENDS}
    known: dict[int, list[int]] = {}
    for peer in peers:
        used: list[int] = []  # since the peer's last send to this rank
        for op, stage, mb in program.streams[peer]:
            row = ROWS[op]
            for send, hop in _SENT[op]:
                k = where.pop((send, there[hop][stage], mb), None)
                used += [k] if k is not None else []
            if row.peer and op in SENDS and used:
                back = where.get((row.partner, there[row.peer][stage], mb))
                if back is not None:
                    known[back], used = used, []
    return known


_APART = (
    "an optimizer draws random numbers, others for each copy of a tied weight: they drift apart"
)


class Call(NamedTuple):
    """A linked instruction: first wait for what must have arrived, if anything, then run."""

    wait: Callable[[], None] | None
    run: Callable[[], None]


Handler = Callable[["State", Instr], Call]  # links an instruction


Run = Callable[[], None]


@overload
def in_turn(first: Run, /, *others: Run | None) -> Run: ...
@overload
def in_turn(*calls: Run | None) -> Run | None: ...
def in_turn(*calls: Run | None) -> Run | None:
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

    This is what handlers link instructions to.  What the rank has, whatever it runs, is `held`.
    `index_of` finds an instruction (op, stage, mb) in the rank's Stream.
    """

    def __init__(
        self,
        program: Program,
        held: RankResources,
        transport: Transport,
        passing: BoundaryTable,
        number: int = 0,
    ) -> None:
        self.program, self.shape = program, program.shape
        self.rank = rank = held.rank
        self.held, self.transport, self.passing = held, transport, passing
        self.number = number  # of the program, among those that the rank runs
        self.stages, self.draws, self.device = held.stages, held.draws, held.device
        self.loss, self.tied, self.share = held.loss, held.tied, held.share
        self.optimizer, self.loss_scale = held.optimizer, held.loss_scale
        self.ahead = held.ahead if program.norm_check == "after_step" else None
        self.adds, self.debug = held.adds, held.debug
        self.stream, self.trains = program.streams[rank], program.trains
        self.looks = self.looked = False  # between steps, where nothing is changed; or it has
        self.versions: dict[int, WeightVersions] = {}  # of weights, by stage
        for s, stage in (
            self.stages.items() if self.trains and self.shape.optimizer_steps > 1 else ()
        ):
            if s >= program.frozen_stages:
                own = ((k, i) for k, i in enumerate(self.stream) if i.stage == s)
                self.versions[s] = stage.versions(self.shape, own)
        self.batch = StepInputs()
        self.scale: float | Tensor = 1.0  # by which sums of gradients are multiplied
        self.loss_gradient: Tensor | None = None  # with which backwards begin, where it is not 1
        self.losses = [torch.zeros((), device=self.device)] * self.shape.microbatches
        self.norm = torch.zeros((), dtype=torch.float64, device=self.device)
        # Of updates that nobody has judged, the sum of squares of all gradients: a rank that adds
        # to none may be told that of the next one before.
        self.norms: dict[int, Tensor] = {}
        self.finite = torch.ones(self.shape.optimizer_steps, dtype=torch.bool, device=self.device)
        # Under way: what is sent, by index in the Stream, as long as it may not have arrived, and
        # reductions that nobody has waited for.
        self.sending: dict[int, tuple[Work, Tensor]] = {}
        self.reducing: list[Work] = []
        self.scattering: deque[tuple[int, list[Work]]] = deque()  # by index, the first first
        # Sums over replicas, and what each begins under, unless they are `late`.
        self.reductions: dict[Instr, GradientReduction] = {}
        self.last_to_add = last_to_add(self.stream) if program.dp > 1 else {}
        self.late = False
        # Within `as_of(k)` the recorder counts what is started as instruction k's.
        self.as_of: Callable[[int], AbstractContextManager[object]] = nullcontext
        # Whom an instruction tells when it begins and ends on a lane of the rank's, if anybody.
        self.on_lane: Callable[[], LaneObserver | None] = lambda: None
        # For receives, by index in the Stream, the sends that have arrived when they have.
        self.implied_acks = implied_acks(program, rank)
        self.index_of: dict[tuple[int, ...], int] = {i: k for k, i in enumerate(self.stream)}
        self.assigned = assign(program, rank)
        self.slots = dict(zip(KINDS, map(SlotTable, counts(program)[rank].tolist()), strict=True))
        self.buffers = held.buffers
        parts = [stage.weights for stage in self.stages.values() if stage.weights is not None]
        self.checks = FirstStepChecks(self.slots, self.assigned, self.buffers, parts, self.device)
        self.reuse_after_send = _reuse_after_send(program, rank)
        # For what adds to a gradient that is whole anew, the reduction whose room that takes.
        self.room_after = freed_before(program, rank, Value.WGRAD)
        self.verdict: Tensor | None = None  # on an update that is made stage by stage
        self.shrink: Tensor | None = None  # what an update's gradients were multiplied by
        # For what fills a slot of what forwards save, who has left it; and what of that is moved.
        self.saved_after = freed_before(program, rank, Value.SAVED)
        self.away = OffloadMoves(said=bool(program.slots) and program.slots[rank].saved != OWN)

    def expect(self, batch: StepInputs) -> None:
        """Raise ExecutionError where the rank takes microbatches, and is not given all."""
        first, last = (s in self.stages for s in (0, self.shape.stages - 1))
        batch.expect(self.program, self.rank, first=first, last=last)

    def begin(self, batch: StepInputs) -> None:
        """Make ready for a step, or to look at what there is."""
        own = self.shape.microbatches
        numbers = numbers_of(own, self.share.replica * own, self.shape.optimizer_steps)
        if self.looks:
            self.draws.look(numbers)
        else:
            self.draws.begin(numbers)
        self.verdict = None
        self.transport.step_begins(self.number)
        self.checks.begin_step()
        self.batch, self.scale = batch, batch.scale
        if self.loss_scale is not None:
            gradient = (self.loss_scale.value * self.scale).float()
            if self.loss_gradient is None:
                self.loss_gradient = gradient
            else:  # in its place, where a graph reads it
                self.loss_gradient.copy_(gradient)
            self.scale = self.loss_scale.inverse
        for shared, copy in self.held.copies.items():
            if copy is not shared:
                copy.detach().copy_(shared.detach())
        if self.held.states is not None:
            self.held.states.rest()
        self.begin_update()
        for versions in self.versions.values():
            versions.begin()

    def finish(self) -> Tensor | None:
        """End a step: wait for what is still on its way out; returns the sum of losses on the rank
        of the last stage, and None elsewhere."""
        for work, _ in self.sending.values():
            work.wait()
        self.sending.clear()
        total = None
        if self.shape.stages - 1 in self.stages:
            # By microbatch, whatever their order was; a loss may lie in what was received.
            total = sum(self.losses, torch.zeros((), device=self.device))
        if not self.looks:
            self.held.stepped = self.norm_and_finite
        for stage in self.stages.values() if self.looks else ():
            if stage.weights is not None:
                stage.weights.expect_unwritten()
        for versions in self.versions.values():
            versions.end_step()
        self.transport.step_ended()
        self.restore()
        self.checks.end_step(self.losses)
        return total

    def keep_loss(self, mb: int, loss: Tensor, inputs: Sequence[Tensor]) -> None:
        """Keep the loss of a microbatch, or a copy if it shares memory with the stage's inputs."""
        value = loss.detach()
        if any(share_memory(value, x) for x in inputs):
            value = value.clone()
        self.losses[mb] = value
        if self.checks.active:
            self.checks.versions_of_losses[mb] = versions_of((value,))

    def begin_update(self) -> None:
        """Make ready for an update: no gradients, and whole weights where they are to be."""
        for alias, one in self.held.aliases.items():
            if not self.share.zero and alias.data_ptr() != one.data_ptr():  # its `data` is another
                alias.data = one.data
            if self.adds:
                alias.grad = None
        for stage in self.stages.values():
            if stage.weights is not None:
                stage.weights.begin(trains=self.trains)
            if not self.looks:
                stage.gradients.zero()

    def keep_weights(self, step: Instr) -> None:
        """Keep the weights as a step has made them, for what computes the next updates."""
        for versions in self.versions.values():
            versions.keep(step.mb + 1, self.index_of[step])

    def let_step(self, finite: Tensor, stage: int | None = None) -> None:
        """Let the optimizer step if `finite`, 0-dim bool, is true: all, or one of the stages whose
        states lie on the host."""
        finite = finite if self.held.may_step else torch.zeros_like(finite)
        if self.optimizer is not None:
            draws = self.draws.warning(_APART) if self.held.apart else nullcontext()
            with draws, stepping_pieces(self.optimizer, self.share.zero):
                if stage is None:
                    step_if(finite, self.optimizer)
                elif self.held.states is not None:
                    self.held.states.step(stage, finite)

    def norm_and_finite(self) -> tuple[Tensor, Tensor]:
        """Of the last step, as `Executor.norm` and `Executor.finite` have it."""
        if self.ahead is None:
            return self.norm, self.finite
        norm = self.ahead.last_norm()
        return norm, norm.isfinite().view(1)

    def slot(self, kind: Value, stage: int, mb: int, at: int | None = None) -> Slot:
        """Where a value lives; as the instruction at an index of the Stream finds or fills it."""
        fills = self.assigned[kind, stage, mb]
        last = max(fill for fill in fills if at is None or fill <= at)
        if kind in OUTPUTS:
            return OutputSlot(self.slots[kind], fills[last], kind, stage, mb)
        return Slot(self.slots[kind], fills[last])

    def outgoing(self, kind: Value, number: int, changed: tuple[Opcode, ...]) -> Tensor | None:
        """Return the memory from which the value in a slot is sent, as bytes; it is made once.

        Args:
            kind: The value.
            number: The number of its slot.
            changed: The instructions that have changed its form.

        Returns:
            None if the transport sends a value from the memory in which it was computed. The next
            instruction that fills the slot waits for the send, or runs in a later step.
        """
        own = self.held.outgoing
        if self.transport.static and (kind, number, changed) not in own:
            split = any(op in SPLIT_CHANGES for op in changed)
            size = self.held.rooms[kind][number] // (self.program.tp if split else 1)
            own[kind, number, changed] = bytes_on(self.device, size)
        return own.get((kind, number, changed))

    def tensors_out(self, kind: Value, stage: int, mb: int) -> Sequence[Tensor]:
        """The tensors of a value in its slot, that is handed over or about to be sent."""
        value = self.slot(kind, stage, mb).look()
        if isinstance(value, tuple):
            return value
        carried = self.passing[mb].carried(kind, stage)
        return (value,) if carried.alone else carried.lay(value)[1]

    def loss_gradient_of(self, mb: int) -> Tensor:
        """The gradient of a loss: NaN where it is not finite, so that all who step with it know;
        where gradients are added to others and nothing is scaled later, the scale."""
        loss = self.losses[mb]
        if self.adds:
            return torch.as_tensor(self.scale, dtype=loss.dtype, device=loss.device)
        return loss - loss + (1.0 if self.loss_gradient is None else self.loss_gradient)

    def let_go(self, send: int) -> None:
        """Wait for a send, unless somebody has, and then let go what was sent."""
        if send in self.sending:
            work, tensor = self.sending.pop(send)
            work.wait()
            del tensor  # not before: on a GPU what comes next may take its memory

    def wait_for_reductions(self) -> None:
        """Wait until every reduction that was begun has ended."""
        while self.scattering:
            self._wait_for_parts()
        for work in self.reducing:
            work.wait()
        self.reducing.clear()

    def make_room(self, stage: int, at: int) -> None:
        """Let there be a stage's whole gradient, for the instruction at an index to add to: when
        that is reduced whose slot it takes."""
        gradients = self.stages[stage].gradients
        if gradients.made:
            return
        while self.scattering and self.scattering[0][0] <= self.room_after.get(at, -1):
            self._wait_for_parts()
        gradients.make()

    def _wait_for_parts(self) -> None:
        """Wait for the first reduction to parts that nobody has waited for."""
        _, works = self.scattering.popleft()
        for work in works:
            work.wait()

    def restore(self) -> None:
        """Let the modules have their parameters as between steps."""
        for s, stage in self.stages.items():
            stage.restore(self.versions.get(s))

    def fail(self, *, begun: bool) -> None:
        """After an error, where a step was `begun` or was to begin: no module keeps what stands in,
        and nobody takes an update for right that is not validated."""
        self.restore()
        if self.held.states is not None:
            self.held.states.fail()
        if self.ahead is not None:
            self.ahead.fail(begun=begun)

    def failed(self, k: int, error: Exception) -> ExecutionError:
        """An error as that of the instruction at index k of the Stream, unless it says already of
        which one it is: of what was started before, and has failed on its lane."""
        if isinstance(error, ExecutionError) and error.sites:
            return ExecutionError(
                error.fact, program=error.program, sites=error.sites, hint=error.hint
            )
        return ExecutionError(
            of_peers(error) or in_words(error),
            program=self.program.name,
            sites=[InstructionSite(self.rank, k, self.stream[k], "failed")],
            hint=getattr(error, "hint", ""),
        )

    def local_stage(self, stage: int, mb: int) -> StageState | None:
        """The stage if this rank runs it for the microbatch: then values are handed over."""
        if stage not in self.stages or self.shape.rank_at(stage, mb) != self.rank:
            return None
        return self.stages[stage]


def _reuse_after_send(program: Program, rank: int) -> dict[int, list[int]]:
    """For what fills slots that sends must have left, these sends; by index in the Stream."""
    found: dict[int, list[int]] = {}
    stream = program.streams[rank]
    for _, fill, free in _reuses(program, rank):
        if stream[free].op in SENDS:
            found.setdefault(fill, []).append(free)
    return found


def freed_before(program: Program, rank: int, kind: Value) -> dict[int, int]:
    """For what fills a slot of a kind that had a value before, who has freed it; by index in a
    rank's Stream."""
    return {fill: free for _, fill, free in _reuses(program, rank, kind)}


def _reuses(program: Program, rank: int, *kinds: Value) -> Iterator[tuple[Value, int, int]]:
    """Who fills a slot that had a value before, and who frees it, by index in a rank's Stream; of
    some kinds, or of all."""
    lo, end = map(int, program.offsets[rank : rank + 2])
    for kind, (fills, frees) in reuses(program).items():
        for fill, free in zip(fills.tolist(), frees.tolist(), strict=True):
            if lo <= fill < end and (kind in kinds or not kinds):
                yield kind, fill - lo, free - lo
