"""Warm: what happens at first use happens before the first step."""

from __future__ import annotations

import torch
from torch import Tensor

from schedir.ir.ops import ROWS, Lane, Opcode
from schedir.kernels.boundary import pack
from schedir.runtime.buffers import restored
from schedir.runtime.executor import Executor
from schedir.runtime.recorder import Recorded
from schedir.runtime.split import Tape, recording
from schedir.transports.processes import Processes
from schedir.transports.transport import own_part


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
    for s in executor.stages:
        forwards = (k for k, i in enumerate(executor.stream) if i[:2] == (Opcode.Forward, s))
        executor.position = next(forwards, 0)
        try:
            with restored(executor.stages[s].module, executor.device):
                _run(executor, s, input, target)
        except Exception as error:
            raise executor.failed(error) from error
    transport = executor.transport
    if isinstance(transport, Recorded):
        transport = transport.inner
    if isinstance(transport, Processes):  # virtual ranks have nobody to connect to
        _meet(executor, transport)
    for stage in executor.stages.values():
        stage.gradients.zero()
    if executor.device.type == "cuda":
        torch.cuda.synchronize(executor.device)


def _run(executor: Executor, s: int, input: Tensor, target: Tensor) -> None:
    """Run an own stage, forward and backward, as the program splits it."""
    last, module = executor.plan.stages - 1, executor.stages[s].module
    shape, dtype = executor.boundary.shape, executor.boundary.dtype
    x = input if s == 0 else torch.zeros(shape, dtype=dtype, device=executor.device)
    y = module(x if s == 0 else x.requires_grad_())
    y = executor.loss(y, target) if s == last else y
    if executor.program.trains and y.requires_grad:
        tape = Tape()
        dy = None if s == last else torch.zeros_like(y)
        if any(op is Opcode.BackwardInput for op, _, _ in executor.stream):
            with recording(tape):
                torch.autograd.backward(y, dy)
        else:
            torch.autograd.backward(y, dy)
        tape.run()


def _meet(executor: Executor, transport: Processes) -> None:
    """Do once what ranks of a step do together, but for messages."""
    ops = {i.op for i in executor.stream}
    whole = torch.zeros(
        executor.boundary.shape, dtype=executor.boundary.dtype, device=executor.device
    )
    if ops & {Opcode.Scatter, Opcode.ScatterGrad}:
        pack(whole, transport.tp, transport.tp_rank)
    if ops & {Opcode.Gather, Opcode.GatherGrad}:
        transport.collective("all_gather", "tp", whole.view(-1), own_part(transport, whole)).wait()
    for k, i in enumerate(executor.stream):
        if ROWS[i.op].lane is Lane.DP:
            wait, run = executor.calls[k]
            if wait is not None:
                wait()
            run()
    for work in executor.reducing:
        work.wait()
    executor.reducing.clear()
