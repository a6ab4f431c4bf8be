"""Tests of the messages about incomplete checkpoints when the newest one is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from schedir import PipelineShape, compile
from schedir.checkpoints import load, save
from schedir.errors import CheckpointError
from schedir.runtime import Boundary, InProcessExecutor
from schedir.schedules import one_f_one_b


def make_two_ranks() -> InProcessExecutor:
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    program = compile(one_f_one_b, PipelineShape(2, 2))
    return InProcessExecutor(
        program, stages, loss=nn.functional.mse_loss, boundary=Boundary((2, 4))
    )


def test_incomplete_checkpoint_is_skipped_with_warning(tmp_path: Path) -> None:
    """If all checkpoints of the folder are incomplete, `load` raises an error."""
    ranks = make_two_ranks()
    assert load(ranks, tmp_path) is None
    for step in (1, 2):
        save(ranks, tmp_path, step=step, keep=2)
    (tmp_path / "step-00000002" / "manifest.jsonl").write_text("{}\n")
    with pytest.warns(UserWarning, match=r"^skipped: step-00000002 is not complete: its manifest"):
        state = load(make_two_ranks(), tmp_path)
    assert state is not None and state["step"] == 1
    for file in (tmp_path / "step-00000001").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as error:
        load(make_two_ranks(), tmp_path)
    assert str(tmp_path) in error.value.fact and error.value.hint
    assert "is complete: step-00000002 is not" in error.value.fact
    assert "; step-00000001 is not complete: " in error.value.fact
