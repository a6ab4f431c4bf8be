"""What a rank computes as CUDA graphs: it trains as it does without, and launches little."""

from __future__ import annotations

import pytest
import torch

from schedir.runtime.compute_graphs import GraphedComputes
from tests.cpu.tiny_stages import batch
from tests.gpu.test_graphs import training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_trains_as_without(dtype: torch.dtype) -> None:
    eager, captured = training(dtype, fused=True), training(dtype, fused=True)
    inputs, targets, scale = batch(3)
    graphs = GraphedComputes(captured, inputs, targets, scale)
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (2e-2, 2e-3)
    for seed in range(3):
        inputs, targets, scale = batch(3, seed)
        inputs, targets = inputs.cuda(), targets.cuda()
        loss = eager.step(inputs, targets, scale)
        torch.testing.assert_close(graphs.step(inputs, targets, scale), loss, rtol=rtol, atol=atol)
    graphs.close()
    for one, other in zip(
        eager.stages[0].module.parameters(), captured.stages[0].module.parameters(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
    assert captured.step(inputs, targets, scale) is not None
