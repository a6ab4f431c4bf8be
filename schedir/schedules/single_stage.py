"""One stage per rank with full backwards: GPipe, 1F1B and forward-only."""

from __future__ import annotations

from schedir.schedules.schedule_algebra import EMPTY, B, F, RankSchedule


def gpipe(r: int, P: int, m: int) -> RankSchedule:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965).

    Bubble (P-1)/m of ideal time; m activations in flight.

    >>> from schedir.schedules import gpipe
    >>> from schedir.viz.doctest_chart import draw_schedule
    >>> print(draw_schedule(gpipe, ranks=3, microbatches=4))
    rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 -- B1 -- B2 -- B3 --
    rank 1  .. F0 F1 F2 F3 .. .. .. B0 -- B1 -- B2 -- B3 -- .. ..
    rank 2  .. .. F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .. .. .. ..
    """
    return m * F + m * B


def one_f_one_b(r: int, P: int, m: int) -> RankSchedule:
    """One forward, one backward (PipeDream-flush, arXiv 2006.09503; DAPPLE, arXiv 2007.01045).

    Bubble (P-1)/m of ideal time, as GPipe; rank r has only min(P-r, m) activations in flight.
    Ranks idle (P-1)(F+B), in its own span rank r for (P-1-r)(F+B) of it.

    >>> from schedir.schedules import one_f_one_b
    >>> from schedir.viz.doctest_chart import draw_schedule
    >>> print(draw_schedule(one_f_one_b, ranks=3, microbatches=4))
    rank 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
    rank 1  .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..
    rank 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..
    """
    lead = min(P - 1 - r, m)
    return lead * F + (m - lead) * (F + B) + lead * B


def eager_1f1b(r: int, P: int, m: int) -> RankSchedule:
    """1F1B with forwards twice as far ahead, so that messages travel during compute.

    Zhuang et al., arXiv 2211.05322.  Bubble as 1F1B where messages take no time.
    Where one takes t, 1F1B loses 2(P-1)t more with every P microbatches, and this nothing more
    up to t = (F+B)/2.  min(2(P-1-r) + 1, m) activations in flight.

    >>> from schedir.schedules import eager_1f1b
    >>> from schedir.viz.doctest_chart import draw_schedule
    >>> print(draw_schedule(eager_1f1b, ranks=3, microbatches=4))
    rank 0  F0 F1 F2 F3 .. .. .. B0 -- .. B1 -- .. B2 -- .. B3 --
    rank 1  .. F0 F1 F2 .. B0 -- F3 B1 -- .. B2 -- .. B3 -- .. ..
    rank 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..
    """
    lead = min(2 * (P - 1 - r), m)
    return lead * F + (m - lead) * (F + B) + lead * B


def forward_only(r: int, P: int, m: int, v: int = 1) -> RankSchedule:
    """Evaluation: all microbatches through one own stage, then through the next.

    Legal under every placement, as stages come in ascending order everywhere.  Ranks idle (P-1)F
    under "loop" if m >= P, and 2(P-1)F under "vee" with two stages per rank, which is the least
    there.  Nothing is kept for a backward; up to m boundary activations wait between stages.

    >>> from schedir.schedules import forward_only
    >>> from schedir.viz.doctest_chart import draw_schedule
    >>> print(draw_schedule(forward_only, ranks=2, microbatches=3, stages_per_rank=2))
    rank 0  F0  F1  F2  F0' F1' F2' ..
    rank 1  ..  F0  F1  F2  F0' F1' F2'
    """
    return sum((m * F[j] for j in range(v)), EMPTY)
