"""Handlers of tensor-parallel collectives between the segments of a stage.

A summing collective adds the first output tensor of a segment over the ranks, in place. With
sequence parallelism each rank gets only its tokens of the sum. A gathering collective does the
opposite: each rank gets the tokens of all ranks.

See `handler_registry` for the arguments and the result of a handler.
"""

from __future__ import annotations

from typing import Final

from torch.autograd.graph import increment_version

from schedir.ir.isa.instructions import (
    BOUNDARY_COLLECTIVE_OPS,
    BOUNDARY_GATHER_OPS,
    Instr,
    find_segment_collectives,
)
from schedir.runtime.boundaries.sequence_shards import join_sequence, split_by_rank
from schedir.runtime.handlers.segment_output import SegmentOutput, make_collective_call
from schedir.runtime.handlers.transfer_handlers import gather_message as gather_received
from schedir.runtime.model_checks.memory_overlap import has_same_storage
from schedir.runtime.program_state import Call, ProgramState
from schedir.transports.transport import ChainedWork, Work


def tp_reduce(state: ProgramState, i: Instr) -> Call:
    """Return the call of an all-reduce, or of a reduce-scatter with sequence parallelism."""
    return make_collective_call(
        state, i, _reduce_scatter_tokens if state.program.sequence_parallel else _reduce_in_place
    )


def tp_gather(state: ProgramState, i: Instr) -> Call:
    """Return the call of a gather. It gathers tokens between segments, or shards of a message."""
    if i.op in find_segment_collectives(state.program.sequence_parallel):
        return make_collective_call(state, i, _gather_tokens)
    return gather_received(state, i)


def _reduce_in_place(output: SegmentOutput) -> Work:
    first, *rest = output.slot.peek()
    if any(has_same_storage(first, tensor) for tensor in rest):
        first = first.clone()
        output.replace_first(first, rest)
    else:  # Autograd does not detect the write of the collective, so count it here.
        increment_version(first)
    return output.transport.start_collective("all_reduce", "tp", first, first)


def _reduce_scatter_tokens(output: SegmentOutput) -> Work:
    full, *rest = output.slot.peek()
    parts = split_by_rank(full, output.transport.tp)
    local_tokens = parts.new_empty(parts.shape[1:])
    output.replace_first(local_tokens, rest)
    flat = parts.view(-1)
    return output.transport.start_collective("reduce_scatter", "tp", local_tokens.view(-1), flat)


def _gather_tokens(output: SegmentOutput) -> Work:
    local_tokens, *rest = output.slot.peek()
    parts = local_tokens.new_empty(output.transport.tp, *local_tokens.shape)
    work = output.transport.start_collective(
        "all_gather", "tp", parts.view(-1), local_tokens.view(-1)
    )
    # The gathered tokens of a single sequence are already in order.
    if local_tokens.shape[:-2].numel() == 1:
        output.replace_first(join_sequence(parts), rest)
        return work
    return ChainedWork(work, lambda: output.replace_first(join_sequence(parts), rest))


HANDLERS: Final = {
    op: tp_gather if op in BOUNDARY_GATHER_OPS else tp_reduce for op in BOUNDARY_COLLECTIVE_OPS
}
