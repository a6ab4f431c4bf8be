"""Corpus: a source, whatever its form, as one stream of tokens with ends of documents."""

from __future__ import annotations

import sysconfig
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from schedir.data.cache import Progress, digest, home, made
from schedir.data.documents import digest_of, documents
from schedir.data.indexed import Documents, write_index
from schedir.data.indexed import read as read_indexed
from schedir.data.sources import find, load, python_files
from schedir.data.tokenizer import BPE, Bytes, Tokenizer, require_library, train
from schedir.data.tokenizer import load as load_tokenizer
from schedir.errors import UsageError

Source = str | Sequence[str] | None

_AT_ONCE: Final = 2**22  # bytes of documents that are encoded together
_FORMAT: Final = 1  # of what is kept: raise it when the same source gives other tokens


def tokenizer_of(name: str, source: Source, vocab: int, end: str | None = None) -> Tokenizer:
    """The tokenizer of that name: "bytes"; "bpe", of `vocab` tokens, trained on the source and
    kept in the cache folder; or that of a tokenizer.json.

    Raises UsageError for one that cannot be made or used, or has more than `vocab` tokens.
    """
    if name == "bytes":
        return Bytes()
    if name == "bpe":
        paths, library = _texts(source), require_library()
        if vocab < 257:
            raise UsageError(
                f"a vocabulary of {vocab} is too small for bpe: the bytes and the end of a "
                "document are 257",
                hint="model.vocab = 4096",
                fields=["vocab", "tokenizer"],
            )
        key = digest(_FORMAT, digest_of(paths), vocab, library.__version__)
        path = home() / f"tokenizer-{key}.json"

        def make(folder: Path, progress: Progress) -> None:
            text = train(_told(paths, progress), vocab)
            (folder / path.name).write_text(text)

        made(path, make, "training the tokenizer", _size(paths))
        tokenizer = BPE(path.read_text(), str(path))
    else:
        tokenizer = load_tokenizer(name, end)
    if tokenizer.size > vocab:
        raise UsageError(
            f"the {tokenizer.size} tokens of {name} are more than the vocabulary of {vocab}",
            hint=f"model.vocab = {tokenizer.size}",
            fields=["vocab", "tokenizer"],
        )
    return tokenizer


def read(source: Source, tokenizer: Tokenizer, vocab: int, *, whole: bool = False) -> Documents:
    """The tokens of a source, memory-mapped.

    Those of a `.bin` are as they are, with the documents of an `.idx` beside it.  Text files whose
    bytes are the tokens are one stream, unless `whole` documents are wanted.  All else is encoded
    once, an end behind each document, into the cache folder, as a `.bin` with its `.idx`.

    Raises UsageError for what cannot be read, and for documents of bytes where `vocab` has no room
    for their end.
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
        if not whole and all(path.suffix != ".jsonl" for path in paths):
            return Documents(load(source))
        if vocab < tokenizer.size:
            raise UsageError(
                f"bytes and the end of a document are {tokenizer.size} tokens, more than the "
                f"vocabulary of {vocab}",
                hint=f"model.vocab = {tokenizer.size}",
                fields=["vocab", "documents"],
            )
    paths = _texts(source)
    key = digest(_FORMAT, digest_of(paths), tokenizer.digest)
    index = home() / f"tokens-{key}.idx"

    def make(folder: Path, progress: Progress) -> None:
        _encode(paths, tokenizer, folder / index.with_suffix(".bin").name, progress)

    made(index, make, "encoding", _size(paths))
    return read_indexed(index.with_suffix(".bin"))


def _texts(source: Source) -> list[Path]:
    """The files of a source, which are text."""
    paths = python_files(Path(sysconfig.get_path("stdlib"))) if source is None else find(source)
    if bins := [path for path in paths if path.suffix == ".bin"]:
        raise UsageError(
            f"{bins[0]} has tokens already: no tokenizer is for it",
            hint='leave out tokenizer, or set it to "bytes"',
            fields=["tokenizer", "source"],
        )
    return paths


def _size(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _told(paths: Sequence[Path], progress: Progress) -> Iterator[bytes]:
    """All documents, while `progress` is told how many bytes they have."""
    done = 0
    for path in paths:
        for text in documents(path):
            done += len(text)
            progress(done)
            yield text


def _encode(paths: Sequence[Path], tokenizer: Tokenizer, path: Path, progress: Progress) -> None:
    """Write all documents, each with its end, and their index."""
    kind: np.dtype[np.integer] = np.dtype("<u2" if tokenizer.size <= 2**16 else "<i4")
    lengths, waiting, size = array("q"), list[bytes](), 0
    with path.open("wb") as out:

        def flush() -> None:
            for ids in tokenizer.encode(waiting):
                whole = np.append(ids, tokenizer.end).astype(kind)
                if len(whole) >= 2**31:
                    raise UsageError(f"a document has {len(whole):,} tokens, more than 2^31 - 1")
                whole.tofile(out)
                lengths.append(len(whole))

        for text in _told(paths, progress):
            waiting.append(text)
            size += len(text)
            if size >= _AT_ONCE:
                flush()
                waiting, size = [], 0
        flush()
    write_index(path.with_suffix(".idx"), kind, lengths)


def split(all_of_it: Documents, share: float) -> tuple[Documents, Documents]:
    """A stream without its end, and that end, at least such a share of it: of whole documents, if
    there are any.  Raises UsageError for a single document."""
    tokens, ends = all_of_it
    first = len(tokens) - round(len(tokens) * share)
    if ends is None:
        return Documents(tokens[:first]), Documents(tokens[first:])
    before = int(np.searchsorted(ends, first, "right"))
    if not before:
        raise UsageError(
            f"held_out {share:g} of {len(ends)} documents leaves none to train on: the first has "
            f"{ends[0] if len(ends) else 0} of {len(tokens)} tokens",
            hint="hold out a source of its own",
            fields=["held_out"],
        )
    first = int(ends[before - 1])
    return (
        Documents(tokens[:first], ends[:before]),
        Documents(tokens[first:], ends[before:] - first),
    )
