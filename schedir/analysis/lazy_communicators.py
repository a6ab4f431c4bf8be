"""Check that every rank reaches the first use of each communicator that NCCL creates lazily.

A lazy communicator is created at its first use by all its ranks together. The host of each rank
blocks at its first use until the other ranks have reached their first use, and issues nothing
during this time. At all other times, hosts do not wait. So only the order of the first uses
determines whether all hosts pass them.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from schedir.analysis.channels import find_communicators
from schedir.analysis.deadlock import find_shortest_cycle, list_cycle_waits, make_deadlock_error
from schedir.analysis.dependency_graph import Graph
from schedir.errors import ChannelMismatchError, DeadlockError, InstructionSite, SchedirError

_HINT = (
    "create all communicators before the step, in the same order on all ranks, for example in a "
    "warm-up step"
)


def find_first_use_error(graph: Graph) -> SchedirError | None:
    """Return the error for hosts that never pass the first use of a communicator, or None.

    Args:
        graph: The dependency graph of a program that is proven to finish if all communicators
            exist.

    Returns:
        ChannelMismatchError if a rank never uses the communicator of all ranks. DeadlockError if
        hosts wait for each other in a cycle. None if all hosts pass.
    """
    index, ranks = graph.index, graph.program.shape.ranks
    positions, communicators = find_communicators(index, graph.partner, graph.rules)
    key = communicators * ranks + index.rank[positions]
    _, first_uses = np.unique(key, return_index=True)
    uses: list[list[int]] = [[] for _ in range(ranks)]  # positions of the first uses of each rank
    parties: dict[int, dict[int, int]] = defaultdict(dict)  # communicator -> rank -> first use
    communicator_at = dict(
        zip(positions[first_uses].tolist(), communicators[first_uses].tolist(), strict=True)
    )
    for position in sorted(communicator_at):
        rank = int(index.rank[position])
        uses[rank].append(position)
        parties[communicator_at[position]][rank] = position
    for communicator, members in parties.items():
        if communicator < 0 and len(members) < ranks:
            return _make_absence_error(graph, members)
    use_counts, has_progress = [0] * ranks, True

    def get_next_use(rank: int) -> int:
        return uses[rank][use_counts[rank]] if use_counts[rank] < len(uses[rank]) else len(index)

    while has_progress:
        has_progress = False
        for members in parties.values():
            if all(get_next_use(rank) == position for rank, position in members.items()):
                for rank in members:
                    use_counts[rank] += 1
                has_progress = True
    stop_positions = {
        rank: get_next_use(rank) for rank in range(ranks) if get_next_use(rank) < len(index)
    }
    return (
        _make_cycle_error(
            graph,
            stop_positions,
            {stop: parties[communicator_at[stop]] for stop in stop_positions.values()},
        )
        if stop_positions
        else None
    )


def _make_absence_error(graph: Graph, members: dict[int, int]) -> ChannelMismatchError:
    """Return the error for a rank that never uses the communicator of all ranks."""
    absent = next(r for r in range(graph.program.shape.ranks) if r not in members)
    first_site = graph.index.locate(min(members.values()))
    return ChannelMismatchError(
        f"{first_site[2]} uses the communicator of all ranks and waits for all ranks, but rank "
        f"{absent} never uses this communicator",
        program=graph.program.name,
        sites=[InstructionSite(*first_site, "waits for all ranks")],
        hint=_HINT,
    )


def _make_cycle_error(
    graph: Graph, stop_positions: dict[int, int], uses: dict[int, dict[int, int]]
) -> DeadlockError:
    """Return the error for hosts that wait for each other at different communicators."""
    import networkx as nx

    waits = nx.DiGraph()
    for position in stop_positions.values():
        for rank, needed in uses[position].items():
            if stop_positions[rank] != needed:
                waits.add_edge(position, stop_positions[rank], needed=needed)
    steps = list_cycle_waits(graph, waits, find_shortest_cycle(waits))
    offsets = graph.program.offsets
    issued_count = sum(
        stop_positions.get(rank, int(offsets[rank + 1])) - int(offsets[rank])
        for rank in range(len(offsets) - 1)
    )
    return make_deadlock_error(
        graph,
        f"{len(steps)} hosts wait for each other, each to create a communicator at its first "
        f"use; {issued_count} of {len(graph.program)} instructions were issued",
        steps,
        issued_count,
        _HINT,
    )
