"""Divide a stream of tokens into training windows."""

from __future__ import annotations

from bisect import bisect_left, insort
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError

Tokens = NDArray[np.integer[Any]]  # uint8 if each byte is a token


# The position of each token of some windows in the stream (n, context + 1), and whether each token
# except the first is a target of the token before it (n, context).
WindowBatch = tuple[NDArray[np.int64], NDArray[np.bool_]]


class ConcatenatedWindows:
    """Windows at equal distances in a stream, across documents.

    The tokens at the end of the stream that do not fill a window are left out. Each of the other
    tokens, except the first, is a target once.

    Args:
        tokens: The number of tokens in the stream.
        context: The number of targets in a window. A window has one token more.
        source: The name of the source, for errors.

    Raises:
        UsageError: The stream is shorter than a window.

    Example:
        >>> ConcatenatedWindows(10, 4).locate(np.array([1]))[0].tolist()
        [[4, 5, 6, 7, 8]]
    """

    def __init__(self, tokens: int, context: int, source: str = "the corpus") -> None:
        if tokens < context + 1:
            raise UsageError(
                f"{source} has {tokens} tokens, fewer than context + 1 = {context + 1}",
                fields=["context"],
            )
        self.context = context
        self.window_count = (tokens - 1) // context

    @property
    def description(self) -> str:
        """A text that describes the windows."""
        return f"in windows of {self.context}"

    def __len__(self) -> int:
        return self.window_count

    def locate(self, indices: NDArray[np.int64]) -> WindowBatch:
        """Return the positions and the targets of windows.

        Args:
            indices: The indices of the windows. Shape (n,).
        """
        positions = indices[:, None] * self.context + np.arange(self.context + 1)
        return positions, np.ones((len(indices), self.context), bool)


class PackedWindows:
    """Complete documents of a stream, packed into few windows by best-fit decreasing.

    From the longest to the shortest, each document goes into the fullest window in which it fits. A
    document longer than a window is divided. Each part except the last fills a window. Each part
    except the first begins with the last token of the previous part. So each token of a document
    except its first is a target once.

    The first token of each document is not a target, and neither is padding. Attention is not
    masked: a token also attends to the earlier documents of its window.

    Args:
        ends: The ascending positions after the last token of each document. Shape (documents,).
        context: The number of targets in a window. A window has one token more.
        source: The name of the source, for errors.

    Raises:
        UsageError: No document has two tokens or more.

    References:
        Ding et al., Fewer Truncations Improve Language Modeling, arXiv 2404.10830, section 3.2.
    """

    def __init__(self, ends: NDArray[np.int64], context: int, source: str = "the corpus") -> None:
        self.context = context
        self.ends = ends
        begins, lengths = _split_documents(ends, context)
        if not len(begins):
            raise UsageError(f"{source} has no document of two tokens or more", fields=["source"])
        order = np.argsort(-lengths, kind="stable")
        window_of = np.array(_pack_best_fit(lengths[order].tolist(), context + 1), np.int64)
        order = order[np.argsort(window_of, kind="stable")]
        self.begins = begins[order]
        self.lengths = lengths[order]
        self.first_segments = np.concatenate([[0], np.cumsum(np.bincount(window_of))])

    @cached_property
    def description(self) -> str:
        """A text that describes the windows, with a digest of the ends of documents."""
        digest = blake2b(self.ends.astype("<i8").tobytes(), digest_size=8).hexdigest()
        return (
            f"{len(self.ends)} documents ({digest}) packed into {len(self)} windows of "
            f"{self.context}, {100 * self.fill_ratio:.1f} % full"
        )

    @property
    def fill_ratio(self) -> float:
        """The share of all positions in windows that are not padding."""
        return float(self.lengths.sum() / (len(self) * (self.context + 1)))

    def __len__(self) -> int:
        return len(self.first_segments) - 1

    def locate(self, indices: NDArray[np.int64]) -> WindowBatch:
        """Return the positions and the targets of windows.

        Args:
            indices: The indices of the windows. Shape (n,).
        """
        positions = np.empty((len(indices), self.context + 1), np.int64)
        is_target = np.zeros((len(indices), self.context), bool)
        for row, number in enumerate(indices):
            offset = 0
            for k in range(self.first_segments[number], self.first_segments[number + 1]):
                begin, length = self.begins[k], self.lengths[k]
                positions[row, offset : offset + length] = np.arange(begin, begin + length)
                is_target[row, offset : offset + length - 1] = True
                offset += length
            positions[row, offset:] = positions[row, offset - 1]
        return positions, is_target


TokenWindows = ConcatenatedWindows | PackedWindows


def _split_documents(
    ends: NDArray[np.int64], context: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the start and the length of each document part of at most context + 1 tokens."""
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(ends) else ends
    targets = ends - begins - 1
    num_parts = np.maximum(-(-targets // context), 0)  # a document of one token has no target
    number = np.arange(num_parts.sum()) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    part_begins = np.repeat(begins, num_parts) + number * context
    return part_begins, np.minimum(np.repeat(ends, num_parts) - part_begins, context + 1)


def _pack_best_fit(lengths: list[int], size: int) -> list[int]:
    """Return the index of the window of each document part.

    `lengths` has the lengths of the parts in descending order. A window has `size` tokens.
    """
    windows_by_space: dict[int, list[int]] = {}  # remaining space in tokens -> windows
    spaces: list[int] = []  # the keys of the dictionary, ascending
    window_of, windows = [], 0
    for length in lengths:
        k = bisect_left(spaces, length)
        if k == len(spaces):
            window, space = windows, size
            windows += 1
        else:
            space = spaces[k]
            window = windows_by_space[space].pop()
            if not windows_by_space[space]:
                del windows_by_space[space], spaces[k]
        window_of.append(window)
        if (space := space - length) > 1:
            if space not in windows_by_space:
                windows_by_space[space] = []
                insort(spaces, space)
            windows_by_space[space].append(window)
    return window_of
