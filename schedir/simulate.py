"""Simulate: the longest path through the dependency graph is the predicted time."""

from __future__ import annotations

import numpy as np

from schedir.complete import completeness
from schedir.costs import Costs
from schedir.errors import CostsError, expect
from schedir.explain import deadlock
from schedir.graph import Graph, Model
from schedir.program import Program
from schedir.sizes import Sizes
from schedir.timeline import Timeline, spans_of
from schedir.walk import walk


def simulate(
    program: Program,
    costs: Costs | None = None,
    *,
    model: Model = "device",
    sizes: Sizes | None = None,
) -> Timeline:
    """The Timeline that a program will have at the given costs under a progress model.

    Every instruction starts as soon as its queue, its values and its partners let it.  A draft
    is simulated as if values that cross ranks took `costs.send` and no queue.  With `sizes`,
    memory is told in bytes.

    Raises DeadlockError if the program cannot finish (OrderError if it is a draft and a rank alone
    is at fault), what `check` raises where it is not complete, and CostsError if the costs add up
    to infinity.
    """
    expect(program, Program, "schedir.compile(schedule, plan)")
    if sizes is not None:
        expect(sizes, Sizes, "Sizes(activation=16e6, saved=1.2e9)")
    graph = Graph(program, model, completeness(program, draft=program.is_draft))
    reached = walk(graph, costs)
    if not reached.done.all():
        raise deadlock(graph, reached)
    if not np.isfinite(reached.end).all():
        raise CostsError("the costs add up to more than a number can hold", program=program.name)
    del graph  # makes room for the spans
    spans = spans_of(program, reached.start, reached.end)
    return Timeline(program, spans, model=model, sizes=sizes)
