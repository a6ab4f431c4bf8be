"""Build a Timeline from the times that each rank recorded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import ProgressModel
from schedir.ir.isa.instructions import Lane
from schedir.ir.program import Program
from schedir.predict.timeline import Timeline, build_spans

Floats = NDArray[np.float64]


def build_timeline(
    program: Program,
    start: Floats,
    end: Floats,
    progress_model: ProgressModel,
    *,
    blocking_hosts: bool = False,
) -> Timeline:
    """A measured Timeline from when each instruction was begun and ended on its own rank.

    What is one node of the graph has one span: a message and a collective are under way when
    the last side is there, a pair that runs together when its first member begins.
    """
    node = Graph.from_program(program, progress_model).node
    first, last, over = np.full(len(node), np.inf), *np.full((2, len(node)), -np.inf)
    np.minimum.at(first, node, start)
    np.maximum.at(last, node, start)
    np.maximum.at(over, node, end)
    spans = build_spans(program, start, end)
    begun = np.where(spans["lane"] == Lane.COMPUTE, first[node], last[node])
    spans["start"], spans["end"] = begun, np.maximum(begun, over[node])
    origin = spans["start"].min()
    spans["start"] -= origin
    spans["end"] -= origin
    return Timeline(program, spans, "measured", "s", progress_model, blocking_hosts=blocking_hosts)
