"""Find the built-in schedule that has the compute order of a program, or a similar order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.compiler.relower import extract_compute
from schedir.errors import SchedirError, require_type
from schedir.ir.isa.instructions import RECOMPUTE
from schedir.ir.program import Program
from schedir.ir.stream import Stream
from schedir.schedules import get_built_in_schedules
from schedir.schedules.schedule_algebra import get_weight_delay_mark, has_free_v
from schedir.schedules.schedule_expansion import expand_schedule


class Recognition(NamedTuple):
    """The built-in schedule whose compute order equals the order of a program, or begins like it.

    Attributes:
        schedule: The name of the schedule, or "" if no built-in schedule begins like the program.
        matching: The number of compute instructions before the first difference of each rank,
            summed over the ranks.
        total: The number of compute instructions of the program.
        rank: The rank of the first difference, or -1 if there is none.
        compute_index: The index of this difference among the compute instructions of its rank, or
            -1.
        actual: The instruction of the program at this index, or "the end".
        expected: The instruction of the schedule at this index, or "the end".
    """

    schedule: str
    matching: int
    total: int
    rank: int = -1
    compute_index: int = -1
    actual: str = ""
    expected: str = ""

    @property
    def is_exact(self) -> bool:
        """True if the program has the same compute as the schedule, in the same order."""
        return bool(self.schedule) and self.rank < 0

    def __str__(self) -> str:
        if not self.schedule:
            return "no built-in schedule begins like this"
        if self.is_exact:
            return f"this is {self.schedule}"
        return (
            f"this is {self.schedule} until compute #{self.compute_index} of rank {self.rank}, "
            f"which is {self.actual} instead of {self.expected}; {self.matching} of {self.total} "
            "compute instructions come before the first difference of their rank"
        )


def recognize(program: Program) -> Recognition:
    """Find the built-in schedule with the same compute order as a program, or the most similar one.

    For each rank, the function counts the compute instructions before the first difference. The
    most similar schedule has the largest sum of these numbers. R instructions, messages and
    reductions are not compared.

    Args:
        program: A lowered program or a draft.

    Returns:
        The schedule, and the first difference. If several schedules are equally similar, one with
        the name of the program is preferred. The first difference is the one with the smallest
        `compute_index`. If several ranks have such a difference, the function returns the lowest of
        these ranks.

    Raises:
        UsageError: `program` is no Program.

    Example:
        >>> from schedir import compile, recognize
        >>> print(recognize(compile("zb_h1", ranks=4, microbatches=8)))
        this is zb_h1
        >>> from schedir import B, F
        >>> def mine(rank, ranks, microbatches):
        ...     warmup = min(ranks - rank, microbatches)
        ...     return warmup * F + (microbatches - warmup) * (B + F) + warmup * B
        >>> print(recognize(compile(mine, ranks=4, microbatches=8)))
        this is one_f_one_b
    """
    require_type(program, "program", Program, "schedir.compile(schedule, shape)")
    program_streams = [_drop_recomputes(stream) for stream in extract_compute(program).streams]
    total = sum(map(len, program_streams))
    best = Recognition("", 0, total)
    has_delay = bool(np.any(program.shape.weight_delay))
    for name, schedule in sorted(
        get_built_in_schedules().items(),
        # If the program delays weights, schedules that delay weights come first. Otherwise, all
        # other schedules come first. With one stage per rank, some schedules with a parameter v
        # equal a schedule without v. The schedule without v comes first. Then the schedule with
        # the name of the program comes first: it is most often the right one.
        key=lambda item: (
            has_delay != (get_weight_delay_mark(item[1]) is not None),
            has_free_v(item[1]),
            item[0] != program.name,
        ),
    ):
        try:
            draft = expand_schedule(schedule, program.shape)
        except SchedirError:  # the schedule does not support this shape
            continue
        recognition = _compare(
            name, program_streams, [_drop_recomputes(stream) for stream in draft.streams], total
        )
        if recognition.is_exact:
            return recognition
        if recognition.matching > best.matching:
            best = recognition
    return best


def _drop_recomputes(stream: Stream) -> Stream:
    return Stream(stream.words[stream.op != RECOMPUTE])


def _compare(
    name: str, program_streams: list[Stream], schedule_streams: list[Stream], total: int
) -> Recognition:
    common_counts = [
        _count_common(a.words, b.words)
        for a, b in zip(program_streams, schedule_streams, strict=True)
    ]
    differences = [
        (count, rank)
        for rank, count in enumerate(common_counts)
        if count < max(len(program_streams[rank]), len(schedule_streams[rank]))
    ]
    if not differences:
        return Recognition(name, total, total)
    compute_index, rank = min(differences)
    actual, expected = (
        str(stream[compute_index]) if compute_index < len(stream) else "the end"
        for stream in (program_streams[rank], schedule_streams[rank])
    )
    return Recognition(name, sum(common_counts), total, rank, compute_index, actual, expected)


def _count_common(actual: NDArray[np.int64], expected: NDArray[np.int64]) -> int:
    """Return the number of equal elements before the first difference."""
    length = min(len(actual), len(expected))
    differences = np.flatnonzero(actual[:length] != expected[:length])
    return int(differences[0]) if len(differences) else length
