"""Handlers of gradient reductions and of the optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from schedir.ir.isa.instructions import GRADS_CHECK_OPS, Instr, Opcode
from schedir.ir.pipeline.tied_weights import find_sharing_ranks
from schedir.runtime.autograd.random_streams import UPDATE
from schedir.runtime.parameters.buckets import ShardSpec, is_summed_over_tp
from schedir.runtime.parameters.gradient_buffers import (
    compute_sum_of_squares,
    is_tp_sharded,
    poison_if_nan,
    scale_buffer,
)
from schedir.runtime.parameters.mixed_precision import are_finite
from schedir.runtime.parameters.overlapped_reduction import GradientReduction
from schedir.runtime.parameters.sharded_parameters import require_sharded_state
from schedir.runtime.parameters.tied_parameters import TiedWeight, make_tie_reducer, sum_into_copies
from schedir.runtime.rank_state import Call, State
from schedir.transports.transport import ChainedWork, Work


def reduce_grads(state: State, i: Instr) -> Call:
    gradients, versions = state.stages[i.stage].gradients, state.weight_versions.get(i.stage)
    scaled = make_scaler(state, i.stage, i.mb)
    start, reducing, at = (
        state.transport.start_collective,
        state.pending_reductions,
        state.index_of[i],
    )

    def begin(k: int) -> list[Work]:
        flat = scaled(k)
        if state.program.dp == 1:
            return []
        with state.record_as(at):
            return [start("all_reduce", "dp", flat, flat)]

    state.reductions[i] = reduction = GradientReduction(gradients, begin, versions)
    return Call(None, lambda: reducing.extend(reduction.end()))


def make_scaler(state: State, stage: int, update: int | None) -> Callable[[int], Tensor]:
    """What scales a buffer of a stage, by number, before it is reduced, and returns it; with the
    last of an update it takes the losses."""
    gradients, shape = state.stages[stage].gradients, state.shape
    takes = stage == shape.stages - 1 and update is not None
    taken = [  # the losses that are taken here
        mb
        for mb in range(shape.microbatches)
        if takes and shape.rank_of_stage(stage, mb) == state.rank
        if mb // shape.microbatches_per_update == update
    ]

    def scaled(k: int) -> Tensor:
        flat = gradients.flat[k]
        scale_buffer(flat, state.grad_scale)
        # A gradient may not tell of its loss: a mean over no tokens is zero.
        if taken and not k:
            losses = torch.stack([state.losses[mb] for mb in taken])
            poison_if_nan(flat, (losses - losses).sum())
        return flat

    return scaled


def reduce_replicated_stages(state: State, i: Instr) -> Call:
    gradients, holders = state.stages[i.stage].gradients, find_sharing_ranks([i.stage], state.shape)
    start, reducing = state.transport.start_collective, state.pending_reductions

    def run() -> None:
        for flat in gradients.reduced_flat:
            reducing.append(start("all_reduce", holders, flat, flat))

    # The sum over replicas comes first; what is reduced here alone, and not to parts, is there.
    return Call(state.wait_for_reductions if state.shard_spec != ShardSpec() else None, run)


def reduce_tied(state: State, i: Instr) -> Call:
    sums = [
        make_tie_reducer(
            w,
            state.shape,
            state.rank,
            state.transport,
            state.pending_reductions,
            partial(_get_tied_gradient, state, w),
        )
        for w in state.tied_weights
    ]

    def run() -> None:
        for weight in state.tied_weights if state.accumulate_grads else ():
            for copy in weight.local_copies.values():  # which a step may not have used
                copy.grad = torch.zeros_like(copy) if copy.grad is None else copy.grad
        for begin in sums:
            begin()

    return Call(state.wait_for_reductions, run)


def _get_tied_gradient(state: State, weight: TiedWeight, stage: int) -> Tensor:
    """Return the gradient of a stage's copy of a tied weight, or its own part of it (ZeRO)."""
    gradients, copy = state.stages[stage].gradients, weight.local_copies[stage]
    if state.program.zero:
        # A tied weight has a bucket of its own. From ZeRO 2 on the whole gradient has no memory.
        return next(
            kept
            for bucket, kept in zip(gradients.buckets, gradients.reduced_flat, strict=True)
            if bucket.parameters[0] is copy
        )
    assert copy.grad is not None, "gradients have their buffers"
    return copy.grad


