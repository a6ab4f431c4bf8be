"""V-shaped schedules, two stages per rank: rank 0 has the first and the last stage."""

from __future__ import annotations

from schedir.errors import ScheduleError
from schedir.schedules.schedule_algebra import (
    B,
    F,
    I,
    RankSchedule,
    W,
    overlapped_pair,
    with_placement,
)


@with_placement("vee", 2)
def zb_v(r: int, P: int, m: int) -> RankSchedule:
    """ZB-V: zero bubble in the memory of 1F1B's first rank.

    arXiv 2401.10241, "Memory efficient zero bubble schedule".  The loss is taken where a
    microbatch entered, and neither turn needs a message.  At F = I >= W, in its own span rank r
    idles 2(P-1-r)(F-W), nothing if W is as long; from the first start to the last end ranks idle
    (P-1) max(F, 2(F-W)).  2P stage activations in flight on every rank, as much memory as P of
    1F1B's.  Takes m >= 2P-1.

    >>> from schedir.schedules import zb_v
    >>> from schedir.viz.doctest_chart import draw_schedule
    >>> print(draw_schedule(zb_v, ranks=2, microbatches=3, placement="vee"))
    rank 0  F0  F1  F2  F0' I0' W0' F1' I1' W1' I0  W0  F2' I2' W2' I1  W1  I2  W2  ..
    rank 1  ..  F0  F0' F1  F1' I0' W0' F2  I0  W0  F2' I1' W1' I1  I2' I2  W1  W2' W2
    """
    _require_microbatches(m, 2 * P - 1)
    down, up = F[0] + I[0] + W[0], F[1] + I[1] + W[1]
    return (
        (2 * (P - r) - 1) * F[0]
        + r * (F[1] + F[0])
        + (P - r) * up
        + (m - 2 * P + r + 1) * (down + up)
        + (P - r - 1) * (I[0] + W[0] + up)
        + r * (I[0] + I[1])
        + (P - r) * (I[0] + W[0])
        + r * W[1]
        + r * W[0]
    )


@with_placement("vee", 2)
def dualpipe_v(r: int, P: int, m: int) -> RankSchedule:
    """DualPipeV: forwards down the vee run together with backwards up it, and the reverse.

    DeepSeek's DualPipe (arXiv 2412.19437, section 3.2.1) cut in half, in the order of
    github.com/deepseek-ai/DualPipe: a pair hides what one of the two sends behind what the other
    computes.  With FB the cost of a pair, the rank that idles most idles (P-1)(FB + B - 3W) at
    F = I >= W, and no more if W <= F < I.  2P+1 stage activations in flight on every rank.
    Takes m >= 2P.

    A pair is one thing: both of its results go on when it ends.  If each half handed on its own
    as soon as it is ready, the same order would idle (P-1)(F + I - W) at F = I >= W: a span of 63
    for 66 with P = 4, m = 10 and unit costs.

    >>> from schedir.schedules import dualpipe_v
    >>> from schedir.viz.doctest_chart import draw_schedule
    >>> from schedir import Costs
    >>> # A pair takes 2 here.
    >>> print(draw_schedule(dualpipe_v, 2, 4, placement="vee", costs=Costs(FB=2)))
    rank 0  F0  F1  F2  F0' I0' W0' F1' F3  B1' ..  F2' B0  B2' --  F3' B1  B3' --  I2  W2  I3  W3
    rank 1  ..  F0  F0' F1  F1' F2  B0' --  F2' B0  F3  B1' F3' B1  B2' --  B2  --  I3' I3  W3' W3
    >>> from schedir import PipelineShape, RankSchedule, expand_schedule, simulate
    >>> from schedir.ir.program import JOINED_BIT
    >>> def halves(r, P, m): return RankSchedule(dualpipe_v(r, P, m).letters & ~JOINED_BIT)
    >>> [simulate(expand_schedule(s, PipelineShape(4, 10,
    ...     placement="vee"))).span for s in (dualpipe_v, halves)]
    [66.0, 63.0]
    """
    _require_microbatches(m, 2 * P)
    left, n, even = P - 1 - r, r + 1, 1 - r % 2
    down, up = overlapped_pair(F[0], B[1]), overlapped_pair(F[1], B[0])
    first = down if left else F[0] + B[1]  # the last rank has just made what B[1] needs
    return (
        2 * left * F[0]
        + n * (F[0] + F[1])
        + left * (I[1] + W + F[1])
        + first
        + up
        + (m - 2 * P + r) * (down + up)
        + left * (B[1] + up)
        + n // 2 * (B[1] + B[0])
        + even * (B[1] + I[0])
        + (n - n // 2 - even) * (I[1] + I[0])
        + left * (W + I[0])
        + n * W
    )


def _require_microbatches(m: int, min_microbatches: int) -> None:
    if m < min_microbatches:
        raise ScheduleError(
            f"{m} microbatches are too few: it takes {min_microbatches} to fill the vee"
        )
