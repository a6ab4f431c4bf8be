"""Handlers of Forward, Backward, BackwardInput and BackwardWeight."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from schedir.errors import ModelError
from schedir.ir.isa.instructions import (
    BOUNDARY,
    LOCAL_HANDOVER,
    RECOMPUTE,
    ROWS,
    Instr,
    Opcode,
    Value,
)
from schedir.ir.pipeline.stage_segments import LEAVES
from schedir.runtime.arguments import one_number
from schedir.runtime.autograd.activation_checkpoint import Checkpoints
from schedir.runtime.autograd.random_streams import BACKWARD, FORWARD, WEIGHT
from schedir.runtime.autograd.split_backward import DeferredGradients, recording
from schedir.runtime.autograd.splittable_layers import could_wait, left_whole, watching
from schedir.runtime.autograd.stage_context import around, on_version
from schedir.runtime.handlers.transfer_handlers import message_wait, put_out
from schedir.runtime.model_checks.memory_overlap import share_memory
from schedir.runtime.model_checks.parameter_guard import expect_own
from schedir.runtime.parameters.overlapped_reduction import GradientReduction, Root
from schedir.runtime.rank_state import Call, State, in_turn
from schedir.runtime.stage_state import StageState
from schedir.runtime.step_inputs import tensors_of
from schedir.runtime.value_slots import Slot


def forward(state: State, i: Instr) -> Call:
    stage, mb, last = state.stages[i.stage], i.mb, i.stage == state.shape.stages - 1
    taken, give, stage_run = taken_by(state, i), _put_out(state, i), StageRun(state, i)
    trains, versions = (
        state.trains and i.stage >= state.program.frozen_stages,
        state.versions.get(i.stage),
    )
    saved = state.slot(Value.SAVED, i.stage, mb, state.index_of[i]) if trains else None
    again = Instr(RECOMPUTE, i.stage, mb) in state.index_of
    checkpoints = Checkpoints(state, i) if again else None
    ours = is_ours(taken) and not again  # else it finds its inputs as they are
    # What is saved of it outlives its turn, or is moved.
    moved = _is_offloaded(state, i)
    take = _look_at(taken, Tensor.clone if state.program.shares_slots or moved else Tensor.detach)
    letter = state.program.segment_boundaries[i.stage : i.stage + 1]
    summed = letter == LEAVES and not state.program.sequence_parallel

    def run() -> None:
        xs = take() if taken else tensors_of(state.batch.inputs[mb], mb)
        value: object
        if checkpoints is not None:
            (ys, _), value = checkpoints.first(partial(stage_run, xs, ours), xs)
        else:
            ys, xs = stage_run(xs, ours)
            value = stage_run.saved(xs, ys)
        if last:
            state.keep_loss(mb, ys[0], xs)
        else:
            values = [*map(Tensor.detach, ys)]
            if summed and any(share_memory(values[0], x) for x in xs):
                values[0] = values[0].clone()  # it is summed in its place
            give(values if stage.weights is None else stage.weights.apart(values))
        if saved is not None:
            if not stage.parameters_checked:
                stage.parameters_checked = True
                kept = versions.names if versions is not None else ()
                expect_own(ys, stage.module, kept, i.stage, state.optimizer)
            saved.fill(value)
        for one in taken:
            one.slot.free()

    return Call(
        _waits(state, i, taken),
        around(state, i, FORWARD, run if trains else torch.no_grad()(run)),
    )


class StageRun:
    """Runs an own stage on the inputs of a microbatch: for a forward, or for one again."""

    def __init__(self, state: State, i: Instr) -> None:
        forward = i._replace(op=Opcode.Forward)
        stage, boundaries, frozen = (
            state.stages[i.stage],
            state.passing[i.mb],
            state.program.frozen_stages,
        )
        self.state, self.stage, self.mb = state, i.stage, i.mb
        self.module, self.lender = stage.module, stage.lender
        self.together = boundaries.skipped_to(i.stage)
        local = [one.local for one in taken_by(state, forward)]
        self.received, self.offloaded = not all(local), _is_offloaded(state, i)
        last = i.stage == state.shape.stages - 1
        self.expect = None if last else boundaries.expecting(i.stage)
        came = [
            has and i.stage >= frozen and state.program.other(kind, i.stage) >= frozen
            for kind in _kinds(state, forward, ROWS[Opcode.Forward].needs)
            for has in boundaries.carried(kind, i.stage).graded
        ]
        self.graded = [k for k, has in enumerate(came) if has and state.trains]

    def __call__(
        self, xs: Sequence[Tensor], ours: bool
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """What the stage puts out, the last the loss; and the leaves whose `grad` is that of each
        of xs.  `ours` says that nobody else reads these, or will."""
        batch, mb = self.state.batch, self.mb
        for k in self.graded:
            xs[k].requires_grad_()
        keywords = batch.keywords_of(mb)
        # The leaves lose their memory: when offloaded, or after their backward in the first step.
        aliases = self.offloaded or (self.received and self.state.checks.active)
        y, xs = self.lender.run(
            self.module, xs, keywords, ours=ours, aliases=aliases, together=self.together
        )
        if self.expect is not None:
            return self.expect(y, self.stage), xs
        return (one_number(self.state.loss(y, batch.targets[mb])),), xs

    def saved(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> object:
        """What a backward takes: leaves, and where it begins."""
        leaves = [xs[k] for k in self.graded]
        if self.state.checks.active:
            self.state.checks.note_gradients(self.stage, self.mb, leaves)
        return leaves, [*map(_root, filter(_requires_grad, ys))]


class _InputSlot(NamedTuple):
    """A value that an instruction takes in: its slot, and whether a stage of this rank gives it."""

    kind: Value
    slot: Slot
    local: bool


def is_ours(taken: Sequence[_InputSlot]) -> bool:
    """Whether all that an instruction takes in has come by message: then nobody else reads it."""
    return bool(taken) and not any(one.local for one in taken)


def _is_offloaded(state: State, i: Instr) -> bool:
    """Return whether the tensors that a forward saved are offloaded to the host."""
    return Instr(Opcode.Offload, i.stage, i.mb) in state.index_of


def _kinds(state: State, i: Instr, tokens: Sequence[Value]) -> list[Value]:
    """Of the values of a row those that cross the boundary of the instruction's stage."""
    return [kind for kind in tokens if kind in BOUNDARY and state.program.other(kind, i.stage) >= 0]


