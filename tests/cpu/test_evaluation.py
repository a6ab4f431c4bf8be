"""Tests that evaluations of a training run print and save losses, without side effects."""

from __future__ import annotations

import csv
import math
import shutil
from pathlib import Path

import pytest
import torch

from schedir.errors import UsageError
from schedir.models import gpt
from schedir.training.batches.text_batches import Corpus
from schedir.training.config.config_file import read_config
from schedir.training.train import run
from tests.cpu.train_command import train, train_in_this_process

DROPOUT = ["model.dropout=0.2", "pipeline.tp=1"]


def read_evaluations(folder: Path) -> list[tuple[int, float, float, int]]:
    """Return step, loss, perplexity and tokens of each line of evaluation.csv."""
    with (folder / "evaluation.csv").open() as file:
        rows = [(int(k), float(x), float(y), int(n)) for k, x, y, n in [*csv.reader(file)][1:]]
    return rows


def test_held_out_loss_equals_plain_model(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All windows count and dropout is off, even if the last batch is not full."""
    text = tmp_path / "held-out.txt"
    text.write_text("never trained on " * 13)
    sets = [*DROPOUT, f'data.validation="{text}"', "train.lr=0", "train.min_lr=0"]
    train_in_this_process(config, tmp_path / "out", *sets, "train.evaluate_every=4")
    settings = read_config(config, [*sets, "pipeline.ranks=1", "pipeline.stages_per_rank=1"])
    batches = Corpus(settings).held_out_batches
    assert batches is not None and len(batches) % (3 * 2)
    inputs, targets = batches.read_batch(0, len(batches))
    assert isinstance(settings.model, gpt.GPTConfig)
    model = gpt.build_stage(settings.model, 0, 1).eval()
    with torch.no_grad():
        mean = float(gpt.loss(model(inputs), targets)) / targets.numel()
    rows = read_evaluations(tmp_path / "out")
    assert [step for step, *_ in rows] == [4, 6]  # also after the last step
    for _, loss, perplexity, tokens in rows:
        assert tokens == targets.numel() and loss == pytest.approx(mean, rel=1e-5)
        assert perplexity == math.exp(loss)
    line = f"step 6  held-out loss {rows[-1][1]:.4f}  perplexity {rows[-1][2]:,.1f}\n"
    output = capsys.readouterr().out
    assert line in output and "wrote loss.csv, evaluation.csv" in output


def test_evaluations_do_not_change_training_losses(config: str, tmp_path: Path) -> None:
    """Each stage has two replicas. With dropout, an extra random number would change the losses."""
    sets = [*DROPOUT, "train.steps=4", "data.validation=0.1", "pipeline.schedule=dualpipe",
            "pipeline.microbatches=4"]  # fmt: skip
    plain = train(config, tmp_path / "plain", *sets)
    assert train(config, tmp_path / "out", *sets, "train.evaluate_every=2") == plain
    assert not (tmp_path / "plain" / "evaluation.csv").exists()
    (first_step, first_loss, *_), (last_step, last_loss, *_) = read_evaluations(tmp_path / "out")
    assert (first_step, last_step) == (2, 4) and last_loss < first_loss


def test_evaluation_without_validation_data_is_refused(config: str) -> None:
    with pytest.raises(UsageError, match=r"needs data\.validation, which is not") as error:
        run(config, ["train.evaluate_every=2"])
    assert error.value.fields == ("evaluate_every", "validation")


def test_resumed_run_keeps_earlier_evaluations(config: str, tmp_path: Path) -> None:
    """The resumed run drops evaluations that came after its checkpoint."""
    evaluations = ["train.evaluate_every=1", "train.evaluate_batches=1"]
    sets = [*DROPOUT, "data.validation=0.1", *evaluations]
    saved = [*sets, f'train.checkpoint_dir="{tmp_path / "saved"}"', "train.checkpoint_every=2"]
    train_in_this_process(config, tmp_path / "out", *saved, "train.steps=3")
    shutil.rmtree(tmp_path / "saved" / "step-00000003")
    (tmp_path / "out" / "summary.json").unlink()
    train_in_this_process(config, tmp_path / "out", *saved, "train.steps=3")
    train_in_this_process(config, tmp_path / "plain", *sets, "train.steps=3")
    assert read_evaluations(tmp_path / "out") == read_evaluations(tmp_path / "plain")