def reduce_sequence_parallel_grads(state: State, i: Instr) -> Call:
    """What is summed lies in buckets of its own, and so is one collective each, mostly one.

    It is little: each rank gets what all have and adds it up, in their order, whatever the library;
    so where a number lies in a buffer, or in a replica's part of it, does not change its bits.
    """
    gradients, t = state.stages[i.stage].gradients, state.program.tp
    start, reducing = state.transport.start_collective, state.pending_reductions
    summed = [
        kept
        for bucket, kept in zip(gradients.buckets, gradients.reduced_flat, strict=True)
        if is_summed_over_tp(bucket.parameters[0])
    ]

    def run() -> None:
        for kept in summed:
            each = kept.new_empty(t, kept.numel())
            work = start("all_gather", "tp", each.view(-1), kept)
            reducing.append(ChainedWork(work, partial(sum_into_copies, *each, targets=[kept])))

    return Call(state.wait_for_reductions, run)


def reduce_norm(state: State, i: Instr) -> Call:
    own, start, reducing = (
        make_local_squared_norm(state),
        state.transport.start_collective,
        state.pending_reductions,
    )

    def run() -> None:
        norm = state.squared_norms[i.mb] = own()
        reducing.append(start("all_reduce", "model", norm, norm))

    return Call(state.wait_for_reductions, run)


def make_local_squared_norm(state: State) -> Callable[[], Tensor]:
    """What takes the sum of squares of the rank's own gradients: 0-dim float64.

    Those of each parameter's part of a replica, then of the part, and of all of them: in one order,
    whether each replica has one part or all have all.
    """
    counted = [
        (stage.gradients, p)
        for s, stage in state.stages.items()
        for p in stage.gradients.parameters
        # What several ranks hold in full is counted by one of them.
        if state.shape.first_rank_per_stage[s] == state.rank
        and (is_tp_sharded(p) or state.transport.tp_rank == 0)
        and not any(p is w.local_copies.get(s) and s > w.stages[0] for w in state.tied_weights)
    ]

    of_replicas = state.transport.start_collective
    parts = [
        [gradients.shard_views[k][p] for gradients, p in counted]
        for k in state.shard_spec.shard_indices
    ]

    def own() -> Tensor:
        zero = partial(torch.zeros, (), dtype=torch.float64, device=state.device)
        sums = [
            zero() if (sum_ := compute_sum_of_squares(part)) is None else sum_ for part in parts
        ]
        each = torch.stack(sums)
        if len(parts) < state.shard_spec.replicas:
            each = each.new_empty(state.shard_spec.replicas)
            of_replicas("all_gather", "dp", each, torch.stack(sums)).wait()
        return each.sum()

    return own