def taken_by(state: State, i: Instr) -> list[_InputSlot]:
    """What an instruction takes in: where the other stage puts it out, or where it is received."""
    found = []
    for kind in _kinds(state, i, ROWS[i.op].needs):
        other, (made, _) = state.program.other(kind, i.stage), LOCAL_HANDOVER[kind]
        local = state.local_stage(other, i.mb) is not None
        slot = state.slot(made, other, i.mb) if local else state.slot(kind, i.stage, i.mb)
        found.append(_InputSlot(kind, slot, local))
    return found


def _look_at(
    taken: Sequence[_InputSlot], kept: Callable[[Tensor], Tensor] | None
) -> Callable[[], Sequence[Tensor]]:
    """The tensors of all that an instruction takes in; of messages as `kept` has them, if it is
    said, for their memory is filled again."""

    def look(one: _InputSlot) -> Sequence[Tensor]:
        values: Sequence[Tensor] = one.slot.look()
        return values if one.local or kept is None else [*map(kept, values)]

    if len(taken) == 1:
        return partial(look, taken[0])
    return lambda: [value for one in taken for value in look(one)]


def _put_out(state: State, i: Instr) -> Callable[[Sequence[Tensor]], None]:
    """Fills the slots of all that an instruction puts out, which come one behind the other."""
    ways, end = [], 0
    for kind in _kinds(state, i, ROWS[i.op].gives):
        begin, end = end, end + len(state.passing[i.mb].carried(kind, i.stage).tensors)
        ways.append((put_out(state, i, kind), slice(begin, end)))

    if len(ways) == 1:
        return ways[0][0]

    def give(values: Sequence[Tensor]) -> None:
        for out, own in ways:
            out(values[own])

    return give


def _waits(state: State, i: Instr, taken: Sequence[_InputSlot]) -> Callable[[], None] | None:
    """Waits for what comes by message, and until the slots that are filled are left, where sends
    had them last."""
    waits = [message_wait(state, i, one.kind) for one in taken]
    waits += [partial(state.let_go, k) for k in state.reuse_after_send.get(state.index_of[i], ())]
    return in_turn(*waits)


_requires_grad = attrgetter("requires_grad")


def _root(y: Tensor) -> Root:
    """Where a backward begins: not the output itself, which would keep its memory."""
    return y if not y.dim() else get_gradient_edge(y)


