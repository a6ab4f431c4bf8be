"""The samples of a run, in an order that every rank computes itself."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from schedir.data.shuffle import shuffle_indices
from schedir.data.token_windows import ConcatenatedWindows, Tokens, TokenWindows
from schedir.errors import ModelError, UsageError
from schedir.models.language_model import IGNORE_INDEX

_DIGEST_BLOCK_BYTES, _MAX_DIGEST_BLOCKS = (
    2**16,
    2**12,
)  # bytes, and how many parts of as many make a digest


class Batches:
    """The windows of a token stream, in an order that depends on the seed and nothing else.

    Sample k of a run is the same however many are taken at once, by whatever number of replicas.
    An epoch has every window once; each epoch shuffles them anew, or, with seed None, none does.
    `tokens` is the stream, `context` the window's length, `batch_size` how many windows a step
    takes;
    `source` says, in errors, what the stream is.
    Raises UsageError if the stream is shorter than context + 1 or a number is out of range.
    """

    def __init__(
        self,
        tokens: Tokens,
        context: int,
        batch_size: int,
        seed: int | None = 0,
        *,
        vocab: int = 256,
        windows: TokenWindows | None = None,
        source: str = "",
    ) -> None:
        self.source = source or str(getattr(tokens, "filename", None) or "the corpus")
        for name, value, least in (
            ("context", context, 1), ("batch", batch_size, 1), ("seed", seed or 0, 0)
        ):  # fmt: skip
            if value < least:
                raise UsageError(f"{name} must be {least} or more, not {value}")
        self.tokens = np.asarray(tokens)
        self.windows = windows or ConcatenatedWindows(len(tokens), context, self.source)
        self.context, self.batch_size, self.seed, self.vocab = context, batch_size, seed, vocab

    def __len__(self) -> int:
        """How many windows an epoch has."""
        return len(self.windows)

    @cached_property
    def description(self) -> str:
        """How much there is to read, and a digest of it: of all bytes up to 256 MiB, of as many at
        even distances of more."""
        data, digest = self.tokens.view(np.uint8), hashlib.blake2b(digest_size=8)
        parts = -(-len(data) // _DIGEST_BLOCK_BYTES)
        for k in sorted(
            {
                k * parts // min(parts, _MAX_DIGEST_BLOCKS)
                for k in range(min(parts, _MAX_DIGEST_BLOCKS))
            }
        ):
            digest.update(data[k * _DIGEST_BLOCK_BYTES : (k + 1) * _DIGEST_BLOCK_BYTES].tobytes())
        said = f"{len(self.tokens)} tokens of {self.tokens.dtype} ({digest.hexdigest()})"
        return f"{said}, {self.windows.description}"

    def read_batch(self, first_sample: int, sample_count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of so many samples from the `first_sample` on, each int64 (count,
        context).

        A target that is IGNORE counts nowhere.  Raises UsageError if a token read is not below
        `vocab`.
        """
        if first_sample < 0 or sample_count < 1:
            raise UsageError(f"there are no {sample_count} samples from sample {first_sample} on")
        at, counts = self.windows.locate(self._order_windows(first_sample, sample_count))
        tokens = self.tokens[at].astype(np.int64)
        if tokens.max() >= self.vocab or tokens.min() < 0:
            row, column = np.argwhere((tokens >= self.vocab) | (tokens < 0))[0]
            raise UsageError(
                f"{self.source}: token {tokens[row, column]} at position {at[row, column]} is not "
                f"below the vocabulary size {self.vocab}",
                hint="model.vocab is at least one more than the largest token",
                fields=["vocab"],
            )
        inputs, targets = tokens[:, :-1], np.where(counts, tokens[:, 1:], IGNORE_INDEX)
        return torch.from_numpy(inputs.copy()), torch.from_numpy(targets)

    def _order_windows(
        self, first_sample: int, sample_count: int
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Which windows the samples are."""
        size, parts = len(self), []
        for epoch in range(first_sample // size, (first_sample + sample_count - 1) // size + 1):
            begin, end = (
                max(first_sample - epoch * size, 0),
                min(first_sample + sample_count - epoch * size, size),
            )
            at = np.arange(begin, end, dtype=np.uint64)
            parts.append(at if self.seed is None else shuffle_indices(at, size, self.seed, epoch))
        return np.concatenate(parts).astype(np.int64)

    def make_cursor(self, samples: int) -> dict[str, Any]:
        """Plain values that say, in a checkpoint, that so many samples were taken, and of what."""
        return {"samples": samples, "of": self.description, "seed": self.seed}

    def read_cursor(self, cursor: Mapping[str, Any]) -> int:
        """How many samples a cursor says were taken: the first of what comes next.

        Raises ModelError for one of other data or another order, where it would say nothing.
        """
        for name, ours in (("of", self.description), ("seed", self.seed)):
            if cursor.get(name) != ours:
                what = "data" if name == "of" else "data.seed"
                raise ModelError(
                    f"the checkpoint was trained on other samples: {what} was "
                    f"{cursor.get(name)}, and is {ours}",
                    fields=["source" if name == "of" else "seed"],
                )
        taken = cursor.get("samples")
        if type(taken) is not int or taken < 0:
            raise ModelError(f"the checkpoint says that {taken!r} samples were taken")
        return taken
