"""Warm: what happens at first use happens before the first step."""

from __future__ import annotations

import torch
from torch import Tensor

from schedir.ops import Opcode
from schedir.runtime.executor import Executor
from schedir.runtime.split import Tape, recording


def warm_up(executor: Executor, input: Tensor, target: Tensor) -> None:
    """Run each own stage once, forward and backward, with no message under way.

    `input` is one microbatch of the first stage's, `target` of the loss's; other stages get
    zeros.  Loading a kernel, or compiling one, may wait for all that runs on a GPU; beside a
    receive that waits for a peer it would wait for ever (CUDA C++ Programming Guide, "Lazy
    Loading", on concurrent execution).  Gradients are forgotten, parameters stay.  Stages that
    talk within their tensor-parallel group do so here: all its ranks must call this.
    """
    last = executor.plan.stages - 1
    split = any(op is Opcode.BackwardInput for op, _, _ in executor.stream)
    shape, dtype = executor.boundary.shape, executor.boundary.dtype
    for s, stage in executor.stages.items():
        x = input if s == 0 else torch.zeros(shape, dtype=dtype, device=executor.device)
        y = stage.module(x if s == 0 else x.requires_grad_())
        y = executor.loss(y, target) if s == last else y
        if executor.program.trains and y.requires_grad:
            tape = Tape()
            dy = None if s == last else torch.zeros_like(y)
            if split:
                with recording(tape):
                    torch.autograd.backward(y, dy)
            else:
                torch.autograd.backward(y, dy)
            tape.run()
        stage.gradients.zero()
