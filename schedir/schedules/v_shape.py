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
    """Run ZB-V: a zero-bubble schedule with the memory of the first rank of 1F1B.

    The first and the last stage are on the same rank. To get the idle times below, give `compile`
    the costs of your model, which determine the order of the messages.

    - Idle time of each rank, if F = I >= W: (P-1) max(F, 2(F-W)).
    - Idle time of rank r in its active span, if F = I >= W: 2(P-1-r)(F-W).
    - In flight: 2P stage activations on each rank, with the memory of P activations of 1F1B.

    Args:
        r: Rank, 0 to P - 1.
        P: Number of ranks.
        m: Number of microbatches.

    Returns:
        The rank schedule of rank `r`.

    Raises:
        ScheduleError: `m` is less than 2P-1.

    References:
        arXiv 2401.10241, "Memory efficient zero bubble schedule".

    Example:
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
    """Run DualPipeV: pairs of a forward on one local stage and a backward on the other.

    The order is that of DualPipeV in github.com/deepseek-ai/DualPipe. The forward and the backward
    of a pair run together, and the pair takes the time FB. The messages of one overlap with the
    compute of the other.

    - Largest idle time of a rank, if F = I >= W: (P-1)(FB + B - 3W). If W <= F < I, it is at most
      this time.
    - In flight: 2P+1 stage activations on each rank.

    Args:
        r: Rank, 0 to P - 1.
        P: Number of ranks.
        m: Number of microbatches.

    Returns:
        The rank schedule of rank `r`.

    Raises:
        ScheduleError: `m` is less than 2P.

    References:
        DeepSeek-V3, arXiv 2412.19437, section 3.2.1.

    Example:
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
    later_ranks, n, even = P - 1 - r, r + 1, 1 - r % 2
    down = overlapped_pair(F[0], B[1])
    up = overlapped_pair(F[1], B[0])
    # As in DeepSeek's code, the last rank does not overlap its first pair.  This shortens the
    # bubble.
    first_pair = down if later_ranks else F[0] + B[1]
    return (
        2 * later_ranks * F[0]
        + n * (F[0] + F[1])
        + later_ranks * (I[1] + W + F[1])
        + first_pair
        + up
        + (m - 2 * P + r) * (down + up)
        + later_ranks * (B[1] + up)
        + n // 2 * (B[1] + B[0])
        + even * (B[1] + I[0])
        + (n - n // 2 - even) * (I[1] + I[0])
        + later_ranks * (W + I[0])
        + n * W
    )


def _require_microbatches(m: int, min_microbatches: int) -> None:
    if m < min_microbatches:
        raise ScheduleError(
            f"this schedule needs at least {min_microbatches} microbatches to fill its V-shaped "
            f"pipeline, not {m}"
        )
