"""Define the results of a search: the schedule that it found, and the lower bound."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from schedir.analysis.numba_jit import MIN_COMPILE_SECONDS, MIN_LOAD_SECONDS, NumbaStatus
from schedir.extras import install_command
from schedir.ir.notebook_repr import render_html
from schedir.ir.program import Program
from schedir.predict.timeline import Timeline

StopReason = Literal["proved", "limit", "no better", "interrupted"]


class LowerBound(NamedTuple):
    """A lower bound on the length of every schedule, with its proof.

    Attributes:
        value: The time, in the unit of the costs.
        explanation: The proof in words.
    """

    value: float
    explanation: str


class SearchStep(NamedTuple):
    """A shorter schedule that a search found.

    Attributes:
        seconds: The time since the start of the search.
        method: The method that found the schedule, or the name of an initial schedule.
        span: The time that the search minimizes, in the unit of the costs. See `SearchResult`.
    """

    seconds: float
    method: str
    span: float


@dataclass(frozen=True)
class SearchResult:
    """The shortest schedule that a search found, with a lower bound.

    Attributes:
        program: The compiled and checked program.
        timeline: The prediction of the program.
        span: The time that the search minimizes: the span of the schedule, or the longest active
            span of a rank.
        bound: The lower bound on the length of every schedule within the memory limit.
        explanation: The proof of the bound in words.
        improvements: Each schedule that was shorter than all earlier schedules, in the order of the
            search.
        num_evaluated: The number of orders that were evaluated.
        seed: The random seed of the search.
        stop_reason: The reason why the search ended. "proved": no schedule is shorter. "limit": the
            time limit or the number of evaluations is reached. "no better": the search no longer
            found shorter schedules. "interrupted": Ctrl-C.
        numba: "used" if the search ran loops that Numba compiled, else the reason why it ran
            without them. Without compiled loops, a search tries far fewer schedules in the same
            time.
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

    def _repr_html_(self) -> str:
        return render_html(self)

    @property
    def gap_to_bound(self) -> float:
        """The relative gap, span / bound - 1. 0 if the search proved the schedule shortest."""
        return 0.0 if self.stop_reason == "proved" else max(self.span / self.bound - 1, 0.0)


def combine_numba(results: Iterable[NumbaStatus]) -> NumbaStatus:
    """Return one Numba status for several searches.

    If a search needed Numba but ran without it, the result is the reason.

    Args:
        results: The status of each search.
    """
    statuses = set(results)
    order: tuple[NumbaStatus, ...] = ("not installed", "not usable", "no time", "used")
    return next((numba for numba in order if numba in statuses), "not needed")


def describe_numba(numba: NumbaStatus) -> str:
    """Return how a search used Numba, as the end of a sentence.

    Args:
        numba: The status of the search.

    Example:
        >>> describe_numba("not needed")
        'without numba, which was not needed'
    """
    return {
        "used": "with numba",
        "not needed": "without numba, which was not needed",
        "not installed": f"without numba, which is not installed ({install_command('numba')})",
        "not usable": "without numba, which is disabled or cannot be imported",
        "no time": "without numba, because its start needs a longer time limit: at least "
        f"{MIN_COMPILE_SECONDS:g} s at the first use, and {MIN_LOAD_SECONDS:g} s later",
    }[numba]