def backward(state: State, i: Instr, *, splits: bool = False) -> Call:
    mb, last = i.mb, i.stage == state.shape.stages - 1
    taken, give = taken_by(state, i), _put_out(state, i)
    wanted = bool(_kinds(state, i, ROWS[i.op].gives))
    saved = state.slot(Value.SAVED, i.stage, mb, state.index_of[i])
    # A tape may keep it, and outlive its turn.
    take = _look_at(taken, Tensor.clone if splits and state.program.shares_slots else None)
    forward = i._replace(op=Opcode.Forward)
    local = all(one.local for one in taken_by(state, forward))
    module, beginning = state.stages[i.stage].module, _beginning(state, i)

    def run() -> None:
        xs, roots = saved.look()
        dys = (state.loss_gradient_of(mb),) if last else take()
        is_first_step = state.checks.active
        if is_first_step:
            dys = [*map(Tensor.detach, dys)]  # a hook that keeps a gradient then adds a reference
            if not state.checks.has_gradients_of_forward(i.stage, mb, xs):
                raise _other_microbatch_error()
        reduction = beginning()
        with nullcontext() if reduction is None else reduction.under_backward(module, roots):
            if roots:  # a first stage may have nothing to train
                torch.autograd.backward(roots, dys)
        if wanted:
            give(_gradients(xs, dys, i.stage))
        if is_first_step:
            _finish_inputs(xs, local)
        saved.free()
        for one in taken:
            one.slot.free()

    return Call(_waits(state, i, taken), around(state, i, BACKWARD, run))


def _finish_inputs(xs: Sequence[Tensor], local: bool) -> None:
    """Refuse further gradients of a stage's inputs, and free the memory of received inputs.

    A module may keep the graph, for example with an output, and the graph keeps these leaves.
    Without their memory, the leaves do not count as references to receive buffers.
    """
    for x in xs:
        x.register_post_accumulate_grad_hook(_refuse_gradient)
        if not local:
            x.data = x.detach().new_empty(0)


def _refuse_gradient(_: Tensor) -> None:
    raise _other_microbatch_error()


def _other_microbatch_error() -> ModelError:
    return ModelError(
        "a forward computes with an input that its stage kept from another microbatch: the "
        "gradient of that input would be lost",
        hint="keep a copy without its graph: self.last = x.detach().clone()",
    )


def _gradients(xs: Sequence[Tensor], dys: Sequence[Tensor], stage: int) -> Sequence[Tensor]:
    """The gradients of what a stage took in, which they have no more: zeros of what it has not
    used.  Raises ModelError if it has used nothing."""
    dxs: list[Tensor] = []
    unused = 0
    for x in xs:
        dx, x.grad = x.grad, None
        if dx is None:
            dx, unused = torch.zeros_like(x), unused + 1
        for dy in dys:
            if share_memory(dx, dy):
                dx = dx.clone()  # autograd may hand on what it was given
        dxs.append(dx)
    if unused == len(xs):
        which = "its input" if unused == 1 else f"any of its {unused} inputs with a gradient"
        raise ModelError(f"the output of stage {stage} does not depend on {which}")
    return dxs


def backward_input(state: State, i: Instr) -> Call:
    stage, tape_slot = state.stages[i.stage], state.slot(Value.DEFERRED_WGRAD, i.stage, i.mb)
    wait, whole = backward(state, i, splits=True)

    def run() -> None:
        tape = DeferredGradients()
        tape_slot.fill(tape)
        none: AbstractContextManager[set[str]] = nullcontext(set())
        with recording(tape), none if stage.layers_seen else watching(stage.module) as came:
            whole()
        could = set() if len(tape) else could_wait(stage.module)
        if could & came:
            raise ModelError(
                f"layers of {_name(stage, i)} are made to be split, but I ran its whole backward",
                hint="do not run the stage under torch.compile, and use these weights in their "
                "layers, not copies of them",
            )
        stage.layers_seen = not could  # what this microbatch has not used, another may
        if not stage.warned_of_layers and not could:
            stage.warned_of_layers = True
            # Of pieces some have nothing to split.
            split = len(tape) > 0 or bool(state.program.segment_boundaries)
            if alone := left_whole(stage.module, came, split):
                warnings.warn(f"{_name(stage, i)} is not split in {alone}", stacklevel=2)

    return Call(wait, on_version(state, i, run))


def _name(stage: StageState, i: Instr) -> str:
    return f"{type(stage.module).__name__} (stage {i.stage})"


def backward_weight(state: State, i: Instr) -> Call:
    tape_slot, beginning = state.slot(Value.DEFERRED_WGRAD, i.stage, i.mb), _beginning(state, i)

    def run() -> None:
        tape, reduction = tape_slot.look(), beginning()
        if reduction is None:
            tape.run()
        else:
            reduction.under_tape(tape)
        tape_slot.free()

    return Call(None, around(state, i, WEIGHT, run))


def _beginning(state: State, i: Instr) -> Callable[[], GradientReduction | None]:
    """What finds the reduction that begins under an instruction, if one does."""
    if (reduction := state.last_to_add.get(i)) is None:
        return lambda: None
    return lambda: None if state.late else state.reductions[reduction]


HANDLERS: Final = {
    Opcode.Forward: forward,
    Opcode.Backward: backward,
    Opcode.BackwardInput: backward_input,
    Opcode.BackwardWeight: backward_weight,
}
