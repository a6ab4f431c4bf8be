"""Tests of training data: tokenizers, documents, held-out data, and a run on them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from schedir.data.corpus import get_tokenizer
from schedir.data.megatron_indexed_dataset import read_indexed_dataset
from schedir.errors import UsageError
from schedir.models import gpt
from schedir.models.gpt_config import GPTConfig
from schedir.training.batches import text_batches
from schedir.training.batches.text_batches import Corpus
from schedir.training.config.run_config import Config, DataConfig
from tests import tokens
from tests.cases import campaign
from tests.cpu.train_command import train, train_in_this_process

SIZES = np.random.default_rng(1).integers(1, 30, 60)
TEXTS = [" ".join(["the", "quick", "brown", "fox"][k % 4] for k in range(n)) for n in SIZES]


@pytest.fixture
def source(tmp_path: Path) -> str:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02}.txt").write_text(text)
    return str(folder / "*.txt")


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokens.train_tokenizer(TEXTS, 300))
    return str(path)


def make_config(source: str, vocab: int = 257, **data: Any) -> Config:
    return Config(GPTConfig(vocab=vocab, context=16), data=DataConfig(source=source, **data))


def test_targets_across_documents_are_ignored(source: str) -> None:
    samples = Corpus(make_config(source, packing="best_fit")).batches
    inputs, targets = samples.read_batch(0, len(samples))
    counted = targets != gpt.IGNORE_INDEX
    assert gpt.count_tokens(targets) == sum(map(len, TEXTS))  # with the end of each document
    assert not counted.all() and (targets[counted] < 257).all()
    # The end of a document has no target.
    assert not counted[inputs == 256].any()
    assert int((targets == 256).sum()) == len(TEXTS)
    _, targets = Corpus(make_config(source)).batches.read_batch(0, 5)
    assert (targets != gpt.IGNORE_INDEX).all()


@pytest.mark.parametrize("share", [0.2, "other"])
def test_held_out_data_are_whole_documents(
    source: str, tokenizer: str, tmp_path: Path, share: float | str
) -> None:
    if isinstance(share, str):
        share = str(shutil.copytree(Path(source).parent, tmp_path / share) / "*.txt")
    config = make_config(source, 300, tokenizer=tokenizer, packing="best_fit", validation=share)
    held_out = Corpus(config).held_out_batches
    assert held_out is not None
    targets = [x.read_batch(0, len(x))[1] for x in (Corpus(config).batches, held_out)]
    ends = [int((target == 0).sum()) for target in targets]
    assert sum(ends) == (60 if isinstance(share, float) else 120) and min(ends) > 5
    assert Corpus(config).facts["the held-out data"] == held_out.description


def test_conflicting_data_options_are_refused(source: str, tokenizer: str, tmp_path: Path) -> None:
    np.zeros(99, "<u2").tofile(tmp_path / "a.bin")
    of_tokens = {"source": str(tmp_path / "a.bin")}
    for data, fact, field in (
        ({"tokenizer": "bep"}, "cannot read tokenizer bep", "tokenizer"),
        ({"validation": source}, "is both in data.validation and in data.source", "validation"),
        (of_tokens | {"packing": "best_fit"}, "needs the ends of documents", "packing"),
        (of_tokens | {"tokenizer": tokenizer}, "so tokenizer does not apply", "tokenizer"),
        ({"packing": "cut"}, "'cut' is not known", "packing"),
        ({"end_of_document": "<s>"}, 'tokenizer = "bytes" has its own', "end_of_document"),
    ):
        with pytest.raises(UsageError) as caught:
            _ = Corpus(make_config(**{"source": source} | data, vocab=300)).batches
        assert fact in caught.value.fact and caught.value.fields[0] == field


def test_run_on_packed_documents_has_losses_of_one_process(
    config: str, source: str, tokenizer: str, tmp_path: Path
) -> None:
    """The microbatches have different numbers of targets."""
    sets = [f'data.source="{source}"', f'data.tokenizer="{tokenizer}"', "model.vocab=300",
            "data.packing=best_fit", "data.validation=0.1", "pipeline.tp=1",
            "train.steps=3"]  # fmt: skip
    expected = train_in_this_process(config, tmp_path / "one", *sets)
    assert train(config, tmp_path / "many", *sets) == pytest.approx(expected, rel=1e-5)


def test_run_tokenizes_its_data_once(
    config: str, source: str, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out data for evaluations are included."""
    names: list[str] = []

    def record_and_get_tokenizer(name: str, *arguments: object) -> object:
        names.append(name)
        return get_tokenizer(name, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(text_batches, "get_tokenizer", record_and_get_tokenizer)
    sets = [f'data.source="{source}"', f'data.tokenizer="{tokenizer}"', "model.vocab=300",
            "data.validation=0.1", "train.evaluate_every=2", "train.steps=2"]  # fmt: skip
    train_in_this_process(config, tmp_path / "out", *sets)
    assert names == [tokenizer]


# The files that MEGATRON writes.
MEGATRON_FILES = {
    "m.idx": "4d4d4944494458000001000000000000000403000000000000000300000000000000030000000100"
    "00000300000000000000000000000c00000000000000100000000000000000000000000000000100"
    "0000000000000300000000000000",
    "m.bin": "070000000800000050c4000001000000020000007011010004000000",
}


def check_megatron_dataset(path: Path) -> None:
    read_tokens, ends = read_indexed_dataset(path)
    assert read_tokens.tolist() == [7, 8, 50256, 1, 2, 70000, 4]
    assert ends is not None and ends.tolist() == [3, 7]
    samples = Corpus(make_config(str(path), 70001, packing="best_fit")).batches
    assert gpt.count_tokens(samples.read_batch(0, 1)[1]) == 5
    assert torch.equal(samples.read_batch(0, 1)[0][0, :4], torch.tensor([1, 2, 70000, 4]))


def test_dataset_of_megatron_is_read(tmp_path: Path) -> None:
    """A document may have several sequences."""
    for name, content in MEGATRON_FILES.items():
        (tmp_path / name).write_bytes(bytes.fromhex(content))
    check_megatron_dataset(tmp_path / "m.bin")


MEGATRON = """
import sys
import numpy as np, torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
folder = sys.argv[1]
builder = IndexedDatasetBuilder(folder + "/m.bin", dtype=np.int32)
builder.add_item(torch.tensor([7, 8, 50256]))
builder.end_document()
builder.add_document(torch.tensor([1, 2, 70000, 4]), [1, 3])  # of two sequences
builder.finalize(folder + "/m.idx")
dataset = IndexedDataset(folder + "/ours")
print([dataset[k].tolist() for k in range(len(dataset))])
"""


@campaign
def test_megatron_and_schedir_read_each_others_datasets(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", exc_type=ImportError)
    np.array([5, 6, 7, 8, 9], "<u2").tofile(tmp_path / "ours.bin")
    tokens.write_index(tmp_path / "ours.idx", np.dtype("<u2"), [2, 3])
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEGATRON, str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[[5, 6], [7, 8, 9]]"
    for name, content in MEGATRON_FILES.items():
        assert (tmp_path / name).read_bytes().hex() == content
    check_megatron_dataset(tmp_path / "m.bin")
