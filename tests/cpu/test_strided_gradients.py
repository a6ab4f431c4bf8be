"""Tests of gradients of parameters whose memory layout differs from their own order."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir import PipelineShape
from schedir.errors import ModelError
from schedir.runtime.in_process import InProcessExecutor
from schedir.schedules import gpipe


class TransposedWeight(nn.Module):
    """A stage with a parameter that is a transposed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w @ self.w.t())


def test_fused_optimizer_steps_transposed_parameter_correctly() -> None:
    fused = partial(torch.optim.AdamW, lr=0.1, fused=True)
    torch.manual_seed(0)
    ours = [TransposedWeight(), TransposedWeight()]
    torch.manual_seed(0)
    plain = nn.Sequential(TransposedWeight(), TransposedWeight())
    executor = InProcessExecutor(
        schedir.compile(gpipe, PipelineShape(2, 2)), [*ours],
        loss=nn.functional.mse_loss, boundary=(5, 4), optimizer=fused,
    )  # fmt: skip
    optimizer = fused(plain.parameters())
    for _ in range(2):
        x, y = torch.randn(2, 2, 5, 4)
        executor.step(x, y, 0.5)
        for mb in range(2):
            (nn.functional.mse_loss(plain(x[mb]), y[mb]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for one, p in zip(ours, plain.parameters(), strict=True):
        torch.testing.assert_close(one.w, p)


def test_strided_tied_weight_with_fused_optimizer_is_refused() -> None:
    stages = [TransposedWeight(), TransposedWeight()]
    stages[1].w = stages[0].w
    ties = schedir.find_tied_weights(stages)
    program = schedir.compile(gpipe, PipelineShape(2, 2), tied_weights=ties)

    def make_executor(fused: bool) -> InProcessExecutor:
        adam = partial(torch.optim.AdamW, lr=0.1, fused=fused)
        return InProcessExecutor(
            program, [*stages],
            loss=nn.functional.mse_loss, boundary=(5, 4), optimizer=adam, tied_weights=ties,
        )  # fmt: skip

    with pytest.raises(ModelError, match=r"w of stage 0 is not contiguous .*strides are \[1, 4\]"):
        make_executor(fused=True)
    make_executor(fused=False)
