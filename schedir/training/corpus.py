"""Corpus: the text that a configuration trains on, and that it holds out, as Batches."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from schedir.data.corpus import Source, read, split, tokenizer_of
from schedir.data.indexed import Documents
from schedir.data.sources import find
from schedir.data.tokenizer import Tokenizer
from schedir.data.windows import Packed
from schedir.errors import UsageError
from schedir.training.config import Config
from schedir.training.data import Batches


def batches(config: Config) -> Batches:
    """What all replicas together train on, without what is held out.  Raises UsageError for data
    that cannot be used."""
    data = config.data
    size = config.pipeline.dp * config.pipeline.microbatches * data.microbatch_size
    return _batches(config, _parts(config).trained, size, data.seed, _named(data.source))


def held_out(config: Config) -> Batches | None:
    """What is never trained on, if the configuration holds anything out: all its windows, in their
    own order; packed ones in one that is random and always the same, as packing begins with long
    documents.  Raises UsageError for data that cannot be used."""
    kept, share = _parts(config).held_out, config.data.held_out
    if kept is None:
        return None
    is_share = isinstance(share, float)
    where = f"what held_out {share} leaves for evaluation" if is_share else _named(share)
    return _batches(config, kept, 1, 0 if config.data.documents == "packed" else None, where)


def data_facts(config: Config) -> dict[str, str]:
    """What processes must have the same of."""
    held = held_out(config)
    return {
        "the data": batches(config).told,
        "the held-out data": held.told if held else "none",
        "the tokenizer": _parts(config).tokenizer.digest,
    }


class _Parts(NamedTuple):
    trained: Documents
    held_out: Documents | None
    tokenizer: Tokenizer


def _parts(config: Config) -> _Parts:
    """What is trained on, what is held out, and the tokenizer of both."""
    data, vocab = config.data, config.model.vocab
    tokenizer = tokenizer_of(data.tokenizer, data.source, vocab, data.end_of_document)
    whole, share = data.documents == "packed", data.held_out
    trained = read(data.source, tokenizer, vocab, whole=whole)
    if not share:
        return _Parts(trained, None, tokenizer)
    if isinstance(share, float):
        return _Parts(*split(trained, share), tokenizer)
    for path in find(share):
        if data.source is not None and any(path.samefile(one) for one in find(data.source)):
            raise UsageError(
                f"{path} is held out, and trained on as well", fields=["held_out", "source"]
            )
    return _Parts(trained, read(share, tokenizer, vocab, whole=whole), tokenizer)


def _batches(
    config: Config, documents: Documents, size: int, seed: int | None, where: str
) -> Batches:
    tokens, ends = documents
    model, windows = config.model, None
    if config.data.documents == "packed":
        if ends is None:
            raise UsageError(
                f"nothing says where documents end in {where}, and packed windows have whole ones",
                hint='an .idx of Megatron-LM beside the .bin does; documents = "joined" needs none',
                fields=["documents", "source"],
            )
        windows = _packed(ends.tobytes(), model.context, where)
    return Batches(
        tokens, model.context, size, seed, vocab=model.vocab, windows=windows, where=where
    )


@lru_cache(maxsize=2)  # of many documents it takes seconds
def _packed(ends: bytes, context: int, where: str) -> Packed:
    return Packed(np.frombuffer(ends, np.int64), context, where)


def _named(source: Source | float) -> str:
    """What errors call a source."""
    return "the corpus" if source is None or isinstance(source, float) else str(source)
