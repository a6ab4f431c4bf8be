"""Handlers of Unshard, Reshard and ReduceScatter (ZeRO).

See `handler_registry` for the arguments and the result of a handler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from schedir.errors import ModelError
from schedir.ir.isa.instructions import (
    BACKWARD_WEIGHT_OPS,
    FORWARD_OPS,
    GRAD_ADDING_OPS,
    INSTRUCTIONS,
    Instr,
    Opcode,
    Value,
)
from schedir.runtime.handlers.reduction_handlers import make_scaler
from schedir.runtime.parameters.overlapped_reduction import GradientReduction
from schedir.runtime.parameters.sharded_parameters import ShardedParameters
from schedir.runtime.program_state import Call, Handler, ProgramState, chain_calls
from schedir.runtime.services.pending_reductions import PendingReductions
from schedir.runtime.services.sharded_stages import ShardedStages
from schedir.runtime.stage_state import StageState
from schedir.runtime.value_slots import Slot
from schedir.transports.transport import ChainedWork, CompletedWork, Work

_WEIGHT_READERS: Final = tuple(
    r.op for r in INSTRUCTIONS if Value.UNSHARDED_PARAMS in {*r.needs} - {*r.frees}
)


def unshard(state: ProgramState, i: Instr) -> Call:
    """Return the call of Unshard: start to gather the weights of a stage."""
    weights = state.stages[i.stage].sharded_parameters
    return Call(None, partial(weights.start_unshard, state.transport.start_collective))


def reshard(state: ProgramState, i: Instr) -> Call:
    """Return the call of Reshard: release the full weights of a stage."""
    return Call(None, state.stages[i.stage].sharded_parameters.reshard)


def reduce_scatter(state: ProgramState, i: Instr) -> Call:
    """Return the call of ReduceScatter: reduce a stage's gradients to the replicas' shards.

    From ZeRO level 2 on, the first ReduceScatter of a stage overwrites the shard of the gradient,
    and the others add to it. Each one releases the full buffers.
    """
    gradients = state.stages[i.stage].gradients
    start, index = state.transport.start_collective, state.index_of[i]
    reductions = state.service(PendingReductions)
    is_last_occurrence = not any(j[:2] == i[:2] and j.mb > i.mb for j in state.stream)
    scale_flat = make_scaler(state, i.stage, 0 if is_last_occurrence else None)

    def keep_shard(k: int) -> None:
        if gradients.is_grad_sharded:
            shard = gradients.buckets[k].get_shard(gradients.flat[k])
            reduced_flat = gradients.reduced_flat[k]
            reduced_flat.add_(shard) if i.mb else reduced_flat.copy_(shard)
            gradients.release(k)

    def begin(k: int) -> list[Work]:
        flat, bucket = scale_flat(k), gradients.buckets[k]
        if bucket.shard_spec.replicas == 1 or not flat.numel():
            return [ChainedWork(CompletedWork(), partial(keep_shard, k))]
        with state.observer.attribute_to(index):
            work = start("reduce_scatter", bucket.get_group("dp"), bucket.get_shard(flat), flat)
            return [ChainedWork(work, partial(keep_shard, k))]

    reductions.by_instruction[i] = reduction = GradientReduction(gradients, begin)

    def run() -> None:
        reductions.reduce_scatters.append((index, reduction.end()))
        gradients.is_allocated = not gradients.is_grad_sharded

    return Call(None, run)


def _wrap_weight_reader(handler: Handler, state: ProgramState, i: Instr) -> Call:
    """Add waits and checks to an instruction that reads full weights or adds to a full gradient."""
    call, stage = handler(state, i), state.stages[i.stage]
    waits = [call.wait]
    weights = stage.sharded_parameters
    if weights.is_sharded and i.op in _WEIGHT_READERS:
        state.service(ShardedStages)  # create the service, which shards weights between steps
        waits.append(weights.finish_unshard)
    if stage.gradients.is_grad_sharded and i.op in GRAD_ADDING_OPS:
        reductions = state.service(PendingReductions)
        waits.append(partial(reductions.allocate_gradient, i.stage, state.index_of[i]))
    if not weights.keeps_full_weights:
        if i.op in BACKWARD_WEIGHT_OPS:
            deferred = state.find_slot(Value.DEFERRED_WGRAD, i.stage, i.mb)
            call = call._replace(run=partial(_run_guarded_wgrad, weights, deferred, call.run))
        if i.op in FORWARD_OPS:
            call = call._replace(run=partial(_run_guarded_forward, stage, weights, call.run))
    return call._replace(wait=chain_calls(*waits))


def _run_guarded_wgrad(
    weights: ShardedParameters, deferred_slot: Slot, run: Callable[[], None]
) -> None:
    """Run a BackwardWeight. If weights are sharded, custom gradient rules must not read them."""
    needs_guard = not weights.is_unsharded and deferred_slot.peek().has_custom_rule
    with _ReadGuard(*_DEFERRED_READ_ERROR) if needs_guard else nullcontext():
        run()


def _run_guarded_forward(
    stage: StageState, weights: ShardedParameters, run: Callable[[], None]
) -> None:
    """Run a Forward. The first Forward in each mode must not read weights of other stages.

    The mode is training or evaluation.
    """
    training = stage.module.training
    if training in stage.checked_read_modes:
        run()
        return
    with _ReadGuard(*_OTHER_STAGE_ERROR, refused_storages=weights.list_other_weights()):
        run()
    stage.checked_read_modes.add(training)


_DEFERRED_READ_ERROR: Final = (
    "a rule of a deferred gradient reads a weight, but the weight is sharded when W runs",
    "let the forward of the split return what the rule needs, or set zero=2",
)
_OTHER_STAGE_ERROR: Final = (
    "a stage reads a weight of another stage, but that weight is sharded at this time",
    "set zero=2, or give the stage a copy of the weight in a buffer",
)


class _ReadGuard(TorchDispatchMode):
    """Refuse reads of tensors that have no memory, or whose storage is in `refused_storages`."""

    def __init__(self, message: str, hint: str, refused_storages: Collection[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.message = message
        self.hint = hint
        self.refused_storages = refused_storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        reads_no_values = func.is_view or name.startswith("new_") or name.endswith("_like")
        for t in () if reads_no_values else tree_leaves((args, kwargs or {})):
            if not isinstance(t, Tensor) or t.layout is not torch.strided or not t.nbytes:
                continue
            storage = t.untyped_storage()
            if not storage.nbytes() or storage._cdata in self.refused_storages:
                raise ModelError(self.message, hint=self.hint)
        return func(*args, **kwargs or {})


HANDLERS: Final = {
    Opcode.Unshard: unshard,
    Opcode.Reshard: reshard,
    Opcode.ReduceScatter: reduce_scatter,
}
WRAPPERS: Final = {op: _wrap_weight_reader for op in {*_WEIGHT_READERS, *GRAD_ADDING_OPS}}
