"""Segments: those of one sequence go forward from the first on, and backward from the last on.

A later segment's forward reads what the earlier ones left in the stage (keys and values of causal
attention), and its backward gives these their gradients, which an earlier segment's backward takes
along (arXiv 2406.03488, section 3).  No message says so, and a stage that is asked in another order
computes something else in silence; so the order is part of what a plan with segments means.
"""

from __future__ import annotations

import numpy as np

from schedir.errors import OrderError, Site
from schedir.ir.index import Index
from schedir.ir.ops import BACKWARDS, FORWARDS


def segments_in_turn(index: Index) -> None:
    """Raise OrderError for the first segment of a sequence that its stage runs out of turn."""
    plan = index.program.plan
    if plan.segments == 1:
        return
    found = []
    for ops, turn in ((FORWARDS, 1), (BACKWARDS, -1)):
        at = np.flatnonzero(index.is_op(ops))
        sequence, segment = np.divmod(index.mb[at].astype(np.int64), plan.segments)
        order = np.lexsort((sequence, index.stage[at]))  # stable: each in Stream order
        at, segment = at[order], turn * segment[order]
        alike = (sequence[order][1:] == sequence[order][:-1]) & (np.diff(index.stage[at]) == 0)
        late = np.flatnonzero(alike & (np.diff(segment) < 0))
        if len(late):
            k = late[at[late + 1].argmin()]
            found.append((int(at[k + 1]), int(at[k]), turn))
    if not found:
        return
    late_at, early_at, turn = min(found)
    early, later = index.locate(early_at), index.locate(late_at)
    if turn > 0:
        fact = f"{early[2]} runs before {later[2]}, whose keys and values it sees"
        needs = "needs what the other leaves"
    else:
        fact = f"{early[2]} runs before {later[2]}, which gives gradients to its keys and values"
        needs = "needs the gradients that the other gives"
    raise OrderError(
        f"{fact}: both are of sequence {later[2].mb // plan.segments}",
        program=index.program.name,
        sites=[Site(*early, needs), Site(*later, "comes too late")],
        hint=f"the {plan.segments} segments of a sequence go forward from the first on, and "
        "backward from the last on",
    )
