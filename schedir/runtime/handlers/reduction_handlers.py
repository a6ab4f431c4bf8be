"""Handlers of gradient reductions and of the optimizer step.

See `handler_registry` for the arguments and the result of a handler.
"""

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
from schedir.runtime.parameters.gradient_buffers import poison_if_nan, scale_buffer
from schedir.runtime.parameters.overlapped_reduction import GradientReduction
from schedir.runtime.parameters.tied_parameters import TiedWeight, make_tie_reducer, sum_into_copies
from schedir.runtime.program_state import Call, ProgramState
from schedir.runtime.services.loss_gradients import LossGradients
from schedir.runtime.services.optimizer_placement import OptimizerPlacement
from schedir.runtime.services.pending_reductions import PendingReductions
from schedir.runtime.services.stage_weight_versions import StageWeightVersions, find_weight_versions
from schedir.runtime.services.update_checks import RankOptimizer, UpdateChecks
from schedir.transports.transport import ChainedWork, Work


def reduce_grads(state: ProgramState, i: Instr) -> Call:
    """Return the call of ReduceGrads: sum the gradients of a stage over the data-parallel replicas.

    Gradients of experts are summed over the replicas that have the same experts.
    """
    gradients, versions = state.stages[i.stage].gradients, find_weight_versions(state, i.stage)
    scale_flat = make_scaler(state, i.stage, i.mb)
    reductions = state.service(PendingReductions)
    start, index = state.transport.start_collective, state.index_of[i]

    def begin(k: int) -> list[Work]:
        flat, bucket = scale_flat(k), gradients.buckets[k]
        if bucket.shard_spec.replicas == 1:
            return []
        with state.observer.attribute_to(index):
            return [start("all_reduce", bucket.get_group("dp"), flat, flat)]

    reductions.by_instruction[i] = reduction = GradientReduction(gradients, begin, versions)
    return Call(None, lambda: reductions.works.extend(reduction.end()))


def make_scaler(state: ProgramState, stage: int, update: int | None) -> Callable[[int], Tensor]:
    """Return a function that scales a gradient buffer of a stage before its reduction.

    For the last stage the function also writes NaN to the first buffer if a loss of the update is
    not finite.

    Args:
        state: The state of the rank.
        stage: The number of the stage.
        update: The update whose losses are checked. With None no losses are checked.

    Returns:
        A function that takes the index of a buffer, scales the buffer, and returns it.
    """
    gradients, shape = state.stages[stage].gradients, state.shape
    gradients_of_loss = state.service(LossGradients)
    checked_microbatches = [
        mb
        for mb in range(shape.microbatches)
        if stage == shape.stages - 1 and shape.rank_of_stage(stage, mb) == state.rank
        if mb // shape.microbatches_per_update == update
    ]

    def scale_flat(k: int) -> Tensor:
        flat = gradients.flat[k]
        scale_buffer(flat, gradients_of_loss.grad_scale)
        # For a mean over no tokens, the loss is NaN but the gradient may be finite.
        if checked_microbatches and not k:
            losses = torch.stack([state.losses[mb] for mb in checked_microbatches])
            poison_if_nan(flat, (losses - losses).sum())
        return flat

    return scale_flat


def reduce_replicated_stages(state: ProgramState, i: Instr) -> Call:
    """Return the call of ReduceReplicatedStages: sum a stage's gradients over stage replicas."""
    gradients = state.stages[i.stage].gradients
    replica_ranks = find_sharing_ranks([i.stage], state.shape)
    start, reductions = state.transport.start_collective, state.service(PendingReductions)

    def run() -> None:
        for flat in gradients.reduced_flat:
            reductions.works.append(start("all_reduce", replica_ranks, flat, flat))

    # First wait for the sum over data-parallel replicas, if there are several replicas.
    return Call(reductions.wait if state.resources.shard_spec != ShardSpec() else None, run)


def reduce_tied(state: ProgramState, i: Instr) -> Call:
    """Return the call of ReduceTied: sum the gradients of tied weights over their copies."""
    reductions = state.service(PendingReductions)
    tie_reducers = [
        make_tie_reducer(
            w,
            state.shape,
            state.rank,
            state.transport,
            reductions.works,
            partial(_get_tied_gradient, state, w),
        )
        for w in state.resources.ties.weights
    ]

    def run() -> None:
        for weight in (
            state.resources.ties.weights if state.options.gradients.accumulate_grads else ()
        ):
            for copy in weight.local_copies.values():  # a step may leave a copy unused
                copy.grad = torch.zeros_like(copy) if copy.grad is None else copy.grad
        for start_reduction in tie_reducers:
            start_reduction()

    return Call(reductions.wait, run)


