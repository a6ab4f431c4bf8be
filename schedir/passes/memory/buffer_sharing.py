"""Choose the number of static buffers of each rank for received and sent values.

A pass like others, and the last: it changes no Stream, only `Program.slots`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.critical_path.longest_path import Times, remaining, walk
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.memory.buffer_slots import counts, minimum_slots
from schedir.analysis.progress_models import ProgressModel
from schedir.errors import UsageError
from schedir.ir.cost.costs import Costs
from schedir.ir.dataflow import Dataflow
from schedir.ir.isa.instructions import BETWEEN_NEIGHBOURS, BOUNDARY, FORWARD, SENDS, SLOTTED
from schedir.ir.program import OWN, Program, SlotCounts
from schedir.passes.pass_types import BufferSharing, Options, Pass
from schedir.retired_names import renamed_value

MESSAGE: Final = 0.5  # of a forward: what a message takes where costs say that it takes no time
_PARTS = 16  # how finely ranks and kinds are divided to try fewer on each part


def share_slots(
    program: Program,
    choice: BufferSharing,
    costs: Costs | None = None,
    progress_model: ProgressModel = "per_device",
) -> Program:
    """A lowered program with a number of slots for each rank and kind.

    "minimal" is the most values that overlap along the Stream: with less, a Stream could not be
    run in its order.  A program that is legal under `blocking_serial` stays legal under every
    model: a fill waits only for what stands before it in its own Stream, which under
    `blocking_serial` it does anyway.  Other programs must be checked again.

    "latency_preserving" is the fewest with which the predicted time at `costs` under
    `progress_model` stays what it is with a slot for each value.  Of each rank and kind it is a
    proven minimum where all those minima together keep the time; else it is as few as trying has
    found.

    Where it is said already how many there are of what crosses no boundary, as of whole weights,
    that stays.

    Costs at which messages are free, as unit costs are, say nothing of slots: one would be empty
    as soon as it is full, and whoever fills it next would in fact wait for the message.  There it
    is enough for messages, too, that take half a forward.
    """
    if choice not in ("minimal", "latency_preserving"):
        raise UsageError(
            f"buffer_sharing must be 'minimal' or 'latency_preserving', not {choice!r}",
            hint="leave buffer_sharing out"
            if choice in ("own", "none")
            else renamed_value("buffer_sharing", choice),
            fields=["buffer_sharing"],
        )
    program = unshared(program)
    graph = Graph.of(program, progress_model)
    least = minimum_slots(program)[:, : len(SLOTTED)]
    if choice == "minimal":
        return _with(program, least)
    costs = costs or Costs()
    if not costs.of(SENDS[0], program.shape).any():
        message = MESSAGE * float(costs.of(FORWARD, program.shape).mean())
        least = _enough(program, graph, replace(costs, send=message), least)
    return _with(program, _enough(program, graph, costs, least))


def _enough(
    program: Program, graph: Graph, costs: Costs, least: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The fewest from `least` on that keep the time, at some costs, of a program without slots."""
    reached = walk(graph, costs)
    if not reached.done.all():
        return least  # there is no time to keep; `check` says why
    span = float(reached.end.max(initial=0.0)) * (1 + 1e-9)

    def keeps(slots: NDArray[np.int64]) -> bool:
        end = walk(Graph(_with(program, slots), graph.progress_model), costs).end
        return float(end.max(initial=0.0)) <= span

    latest = span - remaining(graph, costs)
    needed = np.maximum(least, _overlap(program, latest, reached.end, least=True))
    calm = np.maximum(needed, _overlap(program, reached.start, reached.end, least=False))
    own = counts(program)[:, : len(SLOTTED)]
    best = next(slots for slots in (needed, calm, own) if keeps(slots))
    best = np.where(_numbers(program) == OWN, best, needed)
    return fewer_in_parts(best, needed, keeps)


