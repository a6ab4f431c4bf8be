"""The dependency graph of a program for CUDA streams that share a hardware queue."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import ProgressModel
from schedir.ir.program import Program

QueuePair = tuple[int, int]


class SharedQueueGraph(Graph):
    """The dependency graph of a program in which some pairs of queues of a rank are merged.

    CUDA streams that share a hardware queue run their instructions in the order in which the host
    issues them. This is the order of the rank's Stream.

    Args:
        program: The program.
        progress_model: See `Graph`.
        queue_pairs: Pairs of numbers in `Graph.queue`. Both queues of a pair are of one rank.
        blocking_hosts: See `Graph`.
    """

    def __init__(
        self,
        program: Program,
        progress_model: ProgressModel,
        queue_pairs: Iterable[QueuePair],
        *,
        blocking_hosts: bool = False,
    ) -> None:
        super().__init__(program, progress_model, blocking_hosts=blocking_hosts)
        self.queue_pairs: tuple[QueuePair, ...] = tuple(queue_pairs)

    @cached_property
    def queue(self) -> NDArray[np.unsignedinteger]:
        """The queue of each instruction. Merged queues have the smallest of their numbers."""
        original = Graph.from_program(
            self.program, self.progress_model, blocking_hosts=self.blocking_hosts
        ).queue
        queue = original.copy()
        for pair in self.queue_pairs:
            # An earlier pair may have changed the number of either queue.
            numbers = [int(queue[(original == number).argmax()]) for number in pair]
            queue[queue == max(numbers)] = min(numbers)
        return queue