def compute_clip_factor(max_norm: float, squared_norm: Tensor) -> tuple[Tensor, Tensor]:
    """Of the sum of squares of all gradients: whether it is finite, and what they are multiplied by
    to be clipped.  No number of it is for Python: on a GPU that would wait for it."""
    norm = squared_norm.sqrt()
    finite = norm.isfinite()
    # What is not finite is left to look at, and not made NaN everywhere.
    return finite, torch.where(finite, (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)


def check_and_clip_grads(state: State, update: int) -> Tensor:
    """Whether an update's gradients of the rank's stages are finite, so that they may be stepped:
    0-dim bool.  They are clipped then, and parameters are what the optimizer steps."""
    if state.optimistic_step is not None:
        finite, shrink = state.optimistic_step.verdict
    elif state.program.clip_grad_norm:
        total = state.squared_norms.pop(update)
        finite, shrink = compute_clip_factor(state.resources.max_norm, total)
        state.grad_norm = total.sqrt()
    else:
        finite = are_finite(
            flat for s in state.stages.values() for flat in s.gradients.reduced_flat
        )
        if state.program.zero and state.program.dp > 1:  # each knows of its part
            spoilt = finite.logical_not().to(torch.int32)
            state.transport.start_collective("all_reduce", "dp", spoilt, spoilt).wait()
            finite = spoilt == 0
    if (
        state.program.clip_grad_norm and state.program.optimizer_placement == "cpu_step"
    ):  # whose host clips its copies, too
        state.clip_factor = shrink
    for stage in state.stages.values():
        if state.program.clip_grad_norm:
            stage.gradients.scale(shrink)
        if stage.sharded_parameters is not None:
            stage.sharded_parameters.require_unwritten()
            stage.sharded_parameters.to_resting_state()
    if state.program.zero:
        cut = (
            s.sharded_parameters.full_views
            for s in state.stages.values()
            if s.sharded_parameters is not None
        )
        shapes = {p: view.shape for views in cut for p, view in views}
        require_sharded_state(state.optimizer, shapes)
    return finite


def optimizer_step(state: State, i: Instr) -> Call:
    ahead, by_stage = state.optimistic_step, state.program.optimizer_placement != "device"
    last, released = (
        i.mb == state.shape.optimizer_steps - 1,
        not state.program.used_opcodes.isdisjoint(GRADS_CHECK_OPS),
    )

    def run() -> None:
        finite = (
            check_and_clip_grads(state, i.mb)
            if state.is_update_finite is None
            else state.is_update_finite
        )
        state.is_update_finite = None
        state.finite_updates[i.mb] = finite
        if not by_stage:
            state.step_optimizer(finite)
        if state.loss_scale is not None:
            state.loss_scale.update(finite)
        if not last:  # the last one's gradients are left to look at
            if not released:
                state.begin_update()
            state.save_weight_version(i)

    def waits() -> None:
        if not released:  # else it has, and what has begun since is of the next update
            state.wait_for_reductions()
        if state.resources.host_optimizer_state is not None:
            state.resources.host_optimizer_state.finish(is_last_update=last)

    # Whoever holds these stages too, draws as this rank does.
    first, update = min(state.stages), state.shape.microbatches + i.mb
    seeded = state.random_streams.make_seeded(UPDATE, first, update, run)
    if ahead is None:
        return Call(waits if by_stage else state.wait_for_reductions, seeded)
    ahead.apply_update, ahead.judge_norm = (
        seeded,
        partial(compute_clip_factor, state.resources.max_norm),
    )
    own = make_local_squared_norm(state)

    def wait() -> None:
        state.wait_for_reductions()
        ahead.wait_for_previous_norm()

    def claim() -> None:
        state.grad_norm = own()
        ahead.step(state.grad_norm)

    return Call(wait, claim)


def reduce_norm_after_step(state: State, i: Instr) -> Call:
    start, ahead = state.transport.start_collective, state.optimistic_step
    assert ahead is not None, "the program says so"

    def run() -> None:
        total = state.grad_norm
        ahead.track_norm(total, start("all_reduce", "model", total, total))

    return Call(None, run)


HANDLERS: Final = {
    Opcode.ReduceGrads: reduce_grads,
    Opcode.ReduceReplicatedStages: reduce_replicated_stages,
    Opcode.ReduceTied: reduce_tied,
    Opcode.ReduceSequenceParallelGrads: reduce_sequence_parallel_grads,
    Opcode.ReduceNorm: reduce_norm,
    Opcode.OptimizerStep: optimizer_step,
    Opcode.ReduceNormAfterStep: reduce_norm_after_step,
}
