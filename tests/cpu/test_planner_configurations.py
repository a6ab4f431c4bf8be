"""Tests that `schedir train` runs the configuration of a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedir import planner
from tests.cpu.train_command import alone, train


def test_a_choice_trains_as_it_is_written(tmp_path: Path) -> None:
    """Losses are those of one process with all layers in one stage."""
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    model = planner.TransformerSpec(layers=5, hidden=32, heads=4, vocab=256, sequence=16)
    cut = planner.ParallelPlan(pp=2, stages_per_rank=2, microbatch_size=2, microbatches=4,
                               schedule="interleaved", layers_per_stage=(1, 2, 1, 1),
                         recompute="full")  # fmt: skip
    found = []
    for name, choice in (
        ("cut", cut),
        ("one", planner.ParallelPlan(microbatch_size=2, microbatches=4)),
    ):
        file = tmp_path / f"{name}.toml"
        file.write_text(planner.train_config(model, choice, steps=2, warmup=1))
        run = train if choice.gpus > 1 else alone
        found.append(run(str(file), tmp_path / name, f'data.source="{text}"'))
    assert len(found[0]) == 2
    assert found[0] == pytest.approx(found[1], rel=1e-5)
