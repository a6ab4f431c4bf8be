"""Handlers of Unshard, Reshard and ReduceScatter (ZeRO)."""

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
from schedir.ir.isa.instructions import ADDS, FORWARDS, LATE, ROWS, Instr, Opcode, Value
from schedir.runtime.handlers.reduction_handlers import scaling
from schedir.runtime.parameters.overlapped_reduction import GradientReduction
from schedir.runtime.parameters.sharded_parameters import ShardedParameters
from schedir.runtime.rank_state import Call, Handler, State, in_turn
from schedir.runtime.stage_state import StageState
from schedir.runtime.value_slots import Slot
from schedir.transports.transport import ChainedWork, CompletedWork, Work

_READS: Final = tuple(r.op for r in ROWS if Value.UNSHARDED_PARAMS in {*r.needs} - {*r.frees})


def unshard(state: State, i: Instr) -> Call:
    parts = state.stages[i.stage].weights
    assert parts is not None, "a program without ZeRO gathers nothing"
    return Call(None, partial(parts.gather, state.transport.collective))


def reshard(state: State, i: Instr) -> Call:
    parts = state.stages[i.stage].weights
    assert parts is not None
    return Call(None, parts.let_go)


def reduce_scatter(state: State, i: Instr) -> Call:
    """Of a gradient that is cut each turn is added to the part, and its buffers are let go."""
    gradients, share = state.stages[i.stage].gradients, state.share
    start, at = state.transport.collective, state.index_of[i]
    final = not any(j[:2] == i[:2] and j.mb > i.mb for j in state.stream)
    scaled = scaling(state, i.stage, 0 if final else None)

    def keep(k: int) -> None:
        if gradients.cut:
            own = gradients.buckets[k].part(gradients.flat[k], share.replica)
            gradients.kept[k].add_(own) if i.mb else gradients.kept[k].copy_(own)
            gradients.let_go(k)

    def begin(k: int) -> list[Work]:
        flat, bucket = scaled(k), gradients.buckets[k]
        if share.replicas == 1 or not flat.numel():
            return [ChainedWork(CompletedWork(), partial(keep, k))]
        with state.as_of(at):
            own = bucket.part(flat, share.replica)
            return [ChainedWork(start("reduce_scatter", "dp", own, flat), partial(keep, k))]

    state.reductions[i] = reduction = GradientReduction(gradients, begin)

    def run() -> None:
        state.scattering.append((at, reduction.end()))
        gradients.made = not gradients.cut

    return Call(None, run)


def _reading(handler: Handler, state: State, i: Instr) -> Call:
    """As the handler, of what computes with whole weights, or adds to a whole gradient."""
    call, stage = handler(state, i), state.stages[i.stage]
    waits = [call.wait]
    if stage.weights is not None and i.op in _READS:
        waits.append(stage.weights.whole)
    if stage.gradients.cut and i.op in ADDS:
        waits.append(partial(state.make_room, i.stage, state.index_of[i]))
    if stage.weights is not None and not stage.weights.stays and i.op in LATE:
        call = call._replace(run=partial(_watched, stage.weights, _tape(state, i), call.run))
    if stage.weights is not None and not stage.weights.stays and i.op in FORWARDS:
        call = call._replace(run=partial(_looked_at, stage, call.run))
    return call._replace(wait=in_turn(*waits))


def _tape(state: State, i: Instr) -> Slot:
    return state.slot(Value.DEFERRED_WGRAD, i.stage, i.mb)


def _watched(parts: ShardedParameters, tape: Slot, run: Callable[[], None]) -> None:
    """Run a W, for which nobody makes weights whole: rules that somebody has taught are watched."""
    watch = not parts.is_whole and tape.look().taught
    with _ReadGuard(*_LATER) if watch else nullcontext():
        run()


def _looked_at(stage: StageState, run: Callable[[], None]) -> None:
    """Run an F; the first in each mode is watched: it may read weights of another stage."""
    training = stage.module.training
    if training in stage.watched or stage.weights is None:
        run()
        return
    with _ReadGuard(*_OTHERS, refused=stage.weights.storages_of_others()):
        run()
    stage.watched.add(training)


_LATER: Final = (
    "a split's rule of a later gradient reads a weight, which is in parts by then",
    "let its forward keep what it needs, or zero=2",
)
_OTHERS: Final = (
    "a stage reads a weight of another one, which is in parts meanwhile",
    "zero=2, or let it have a copy in a buffer",
)


class _ReadGuard(TorchDispatchMode):
    """Refuses every read of a tensor without memory, and of `refused` storages, by `_cdata`."""

    def __init__(self, what: str, hint: str, refused: Collection[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.what, self.hint, self.refused = what, hint, refused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        looks = func.is_view or name.startswith("new_") or name.endswith("_like")
        for t in () if looks else tree_leaves((args, kwargs or {})):
            if not isinstance(t, Tensor) or t.layout is not torch.strided or not t.nbytes:
                continue
            storage = t.untyped_storage()
            if not storage.nbytes() or storage._cdata in self.refused:
                raise ModelError(self.what, hint=self.hint)
        return func(*args, **kwargs or {})


HANDLERS: Final = {
    Opcode.Unshard: unshard,
    Opcode.Reshard: reshard,
    Opcode.ReduceScatter: reduce_scatter,
}
WRAPPERS: Final = {op: partial(partial, _reading) for op in {*_READS, *ADDS}}
