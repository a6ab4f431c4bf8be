"""Handlers: what each instruction does.  One for every row of the instruction table.

A handler links an instruction of a rank to a Call: everything that can be looked up is looked
up then, and running it is only the work.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from schedir.errors import ModelError
from schedir.ir.ops import GATHERS, HANDED, RECEIVES, ROWS, Instr, Opcode, Token
from schedir.kernels.boundary import pack
from schedir.runtime import reductions
from schedir.runtime.around import around, on_version
from schedir.runtime.given import one_number
from schedir.runtime.rank import Call, Rank, Slot, Stage
from schedir.runtime.split import Tape, recording
from schedir.runtime.splittable import could_wait, left_whole, watching
from schedir.runtime.unchanged import expect_own
from schedir.transports.transport import own_part

# What is taken in is received, and made whole if it comes in parts.
_RECEIVES = {ROWS[op].gives[0]: op for op in RECEIVES}
_GATHERS = {ROWS[op].gives[0]: op for op in GATHERS}
# What is put out in parts.
_SCATTERS = {Token.ACT_OUT: Opcode.Scatter, Token.GRAD_OUT: Opcode.ScatterGrad}

# Where a backward begins: the last stage's loss, or where its output came from.
Root = Tensor | GradientEdge | None

# ------------------------------------------------------------ compute


def forward(rank: Rank, i: Instr) -> Call:
    stage, mb, last = rank.stages[i.stage], i.mb, i.stage == rank.plan.stages - 1
    handed = rank.beside(i.stage - 1, mb) is not None
    given = _given(rank, i, Token.ACT_IN, -1) if i.stage else None
    out = None if last else rank.slot(Token.ACT_OUT, i.stage, mb)
    grad, module, lender = rank.trains, stage.module, stage.lender
    loss, expect = rank.loss, rank.boundary.expect
    hands = rank.beside(i.stage + 1, mb) is not None
    saved = rank.slot(Token.SAVED, i.stage, mb, rank.where[i]) if grad else None
    shared = bool(rank.program.slots)

    def run() -> None:
        x: Tensor = rank.inputs[mb] if given is None else given.look()
        if given is not None and not handed:
            x = x.clone() if shared else x.detach()  # what is saved of it outlives its turn
        if given is not None and grad:
            x.requires_grad_()
        y, x = lender.run(module, x, ours=given is not None and not handed)
        if out is None:
            y = one_number(loss(y, rank.targets[mb]))
            rank.losses[mb] = y.detach()
        else:
            expect(y, i.stage)
            out.fill(rank.boundary.as_sent(y.detach()) if hands else y.detach())
        if saved is not None:
            if not stage.looked_behind:
                stage.looked_behind = True
                kept = stage.versions.names if stage.versions is not None else ()
                expect_own(y, module, kept, i.stage, rank.optimizer)
            saved.fill((x, _root(y)))
        if given is not None:
            given.free()

    return Call(_both(_arrived(rank, i, Token.ACT_IN), _sent(rank, i)), around(rank, i, run))


def _root(y: Tensor) -> Root:
    """Where a backward begins: not the output itself, which would keep its memory."""
    if not y.requires_grad:
        return None
    return y if not y.dim() else get_gradient_edge(y)


def backward(rank: Rank, i: Instr, *, splits: bool = False) -> Call:
    mb, last = i.mb, i.stage == rank.plan.stages - 1
    handed = rank.beside(i.stage + 1, mb) is not None
    saved = rank.slot(Token.SAVED, i.stage, mb, rank.where[i])
    given = None if last else _given(rank, i, Token.GRAD_IN, +1)
    out = rank.slot(Token.GRAD_OUT, i.stage, mb) if i.stage else None
    hands = rank.beside(i.stage - 1, mb) is not None
    shared = splits and not handed and bool(rank.program.slots)

    def run() -> None:
        x, root = saved.look()
        dy = rank.loss_seed(mb) if given is None else given.look()
        if shared and dy is not None:
            dy = dy.clone()  # a tape may keep it, and outlive its turn
        if root is not None:  # a first stage may have nothing to train
            torch.autograd.backward(root, dy)
        if out is not None:
            dx, x.grad = x.grad, None
            if dx is None:
                raise ModelError(f"the output of stage {i.stage} does not depend on its input")
            if dy is not None and _share(dx, dy):
                dx = dx.clone()  # autograd may hand on what it was given
            out.fill(rank.boundary.as_sent(dx) if hands else dx)
        saved.free()
        if given is not None:
            given.free()

    return Call(_both(_arrived(rank, i, Token.GRAD_IN), _sent(rank, i)), around(rank, i, run))


def _share(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one memory."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def backward_input(rank: Rank, i: Instr) -> Call:
    stage, left = rank.stages[i.stage], rank.slot(Token.TAPE, i.stage, i.mb)
    wait, whole = backward(rank, i, splits=True)

    def run() -> None:
        tape = Tape()
        left.fill(tape)
        none: AbstractContextManager[set[str]] = nullcontext(set())
        with recording(tape), none if stage.watched else watching(stage.module) as came:
            whole()
        could = set() if len(tape) else could_wait(stage.module)
        if could & came:
            raise ModelError(
                f"layers of {_name(stage, i)} are made to be split, but I ran its whole backward",
                hint="do not run the stage under torch.compile",
            )
        stage.watched = not could  # what this microbatch has not used, another may
        if not stage.warned_of_layers and not could:
            stage.warned_of_layers = True
            if alone := left_whole(stage.module, came, bool(len(tape))):
                warnings.warn(f"{_name(stage, i)} is not split in {alone}", stacklevel=2)

    return Call(wait, on_version(rank, i, run))


def _name(stage: Stage, i: Instr) -> str:
    return f"{type(stage.module).__name__} (stage {i.stage})"


def backward_weight(rank: Rank, i: Instr) -> Call:
    left = rank.slot(Token.TAPE, i.stage, i.mb)

    def run() -> None:
        left.look().run()
        left.free()

    return Call(None, around(rank, i, run))


def _given(rank: Rank, i: Instr, kind: Token, hop: int) -> Slot:
    """Where what an instruction takes in lives: handed over by the stage beside, or received."""
    if rank.beside(i.stage + hop, i.mb) is None:
        return rank.slot(kind, i.stage, i.mb)
    return rank.slot(HANDED[kind][0], i.stage + hop, i.mb)


def _sent(rank: Rank, i: Instr) -> Callable[[], None] | None:
    """Waits until the slot that an instruction fills is left, where a send had it last."""
    send = rank.left.get(rank.where[i])
    if send is None:
        return None

    return partial(rank.let_go, send)


def _both(
    one: Callable[[], None] | None, other: Callable[[], None] | None
) -> Callable[[], None] | None:
    if one is None or other is None:
        return one or other

    def wait() -> None:
        one()
        other()

    return wait


# ------------------------------------------------------------ transfers


def send(rank: Rank, i: Instr) -> Call:
    mb, row, k = i.mb, ROWS[i.op], rank.where[i]
    kind = row.needs[0]
    out = rank.slot(kind, i.stage, mb)
    peer = int(rank.plan.rank_at(i.stage + row.hop, mb))
    start, sending, lane = rank.transport.send, rank.sending, row.lane
    scattered = (_SCATTERS[kind], i.stage, mb) in rank.where  # into static memory, if need be
    own = rank.outgoing(kind, out.number) if rank.transport.static and not scattered else None

    def run() -> None:
        tensor = out.look()
        tensor = tensor.contiguous() if own is None else own.copy_(tensor)
        # The reference stays until the send has ended: freed earlier, it may be reused.
        sending[k] = (start(tensor, peer, lane), tensor)
        out.free()

    return Call(None, run)


def recv(rank: Rank, i: Instr) -> Call:
    mb, row = i.mb, ROWS[i.op]
    kind = row.gives[0]
    given, peer = rank.slot(kind, i.stage, mb), int(rank.plan.rank_at(i.stage + row.hop, mb))
    whole = rank.buffers[kind, given.number]
    part = own_part(rank.transport, whole) if (_GATHERS[kind], i.stage, mb) in rank.where else whole
    start, arriving, lane = rank.transport.recv, rank.stages[i.stage].arriving, row.lane

    def run() -> None:
        given.fill(whole)
        arriving[kind, mb] = start(part, peer, lane)

    return Call(None, run)


def _arrived(rank: Rank, i: Instr, kind: Token) -> Callable[[], None] | None:
    """Waits until what an instruction takes in is there, if it comes by message.

    Then what the message proves to have arrived is let go.
    """
    k = rank.where.get((_RECEIVES[kind], i.stage, i.mb))
    if k is None:
        return None
    arriving, key, known = rank.stages[i.stage].arriving, (kind, i.mb), rank.known.get(k, ())

    def wait() -> None:
        arriving.pop(key).wait()
        for send in known:
            rank.let_go(send)

    return wait


def scatter(rank: Rank, i: Instr) -> Call:
    kind = ROWS[i.op].gives[0]
    out = rank.slot(kind, i.stage, i.mb)
    own = (
        own_part(rank.transport, rank.outgoing(kind, out.number)) if rank.transport.static else None
    )

    def run() -> None:
        # Own memory, not a view: the whole is not kept alive by what is sent of it.
        shard = pack(out.look(), rank.program.tp, rank.transport.tp_rank, own)
        out.free()
        out.fill(shard)

    return Call(None, run)


def gather(rank: Rank, i: Instr) -> Call:
    kind = ROWS[i.op].gives[0]
    whole = rank.buffers[kind, rank.slot(kind, i.stage, i.mb).number]
    flat, part = whole.view(-1), own_part(rank.transport, whole)
    arriving, key = rank.stages[i.stage].arriving, (kind, i.mb)
    aside, start = rank.transport.aside, rank.transport.collective

    def wait() -> None:
        with aside():
            arriving[key].wait()

    def run() -> None:
        with aside():
            arriving[key] = start(
                "all_gather", "tp", flat, part
            )  # which is what the boundary waits for now

    return Call(wait, run)


# A handler for every row of the instruction table.
HANDLERS: dict[Opcode, Callable[[Rank, Instr], Call]] = {
    Opcode.Forward: forward,
    Opcode.Backward: backward,
    Opcode.BackwardInput: backward_input,
    Opcode.BackwardWeight: backward_weight,
    Opcode.SendAct: send,
    Opcode.RecvAct: recv,
    Opcode.SendGrad: send,
    Opcode.RecvGrad: recv,
    Opcode.Scatter: scatter,
    Opcode.Gather: gather,
    Opcode.ScatterGrad: scatter,
    Opcode.GatherGrad: gather,
    Opcode.ReduceGrads: reductions.reduce_grads,
    Opcode.ReduceHolders: reductions.reduce_holders,
    Opcode.ReduceTied: reductions.reduce_tied,
    Opcode.ReduceNorm: reductions.reduce_norm,
    Opcode.OptimizerStep: reductions.step,
}
