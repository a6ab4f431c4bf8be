"""Compute: handlers of what runs a stage: forward, and backward as a whole or in two parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from schedir.errors import ModelError
from schedir.ir.ops import LOCAL_HANDOVER, Instr, Opcode, Token
from schedir.runtime.around import around, on_version
from schedir.runtime.batch import tensors_of
from schedir.runtime.given import one_number
from schedir.runtime.random import BACKWARD, FORWARD, WEIGHT
from schedir.runtime.rank import Call, Slot, Stage, State
from schedir.runtime.reduction import Reduction, Root
from schedir.runtime.split import Tape, recording
from schedir.runtime.splittable import could_wait, left_whole, watching
from schedir.runtime.transfer_handlers import message_wait, put_out
from schedir.runtime.unchanged import expect_own


def forward(state: State, i: Instr) -> Call:
    stage, mb, last = state.stages[i.stage], i.mb, i.stage == state.plan.stages - 1
    local_input = state.local_stage(i.stage - 1, mb) is not None
    given = _input_slot(state, i, Token.ACT_IN, -1) if i.stage else None
    give = None if last else put_out(state, i, Token.ACT_OUT, +1)
    frozen, module, lender = state.program.frozen, stage.module, stage.lender
    trains = state.trains and i.stage >= frozen
    loss, crossings = state.loss, state.boundaries.crossings
    came = crossings[i.stage - 1].graded if trains and i.stage > frozen else ()
    graded = [k for k, has in enumerate(came) if has]
    expect = None if last else crossings[i.stage].expect
    saved = state.slot(Token.SAVED, i.stage, mb, state.index_of[i]) if trains else None
    taken = Tensor.clone if state.program.slots else Tensor.detach

    def run() -> None:
        batch = state.batch
        xs: Sequence[Tensor] = tensors_of(batch.inputs[mb], mb) if given is None else given.look()
        if given is not None and not local_input:  # what is saved of it outlives its turn
            xs = [*map(taken, xs)]
        for k in graded:
            xs[k].requires_grad_()
        ours = given is not None and not local_input
        y, xs = lender.run(module, xs, batch.keywords_of(mb), ours=ours)
        if give is None or expect is None:
            total = one_number(loss(y, batch.targets[mb]))
            state.losses[mb] = total.detach()
            ys: Sequence[Tensor] = (total,)
        else:
            ys = expect(y, i.stage)
            give([*map(Tensor.detach, ys)])
        if saved is not None:
            if not stage.parameters_checked:
                stage.parameters_checked = True
                kept = stage.versions.names if stage.versions is not None else ()
                expect_own(ys, module, kept, i.stage, state.optimizer)
            saved.fill(([xs[k] for k in graded], [*map(_root, filter(_requires_grad, ys))]))
        if given is not None:
            given.free()

    return Call(
        _both(message_wait(state, i, Token.ACT_IN), _slot_wait(state, i)),
        around(state, i, FORWARD, run if trains else torch.no_grad()(run)),
    )


_requires_grad = attrgetter("requires_grad")


def _root(y: Tensor) -> Root:
    """Where a backward begins: not the output itself, which would keep its memory."""
    return y if not y.dim() else get_gradient_edge(y)


def backward(state: State, i: Instr, *, splits: bool = False) -> Call:
    mb, last = i.mb, i.stage == state.plan.stages - 1
    local_input = state.local_stage(i.stage + 1, mb) is not None
    saved = state.slot(Token.SAVED, i.stage, mb, state.index_of[i])
    given = None if last else _input_slot(state, i, Token.GRAD_IN, +1)
    give = put_out(state, i, Token.GRAD_OUT, -1) if i.stage > state.program.frozen else None
    shared = splits and not local_input and bool(state.program.slots)
    module, beginning = state.stages[i.stage].module, _beginning(state, i)

    def run() -> None:
        xs, roots = saved.look()
        dys = (state.loss_gradient_of(mb),) if given is None else given.look()
        if shared:
            dys = [dy.clone() for dy in dys]  # a tape may keep it, and outlive its turn
        reduction = beginning()
        with nullcontext() if reduction is None else reduction.under_backward(module, roots):
            if roots:  # a first stage may have nothing to train
                torch.autograd.backward(roots, dys)
        if give is not None:
            give(_gradients(xs, dys, i.stage))
        saved.free()
        if given is not None:
            given.free()

    return Call(
        _both(message_wait(state, i, Token.GRAD_IN), _slot_wait(state, i)),
        around(state, i, BACKWARD, run),
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
            if _share(dx, dy):
                dx = dx.clone()  # autograd may hand on what it was given
        dxs.append(dx)
    if unused == len(xs):
        which = "its input" if unused == 1 else f"any of its {unused} inputs with a gradient"
        raise ModelError(f"the output of stage {stage} does not depend on {which}")
    return dxs


def _share(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one memory."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def backward_input(state: State, i: Instr) -> Call:
    stage, tape_slot = state.stages[i.stage], state.slot(Token.TAPE, i.stage, i.mb)
    wait, whole = backward(state, i, splits=True)

    def run() -> None:
        tape = Tape()
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
            if alone := left_whole(stage.module, came, bool(len(tape))):
                warnings.warn(f"{_name(stage, i)} is not split in {alone}", stacklevel=2)

    return Call(wait, on_version(state, i, run))


def _name(stage: Stage, i: Instr) -> str:
    return f"{type(stage.module).__name__} (stage {i.stage})"


def backward_weight(state: State, i: Instr) -> Call:
    tape_slot, beginning = state.slot(Token.TAPE, i.stage, i.mb), _beginning(state, i)

    def run() -> None:
        tape, reduction = tape_slot.look(), beginning()
        if reduction is None:
            tape.run()
        else:
            reduction.under_tape(tape)
        tape_slot.free()

    return Call(None, around(state, i, WEIGHT, run))


def _beginning(state: State, i: Instr) -> Callable[[], Reduction | None]:
    """What finds the reduction that begins under an instruction, if one does."""
    if i not in state.last_to_add:
        return lambda: None
    update = i.mb // state.plan.per_update
    return lambda: None if state.late else state.reductions[i.stage, update]


def _input_slot(state: State, i: Instr, kind: Token, hop: int) -> Slot:
    """The slot of what an instruction takes in: where the stage beside puts it out, or receives."""
    if state.local_stage(i.stage + hop, i.mb) is None:
        return state.slot(kind, i.stage, i.mb)
    return state.slot(LOCAL_HANDOVER[kind][0], i.stage + hop, i.mb)


def _slot_wait(state: State, i: Instr) -> Callable[[], None] | None:
    """Waits until the slot that an instruction fills is left, where a send had it last."""
    send = state.reuse_after_send.get(state.index_of[i])
    if send is None:
        return None

    return partial(state.let_go, send)


def _both(
    one: Callable[[], None] | None, other: Callable[[], None] | None
) -> Callable[[], None] | None:
    if one is None or other is None:
        return one or other

    def wait() -> None:
        one()
        other()

    return wait


HANDLERS: Final = {
    Opcode.Forward: forward,
    Opcode.Backward: backward,
    Opcode.BackwardInput: backward_input,
    Opcode.BackwardWeight: backward_weight,
}
