"""Handlers of gradient reductions and of the optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from schedir.ir.isa.instructions import RELEASES, Instr, Opcode
from schedir.ir.pipeline.tied_weights import ranks_of
from schedir.runtime.autograd.random_streams import UPDATE
from schedir.runtime.parameters.buckets import ShardSpec, is_summed
from schedir.runtime.parameters.gradient_buffers import is_sharded, scale, spoil, sum_of_squares
from schedir.runtime.parameters.mixed_precision import are_finite
from schedir.runtime.parameters.overlapped_reduction import GradientReduction
from schedir.runtime.parameters.sharded_parameters import expect_state_of_pieces
from schedir.runtime.parameters.tied_parameters import TiedWeight, spread, summing
from schedir.runtime.rank_state import Call, State
from schedir.transports.transport import ChainedWork, Work


def reduce_grads(state: State, i: Instr) -> Call:
    gradients, versions = state.stages[i.stage].gradients, state.versions.get(i.stage)
    scaled = scaling(state, i.stage, i.mb)
    start, reducing, at = state.transport.collective, state.reducing, state.index_of[i]

    def begin(k: int) -> list[Work]:
        flat = scaled(k)
        if state.program.dp == 1:
            return []
        with state.as_of(at):
            return [start("all_reduce", "dp", flat, flat)]

    state.reductions[i] = reduction = GradientReduction(gradients, begin, versions)
    return Call(None, lambda: reducing.extend(reduction.end()))


def scaling(state: State, stage: int, update: int | None) -> Callable[[int], Tensor]:
    """What scales a buffer of a stage, by number, before it is reduced, and returns it; with the
    last of an update it takes the losses."""
    gradients, shape = state.stages[stage].gradients, state.shape
    takes = stage == shape.stages - 1 and update is not None
    taken = [  # the losses that are taken here
        mb
        for mb in range(shape.microbatches)
        if takes and shape.rank_at(stage, mb) == state.rank
        if mb // shape.per_update == update
    ]

    def scaled(k: int) -> Tensor:
        flat = gradients.flat[k]
        scale(flat, state.scale)
        # A gradient may not tell of its loss: a mean over no tokens is zero.
        if taken and not k:
            losses = torch.stack([state.losses[mb] for mb in taken])
            spoil(flat, (losses - losses).sum())
        return flat

    return scaled


def reduce_holders(state: State, i: Instr) -> Call:
    gradients, holders = state.stages[i.stage].gradients, ranks_of([i.stage], state.shape)
    start, reducing = state.transport.collective, state.reducing

    def run() -> None:
        for flat in gradients.kept:
            reducing.append(start("all_reduce", holders, flat, flat))

    # The sum over replicas comes first; what is reduced here alone, and not to parts, is there.
    return Call(state.wait_for_reductions if state.share != ShardSpec() else None, run)


def reduce_tied(state: State, i: Instr) -> Call:
    sums = [
        summing(
            w, state.shape, state.rank, state.transport, state.reducing, partial(_summed, state, w)
        )
        for w in state.tied
    ]

    def run() -> None:
        for weight in state.tied if state.adds else ():
            for copy in weight.own.values():  # which a step may not have used
                copy.grad = torch.zeros_like(copy) if copy.grad is None else copy.grad
        for begin in sums:
            begin()

    return Call(state.wait_for_reductions, run)


def _summed(state: State, weight: TiedWeight, stage: int) -> Tensor:
    """Return the gradient of a stage's copy of a tied weight, or its own part of it (ZeRO)."""
    gradients, copy = state.stages[stage].gradients, weight.own[stage]
    if state.program.zero:
        # A tied weight has a bucket of its own. From ZeRO 2 on the whole gradient has no memory.
        return next(
            kept
            for bucket, kept in zip(gradients.buckets, gradients.kept, strict=True)
            if bucket.parameters[0] is copy
        )
    assert copy.grad is not None, "gradients have their buffers"
    return copy.grad


def reduce_sequence(state: State, i: Instr) -> Call:
    """What is summed lies in buckets of its own, and so is one collective each, mostly one.

    It is little: each rank gets what all have and adds it up, in their order, whatever the library;
    so where a number lies in a buffer, or in a replica's part of it, does not change its bits.
    """
    gradients, t = state.stages[i.stage].gradients, state.program.tp
    start, reducing = state.transport.collective, state.reducing
    summed = [
        kept
        for bucket, kept in zip(gradients.buckets, gradients.kept, strict=True)
        if is_summed(bucket.parameters[0])
    ]

    def run() -> None:
        for kept in summed:
            each = kept.new_empty(t, kept.numel())
            work = start("all_gather", "tp", each.view(-1), kept)
            reducing.append(ChainedWork(work, partial(spread, *each, into=[kept])))

    return Call(state.wait_for_reductions, run)


def reduce_norm(state: State, i: Instr) -> Call:
    own, start, reducing = own_norm(state), state.transport.collective, state.reducing

    def run() -> None:
        norm = state.norms[i.mb] = own()
        reducing.append(start("all_reduce", "model", norm, norm))

    return Call(state.wait_for_reductions, run)


