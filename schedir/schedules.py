"""The schedules of the field, each as short as its idea.

Each is a function of (rank, ranks, microbatches) and, where stages per rank matter, of `v`.
The timelines are at F = 1 and B = 2; a letter is one unit of time, a dot is idle.
"""

from __future__ import annotations

from schedir.errors import ScheduleError
from schedir.words import EMPTY, B, F, Word, weave


def gpipe(r: int, P: int, m: int) -> Word:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965).

    Bubble (P-1)/m of ideal time; m activations in flight.

    >>> from schedir.ascii import timeline
    >>> print(timeline(gpipe, ranks=3, microbatches=4))
    rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 -- B1 -- B2 -- B3 --
    rank 1  .. F0 F1 F2 F3 .. .. .. B0 -- B1 -- B2 -- B3 -- .. ..
    rank 2  .. .. F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .. .. .. ..
    """
    return m * F + m * B


def one_f_one_b(r: int, P: int, m: int) -> Word:
    """One forward, one backward (PipeDream-flush, arXiv 2006.09503; DAPPLE, arXiv 2007.01045).

    Bubble (P-1)/m of ideal time, as GPipe; rank r has only min(P-r, m) activations in flight.

    >>> from schedir.ascii import timeline
    >>> print(timeline(one_f_one_b, ranks=3, microbatches=4))
    rank 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
    rank 1  .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..
    rank 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..
    """
    lead = min(P - 1 - r, m)
    return lead * F + (m - lead) * (F + B) + lead * B


def interleaved(r: int, P: int, m: int, v: int, group: int | None = None) -> Word:
    """Interleaved 1F1B: v stages per rank, placed in a loop (SC21, arXiv 2104.04473, section 2.2).

    Microbatches pass in groups, each group through all own stages before the next.  A group is
    P microbatches where P divides m; else there are m // P groups, as even as can be.  `group`
    sets the size as Megatron-core's microbatch_group_size_per_vp_stage does: from P to m, and
    the last group is not smaller than P.

    Bubble (P-1)/(v m) of ideal time where P divides m; min(2(P-1-r) + (v-1)P + 1, v m)
    stage activations in flight; v times the messages of 1F1B.

    >>> from schedir.ascii import timeline
    >>> print(timeline(interleaved, ranks=2, microbatches=2, stages_per_rank=2))
    rank 0  F0  F1  F0' F1' ..  ..  B0' --  ..  B1' --  B0  --  B1  --
    rank 1  ..  F0  F1  F0' B0' --  F1' B1' --  B0  --  B1  --  ..  ..
    """
    groups = _groups(P, m, group)
    fs = sum((g * F[j] for g in groups for j in range(v)), EMPTY)
    bs = sum((g * B[j] for g in groups for j in reversed(range(v))), EMPTY)
    return weave(fs, bs, lead=2 * (P - 1 - r) + (v - 1) * groups[0])


def _groups(P: int, m: int, group: int | None) -> list[int]:
    """The sizes of the groups in which interleaved schedules pass m microbatches."""
    if group is None:
        count = max(1, m // P)
        return [m // count + (k < m % count) for k in range(count)]
    if not P <= group <= m or 0 < m % group < P:
        raise ScheduleError(
            f"groups of {group} do not cut {m} microbatches on {P} ranks: a group has from "
            f"{P} to {m}, and so has the last, unless nothing is left for it"
        )
    return [min(group, m - k) for k in range(0, m, group)]
