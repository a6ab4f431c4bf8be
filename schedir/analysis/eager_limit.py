"""Find the smallest eager limit, in bytes, with which a program finishes."""

from __future__ import annotations

import math

import numpy as np

from schedir.analysis.critical_path.longest_path import walk
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.memory.buffer_slots import message_sizes
from schedir.errors import format_bytes
from schedir.ir.cost.sizes import EagerMessages, Sizes, bytes_of
from schedir.ir.isa.instructions import SENDS


def least_limit(graph: Graph, sizes: Sizes) -> float | None:
    """The least limit with which a program finishes that hangs: where messages of at most so many
    bytes wait for nobody.  None where it hangs even if no message waits.

    It is the size of a message.  A larger limit takes edges from the graph, and adds none; so it
    is searched for by halves.
    """

    def finishes(limit: float) -> bool:
        how = {"blocking_hosts": graph.blocking_hosts, "host_device_sync": graph.host_device_sync}
        return bool(
            walk(
                Graph(
                    graph.program,
                    graph.progress_model,
                    **how,
                    eager_messages=EagerMessages(limit, sizes),
                )
            ).done.all()
        )

    sent = graph.index.where_all(SENDS)
    limits = np.unique(message_sizes(graph.program, sizes, sent)).tolist()
    if not any(limits) or not finishes(limits[-1]):
        return None
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if finishes(limits[middle]) else (middle + 1, high)
    return float(limits[low])


def finishes_where(limit: float) -> str:
    """What is said of a program that hangs, but not with this limit; to the byte."""
    text = format_bytes(limit)
    if bytes_of(text) != limit:
        text = f"{math.ceil(limit)} B"
    return f"it finishes where messages of {text} wait for nobody"
