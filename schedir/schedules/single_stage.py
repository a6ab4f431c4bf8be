"""One stage per rank with full backwards: GPipe, 1F1B and forward-only."""

from __future__ import annotations

from schedir.schedules.schedule_algebra import EMPTY, B, F, RankSchedule


def gpipe(r: int, P: int, m: int) -> RankSchedule:
    """Run GPipe: all forwards, then all backwards.

    - Idle time of each rank: (P-1)(F+B).
    - In flight: m activations on each rank.

    Args:
        r: Rank, 0 to P - 1.
        P: Number of ranks.
        m: Number of microbatches.

    Returns:
        The rank schedule of rank `r`.

    References:
        Huang et al., arXiv 1811.06965.

    Example:
        >>> from schedir.schedules import gpipe
        >>> from schedir.viz.doctest_chart import draw_schedule
        >>> print(draw_schedule(gpipe, ranks=3, microbatches=4))
        rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 -- B1 -- B2 -- B3 --
        rank 1  .. F0 F1 F2 F3 .. .. .. B0 -- B1 -- B2 -- B3 -- .. ..
        rank 2  .. .. F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .. .. .. ..
    """
    return m * F + m * B


def one_f_one_b(r: int, P: int, m: int) -> RankSchedule:
    """Run 1F1B: a warmup of forwards, then one forward and one backward alternately.

    - Idle time of each rank: (P-1)(F+B), as for GPipe.
    - Idle time of rank r in its active span: (P-1-r)(F+B).
    - In flight: min(P-r, m) activations on rank r.

    Args:
        r: Rank, 0 to P - 1.
        P: Number of ranks.
        m: Number of microbatches.

    Returns:
        The rank schedule of rank `r`.

    References:
        PipeDream-flush, arXiv 2006.09503; DAPPLE, arXiv 2007.01045.

    Example:
        >>> from schedir.schedules import one_f_one_b
        >>> from schedir.viz.doctest_chart import draw_schedule
        >>> print(draw_schedule(one_f_one_b, ranks=3, microbatches=4))
        rank 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
        rank 1  .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..
        rank 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..
    """
    warmup = min(P - 1 - r, m)
    return warmup * F + (m - warmup) * (F + B) + warmup * B


def eager_1f1b(r: int, P: int, m: int) -> RankSchedule:
    """Run 1F1B with twice the warmup, so that messages overlap with compute.

    If a message takes the time t, 1F1B takes 2(P-1)t longer for every P microbatches. This schedule
    has no such loss if t is at most (F+B)/2.

    - Idle time of each rank, if messages take no time: (P-1)(F+B).
    - In flight: min(2(P-1-r) + 1, m) activations on rank r.

    Args:
        r: Rank, 0 to P - 1.
        P: Number of ranks.
        m: Number of microbatches.

    Returns:
        The rank schedule of rank `r`.

    References:
        Zhuang et al., arXiv 2211.05322.

    Example:
        >>> from schedir.schedules import eager_1f1b
        >>> from schedir.viz.doctest_chart import draw_schedule
        >>> print(draw_schedule(eager_1f1b, ranks=3, microbatches=4))
        rank 0  F0 F1 F2 F3 .. .. .. B0 -- .. B1 -- .. B2 -- .. B3 --
        rank 1  .. F0 F1 F2 .. B0 -- F3 B1 -- .. B2 -- .. B3 -- .. ..
        rank 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..
    """
    warmup = min(2 * (P - 1 - r), m)
    return warmup * F + (m - warmup) * (F + B) + warmup * B


def forward_only(r: int, P: int, m: int, v: int = 1) -> RankSchedule:
    """Run an evaluation: all microbatches through one local stage, then through the next.

    The order is possible with every placement. No rank keeps activations for a backward.

    - Idle time of each rank, if m >= P: (P-1)F under "loop", and 2(P-1)F under "vee" with two
      stages per rank.

    Args:
        r: Rank, 0 to P - 1.
        P: Number of ranks.
        m: Number of microbatches.
        v: Number of stages on each rank.

    Returns:
        The rank schedule of rank `r`.

    Example:
        >>> from schedir.schedules import forward_only
        >>> from schedir.viz.doctest_chart import draw_schedule
        >>> print(draw_schedule(forward_only, ranks=2, microbatches=3, stages_per_rank=2))
        rank 0  F0  F1  F2  F0' F1' F2' ..
        rank 1  ..  F0  F1  F2  F0' F1' F2'
    """
    return sum((m * F[j] for j in range(v)), EMPTY)
