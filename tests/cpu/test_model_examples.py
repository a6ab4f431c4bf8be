"""Tests of the examples of a BERT and an encoder-decoder on processes, and of their data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples import bert
from tests.cpu.train_command import ROOT, launched, script


@pytest.mark.parametrize("name", ["bert", "encoder_decoder"])
def test_four_processes_print_what_one_does(name: str, tmp_path: Path) -> None:
    code, alone, err = launched(["-m", f"examples.{name}"], tmp_path / "alone")
    assert code == 0, err
    assert alone == script(f"examples.{name}", 4, tmp_path / "four")
    losses = [float(line.split()[-1]) for line in alone.splitlines()]
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.5


def test_bert_is_given_pairs_of_windows_of_the_text() -> None:
    config, text = bert.BertConfig(), (ROOT / "LICENSE").read_bytes()
    batches = [bert.batch(config, text, step) for step in range(3)]
    assert torch.equal(batches[1][0], bert.batch(config, text, 1)[0])
    tokens = torch.cat([inputs.flatten(0, 1) for inputs, _, _ in batches])
    targets = torch.cat([found.flatten(0, 1) for _, found, _ in batches])
    there = torch.cat([named["mask"] for _, _, keywords in batches for named in keywords])
    whole = torch.where(targets[:, 1:] >= 0, targets[:, 1:], tokens[:, 1:])
    follows = targets[:, 0] == 0
    assert 12 < follows.sum() < 36 and there.sum(1).unique().numel() > 1
    assert (tokens[:, 0] == config.cls).all() and (whole == config.sep).sum(1).eq(2).all()
    for row in range(len(tokens)):
        words = whole[row][there[row, 1:]]
        first = int((words == config.sep).nonzero()[0])
        one, other = bytes(words[:first].tolist()), bytes(words[first + 1 : -1].tolist())
        assert one in text and other in text and (one + other in text or not follows[row])
    share = (targets[:, 1:] >= 0).sum() / (whole < config.text).sum()
    assert 0.12 < share < 0.18
