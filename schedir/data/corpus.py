"""Read a text or token source as one stream of tokens, with the ends of its documents."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from schedir.data.megatron_indexed_dataset import Documents
from schedir.data.megatron_indexed_dataset import read as read_indexed
from schedir.data.token_files import find, load, python_files
from schedir.data.tokenizer import Bytes, Tokenizer
from schedir.data.tokenizer import load as load_tokenizer
from schedir.errors import UsageError
from schedir.retired_names import RETIRED

Source = str | Sequence[str] | None


def tokenizer_of(name: str, vocab: int, end: str | None = None) -> Tokenizer:
    """Return the tokenizer "bytes", or that of the tokenizer.json at a path.

    Raises UsageError if it cannot be used, or if it has more than `vocab` tokens.
    """
    if name == "bytes":
        return Bytes()
    if hint := RETIRED.get(f"tokenizer = {name}"):
        raise UsageError(f"tokenizer {name} is not known", hint=hint, fields=["tokenizer"])
    tokenizer = load_tokenizer(name, end)
    if tokenizer.size > vocab:
        raise UsageError(
            f"the {tokenizer.size} tokens of {name} are more than the vocabulary of {vocab}",
            hint=f"model.vocab = {tokenizer.size}",
            fields=["vocab", "tokenizer"],
        )
    return tokenizer


def read(source: Source, tokenizer: Tokenizer, vocab: int, *, whole: bool = False) -> Documents:
    """Return the tokens of a source.

    A `.bin` contains tokens, and the `.idx` beside it, if there is one, the ends of documents.  It
    is memory-mapped.  With the tokenizer "bytes", text files are joined to one stream without ends.
    A single one is memory-mapped.  With another tokenizer, or for `whole` documents, each text file
    is encoded as a document with an end.

    Raises UsageError if the source cannot be read, or if `vocab` has no token for the end of
    documents of bytes.
    """
    paths = find(source) if source is not None else []
    if any(path.suffix == ".bin" for path in paths):
        if not isinstance(tokenizer, Bytes):
            raise UsageError(
                f"{paths[0]} has tokens already: no tokenizer is for it",
                hint='leave out tokenizer, or set it to "bytes"',
                fields=["tokenizer", "source"],
            )
        indexed = len(paths) == 1 and paths[0].with_suffix(".idx").exists()
        return read_indexed(paths[0]) if indexed else Documents(load(source))
    if isinstance(tokenizer, Bytes):
        if not whole:
            return Documents(load(source))
        if vocab < tokenizer.size:
            raise UsageError(
                f"bytes and the end of a document are {tokenizer.size} tokens, more than the "
                f"vocabulary of {vocab}",
                hint=f"model.vocab = {tokenizer.size}",
                fields=["vocab", "documents"],
            )
    return _encode(paths or python_files(Path(sysconfig.get_path("stdlib"))), tokenizer)


def _encode(paths: Iterable[Path], tokenizer: Tokenizer) -> Documents:
    """Encode text files, each a document with its end.  Empty files are left out."""
    kind = np.dtype("<u2" if tokenizer.size <= 2**16 else "<i4")
    documents = [np.zeros(0, kind)]
    for path in paths:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}", fields=["source"]) from None
        if text:
            documents.append(np.append(tokenizer.encode(text), tokenizer.end).astype(kind))
    ends = np.cumsum([len(ids) for ids in documents[1:]], dtype=np.int64)
    return Documents(np.concatenate(documents), ends)


def split(all_of_it: Documents, share: float) -> tuple[Documents, Documents]:
    """Split a stream into its begin and its end, which has at least this share of the tokens.

    If the ends of documents are known, no document is split.  Raises UsageError if no document
    would be left in the begin.
    """
    tokens, ends = all_of_it
    first = len(tokens) - round(len(tokens) * share)
    if ends is None:
        return Documents(tokens[:first]), Documents(tokens[first:])
    before = int(np.searchsorted(ends, first, "right"))
    if not before:
        raise UsageError(
            f"validation {share:g} of {len(ends)} documents leaves none to train on: the first has "
            f"{ends[0] if len(ends) else 0} of {len(tokens)} tokens",
            hint="hold out a source of its own",
            fields=["validation"],
        )
    first = int(ends[before - 1])
    return (
        Documents(tokens[:first], ends[:before]),
        Documents(tokens[first:], ends[before:] - first),
    )
