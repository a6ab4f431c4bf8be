"""A U-Net in four stages with a skip connection from the first stage to the last stage.

    python examples/skip.py

The U-Net connects stage 1 with stage 2, and stage 0 with stage 3. Stages 1 and 2 are adjacent, so
stage 1 sends a second tensor with its output. Stages 0 and 3 are not adjacent, so the program has a
skip connection between them.

For each of three schedules, the script prints the loss, whether loss and gradients have the same
bits as in a plain loop over the stages, and how many skips the program sends.
"""

import sys

import torch
from torch import Tensor, nn

import schedir
from schedir import Costs, PipelineShape, schedules, viz
from schedir.runtime import InProcessExecutor, infer_boundaries, run_sequential

SKIPS = ((0, 3),)  # from stage 0 to stage 3
MICROBATCHES, MICROBATCH_SIZE = 8, 4
SHAPES = {
    "one_f_one_b": PipelineShape(ranks=4, microbatches=MICROBATCHES),
    "interleaved": PipelineShape(ranks=2, microbatches=MICROBATCHES, stages_per_rank=2),
    "zb_v": PipelineShape(ranks=2, microbatches=MICROBATCHES, stages_per_rank=2, placement="vee"),
}


class Down(nn.Module):
    """Convolve, and halve the length. Return the result and the tensor before the pooling."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv1d(channels, out_channels, 3, padding=1), nn.MaxPool1d(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.conv(x))
        return self.pool(x), x


class Up(nn.Module):
    """Double the length, append the channels of `skip`, and convolve.

    `skip` is the second output of the `Down` of the same length.
    """

    def __init__(self, channels: int, skip_channels: int, out_channels: int) -> None:
        super().__init__()
        self.upsample = nn.Upsample(scale_factor=2)
        self.conv = nn.Conv1d(channels + skip_channels, out_channels, 3, padding=1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv(torch.cat([self.upsample(x), skip], 1))


def unet() -> list[nn.Module]:
    """Return the stages of the model in their order."""
    torch.manual_seed(0)
    return [Down(1, 8), Down(8, 16), Up(16, 16, 8), Up(8, 8, 1)]


def main(picture_path: str = "") -> None:
    """Run a model under three schedules, and compare it with a plain loop over its stages."""
    loss = nn.functional.mse_loss
    # The boundaries of adjacent stages, and of the skip connection.
    boundary = infer_boundaries(unet(), torch.ones(MICROBATCH_SIZE, 1, 32), skips=SKIPS)
    inputs, targets = torch.randn(2, MICROBATCHES, MICROBATCH_SIZE, 1, 32)
    for name, shape in SHAPES.items():
        program = schedir.compile(getattr(schedules, name), shape, skips=SKIPS)
        stages, loop_stages = unet(), unet()
        step_loss = InProcessExecutor(program, stages, loss=loss, boundary=boundary).step(
            inputs, targets
        )
        loop_loss = run_sequential(loop_stages, inputs, targets, loss=loss, program=program)
        gradients, loop_gradients = (
            [p.grad for stage in model for p in stage.parameters()]
            for model in (stages, loop_stages)
        )
        is_equal = all(map(torch.equal, (*gradients, step_loss), (*loop_gradients, loop_loss)))
        skips_sent = schedir.to_text(program, folded=False).count("send_skip ")
        print(
            f"{name:12} loss {step_loss:.4f}, bits {is_equal and 'equal'}, {skips_sent} skips sent"
        )
        if picture_path and name == "one_f_one_b":
            timeline = schedir.simulate(program, Costs(F=1, B=2, send=0.2))
            viz.save(viz.gantt(timeline, show=["arrows"]), picture_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
