"""Insert: put instructions before or after others, without coming between joined ones."""

from __future__ import annotations

import numpy as np

from schedir.program import JOINED, Stream, Words


def insert(stream: Stream, before: tuple[Words, Words], after: tuple[Words, Words]) -> Stream:
    """`stream` with words put before and after given indices; each pair is (indices, words).

    An index inside a group stands for the whole group.
    """
    words = stream.words
    begins = np.flatnonzero((words & JOINED) == 0)
    ends = np.append(begins[1:], len(words))
    group = np.searchsorted(begins, np.concatenate([before[0], after[0]]), side="right") - 1
    n = len(before[0])
    key = np.concatenate([begins[group[:n]] * 3 - 1, (ends[group[n:]] - 1) * 3 + 1])
    order = np.argsort(np.concatenate([np.arange(len(words)) * 3, key]), kind="stable")
    return Stream(np.concatenate([words, before[1], after[1]])[order])
