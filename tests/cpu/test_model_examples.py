"""Tests of the examples `bert` and `encoder_decoder` on four processes, and of their data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples import bert
from tests.cases import cases
from tests.cpu.train_command import ROOT, run_launched, run_script


@pytest.mark.parametrize("name", cases(["encoder_decoder"], ["bert"]))
def test_example_on_four_processes_prints_same_losses(name: str, tmp_path: Path) -> None:
    code, single_output, err = run_launched(["-m", f"examples.{name}"], tmp_path / "alone")
    assert code == 0, err
    assert single_output == run_script(f"examples.{name}", 4, tmp_path / "four")
    losses = [float(line.split()[-1]) for line in single_output.splitlines()]
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.5


def test_bert_batches_are_pairs_of_text_windows() -> None:
    config, text = bert.BertConfig(), (ROOT / "LICENSE").read_bytes()
    batches = [bert.batch(config, text, step) for step in range(3)]
    assert torch.equal(batches[1][0], bert.batch(config, text, 1)[0])
    tokens = torch.cat([inputs.flatten(0, 1) for inputs, _, _ in batches])
    targets = torch.cat([sample_targets.flatten(0, 1) for _, sample_targets, _ in batches])
    masks = torch.cat([keyword["mask"] for _, _, keywords in batches for keyword in keywords])
    original_tokens = torch.where(targets[:, 1:] >= 0, targets[:, 1:], tokens[:, 1:])
    is_next = targets[:, 0] == 0
    assert 12 < is_next.sum() < 36 and masks.sum(1).unique().numel() > 1
    assert (tokens[:, 0] == config.cls).all() and (original_tokens == config.sep).sum(1).eq(2).all()
    for row in range(len(tokens)):
        words = original_tokens[row][masks[row, 1:]]
        first = int((words == config.sep).nonzero()[0])
        first_window, second_window = (
            bytes(words[:first].tolist()),
            bytes(words[first + 1 : -1].tolist()),
        )
        assert (
            first_window in text
            and second_window in text
            and (first_window + second_window in text or not is_next[row])
        )
    share = (targets[:, 1:] >= 0).sum() / (original_tokens < config.text).sum()
    assert 0.12 < share < 0.18
