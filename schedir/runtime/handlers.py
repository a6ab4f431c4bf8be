"""Handlers: what each instruction does.  One for every row of the instruction table.

A handler links an instruction of a rank to a Call: everything that can be looked up is looked
up then, and running it is only the work.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from schedir.errors import ModelError
from schedir.kernels.boundary import pack
from schedir.ops import ROWS, Instr, Lane, Opcode
from schedir.runtime.gradients import is_sharded
from schedir.runtime.rank import Call, Rank, Stage
from schedir.runtime.split import SplitLinear, Tape, recording

T = TypeVar("T")

# ------------------------------------------------------------ compute


def forward(rank: Rank, i: Instr) -> Call:
    stage, mb, last = rank.stages[i.stage], i.mb, i.stage == rank.plan.stages - 1
    after = rank.beside(i.stage + 1, mb)
    grad = rank.program.trains

    def run() -> None:
        x = rank.inputs[mb] if i.stage == 0 else _take(stage.act_in, mb)
        with torch.set_grad_enabled(grad):
            if i.stage > 0:
                x.requires_grad_(grad)
            y: Tensor = stage.module(x)
            if last:
                y = rank.loss(y, rank.targets[mb])
            else:
                rank.boundary.expect(y, f"stage {i.stage}")
        if last:
            rank.losses[mb] = y.detach()
        elif after is not None:
            after.act_in[mb] = y.detach()
        else:
            stage.act_out[mb] = y.detach()
        if grad:
            stage.saved[mb] = (x, y)

    return Call(_arrived(rank, i, Lane.ACT), run)


def backward(rank: Rank, i: Instr) -> Call:
    stage, mb = rank.stages[i.stage], i.mb
    before = rank.beside(i.stage - 1, mb)
    last = i.stage == rank.plan.stages - 1

    def run() -> None:
        x, y = _take(stage.saved, mb)
        dy = None if last else _take(stage.grad_in, mb)
        if y.requires_grad:  # a first stage may have nothing to train
            torch.autograd.backward(y, dy)
        if i.stage == 0:
            return
        dx, x.grad = x.grad, None
        if dx is None:
            raise ModelError(f"the output of stage {i.stage} does not depend on its input")
        if before is not None:
            before.grad_in[mb] = dx
        else:
            stage.grad_out[mb] = dx

    return Call(_arrived(rank, i, Lane.GRAD), run)


def backward_input(rank: Rank, i: Instr) -> Call:
    stage, mb = rank.stages[i.stage], i.mb
    wait, whole = backward(rank, i)

    def run() -> None:
        tape = stage.tape[mb] = Tape()
        with recording(tape):
            whole()
        if not len(tape) and stage.gradients.parameters:
            _unsplit(stage, i)

    return Call(wait, run)


def _unsplit(stage: Stage, i: Instr) -> None:
    """Say once that nothing was left for W; refuse it where something should have been."""
    layers = [*stage.module.modules()]
    name = f"{type(stage.module).__name__} (stage {i.stage})"
    if any(isinstance(layer, SplitLinear) and layer.weight.requires_grad for layer in layers):
        raise ModelError(
            f"the linears of {name} are made to be split, but I ran its whole backward",
            hint="do not run the stage under torch.compile",
        )
    if not stage.warned:
        stage.warned = True
        plain = any(type(layer) is torch.nn.Linear for layer in layers)
        warnings.warn(
            f"{name} cannot be split: I runs its whole backward and W nothing"
            + "; schedir.runtime.split_linears(module) would split its linears" * plain,
            stacklevel=2,
        )


def backward_weight(rank: Rank, i: Instr) -> Call:
    stage, mb = rank.stages[i.stage], i.mb
    return Call(None, lambda: _take(stage.tape, mb).run())


# ------------------------------------------------------------ transfers


def send(rank: Rank, i: Instr) -> Call:
    stage, mb, row, k = rank.stages[i.stage], i.mb, ROWS[i.op], rank.where[i]
    values = stage.act_out if i.op == Opcode.SendAct else stage.grad_out
    peer = int(rank.plan.rank_at(i.stage + row.hop, mb))

    def run() -> None:
        tensor = _take(values, mb).contiguous()
        # The reference stays until the send has ended: freed earlier, it may be reused.
        rank.sending[k] = (rank.transport.send(tensor, peer, row.lane), tensor)

    return Call(None, run)


def recv(rank: Rank, i: Instr) -> Call:
    stage, mb, row = rank.stages[i.stage], i.mb, ROWS[i.op]
    act = i.op == Opcode.RecvAct
    values = stage.act_in if act else stage.grad_in
    peer = int(rank.plan.rank_at(i.stage + row.hop, mb))
    gather = Opcode.Gather if act else Opcode.GatherGrad
    shape = rank.boundary.shape
    if (gather, i.stage, mb) in rank.where:
        shape = (torch.Size(shape).numel() // rank.program.tp,)

    def run() -> None:
        buffer = torch.empty(shape, dtype=rank.boundary.dtype, device=rank.device)
        values[mb] = buffer
        stage.arriving[row.lane, mb] = rank.transport.recv(buffer, peer, row.lane)

    return Call(None, run)


def _arrived(rank: Rank, i: Instr, lane: Lane) -> Callable[[], None] | None:
    """Waits until what an instruction takes in is there, if it comes by message.

    Then what the message proves to have arrived is let go.
    """
    receive = Opcode.RecvAct if lane is Lane.ACT else Opcode.RecvGrad
    k = rank.where.get((receive, i.stage, i.mb))
    if k is None:
        return None
    stage, key, known = rank.stages[i.stage], (lane, i.mb), rank.known.get(k, ())

    def wait() -> None:
        work = stage.arriving.pop(key, None)
        if work is not None:  # else a gather has waited already
            work.wait()
            rank.ends(k)
            for send in known:
                rank.sending.pop(send)[0].wait()

    return wait


def scatter(rank: Rank, i: Instr) -> Call:
    stage, mb = rank.stages[i.stage], i.mb
    values = stage.act_out if i.op == Opcode.Scatter else stage.grad_out

    def run() -> None:
        # Own memory, not a view: the whole is not kept alive by what is sent of it.
        values[mb] = pack(_take(values, mb), rank.program.tp, rank.transport.tp_rank)

    return Call(None, run)


def gather(rank: Rank, i: Instr) -> Call:
    stage, mb = rank.stages[i.stage], i.mb
    act = i.op == Opcode.Gather
    values = stage.act_in if act else stage.grad_in

    def run() -> None:
        whole = torch.empty(rank.boundary.shape, dtype=rank.boundary.dtype, device=rank.device)
        rank.transport.all_gather(whole.view(-1), _take(values, mb)).wait()
        values[mb] = whole

    return Call(_arrived(rank, i, Lane.ACT if act else Lane.GRAD), run)


# ------------------------------------------------------------ reductions and step


def reduce_grads(rank: Rank, i: Instr) -> Call:
    gradients, k = rank.stages[i.stage].gradients, rank.where[i]

    def run() -> None:
        gradients.scale(rank.scale)
        if rank.program.dp > 1:
            for flat in gradients.flat:
                rank.reducing.append((k, rank.transport.all_reduce(flat, "dp")))

    return Call(None, run)


def _reduced(rank: Rank) -> None:
    """Waits until every reduction that was begun has ended: that is when it ends."""
    for k, work in rank.reducing:
        work.wait()
        rank.ends(k)
    rank.reducing.clear()


def reduce_holders(rank: Rank, i: Instr) -> Call:
    gradients, k = rank.stages[i.stage].gradients, rank.where[i]

    def run() -> None:
        for flat in gradients.flat:
            rank.reducing.append((k, rank.transport.all_reduce(flat, "holders")))

    return Call(partial(_reduced, rank), run)


def reduce_tied(rank: Rank, i: Instr) -> Call:
    stage, k = rank.stages[i.stage], rank.where[i]
    both = {0, rank.plan.stages - 1} <= {*rank.stages}

    def grad(stage: Stage) -> Tensor:
        assert stage.tied_weight is not None and stage.tied_weight.grad is not None
        return stage.tied_weight.grad

    def run() -> None:
        if both:  # the copies are on one rank: first plus last, written to both
            last = grad(rank.stages[rank.plan.stages - 1])
            last.copy_(grad(stage).add_(last))
        else:
            rank.reducing.append((k, rank.transport.all_reduce(grad(stage), "tied")))

    return Call(partial(_reduced, rank), run)


def reduce_norm(rank: Rank, i: Instr) -> Call:
    k = rank.where[i]
    counted = [
        p
        for s, stage in rank.stages.items()
        for p in stage.gradients.parameters
        # What several ranks hold in full is counted by one of them.
        if rank.plan.rank_of[s] == rank.rank
        and (is_sharded(p) or rank.transport.tp_rank == 0)
        and not (rank.program.tied and s > 0 and p is stage.tied_weight)
    ]

    def run() -> None:
        squares = [p.grad.double().square().sum() for p in counted if p.grad is not None]
        rank.norm = torch.stack(squares).sum() if squares else torch.zeros_like(rank.norm)
        rank.reducing.append((k, rank.transport.all_reduce(rank.norm, "model")))

    return Call(partial(_reduced, rank), run)


def step(rank: Rank, i: Instr) -> Call:
    def run() -> None:
        if rank.program.clip:
            rank.norm = rank.norm.sqrt()
            # Never a Python number: on a GPU that would wait for it.
            shrink = (rank.max_norm / (rank.norm + 1e-6)).clamp(max=1.0)
            for stage in rank.stages.values():
                stage.gradients.scale(shrink)
        if rank.optimizer is not None:
            rank.optimizer.step()

    return Call(partial(_reduced, rank), run)


def _take(slots: list[T | None], mb: int) -> T:
    value, slots[mb] = slots[mb], None
    assert value is not None, "the checker proves that every value is there"
    return value


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
    Opcode.ReduceGrads: reduce_grads,
    Opcode.ReduceHolders: reduce_holders,
    Opcode.ReduceTied: reduce_tied,
    Opcode.ReduceNorm: reduce_norm,
    Opcode.OptimizerStep: step,
}
