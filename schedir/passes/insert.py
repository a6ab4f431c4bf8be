"""Insert: put instructions before or after others, without coming between joined ones."""

from __future__ import annotations

import numpy as np

from schedir.ir.program import JOINED, Stream, Words


def insert(stream: Stream, before: tuple[Words, Words], after: tuple[Words, Words]) -> Stream:
    """`stream` with words put before and after given indices; each pair is (indices, words).

    An index inside a group stands for the whole group.
    """
    (early, put_early), (late, put_late) = before, after
    begins = np.flatnonzero((stream.words & JOINED) == 0)
    if len(begins) < len(stream):
        ends = np.append(begins[1:], len(stream)) - 1
        early = begins[np.searchsorted(begins, early, side="right") - 1]
        late = ends[np.searchsorted(begins, late, side="right") - 1]
    at = np.concatenate([late + 1, early])  # what comes after one stands before the next's
    return Stream(np.insert(stream.words, at, np.concatenate([put_late, put_early])))
