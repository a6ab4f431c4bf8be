"""Stands: where the host of a rank stands in its Stream."""

from __future__ import annotations

from schedir.dumps.box import AT, Box
from schedir.runtime.rank import Call


class Stands:
    """The words of a black box in which the dispatch loop notes what it has begun, and when.

    `at` is memory of the process alone, unless it is given that of a file.
    """

    calls: list[Call]

    def __init__(self) -> None:
        self.at: memoryview[int] = Box().words

    @property
    def position(self) -> int:
        """The instruction that was begun last, by its index in the Stream."""
        return min(self.at[AT], len(self.calls) - 1)
