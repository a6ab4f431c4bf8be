"""ZeRO: handlers of what makes weights whole, lets them go, and reduces gradients to parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from schedir.ir.ops import ADDS, ROWS, Instr, Opcode, Token
from schedir.runtime.rank import Call, Handler, State
from schedir.runtime.reduction import Reduction
from schedir.runtime.reduction_handlers import scaling
from schedir.transports.transport import Done, Then, Work

_READS: Final = tuple(r.op for r in ROWS if Token.FULL in {*r.needs} - {*r.frees})


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
            return [Then(Done(), partial(keep, k))]
        with state.as_of(at):
            own = bucket.part(flat, share.replica)
            return [Then(start("reduce_scatter", "dp", own, flat), partial(keep, k))]

    state.reductions[i] = reduction = Reduction(gradients, begin)

    def run() -> None:
        state.scattering.append((at, reduction.end()))
        gradients.made = not gradients.cut

    return Call(None, run)


def _reading(handler: Handler, state: State, i: Instr) -> Call:
    """As the handler, of what computes with whole weights, or adds to a whole gradient."""
    call, stage = handler(state, i), state.stages[i.stage]
    waits = [] if call.wait is None else [call.wait]
    if stage.weights is not None and i.op in _READS:
        waits.append(stage.weights.whole)
    if stage.gradients.cut and i.op in ADDS:
        waits.append(partial(state.make_room, i.stage, state.index_of[i]))
    return call._replace(wait=_all(waits)) if waits else call


def _all(waits: list[Callable[[], None]]) -> Callable[[], None]:
    if len(waits) == 1:
        return waits[0]

    def wait() -> None:
        for one in waits:
            one()

    return wait


HANDLERS: Final = {
    Opcode.Unshard: unshard,
    Opcode.Reshard: reshard,
    Opcode.ReduceScatter: reduce_scatter,
}
WRAPPERS: Final = {op: partial(partial, _reading) for op in {*_READS, *ADDS}}
