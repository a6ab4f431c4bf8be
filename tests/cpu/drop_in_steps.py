"""Steps of `schedir.torch_pipelining.Schedule` as a user writes them, for tests of gradients."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.placement import Placement
from schedir.schedules.schedule_algebra import B, F, RankSchedule
from schedir.testing.gradient_assertion import _run_rank
from schedir.testing.gradient_comparison import GradientDump, compare_gradients
from schedir.testing.unpipelined_model import UnpipelinedModel, copy_model, split_batch
from schedir.torch_pipelining import Schedule
from schedir.transports.local_processes import run_processes
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


def evaluate_between(schedule: Schedule, parts: dict[int, nn.Module], x: Tensor, y: Tensor) -> None:
    """Evaluate before a part of the batch, in a placement with the last stage on the first rank."""
    with torch.no_grad():
        schedule.eval(*((x,) if 0 in parts else ()), target=y if 3 in parts else None)


def forwards_then_backwards(rank: int, ranks: int, m: int, v: int) -> RankSchedule:
    """Return all forwards stage by stage, and then all backwards. The placement may be any."""
    forwards = sum((m * F[j] for j in range(v)), 0 * F)
    return forwards + sum((m * B[j] for j in reversed(range(v))), 0 * F)


class GradientCase(NamedTuple):
    """A step, and the arguments of `assert_same_gradients` for it."""

    step: Step
    model: nn.Module
    batch: Any
    microbatches: int = N_MICROBATCHES
    divisor: float = 0.0  # 0 is the number of microbatches
    replicas: int = 1
    tolerance: float | None = None


def run_gradient_cases(cases: dict[Any, GradientCase], ranks: int) -> Callable[[Any], None]:
    """Run several steps in the same processes, which start once.

    Return a function that asserts what `assert_same_gradients` asserts of a case, given its key.
    """
    context = multiprocessing.get_context("fork")
    dumps_by_rank = run_processes(_run_steps, ranks, cases, ranks, context=context)

    def check(key: Any) -> None:
        case, dumps = cases[key], [dumps[key] for dumps in dumps_by_rank]
        batches = split_batch(case.batch, case.microbatches, mse_loss)
        divisor = case.divisor or len(batches)
        loop = UnpipelinedModel(copy_model(case.model), batches, mse_loss, divisor)
        compare_gradients(loop, dumps, replicas=case.replicas, tolerance=case.tolerance)

    return check


def _run_steps(rank: int, cases: dict[Any, GradientCase], ranks: int) -> dict[Any, GradientDump]:
    """Return the gradients of a rank after each step."""
    results = {}
    for key, case in cases.items():
        dump = _run_rank(rank, case.step, ranks, case.model, case.batch)
        assert not isinstance(dump, str), (key, dump)
        results[key] = dump
    return results
