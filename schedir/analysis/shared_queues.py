"""Check that a program finishes if streams of a rank share a hardware queue."""

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
    """The dependency graph of a program in which pairs of queues, of one rank each, are one.

    Streams that share a hardware queue wait for each other in the order in which their host issues
    to them, which is that of the rank's Stream.  `queue_pairs` has the numbers of `Graph.queue`.
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
        self.queue_pairs = tuple(queue_pairs)

    @cached_property
    def queue(self) -> NDArray[np.unsignedinteger]:
        """As of Graph, where those that share have the number of the least."""
        queue = Graph.from_program(
            self.program, self.progress_model, blocking_hosts=self.blocking_hosts
        ).queue.copy()
        for pair in self.queue_pairs:
            # What was joined before has another number by now.
            one, other = (self._find_merged_number(queue, number) for number in pair)
            queue[queue == max(one, other)] = min(one, other)
        return queue

    def _find_merged_number(self, queue: NDArray[np.unsignedinteger], number: int) -> int:
        """The number that a queue has by now."""
        original = Graph.from_program(
            self.program, self.progress_model, blocking_hosts=self.blocking_hosts
        ).queue
        return int(queue[(original == number).argmax()])
