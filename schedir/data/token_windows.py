"""Cut a stream of tokens into training windows."""

from __future__ import annotations

from bisect import bisect_left, insort
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError

Tokens = NDArray[np.integer[Any]]  # uint8 where bytes are the tokens


class WindowBatch(NamedTuple):
    """Where the tokens of some windows stand in the stream, int64 (n, context + 1), and whether
    each but the first counts as the target of the one before it, bool (n, context)."""

    positions: NDArray[np.int64]
    is_target: NDArray[np.bool_]


class TokenWindows(Protocol):
    """The windows of a stream, by number."""

    @property
    def description(self) -> str:
        """How a stream is cut, in words."""
        ...

    def __len__(self) -> int: ...

    def locate(self, indices: NDArray[np.int64]) -> WindowBatch:
        """Where windows stand."""
        ...


class ConcatenatedWindows:
    """A stream cut at even distances, whatever documents it has: each token but the first is a
    target once, and what is left at the end, shorter than a window, is none.

    Raises UsageError for a stream that is shorter than a window.

    >>> ConcatenatedWindows(10, 4).locate(np.array([1])).positions.tolist()
    [[4, 5, 6, 7, 8]]
    """

    def __init__(self, tokens: int, context: int, source: str = "the corpus") -> None:
        if tokens < context + 1:
            raise UsageError(
                f"{source} has {tokens} tokens, fewer than context + 1 = {context + 1}",
                fields=["context"],
            )
        self.context, self.window_count = context, (tokens - 1) // context

    @property
    def description(self) -> str:
        return f"in windows of {self.context}"

    def __len__(self) -> int:
        return self.window_count

    def locate(self, indices: NDArray[np.int64]) -> WindowBatch:
        at = indices[:, None] * self.context + np.arange(self.context + 1)
        return WindowBatch(at, np.ones((len(indices), self.context), bool))


class PackedWindows:
    """Whole documents of a stream, which end before `ends`, put into as few windows as best-fit
    decreasing takes (Ding et al., Fewer Truncations Improve Language Modeling, arXiv 2404.10830,
    section 3.2): from the longest on, each goes where the least room is left that is enough.

    A document longer than a window begins with windows of its own; what follows begins with the
    last token before it, so that each token of a document but its first is a target once.  The
    first token of a next document is no target, nor is what fills up a window.  Attention is not
    cut: it sees the documents before in the window.

    Raises UsageError for documents that have no targets.
    """

    def __init__(self, ends: NDArray[np.int64], context: int, source: str = "the corpus") -> None:
        self.context, self.ends = context, ends
        begins, lengths = _split_documents(ends, context)
        if not len(begins):
            raise UsageError(f"{source} has no document of two tokens or more", fields=["source"])
        order = np.argsort(-lengths, kind="stable")
        of = np.array(_pack_best_fit(lengths[order].tolist(), context + 1), np.int64)
        order = order[np.argsort(of, kind="stable")]
        self.begins, self.lengths = begins[order], lengths[order]
        self.first_segments = np.concatenate([[0], np.cumsum(np.bincount(of))])

    @cached_property
    def description(self) -> str:
        digest = blake2b(self.ends.astype("<i8").tobytes(), digest_size=8).hexdigest()
        return (
            f"{len(self.ends)} documents ({digest}) packed into {len(self)} windows of "
            f"{self.context}, {100 * self.fill_ratio:.1f} % full"
        )

    @property
    def fill_ratio(self) -> float:
        """Which share of the windows is tokens, and no padding."""
        return float(self.lengths.sum() / (len(self) * (self.context + 1)))

    def __len__(self) -> int:
        return len(self.first_segments) - 1

    def locate(self, indices: NDArray[np.int64]) -> WindowBatch:
        at = np.empty((len(indices), self.context + 1), np.int64)
        counts = np.zeros((len(indices), self.context), bool)
        for row, number in enumerate(indices):
            filled = 0
            for k in range(self.first_segments[number], self.first_segments[number + 1]):
                begin, length = self.begins[k], self.lengths[k]
                at[row, filled : filled + length] = np.arange(begin, begin + length)
                counts[row, filled : filled + length - 1] = True
                filled += length
            at[row, filled:] = at[row, filled - 1]
        return WindowBatch(at, counts)


def _split_documents(
    ends: NDArray[np.int64], context: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each piece of a document begins, and how many tokens it has: at most context + 1."""
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(ends) else ends
    targets = ends - begins - 1
    pieces = np.maximum(-(-targets // context), 0)  # none of a single token
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    at = np.repeat(begins, pieces) + number * context
    return at, np.minimum(np.repeat(ends, pieces) - at, context + 1)


def _pack_best_fit(lengths: list[int], size: int) -> list[int]:
    """In which window of that size each length goes; the lengths descend."""
    rooms: dict[int, list[int]] = {}  # by room that is left, the windows
    left: list[int] = []  # the rooms, ascending
    found, windows = [], 0
    for length in lengths:
        k = bisect_left(left, length)
        if k == len(left):
            window, room = windows, size
            windows += 1
        else:
            room = left[k]
            window = rooms[room].pop()
            if not rooms[room]:
                del rooms[room], left[k]
        found.append(window)
        if (room := room - length) > 1:
            if room not in rooms:
                rooms[room] = []
                insort(left, room)
            rooms[room].append(window)
    return found