def _get_tied_gradient(state: ProgramState, weight: TiedWeight, stage: int) -> Tensor:
    """Return the gradient of a stage's copy of a tied weight, or with ZeRO the replica's shard."""
    gradients, copy = state.stages[stage].gradients, weight.local_copies[stage]
    if state.program.zero:
        # A tied weight has a separate bucket. From ZeRO level 2 on, `copy.grad` has no memory.
        return next(
            gradient
            for bucket, gradient in zip(gradients.buckets, gradients.reduced_flat, strict=True)
            if bucket.parameters[0] is copy
        )
    assert copy.grad is not None, "gradients have their buffers"
    return copy.grad


def reduce_sequence_parallel_grads(state: ProgramState, i: Instr) -> Call:
    """Return the call of ReduceSequenceParallelGrads: sum gradients over the tensor-parallel ranks.

    All these ranks have the full weight, but each rank computes the gradient from its part of the
    sequence. One collective gathers a bucket of such gradients, and a stage usually has one such
    bucket. Each rank then adds the gradients in the order of the ranks. So the bits do not depend
    on the library, or on the position of a gradient in a buffer or in a replica's shard. The gather
    costs little, because these gradients are small.
    """
    gradients, t = state.stages[i.stage].gradients, state.program.tp
    start, reductions = state.transport.start_collective, state.service(PendingReductions)
    summed_flats = [
        flat
        for bucket, flat in zip(gradients.buckets, gradients.reduced_flat, strict=True)
        if is_summed_over_tp(bucket.parameters[0])
    ]

    def run() -> None:
        for flat in summed_flats:
            rank_gradients = flat.new_empty(t, flat.numel())
            work = start("all_gather", "tp", rank_gradients.view(-1), flat)
            add = partial(sum_into_copies, *rank_gradients, targets=[flat])
            reductions.works.append(ChainedWork(work, add))

    return Call(reductions.wait, run)


def optimizer_step(state: ProgramState, i: Instr) -> Call:
    """Return the call of OptimizerStep: wait for reductions, run the optimizer, end the update."""
    reductions = state.service(PendingReductions)
    checks = state.service(UpdateChecks)
    optimizer_steps = state.service(RankOptimizer)
    placement = (
        None if state.program.optimizer_placement == "device" else state.service(OptimizerPlacement)
    )
    is_last_update = i.mb == state.shape.optimizer_steps - 1
    # True if CheckGradsFinite clears the gradients before the OptimizerStep.
    has_released_grads = not state.program.used_opcodes.isdisjoint(GRADS_CHECK_OPS)

    def run() -> None:
        is_finite = checks.finish_update(i.mb)
        if placement is None:
            optimizer_steps.run(is_finite)
        if state.options.gradients.loss_scale is not None:
            state.options.gradients.loss_scale.update(is_finite)
        if not is_last_update:  # the caller may read the gradients of the last update
            if not has_released_grads:
                state.begin_update()
            state.service(StageWeightVersions).keep_next(i)

    def wait() -> None:
        # If CheckGradsFinite has already waited, the pending reductions belong to the next update.
        if not has_released_grads:
            reductions.wait()
        if placement is not None:
            placement.finish(is_last_update=is_last_update)

    # Use the first local stage as key of the random numbers, not the rank. So ranks with replicas
    # of the same stages draw the same numbers.
    first_stage = min(state.stages)
    update = state.shape.microbatches + i.mb
    run_seeded = state.random_streams.make_seeded(UPDATE, first_stage, update, run)
    return Call(wait if placement is not None else reductions.wait, run_seeded)


HANDLERS: Final = {
    Opcode.ReduceGrads: reduce_grads,
    Opcode.ReduceReplicatedStages: reduce_replicated_stages,
    Opcode.ReduceTied: reduce_tied,
    Opcode.ReduceSequenceParallelGrads: reduce_sequence_parallel_grads,
    Opcode.OptimizerStep: optimizer_step,
}
