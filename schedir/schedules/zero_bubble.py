"""Zero-bubble schedules, one stage per rank: ZB-H1 and ZB-H2."""

from __future__ import annotations

from schedir.schedules.schedule_algebra import F, I, RankSchedule, W, weave


def zb_h1(r: int, P: int, m: int) -> RankSchedule:
    """ZB-H1: 1F1B with split backwards, rank r's W r turns late (arXiv 2401.10241, section 2).

    For m >= P, with x = I + max(F-W, 0): ranks idle (P-1) max(F, x), in its own span rank r
    idles (P-1-r) x.  That is the paper's (P-1)(F+I-W) where W is no longer than F and I; a
    longer one fills no more.  min(P, m) activations in flight on every rank, as 1F1B has on its
    first.

    >>> from schedir.schedules import zb_h1
    >>> from schedir.viz.doctest_chart import draw_schedule
    >>> print(draw_schedule(zb_h1, ranks=3, microbatches=4))
    rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return weave(m * F, m * I, P - 1 - r, weights=m * W, defer_weights=r)


def zb_h2(r: int, P: int, m: int) -> RankSchedule:
    """ZB-H2: twice ZB-H1's lead and lag, so that ranks end as they began, one after the other.

    arXiv 2401.10241, section 2.  For m >= 2P-1, with x = max(0, F+I-2W, I-F, I-W): in its own
    span rank r idles (P-1-r) x, which is nothing at F = I = W; but from the first start to the
    last end ranks idle (P-1) max(F, x).  So it pays where ranks need not end together: where
    nothing is clipped, or the norm is checked after the step (`norm_check`).  min(2P-1, m)
    activations in flight.

    >>> from schedir.schedules import zb_h2
    >>> from schedir.viz.doctest_chart import draw_schedule
    >>> print(draw_schedule(zb_h2, ranks=3, microbatches=5))
    rank 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .. ..
    rank 1  .. F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 ..
    rank 2  .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    return weave(m * F, m * I, 2 * (P - 1 - r), weights=m * W, defer_weights=2 * r)
