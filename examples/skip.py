"""A U-Net in four stages with a skip connection from the first stage to the last stage.

    python examples/skip.py

The U-Net connects stage 1 with stage 2, and stage 0 with stage 3. Stages 1 and 2 are neighbours, so
the output of stage 1 only has a second tensor. Stages 0 and 3 are no neighbours, so the program has
a skip connection between them.
"""

import sys

import torch
from torch import Tensor, nn

import schedir
from schedir import Costs, PipelineShape, schedules, viz
from schedir.runtime import InProcessExecutor, infer_boundaries, run_sequential

SKIPS = ((0, 3),)
MICROBATCHES, EACH = 8, 4
PLANS = {
    "one_f_one_b": PipelineShape(ranks=4, microbatches=MICROBATCHES),
    "interleaved": PipelineShape(ranks=2, microbatches=MICROBATCHES, stages_per_rank=2),
    "zb_v": PipelineShape(ranks=2, microbatches=MICROBATCHES, stages_per_rank=2, placement="vee"),
}


class Down(nn.Module):
    """Halve the length. Return the result, and the tensor before the pooling."""

    def __init__(self, channels: int, to: int) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv1d(channels, to, 3, padding=1), nn.MaxPool1d(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.conv(x))
        return self.pool(x), x


class Up(nn.Module):
    """Double the length, and add the channels of the tensor from the way down."""

    def __init__(self, channels: int, before: int, to: int) -> None:
        super().__init__()
        self.twice = nn.Upsample(scale_factor=2)
        self.conv = nn.Conv1d(channels + before, to, 3, padding=1)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return self.conv(torch.cat([self.twice(x), before], 1))


def unet() -> list[nn.Module]:
    """Return the stages of the model in their order."""
    torch.manual_seed(0)
    return [Down(1, 8), Down(8, 16), Up(16, 16, 8), Up(8, 8, 1)]


def main(picture: str = "") -> None:
    """Run a model under three schedules, and compare it with a plain loop over its stages."""
    loss = nn.functional.mse_loss
    boundary = infer_boundaries(unet(), torch.ones(EACH, 1, 32), skips=SKIPS)  # along (0, 3), too
    inputs, targets = torch.randn(2, MICROBATCHES, EACH, 1, 32)
    for name, shape in PLANS.items():
        program = schedir.compile(getattr(schedules, name), shape, skips=SKIPS)  # and checked
        stages, plain = unet(), unet()
        total = InProcessExecutor(program, stages, loss=loss, boundary=boundary).step(
            inputs, targets
        )
        right = run_sequential(plain, inputs, targets, loss=loss, program=program)
        own, others = (
            [p.grad for stage in model for p in stage.parameters()] for model in (stages, plain)
        )
        same = all(map(torch.equal, own, others)) and torch.equal(total, right)
        sent = schedir.to_text(program, folded=False).count("send_skip ")
        print(f"{name:12} loss {total:.4f}, bits {same and 'equal'}, {sent} skips sent")
        if picture and name == "one_f_one_b":
            timeline = schedir.simulate(program, Costs(F=1, B=2, send=0.2))
            viz.save(viz.gantt(timeline, show=["arrows"]), picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
