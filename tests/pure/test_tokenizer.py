"""Byte-level BPE: whatever is encoded comes back, and the same text makes the same tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schedir.data import tokenizer as module
from schedir.data.corpus import read, tokenizer_of
from schedir.data.tokenizer import BPE, END, load, train
from schedir.errors import UsageError

TEXT = b"the quick brown fox jumps over the lazy dog; z\xc3\xa4h, it's 42 times\n" * 20


@cache
def bpe() -> BPE:
    return BPE(train([TEXT], 300), "trained")


@given(st.binary() | st.text().map(str.encode) | st.lists(st.sampled_from(
    [b"the ", b"\n", b" ", b"\xff", END.encode(), b"\xed\xa0\x80", b"\xc3", "é".encode(), b"\0"]
)).map(b"".join))  # fmt: skip
@example(b"")
@example(END.encode())
@example(b" \xc3\xa4\xff\xff ")
def test_what_is_encoded_comes_back(text: bytes) -> None:
    (ids,) = bpe().encode([text])
    assert bpe().decode(ids.tolist()) == text and bpe().end not in ids
    assert all(0 <= i < bpe().size for i in ids)
    assert bpe().decode([*ids.tolist(), bpe().end]) == text


def test_words_of_the_text_are_tokens() -> None:
    (ids,) = bpe().encode([b"the quick brown fox"])
    assert len(ids) < 8 and bpe().size <= 300


def test_long_texts_are_cut_where_the_tokens_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    text = TEXT + b"no end of a line " * 30 + "ää".encode() * 80 + b"\n\n  x\xff" * 9
    (whole,) = bpe().encode([TEXT])
    monkeypatch.setattr(module, "LONGEST", 100)
    assert bpe().encode([TEXT])[0].tolist() == whole.tolist()
    (ids,) = bpe().encode([text])
    assert bpe().decode(ids) == text
    assert max(map(len, module._pieces(text))) <= 100


def test_the_same_text_makes_the_same_tokenizer() -> None:
    made = set()
    for number in ("1", "3"):
        code = (
            "from schedir.data.tokenizer import train; from tests.pure.test_tokenizer import TEXT;"
            "print(train([TEXT[k:k + 50] for k in range(0, len(TEXT), 50)], 290))"
        )
        environment = os.environ | {"RAYON_NUM_THREADS": number, "PYTHONHASHSEED": number}
        root = Path(__file__).resolve().parents[2]
        made.add(
            subprocess.run(
                [sys.executable, "-c", code], env=environment, cwd=root, check=True,
                capture_output=True, timeout=120,
            ).stdout
        )  # fmt: skip
    assert len(made) == 1


def foreign(**change: Any) -> str:
    return json.dumps(json.loads(train([TEXT], 270)) | change)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot be used"),
        ("{}", "cannot be used"),
        ("[1]", "cannot be used"),
        (foreign(pre_tokenizer=None), "not byte-level"),
        (foreign(pre_tokenizer={"type": "Whitespace"}), "not byte-level"),
        (foreign(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}), "is WordLevel"),
        (foreign(model={"type": "BPE", "vocab": {"a": 0}, "merges": []}), "no token for 255"),
        (foreign(model=json.loads(train([TEXT], 270))["model"] | {"dropout": 0.5}), "at random"),
        (
            foreign(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True,
                                   "trim_offsets": True, "use_regex": True}),
            "a space before",
        ),
    ],
)  # fmt: skip
def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load(str(path), None)
    assert str(path) in caught.value.fact and said in caught.value.fact
    assert caught.value.fields == ("tokenizer",)


def test_the_tokenizer_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    told = json.loads(train([TEXT], 300))
    # A file that says to cut documents, or to fill them up, is not obeyed.
    told["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst",
                          "stride": 0}  # fmt: skip
    path.write_text(json.dumps(told))
    found = load(str(path), None)
    assert len(found.encode([TEXT])[0]) > 2 and found.end == 0
    with pytest.raises(UsageError, match=r"no token <s> to end a document"):
        load(str(path), "<s>")
    with pytest.raises(UsageError, match="cannot read"):
        load(str(tmp_path / "none.json"), None)
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        load(str(path), None)


def test_a_missing_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError) as caught:
        tokenizer_of("bpe", None, 300)
    assert caught.value.hint == "pip install 'schedir[tokenizers]'"


def test_a_tokenizer_is_trained_once_and_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = tmp_path / "a.txt"
    text.write_bytes(TEXT)
    with pytest.raises(UsageError, match="too small for bpe"):
        tokenizer_of("bpe", str(text), 256)
    made = tokenizer_of("bpe", str(text), 300)
    tokens, ends = read(str(text), made, 300)
    assert made.decode(tokens.tolist()) == TEXT and ends is not None and len(ends) == 1
    monkeypatch.setattr("schedir.data.corpus.train", None)  # it is not trained again
    assert tokenizer_of("bpe", str(text), 300).digest == made.digest
    (path,) = (tmp_path / "schedir").glob("tokenizer-*.json")
    with pytest.raises(UsageError) as caught:
        tokenizer_of(str(path), str(text), 270)
    assert caught.value.hint == f"model.vocab = {made.size}"
    (tmp_path / "a.bin").write_bytes(b"ab")
    for call in (lambda: read(str(tmp_path / "a.bin"), made, 300),
                 lambda: tokenizer_of("bpe", str(tmp_path / "a.bin"), 300)):  # fmt: skip
        with pytest.raises(UsageError, match="has tokens already"):
            call()
