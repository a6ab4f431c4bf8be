"""Tests of token streams and batches."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schedir.data.token_files import load_python_sources, load_tokens
from schedir.errors import ModelError, UsageError
from schedir.models.gpt_config import GPTConfig
from schedir.training.batches.samples import Batches
from schedir.training.batches.text_batches import Corpus
from schedir.training.config.run_config import Config, DataConfig
from tests.cpu.gloo_processes import run


@given(
    length=st.integers(2, 50),
    context=st.integers(1, 20),
    count=st.integers(1, 9),
    seed=st.integers(0, 2**40),
    first=st.integers(0, 2**40),
)
def test_samples_depend_only_on_seed_and_number(
    length: int, context: int, count: int, seed: int, first: int
) -> None:
    context = min(context, length - 1)
    tokens = np.arange(length, dtype=np.uint16)
    inputs, targets = Batches(tokens, context, 1, seed).read_batch(first, count)
    assert inputs.shape == targets.shape == (count, context)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs + 1, targets)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(context))
    last, _ = Batches(tokens, context, 7, seed).read_batch(first + count - 1, 1)
    assert torch.equal(inputs[-1:], last)


@given(
    length=st.integers(3, 60),
    context=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    seed=st.integers(0, 9),
)
def test_each_epoch_has_every_window_once(
    length: int, context: int, sizes: list[int], seed: int
) -> None:
    """The batch size may change, for example if a run resumes with more replicas."""
    context = min(context, length - 1)
    batches = Batches(np.arange(length, dtype=np.uint8), context, 1, seed)
    num_read, parts = 0, []
    for size in sizes:
        batches_of_size = Batches(batches.tokens, context, size, seed)
        assert batches_of_size.read_cursor(batches.make_cursor(num_read)) == num_read
        parts.append(batches_of_size.read_batch(num_read, size)[0][:, 0])
        num_read += size
    starts = torch.cat(parts)
    assert torch.equal(starts, batches.read_batch(0, num_read)[0][:, 0])
    windows = list(range(0, length - context, context))
    assert len(batches) == len(windows)
    for epoch in starts.split(len(windows)):
        assert len({*epoch.tolist()}) == len(epoch)
        assert len(epoch) < len(windows) or sorted(epoch.tolist()) == windows


def test_epochs_and_seeds_differ() -> None:
    tokens = np.arange(250, dtype=np.uint8)
    first = Batches(tokens, 4, 8, seed=1).read_batch(0, 62)[0]
    assert not torch.equal(first, Batches(tokens, 4, 8, seed=1).read_batch(62, 62)[0])
    assert not torch.equal(first, Batches(tokens, 4, 8, seed=2).read_batch(0, 62)[0])
    in_order = Batches(tokens, 4, 8, None).read_batch(62, 62)[0]
    assert torch.equal(in_order, torch.arange(62 * 4).reshape(62, 4))


def test_cursor_of_other_samples_is_refused() -> None:
    tokens = np.arange(250, dtype=np.uint8)
    cursor = Batches(tokens, 4, 8, seed=1).make_cursor(24)
    for other, field in (
        (Batches(tokens, 4, 8, seed=2), "seed"),
        (Batches(tokens, 5, 8, seed=1), "source"),
        (Batches(tokens[:-1], 4, 8, seed=1), "source"),
    ):
        with pytest.raises(ModelError) as caught:
            other.read_cursor(cursor)
        assert caught.value.fields == (field,)
    with pytest.raises(ModelError, match="invalid number of samples: 'many'"):
        Batches(tokens, 4, 8, seed=1).read_cursor(cursor | {"samples": "many"})


def test_token_file_is_memory_mapped(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    np.array([1, 50256, 3, 4], "<u2").tofile(path)
    tokens = load_tokens(path)
    assert isinstance(tokens, np.memmap) and tokens.tolist() == [1, 50256, 3, 4]
    assert Batches(tokens, 3, 1, vocab=50257).read_batch(0, 1)[0].tolist() == [[1, 50256, 3]]
    with pytest.raises(UsageError) as error:
        Batches(tokens, 3, 2).read_batch(0, 2)
    assert "token 50256 at position 1 " in error.value.fact and str(path) in error.value.fact


def test_text_files_are_concatenated(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"two")
    (tmp_path / "a.txt").write_bytes(b"one")
    (tmp_path / "c[1].md").write_bytes(b"\xff")
    (tmp_path / "empty.md").touch()
    assert bytes(load_tokens(tmp_path / "a.txt")) == b"one"
    assert bytes(load_tokens(str(tmp_path / "*.txt"))) == b"onetwo"
    assert bytes(load_tokens([tmp_path / "c[1].md", str(tmp_path / "**/b.*")])) == b"\xfftwo"
    assert len(load_tokens(tmp_path / "empty.md")) == 0


def test_invalid_sources_are_refused(tmp_path: Path) -> None:
    odd, text = tmp_path / "odd.bin", tmp_path / "a.txt"
    odd.write_bytes(b"123")
    text.write_bytes(b"1")
    sources: list[tuple[list[str | Path], str]] = [
        ([odd], "odd.bin"), ([odd, text], "a.txt"), ([tmp_path / "no"], "no"), (["*.no"], "*.no"),
        ([], "list of files is empty"), ([tmp_path], str(tmp_path)),
    ]  # fmt: skip
    for source, names in sources:
        with pytest.raises(UsageError) as caught:
            load_tokens(source)
        assert names in caught.value.fact


def test_arguments_out_of_range_are_refused() -> None:
    tokens = np.arange(4, dtype=np.uint8)
    for context, batch, seed, names in [
        (4, 1, 0, "context + 1 = 5"), (0, 1, 0, "context"), (1, 0, 0, "batch"), (1, 1, -1, "seed"),
    ]:  # fmt: skip
        with pytest.raises(UsageError) as caught:
            Batches(tokens, context, batch, seed)
        assert names in caught.value.fact
    for first, count in ((-1, 1), (0, 0)):
        with pytest.raises(UsageError):
            Batches(tokens, 1, 1).read_batch(first, count)


@pytest.fixture
def source_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    library = tmp_path / "lib"
    for name in ("b.py", "a/c.py", "site-packages/x.py", "a/notes.txt"):
        path = library / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return library


def test_python_sources_are_cached(source_folder: Path) -> None:
    assert bytes(load_python_sources(source_folder)) == b"a/c.pyb.py"
    (source_folder / "b.py").write_text("changed")
    assert bytes(load_python_sources(source_folder)) == b"a/c.pyb.py"
    (_,) = (source_folder.parent / "cache/schedir").iterdir()  # no temporary file remains


def test_unwritable_cache_is_refused(source_folder: Path) -> None:
    (source_folder.parent / "cache").write_text("a file, no folder")
    with pytest.raises(UsageError):
        load_python_sources(source_folder)


def read_batch(rank: int, cache: str) -> torch.Tensor:
    os.environ["XDG_CACHE_HOME"] = cache
    return Batches(load_tokens(), 64, 4, seed=7).read_batch(3, 4)[0]


def test_ranks_that_build_cache_together_read_same_batch(tmp_path: Path) -> None:
    first, second = run(read_batch, 2, str(tmp_path))
    assert torch.equal(first, second)


def make_config(source: Path, held_out: object) -> Config:
    data = DataConfig(source=str(source), validation=held_out)  # type: ignore[arg-type]
    return Config(GPTConfig(context=4), data=data)


def test_held_out_tokens_are_not_in_training_batches(tmp_path: Path) -> None:
    text, other = tmp_path / "text", tmp_path / "other"
    text.write_bytes(bytes(range(100)))
    other.write_bytes(bytes(range(200, 230)))
    assert Corpus(make_config(text, None)).held_out_batches is None
    samples = Corpus(make_config(text, 0.2)).batches
    held_out = Corpus(make_config(text, 0.2)).held_out_batches
    assert held_out is not None
    assert int(samples.read_batch(0, 3 * len(samples))[1].max()) < 80
    inputs, _ = held_out.read_batch(0, len(held_out))
    assert torch.equal(inputs, torch.arange(80, 96).reshape(4, 4))
    held_out = Corpus(make_config(text, str(other))).held_out_batches
    assert held_out is not None and held_out.read_batch(0, 1)[0].tolist() == [[200, 201, 202, 203]]
    description = Corpus(make_config(text, str(other))).batches.description
    assert description == Corpus(make_config(text, None)).batches.description
    with pytest.raises(UsageError, match="for evaluation has 1 tokens"):
        _ = Corpus(make_config(text, 0.01)).held_out_batches


def test_note_on_step_larger_than_data() -> None:
    tokens = np.arange(41, dtype=np.uint8)  # 10 windows of 4 targets
    assert not Batches(tokens, 4, 10, 0).describe_repeats()
    note = Batches(tokens, 4, 11, 0, source="a.txt").describe_repeats()
    assert note.startswith("a step reads 11 windows, but a.txt has 10: ")
