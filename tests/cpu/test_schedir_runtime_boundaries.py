"""Tests of several tensors and keywords between torch's stages under runtime="schedir"."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from schedir.torch_pipelining.executor_factory import collect_shapes
from schedir.torch_pipelining.schedule import Runtime, Schedule
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import have_same_bits
from tests.cpu.torch_pipelines import list_rank_stages, make_stage

N, ROWS, LENGTH = 4, 8, 5
WIDTHS = (6, 4, 8, 3, 6)  # the width of each stage's input, and of the last output


class MaskedLayer(nn.Module):
    """Takes values, a mask and indices, and returns values of another width and the mask."""

    def __init__(self, s: int) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTHS[s], WIDTHS[s + 1]), s == len(WIDTHS) - 2
        self.table = nn.Embedding(7, WIDTHS[s])

    def forward(
        self, x: Tensor, mask: Tensor, indices: Tensor, *, times: Tensor, name: str = ""
    ) -> Any:
        # torch infers shapes with uninitialized memory, so the values are clamped to indices.
        y = torch.tanh(self.linear(x + self.table(indices.clamp(0, 6))))
        y = y.masked_fill(mask[..., None], 0.0) * times
        return y if self.last else (y, mask, indices + 1)


def make_batch(seed: int, long: int) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    return (
        torch.randn(ROWS, long, WIDTHS[0]),
        torch.rand(ROWS, long) < 0.3,
        torch.randint(0, 3, (ROWS, long)),
        torch.randn(ROWS, long, WIDTHS[-1]),
        torch.randn(ROWS, 1, 1),
    )


def run_steps(rank: int, name: str, runtime: Runtime, longs: list[int]) -> list[Any]:
    torch.manual_seed(0)
    modules = [MaskedLayer(s) for s in range(4)]
    kind = "ScheduleZBVZeroBubble" if name == "zb_v" else ""
    own_stages = list_rank_stages(kind, rank, dist.get_world_size(), 4)
    stages = [make_stage(modules[s], s, 4) for s in own_stages]
    schedule = Schedule(
        stages, N, loss_fn=mse_loss, schedule=name, runtime=runtime, allow_identical_stages=True
    )
    results: list[Any] = []
    for step, long in enumerate(longs):
        x, mask, indices, y, times = make_batch(step, long)
        losses: list[Tensor] = []
        args = (x, mask, indices) if 0 in own_stages else ()
        out = schedule.step(*args, target=y, losses=losses, times=times, name="kept")
        results += [out, losses, [p.grad for s in own_stages for p in modules[s].parameters()]]
        for s in own_stages:
            modules[s].zero_grad()
    with torch.no_grad():
        results += [schedule.eval(*args, times=times, name="kept")]
    return results


def compare_runtimes(rank: int) -> list[bool]:
    checks: list[bool] = []
    warnings.simplefilter("ignore")
    for name in ("interleaved", "zb_v"):
        schedir_results, torch_results = (
            run_steps(rank, name, r, [LENGTH, LENGTH]) for r in ("schedir", "torch")
        )
        checks += map(have_same_bits, schedir_results, torch_results)
    changing_length = run_steps(rank, "interleaved", "schedir", [LENGTH, LENGTH + 1, LENGTH])
    constant_length = run_steps(rank, "interleaved", "schedir", [LENGTH])
    return [*checks, have_same_bits(constant_length[:3], changing_length[:3])]


def test_several_tensors_and_keywords_equal_torch_runtime() -> None:
    for checks in run(compare_runtimes, 2):
        assert len(checks) == 15
        assert all(checks)


def test_shape_key_distinguishes_string_and_bool_keywords() -> None:
    assert collect_shapes({"mode": "short", "step": 1}) != collect_shapes(
        {"mode": "long", "step": 1}
    )
    assert collect_shapes({"masked": True}) != collect_shapes({"masked": False})
    assert collect_shapes({"step": 1}) == collect_shapes(
        {"step": 2}
    )  # a counter needs no new executor
