"""Find one order of all instructions that every rank can follow.

If each rank runs its instructions in this order, one after the other, no rank can hang. The reason
is that the first unfinished instruction of the order has no unfinished predecessor on any rank. So
the order works even if some ranks are late, with every progress model, and with hosts that wait for
their device.
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
    """Return the instructions of each rank in one order that all ranks can follow.

    Computes of a rank and messages of a queue keep their order, and a slot is freed before it is
    filled again. Transfers of a group become separate. A receive has the same place in the order as
    its send. All other instructions keep the order of the Stream, so that the memory is the same as
    in a normal step. If there are too few slots for this, the other instructions can also change
    their order.

    Args:
        graph: The dependency graph of a program that is proven to finish.

    Returns:
        For each rank, the indices into its Stream in this order.
    """
    problem = build_problem(graph, Costs())
    stream_problem = problem._replace(edges=chain(graph.edges(), _make_stream_edges(graph)))
    _, level = solve_longest_paths(stream_problem)
    if not level[graph.node].all():
        _, level = solve_longest_paths(problem._replace(edges=graph.edges()))
    order = np.lexsort((graph.node, level[graph.node]))
    rank, offsets = graph.index.rank[order], graph.program.offsets
    return tuple(
        (order[rank == r] - offsets[r]).astype(np.int32) for r in range(graph.program.shape.ranks)
    )


def _make_stream_edges(graph: Graph) -> Iterator[tuple[Positions, Positions]]:
    """Yield an edge from each instruction to the next one of its rank. Receives are left out."""
    positions = np.flatnonzero(~graph.index.is_op(RECV_OPS))
    is_same_rank = graph.index.rank[positions[1:]] == graph.index.rank[positions[:-1]]
    before = graph.node[positions[:-1][is_same_rank]]
    after = graph.node[positions[1:][is_same_rank]]
    is_edge = before != after
    yield before[is_edge], after[is_edge]
