"""Dropout in your own module: all schedules and divisions into stages drop the same values.

    python examples/dropout.py      # prints three losses, which are equal

The random numbers of a stage depend on the executor's seed, the step, the microbatch and the number
of the stage. `fork_layer_rng` uses the number of a layer instead of the number of the stage. So a
layer drops the same values, however the model is divided into stages.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedir
from schedir.runtime import Boundary, InProcessExecutor, run_sequential
from schedir.runtime.autograd.random_streams import fork_layer_rng

WIDTH = 16


class Block(nn.Module):
    """A layer with its number in the model."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.inner = number, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with fork_layer_rng(self.number):
            return x + F.dropout(torch.tanh(self.inner(x)), 0.1, self.training)


def squared_error(y: Tensor, target: Tensor) -> Tensor:
    """Return the sum of squared errors."""
    return (y - target).square().sum()


def main() -> None:
    """Compare a model in 2 and in 4 stages, under two schedules, with a loop over its blocks."""
    torch.manual_seed(0)
    blocks = [Block(number) for number in range(4)]
    inputs, targets = torch.randn(2, 8, 32, WIDTH)  # 8 microbatches of 32 samples
    loop_loss = run_sequential(blocks, inputs, targets, loss=squared_error, seed=1)
    print(f"a plain loop            {float(loop_loss):.4f}")
    for name, shape in (
        ("one_f_one_b", schedir.PipelineShape(ranks=2, microbatches=8)),
        (
            "zb_v",
            schedir.PipelineShape(ranks=2, microbatches=8, stages_per_rank=2, placement="vee"),
        ),
    ):
        layers_per_stage = len(blocks) // shape.stages
        stages = [
            nn.Sequential(*blocks[first : first + layers_per_stage])
            for first in range(0, len(blocks), layers_per_stage)
        ]
        schedir.runtime.make_backward_splittable(nn.ModuleList(stages))
        program = schedir.compile(getattr(schedir.schedules, name), shape)
        boundary = Boundary((32, WIDTH))
        executor = InProcessExecutor(program, stages, loss=squared_error, boundary=boundary, seed=1)
        loss = executor.step(inputs, targets)
        print(f"{name:<12} {shape.stages} stages   {float(loss):.4f}")
        assert torch.equal(loss, loop_loss)


if __name__ == "__main__":
    main()
