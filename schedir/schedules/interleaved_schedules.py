"""Interleaved schedules: several stages per rank, placed in a loop."""

from __future__ import annotations

from functools import lru_cache

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
    """Breadth first: all microbatches through one own stage, then through the next.

    Lamy-Poirier, arXiv 2211.05953: a stage's weights are needed once forward and once
    backward, which suits sharded weights.  Ranks idle (P-1)(F+B), that is (P-1)/(v m) of ideal
    time, and (v-1)(P-m)(F+B) more if m < P; m v stage activations in flight.  PyTorch's
    LoopedBFS runs each stage's backwards in descending order, which takes as long.

    >>> from schedir.schedules import looped_bfs
    >>> from schedir.viz.doctest_chart import draw_schedule
    >>> print(draw_schedule(looped_bfs, ranks=2, microbatches=2, stages_per_rank=2))
    rank 0  F0  F1  F0' F1' ..  ..  ..  B0' --  B1' --  B0  --  B1  --
    rank 1  ..  F0  F1  F0' F1' B0' --  B1' --  B0  --  B1  --  ..  ..
    """
    fs = sum((m * F[j] for j in range(v)), EMPTY)
    return fs + sum((m * B[j] for j in reversed(range(v))), EMPTY)


def looped_dfs(r: int, P: int, m: int, v: int) -> RankSchedule:
    """Depth first: P microbatches through all own stages, then the next P; then all backwards.

    The order of `interleaved` without its turns; arXiv 2211.05953 calls depth-first what has
    them.  Ranks idle (P-1)(F+B) where P divides m; m v stage activations in flight.
    Beside `looped_bfs`, fewer boundary activations wait: those of P microbatches, not of m.

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
def interleaved(r: int, P: int, m: int, v: int, group: int | None = None) -> RankSchedule:
    """Interleaved 1F1B: v stages per rank, placed in a loop (SC21, arXiv 2104.04473, section 2.2).

    Microbatches pass in groups, each group through all own stages before the next.  A group is
    P microbatches where P divides m; else there are m // P groups, as even as can be.  `group`
    sets the size as Megatron-core's microbatch_group_size_per_vp_stage does: from P to m, and
    the last group is not smaller than P.

    Bubble (P-1)/(v m) of ideal time where P divides m; min(2(P-1-r) + (v-1)P + 1, v m)
    stage activations in flight; v times the messages of 1F1B.

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
    """Interleaved 1F1B with split backwards: ZB-H1 on v stages per rank.

    PyTorch's InterleavedZeroBubble, instruction for instruction where that runs; groups are
    those of `interleaved`.  Where P divides m, ranks idle as under `zb_h1` with the costs of
    one stage: v times less.  v P stage activations in flight on every rank.

    >>> from schedir.schedules import interleaved_zb
    >>> from schedir.viz.doctest_chart import draw_schedule
    >>> print(draw_schedule(interleaved_zb, ranks=2, microbatches=2, stages_per_rank=2))
    rank 0  F0  F1  F0' F1' ..  I0' W0' I1' W1' I0  W0  I1  W1
    rank 1  ..  F0  F1  F0' I0' F1' I1' W0' I0  W1' I1  W0  W1
    """
    groups = _split_into_groups(P, m)
    fs, bs = _make_grouped_passes(groups, v, I)
    return weave(fs, bs, warmup=P - 1 - r + (v - 1) * groups[0], weights=v * m * W, defer_weights=r)


@lru_cache(maxsize=2)  # all ranks have the same
def _make_grouped_passes(
    groups: tuple[int, ...], v: int, backward: RankSchedule
) -> tuple[RankSchedule, RankSchedule]:
    """Forwards and backwards, group by group, each through all own stages."""
    fs = concat(g * F[j] for g in groups for j in range(v))
    return fs, concat(g * backward[j] for g in groups for j in reversed(range(v)))


def _split_into_groups(P: int, m: int, group: int | None = None) -> tuple[int, ...]:
    """The sizes of the groups in which microbatches pass."""
    if group is None:
        count = max(1, m // P)
        return tuple(m // count + (k < m % count) for k in range(count))
    if not P <= group <= m or 0 < m % group < P:
        raise ScheduleError(
            f"groups of {group} do not cut {m} microbatches on {P} ranks: a group has from "
            f"{P} to {m}, and so has the last, unless nothing is left for it"
        )
    return tuple(min(group, m - k) for k in range(0, m, group))
