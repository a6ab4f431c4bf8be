"""Which cases of a test are tried: a few that between them take every way, or all there are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

ALL = bool(os.environ.get("ALL_CASES"))


def cases(usual: Sequence[T], more: Sequence[T]) -> list[T]:
    """Those that are always tried, and with ALL_CASES=1 those, too, that take the same ways."""
    return [*usual, *(more if ALL else ())]
