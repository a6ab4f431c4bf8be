"""Find where two runs of one program spend different times."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError
from schedir.ir.isa.instructions import INSTRUCTIONS, Lane, Scope
from schedir.predict.bubble_causes import IdleCause, idleness, sum_by_cause
from schedir.predict.timeline import Timeline


class TimeDifference(NamedTuple):
    """The time that a rank spends on one activity in two runs, over all microbatches.

    Attributes:
        rank: The rank.
        activity: Compute, such as "F 2" for F of stage 2, or a cause of idle time, such as "idle:
            message".
        first_time: The time in the first run.
        second_time: The time in the second run.
    """

    rank: int
    activity: str
    first_time: float
    second_time: float

    @property
    def increase(self) -> float:
        """The increase of the time. The increases of a rank add up to the increase of the span."""
        return self.second_time - self.first_time


def compare_timelines(first: Timeline, second: Timeline) -> list[TimeDifference]:
    """Compare the time that each rank spends on each activity in two runs.

    Args:
        first: A run.
        second: A run of the same program.

    Returns:
        One entry for each rank and activity, sorted by the absolute difference, the largest first.

    Raises:
        UsageError: The runs are of different programs, or their times have different units.
    """
    if first.program.digest != second.program.digest:
        raise UsageError("the two timelines are of different programs")
    if first.unit != second.unit:
        units = (t.unit or "the costs' units" for t in (first, second))
        raise UsageError(
            f"the times of the two timelines have different units: {' and '.join(units)}"
        )
    tables = [_sum_times(first), _sum_times(second)]
    differences = (
        TimeDifference(rank, work_key, *(table.get((rank, work_key), 0.0) for table in tables))
        for rank, work_key in dict.fromkeys([*tables[0], *tables[1]])
    )
    return sorted(differences, key=lambda difference: -abs(difference.increase))


def _sum_times(timeline: Timeline) -> dict[tuple[int, str], float]:
    """Return the time of each (rank, activity). The times of a rank add up to the span."""
    spans = timeline.spans
    work = spans[(spans["lane"] == Lane.COMPUTE) & ~timeline.is_second_of_pair]
    found: dict[tuple[int, str], float] = {}
    kinds, kind_of_span = np.unique(work[["rank", "op", "stage"]], return_inverse=True)
    total = np.bincount(kind_of_span, work["end"] - work["start"], len(kinds))
    for (rank, op, stage), seconds in zip(kinds.tolist(), total.tolist(), strict=True):
        row = INSTRUCTIONS[op]
        found[rank, row.text if row.scope is Scope.RANK else f"{row.text} {stage}"] = seconds
    idle: NDArray[np.float64] = sum_by_cause(idleness(timeline), timeline.ranks)
    for rank, cause in np.argwhere(idle).tolist():
        found[rank, f"idle: {IdleCause(cause).name.lower()}"] = float(idle[rank, cause])
    return found
