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
    """Build a measured Timeline from the recorded start and end of each instruction.

    Instructions of one node of the dependency graph get the same start and end. A message or a
    collective starts when its last member starts. A pair that runs together starts when its first
    member starts. All instructions of a node end when the last of them ends. The first start
    becomes time 0.

    Args:
        program: The program.
        start: The start of each instruction on its rank, in seconds, shape (n,).
        end: The end of each instruction on its rank, in seconds, shape (n,).
        progress_model: The progress model of the transport.
        blocking_hosts: True if the hosts are blocking.
    """
    node = Graph.from_program(program, progress_model).node
    first_start = np.full(len(node), np.inf)
    last_start, last_end = np.full((2, len(node)), -np.inf)
    np.minimum.at(first_start, node, start)
    np.maximum.at(last_start, node, start)
    np.maximum.at(last_end, node, end)
    spans = build_spans(program, start, end)
    node_start = np.where(spans["lane"] == Lane.COMPUTE, first_start[node], last_start[node])
    spans["start"], spans["end"] = node_start, np.maximum(node_start, last_end[node])
    origin = spans["start"].min()
    spans["start"] -= origin
    spans["end"] -= origin
    return Timeline(program, spans, "measured", "s", progress_model, blocking_hosts=blocking_hosts)
