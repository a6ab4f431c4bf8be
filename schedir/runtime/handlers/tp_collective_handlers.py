"""Handlers of tensor-parallel collectives between the segments of a stage.

Of what a piece hands over the first tensor is summed, in its place; what else passes, as a residual
stream, passes untouched.  The group is at it beside what computes, until the next piece takes it.
Where ranks share the sequence, each is left its own tokens of the sum, and what goes the other way
there is gathered: of each one's own tokens all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from torch import Tensor
from torch.autograd.graph import increment_version

from schedir.errors import ModelError
from schedir.ir.isa.instructions import (
    BOUNDARY_COLLECTIVES,
    GATHERS,
    LOCAL_HANDOVER,
    ROWS,
    Instr,
    Value,
    between_segments,
)
from schedir.runtime.handlers.transfer_handlers import gather as gather_received
from schedir.runtime.model_checks.memory_overlap import share_memory
from schedir.runtime.parameters.sequence_layout import by_rank, in_order
from schedir.runtime.rank_state import Call, State
from schedir.runtime.value_slots import OutputSlot
from schedir.transports.transport import ChainedWork, Transport, Work


def sum_(state: State, i: Instr) -> Call:
    return _meeting(state, i, _own_tokens if state.program.sequence_parallel else _in_place)


def gather(state: State, i: Instr) -> Call:
    if i.op in between_segments(state.program.sequence_parallel):
        return _meeting(state, i, _all_tokens)
    return gather_received(state, i)


class _SegmentOutput(NamedTuple):
    """What a piece hands over, and who meets for its first tensor."""

    slot: OutputSlot
    transport: Transport

    def put(self, first: Tensor, rest: Sequence[Tensor]) -> None:
        """Another first tensor in its place."""
        self.slot.free()
        self.slot.fill((first, *rest))


def _meeting(state: State, i: Instr, start: Callable[[_SegmentOutput], Work]) -> Call:
    """Starts what ranks do with the first tensor of what a piece hands over."""
    kind = ROWS[i.op].gives[0]
    other, (made, _) = state.program.other(kind, i.stage), LOCAL_HANDOVER[kind]
    slot = state.slot(made, other, i.mb)
    assert isinstance(slot, OutputSlot)
    handed = _SegmentOutput(slot, state.transport)
    before = min(i.stage, other)
    if not (first := state.passing[i.mb].carried(Value.ACT_OUT, before).tensors[0]).grad:
        raise ModelError(
            f"{i} {'gathers' if i.op in GATHERS else 'sums'} the first tensor that passes between "
            f"stages {before} and {before + 1}, and that has no gradient: {first}",
            hint="what is summed comes first, and beside it what passes on as it is",
        )
    arrivals, key = state.stages[i.stage].arrivals, (kind, i.mb)

    def run() -> None:
        arrivals[key] = ChainedWork(start(handed), handed.slot.accept_write)

    return Call(None, run)


def _in_place(handed: _SegmentOutput) -> Work:
    own, *rest = handed.slot.look()
    if any(share_memory(own, one) for one in rest):
        own = own.clone()
        handed.put(own, rest)
    else:  # who has saved it for a backward must not take the sum for it
        increment_version(own)
    return handed.transport.collective("all_reduce", "tp", own, own)


def _own_tokens(handed: _SegmentOutput) -> Work:
    whole, *rest = handed.slot.look()
    parts = by_rank(whole, handed.transport.tp)
    own = parts.new_empty(parts.shape[1:])
    handed.put(own, rest)
    flat = parts.view(-1)
    return handed.transport.collective("reduce_scatter", "tp", own.view(-1), flat)


def _all_tokens(handed: _SegmentOutput) -> Work:
    own, *rest = handed.slot.look()
    parts = own.new_empty(handed.transport.tp, *own.shape)
    work = handed.transport.collective("all_gather", "tp", parts.view(-1), own.view(-1))
    if own.shape[:-2].numel() == 1:  # of one sequence all tokens lie in order
        handed.put(in_order(parts), rest)
        return work
    return ChainedWork(work, lambda: handed.put(in_order(parts), rest))


HANDLERS: Final = {op: gather if op in GATHERS else sum_ for op in BOUNDARY_COLLECTIVES}
