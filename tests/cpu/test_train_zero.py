"""Tests that training with ZeRO through the command line has the losses of plain replicas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples import zero as example
from tests.cases import campaign, cases, each_value
from tests.cpu.test_nonfinite_training import (
    BACKWARD,
    FORWARD,
    Poison,
    poison,
    rows,
    run_until_stop,
)
from tests.cpu.train_command import ROOT, run_forked, run_launched

__all__ = ["poison", "run_until_stop"]
FSDP = ["pipeline.ranks=1", "pipeline.stages_per_rank=4", "pipeline.tp=1", "pipeline.dp=2",
        "pipeline.schedule=looped_bfs", "train.steps=3", "output.record=false"]  # fmt: skip


def run_training(config: str, folder: Path, *sets: str) -> bytes:
    """Return the file with the loss, learning rate and norm of each step."""
    code, out, err = run_forked(config, folder, *sets)
    assert (code, err) == (0, "")
    zero_lines = [line for line in out.splitlines() if line.startswith("zero ")]
    zero = next((s[-1] for s in sets if s.startswith("pipeline.zero=")), "0")
    assert [line[:7] for line in zero_lines] == ([f"zero {zero}:"] if zero != "0" else [])
    return (folder / "loss.csv").read_bytes()


@pytest.mark.parametrize(
    ("transport", "zero", "settings"),
    cases(
        [("shared_memory", 3, ["train.precision=bfloat16", "model.dropout=0.1"])],
        [("gloo", 1, ["train.clip_grad_norm=0", "pipeline.frozen_stages=1", "model.tied=false"])],
    ),
)
def test_zero_levels_have_losses_of_plain_replicas(
    config: str, tmp_path: Path, transport: str, zero: int, settings: list[str]
) -> None:
    """Losses are equal bit for bit, with a tied embedding, clipping and weight decay."""
    sets = [*FSDP, f"train.transport={transport}", *settings]
    plain = run_training(config, tmp_path / "plain", *sets)
    assert plain.count(b"\n") == 4
    assert run_training(config, tmp_path / "zero", *sets, f"pipeline.zero={zero}") == plain


@pytest.mark.parametrize(
    ("what", "op", "zero"), each_value([(FORWARD, "F"), (BACKWARD, "B")], [1, 2, 3])
)
def test_nonfinite_run_reports_origin_instruction(
    tmp_path: Path, poison: Poison, run_until_stop: Any, zero: int, what: str, op: str
) -> None:
    """To find the origin, the step runs again with its gathers and reductions."""
    err = run_until_stop(f"pipeline.zero={zero}", poison(what, 2, 3))
    assert "of step 4 is infinite or NaN; the update was skipped" in err[0]
    assert err[1].split()[3:5] == [op, "2.0"]
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3"]


def test_nonfinite_update_is_skipped_on_all_replicas(
    config: str, tmp_path: Path, poison: Poison
) -> None:
    """Only one replica has an infinite gradient."""
    schedule = poison(BACKWARD, 1, 1, ranks="1", schedule="looped_bfs")
    sets = [*FSDP, "train.on_nonfinite=skip", schedule]
    loss_files = [run_training(config, tmp_path / z, *sets, f"pipeline.zero={z}") for z in "03"]
    assert loss_files[0] == loss_files[1]
    assert [row["skipped"] for row in rows(tmp_path / "3")] == ["0", "1", "0"]


def test_zero_and_recompute_together_train_within_memory_limit(tmp_path: Path) -> None:
    sets = ["train.steps=2", example.ZERO]
    code, _, err = run_forked(str(example.CONFIG), tmp_path / "refused", *sets)
    assert code == 2 and err.count("MemoryLimitError: looped_bfs: rank 0 needs") == 1
    code, out, err = run_forked(str(example.CONFIG), tmp_path / "out", *sets, example.RECOMPUTE)
    assert code == 0, err
    assert "recomputed, to use at most 26MB: " in out
    assert_memory_as_predicted(tmp_path / "out")


@campaign
def test_zero_example_trains_within_memory_limit(tmp_path: Path) -> None:
    """Only ZeRO together with recomputation trains within the limit."""
    command = [str(ROOT / "examples" / "zero.py"), str(tmp_path / "out")]
    code, out, err = run_launched(command, tmp_path / "out")
    assert code == 0, err
    assert err.count("MemoryLimitError: looped_bfs: rank 0 needs") == 3
    assert "sharded" in err and "recomputed, to use at most 26MB: " in out
    assert_memory_as_predicted(tmp_path / "out")
    losses = [float(row["loss"]) for row in rows(tmp_path / "out")]
    assert len(losses) == 4 and losses[-1] < losses[0]


def assert_memory_as_predicted(folder: Path) -> None:
    """Counted memory may be lower by one activation, which an instruction hands over."""
    memory = json.loads((folder / "summary.json").read_text())["memory"]
    (predicted,), (counted,) = memory["predicted"], memory["counted"]
    assert 0 <= predicted - counted <= 4 * 2 * 64 * 128 and predicted <= 26e6
