"""Steps of two runtimes that take turns in the same processes, and small models for them."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any, NamedTuple

import numpy as np
import torch
import torch._dynamo  # every optimizer loads it: once, before processes fork
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.harness import ratio
from schedir.training import gpt
from schedir.transports.local_processes import run

WARM = 3  # steps of each runtime that are not counted


class Model(NamedTuple):
    """A model in stages, and a batch; `inputs[mb]` is a microbatch."""

    stages: list[nn.Module]
    inputs: Tensor
    targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    boundary: tuple[int, ...]


class Tiny(nn.Module):
    """Next to no work."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def squares(y: Tensor, target: Tensor) -> Tensor:
    """The sum of squared errors."""
    return (y - target).square().sum()


def tiny(stages: int, m: int) -> Model:
    """Microbatches of eight numbers."""
    x = torch.randn(m, 1, 8, generator=torch.Generator().manual_seed(0))
    return Model([Tiny() for _ in range(stages)], x, x + 1, squares, (1, 8))


def small_gpt(stages: int, m: int) -> Model:
    """A GPT of 8 layers, hidden 128, on microbatches of 2 x 64 tokens."""
    config = gpt.GPTConfig(layers=8, hidden=128, context=64, tied=False)
    tokens = torch.randint(256, (m, 2, 65), generator=torch.Generator().manual_seed(0))
    built: list[nn.Module] = [gpt.build_stage(config, s, stages) for s in range(stages)]
    return Model(built, tokens[:, :, :-1], tokens[:, :, 1:], gpt.loss, (2, 64, 128))


class Took(NamedTuple):
    """Seconds of steps, each array of shape (rounds, 2).

    `wall` is the time on the slowest process, and `cpu` the processor time of all processes.
    """

    wall: NDArray[np.float64]
    cpu: NDArray[np.float64]

    def cells(self) -> list[str]:
        """Format both steps in ms, the ratio of the second to the first, and that of CPU time."""
        return [
            *(f"{1e3 * s:.1f}" for s in np.median(self.wall, 0)),
            ratio((self.wall[:, 1] / self.wall[:, 0]).tolist()),
            f"{np.median(self.cpu[:, 1] / self.cpu[:, 0]):.3f}",
        ]


def alternate(one: Callable[[], object], other: Callable[[], object], rounds: int) -> Took:
    """Time a step of each in turn, and gather the times of all processes."""
    took: list[list[tuple[float, float]]] = []
    for turn in range(WARM + rounds):
        pair = [(0.0, 0.0)] * 2
        for k in (0, 1) if turn % 2 else (1, 0):
            dist.barrier()
            began, cpu = perf_counter(), process_time()
            (one, other)[k]()
            pair[k] = perf_counter() - began, process_time() - cpu
        took.append(pair)
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, took[WARM:])
    walls, cpus = (np.array(each)[..., k] for k in (0, 1))  # (processes, rounds, which)
    return Took(walls.max(0), cpus.sum(0))


def on_ranks(
    work: Callable[..., Any], processes: int, *args: Any, limit: float = 3600
) -> list[Any]:
    """Run `work(rank, *args)` in forked processes of one Gloo world; return the results by rank.

    A process that fails, hangs for `limit` seconds or dies raises RankError with its traceback.
    """
    context = multiprocessing.get_context("fork")
    return run(_quiet, processes, work, *args, context=context, limit=limit)


def _quiet(rank: int, work: Callable[..., Any], *args: Any) -> Any:
    warnings.simplefilter("ignore")  # each process would print what torch warns of
    return work(rank, *args)
