"""Tokenizers and indexed tokens for tests: a trained tokenizer.json, its decoder, and an `.idx`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from schedir.data.megatron_indexed_dataset import _HEADER, _MAGIC, _TOKEN_DTYPES
from schedir.data.tokenizer import _map_characters

END = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], vocab: int) -> str:
    """Train a byte-level BPE of at most `vocab` tokens on texts, and return its tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, min_frequency=2, special_tokens=[END],
        initial_alphabet=sorted(_map_characters()), show_progress=False,
    )  # fmt: skip
    library.train_from_iterator(texts, trainer)
    return str(library.to_str())


def decode_tokens(tokenizer_json: str, ids: Iterable[int]) -> bytes:
    """Return the bytes of tokens. The end of a document has none."""
    told, bytes_of = json.loads(tokenizer_json), _map_characters()
    names = {number: name for name, number in told["model"]["vocab"].items()}
    return b"".join(bytes(bytes_of[c] for c in names[i]) for i in ids if names[i] != END)


def write_index(path: Path, kind: np.dtype[Any], lengths: Sequence[int]) -> None:
    """Write the `.idx` of documents with these numbers of tokens, each with one sequence."""
    code = next(code for code, name in _TOKEN_DTYPES.items() if np.dtype(name) == kind)
    many = np.array(lengths, np.int64)
    head = np.zeros(1, _HEADER)
    head["magic"], head["version"], head["type"] = np.void(_MAGIC), 1, code
    head["sequences"], head["bounds"] = len(many), len(many) + 1
    with path.open("wb") as out:
        out.write(head.tobytes())
        out.write(many.astype("<i4").tobytes())
        out.write(((np.cumsum(many) - many) * kind.itemsize).astype("<i8").tobytes())
        out.write(np.arange(len(many) + 1, dtype="<i8").tobytes())
