"""Tests of the probe for streams that share a hardware queue, with threads as queues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import numpy as np
from torch import Tensor

from schedir import compile
from schedir.analysis.critical_path.longest_path import compute_earliest_times
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.shared_queue_graph import SharedQueueGraph
from schedir.errors import ModelError
from schedir.io.terminal_output import format_error
from schedir.ir.isa.instructions import Lane
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.schedules import one_f_one_b
from schedir.transports.hardware_queue_probe import (
    Queue,
    SharedQueuePair,
    _find_queue_number,
    find_shared_queues,
    require_safe_queues,
)
from schedir.transports.p2p_groups import DirectedEdge, EdgeGroups
from tests.cpu.gloo_processes import run

GOLDEN = Path(__file__).parents[1] / "golden"

IN, OUT = DirectedEdge(Lane.ACT, 0, 1), DirectedEdge(Lane.ACT, 1, 2)
BACK_IN, BACK_OUT = DirectedEdge(Lane.GRAD, 2, 1), DirectedEdge(Lane.GRAD, 1, 0)
# The hardware queues of each rank. Messages in one queue run one after the other.
Hardware = Mapping[int, tuple[tuple[Queue, ...], ...]]


class _Completion:
    def __init__(self) -> None:
        self.event = Event()
        self.is_completed = self.event.is_set
        self.wait = self.event.wait


class ThreadedQueues(EdgeGroups):
    """A Gloo transport with a thread per hardware queue, where messages wait for their peer."""

    def __init__(self, program: Program, hardware: Hardware) -> None:
        self.hardware = hardware
        self.threads: dict[Any, SimpleQueue[Any]] = {}
        super().__init__(program)

    def issue_to(self, queue: Queue, do: Callable[[], object]) -> _Completion:
        groups = (group for group in self.hardware.get(self.rank, ()) if queue in group)
        key = next(groups, queue)
        if key not in self.threads:
            self.threads[key] = SimpleQueue()
            Thread(target=self._run, args=(self.threads[key],), daemon=True).start()
        self.threads[key].put((do, done := _Completion()))
        return done

    def _run(self, queue: SimpleQueue[Any]) -> None:
        while True:
            do, done = queue.get()
            do()
            done.event.set()

    def start_transfer(self, edge: DirectedEdge, tensor: Tensor, *, is_send: bool) -> Any:
        message = partial(super().start_transfer, edge, tensor, is_send=is_send)
        return self.issue_to(edge, lambda: message().wait())

    def touch(self, lane: Lane) -> Callable[[], bool]:
        return self.issue_to(lane, lambda: None).is_completed


def _compile_program() -> Program:
    return compile(one_f_one_b, PipelineShape(3, 6), progress_model="per_edge", overlap=True)


def probe_queues(rank: int, hardware: Hardware) -> Any:
    transport = ThreadedQueues(_compile_program(), hardware)
    return find_shared_queues(transport, transport.touch, 0.3)


def test_separate_queues_give_no_shared_pairs() -> None:
    assert run(probe_queues, 3, {}) == [[], [], []]


def test_shared_queues_are_found_by_their_rank() -> None:
    hardware: Hardware = {1: ((IN, BACK_IN), (OUT, Lane.COMPUTE)), 2: ((OUT, BACK_IN),)}
    first, middle, last = run(probe_queues, 3, hardware)
    assert first == []
    assert {*middle} == {SharedQueuePair(1, IN, BACK_IN), SharedQueuePair(1, OUT, Lane.COMPUTE)}
    assert last == [SharedQueuePair(2, OUT, BACK_IN)]


def require_queues(rank: int, hardware: Hardware) -> Any:
    """Return the queues found to be shared, or the error that refuses the program."""
    transport = ThreadedQueues(program := _compile_program(), hardware)
    try:
        return require_safe_queues(program, transport, transport.touch, 0.3)
    except ModelError as error:
        return format_error(error)


def test_shared_queues_that_would_deadlock_are_refused() -> None:
    """In 1F1B, sent activations and received gradients of the second rank must not share.

    All processes report the same error.
    """
    (error,) = {*run(require_queues, 3, {1: ((OUT, BACK_IN),)})}
    assert error + "\n" == (GOLDEN / "sharing.txt").read_text()
    first, *others = run(require_queues, 3, {1: ((IN, BACK_OUT),)})
    assert others == [first] * 2 and first == [SharedQueuePair(1, IN, BACK_OUT)]


def test_only_one_queue_pair_would_deadlock() -> None:
    program = _compile_program()
    queues: list[Queue] = [Lane.COMPUTE, IN, OUT, BACK_IN, BACK_OUT]
    hang = []
    for one, other in combinations(queues, 2):
        numbers = [_find_queue_number(program, 1, queue) for queue in (one, other)]
        graph = SharedQueueGraph(
            program, "per_edge", [(numbers[0], numbers[1])], blocking_hosts=True
        )
        if not compute_earliest_times(graph).is_done.all():
            hang.append((one, other))
    assert hang == [(OUT, BACK_IN)]


def test_shared_queues_are_transitive() -> None:
    program = _compile_program()
    numbers = {
        queue: _find_queue_number(program, 1, queue) for queue in (IN, OUT, BACK_IN, BACK_OUT)
    }
    plain = Graph.from_program(program, "per_edge", blocking_hosts=True).queue
    assert len({*numbers.values()}) == 4 and {*numbers.values()} < {*plain.tolist()}
    pairs = [(numbers[BACK_OUT], numbers[OUT]), (numbers[IN], numbers[BACK_OUT])]
    joined = SharedQueueGraph(program, "per_edge", pairs, blocking_hosts=True).queue
    least_number = min(numbers[queue] for queue in (IN, OUT, BACK_OUT))
    for queue in (IN, OUT, BACK_OUT):
        assert {*joined[plain == numbers[queue]].tolist()} == {least_number}
    is_other = ~np.isin(plain, [numbers[queue] for queue in (IN, OUT, BACK_OUT)])
    assert (joined[is_other] == plain[is_other]).all()
