"""`schedir train` of each kind of model: processes train what one does, and go on with it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from schedir.__main__ import main
from schedir.errors import ConfigError
from schedir.training.config_file import read
from schedir.training.corpus import Corpus
from schedir.training.kinds import KINDS, kind_of
from schedir.training.models import MODELS
from tests.cpu.training import CONFIG, alone, losses, train

SIZES = {
    "llama": ["model.layers=4", "model.heads=4", "model.kv_heads=2", "model.window=[0, 6, 6, 5]"],
    "bert": ["model.layers=4", "model.vocab=260"],
    "encoder_decoder": ["model.encoder_layers=1", "model.decoder_layers=3"],
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    text, path = tmp_path / "text.txt", tmp_path / "config.toml"
    text.write_text("the quick brown fox jumps over the lazy dog, and over the other one " * 60)
    path.write_text(CONFIG.replace("layers = 4\n", "").format(text=text))
    return str(path)


def evaluated(folder: Path) -> list[tuple[str, ...]]:
    with (folder / "evaluation.csv").open() as file:
        return [tuple(row) for row in csv.reader(file)]


@pytest.mark.parametrize("kind", SIZES)
def test_processes_train_what_one_does(
    config: str, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [f"model.kind={kind}", *SIZES[kind], "train.evaluate_every=3", "data.held_out=0.1",
            "train.evaluate_batches=2", "pipeline.tp=1",
            "train.lr=0.001", "train.min_lr=0.001", "train.warmup=0"]  # fmt: skip
    found = train(config, tmp_path / "two", *sets)
    assert found == alone(config, tmp_path / "one", *sets) and len(found) == 6
    assert found[-1] < found[0]
    assert evaluated(tmp_path / "two") == evaluated(tmp_path / "one")
    again = [*sets, f'train.checkpoint="{tmp_path / "saved"}"', "train.every=3"]
    alone(config, tmp_path / "three", *again, "train.steps=3")
    alone(config, tmp_path / "on", *again)
    assert losses(tmp_path / "on")[-3:] == found[-3:]
    export = ["checkpoint", "export", str(tmp_path / "saved"), "--as", "transformers"]
    capsys.readouterr()
    assert main([*export, "--to", str(tmp_path / "out")]) == 2
    assert f"no GPT of schedir train: it is of kind {kind}\n" in capsys.readouterr().err


def test_kinds_are_the_same_in_both_tables() -> None:
    assert KINDS.keys() == MODELS.keys()
    assert {kind_of(kind.config()) for kind in KINDS.values()} == {*KINDS}


@pytest.mark.parametrize(
    ("sets", "field"),
    [
        (["model.kind=rnn"], "rnn"),
        (["model.kind=[1]"], "1"),
        (["model.kind=llama", "model.dropout=0.1"], "dropout"),
        (["model.kv_heads=2"], "it is for kind = llama"),
        (["model.kind=bert", "model.window=8"], "it is for kind = gpt or llama"),
        (["model.kind=llama", "model.heads=4", "model.kv_heads=1"], "keys and values"),
        (["model.kind=bert", "model.vocab=260", "data.documents=packed"], "packed"),
        (
            ["model.kind=encoder_decoder", "model.context=18", "pipeline.sequence=true"],
            "sequence of 9 tokens",
        ),
        (["model.kind=bert", "model.vocab=4"], "vocab"),
        (["model.kind=bert", "model.context=4"], "context"),
        (["model.kind=encoder_decoder", "model.context=1"], "context"),
        (["model.kind=encoder_decoder", "model.layers=4"], "layers"),
    ],
)
def test_what_a_kind_has_not_is_refused(config: str, sets: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(config, sets)
    assert field in f"{error.value.fact} {error.value.hint} {error.value.where}"


def test_bert_is_given_pairs_of_its_own_windows(config: str) -> None:
    found: Any = read(config, ["model.kind=bert", "model.vocab=260"])
    batches = Corpus(found).batches
    (tokens, targets, named), marks = batches.samples(0, 40), found.model
    windows, _ = batches.batch(0, 40)
    assert torch.equal(batches.samples(7, 3).inputs, tokens[7:10])  # whatever is drawn with it
    whole = torch.where(targets[:, 1:] >= 0, targets[:, 1:], tokens[:, 1:])
    follows = targets[:, 0] == 0
    assert 8 < follows.sum() < 32 and named["mask"].sum(1).unique().numel() > 1
    assert (tokens[:, 0] == marks.cls).all() and (whole == marks.sep).sum(1).eq(2).all()
    for row in range(40):
        there = whole[row][named["mask"][row, 1:]]
        text = there[there != marks.sep]
        first = int((there == marks.sep).nonzero()[0])
        assert torch.equal(text[:first], windows[row, :first])
        assert torch.equal(text, windows[row, : len(text)]) or not follows[row]
    share = (targets[:, 1:] >= 0).sum() / ((whole < marks.text).sum())
    assert 0.12 < share < 0.18
