"""Tokenizers: one token per byte, or a byte-level BPE of Hugging Face's `tokenizers`.

A byte-level BPE has a token for each byte. So it encodes any text without loss.

References:
    Radford et al., Language Models are Unsupervised Multitask Learners, 2019, section 2.2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError
from schedir.extras import require_package

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

MAX_TEXT_BYTES: Final = 2**20  # Longer texts are split before the library encodes them.
# Common names of the token that ends a document.
_END_TOKENS: Final = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|im_end|>",
)
_CUT_PATTERN: Final = re.compile(rb"[!-~]\n(?=[!-~])")

TokenIds = NDArray[np.int64]


class Bytes:
    """A tokenizer in which each byte is a token.

    Attributes:
        vocab_size: The largest token id plus 1.
        end_token: The id of the token that ends a document. `encode` never returns it.
        digest: An identifier of the tokenizer and its settings.

    Example:
        >>> Bytes().encode(b"ab").tolist()
        [97, 98]
    """

    vocab_size, end_token, digest = 257, 256, "bytes"

    def encode(self, text: bytes) -> TokenIds:
        """Return the token ids of a text.

        Args:
            text: The text. It need not be UTF-8.
        """
        return np.frombuffer(text, "u1").astype(np.int64)


class BPE:
    """A byte-level BPE of a `tokenizer.json`.

    Bytes that are not UTF-8 are encoded one by one. Text of more than `MAX_TEXT_BYTES` bytes is
    split at ends of lines, or else between characters. Names of special tokens in a text are
    encoded as text.

    Args:
        text: The contents of the `tokenizer.json`.
        source: The name of the tokenizer, for errors.
        end_token: The token that ends a document. The default is the first of the usual names, such
            as `<|endoftext|>`, that is in the vocabulary.

    Raises:
        UsageError: The tokenizer is not a byte-level BPE, so it may lose text. Or it does not have
            the end token.
        MissingPackageError: The library `tokenizers` is not installed.
    """

    def __init__(self, text: str, source: str, end_token: str | None = None) -> None:
        self._library, library = _parse(text, source), require_library()
        config = json.loads(self._library.to_str())
        _require_byte_level(config, source)
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True
        vocabulary = self._library.get_vocab()
        byte_of_character = _map_characters()
        if missing := [c for c in byte_of_character if c not in vocabulary]:
            raise _unsupported_error(source, f"it has no token for {len(missing)} of the 256 bytes")
        self._byte_tokens = np.zeros(256, np.int64)
        for character, byte in byte_of_character.items():
            self._byte_tokens[byte] = vocabulary[character]
        names = _END_TOKENS if end_token is None else (end_token,)
        end_name = next((name for name in names if name in vocabulary), None)
        if end_name is None:
            raise UsageError(
                f"{source} has no token {' or '.join(names)} for the end of a document",
                hint="set [data] end_of_document to one of its tokens",
                fields=["end_of_document", "tokenizer"],
            )
        self.end_token = vocabulary[end_name]
        self.vocab_size = max(vocabulary.values()) + 1
        settings = f"{library.__version__} {end_name} {text}"
        self.digest = blake2b(settings.encode(), digest_size=8).hexdigest()

    def encode(self, text: bytes) -> TokenIds:
        """Return the token ids of a text.

        Args:
            text: The text. It need not be UTF-8.
        """
        parts = list(_split_utf8(text))
        strings = [part for part in parts if isinstance(part, str)]
        encodings = iter(self._library.encode_batch_fast(strings, add_special_tokens=False))
        return np.concatenate(
            [
                np.array(next(encodings).ids, np.int64)
                if isinstance(part, str)
                else self._byte_tokens[np.frombuffer(part, "u1")]
                for part in parts
            ]
        )


Tokenizer = Bytes | BPE


def require_library() -> Any:
    """Return the module `tokenizers`.

    Raises:
        MissingPackageError: The library `tokenizers` is not installed.
    """
    require_package("tokenizers", "a tokenizer other than bytes", field="tokenizer")
    import tokenizers

    return tokenizers


def load_tokenizer(path: str, end_token: str | None) -> BPE:
    """Return the tokenizer of a file.

    Args:
        path: The path of a `tokenizer.json`.
        end_token: The token that ends a document, see `BPE`.

    Raises:
        UsageError: The file cannot be read or used.
        MissingPackageError: The library `tokenizers` is not installed.
    """
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        raise UsageError(
            f"cannot read tokenizer {path}: {error.strerror}",
            hint='tokenizer = "bytes", or the path of a tokenizer.json',
            fields=["tokenizer"],
        ) from None
    except UnicodeDecodeError as error:
        raise _unsupported_error(path, f"it is not UTF-8 text: see byte {error.start}") from None
    return BPE(text, path, end_token)


def _parse(text: str, source: str) -> Library:
    library = require_library()
    try:
        tokenizer: Library = library.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise _unsupported_error(source, str(error).partition("\n")[0]) from None
    return tokenizer


def _require_byte_level(description: Any, source: str) -> None:
    """Raise UsageError for a tokenizer that is not a byte-level BPE, or is not deterministic."""
    pre_tokenizer = description["pre_tokenizer"] or {}
    steps = [pre_tokenizer, *pre_tokenizer.get("pretokenizers", ())]
    byte_levels = [step for step in steps if step.get("type") == "ByteLevel"]
    if description["model"]["type"] != "BPE" or not byte_levels:
        kind = description["model"]["type"]
        raise _unsupported_error(
            source, f"its type is {kind}; it must be a byte-level BPE to reproduce each text"
        )
    if any(step.get("add_prefix_space") for step in byte_levels):
        raise _unsupported_error(source, "it adds a space before each text (add_prefix_space)")
    if description["model"].get("dropout"):
        raise _unsupported_error(source, "it has dropout, so that tokens are random")


def _unsupported_error(source: str, reason: str) -> UsageError:
    return UsageError(
        f"tokenizer {source} cannot be used: {reason}",
        hint="encode the text with this tokenizer first, and set data.source to the .bin with the "
        "tokens",
        fields=["tokenizer"],
    )


def _split_utf8(text: bytes) -> Iterator[str | bytes]:
    """Split a text into strings of UTF-8 and bytes that are not UTF-8."""
    for chunk in _split_long_text(text):
        try:
            yield chunk.decode()
        except UnicodeDecodeError:
            # The decoder maps each invalid byte to one of 128 code points that valid text never
            # has.
            for part in re.split("([\udc80-\udcff]+)", chunk.decode(errors="surrogateescape")):
                if part:
                    is_invalid = "\udc80" <= part[0] <= "\udcff"
                    yield part.encode(errors="surrogateescape") if is_invalid else part


def _split_long_text(text: bytes) -> Iterator[bytes]:
    """Split a text into parts of at most `MAX_TEXT_BYTES` bytes.

    If possible, a part ends after an end of line between two visible characters. GPT-2's tokenizer
    also splits a text there. So a tokenizer with the same pattern returns the same tokens as for
    the complete text.
    """
    begin = 0
    while len(text) - begin > MAX_TEXT_BYTES:
        end = begin + MAX_TEXT_BYTES
        split_ends = [
            match.end() for match in _CUT_PATTERN.finditer(text, max(begin, end - 2**16), end)
        ]
        while not split_ends and text[end] & 0xC0 == 0x80 and end > begin + MAX_TEXT_BYTES - 4:
            end -= 1
        end = split_ends[-1] if split_ends else end
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _map_characters() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary.

    As in GPT-2, a visible character of Latin-1 represents the byte with its code. The characters
    from 256 on represent the other bytes.
    """
    visible_bytes = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other_bytes = (byte for byte in range(256) if byte not in visible_bytes)
    return {chr(byte): byte for byte in visible_bytes} | {
        chr(256 + k): byte for k, byte in enumerate(other_bytes)
    }
