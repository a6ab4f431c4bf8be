"""Choose the tests and cases of a run: those that cover all code paths, or with ALL_CASES=1 all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any, Final, TypeVar

import pytest

T = TypeVar("T")

ALL = bool(os.environ.get("ALL_CASES"))

# Use it for a slow test if faster ones fail for the same mistakes.
campaign: Final = pytest.mark.skipif(not ALL, reason="only `make campaign` runs it")


def cases(usual: Sequence[T], more: Sequence[T]) -> list[T]:
    """Return the cases to try: the first ones always, the others only with ALL_CASES=1."""
    return [*usual, *(more if ALL else ())]


def each_value(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations of values that have each value of each factor at least once.

    Use it if no error depends on two factors, or if other tests have their pairs. With ALL_CASES=1,
    return all combinations. A tuple is the value of several parameters.

    >>> each_value("abc", "12") if not ALL else [("a", "1"), ("b", "2"), ("c", "1")]
    [('a', '1'), ('b', '2'), ('c', '1')]
    """
    if ALL:
        return [_join_values(values) for values in product(*factors)]
    number = max(map(len, factors))
    return [_join_values([f[k % len(f)] for f in factors]) for k in range(number)]


def pairs(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations of values that have each pair of values of two factors at least once.

    With ALL_CASES=1, return all combinations. A tuple is the value of several parameters.

    >>> len(pairs("abcd", "xyz", "12")) if not ALL else 12
    12
    """
    every = [*product(*map(range, map(len, factors)))]
    if not ALL:
        left = {pair for one in every for pair in combinations(enumerate(one), 2)}
        chosen = []
        while left:
            best = max(every, key=lambda one: len(left & {*combinations(enumerate(one), 2)}))
            left -= {*combinations(enumerate(best), 2)}
            chosen.append(best)
        every = sorted(chosen)
    found = [[values[k] for values, k in zip(factors, one, strict=True)] for one in every]
    return [_join_values(values) for values in found]


def _join_values(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the values as one tuple, with the elements of each value that is a tuple."""
    return tuple(x for value in values for x in (value if isinstance(value, tuple) else (value,)))
