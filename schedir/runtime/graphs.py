"""Graphs: a rank's whole step as one CUDA graph, with one launch by the host."""

from __future__ import annotations

import torch
from torch import Tensor

from schedir.errors import ModelError
from schedir.runtime.executor import Executor
from schedir.runtime.rank import Microbatches

WARM = 2  # steps before capture: what is made on first use must be there


class GraphedStep:
    """An executor's step, captured once and replayed; the same bits.

    Everything is as it was at capture: shapes, `scale`, and an optimizer's numbers that are not
    tensors, the learning rate among them.  All ranks must capture at the same step, and replay
    together.  The capture itself runs `WARM` steps, whose gradients the next step overwrites: give
    an executor without an optimizer, or expect its parameters to move, and make it `capturable`.

    Raises ModelError for an executor that is not on a GPU.
    """

    def __init__(
        self, executor: Executor, inputs: Microbatches, targets: Microbatches, scale: float = 1.0
    ) -> None:
        if executor.device.type != "cuda":
            raise ModelError(
                f"a CUDA graph holds what runs on a GPU, rank {executor.rank} is on "
                f"{executor.device}",
                program=executor.program.name,
            )
        self.executor, self.scale = executor, scale
        self.inputs = [x.to(executor.device, copy=True) for x in inputs]
        self.targets = [x.to(executor.device, copy=True) for x in targets]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM):
                executor.step(self.inputs, self.targets, scale)
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile: NCCL's watchdog does.
        with torch.cuda.graph(self.graph, stream=aside, capture_error_mode="thread_local"):
            self.loss = executor.step(self.inputs, self.targets, scale)

    def step(self, inputs: Microbatches, targets: Microbatches) -> Tensor | None:
        """As Executor.step, by one launch; the loss is overwritten by the next step."""
        for own, given in ((self.inputs, inputs), (self.targets, targets)):
            for mine, x in zip(own, given, strict=True):
                mine.copy_(x, non_blocking=True)
        self.graph.replay()
        return self.loss
