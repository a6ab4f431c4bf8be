"""Steps of torch.distributed.pipelining, and models for them, for tests of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining.stage import PipelineStage
from torch.nn.functional import mse_loss

VEE = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
LOOP = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS")
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
WIDTH = 6
Step = Callable[[int, int, Any, Any], Any]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class SharedWeightLayer(nn.Module):
    """Uses a weight twice, the second time on the result of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight @ self.weight)


class TiedModel(nn.Module):
    """A model whose first and last layer have the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.middle = Layer()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.middle(self.embed(x)))
        return out


def make_model(stages: int, kind: Callable[[], nn.Module] = Layer) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(stages)))


def make_batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def squared_error(y: Tensor, target: Tensor) -> Tensor:
    """Return a loss that is a sum."""
    return (y - target).square().sum()


def list_rank_stages(name: str, rank: int, ranks: int, stages: int) -> list[int]:
    """Return the stages of a rank in the placement of a schedule."""
    if name in VEE:
        return [s for s in range(stages) if min(s, stages - 1 - s) == rank]
    return [s for s in range(stages) if s % ranks == rank]


def make_stage(part: nn.Module, number: int, stages: int, group: Any = None) -> PipelineStage:
    stage = PipelineStage(part, number, stages, torch.device("cpu"), group=group)
    if hasattr(stage, "_get_init_p2p_neighbors_ops"):
        # These first messages are only for NCCL. torch 2.11 sends them to itself, which Gloo
        # refuses.
        stage._get_init_p2p_neighbors_ops = list  # type: ignore[method-assign]
    return stage


def run_step(
    name: str,
    parts: dict[int, nn.Module],
    stages: int,
    halves: Sequence[tuple[Tensor, Tensor]],
    *,
    between: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    group: Any = None,
    microbatches: int = 4,
    loss_fn: Callable[..., Tensor] = mse_loss,
    **options: Any,
) -> None:
    """Run a step of torch's schedule for each of `halves`, which accumulates gradients."""
    held = [make_stage(part, s, stages, group) for s, part in parts.items()]
    given = held[0] if name in SINGLE else held
    schedule = getattr(theirs, name)(given, n_microbatches=microbatches, loss_fn=loss_fn, **options)
    for k, (x, y) in enumerate(halves):
        args, target = (x,) if 0 in parts else (), y if stages - 1 in parts else None
        if k and between:
            between(schedule, args, target)
        schedule.step(*args, target=target)


def make_torch_step(name: str, steps: int = 1, **options: Any) -> Step:
    """Return a step as torch's users write it, over several parts of the batch."""

    def step(rank: int, ranks: int, model: nn.Sequential, batch: tuple[Tensor, Tensor]) -> None:
        parts = {s: model[s] for s in list_rank_stages(name, rank, ranks, len(model))}
        halves = [*zip(*(each.chunk(steps) for each in batch), strict=True)]
        run_step(name, parts, len(model), halves, **options)

    return step


def make_replicated_step(
    name: str, wrap: Callable[[nn.Module, Any], nn.Module], dp: int = 2
) -> Step:
    """Return a step of several replicas. `wrap` takes each stage and their mesh."""

    def step(rank: int, ranks: int, model: nn.Sequential, batch: tuple[Tensor, Tensor]) -> None:
        mesh = init_device_mesh("cpu", (ranks // dp, dp), mesh_dim_names=("pp", "dp"))
        pp, own = mesh["pp"].get_local_rank(), mesh["dp"]
        x, y = (each.chunk(dp)[own.get_local_rank()] for each in batch)
        parts = {
            s: wrap(model[s], own) for s in list_rank_stages(name, pp, ranks // dp, len(model))
        }
        run_step(name, parts, len(model), [(x, y)], group=mesh["pp"].get_group())

    return step
