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
from schedir.ir.isa.instructions import BOUNDARY_COLLECTIVES, RECEIVES, ROWS, SENDS, Instr, Lane
from schedir.ir.program import Program
from schedir.runtime.executor import Executor
from schedir.runtime.rank_state import Call, State
from schedir.runtime.recording.stream_events import event_on

TURNS: Final = 2  # steps that may be under way: the host issues one while the one before runs

_GROUPS: Final = {
    "model": "all ranks",
    "holders": "all holders of its stage",
    "tied": "all that share its weights",
}


class StepProgress(NamedTuple):
    """The oldest step that is under way: its number, from 1, what of it has not ended (`open`),
    and what of that the host has `issued`, by index in the Stream."""

    step: int
    open: tuple[int, ...]
    issued: tuple[int, ...]


class GpuProgress:
    """What has ended of the last `TURNS` steps of an executor, whose calls it follows from now on.

    Events are made here, and recorded anew in each step: an instruction costs the host an event
    more, some microseconds.  Any thread may ask for `standing`.
    """

    def __init__(self, executor: Executor) -> None:
        state, self.executor = executor.state, executor
        state.checks.counts_references = False  # the works that are kept here refer to memory
        self.turns = [_StepEvents(state.device, len(state.stream)) for _ in range(TURNS)]
        executor.calls = [
            Call(call.wait, partial(self._run, k, call.run, _started(state, k, i)))
            for k, (i, call) in enumerate(zip(state.stream, executor.calls, strict=True))
        ]

    def _run(self, k: int, run: Callable[[], None], started: Callable[[], Sequence[Any]]) -> None:
        if self.turns[-1].issued[k]:  # a step begins, in whatever order it is run
            self.turns = [*self.turns[1:], self.turns[0]]
            self.turns[-1].begin(self.executor.draws.step)
        turn, reducing = self.turns[-1], self.executor.state.reducing
        before = len(reducing)
        run()
        turn.works[k] = [*reducing[before:], *started()]
        turn.events[k].record()
        turn.issued[k] = True

    def standing(self) -> StepProgress | None:
        """Where the GPU stands, without waiting for it; None where all that was begun has ended."""
        for turn in [*self.turns]:
            standing = turn.standing()
            if standing.open:
                return standing
        return None

    def heads(self, standing: StepProgress) -> list[int]:
        """What is under way: of what is open and issued, or being issued, what waits for nothing
        of its own rank; by index in the Stream.  Lanes run beside each other, so there may be
        several."""
        program = self.executor.program
        # What is issued to a lane waits for all that was issued to compute before it.
        graph = Graph.of(program, self.executor.state.transport.progress_model, blocking_hosts=True)
        first, end = program.offsets[self.executor.rank : self.executor.rank + 2].tolist()
        before = np.concatenate([graph.waits, graph.queue_predecessor[None]])[:, first:end] - first
        is_open = np.zeros(end - first + 1, bool)
        is_open[[*standing.open]] = True
        elsewhere = (before < 0) | (before >= end - first)
        waits = is_open[np.where(elsewhere, end - first, before)].any(0)
        there = {*standing.issued, self.executor.position}
        return [k for k in standing.open if k in there and not waits[k]]


class _StepEvents:
    """A step: its events, and what its instructions have started."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.events = [event_on(device) for _ in range(count)]
        self.works: list[list[Any]] = [[] for _ in range(count)]
        self.step, self.issued, self.open = 0, [True] * count, list[int]()

    def begin(self, step: int) -> None:
        # In this order: another thread looks at what is open, and then at what is issued.
        self.step, self.issued = step, [False] * len(self.events)
        self.open = [*range(len(self.events))]

    def standing(self) -> StepProgress:
        open = self.open
        issued = self.issued
        open[:] = [k for k in open if not (issued[k] and self._has_ended(k))]
        return StepProgress(self.step, (*open,), tuple(k for k in open if issued[k]))

    def _has_ended(self, k: int) -> bool:
        return self.events[k].query() and all(
            work.is_completed() for work in self.works[k] if hasattr(work, "is_completed")
        )


def _started(state: State, k: int, i: Instr) -> Callable[[], Sequence[Any]]:
    """Finds the message or gather that an instruction has just started."""
    if i.op in SENDS:
        return lambda: state.sending[k][:1]
    if i.op in RECEIVES + BOUNDARY_COLLECTIVES:
        arrivals, key = state.stages[i.stage].arrivals, (ROWS[i.op].gives[0], i.mb)
        return lambda: (arrivals[key],)
    return lambda: ()


def waits_for(program: Program, i: Instr) -> str:
    """What an instruction under way does, in words: for whom it waits, or that it computes."""
    row = ROWS[i.op]
    if row.peer:
        peer = program.peer(i)
        return f"waits for rank {peer} to {'send' if i.op in RECEIVES else 'receive'}"
    if row.group:
        return f"waits for {_GROUPS[row.group]}"
    if i.op in BOUNDARY_COLLECTIVES:
        return "waits for its tensor-parallel group"
    if row.lane is Lane.DP and program.dp > 1:
        return "waits for the other replicas"
    return "computes"
