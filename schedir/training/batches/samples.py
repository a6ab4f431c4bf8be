"""The samples of a run, in an order that every rank computes without communication."""

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

# A digest covers blocks of `_DIGEST_BLOCK_BYTES`, and at most `_MAX_DIGEST_BLOCKS` blocks: 256 MiB
# in total.
_DIGEST_BLOCK_BYTES = 2**16
_MAX_DIGEST_BLOCKS = 2**12


class Batches:
    """The windows of a token stream, in an order that depends only on the seed.

    Sample k of a run is the same for any batch size and number of replicas. An epoch has each
    window once. The order of the windows differs from epoch to epoch.

    Args:
        tokens: The token stream.
        context: The number of inputs of a window.
        batch_size: The number of windows that a step of all replicas reads.
        seed: The seed of the order. None means the order of the stream in each epoch.
        vocab: All tokens must be below this number.
        windows: The windows of the stream. By default, the stream is cut into equal windows.
        source: The name of the stream, for errors. By default, the name of its file.

    Raises:
        UsageError: The stream is shorter than context + 1, or an argument is out of range.
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
        for name, value, minimum in (
            ("context", context, 1), ("batch", batch_size, 1), ("seed", seed or 0, 0)
        ):  # fmt: skip
            if value < minimum:
                raise UsageError(f"{name} must be {minimum} or more, not {value}")
        self.tokens = np.asarray(tokens)
        self.windows = windows or ConcatenatedWindows(len(tokens), context, self.source)
        self.context = context
        self.batch_size = batch_size
        self.seed = seed
        self.vocab = vocab

    def __len__(self) -> int:
        """Return the number of windows in an epoch."""
        return len(self.windows)

    @cached_property
    def description(self) -> str:
        """Return a text with the size and a digest of the data, and with the kind of windows.

        If the data has at most 256 MiB, the digest covers all bytes. Otherwise it covers evenly
        spaced blocks with 256 MiB in total.
        """
        data = self.tokens.view(np.uint8)
        digest = hashlib.blake2b(digest_size=8)
        blocks = -(-len(data) // _DIGEST_BLOCK_BYTES)
        for k in sorted(
            {
                k * blocks // min(blocks, _MAX_DIGEST_BLOCKS)
                for k in range(min(blocks, _MAX_DIGEST_BLOCKS))
            }
        ):
            digest.update(data[k * _DIGEST_BLOCK_BYTES : (k + 1) * _DIGEST_BLOCK_BYTES].tobytes())
        text = f"{len(self.tokens)} tokens of {self.tokens.dtype} ({digest.hexdigest()})"
        return f"{text}, {self.windows.description}"

    def describe_repeats(self) -> str:
        """Return a note if one step reads the same window several times, or an empty string."""
        if self.batch_size <= len(self):
            return ""
        return (
            f"a step reads {self.batch_size:,} windows, but {self.source} has {len(self):,}: each "
            "step trains on the same windows several times"
        )

    def read_batch(self, first_sample: int, sample_count: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and the targets of consecutive samples.

        Args:
            first_sample: The index of the first sample in the run, from 0.
            sample_count: The number of samples.

        Returns:
            Inputs and targets, each int64 (sample_count, context). The loss ignores targets that
            are `IGNORE_INDEX`.

        Raises:
            UsageError: A token is negative or not below `vocab`, or an argument is out of range.
        """
        if first_sample < 0 or sample_count < 1:
            raise UsageError(
                f"cannot read {sample_count} samples from sample {first_sample}: the "
                "number must be 1 or more, and the first sample 0 or more"
            )
        starts, counts = self.windows.locate(self._order_windows(first_sample, sample_count))
        tokens = self.tokens[starts].astype(np.int64)
        if tokens.max() >= self.vocab or tokens.min() < 0:
            row, column = np.argwhere((tokens >= self.vocab) | (tokens < 0))[0]
            raise UsageError(
                f"{self.source}: token {tokens[row, column]} at position {starts[row, column]} "
                f"is not below the vocabulary size {self.vocab}",
                hint="set model.vocab to more than the largest token",
                fields=["vocab"],
            )
        inputs, targets = tokens[:, :-1], np.where(counts, tokens[:, 1:], IGNORE_INDEX)
        return torch.from_numpy(inputs.copy()), torch.from_numpy(targets)

    def _order_windows(
        self, first_sample: int, sample_count: int
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the indices of the windows of consecutive samples."""
        size, parts = len(self), []
        for epoch in range(first_sample // size, (first_sample + sample_count - 1) // size + 1):
            begin = max(first_sample - epoch * size, 0)
            end = min(first_sample + sample_count - epoch * size, size)
            positions = np.arange(begin, end, dtype=np.uint64)
            parts.append(
                positions
                if self.seed is None
                else shuffle_indices(positions, size, self.seed, epoch)
            )
        return np.concatenate(parts).astype(np.int64)

    def make_cursor(self, samples: int) -> dict[str, Any]:
        """Return the number of used samples, a description of the data, and the seed.

        The dictionary is a part of a checkpoint.

        Args:
            samples: The number of samples that were used.

        Returns:
            A dictionary of plain values.
        """
        return {"samples": samples, "of": self.description, "seed": self.seed}

    def read_cursor(self, cursor: Mapping[str, Any]) -> int:
        """Return the number of used samples in a cursor. It is the index of the next sample.

        Args:
            cursor: The result of `make_cursor`.

        Raises:
            ModelError: The cursor has different data or a different seed than these batches, or the
                cursor is invalid.
        """
        for name, own_value in (("of", self.description), ("seed", self.seed)):
            if cursor.get(name) != own_value:
                setting = "data" if name == "of" else "data.seed"
                raise ModelError(
                    f"the checkpoint was trained on other samples: {setting} was "
                    f"{cursor.get(name)}, and is now {own_value}",
                    fields=["source" if name == "of" else "seed"],
                )
        samples = cursor.get("samples")
        if type(samples) is not int or samples < 0:
            raise ModelError(f"the checkpoint has an invalid number of samples: {samples!r}")
        return samples
