"""Tokenizers: one token per byte, or a byte-level BPE of Hugging Face's `tokenizers`.

Byte-level BPE (Radford et al., Language Models are Unsupervised Multitask Learners, 2019, section
2.2) has a token for each byte, so that it encodes whatever there is, and nothing is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError
from schedir.extras import require_package

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

MAX_TEXT_BYTES: Final = 2**20  # bytes that are encoded at once
# The names by which tokenizers call the end of a document.
_END_TOKENS: Final = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|im_end|>",
)
_CUT_PATTERN: Final = re.compile(rb"[!-~]\n(?=[!-~])")

TokenIds = NDArray[np.int64]


class Tokenizer(Protocol):
    """Bytes as numbers below `vocab_size`, of which `end_token` ends a document and is in no text;
    `digest` says which tokenizer it is."""

    vocab_size: int
    end_token: int
    digest: str

    def encode(self, text: bytes) -> TokenIds:
        """The tokens of a text."""
        ...


class Bytes:
    """Each byte is a token.

    >>> Bytes().encode(b"ab").tolist()
    [97, 98]
    """

    vocab_size, end_token, digest = 257, 256, "bytes"

    def encode(self, text: bytes) -> TokenIds:
        return np.frombuffer(text, "u1").astype(np.int64)


class BPE:
    """A byte-level BPE of a `tokenizer.json`; `source` is what errors call it.

    What is not UTF-8 is encoded byte by byte.  Text of more than `MAX_TEXT_BYTES` bytes is cut at
    ends of lines, or else between characters.  The names of special tokens are text where they
    stand in one.  Raises UsageError for a tokenizer of another kind, which would lose what it
    encodes.
    """

    def __init__(self, text: str, source: str, end_token: str | None = None) -> None:
        self._library, library = _parse(text, source), require_library()
        told = json.loads(self._library.to_str())
        _require_byte_level(told, source)
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True
        vocabulary = self._library.get_vocab()
        bytes_of = _map_characters()
        if missing := [c for c in bytes_of if c not in vocabulary]:
            raise _unsupported_error(source, f"it has no token for {len(missing)} of the 256 bytes")
        self._byte_tokens = np.zeros(256, np.int64)
        for character, byte in bytes_of.items():
            self._byte_tokens[byte] = vocabulary[character]
        names = _END_TOKENS if end_token is None else (end_token,)
        known = next((name for name in names if name in vocabulary), None)
        if known is None:
            raise UsageError(
                f"{source} has no token {' or '.join(names)} to end a document",
                hint="[data] end_of_document names one",
                fields=["end_of_document", "tokenizer"],
            )
        self.end_token, self.vocab_size = vocabulary[known], max(vocabulary.values()) + 1
        exact = f"{library.__version__} {known} {text}"
        self.digest = blake2b(exact.encode(), digest_size=8).hexdigest()

    def encode(self, text: bytes) -> TokenIds:
        parts = list(_split_utf8(text))
        valid = [part for part in parts if isinstance(part, str)]
        encoded = iter(self._library.encode_batch_fast(valid, add_special_tokens=False))
        return np.concatenate(
            [
                np.array(next(encoded).ids, np.int64)
                if isinstance(part, str)
                else self._byte_tokens[np.frombuffer(part, "u1")]
                for part in parts
            ]
        )


def require_library() -> Any:
    """Return the library tokenizers. Raises MissingPackageError if it is not installed."""
    require_package("tokenizers", "a tokenizer other than bytes", field="tokenizer")
    import tokenizers

    return tokenizers


def load_tokenizer(path: str, end_token: str | None) -> BPE:
    """The tokenizer of a file.  Raises UsageError for one that cannot be read or used."""
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        raise UsageError(
            f"cannot read tokenizer {path}: {error.strerror}",
            hint="bytes, or the path of a tokenizer.json",
            fields=["tokenizer"],
        ) from None
    except UnicodeDecodeError as error:
        raise _unsupported_error(path, f"it is not UTF-8 text: see byte {error.start}") from None
    return BPE(text, path, end_token)


def _parse(text: str, source: str) -> Library:
    library = require_library()
    try:
        parsed: Library = library.Tokenizer.from_str(text)
    except Exception as error:  # it has no class of its own
        raise _unsupported_error(source, str(error).partition("\n")[0]) from None
    return parsed


def _require_byte_level(description: Any, source: str) -> None:
    """Refuse what encodes other than byte by byte, or not always the same."""
    before = description["pre_tokenizer"] or {}
    steps = [before, *before.get("pretokenizers", ())]
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    if description["model"]["type"] != "BPE" or not levels:
        kind = description["model"]["type"]
        raise _unsupported_error(
            source, f"it is {kind}, and not byte-level, and may not give back its text"
        )
    if any(step.get("add_prefix_space") for step in levels):
        raise _unsupported_error(source, "it puts a space before each text")
    if description["model"].get("dropout"):
        raise _unsupported_error(source, "it has dropout, and encodes at random")


def _unsupported_error(source: str, reason: str) -> UsageError:
    return UsageError(
        f"tokenizer {source} cannot be used: {reason}",
        hint="a .bin of tokens that it has made can be a source",
        fields=["tokenizer"],
    )


def _split_utf8(text: bytes) -> Iterator[str | bytes]:
    """A text cut into what is UTF-8, and what is not."""
    for piece in _split_long_text(text):
        try:
            yield piece.decode()
        except UnicodeDecodeError:
            # Each byte that is in no character becomes one of 128 that no text has.
            for part in re.split("([\udc80-\udcff]+)", piece.decode(errors="surrogateescape")):
                if part:
                    odd = "\udc80" <= part[0] <= "\udcff"
                    yield part.encode(errors="surrogateescape") if odd else part


def _split_long_text(text: bytes) -> Iterator[bytes]:
    """A text in pieces of at most `MAX_TEXT_BYTES` bytes.

    They are cut behind an end of line between two visible characters, where patterns like GPT-2's
    cut as well, so that the tokens are those of the whole.
    """
    begin = 0
    while len(text) - begin > MAX_TEXT_BYTES:
        end = begin + MAX_TEXT_BYTES
        cuts = [found.end() for found in _CUT_PATTERN.finditer(text, max(begin, end - 2**16), end)]
        while not cuts and text[end] & 0xC0 == 0x80 and end > begin + MAX_TEXT_BYTES - 4:
            end -= 1
        end = cuts[-1] if cuts else end
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _map_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary is: visible ones of Latin-1 are
    themselves, others follow from 256 on, as in GPT-2."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in visible)
    return {chr(byte): byte for byte in visible} | {
        chr(256 + k): byte for k, byte in enumerate(others)
    }
