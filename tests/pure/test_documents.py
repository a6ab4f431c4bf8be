"""Tests of documents from indexed tokens of Megatron-LM, and from text files as bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir.data.corpus import read_documents, split_documents
from schedir.data.megatron_indexed_dataset import Documents
from schedir.data.megatron_indexed_dataset import read_indexed_dataset as read_indexed
from schedir.data.tokenizer import Bytes
from schedir.errors import UsageError
from tests.tokens import write_index

# Indexed tokens


@pytest.mark.parametrize("kind", ["<u2", "<i4", "u1"])
def test_indexed_tokens_are_read_back(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.bin"
    np.arange(9).astype(kind).tofile(path)
    write_index(path.with_suffix(".idx"), np.dtype(kind), [4, 0, 5])
    tokens, ends = read_indexed(path)
    assert tokens.tolist() == [*range(9)] and ends is not None and ends.tolist() == [4, 9]
    assert read_documents(str(path), Bytes(), 256).ends is not None


def replace_bytes(offset: int, value: bytes) -> object:
    return lambda raw: raw[:offset] + value + raw[offset + len(value) :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: b"", "does not begin with MMIDIDX"),
        (lambda raw: raw[:20], "does not begin with MMIDIDX"),
        (replace_bytes(0, b"N"), "does not begin with MMIDIDX"),
        (replace_bytes(9, b"\2"), "has version 2"),
        (replace_bytes(17, b"\6"), "gives the type code 6 for its tokens"),
        (replace_bytes(17, b"\4"), "has gaps or overlaps"),
        (replace_bytes(18, b"\xff" * 8), "is cut off"),
        (lambda raw: raw[:-1], "is cut off"),
        (replace_bytes(34, b"\xff\xff\xff\xff"), "has gaps or overlaps"),
        (replace_bytes(38, b"\6"), "needs 10 tokens of 2 bytes in a.bin"),
        (replace_bytes(58, b"\1"), "document indices that do not increase from 0 to 2"),
        (replace_bytes(66, b"\3"), "document indices that do not increase from 0 to 2"),
    ],
)  # fmt: skip
def test_invalid_index_is_refused(tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "a.bin"
    np.arange(9, dtype="<u2").tofile(path)
    index = path.with_suffix(".idx")
    write_index(index, np.dtype("<u2"), [4, 5])
    index.write_bytes(change(index.read_bytes()))  # type: ignore[operator]
    with pytest.raises(UsageError) as caught:
        read_indexed(path)
    assert str(index) in caught.value.fact and message in caught.value.fact


@given(st.integers(0, 81), st.integers(0, 255), st.integers(0, 82))
def test_changed_index_is_read_or_refused(
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


def test_byte_documents_have_end_tokens(tmp_path: Path) -> None:
    for name, text in (("a.txt", b"ab"), ("b.txt", b""), ("c.txt", b"\xff")):
        (tmp_path / name).write_bytes(text)
    source = str(tmp_path / "*.txt")
    tokens, ends = read_documents(source, Bytes(), 257, with_document_ends=True)
    assert tokens.tolist() == [97, 98, 256, 255, 256] and tokens.dtype == np.uint16
    assert ends is not None and ends.tolist() == [3, 5]
    with pytest.raises(UsageError) as caught:
        read_documents(source, Bytes(), 256, with_document_ends=True)
    assert caught.value.hint == "model.vocab = 257"
    assert read_documents(source, Bytes(), 256).tokens.tolist() == [97, 98, 255]


def test_json_lines_are_refused_with_hint(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n')
    for source in (str(tmp_path / "a.jsonl"), [str(tmp_path / "*.jsonl")]):
        with pytest.raises(UsageError, match="has JSON lines instead of plain text") as caught:
            read_documents(source, Bytes(), 257)
        assert "preprocess_data.py" in caught.value.hint
        assert caught.value.fields == ("source",)


def test_validation_split_keeps_documents_intact() -> None:
    tokens, ends = np.arange(10), np.array([4, 6, 10])
    trained, held_out = split_documents(Documents(tokens, ends), 0.3)
    assert trained.tokens.tolist() == [*range(6)] and trained.ends.tolist() == [4, 6]  # type: ignore[union-attr]
    assert held_out.tokens.tolist() == [6, 7, 8, 9] and held_out.ends.tolist() == [4]  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="leaves no document for training"):
        split_documents(Documents(tokens, ends), 0.7)
