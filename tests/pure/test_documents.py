"""Documents of files: JSON lines, indexed tokens of Megatron-LM, and what is kept of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir.data import documents as module
from schedir.data.cache import Progress, home, made
from schedir.data.corpus import read, split
from schedir.data.documents import digest_of, documents
from schedir.data.indexed import Documents, write_index
from schedir.data.indexed import read as read_indexed
from schedir.data.tokenizer import Bytes
from schedir.errors import ExecutionError, ProgramError, UsageError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "schedir"


def lines(path: Path, *texts: str) -> str:
    path.write_text("".join(json.dumps({"text": text, "id": 3}) + "\n" for text in texts))
    return str(path)


# Lines


def test_documents_are_texts_of_lines_or_files(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines(path, "one", "", "zwölf\nand \0 more")
    path.write_bytes(path.read_bytes() + b'\n \n{"text": "no end of line"}')
    assert list(documents(path)) == [b"one", "zwölf\nand \0 more".encode(), b"no end of line"]
    (tmp_path / "b.txt").write_bytes(b"\xff{\n")
    (tmp_path / "c.txt").touch()
    assert list(documents(tmp_path / "b.txt")) == [b"\xff{\n"]
    assert list(documents(tmp_path / "c.txt")) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"one", "is not JSON"),
        (b'{"text": "one"', "is not JSON"),
        (b'{"text": "o\0ne"}', "is not JSON"),
        (b"\0", "is not JSON"),
        (b"[" * 100_000, "it nests too deep"),
        (b"1" * 5000, "is not JSON"),
        (b'{"txt": "one"}', 'is no object with a "text"'),
        (b'{"text": 1}', 'is no object with a "text"'),
        (b'["text"]', 'is no object with a "text"'),
        (b'{"text": "\xff"}', "is not UTF-8 text: see byte 10"),
        (b'{"text": "a\\ud800"}', "half of a surrogate pair, at character 1"),
        (b'{"text": "' + b"a" * 300_000 + b'"}', "has more than 200,000 bytes"),
    ],
)
def test_a_line_without_a_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, said: str
) -> None:
    monkeypatch.setattr(module, "LONGEST", 200_000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(UsageError) as caught:
        list(documents(path))
    assert caught.value.fact.startswith(f"{path}, line 3 ") and said in caught.value.fact
    assert caught.value.fields == ("source",)


@given(st.binary(max_size=80) | st.text(max_size=40).map(lambda s: f'{{"text": {s}}}'.encode()))
def test_any_line_is_a_document_or_refused(
    tmp_path_factory: pytest.TempPathFactory, line: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(line)
    try:
        assert all(list(documents(path)))
    except UsageError as error:
        assert str(path) in error.fact


def test_a_digest_is_of_contents_and_is_kept(tmp_path: Path, cache: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("ab")
    two.write_text("ab")
    assert digest_of([one]) == digest_of([two]) != digest_of([one, two])
    assert not list(cache.glob("digest-*"))  # they are too young for their times to tell
    old = time.time() - 60
    os.utime(one, (old, old))
    two.write_text("ba")
    assert digest_of([one]) != digest_of([two])


# Indexed tokens


@pytest.mark.parametrize("kind", ["<u2", "<i4", "u1"])
def test_what_is_written_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.bin"
    np.arange(9).astype(kind).tofile(path)
    write_index(path.with_suffix(".idx"), np.dtype(kind), [4, 0, 5])
    tokens, ends = read_indexed(path)
    assert tokens.tolist() == [*range(9)] and ends is not None and ends.tolist() == [4, 9]
    assert read(str(path), Bytes(), 256).ends is not None


def spoil(at: int, value: bytes) -> object:
    return lambda raw: raw[:at] + value + raw[at + len(value) :]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: b"", "does not begin with MMIDIDX"),
        (lambda raw: raw[:20], "does not begin with MMIDIDX"),
        (spoil(0, b"N"), "does not begin with MMIDIDX"),
        (spoil(9, b"\2"), "is of version 2"),
        (spoil(17, b"\6"), "are of type 6"),
        (spoil(17, b"\4"), "do not come one after the other"),
        (spoil(18, b"\xff" * 8), "is cut off"),
        (lambda raw: raw[:-1], "is cut off"),
        (spoil(34, b"\xff\xff\xff\xff"), "do not come one after the other"),
        (spoil(38, b"\6"), "says that a.bin has 10 tokens"),
        (spoil(58, b"\1"), "bounds of documents that do not go from 0 to 2"),
        (spoil(66, b"\3"), "bounds of documents that do not go from 0 to 2"),
    ],
)  # fmt: skip
def test_an_index_that_is_odd_is_refused(tmp_path: Path, change: object, said: str) -> None:
    path = tmp_path / "a.bin"
    np.arange(9, dtype="<u2").tofile(path)
    index = path.with_suffix(".idx")
    write_index(index, np.dtype("<u2"), [4, 5])
    index.write_bytes(change(index.read_bytes()))  # type: ignore[operator]
    with pytest.raises(UsageError) as caught:
        read_indexed(path)
    assert str(index) in caught.value.fact and said in caught.value.fact


@given(st.integers(0, 81), st.integers(0, 255), st.integers(0, 82))
def test_any_change_of_an_index_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, size: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "odd.bin"
    np.arange(9, dtype="<u2").tofile(path)
    index = path.with_suffix(".idx")
    write_index(index, np.dtype("<u2"), [4, 5])
    raw = bytearray(index.read_bytes())
    raw[at] = byte
    index.write_bytes(raw[:size])
    try:
        tokens, ends = read_indexed(path)
    except UsageError as error:
        assert str(index) in error.fact
    else:
        assert ends is not None and (np.diff(ends) > 0).all() and ends[-1] == len(tokens)


# Documents of bytes


def test_documents_of_bytes_have_their_ends(tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", "ab", "c")
    tokens, ends = read(source, Bytes(), 257)
    assert tokens.tolist() == [97, 98, 256, 99, 256] and tokens.dtype == np.uint16
    assert ends is not None and ends.tolist() == [3, 5]
    with pytest.raises(UsageError) as caught:
        read(source, Bytes(), 256)
    assert caught.value.hint == "model.vocab = 257"
    (tmp_path / "a.txt").write_bytes(b"ab")
    both = [str(tmp_path / "a.txt"), source]
    assert read(both, Bytes(), 257).tokens.tolist() == [97, 98, 256, 97, 98, 256, 99, 256]
    assert read(both[:1], Bytes(), 256).tokens.tolist() == [97, 98]
    assert read(both[:1], Bytes(), 257, whole=True).tokens.tolist() == [97, 98, 256]


def test_whole_documents_are_held_out() -> None:
    tokens, ends = np.arange(10), np.array([4, 6, 10])
    trained, held_out = split(Documents(tokens, ends), 0.3)
    assert trained.tokens.tolist() == [*range(6)] and trained.ends.tolist() == [4, 6]  # type: ignore[union-attr]
    assert held_out.tokens.tolist() == [6, 7, 8, 9] and held_out.ends.tolist() == [4]  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="leaves none to train on"):
        split(Documents(tokens, ends), 0.7)


# The cache


def slowly(path: Path, log: Path) -> None:
    def make(folder: Path, progress: Progress) -> None:
        with log.open("a") as out:
            out.write("made\n")
        time.sleep(0.3)
        (folder / "x.bin").write_text("second")
        (folder / "x.idx").write_text("last")

    made(path, make, "making", 1)
    assert path.read_text() == "last" and path.with_suffix(".bin").read_text() == "second"


def test_what_several_want_is_made_once(tmp_path: Path, cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    home()
    some = [context.Process(target=slowly, args=(cache / "x.idx", tmp_path / "log")) for _ in "abc"]
    for process in some:
        process.start()
    for process in some:
        process.join(60)
    assert [process.exitcode for process in some] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "made\n"
    assert sorted(p.name for p in cache.iterdir()) == ["x.bin", "x.idx"]


def test_nobody_waits_for_ever(cache: Path) -> None:
    import fcntl

    home()
    with (cache / "x.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ExecutionError, match="without a sign of life"):
            made(cache / "x.idx", lambda folder, progress: None, "making", 1, patience=0.2)


def test_what_fails_leaves_nothing(cache: Path) -> None:
    def fails(folder: Path, progress: Progress) -> None:
        (folder / "x.bin").write_text("half")
        raise UsageError("line 3 is not JSON")

    home()
    with pytest.raises(ProgramError, match="line 3"):
        made(cache / "x.idx", fails, "making", 1)
    assert not [p for p in cache.iterdir() if p.suffix != ".lock"]

    def works(folder: Path, progress: Progress) -> None:
        (folder / "x.idx").touch()

    assert made(cache / "x.idx", works, "making", 1).exists()
