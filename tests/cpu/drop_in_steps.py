"""Steps of `schedir.torch_pipelining.Schedule` as a user writes them, for tests of gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.placement import Placement
from schedir.torch_pipelining import Schedule
from tests.cpu.torch_pipelines import Step, make_stage

N_MICROBATCHES = 4
Wrap = Callable[[nn.Module, Any], nn.Module]


def make_schedule(
    parts: dict[int, nn.Module], stages: int, group: Any = None, **options: Any
) -> Schedule:
    """Return a Schedule of some parts of a model."""
    held = [make_stage(part, s, stages, group) for s, part in parts.items()]
    given: dict[str, Any] = {"n_microbatches": N_MICROBATCHES, "loss_fn": mse_loss} | options
    return Schedule(held, **given)


def run_step(
    schedule: Schedule, parts: dict[int, nn.Module], x: Tensor, y: Tensor, **more: Any
) -> Any:
    """Run one step, and pass each rank the arguments that it needs."""
    last = schedule._num_stages - 1
    return schedule.step(*((x,) if 0 in parts else ()), target=y if last in parts else None, **more)


def make_step(
    placement: Placement,
    *,
    steps: int = 1,
    dp: int = 1,
    wrap: Wrap | None = None,
    around: Callable[[Schedule, dict[int, nn.Module], Tensor, Tensor], None] | None = None,
    **options: Any,
) -> Step:
    """Return a step over several parts of the batch, which accumulates gradients.

    `around` runs before each part.
    """

    def step(rank: int, ranks: int, model: nn.Sequential, batch: tuple[Tensor, Tensor]) -> None:
        mesh = init_device_mesh("cpu", (ranks // dp, dp), mesh_dim_names=("pp", "dp"))
        pp, own = mesh["pp"].get_local_rank(), mesh["dp"]
        shape = PipelineShape(ranks // dp, N_MICROBATCHES, placement=placement)
        if isinstance(placement, str):
            shape = replace(shape, stages_per_rank=max(1, len(model) // (ranks // dp)))
        parts = {s: wrap(model[s], own) if wrap else model[s] for s in shape.stages_on_rank[pp]}
        schedule = make_schedule(parts, len(model), mesh["pp"].get_group(), **options)
        x, y = (each.chunk(dp)[own.get_local_rank()] for each in batch)
        for part in zip(x.chunk(steps), y.chunk(steps), strict=True):
            if around is not None:
                around(schedule, parts, *part)
            run_step(schedule, parts, *part)

    return step
