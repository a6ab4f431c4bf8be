"""Zero-bubble schedules, one stage per rank: ZB-H1 and ZB-H2."""

from __future__ import annotations

from schedir.schedules.schedule_algebra import F, I, RankSchedule, W, weave


def zb_h1(r: int, P: int, m: int) -> RankSchedule:
    """Run ZB-H1: 1F1B with split backwards. Rank r defers W by r rounds.

    A round has a forward and a backward. The formulas are for m >= P, with x = I + max(F-W, 0).

    - Idle time of each rank: (P-1) max(F, x). If W <= F and W <= I, this is (P-1)(F+I-W), as in the
      paper.
    - Idle time of rank r in its active span: (P-1-r)x.
    - In flight: min(P, m) activations on each rank.

    Args:
        r: Rank, 0 to P - 1.
        P: Number of ranks.
        m: Number of microbatches.

    Returns:
        The rank schedule of rank `r`.

    References:
        arXiv 2401.10241, section 2.

    Example:
        >>> from schedir.schedules import zb_h1
        >>> from schedir.viz.doctest_chart import draw_schedule
        >>> print(draw_schedule(zb_h1, ranks=3, microbatches=4))
        rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return weave(m * F, m * I, P - 1 - r, weights=m * W, defer_weights=r)


def zb_h2(r: int, P: int, m: int) -> RankSchedule:
    """Run ZB-H2: ZB-H1 with twice the warmup and twice the deferral of W.

    Ranks end one after the other, in the order in which they began. With gradient clipping, they
    end together, unless the norm is checked after the step (`norm_check`). The formulas are for
    m >= 2P-1, with x = max(0, F+I-2W, I-F, I-W). If F = I = W, x is 0.

    - Idle time of each rank: (P-1) max(F, x).
    - Idle time of rank r in its active span: (P-1-r)x.
    - In flight: min(2P-1, m) activations.

    Args:
        r: Rank, 0 to P - 1.
        P: Number of ranks.
        m: Number of microbatches.

    Returns:
        The rank schedule of rank `r`.

    References:
        arXiv 2401.10241, section 2.

    Example:
        >>> from schedir.schedules import zb_h2
        >>> from schedir.viz.doctest_chart import draw_schedule
        >>> print(draw_schedule(zb_h2, ranks=3, microbatches=5))
        rank 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .. ..
        rank 1  .. F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 ..
        rank 2  .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    return weave(m * F, m * I, 2 * (P - 1 - r), weights=m * W, defer_weights=2 * r)