def fewer_in_parts(
    best: NDArray[np.int64],
    least: NDArray[np.int64],
    keeps: Callable[[NDArray[np.int64]], bool],
) -> NDArray[np.int64]:
    """Numbers of slots that keep the time, of which as large parts as do so are made the least."""
    parts = [np.flatnonzero(best > least)]
    smallest = max(1, best.size // _PARTS)
    while parts:
        part = parts.pop()
        fewer = best.copy()
        fewer.flat[part] = least.flat[part]
        if not len(part) or keeps(fewer):
            best = fewer
        elif len(part) > smallest:
            parts += np.array_split(part, 2)
    return best


def _with(program: Program, counts: NDArray[np.int64]) -> Program:
    """The program with a number of slots of each rank and kind, unsaid for kinds it has not.  What
    it says itself stays."""
    chosen = np.array([program.in_slots(kind) for kind in SLOTTED])
    there = (counts > 0).any(0) & chosen | np.isin(SLOTTED, BETWEEN_NEIGHBOURS)
    said = _numbers(program)
    numbers = np.where(said == OWN, np.where(there, counts, OWN), said).tolist()
    told = program.slots or [SlotCounts.unsaid()] * program.shape.ranks
    both = zip(numbers, told, strict=True)
    return program.with_slots([SlotCounts(*row, *own[len(row) :]) for row, own in both])


def _numbers(program: Program) -> NDArray[np.int64]:
    """How many slots a program says, shape (ranks, kinds); OWN for those unsaid."""
    unsaid = [SlotCounts.unsaid()] * program.shape.ranks
    return np.array(program.slots or unsaid, np.int64)[:, : len(SLOTTED)]


def unshared(program: Program) -> Program:
    """The program with a slot for each value that crosses a boundary; what it says of others
    stays."""
    own = dict.fromkeys((kind.name.lower() for kind in BOUNDARY), OWN)
    told = [slots._replace(**own) for slots in program.slots]
    return program.with_slots(told if any(slots.said() for slots in told) else ())


def _overlap(program: Program, start: Times, end: Times, *, least: bool) -> NDArray[np.int64]:
    """How many slots of each rank and kind let every fill start and every free end when told.

    The k-th fill takes what the (k-c)-th free leaves, so that one must end before this one
    starts.  Those need not come in the order of their numbers: with `least` the answer is a
    bound from below, else from above.
    """
    counts = np.zeros((program.shape.ranks, len(SLOTTED)), np.int64)
    for column, kind in enumerate(SLOTTED):
        own = Dataflow.of(program).lives(kind)
        starts, ends = start[own.fill], end[own.free]
        for rank in np.flatnonzero(np.diff(own.first)).tolist():
            here = slice(own.first[rank], own.first[rank + 1])
            fills, frees = starts[here], ends[here]
            if least:
                fills, frees = np.maximum.accumulate(fills), _from_the_end(np.minimum, frees)
            else:
                fills, frees = _from_the_end(np.minimum, fills), np.maximum.accumulate(frees)
            free = np.searchsorted(frees, fills, side="right")
            counts[rank, column] = (np.arange(1, len(fills) + 1) - free).max()
    return counts


def _from_the_end(most: np.ufunc, times: Times) -> Times:
    return np.asarray(most.accumulate(times[::-1])[::-1])


def _lower(program: Program, options: Options) -> Program:
    assert options.buffer_sharing is not None
    return share_slots(program, options.buffer_sharing, options.costs, options.progress_model)


def _read(program: Program, progress_model: ProgressModel) -> dict[str, Any]:
    if not program.shares_slots:
        return {"buffer_sharing": None}
    few = share_slots(program, "minimal").slots
    return {"buffer_sharing": "minimal" if program.slots == few else "latency_preserving"}


PASSES: Final = (
    Pass(
        "share_slots",
        "better",
        _lower,
        wanted=lambda program, options: options.buffer_sharing is not None,
        read=_read,
        order=9,  # it changes no Stream
    ),
)
