"""The training loop of bert.py and encoder_decoder.py: AdamW on 1, 2 or 4 processes over Gloo."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import schedir
from schedir import PipelineShape
from schedir.runtime import Executor, GlooTransport, GradientOptions
from schedir.schedules import interleaved

Batch = tuple[Tensor, Tensor, Sequence[Mapping[str, Any]]]  # inputs, targets and keywords


def train(
    build_stage: Callable[[int, int], nn.Module],
    batch: Callable[[int], Batch],
    loss: Callable[..., Tensor],
    count_tokens: Callable[[Tensor], int],
    boundary: Any,
    tied: Any,
    *,
    stages: int,
    microbatches: int,
    steps: int,
) -> None:
    """Train as one of the ranks that torchrun started, and print the loss of each step.

    Without torchrun, the one process is rank 0 of 1.

    Args:
        build_stage: Takes the number of a stage and the number of stages, and returns the stage.
            The initial weights depend only on their names, so each process can build its own
            stages.
        batch: Takes the number of a step, and returns its inputs, targets and keywords.
        loss: Returns the sum of the losses of a microbatch.
        count_tokens: Returns the number of targets that contribute to the loss.
        boundary: The shapes of the tensors between stages, for `boundary` of `Executor`.
        tied: The stages that share weights, for `tied_weights` of `schedir.compile`.
        stages: The number of stages of the model.
        microbatches: The number of microbatches of a step.
        steps: The number of steps.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    single_process: dict[str, Any] = {"rank": 0, "world_size": 1}
    single_process["store"] = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", **(single_process if world_size == 1 else {}))
    torch.set_num_threads(1)
    shape = PipelineShape(
        ranks=world_size, microbatches=microbatches, stages_per_rank=stages // world_size
    )
    program = schedir.compile(interleaved, shape, tied_weights=tied, clip_grad_norm=True)
    transport = GlooTransport(program)
    local_stages = {
        number: build_stage(number, stages) for number in shape.stages_on_rank[transport.rank]
    }
    parameters = {p for stage in local_stages.values() for p in stage.parameters()}
    executor = Executor(
        program, transport.rank, local_stages, transport, loss=loss, boundary=boundary,
        optimizer=torch.optim.AdamW(parameters, lr=1e-3), gradients=GradientOptions(max_norm=1.0),
    )  # fmt: skip
    for step in range(steps):
        inputs, targets, keywords = batch(step)
        grad_scale = 1 / count_tokens(targets)
        loss_sum = executor.step(inputs, targets, grad_scale=grad_scale, keywords=keywords)
        if loss_sum is not None:  # only the rank of the last stage has the loss
            print(f"step {step + 1:>2}  loss {float(loss_sum) * grad_scale!r}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
