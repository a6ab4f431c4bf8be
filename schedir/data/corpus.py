"""Read a text or token source as one stream of tokens, with the ends of its documents."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from schedir.data.megatron_indexed_dataset import Documents
from schedir.data.megatron_indexed_dataset import read_indexed_dataset as read_indexed
from schedir.data.token_files import find_files, find_python_files, load_tokens
from schedir.data.tokenizer import Bytes, Tokenizer
from schedir.data.tokenizer import load_tokenizer as load_tokenizer
from schedir.errors import UsageError
from schedir.retired_names import RETIRED_HINTS

Source = str | Sequence[str] | None


def get_tokenizer(name: str, vocab: int, end_token: str | None = None) -> Tokenizer:
    """Return the tokenizer "bytes", or the tokenizer in a tokenizer.json.

    Args:
        name: "bytes", or the path of a tokenizer.json.
        vocab: The vocabulary size of the model.
        end_token: The token that ends a document. The default is the first common name, such as
            `<|endoftext|>`, that is in the vocabulary.

    Raises:
        UsageError: The tokenizer cannot be used, or it has more than `vocab` tokens.
    """
    if name == "bytes":
        return Bytes()
    if hint := RETIRED_HINTS.get(f"tokenizer = {name}"):
        raise UsageError(f"unknown tokenizer {name!r}", hint=hint, fields=["tokenizer"])
    tokenizer = load_tokenizer(name, end_token)
    if tokenizer.vocab_size > vocab:
        raise UsageError(
            f"tokenizer {name} has {tokenizer.vocab_size} tokens, more than model.vocab = {vocab}",
            hint=f"model.vocab = {tokenizer.vocab_size}",
            fields=["vocab", "tokenizer"],
        )
    return tokenizer


def read_documents(
    source: Source, tokenizer: Tokenizer, vocab: int, *, with_document_ends: bool = False
) -> Documents:
    """Return the tokens of a source, and the ends of its documents if the source defines these.

    - A `.bin` contains tokens. An `.idx` next to it contains the ends of documents. Both are
      memory-mapped.
    - With the tokenizer "bytes", text files are joined to one stream without ends. A single file is
      memory-mapped.
    - With another tokenizer, or for `with_document_ends`, each text file becomes a document with an
      end token.

    Args:
        source: Paths and patterns, see `load_tokens`. None reads the Python files of the standard
            library.
        tokenizer: The tokenizer for text.
        vocab: The vocabulary size of the model.
        with_document_ends: With the tokenizer "bytes", True makes each text file a document with an
            end token. Other tokenizers always do this.

    Raises:
        UsageError: The source cannot be read, or `vocab` is too small for the end token of the
            tokenizer "bytes". Or the source already has tokens, and `tokenizer` is not "bytes".
    """
    paths = find_files(source) if source is not None else []
    if any(path.suffix == ".bin" for path in paths):
        if not isinstance(tokenizer, Bytes):
            raise UsageError(
                f"{paths[0]} already contains tokens, so tokenizer does not apply",
                hint='leave out tokenizer, or set it to "bytes"',
                fields=["tokenizer", "source"],
            )
        is_indexed = len(paths) == 1 and paths[0].with_suffix(".idx").exists()
        return read_indexed(paths[0]) if is_indexed else Documents(load_tokens(source))
    if isinstance(tokenizer, Bytes):
        if not with_document_ends:
            return Documents(load_tokens(source))
        if vocab < tokenizer.vocab_size:
            raise UsageError(
                f"the bytes and the end of a document need {tokenizer.vocab_size} tokens, more "
                f"than model.vocab = {vocab}",
                hint=f"model.vocab = {tokenizer.vocab_size}",
                fields=["vocab", "documents"],
            )
    return _encode_files(paths or find_python_files(Path(sysconfig.get_path("stdlib"))), tokenizer)


def _encode_files(paths: Iterable[Path], tokenizer: Tokenizer) -> Documents:
    """Encode text files, each as a document with an end token. Empty files are left out."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<i4")
    documents = [np.zeros(0, dtype)]
    for path in paths:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}", fields=["source"]) from None
        if text:
            documents.append(np.append(tokenizer.encode(text), tokenizer.end_token).astype(dtype))
    ends = np.cumsum([len(ids) for ids in documents[1:]], dtype=np.int64)
    return Documents(np.concatenate(documents), ends)


def split_documents(documents: Documents, validation_share: float) -> tuple[Documents, Documents]:
    """Split a stream into a training part and a validation part.

    Args:
        documents: The stream.
        validation_share: The share of the tokens for the validation part, which is the end of the
            stream. If the ends of documents are given, no document is split. Then the validation
            part begins with a full document, and may have a larger share.

    Returns:
        The training part and the validation part.

    Raises:
        UsageError: The training part would have no document.
    """
    tokens, ends = documents
    split_position = len(tokens) - round(len(tokens) * validation_share)
    if ends is None:
        return Documents(tokens[:split_position]), Documents(tokens[split_position:])
    train_count = int(np.searchsorted(ends, split_position, "right"))
    if not train_count:
        raise UsageError(
            f"validation = {validation_share:g} leaves no document for training: the first of "
            f"{len(ends)} documents alone has {ends[0] if len(ends) else 0} of {len(tokens)} "
            "tokens",
            hint="set validation to another file",
            fields=["validation"],
        )
    split_position = int(ends[train_count - 1])
    return (
        Documents(tokens[:split_position], ends[:train_count]),
        Documents(tokens[split_position:], ends[train_count:] - split_position),
    )
