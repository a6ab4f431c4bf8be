"""Tests of a GPT with windows, against a mask, and with tensor parallelism."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from schedir.models import gpt
from schedir.models.attention import build_window_mask
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.sequential_reference import run_sequential
from tests.cpu.tiny_stages import copy_gradients
from tests.cpu.train_command import CONFIG as TRAINED
from tests.cpu.train_command import train, train_in_this_process

torch.set_num_threads(1)

LENGTH = 160  # several tiles
CONFIG = gpt.GPTConfig(
    vocab=32, layers=4, hidden=16, heads=2, context=LENGTH, tied=False,
    window=(0, 48, 100, 64), stride=(1, 16, 1, 64),
)  # fmt: skip
BOUNDARY = Boundary((1, LENGTH, 16))


def draw_tokens(m: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randint(0, 32, (m, 1, LENGTH), generator=numbers) for _ in range(2))
    return inputs, targets


def run_step(config: gpt.GPTConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients of two microbatches in float64."""
    stage = gpt.build_stage(config, 0, 1, dtype=torch.float64)
    total = run_sequential([stage], *draw_tokens(2), loss=gpt.loss)
    return total, copy_gradients([stage])[0]


def masked_attention(q: Tensor, k: Tensor, v: Tensor, window: Any, dropout: float) -> Tensor:
    mask = build_window_mask(LENGTH, *(window or (LENGTH, 1)))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)


@pytest.mark.parametrize("window", [(CONFIG.window, CONFIG.stride), (16, 16), (1, 1), (LENGTH, 1)])
def test_windowed_gpt_equals_masked_attention(window: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, window=window[0], stride=window[1])
    total, grads = run_step(config)
    without, _ = run_step(replace(CONFIG, window=0, stride=1))
    assert bool((total == without).item()) == (window == (LENGTH, 1))
    monkeypatch.setattr(gpt, "attention", masked_attention)
    want, want_grads = run_step(config)
    assert torch.allclose(total, want, rtol=1e-6, atol=0)  # the loss is float32
    assert grads.keys() == want_grads.keys()
    for name, grad in grads.items():
        error = float((grad - want_grads[name]).norm())
        assert error <= 1e-6 * float(1e-3 + want_grads[name].norm()), name


def test_shorter_sequence_has_outputs_of_longer_one() -> None:
    stage = gpt.build_stage(CONFIG, 0, 1).eval()
    inputs, _ = draw_tokens(1)
    with torch.no_grad():
        full = stage(inputs[0])
        for length in (1, 63, 100):
            part = stage(inputs[0][:, :length])
            assert torch.allclose(part, full[:, :length], atol=1e-6)


def test_windows_do_not_change_measured_sizes() -> None:
    (inputs, targets), results = draw_tokens(1), []
    for config in (CONFIG, replace(CONFIG, window=0, stride=1)):
        stages = [gpt.build_stage(config, s, 2) for s in range(2)]
        sizes = measure_sizes(stages, inputs[0], targets[0], loss=gpt.loss, boundary=BOUNDARY)
        results.append((sizes.saved, sizes.deferred_wgrad, sizes.saved_and_deferred))
    assert results[0] == results[1]


def test_train_command_with_windows_equals_one_rank(tmp_path: Path) -> None:
    """Two tensor-parallel ranks have the losses of one rank, also in evaluations.

    Without windows the losses differ.
    """
    text, path = tmp_path / "text.txt", tmp_path / "config.toml"
    text.write_text("to be or not to be " * 300)
    config = TRAINED.replace("context = 16", "context = 80\nwindow = [8, 0, 66, 80]\nstride = 4")
    fewer_steps = config.format(text=text).replace("steps = 6", "steps = 2")
    path.write_text(fewer_steps + "evaluate_every = 2\nevaluate_batches = 1\n")
    settings = ("data.validation=0.2", "pipeline.stages_per_rank=1")
    two = train(str(path), tmp_path / "two", *settings, "pipeline.ranks=1", "pipeline.tp=2")
    one = train_in_this_process(str(path), tmp_path / "one", *settings)
    without = train_in_this_process(
        str(path), tmp_path / "without", *settings, "model.window=0", "model.stride=1"
    )
    assert two == pytest.approx(one, rel=1e-5)
    assert without != pytest.approx(one, rel=1e-5)
    evaluations = [(tmp_path / name / "evaluation.csv").read_text() for name in ("two", "one")]
    evaluation_losses = [float(lines.splitlines()[1].split(",")[1]) for lines in evaluations]
    assert evaluation_losses[0] == pytest.approx(evaluation_losses[1], rel=1e-5)
