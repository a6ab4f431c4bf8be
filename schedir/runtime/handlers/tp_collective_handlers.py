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
    BOUNDARY_COLLECTIVE_OPS,
    BOUNDARY_GATHER_OPS,
    INSTRUCTIONS,
    LOCAL_HANDOVER,
    Instr,
    Value,
    find_segment_collectives,
)
from schedir.runtime.handlers.transfer_handlers import gather_message as gather_received
from schedir.runtime.model_checks.memory_overlap import has_same_storage
from schedir.runtime.parameters.sequence_layout import join_sequence, split_by_rank
from schedir.runtime.rank_state import Call, State
from schedir.runtime.value_slots import OutputSlot
from schedir.transports.transport import ChainedWork, Transport, Work


def tp_reduce(state: State, i: Instr) -> Call:
    return _make_collective_call(
        state, i, _reduce_scatter_tokens if state.program.sequence_parallel else _reduce_in_place
    )


def tp_gather(state: State, i: Instr) -> Call:
    if i.op in find_segment_collectives(state.program.sequence_parallel):
        return _make_collective_call(state, i, _gather_tokens)
    return gather_received(state, i)


class _SegmentOutput(NamedTuple):
    """What a piece hands over, and who meets for its first tensor."""

    slot: OutputSlot
    transport: Transport

    def replace_first(self, first: Tensor, rest: Sequence[Tensor]) -> None:
        """Another first tensor in its place."""
        self.slot.free()
        self.slot.fill((first, *rest))


def _make_collective_call(state: State, i: Instr, start: Callable[[_SegmentOutput], Work]) -> Call:
    """Starts what ranks do with the first tensor of what a piece hands over."""
    kind = INSTRUCTIONS[i.op].gives[0]
    other, (made, _) = state.program.peer_stage(kind, i.stage), LOCAL_HANDOVER[kind]
    slot = state.find_slot(made, other, i.mb)
    assert isinstance(slot, OutputSlot)
    handed = _SegmentOutput(slot, state.transport)
    before = min(i.stage, other)
    if not (
        first := state.boundaries[i.mb].get_value_tensors(Value.ACT_OUT, before).tensors[0]
    ).requires_grad:
        raise ModelError(
            f"{i} {'gathers' if i.op in BOUNDARY_GATHER_OPS else 'sums'} the first tensor that "
            "passes between "
            f"stages {before} and {before + 1}, and that has no gradient: {first}",
            hint="what is summed comes first, and beside it what passes on as it is",
        )
    arrivals, key = state.stages[i.stage].arrivals, (kind, i.mb)

    def run() -> None:
        arrivals[key] = ChainedWork(start(handed), handed.slot.accept_write)

    return Call(None, run)


def _reduce_in_place(output: _SegmentOutput) -> Work:
    own, *rest = output.slot.peek()
    if any(has_same_storage(own, one) for one in rest):
        own = own.clone()
        output.replace_first(own, rest)
    else:  # who has saved it for a backward must not take the sum for it
        increment_version(own)
    return output.transport.start_collective("all_reduce", "tp", own, own)


def _reduce_scatter_tokens(output: _SegmentOutput) -> Work:
    whole, *rest = output.slot.peek()
    parts = split_by_rank(whole, output.transport.tp)
    own = parts.new_empty(parts.shape[1:])
    output.replace_first(own, rest)
    flat = parts.view(-1)
    return output.transport.start_collective("reduce_scatter", "tp", own.view(-1), flat)


def _gather_tokens(output: _SegmentOutput) -> Work:
    own, *rest = output.slot.peek()
    parts = own.new_empty(output.transport.tp, *own.shape)
    work = output.transport.start_collective("all_gather", "tp", parts.view(-1), own.view(-1))
    if own.shape[:-2].numel() == 1:  # of one sequence all tokens lie in order
        output.replace_first(join_sequence(parts), rest)
        return work
    return ChainedWork(work, lambda: output.replace_first(join_sequence(parts), rest))


HANDLERS: Final = {
    op: tp_gather if op in BOUNDARY_GATHER_OPS else tp_reduce for op in BOUNDARY_COLLECTIVE_OPS
}
