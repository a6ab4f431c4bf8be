"""Programs with optimizer states on the host, and optimizers for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import schedir
from schedir import PipelineShape, Program
from schedir.models import gpt
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.parameters.mixed_precision import MainOptimizer, use_float32_gradients
from schedir.runtime.services.optimizer_placement import OptimizerPlacement
from tests.cpu.tiny_stages import (
    BATCH,
    BOUNDARY,
    CONTEXT,
    HIDDEN,
    gpt_stages,
    list_parameters,
    make_batch,
)

torch.set_num_threads(1)

Make = Callable[[list[nn.Parameter]], Any]
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def make_grouped_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer with two groups, one of which has no weights of some stages."""
    matrices = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "lr": 1e-3}]
    return torch.optim.Adam(groups, lr=1e-2)


def make_main_optimizer(parameters: list[nn.Parameter]) -> MainOptimizer:
    return MainOptimizer(parameters, ADAMW)


OPTIMIZER_FACTORIES: dict[str, Make] = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam, groups": make_grouped_optimizer,
    "AdamW": ADAMW,
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "NAdam": torch.optim.NAdam,
    "bfloat16": make_main_optimizer,
}


def make_executor(
    program: Program, make: Make, *, half: bool = False, **how: Any
) -> InProcessExecutor:
    stages = gpt_stages(program.shape.stages, bool(program.tied_weights))
    for stage in stages if half else ():
        use_float32_gradients(stage.bfloat16())
    for stage in stages[: program.frozen_stages]:
        stage.requires_grad_(False)
    boundary = Boundary((BATCH, CONTEXT, HIDDEN), torch.bfloat16) if half else BOUNDARY
    if program.clip_grad_norm:
        how["gradients"] = replace(how.get("gradients", GradientOptions()), max_norm=0.5)
    return InProcessExecutor(
        program, stages, loss=gpt.loss, boundary=boundary, optimizer=make, **how
    )


def run_steps_in_random_order(world: InProcessExecutor, *at: int) -> list[Tensor]:
    """Return the losses of some steps in random orders."""
    found = []
    for k in at:
        x, y, scale = make_batch(world.program.shape.microbatches, k)
        found.append(world.step(x, y, scale, order_seed=k))
    return found


def read_training_state(world: InProcessExecutor) -> list[Tensor]:
    """Return each rank's parameters, their optimizer states, and the loss scale."""
    found: list[Any] = []
    for rank in world.executors:
        inner = getattr(get_optimizer(rank), "inner", get_optimizer(rank))
        for group in inner.param_groups:
            for p in group["params"]:
                found += [p, *inner.state[p].values()]
        found += list_parameters(rank)
        loss_scale = rank.state.options.gradients.loss_scale
        found += [] if loss_scale is None else [loss_scale.value]
    return [t.detach().clone() for t in found if isinstance(t, Tensor)]


def are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def compile_on_both_tiers(
    schedule: Any, shape: PipelineShape, *, states: str = "host", **how: Any
) -> tuple[Program, Program]:
    """Return a program with states on the device, and the same with states on host or disk."""
    compiled: Any = partial(schedir.compile, schedule, shape, progress_model="per_edge", **how)
    return compiled(), compiled(optimizer_placement=states)


def get_optimizer(rank: Executor) -> Any:
    return rank.resources.optimizer


def list_optimizer_state(rank: Executor) -> list[Tensor]:
    return [t for state in get_optimizer(rank).state.values() for t in state.values()]


def poison_weights(ranks: InProcessExecutor) -> None:
    """Fill the weights of a stage with NaN on the device while the host updates them."""
    if ranks.program.optimizer_placement != "cpu_step":
        return
    for rank in ranks.executors:
        placement = rank.state.service(OptimizerPlacement)
        vars(placement)["start_host_step"] = partial(
            _begin_poisoned, placement, placement.start_host_step
        )


def _begin_poisoned(placement: OptimizerPlacement, begin: Any, stage: int, *more: Any) -> None:
    for weight in placement.host_parameters[stage].device_weights.values():
        weight.fill_(torch.nan)
    begin(stage, *more)
