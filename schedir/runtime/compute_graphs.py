"""Compute graphs: what a rank computes as CUDA graphs, one for each instruction.

Messages, reductions and the optimizer stay outside, and are issued as in any step: so receives may
be posted early, where a graph of a whole step promises nothing of its branches, and the host spends
a launch on an instruction, whatever it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedir.errors import ModelError
from schedir.ir.ops import BOUNDARY, COMPUTE
from schedir.runtime.batch import Batch, Keywords, Microbatches
from schedir.runtime.executor import Executor
from schedir.runtime.graphs import own_batch, require_gpu, require_kept, undrawn, write
from schedir.runtime.rank import Call
from schedir.runtime.slots import Slots
from schedir.runtime.undone import undone


class GraphedComputes:
    """An executor whose computes are captured once, in the order of its Stream, and replayed in it;
    the same bits.

    Graphs of one rank share their memory, as what one has let go another may take: they run in the
    order in which they were captured, and no step of the executor may be run without them until
    they are closed.  Inputs and targets are written into memory of their own; `scale`, learning
    rates and clipping are those of each step, as they are outside.  With replicas, gradients are
    summed up when the last backward has ended, and not under it.

    All ranks must capture at the same step.  `close` it before process groups are destroyed.

    Raises ModelError for an executor that is not on a GPU, for programs of several updates, whose
    weights are in other places in each, for levels of ZeRO at which memory comes and goes, and for
    a step that draws random numbers.
    """

    def __init__(
        self,
        executor: Executor,
        inputs: Microbatches,
        targets: Microbatches,
        scale: float = 1.0,
        keywords: Keywords = (),
    ) -> None:
        require_kept(executor)
        require_gpu(executor)
        if executor.program.plan.updates > 1:
            raise ModelError(
                "a graph has weights where they were at its capture, and a program of several "
                "updates keeps versions of them",
                program=executor.program.name,
            )
        state = executor.state
        self.executor, self.usual = executor, executor.calls
        self.given = own_batch(Batch(inputs, targets, scale, keywords), state.device)
        self.graphs: dict[int, _Captured] = {}
        self.pool: Any = torch.cuda.graph_pool_handle()
        step = executor.step if executor.in_turn is None else executor.step_in_turn
        aside = torch.cuda.Stream(state.device)
        aside.wait_stream(torch.cuda.current_stream(state.device))
        late, state.late = state.late, True  # no sum begins within a backward that is captured
        try:
            with torch.cuda.stream(aside), undone(state):
                with undrawn(executor):
                    step(*self.given)
                executor.calls = [
                    Call(call.wait, partial(self._capture, k, call.run))
                    if i.op in COMPUTE
                    else call
                    for k, (i, call) in enumerate(zip(state.stream, self.usual, strict=True))
                ]
                with executor.draws.seeding([]):  # which cannot be done in a capture
                    step(*self.given)
        except BaseException:
            executor.calls, state.late = self.usual, late
            raise
        self.late = late
        torch.cuda.current_stream(state.device).wait_stream(aside)
        torch.cuda.synchronize(state.device)
        executor.calls = self._instead({k: one.replay for k, one in self.graphs.items()})

    def _instead(self, runs: Mapping[int, Callable[[], None]]) -> list[Call]:
        """The executor's calls, some of which run something else."""
        return [
            call._replace(run=runs[k]) if k in runs else call for k, call in enumerate(self.usual)
        ]

    def step(
        self,
        inputs: Microbatches,
        targets: Microbatches,
        scale: float | Tensor = 1.0,
        keywords: Keywords = (),
    ) -> Tensor | None:
        """As Executor.step.  Raises ModelError for other shapes than at capture."""
        write(self.given, Batch(inputs, targets, keywords=keywords), self.executor.program)
        return self.executor.step(*self.given._replace(scale=scale))

    def close(self) -> None:
        """Let the graphs go, when they have run; the executor is as before."""
        torch.cuda.synchronize(self.executor.state.device)
        self.executor.calls, self.executor.state.late = self.usual, self.late
        for one in self.graphs.values():
            one.graph.reset()
        self.graphs.clear()

    def _capture(self, k: int, run: Callable[[], None]) -> None:
        """Capture an instruction, and note what it does to slots and losses."""
        state, graph = self.executor.state, torch.cuda.CUDAGraph()
        boundary = [state.slots[kind] for kind in BOUNDARY]
        before = [[*slots.values] for slots in boundary]
        losses = [*state.losses]
        # Other threads may call CUDA meanwhile: NCCL's watchdog does.
        stream = torch.cuda.current_stream(state.device)
        with torch.cuda.graph(graph, self.pool, stream, capture_error_mode="thread_local"):
            run()
        changes = [
            _Change(slots, number, now)
            for slots, was in zip(boundary, before, strict=True)
            for number, now in enumerate(slots.values)
            if now is not was[number]
        ]
        lost = [(mb, x) for mb, x in enumerate(state.losses) if x is not losses[mb]]
        self.graphs[k] = _Captured(graph, changes, state.losses, lost)


class _Change(NamedTuple):
    """What an instruction leaves in a slot: a value, or nothing."""

    slots: Slots
    number: int
    value: Any


class _Captured(NamedTuple):
    """The graph of an instruction, and what it does besides."""

    graph: Any
    changes: list[_Change]
    losses: list[Tensor]
    lost: list[tuple[int, Tensor]]

    def replay(self) -> None:
        """Run it."""
        self.graph.replay()
        for slots, number, value in self.changes:
            slots.put(number, value)
        for mb, loss in self.lost:
            self.losses[mb] = loss
