"""Find which instructions a GPU has finished, without blocking.

A host that waits for a GPU has issued all of a step, and perhaps the next one, too: where it is
says nothing of where the GPU is.  Each instruction has an event at its end, and what it started on
a lane, as NCCL's work, is asked itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from schedir.analysis.dependency_graph import Graph
from schedir.ir.isa.instructions import (
    BOUNDARY_COLLECTIVE_OPS,
    INSTRUCTIONS,
    RECV_OPS,
    SEND_OPS,
    Instr,
    Lane,
)
from schedir.ir.program import Program
from schedir.runtime.executor import Executor
from schedir.runtime.rank_state import Call, State
from schedir.runtime.recording.stream_events import make_event

MAX_STEPS_IN_FLIGHT: Final = (
    2  # steps that may be under way: the host issues one while the one before runs
)

_GROUP_DESCRIPTIONS: Final = {
    "model": "all ranks",
    "stage_replicas": "all holders of its stage",
    "tied_weights": "all that share its weights",
}


class StepProgress(NamedTuple):
    """The oldest step that is under way: its number, from 1, what of it has not ended
    (`unfinished`), and what of that the host has `issued`, by index in the Stream."""

    step: int
    unfinished: tuple[int, ...]
    issued: tuple[int, ...]


class GpuProgress:
    """What has ended of the last `MAX_STEPS_IN_FLIGHT` steps of an executor, whose calls it follows
    from now on.

    Events are made here, and recorded anew in each step: an instruction costs the host an event
    more, some microseconds.  Any thread may ask for `get_progress`.
    """

    def __init__(self, executor: Executor) -> None:
        state, self.executor = executor.state, executor
        state.first_step_checks.counts_references = (
            False  # the works that are kept here refer to memory
        )
        self.step_events = [
            _StepEvents(state.device, len(state.stream)) for _ in range(MAX_STEPS_IN_FLIGHT)
        ]
        executor.calls = [
            Call(call.wait, partial(self._run, k, call.run, _find_started_work(state, k, i)))
            for k, (i, call) in enumerate(zip(state.stream, executor.calls, strict=True))
        ]

    def _run(self, k: int, run: Callable[[], None], started: Callable[[], Sequence[Any]]) -> None:
        if self.step_events[-1].issued[k]:  # a step begins, in whatever order it is run
            self.step_events = [*self.step_events[1:], self.step_events[0]]
            self.step_events[-1].begin_step(self.executor.random_streams.step)
        turn, reducing = self.step_events[-1], self.executor.state.pending_reductions
        before = len(reducing)
        run()
        turn.works[k] = [*reducing[before:], *started()]
        turn.events[k].record()
        turn.issued[k] = True

    def get_progress(self) -> StepProgress | None:
        """Where the GPU stands, without waiting for it; None where all that was begun has ended."""
        for turn in [*self.step_events]:
            standing = turn.get_progress()
            if standing.unfinished:
                return standing
        return None

    def find_running(self, progress: StepProgress) -> list[int]:
        """What is under way: of what is open and issued, or being issued, what waits for nothing
        of its own rank; by index in the Stream.  Lanes run beside each other, so there may be
        several."""
        program = self.executor.program
        # What is issued to a lane waits for all that was issued to compute before it.
        graph = Graph.from_program(
            program, self.executor.state.transport.progress_model, blocking_hosts=True
        )
        first, end = program.offsets[self.executor.rank : self.executor.rank + 2].tolist()
        before = (
            np.concatenate([graph.local_waits, graph.queue_predecessor[None]])[:, first:end] - first
        )
        is_open = np.zeros(end - first + 1, bool)
        is_open[[*progress.unfinished]] = True
        elsewhere = (before < 0) | (before >= end - first)
        waits = is_open[np.where(elsewhere, end - first, before)].any(0)
        there = {*progress.issued, self.executor.position}
        return [k for k in progress.unfinished if k in there and not waits[k]]


class _StepEvents:
    """A step: its events, and what its instructions have started."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.events = [make_event(device) for _ in range(count)]
        self.works: list[list[Any]] = [[] for _ in range(count)]
        self.step, self.issued, self.unfinished = 0, [True] * count, list[int]()

    def begin_step(self, step: int) -> None:
        # In this order: another thread looks at what is open, and then at what is issued.
        self.step, self.issued = step, [False] * len(self.events)
        self.unfinished = [*range(len(self.events))]

    def get_progress(self) -> StepProgress:
        open = self.unfinished
        issued = self.issued
        open[:] = [k for k in open if not (issued[k] and self._has_ended(k))]
        return StepProgress(self.step, (*open,), tuple(k for k in open if issued[k]))

    def _has_ended(self, k: int) -> bool:
        return self.events[k].query() and all(
            work.is_completed() for work in self.works[k] if hasattr(work, "is_completed")
        )


def _find_started_work(state: State, k: int, i: Instr) -> Callable[[], Sequence[Any]]:
    """Finds the message or gather that an instruction has just started."""
    if i.op in SEND_OPS:
        return lambda: state.pending_sends[k][:1]
    if i.op in RECV_OPS + BOUNDARY_COLLECTIVE_OPS:
        arrivals, key = state.stages[i.stage].arrivals, (INSTRUCTIONS[i.op].gives[0], i.mb)
        return lambda: (arrivals[key],)
    return lambda: ()


def describe_wait(program: Program, i: Instr) -> str:
    """What an instruction under way does, in words: for whom it waits, or that it computes."""
    row = INSTRUCTIONS[i.op]
    if row.peer:
        peer = program.peer_rank(i)
        return f"waits for rank {peer} to {'send' if i.op in RECV_OPS else 'receive'}"
    if row.group:
        return f"waits for {_GROUP_DESCRIPTIONS[row.group]}"
    if i.op in BOUNDARY_COLLECTIVE_OPS:
        return "waits for its tensor-parallel group"
    if row.lane is Lane.DP and program.dp > 1:
        return "waits for the other replicas"
    return "computes"
