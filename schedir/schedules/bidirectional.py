"""Bidirectional schedules: Chimera, DualPipe and BitPipe.

A rank has an early stage, `F[0]`, and a late one, `F[1]`: those entering on its half of the ranks
pass through the early one, the others through the late one.  In vees they come back through two
more.
"""

from __future__ import annotations

from schedir.errors import ScheduleError
from schedir.schedules.building_blocks import order_by_slot
from schedir.schedules.schedule_algebra import B, F, RankSchedule, with_placement
from schedir.schedules.v_shape import dualpipe_v


@with_placement("mirror", 2)
def dualpipe(r: int, P: int, m: int) -> RankSchedule:
    """DualPipe: forwards of one direction run together with backwards of the other.

    DeepSeek-V3 (arXiv 2412.19437, section 3.2.1), in the order of github.com/deepseek-ai/DualPipe.
    A rank and its mirror image do the same, and the half of them what `dualpipe_v` does on as
    many ranks.  So with FB the cost of a pair, the rank that idles most idles
    (P/2-1)(FB + B - 3W) at F = I >= W, and no more if W <= F < I.  (If each half of a pair handed
    on its own result as soon as it is ready: (P/2-1)(F + I - W) at F = I >= W.)  P+1 stage
    activations in flight on every rank, and parameters twice.  Takes even m >= 2P.

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
        raise ScheduleError(f"each direction has half of the microbatches: {m} is not even")
    if m < 2 * P:
        raise ScheduleError(f"{m} microbatches are too few: it takes {2 * P} to fill both ways")
    return dualpipe_v(min(r, P - 1 - r), P // 2, m // 2)


@with_placement("mirror", 2)
def chimera(r: int, P: int, m: int) -> RankSchedule:
    """Chimera: two 1F1B pipelines, one down and one up the ranks, in each other's bubbles.

    Li and Hoefler, arXiv 2107.06925, section 3; more than P microbatches as units of P, one behind
    the other.  Known from the paper, not from its code; forward doubling is not here.  Where P
    divides m, ranks idle (P-2)(min(F,B) + (m/P)|B-F|): half of 1F1B's bubble at F = B, and at
    B = 2F, m = P the paper's.  P/2 + 1 + min(r, P-1-r) activations in flight for m >= P, and
    parameters twice.

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
    """BitPipe: two interleaved 1F1B pipelines, a vee down and one up the ranks.

    Wu, Chen and Yu, arXiv 2410.19367, in the order of the drawing for P = m = 4 that comes with
    their code.  Chimera's rule with twice the stages, each half as long: where P divides m, ranks
    idle (P-2)(min(F,B) + (m/P)|B-F|), which at B = 2F, m = P is (P-2)/(3m+P-2) of the step.  More
    than P microbatches are units one behind the other; the authors' drawing of m = 2P = 8 lets the
    second forward of a unit begin sooner, and takes 53 F where this takes 54.  Nothing is sent at
    the turn of a vee.  3P/2 + 1 + min(r, P-1-r) stage activations in flight for m >= P, and
    parameters twice.

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
    """What a rank does that holds these stages of two 1F1B pipelines, each in the other's bubbles.

    Of the pipelines' stages, P or a multiple of it, all ranks hold as many.
    """
    block, stages = [], P * len(down)
    for j, s in enumerate(sorted(down + up)):
        many = (m + 1) // 2 if s in down else m // 2
        # A microbatch every other slot.  Units of P/2 each way tile 2S slots on every rank.
        starts = [k // (P // 2) * 2 * stages + k % (P // 2) * 2 for k in range(many)]
        block += [(start + s, F[j]) for start in starts]
        block += [(start + 2 * stages - 1 - s, B[j]) for start in starts]
    return order_by_slot(block)
