"""Tests of windowed attention by FlexAttention against full attention with a mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from schedir.models import gpt
from schedir.models.attention import attention, build_block_mask, build_window_mask
from schedir.runtime.sequential_reference import run_sequential
from tests.cpu.tiny_stages import copy_gradients

pytestmark = pytest.mark.usefixtures("real_gpu")


def full_attention(q: Tensor, k: Tensor, v: Tensor, window: Any, dropout: float = 0.0) -> Tensor:
    mask = build_window_mask(q.shape[2], window[0], window[1], q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)


def assert_near(got: Tensor, want: Tensor, limit: float) -> None:
    error = (got.double() - want.double()).norm()
    assert float(error) <= limit * float(want.double().norm())


@pytest.mark.parametrize("length", [300, 1024])
@pytest.mark.parametrize("window", [(64, 1), (100, 7), (256, 128), (128, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_attention_equals_masked_attention(
    length: int, window: Any, dtype: torch.dtype
) -> None:
    numbers = torch.Generator("cuda").manual_seed(0)
    shape = 2, length, 3, 3, 32
    qkv = torch.randn(shape, generator=numbers, device="cuda").to(dtype).permute(3, 0, 2, 1, 4)
    q, k, v = (x.detach().requires_grad_() for x in qkv)
    grad = torch.randn(q.shape, generator=numbers, device="cuda").to(dtype)
    results = []
    for run in (attention, full_attention):
        out = run(q, k, v, window)
        results.append([out, *torch.autograd.grad(out, (q, k, v), grad)])
    limit = 1e-2 if dtype == torch.float32 else 3e-2  # TF32 may be allowed
    for got, expected in zip(*results, strict=True):
        assert_near(got, expected, limit)


def test_block_mask_is_cached() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert build_block_mask(512, 64, 16, device) is build_block_mask(512, 64, 16, device)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gpt_gradients_match_cpu(dropout: float) -> None:
    config = gpt.GPTConfig(
        vocab=64, layers=3, hidden=64, heads=2, context=300, window=(0, 64, 100), stride=(1, 64, 1)
    )
    numbers = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randint(0, 64, (2, 1, 300), generator=numbers) for _ in range(2))
    results = []
    for device in ("cpu", "cuda"):
        stage = gpt.build_stage(config, 0, 1, device=device)
        data = inputs.to(device), targets.to(device)
        total = run_sequential([stage], *data, loss=gpt.loss)
        results.append((total, copy_gradients([stage])[0]))
    (cpu_total, cpu_grads), (got, grads) = results
    assert_near(got.cpu(), cpu_total, 1e-2)
    for name, grad in grads.items():
        assert_near(grad.cpu(), cpu_grads[name], 5e-2)
    if dropout:  # the output differs, because dropout is applied
        stage = gpt.build_stage(replace(config, dropout=dropout), 0, 1, device="cuda")
        total = run_sequential([stage], inputs.cuda(), targets.cuda(), loss=gpt.loss, seed=1)
        assert total.isfinite() and not torch.equal(total, got)
