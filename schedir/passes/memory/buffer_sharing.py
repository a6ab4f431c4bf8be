"""Choose the number of static buffers of each rank for received and sent values.

This pass runs last. The pass changes no Stream, only `Program.slots`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.critical_path.longest_path import (
    Times,
    compute_earliest_times,
    compute_remaining_times,
)
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.memory.buffer_slots import count_min_slots, count_slots
from schedir.analysis.progress_models import ProgressModel
from schedir.errors import UsageError
from schedir.ir.cost.costs import Costs
from schedir.ir.dataflow import Dataflow
from schedir.ir.isa.instructions import (
    BOUNDARY_VALUES,
    FORWARD,
    NEIGHBOR_VALUES,
    SEND_OPS,
    SLOT_VALUES,
)
from schedir.ir.program import UNSHARED_SLOTS, Program, SlotCounts
from schedir.passes.pass_types import BufferSharing, Options, Pass
from schedir.retired_names import get_rename_hint

DEFAULT_MESSAGE_COST: Final = (
    0.5  # assumed time of a message as a multiple of a forward, if messages have cost 0
)
_SEARCH_DIVISIONS = 16  # a part of 1/16 or less of all (rank, kind) pairs is not divided


def share_slots(
    program: Program,
    buffer_sharing: BufferSharing,
    costs: Costs | None = None,
    progress_model: ProgressModel = "per_device",
) -> Program:
    """Set the number of slots for each rank and kind of value of a lowered program.

    "minimal" uses the smallest possible number: the largest number of values that exist at the same
    time along the Stream. A program that is legal under `blocking_serial` then stays legal under
    every progress model. The reason is that an instruction that fills a slot waits only for an
    earlier instruction of the same Stream. Under `blocking_serial`, the later instruction waits for
    the earlier instruction in any case. All other programs must be checked again.

    "latency_preserving" searches for the smallest numbers with which the predicted time stays as
    short as with a separate slot for each value. The function computes a lower bound for each rank
    and kind of value. If the lower bounds keep the predicted time, they are the result. Otherwise,
    a search starts from larger numbers, and reduces them.

    Specified numbers of slots for values that do not pass between stages, such as unsharded
    weights, stay unchanged.

    If messages have cost 0, as with unit costs, a send frees its slot immediately in the
    prediction. In a real run, the next value must wait until the message has ended. So the numbers
    must then also keep the time that is predicted for messages that take half a forward.

    Args:
        program: A lowered program.
        buffer_sharing: "minimal" or "latency_preserving".
        costs: The costs of instructions, for "latency_preserving"; unit costs by default.
        progress_model: The progress model of the transport, for "latency_preserving".

    Raises:
        UsageError: `buffer_sharing` is neither "minimal" nor "latency_preserving".
    """
    if buffer_sharing not in ("minimal", "latency_preserving"):
        raise UsageError(
            f"buffer_sharing must be 'minimal' or 'latency_preserving', not {buffer_sharing!r}",
            hint="leave buffer_sharing out"
            if buffer_sharing in ("own", "none")
            else get_rename_hint("buffer_sharing", buffer_sharing),
            fields=["buffer_sharing"],
        )
    program = remove_slot_sharing(program)
    graph = Graph.from_program(program, progress_model)
    min_slots = count_min_slots(program, SLOT_VALUES)
    if buffer_sharing == "minimal":
        return _set_slot_counts(program, min_slots)
    costs = costs or Costs()
    if not costs.for_opcode(SEND_OPS[0], program.shape).any():
        message_cost = DEFAULT_MESSAGE_COST * float(costs.for_opcode(FORWARD, program.shape).mean())
        message_costs = replace(costs, send=message_cost)
        min_slots = _find_sufficient_slots(program, graph, message_costs, min_slots)
    return _set_slot_counts(program, _find_sufficient_slots(program, graph, costs, min_slots))


def _find_sufficient_slots(
    program: Program, graph: Graph, costs: Costs, min_slots: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Search for the smallest numbers of slots, at least `min_slots`, that keep the time.

    The given program must not share slots.
    """
    earliest_times = compute_earliest_times(graph, costs)
    if not earliest_times.is_done.all():
        return min_slots  # the program hangs, and `check` raises the error
    span = float(earliest_times.end.max(initial=0.0)) * (1 + 1e-9)

    def keeps_time(slots: NDArray[np.int64]) -> bool:
        end = compute_earliest_times(
            Graph(_set_slot_counts(program, slots), graph.progress_model), costs
        ).end
        return float(end.max(initial=0.0)) <= span

    latest_start = span - compute_remaining_times(graph, costs)
    lower_bounds = np.maximum(
        min_slots, _count_overlaps(program, latest_start, earliest_times.end, lower_bound=True)
    )
    upper_bounds = np.maximum(
        lower_bounds,
        _count_overlaps(program, earliest_times.start, earliest_times.end, lower_bound=False),
    )
    separate_slots = count_slots(program, SLOT_VALUES)
    choices = (lower_bounds, upper_bounds, separate_slots)
    best = next(slots for slots in choices if keeps_time(slots))
    best = np.where(_read_slot_counts(program) == UNSHARED_SLOTS, best, lower_bounds)
    return reduce_slots(best, lower_bounds, keeps_time)


