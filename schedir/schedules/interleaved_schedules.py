"""Interleaved schedules: several stages per rank, placed in a loop."""

from __future__ import annotations

from functools import lru_cache

from schedir.call_errors import explain_wrong_calls
from schedir.errors import ScheduleError
from schedir.schedules.schedule_algebra import (
    EMPTY,
    B,
    F,
    I,
    RankSchedule,
    W,
    concat,
    weave,
    with_placement,
)


def looped_bfs(r: int, P: int, m: int, v: int) -> RankSchedule:
    """Run breadth first: all microbatches through one local stage, then through the next.

    All forwards of a stage follow each other, and so do all its backwards. So ZeRO 3 gathers the
    weights of a stage at most twice.

    - Idle time of each rank: (P-1)(F+B). If m < P, it is (v-1)(P-m)(F+B) longer.
    - In flight: m v stage activations on each rank.

    Args:
        r: Rank, 0 to P - 1.
        P: Number of ranks.
        m: Number of microbatches.
        v: Number of stages on each rank.

    Returns:
        The rank schedule of rank `r`.

    References:
        Lamy-Poirier, arXiv 2211.05953.

    Example:
        >>> from schedir.schedules import looped_bfs
        >>> from schedir.viz.doctest_chart import draw_schedule
        >>> print(draw_schedule(looped_bfs, ranks=2, microbatches=2, stages_per_rank=2))
        rank 0  F0  F1  F0' F1' ..  ..  ..  B0' --  B1' --  B0  --  B1  --
        rank 1  ..  F0  F1  F0' F1' B0' --  B1' --  B0  --  B1  --  ..  ..
    """
    fs = sum((m * F[j] for j in range(v)), EMPTY)
    return fs + sum((m * B[j] for j in reversed(range(v))), EMPTY)


def looped_dfs(r: int, P: int, m: int, v: int) -> RankSchedule:
    """Run depth first: P microbatches through all local stages, then the next P.

    All forwards come before all backwards. The forwards among themselves have the order of
    `interleaved`, and so do the backwards. arXiv 2211.05953 uses the name "depth-first" for
    `interleaved`.

    - Idle time of each rank, if P divides m: (P-1)(F+B).
    - In flight: m v stage activations on each rank.

    Args:
        r: Rank, 0 to P - 1.
        P: Number of ranks.
        m: Number of microbatches.
        v: Number of stages on each rank.

    Returns:
        The rank schedule of rank `r`.

    Example:
        >>> from schedir.schedules import looped_dfs
        >>> from schedir.viz.doctest_chart import draw_schedule
        >>> from schedir import Costs
        >>> print(draw_schedule(looped_dfs, 2, 4, stages_per_rank=2, costs=Costs(B=1)))
        rank 0  F0  F1  F0' F1' F2  F3  F2' F3' ..  ..  B0' B1' B0  B1  B2' B3' B2  B3
        rank 1  ..  F0  F1  F0' F1' F2  F3  F2' F3' B0' B1' B0  B1  B2' B3' B2  B3  ..
    """
    fs, bs = _make_grouped_passes(_split_into_groups(P, m), v, B)
    return fs + bs


@with_placement("loop")
@explain_wrong_calls(
    "compile(functools.partial(schedules.interleaved, group=4), ranks=4, microbatches=8)"
)
def interleaved(r: int, P: int, m: int, v: int, group: int | None = None) -> RankSchedule:
    """Run interleaved 1F1B: v stages per rank, placed in a loop.

    The microbatches are divided into groups. Each group passes through all stages of a rank before
    the next group. If P divides m, a group has P microbatches.

    - Idle time of each rank, if P divides m: (P-1)(F+B).
    - In flight: min(2(P-1-r) + (v-1)P + 1, v m) stage activations on rank r.
    - Messages: v times as many as in 1F1B.

    Args:
        r: Rank, 0 to P - 1.
        P: Number of ranks.
        m: Number of microbatches.
        v: Number of stages on each rank.
        group: Number of microbatches in a group, from P to m. The last group may be smaller, but
            must have at least P microbatches. `group` is the same as
            microbatch_group_size_per_vp_stage of Megatron-Core. The default is P if P divides m.
            Otherwise there are m // P groups, whose sizes differ by at most one.

    Returns:
        The rank schedule of rank `r`.

    Raises:
        ScheduleError: `group` does not divide the microbatches into valid groups.

    References:
        Narayanan et al. (SC21), arXiv 2104.04473, section 2.2.

    Example:
        >>> from schedir.schedules import interleaved
        >>> from schedir.viz.doctest_chart import draw_schedule
        >>> print(draw_schedule(interleaved, ranks=2, microbatches=2, stages_per_rank=2))
        rank 0  F0  F1  F0' F1' ..  ..  B0' --  ..  B1' --  B0  --  B1  --
        rank 1  ..  F0  F1  F0' B0' --  F1' B1' --  B0  --  B1  --  ..  ..
    """
    groups = _split_into_groups(P, m, group)
    fs, bs = _make_grouped_passes(groups, v, B)
    return weave(fs, bs, warmup=2 * (P - 1 - r) + (v - 1) * groups[0])


@with_placement("loop")
def interleaved_zb(r: int, P: int, m: int, v: int) -> RankSchedule:
    """Run interleaved 1F1B with split backwards: ZB-H1 on v stages per rank.

    The order is that of torch's InterleavedZeroBubble.

    - Idle time of each rank, if P divides m: 1/v of the idle time of `zb_h1` for the same model.
    - In flight: v P stage activations on each rank.

    Args:
        r: Rank, 0 to P - 1.
        P: Number of ranks.
        m: Number of microbatches.
        v: Number of stages on each rank.

    Returns:
        The rank schedule of rank `r`.

    Example:
        >>> from schedir.schedules import interleaved_zb
        >>> from schedir.viz.doctest_chart import draw_schedule
        >>> print(draw_schedule(interleaved_zb, ranks=2, microbatches=2, stages_per_rank=2))
        rank 0  F0  F1  F0' F1' ..  I0' W0' I1' W1' I0  W0  I1  W1
        rank 1  ..  F0  F1  F0' I0' F1' I1' W0' I0  W1' I1  W0  W1
    """
    groups = _split_into_groups(P, m)
    fs, bs = _make_grouped_passes(groups, v, I)
    return weave(fs, bs, warmup=P - 1 - r + (v - 1) * groups[0], weights=v * m * W, defer_weights=r)


@lru_cache(maxsize=2)  # The result is the same for all ranks.
def _make_grouped_passes(
    groups: tuple[int, ...], v: int, backward: RankSchedule
) -> tuple[RankSchedule, RankSchedule]:
    """Return the forwards and the backwards. Each group passes through all local stages in turn."""
    fs = concat(g * F[j] for g in groups for j in range(v))
    return fs, concat(g * backward[j] for g in groups for j in reversed(range(v)))


def _split_into_groups(P: int, m: int, group: int | None = None) -> tuple[int, ...]:
    """Return the sizes of the groups of microbatches."""
    if group is None:
        count = max(1, m // P)
        return tuple(m // count + (k < m % count) for k in range(count))
    if not P <= group <= m or 0 < m % group < P:
        raise ScheduleError(
            f"{m} microbatches on {P} ranks cannot be divided into groups of {group}: each group, "
            f"also a smaller last one, must have from {P} to {m} microbatches"
        )
    return tuple(min(group, m - k) for k in range(0, m, group))
