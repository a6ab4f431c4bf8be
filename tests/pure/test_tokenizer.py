"""Tests that byte-level BPE decodes what it encodes, and that other tokenizers are refused."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schedir.data import tokenizer as module
from schedir.data.corpus import get_tokenizer, read_documents
from schedir.data.tokenizer import BPE, load_tokenizer
from schedir.errors import UsageError
from tests.tokens import END, decode_tokens, train_tokenizer

TEXT = b"the quick brown fox jumps over the lazy dog; z\xc3\xa4h, it's 42 times\n" * 20
TRAINED = train_tokenizer([TEXT.decode()], 300)


@cache
def load_trained_bpe() -> BPE:
    return BPE(TRAINED, "trained")


@given(st.binary() | st.text().map(str.encode) | st.lists(st.sampled_from(
    [b"the ", b"\n", b" ", b"\xff", END.encode(), b"\xed\xa0\x80", b"\xc3", "é".encode(), b"\0"]
)).map(b"".join))  # fmt: skip
@example(b"")
@example(END.encode())
@example(b" \xc3\xa4\xff\xff ")
def test_encoded_text_round_trips(text: bytes) -> None:
    ids = load_trained_bpe().encode(text)
    assert decode_tokens(TRAINED, ids.tolist()) == text and load_trained_bpe().end_token not in ids
    assert all(0 <= i < load_trained_bpe().vocab_size for i in ids)


def test_frequent_words_are_tokens() -> None:
    ids = load_trained_bpe().encode(b"the quick brown fox")
    assert len(ids) < 8 and load_trained_bpe().vocab_size <= 300


def test_long_text_is_split_without_changing_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    text = TEXT + b"no end of a line " * 30 + "ää".encode() * 80 + b"\n\n  x\xff" * 9
    unsplit = load_trained_bpe().encode(TEXT)
    monkeypatch.setattr(module, "MAX_TEXT_BYTES", 100)
    assert load_trained_bpe().encode(TEXT).tolist() == unsplit.tolist()
    assert decode_tokens(TRAINED, load_trained_bpe().encode(text).tolist()) == text
    assert max(map(len, module._split_long_text(text))) <= 100


def modify(**changes: Any) -> str:
    return json.dumps(json.loads(TRAINED) | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be used"),
        ("{}", "cannot be used"),
        ("[1]", "cannot be used"),
        (modify(pre_tokenizer=None), "must be a byte-level BPE"),
        (modify(pre_tokenizer={"type": "Whitespace"}), "must be a byte-level BPE"),
        (modify(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}), "is WordLevel"),
        (modify(model={"type": "BPE", "vocab": {"a": 0}, "merges": []}), "no token for 255"),
        (modify(model=json.loads(TRAINED)["model"] | {"dropout": 0.5}), "tokens are random"),
        (
            modify(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True,
                                   "trim_offsets": True, "use_regex": True}),
            "a space before",
        ),
    ],
)  # fmt: skip
def test_unsupported_tokenizer_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_tokenizer(str(path), None)
    assert str(path) in caught.value.fact and message in caught.value.fact
    assert caught.value.fields == ("tokenizer",)


def test_tokenizer_is_loaded_from_file(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    content = json.loads(TRAINED)
    # Settings of the file that truncate or pad documents have no effect.
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst",
                          "stride": 0}  # fmt: skip
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(path), None)
    assert len(tokenizer.encode(TEXT)) > 2 and tokenizer.end_token == 0
    with pytest.raises(UsageError, match=r"no token <s> for the end of a document"):
        load_tokenizer(str(path), "<s>")
    with pytest.raises(UsageError, match="cannot read"):
        load_tokenizer(str(tmp_path / "none.json"), None)
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_tokenizer(str(path), None)


def test_missing_library_has_install_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(TRAINED)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError) as caught:
        get_tokenizer(str(path), 300)
    assert caught.value.hint == "pip install 'schedir[tokenizers]'"


def test_each_file_ends_with_end_token(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(TRAINED)
    with pytest.raises(UsageError) as caught:
        get_tokenizer(str(path), 270)
    assert caught.value.hint == f"model.vocab = {load_trained_bpe().vocab_size}"
    tokenizer = get_tokenizer(str(path), 300)
    for name, text in (("a.txt", TEXT), ("b.txt", b""), ("c.txt", b"the fox")):
        (tmp_path / name).write_bytes(text)
    tokens, document_ends = read_documents(str(tmp_path / "*.txt"), tokenizer, 300)
    assert tokens.dtype == np.uint16 and document_ends is not None and len(document_ends) == 2
    assert decode_tokens(TRAINED, tokens[: document_ends[0]].tolist()) == TEXT
    assert decode_tokens(TRAINED, tokens[document_ends[0] :].tolist()) == b"the fox"
    assert [tokens[end - 1] for end in document_ends] == [0, 0] and document_ends[1] == len(tokens)
    (tmp_path / "a.bin").write_bytes(b"ab")
    with pytest.raises(UsageError, match="contains tokens"):
        read_documents(str(tmp_path / "a.bin"), tokenizer, 300)


def test_old_bpe_tokenizer_name_has_hint() -> None:
    with pytest.raises(UsageError, match="unknown tokenizer 'bpe'") as caught:
        get_tokenizer("bpe", 300)
    assert caught.value.hint.startswith("give the path of a tokenizer.json")
    assert caught.value.fields == ("tokenizer",)