def reduce_slots(
    best: NDArray[np.int64],
    min_slots: NDArray[np.int64],
    keeps_time: Callable[[NDArray[np.int64]], bool],
) -> NDArray[np.int64]:
    """Search for smaller numbers of slots that keep the predicted time.

    The search sets a part of the numbers to their minimum. If this makes the predicted time longer,
    the search divides the part in two and tries both halves.

    Args:
        best: Numbers of slots that keep the time, of any shape.
        min_slots: The smallest possible numbers, of the same shape.
        keeps_time: A function that returns whether numbers of slots keep the time.
    """
    parts = [np.flatnonzero(best > min_slots)]
    min_part_size = max(1, best.size // _SEARCH_DIVISIONS)
    while parts:
        part = parts.pop()
        trial = best.copy()
        trial.flat[part] = min_slots.flat[part]
        if not len(part) or keeps_time(trial):
            best = trial
        elif len(part) > min_part_size:
            parts += np.array_split(part, 2)
    return best


def _set_slot_counts(program: Program, slot_counts: NDArray[np.int64]) -> Program:
    """Set the numbers of slots, shape (ranks, kinds), that the program does not specify.

    Kinds of values that the program does not have stay unspecified.
    """
    is_static = np.array([program.has_static_buffers(kind) for kind in SLOT_VALUES])
    is_counted = (slot_counts > 0).any(0) & is_static | np.isin(SLOT_VALUES, NEIGHBOR_VALUES)
    given_counts = _read_slot_counts(program)
    default_counts = np.where(is_counted, slot_counts, UNSHARED_SLOTS)
    new_counts = np.where(given_counts == UNSHARED_SLOTS, default_counts, given_counts).tolist()
    rows = zip(new_counts, program.slots_per_rank, strict=True)
    return program.with_slots(
        [SlotCounts(*counts, *slots[len(counts) :]) for counts, slots in rows]
    )


def _read_slot_counts(program: Program) -> NDArray[np.int64]:
    """Return the numbers of slots that the program specifies, shape (ranks, kinds).

    An unspecified number is UNSHARED_SLOTS.
    """
    return np.array(program.slots_per_rank, np.int64)[:, : len(SLOT_VALUES)]


def remove_slot_sharing(program: Program) -> Program:
    """Give each value that passes between stages a separate slot.

    The numbers of other slots stay unchanged.

    Args:
        program: The program.
    """
    separate_slots = dict.fromkeys((kind.name.lower() for kind in BOUNDARY_VALUES), UNSHARED_SLOTS)
    new_slots = [slots._replace(**separate_slots) for slots in program.slots]
    return program.with_slots(new_slots if any(slots.specified() for slots in new_slots) else ())


def _count_overlaps(
    program: Program, start: Times, end: Times, *, lower_bound: bool
) -> NDArray[np.int64]:
    """Return the numbers of slots that values need to start and end at given times.

    With c slots, the k-th value of a Stream gets the slot that the (k-c)-th freeing instruction
    frees. So this instruction must end before the value starts. The times need not ascend along the
    Stream, so the exact number of slots is unknown. With `lower_bound` the result is a lower bound,
    and otherwise an upper bound. The shape is (ranks, kinds).
    """
    counts = np.zeros((program.shape.ranks, len(SLOT_VALUES)), np.int64)
    for column, kind in enumerate(SLOT_VALUES):
        lifetimes = Dataflow.from_program(program).find_lifetimes(kind)
        starts, ends = start[lifetimes.filled_at], end[lifetimes.sorted_freed_at]
        for rank in np.flatnonzero(np.diff(lifetimes.rank_offsets)).tolist():
            rank_values = slice(lifetimes.rank_offsets[rank], lifetimes.rank_offsets[rank + 1])
            fill_starts, free_ends = starts[rank_values], ends[rank_values]
            if lower_bound:
                fill_starts = np.maximum.accumulate(fill_starts)
                free_ends = _accumulate_backward(np.minimum, free_ends)
            else:
                fill_starts = _accumulate_backward(np.minimum, fill_starts)
                free_ends = np.maximum.accumulate(free_ends)
            num_freed = np.searchsorted(free_ends, fill_starts, side="right")
            counts[rank, column] = (np.arange(1, len(fill_starts) + 1) - num_freed).max()
    return counts


def _accumulate_backward(ufunc: np.ufunc, times: Times) -> Times:
    return np.asarray(ufunc.accumulate(times[::-1])[::-1])


def _lower(program: Program, options: Options) -> Program:
    assert options.buffer_sharing is not None
    return share_slots(program, options.buffer_sharing, options.costs, options.progress_model)


def _read_options(program: Program, progress_model: ProgressModel) -> dict[str, Any]:
    if not program.shares_slots:
        return {"buffer_sharing": None}
    minimal_slots = share_slots(program, "minimal").slots
    return {"buffer_sharing": "minimal" if program.slots == minimal_slots else "latency_preserving"}


PASSES: Final = (
    Pass(
        "share_slots",
        "better",
        _lower,
        should_run=lambda program, options: options.buffer_sharing is not None,
        read_options=_read_options,
        order=9,  # after all passes that change a Stream
    ),
)
