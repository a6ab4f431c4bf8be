"""Find one order of all instructions that every rank can follow.

Where ranks go by it, each in its part, and begin an instruction when the one before has ended,
nothing can hang, whatever holds up a rank meanwhile: of all that has not ended, what comes first
has nothing before it on any of its ranks.  So it needs no progress model, and lives through hosts
that wait for a whole device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from schedir.analysis.critical_path.longest_path import build_problem, solve_longest_paths
from schedir.analysis.dependency_graph import Graph
from schedir.ir.cost.costs import Costs
from schedir.ir.instruction_index import Positions
from schedir.ir.isa.instructions import RECV_OPS


def find_total_order(graph: Graph) -> tuple[Positions, ...]:
    """For each rank the indices of its Stream in one order, of a program that is proven to end.

    Computes of a rank, and messages of a queue, keep their order, and a slot is left before it is
    filled.  Transfers that are issued together are not so here.  Each receive stands where its
    message is sent, and all else as in the Stream, so that memory comes and goes as in a step;
    but where slots are so few that it could not be sent there.
    """
    problem = build_problem(graph, Costs())
    kept = problem._replace(edges=chain(graph.edges(), _make_stream_edges(graph)))
    _, turn = solve_longest_paths(kept)
    if not turn[graph.node].all():
        _, turn = solve_longest_paths(problem._replace(edges=graph.edges()))
    order = np.lexsort((graph.node, turn[graph.node]))
    rank, offsets = graph.index.rank[order], graph.program.offsets
    return tuple(
        (order[rank == r] - offsets[r]).astype(np.int32) for r in range(graph.program.shape.ranks)
    )


def _make_stream_edges(graph: Graph) -> Iterator[tuple[Positions, Positions]]:
    """Edges from all but receives to what comes next on their rank."""
    at = np.flatnonzero(~graph.index.is_op(RECV_OPS))
    here = graph.index.rank[at[1:]] == graph.index.rank[at[:-1]]
    before, after = graph.node[at[:-1][here]], graph.node[at[1:][here]]
    apart = before != after
    yield before[apart], after[apart]