def own_norm(state: State) -> Callable[[], Tensor]:
    """What takes the sum of squares of the rank's own gradients: 0-dim float64.

    Those of each parameter's part of a replica, then of the part, and of all of them: in one order,
    whether each replica has one part or all have all.
    """
    counted = [
        (stage.gradients, p)
        for s, stage in state.stages.items()
        for p in stage.gradients.parameters
        # What several ranks hold in full is counted by one of them.
        if state.shape.rank_of[s] == state.rank
        and (is_sharded(p) or state.transport.tp_rank == 0)
        and not any(p is w.own.get(s) and s > w.stages[0] for w in state.tied)
    ]

    of_replicas = state.transport.collective
    parts = [[gradients.pieces[k][p] for gradients, p in counted] for k in state.share.parts]

    def own() -> Tensor:
        zero = partial(torch.zeros, (), dtype=torch.float64, device=state.device)
        sums = [zero() if (sum_ := sum_of_squares(part)) is None else sum_ for part in parts]
        each = torch.stack(sums)
        if len(parts) < state.share.replicas:
            each = each.new_empty(state.share.replicas)
            of_replicas("all_gather", "dp", each, torch.stack(sums)).wait()
        return each.sum()

    return own


def judge(max_norm: float, total: Tensor) -> tuple[Tensor, Tensor]:
    """Of the sum of squares of all gradients: whether it is finite, and what they are multiplied by
    to be clipped.  No number of it is for Python: on a GPU that would wait for it."""
    norm = total.sqrt()
    finite = norm.isfinite()
    # What is not finite is left to look at, and not made NaN everywhere.
    return finite, torch.where(finite, (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)


def judged(state: State, update: int) -> Tensor:
    """Whether an update's gradients of the rank's stages are finite, so that they may be stepped:
    0-dim bool.  They are clipped then, and parameters are what the optimizer steps."""
    if state.ahead is not None:
        finite, shrink = state.ahead.judged
    elif state.program.clip_grad_norm:
        total = state.norms.pop(update)
        finite, shrink = judge(state.held.max_norm, total)
        state.norm = total.sqrt()
    else:
        finite = are_finite(flat for s in state.stages.values() for flat in s.gradients.kept)
        if state.program.zero and state.program.dp > 1:  # each knows of its part
            spoilt = finite.logical_not().to(torch.int32)
            state.transport.collective("all_reduce", "dp", spoilt, spoilt).wait()
            finite = spoilt == 0
    if (
        state.program.clip_grad_norm and state.program.optimizer_placement == "cpu_step"
    ):  # whose host clips its copies, too
        state.shrink = shrink
    for stage in state.stages.values():
        if state.program.clip_grad_norm:
            stage.gradients.scale(shrink)
        if stage.weights is not None:
            stage.weights.expect_unwritten()
            stage.weights.rest()
    if state.program.zero:
        cut = (s.weights.views for s in state.stages.values() if s.weights is not None)
        shapes = {p: view.shape for views in cut for p, view in views}
        expect_state_of_pieces(state.optimizer, shapes)
    return finite


def step(state: State, i: Instr) -> Call:
    ahead, by_stage = state.ahead, state.program.optimizer_placement != "device"
    last, released = (
        i.mb == state.shape.optimizer_steps - 1,
        not state.program.ops.isdisjoint(RELEASES),
    )

    def run() -> None:
        finite = judged(state, i.mb) if state.verdict is None else state.verdict
        state.verdict = None
        state.finite[i.mb] = finite
        if not by_stage:
            state.let_step(finite)
        if state.loss_scale is not None:
            state.loss_scale.update(finite)
        if not last:  # the last one's gradients are left to look at
            if not released:
                state.begin_update()
            state.keep_weights(i)

    def waits() -> None:
        if not released:  # else it has, and what has begun since is of the next update
            state.wait_for_reductions()
        if state.held.states is not None:
            state.held.states.finish(last=last)

    # Whoever holds these stages too, draws as this rank does.
    first, update = min(state.stages), state.shape.microbatches + i.mb
    seeded = state.draws.seeded(UPDATE, first, update, run)
    if ahead is None:
        return Call(waits if by_stage else state.wait_for_reductions, seeded)
    ahead.update, ahead.judge = seeded, partial(judge, state.held.max_norm)
    own = own_norm(state)

    def wait() -> None:
        state.wait_for_reductions()
        ahead.hear()

    def claim() -> None:
        state.norm = own()
        ahead.step(state.norm)

    return Call(wait, claim)


def validate(state: State, i: Instr) -> Call:
    start, ahead = state.transport.collective, state.ahead
    assert ahead is not None, "the program says so"

    def run() -> None:
        total = state.norm
        ahead.follow(total, start("all_reduce", "model", total, total))

    return Call(None, run)


HANDLERS: Final = {
    Opcode.ReduceGrads: reduce_grads,
    Opcode.ReduceReplicatedStages: reduce_holders,
    Opcode.ReduceTied: reduce_tied,
    Opcode.ReduceSequenceParallelGrads: reduce_sequence,
    Opcode.ReduceNorm: reduce_norm,
    Opcode.OptimizerStep: step,
    Opcode.ReduceNormAfterStep: validate,
}
