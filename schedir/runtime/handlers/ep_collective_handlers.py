"""Handlers of the all-to-alls of experts, between the segments of a stage.

The segment before a dispatch outputs rows of tokens, sorted by expert, and the number of rows for
each expert. The segment with the experts gets the rows for its experts from each member of the
expert-parallel group, in the order of the members. It also gets the number of rows from each member
for each expert. The buffer of this segment has a fixed number of rows, the capacity. Unused rows at
the end are zero. Combine returns the rows to the ranks from which they came. The backward of
dispatch and combine exchanges the same numbers of gradient rows.

Each dispatch first gathers the numbers of rows of all members, and the host reads them. So all
members raise an error if the buffer of any member is too small.

See `handler_registry` for the arguments and the result of a handler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from schedir.errors import ModelError
from schedir.ir.isa.instructions import EP_COLLECTIVE_OPS, Instr, Opcode, Value
from schedir.ir.pipeline.stage_segments import DISPATCH
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.handlers.segment_output import (
    SegmentOutput,
    find_collective_boundary,
    make_collective_call,
)
from schedir.runtime.program_state import Call, ProgramService, ProgramState
from schedir.transports.collectives import AllToAll
from schedir.transports.transport import Work


class RowCounts(NamedTuple):
    """The numbers of rows that a rank exchanges in a dispatch.

    Attributes:
        sent: For each member of the expert-parallel group, the number of rows for its experts.
        received: For each member, the number of rows from this member.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]


class TokenCounts(ProgramService):
    """The row counts of each dispatch of a step, which combine and the backward need.

    Args:
        state: The state of the program.

    Attributes:
        by_dispatch: (Segment before the dispatch, microbatch) -> row counts.
    """

    def __init__(self, state: ProgramState) -> None:
        super().__init__(state)
        self.by_dispatch: dict[tuple[int, int], RowCounts] = {}

    def begin_step(self) -> None:
        """Remove the row counts of the last step."""
        self.by_dispatch.clear()


def exchange_tokens(state: ProgramState, i: Instr) -> Call:
    """Return the call of an all-to-all of a segment's first output tensor, or of its gradient."""
    boundary, letters = find_collective_boundary(state, i), state.program.segment_boundaries
    key = letters.rindex(DISPATCH, 0, boundary + 1), i.mb  # segment before the dispatch, microbatch
    tensors = state.boundaries[i.mb].get_value_tensors(Value.ACT_OUT, boundary).tensors
    is_gradient = i.op in (Opcode.CombineGrad, Opcode.DispatchGrad)
    # A gradient gets the shape that the output had before the all-to-all of the forward.
    shape = tensors[0].shape if is_gradient else tensors[0].received.shape
    row_size, ep = torch.Size(shape[1:]).numel(), state.program.ep
    row_counts = state.service(TokenCounts).by_dispatch
    if i.op is Opcode.Dispatch:
        _require_count_tensor(state, boundary, tensors)

    def start(output: SegmentOutput) -> Work:
        first, *rest = output.slot.peek()
        if i.op is Opcode.Dispatch:
            member = state.transport.dp_rank % ep
            device_table = _gather_counts(state, rest[0])
            rest[0] = device_table[:, member].flatten()
            table = device_table.cpu()
            _require_fit(state, i, table, len(first), shape[0])
            row_counts[key] = RowCounts(
                tuple(table[member].sum(1).tolist()), tuple(table[:, member].sum(1).tolist())
            )
        sent_counts, received_counts = row_counts[key]
        if i.op in (Opcode.Combine, Opcode.DispatchGrad):  # the reverse direction
            sent_counts, received_counts = received_counts, sent_counts
        row_count = sum(received_counts)
        result = first.new_empty(shape)
        result[row_count:].zero_()
        output.replace_first(result, rest)
        sizes = AllToAll(
            tuple(row_size * n for n in sent_counts), tuple(row_size * n for n in received_counts)
        )
        return output.transport.start_collective(
            sizes, "ep", result[:row_count].view(-1), first[: sum(sent_counts)].reshape(-1)
        )

    return make_collective_call(state, i, start)


def _require_count_tensor(state: ProgramState, boundary: int, tensors: Sequence[Boundary]) -> None:
    """Check that the boundary has a second tensor, with the number of rows of each expert."""
    counts, ep = tensors[1] if len(tensors) > 1 else None, state.program.ep
    if (
        counts is None
        or counts.dtype != torch.int64
        or len(counts.shape) != 1
        or counts.shape[0] % ep
    ):
        raise ModelError(
            f"the second tensor of the boundary after stage {boundary} "
            f"({', '.join(map(str, tensors))}) must be an int64 vector with the number of rows "
            f"of each expert. Its length must be a multiple of ep ({ep})",
            program=state.program.name,
            hint=f"(Boundary((rows, hidden)), Boundary(({2 * ep},), torch.int64))",
        )


def _gather_counts(state: ProgramState, counts: Tensor) -> Tensor:
    """Return all row counts, of shape (senders, receivers, experts of the receiver)."""
    ep = state.program.ep
    table = counts.new_empty(ep * len(counts))
    state.transport.start_collective("all_gather", "ep_counts", table, counts.contiguous()).wait()
    return table.view(ep, ep, -1)


def _require_fit(state: ProgramState, i: Instr, table: Tensor, rows: int, capacity: int) -> None:
    """Raise the same error on all members if a member's counts are wrong or over its capacity."""
    ep = state.program.ep
    first_replica = state.transport.dp_rank // ep * ep
    for member, (sent_count, received_count) in enumerate(
        zip(table.sum((1, 2)).tolist(), table.sum((0, 2)).tolist(), strict=True)
    ):
        subject = f"replica {first_replica + member} of rank {state.rank}"
        has_negative = bool((table[member] < 0).any())
        if sent_count != rows or has_negative:
            problem = "include a negative number" if has_negative else f"add up to {sent_count}"
            raise ModelError(
                f"{subject} outputs {rows} rows of microbatch {i.mb} before stage {i.stage}, but "
                f"its row counts of the experts {problem}"
            )
        if received_count > capacity:
            raise ModelError(
                f"{subject} gets {received_count} tokens of microbatch {i.mb} for its experts in "
                f"stage {i.stage}, but the capacity of its buffer is {capacity} tokens",
                hint="increase the capacity (capacity_factor, or received_shape of the boundary)",
            )


HANDLERS: Final = dict.fromkeys(EP_COLLECTIVE_OPS, exchange_tokens)
