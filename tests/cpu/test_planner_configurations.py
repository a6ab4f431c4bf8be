"""Tests that `schedir train` runs the configuration of a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedir import planner
from tests.cpu.train_command import train, train_in_this_process


def test_plan_configuration_trains_like_one_process(tmp_path: Path) -> None:
    """Losses equal those of one process with all layers in one stage."""
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    model = planner.TransformerSpec(layers=5, hidden=32, heads=4, vocab=256, sequence=16)
    pipelined = planner.ParallelPlan(
        pp=2, stages_per_rank=2, microbatch_size=2, microbatches=4, schedule="interleaved",
        layers_per_stage=(1, 2, 1, 1), recompute="full",
    )  # fmt: skip
    losses = []
    for name, choice in (
        ("pipelined", pipelined),
        ("one", planner.ParallelPlan(microbatch_size=2, microbatches=4)),
    ):
        file = tmp_path / f"{name}.toml"
        file.write_text(planner.train_config(model, choice, steps=2, warmup=1))
        run = train if choice.gpus > 1 else train_in_this_process
        losses.append(run(str(file), tmp_path / name, f'data.source="{text}"'))
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
