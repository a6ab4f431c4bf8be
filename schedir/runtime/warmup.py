"""Warm: what happens at first use happens before the first step."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from schedir.ir.ops import FORWARDS, SPLITS
from schedir.runtime.buffers import restored
from schedir.runtime.executor import Executor
from schedir.runtime.handlers import HANDLERS
from schedir.runtime.rank import State
from schedir.runtime.recorder import Recorded
from schedir.runtime.split import Tape, recording
from schedir.transports.processes import Processes


def warm_up(executor: Executor, input: Tensor, target: Tensor) -> None:
    """Run each own stage once, forward and backward, with no message under way, then reductions.

    `input` is one microbatch of the first stage's, `target` of the loss's; other stages get
    zeros.  Loading a kernel, compiling one, or connecting to a peer, may wait for all that runs
    on a GPU; beside a receive that waits for a peer it would wait for ever (CUDA C++ Programming
    Guide, "Lazy Loading", on concurrent execution).  NCCL connects as sizes need it, so what is
    reduced here has the sizes of a step.  Gradients are forgotten; parameters, buffers and
    torch's generators stay as they are.  Ranks meet here: all processes must call this.  Raises
    ExecutionError for a stage that fails, as its first forward.
    """
    state = executor.state
    for s in state.stages:
        own = (k for k, i in enumerate(state.stream) if i.op in FORWARDS and i.stage == s)
        executor.position = next(own, 0)
        try:
            with restored(state.stages[s].module, state.device):
                _run(state, s, input, target)
        except Exception as error:
            raise executor.failed(error) from error
    transport = state.transport
    if isinstance(transport, Recorded):
        transport = transport.inner
    if isinstance(transport, Processes):  # virtual ranks have nobody to connect to
        _run_once(executor)
    for stage in state.stages.values():
        stage.gradients.zero()
    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)


def _run(state: State, s: int, input: Tensor, target: Tensor) -> None:
    """Run an own stage, forward and backward, as the program splits it."""
    last, module = state.plan.stages - 1, state.stages[s].module
    shape, dtype = state.boundary.shape, state.boundary.dtype
    x = input if s == 0 else torch.zeros(shape, dtype=dtype, device=state.device)
    y = module(x if s == 0 else x.requires_grad_())
    y = state.loss(y, target) if s == last else y
    if state.trains and y.requires_grad:
        tape = Tape()
        dy = None if s == last else torch.zeros_like(y)
        splits = any(i.op in SPLITS for i in state.stream)
        with recording(tape) if splits else nullcontext():
            torch.autograd.backward(y, dy)
        tape.run()


def _run_once(executor: Executor) -> None:
    """Do once what else a step does at first use, as its handlers say; wait for each."""
    state, done = executor.state, set[object]()
    for i, (wait, run) in zip(state.stream, executor.calls, strict=True):
        how = HANDLERS[i.op].warm_up
        what: object = (i.op, i.stage) if how == "run" else how
        if how in ("stage", "skip") or what in done:
            continue
        done.add(what)
        if callable(how):
            how(state)
            continue
        if wait is not None:
            wait()
        run()
        state.wait_for_reductions()
    for slots in state.slots.values():
        slots.forget()
