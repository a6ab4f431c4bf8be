"""Results of a search: the schedule that it found, and the lower bound."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from schedir.analysis.numba_jit import MIN_COMPILE_SECONDS, MIN_LOAD_SECONDS, NumbaStatus
from schedir.extras import install_command
from schedir.ir.program import Program
from schedir.predict.timeline import Timeline

StopReason = Literal["proved", "time", "no better", "interrupted"]


class LowerBound(NamedTuple):
    """No schedule takes less than `value`, in the unit of the costs; `explanation` says it in
    words."""

    value: float
    explanation: str


class SearchStep(NamedTuple):
    """A shorter schedule, when it was found, in seconds from the beginning, and by what."""

    seconds: float
    method: str
    span: float


@dataclass(frozen=True)
class SearchResult:
    """The shortest schedule that a search has found, and how short any can be.

    `program` is compiled with the costs of the search and checked, `timeline` its prediction, and
    `span` what was to be short of that.  No schedule within the limit takes less than `bound`, for
    the reason that `explanation` says.  `improvements` has each better schedule in turn, and
    `num_evaluated` is how many were looked at.  `stop_reason` says why the search ended: with a
    proof that nothing is shorter, with its time, with nothing better to be found, or because
    somebody interrupted it.  `numba` says whether the search ran loops that numba compiled, and if
    not, why: a search without them tries far fewer schedules in the same time.
    """

    program: Program
    timeline: Timeline
    span: float
    bound: float
    explanation: str
    improvements: tuple[SearchStep, ...]
    num_evaluated: int
    seed: int
    stop_reason: StopReason
    numba: NumbaStatus = "not needed"

    @property
    def gap_to_bound(self) -> float:
        """By how much of the bound the schedule is longer than that, 0 where it is proved."""
        return 0.0 if self.stop_reason == "proved" else max(self.span / self.bound - 1, 0.0)


def combine_numba(results: Iterable[NumbaStatus]) -> NumbaStatus:
    """Return what to report of several searches: that numba was missing if any search lacked it."""
    found = set(results)
    order: tuple[NumbaStatus, ...] = ("not installed", "not usable", "no time", "used")
    return next((numba for numba in order if numba in found), "not needed")


def describe_numba(numba: NumbaStatus) -> str:
    """Return how a search used numba, as the end of a sentence.

    >>> describe_numba("no time")
    'without numba, as its first use needs 8 s in one search, and a later use 0.4 s'
    """
    return {
        "used": "with numba",
        "not needed": "without numba, which was not needed",
        "not installed": f"without numba, which is not installed ({install_command('numba')})",
        "not usable": "without numba, which is switched off or cannot be imported",
        "no time": f"without numba, as its first use needs {MIN_COMPILE_SECONDS:g} s in one "
        "search, and a "
        f"later use {MIN_LOAD_SECONDS:g} s",
    }[numba]
