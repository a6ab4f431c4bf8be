"""Bidirectional schedules: Chimera, DualPipe and BitPipe.

Each stage has two replicas. One half of the microbatches enters at rank 0, and the other half
enters at the last rank. A rank has an early stage, `F[0]`, and a late stage, `F[1]`. The rank uses
its early stage for the microbatches that enter at the nearer end of the pipeline, and its late
stage for the other microbatches. With "mirror-vee", microbatches return through two more stages of
the rank.
"""

from __future__ import annotations

from schedir.errors import ScheduleError
from schedir.schedules.building_blocks import order_by_slot
from schedir.schedules.schedule_algebra import B, F, RankSchedule, with_placement
from schedir.schedules.v_shape import dualpipe_v


@with_placement("mirror", 2)
def dualpipe(r: int, P: int, m: int) -> RankSchedule:
    """Run DualPipe: forwards of one direction together with backwards of the other direction.

    The order is that of github.com/deepseek-ai/DualPipe. The forward and the backward of a pair run
    together, and the pair takes the time FB.

    - Largest idle time of a rank, if F = I >= W: (P/2-1)(FB + B - 3W). If W <= F < I, it is at most
      this time.
    - In flight: P+1 stage activations on each rank.
    - Parameters: twice those of a rank of 1F1B.

    Args:
        r: Rank, 0 to P - 1.
        P: Number of ranks.
        m: Number of microbatches.

    Returns:
        The rank schedule of rank `r`.

    Raises:
        ScheduleError: `m` is odd, or less than 2P.

    References:
        DeepSeek-V3, arXiv 2412.19437, section 3.2.1.

    Example:
      >>> from schedir.schedules import dualpipe
      >>> from schedir.viz.doctest_chart import draw_schedule
      >>> from schedir import Costs
      >>> # A pair takes 2 here.
      >>> print(draw_schedule(dualpipe, 4, 8, placement="mirror", costs=Costs(FB=2)))
      rank 0  F0  F1  F2  F4' I4' W4' F5' F3  B5' ..  F6' B0  B6' --  F7' B1  B7' --  I2  W2  I3  W3
      rank 1  ..  F0  F4' F1  F5' F2  B4' --  F6' B0  F3  B5' F7' B1  B6' --  B2  --  I7' I3  W7' W3
      rank 2  ..  F4  F0' F5  F1' F6  B0' --  F2' B4  F7  B1' F3' B5  B2' --  B6  --  I3' I7  W3' W7
      rank 3  F4  F5  F6  F0' I0' W0' F1' F7  B1' ..  F2' B4  B2' --  F3' B5  B3' --  I6  W6  I7  W7
    """
    if m % 2:
        raise ScheduleError(f"microbatches must be even, not {m}: each direction has half of them")
    if m < 2 * P:
        raise ScheduleError(f"dualpipe needs at least {2 * P} microbatches, not {m}")
    return dualpipe_v(min(r, P - 1 - r), P // 2, m // 2)


@with_placement("mirror", 2)
def chimera(r: int, P: int, m: int) -> RankSchedule:
    """Run Chimera: two 1F1B pipelines in opposite directions, which fill each other's bubbles.

    More than P microbatches run in units of P, one unit after the other. The paper's forward
    doubling is not implemented.

    - Idle time of each rank, if P divides m: (P-2)(min(F,B) + (m/P)|B-F|).
    - In flight, if m >= P: P/2 + 1 + min(r, P-1-r) activations on rank r.
    - Parameters: twice those of a rank of 1F1B.

    Args:
        r: Rank, 0 to P - 1.
        P: Number of ranks.
        m: Number of microbatches.

    Returns:
        The rank schedule of rank `r`.

    References:
        Li and Hoefler, arXiv 2107.06925, section 3.

    Example:
        >>> from schedir.schedules import chimera
        >>> from schedir.viz.doctest_chart import draw_schedule
        >>> from schedir import Costs
        >>> print(draw_schedule(chimera, 4, 4, placement="mirror", costs=Costs(B=1)))
        rank 0  F0  F1  ..  F2' B2' F3' B3' B0  ..  B1
        rank 1  ..  F0  F2' F1  F3' B2' B0  B3' B1  ..
        rank 2  ..  F2  F0' F3  F1' B0' B2  B1' B3  ..
        rank 3  F2  F3  ..  F0' B0' F1' B1' B2  ..  B3
    """
    return _interleave_directions(P, m, down=(r,), up=(P - 1 - r,))


@with_placement("mirror-vee", 4)
def bitpipe(r: int, P: int, m: int) -> RankSchedule:
    """Run BitPipe: two interleaved 1F1B pipelines, one vee in each direction.

    The order follows the rule of Chimera, with twice as many stages. More than P microbatches run
    in units of P, one unit after the other. For P = 4 and m = 8, the schedule that the authors'
    code draws is shorter: 53 F instead of 54 F.

    - Idle time of each rank, if P divides m: (P-2)(min(F,B) + (m/P)|B-F|).
    - In flight, if m >= P: 3P/2 + 1 + min(r, P-1-r) stage activations on rank r.
    - Parameters: twice those of a rank of `interleaved`.

    Args:
        r: Rank, 0 to P - 1.
        P: Number of ranks.
        m: Number of microbatches.

    Returns:
        The rank schedule of rank `r`.

    References:
        Wu, Chen and Yu, arXiv 2410.19367.

    Example:
        >>> from schedir.schedules import bitpipe
        >>> from schedir.viz.doctest_chart import draw_schedule
        >>> from schedir import Costs
        >>> print(draw_schedule(bitpipe, 2, 2, placement="mirror-vee", costs=Costs(B=1)))
        rank 0  F0    F1'   F1''  F0''' B0''' B1''  B1'   B0
        rank 1  F1    F0'   F0''  F1''' B1''' B0''  B0'   B1
    """
    return _interleave_directions(P, m, down=(r, 2 * P - 1 - r), up=(P - 1 - r, P + r))


def _interleave_directions(
    P: int, m: int, down: tuple[int, ...], up: tuple[int, ...]
) -> RankSchedule:
    """Return the order of a rank with stages of two 1F1B pipelines in opposite directions.

    `down` and `up` are the stages of the rank in the two pipelines. All ranks have the same number
    of stages.
    """
    block, stages = [], P * len(down)
    for j, s in enumerate(sorted(down + up)):
        count = (m + 1) // 2 if s in down else m // 2
        # A microbatch starts in every second slot.  On each rank, P/2 microbatches of each
        # direction fill 2 * stages slots without a gap.
        starts = [k // (P // 2) * 2 * stages + k % (P // 2) * 2 for k in range(count)]
        block += [(start + s, F[j]) for start in starts]
        block += [(start + 2 * stages - 1 - s, B[j]) for start in starts]
    return order_by_slot(block)
