"""The batches of the training text and of the held-out text of a configuration."""

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
    """The data of a configuration. The data is read once, when it is first used.

    Args:
        config: The configuration of the run.

    Raises:
        UsageError: The data cannot be used. The error is raised when the data is first used.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    @cached_property
    def batches(self) -> Batches:
        """Return the training batches of all replicas, without the held-out text."""
        config, data = self.config, self.config.data
        size = config.pipeline.dp * config.pipeline.microbatches * data.microbatch_size
        return self._make_batches(
            self._documents.training_documents, size, data.seed, _describe_source(data.source)
        )

    @cached_property
    def held_out_batches(self) -> Batches | None:
        """Return the held-out text, one window per batch, or None if there is no held-out text.

        The windows keep the order of the text. With `packing = "best_fit"`, the windows have a
        fixed random order instead, because packing puts long documents first.
        """
        documents, validation = self._documents.held_out_documents, self.config.data.validation
        if documents is None:
            return None
        is_share = isinstance(validation, float)
        source = (
            f"the share {validation} of data.source for evaluation"
            if is_share
            else _describe_source(validation)
        )
        seed = 0 if self.config.data.packing == "best_fit" else None
        return self._make_batches(documents, 1, seed, source)

    @property
    def facts(self) -> dict[str, str]:
        """Return descriptions of the data, by name. All processes must have the same data."""
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
        is_packed, validation = data.packing == "best_fit", data.validation
        trained = read_documents(data.source, tokenizer, vocab, with_document_ends=is_packed)
        if not validation:
            return _CorpusSplit(trained, None, tokenizer)
        if isinstance(validation, float):
            return _CorpusSplit(*split_documents(trained, validation), tokenizer)
        for path in find_files(validation):
            if data.source is not None and any(
                path.samefile(file) for file in find_files(data.source)
            ):
                raise UsageError(
                    f"{path} is both in data.validation and in data.source: remove it from one of "
                    "them",
                    fields=["validation", "source"],
                )
        return _CorpusSplit(
            trained,
            read_documents(validation, tokenizer, vocab, with_document_ends=is_packed),
            tokenizer,
        )

    def _make_batches(
        self, documents: Documents, size: int, seed: int | None, source: str
    ) -> Batches:
        tokens, ends = documents
        model, windows = self.config.model, None
        if self.config.data.packing == "best_fit":
            if ends is None:
                raise UsageError(
                    f'packing = "best_fit" needs the ends of documents, and {source} has none',
                    hint='add the .idx of Megatron-LM next to the .bin, or packing = "concatenate"',
                    fields=["packing", "source"],
                )
            windows = PackedWindows(ends, model.context, source)
        return Batches(
            tokens, model.context, size, seed, vocab=model.vocab, windows=windows, source=source
        )


class _CorpusSplit(NamedTuple):
    training_documents: Documents
    held_out_documents: Documents | None
    tokenizer: Tokenizer


def _describe_source(source: Source | float) -> str:
    return "the corpus" if source is None or isinstance(source, float) else str(source)
