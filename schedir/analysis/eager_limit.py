"""Find the smallest eager limit, in bytes, with which a program finishes."""

from __future__ import annotations

import math

import numpy as np

from schedir.analysis.critical_path.longest_path import compute_earliest_times
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.memory.buffer_slots import compute_message_sizes
from schedir.errors import format_bytes
from schedir.ir.cost.sizes import EagerMessages, Sizes, parse_bytes
from schedir.ir.isa.instructions import SEND_OPS


def find_min_eager_limit(graph: Graph, sizes: Sizes) -> float | None:
    """Return the smallest eager limit with which a hanging program finishes.

    Messages of at most this size do not wait for their receive. The limit is the size of one of the
    messages. A larger limit removes edges from the graph and adds none. So a binary search finds
    the smallest limit.

    Args:
        graph: The dependency graph of the program.
        sizes: The sizes of messages.

    Returns:
        The limit in bytes, or None if the program hangs even if no message waits.
    """

    def finishes(limit: float) -> bool:
        host_options = {
            "blocking_hosts": graph.blocking_hosts,
            "host_device_sync": graph.host_device_sync,
        }
        return bool(
            compute_earliest_times(
                Graph(
                    graph.program,
                    graph.progress_model,
                    **host_options,
                    eager_messages=EagerMessages(limit, sizes),
                )
            ).is_done.all()
        )

    sends = graph.index.find_all_positions(SEND_OPS)
    limits = np.unique(compute_message_sizes(graph.program, sizes, sends)).tolist()
    if not any(limits) or not finishes(limits[-1]):
        return None
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if finishes(limits[middle]) else (middle + 1, high)
    return float(limits[low])


def describe_eager_limit(limit: float) -> str:
    """Return a hint that the program finishes with an eager limit. The hint has the exact limit.

    Args:
        limit: The limit in bytes.
    """
    text = format_bytes(limit)
    if parse_bytes(text) != limit:
        text = f"{math.ceil(limit)} B"
    return f"the program finishes if messages of at most {text} do not wait for their receives"
