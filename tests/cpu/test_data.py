"""Token streams and batches."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schedir.errors import UsageError
from schedir.training.data import Batches, load, python_sources
from tests.cpu.spawn import run


@given(
    length=st.integers(2, 50),
    context=st.integers(1, 20),
    size=st.integers(1, 5),
    seed=st.integers(0, 2**40),
    step=st.integers(0, 2**40),
)
def test_batches_are_windows_and_a_function_of_seed_and_step(
    length: int, context: int, size: int, seed: int, step: int
) -> None:
    context = min(context, length - 1)
    tokens = np.arange(length, dtype=np.uint16)
    inputs, targets = Batches(tokens, context, size, seed).batch(step)
    assert inputs.shape == targets.shape == (size, context)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs + 1, targets)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(context))
    again, _ = Batches(tokens, context, size, seed).batch(step)
    assert torch.equal(inputs, again)


def test_every_window_is_drawn() -> None:
    inputs, targets = Batches(np.arange(6, dtype=np.uint8), 3, 200).batch(0)
    assert set(inputs[:, 0].tolist()) == {0, 1, 2} and int(targets.max()) == 5


def test_steps_and_seeds_differ() -> None:
    tokens = np.arange(250, dtype=np.uint8)
    first = Batches(tokens, 4, 8, seed=1).batch(0)[0]
    assert not torch.equal(first, Batches(tokens, 4, 8, seed=1).batch(1)[0])
    assert not torch.equal(first, Batches(tokens, 4, 8, seed=2).batch(0)[0])


def test_token_file(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    np.array([1, 50256, 3, 4], "<u2").tofile(path)
    tokens = load(path)
    assert isinstance(tokens, np.memmap) and tokens.tolist() == [1, 50256, 3, 4]
    assert Batches(tokens, 3, 1, vocab=50257).batch(0)[0].tolist() == [[1, 50256, 3]]
    with pytest.raises(UsageError) as error:
        Batches(tokens, 3, 2).batch(0)
    assert "token 50256 at position 1 " in error.value.fact and str(path) in error.value.fact


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"two")
    (tmp_path / "a.txt").write_bytes(b"one")
    (tmp_path / "c[1].md").write_bytes(b"\xff")
    (tmp_path / "empty.md").touch()
    assert bytes(load(tmp_path / "a.txt")) == b"one"
    assert bytes(load(str(tmp_path / "*.txt"))) == b"onetwo"
    assert bytes(load([tmp_path / "c[1].md", str(tmp_path / "**/b.*")])) == b"\xfftwo"
    assert len(load(tmp_path / "empty.md")) == 0


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    odd, text = tmp_path / "odd.bin", tmp_path / "a.txt"
    odd.write_bytes(b"123")
    text.write_bytes(b"1")
    sources: list[tuple[list[str | Path], str]] = [
        ([odd], "odd.bin"),
        ([odd, text], "a.txt"),
        ([tmp_path / "no"], "no"),
        (["*.no"], "*.no"),
        ([], "no files"),
        ([tmp_path], str(tmp_path)),
    ]
    for source, names in sources:
        with pytest.raises(UsageError) as caught:
            load(source)
        assert names in caught.value.fact


def test_numbers_out_of_range_are_refused() -> None:
    tokens = np.arange(4, dtype=np.uint8)
    for context, batch, seed, names in [
        (4, 1, 0, "context + 1 = 5"), (0, 1, 0, "context"), (1, 0, 0, "batch"), (1, 1, -1, "seed"),
    ]:  # fmt: skip
        with pytest.raises(UsageError) as caught:
            Batches(tokens, context, batch, seed)
        assert names in caught.value.fact
    with pytest.raises(UsageError):
        Batches(tokens, 1, 1).batch(-1)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    library = tmp_path / "lib"
    for name in ("b.py", "a/c.py", "site-packages/x.py", "a/notes.txt"):
        path = library / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return library


def test_python_sources_are_joined_once(sources: Path) -> None:
    assert bytes(python_sources(sources)) == b"a/c.pyb.py"
    (sources / "b.py").write_text("changed")
    assert bytes(python_sources(sources)) == b"a/c.pyb.py"
    assert len(list((sources.parent / "cache/schedir").iterdir())) == 1  # nothing left over


def test_a_cache_that_cannot_be_written_is_refused(sources: Path) -> None:
    (sources.parent / "cache").write_text("a file, no folder")
    with pytest.raises(UsageError):
        python_sources(sources)


def draw(rank: int, cache: str) -> torch.Tensor:
    os.environ["XDG_CACHE_HOME"] = cache
    return Batches(load(), 64, 4, seed=7).batch(3)[0]


def test_ranks_that_build_the_cache_at_once_draw_the_same(tmp_path: Path) -> None:
    first, second = run(draw, 2, str(tmp_path))
    assert torch.equal(first, second)
