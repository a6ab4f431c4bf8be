"""Find which instructions a GPU has finished, without blocking.

The host may have issued two steps before the GPU has finished the first of them. So the position of
the host does not show the position of the GPU. Each instruction records a CUDA event at its end.
Work on another lane, such as NCCL work, has a separate completion query.
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
    EP_COLLECTIVE_OPS,
    INSTRUCTIONS,
    RECV_OPS,
    SEND_OPS,
    Instr,
    Lane,
)
from schedir.ir.program import Program
from schedir.runtime.executor import Executor
from schedir.runtime.program_state import Call, ProgramState
from schedir.runtime.recording.stream_events import make_event
from schedir.runtime.services.pending_reductions import PendingReductions
from schedir.runtime.services.pending_sends import PendingSends

# The number of steps that may be unfinished: the host issues one while the GPU runs another.
MAX_STEPS_IN_FLIGHT: Final = 2

_GROUP_DESCRIPTIONS: Final = {
    "model": "all ranks",
    "stage_replicas": "all replicas of its stage",
    "tied_weights": "all stages that share its weights",
}


class StepProgress(NamedTuple):
    """The progress of the oldest unfinished step of a rank.

    Args:
        step: The number of the step, from 1.
        unfinished: The indices in the stream of the instructions that have not finished.
        issued: The indices of the unfinished instructions that the host has issued.
    """

    step: int
    unfinished: tuple[int, ...]
    issued: tuple[int, ...]


class GpuProgress:
    """The progress of the GPU in the last steps of an executor.

    The constructor wraps the calls of the executor. Each instruction then records one more CUDA
    event, which costs the host some microseconds. The events are created once, and recorded again
    in each step. Any thread may call `get_progress`.

    Args:
        executor: The executor to observe.
    """

    def __init__(self, executor: Executor) -> None:
        state, self.executor = executor.state, executor
        # The works in `_StepEvents.works` keep references to tensors. The first step must not
        # report them as references that a stage keeps.
        state.first_step_checks.counts_references = False
        self.step_events = [
            _StepEvents(state.device, len(state.stream)) for _ in range(MAX_STEPS_IN_FLIGHT)
        ]
        executor.runner.calls = [
            Call(call.wait, partial(self._run, k, call.run, _find_started_work(state, k, i)))
            for k, (i, call) in enumerate(zip(state.stream, executor.runner.calls, strict=True))
        ]

    def _run(self, k: int, run: Callable[[], None], started: Callable[[], Sequence[Any]]) -> None:
        # If the latest step has already issued this instruction, a new step has begun.
        if self.step_events[-1].issued[k]:
            self.step_events = [*self.step_events[1:], self.step_events[0]]
            self.step_events[-1].begin_step(self.executor.random_streams.step)
        step = self.step_events[-1]
        reductions = self.executor.state.service(PendingReductions).works
        old_count = len(reductions)
        run()
        step.works[k] = [*reductions[old_count:], *started()]
        step.events[k].record()
        step.issued[k] = True

    def get_progress(self) -> StepProgress | None:
        """Return the progress of the oldest unfinished step, or None if all steps have finished.

        The call does not wait for the GPU.
        """
        for step in [*self.step_events]:
            progress = step.get_progress()
            if progress.unfinished:
                return progress
        return None

    def find_running(self, progress: StepProgress) -> list[int]:
        """Return the instructions that run or wait for other ranks, as indices in the stream.

        These instructions are issued or being issued, have not finished, and wait for no other
        instruction of their rank. Lanes run concurrently, so there may be several such
        instructions.

        Args:
            progress: The progress of a step.
        """
        program = self.executor.program
        # Use blocking hosts, because work on a lane waits for all compute instructions that the
        # host issued earlier.
        graph = Graph.from_program(
            program, self.executor.state.transport.progress_model, blocking_hosts=True
        )
        begin, end = program.offsets[self.executor.rank : self.executor.rank + 2].tolist()
        predecessors = (
            np.concatenate([graph.local_waits, graph.queue_predecessor[None]])[:, begin:end] - begin
        )
        is_open = np.zeros(end - begin + 1, bool)
        is_open[[*progress.unfinished]] = True
        is_on_other_rank = (predecessors < 0) | (predecessors >= end - begin)
        is_waiting = is_open[np.where(is_on_other_rank, end - begin, predecessors)].any(0)
        issued = {*progress.issued, self.executor.runner.position}
        return [k for k in progress.unfinished if k in issued and not is_waiting[k]]


class _StepEvents:
    """The events of one step, and the work that its instructions started."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.events = [make_event(device) for _ in range(count)]
        self.works: list[list[Any]] = [[] for _ in range(count)]
        self.step = 0
        self.issued = [True] * count
        self.unfinished = list[int]()

    def begin_step(self, step: int) -> None:
        # Reset `issued` before `unfinished`, because another thread reads them in the opposite
        # order.
        self.step = step
        self.issued = [False] * len(self.events)
        self.unfinished = [*range(len(self.events))]

    def get_progress(self) -> StepProgress:
        unfinished = self.unfinished
        issued = self.issued
        unfinished[:] = [k for k in unfinished if not (issued[k] and self._has_ended(k))]
        return StepProgress(self.step, (*unfinished,), tuple(k for k in unfinished if issued[k]))

    def _has_ended(self, k: int) -> bool:
        return self.events[k].query() and all(
            work.is_completed() for work in self.works[k] if hasattr(work, "is_completed")
        )


def _find_started_work(state: ProgramState, k: int, i: Instr) -> Callable[[], Sequence[Any]]:
    """Return a function that lists the transfers that an instruction has just started."""
    if i.op in SEND_OPS:
        return lambda: state.service(PendingSends).works[k][:1]
    if i.op in RECV_OPS + BOUNDARY_COLLECTIVE_OPS + EP_COLLECTIVE_OPS:
        arrivals, key = state.stages[i.stage].arrivals, (INSTRUCTIONS[i.op].gives[0], i.mb)
        return lambda: (arrivals[key],)
    return lambda: ()


def describe_wait(program: Program, i: Instr) -> str:
    """Describe what a running instruction does: "waits for rank 1 to send", or "computes".

    Args:
        program: The program.
        i: The instruction.
    """
    row = INSTRUCTIONS[i.op]
    if row.peer:
        peer = program.peer_rank(i)
        return f"waits for rank {peer} to {'send' if i.op in RECV_OPS else 'receive'}"
    if row.group:
        return f"waits for {_GROUP_DESCRIPTIONS[row.group]}"
    if i.op in BOUNDARY_COLLECTIVE_OPS:
        return "waits for its tensor-parallel group"
    if i.op in EP_COLLECTIVE_OPS:
        return "waits for its expert-parallel group"
    if row.lane is Lane.DP and program.dp > 1:
        return "waits for the other replicas"
    return "computes"
