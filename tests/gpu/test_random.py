"""Tests of random numbers on a GPU, which are seeded without a wait and equal in any order."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schedir import compile
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.runtime.autograd.random_streams import fork_layer_rng
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import interleaved
from schedir.testing.tiny_model import squared_error

SHAPE = (2, 16)


class Noisy(nn.Module):
    """A linear layer with dropout, which may be recomputed in the backward."""

    def __init__(self, k: int, again: bool) -> None:
        super().__init__()
        self.k, self.again, self.inner = k, again, nn.Linear(16, 16)
        self.inner.weight.data = torch.eye(16) + k / 8
        nn.init.zeros_(self.inner.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            y: Tensor = checkpoint(self.run, x, use_reentrant=False)
            return y
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        with fork_layer_rng(self.k):
            return F.dropout(torch.tanh(self.inner(x)), 0.5)


def make_noisy_stages(stages: int, recompute: bool = False) -> list[nn.Module]:
    return [Noisy(k, recompute).cuda() for k in range(stages)]


@pytest.mark.parametrize("again", [False, True])
def test_random_numbers_match_reference_in_any_order(again: bool) -> None:
    x = torch.linspace(-1, 1, 4 * 32).view(4, *SHAPE).cuda()
    program = compile(interleaved, PipelineShape(2, 4, 2), progress_model="per_edge")
    ours = make_noisy_stages(4, again)
    ranks = InProcessExecutor(program, ours, loss=squared_error, boundary=Boundary(SHAPE), seed=5)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    before = torch.cuda.get_rng_state()
    for step, order in enumerate((None, 0, 1)):
        reference_stages = make_noisy_stages(4)
        total = run_sequential(reference_stages, x, x, loss=squared_error, seed=5, step=step)
        close(ranks.step(x, x, order_seed=order), total)
        for stage, reference in zip(ours, reference_stages, strict=True):
            for p, q in zip(stage.parameters(), reference.parameters(), strict=True):
                close(p.grad, q.grad)
    assert torch.equal(torch.cuda.get_rng_state(), before)
