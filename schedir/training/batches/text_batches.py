"""Batches of the training text and of the held-out text of a configuration."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from schedir.data.corpus import Source, get_tokenizer, read_documents, split_documents
from schedir.data.megatron_indexed_dataset import Documents
from schedir.data.token_files import find_files
from schedir.data.token_windows import PackedWindows
from schedir.data.tokenizer import Tokenizer
from schedir.errors import UsageError
from schedir.training.batches.samples import Batches
from schedir.training.config.run_config import Config
from schedir.training.resume_checks import DATA_FACT


class Corpus:
    """The data of a configuration, read once.  Raises UsageError for data that cannot be used, when
    they are asked for."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @cached_property
    def batches(self) -> Batches:
        """What all replicas together train on, without what is held out."""
        config, data = self.config, self.config.data
        size = config.pipeline.dp * config.pipeline.microbatches * data.microbatch_size
        return self._make_batches(
            self._documents.training_documents, size, data.seed, _describe_source(data.source)
        )

    @cached_property
    def held_out_batches(self) -> Batches | None:
        """What is never trained on, if the configuration holds anything out: all its windows, in
        their own order; packed ones in one that is random and always the same, as packing begins
        with long documents."""
        kept, share = self._documents.held_out_documents, self.config.data.validation
        if kept is None:
            return None
        is_share = isinstance(share, float)
        where = (
            f"what validation {share} leaves for evaluation"
            if is_share
            else _describe_source(share)
        )
        seed = 0 if self.config.data.packing == "best_fit" else None
        return self._make_batches(kept, 1, seed, where)

    @property
    def facts(self) -> dict[str, str]:
        """What processes must have the same of."""
        return {
            "the tokenizer": self._documents.tokenizer.digest,
            DATA_FACT: self.batches.description,
            "the held-out data": self.held_out_batches.description
            if self.held_out_batches
            else "none",
        }

    @cached_property
    def _documents(self) -> _CorpusSplit:
        data, vocab = self.config.data, self.config.model.vocab
        tokenizer = get_tokenizer(data.tokenizer, vocab, data.end_of_document)
        whole, share = data.packing == "best_fit", data.validation
        trained = read_documents(data.source, tokenizer, vocab, with_document_ends=whole)
        if not share:
            return _CorpusSplit(trained, None, tokenizer)
        if isinstance(share, float):
            return _CorpusSplit(*split_documents(trained, share), tokenizer)
        for path in find_files(share):
            if data.source is not None and any(
                path.samefile(one) for one in find_files(data.source)
            ):
                raise UsageError(
                    f"{path} is in data.validation and in data.source",
                    fields=["validation", "source"],
                )
        return _CorpusSplit(
            trained, read_documents(share, tokenizer, vocab, with_document_ends=whole), tokenizer
        )

    def _make_batches(
        self, documents: Documents, size: int, seed: int | None, source: str
    ) -> Batches:
        tokens, ends = documents
        model, windows = self.config.model, None
        if self.config.data.packing == "best_fit":
            if ends is None:
                raise UsageError(
                    f"nothing says where documents end in {source}, and packed windows have whole "
                    "ones",
                    hint='an .idx of Megatron-LM beside the .bin does; packing = "concatenate" '
                    "needs none",
                    fields=["packing", "source"],
                )
            windows = PackedWindows(ends, model.context, source)
        return Batches(
            tokens, model.context, size, seed, vocab=model.vocab, windows=windows, source=source
        )


class _CorpusSplit(NamedTuple):
    """What is trained on, what is held out, and the tokenizer of both."""

    training_documents: Documents
    held_out_documents: Documents | None
    tokenizer: Tokenizer


def _describe_source(source: Source | float) -> str:
    """What errors call a source."""
    return "the corpus" if source is None or isinstance(source, float) else str(source)
