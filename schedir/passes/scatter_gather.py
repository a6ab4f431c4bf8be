"""ScatterGather: only 1/t of a boundary's bytes cross it, for t tensor-parallel ranks.

"Efficient Large-Scale Language Model Training on GPU Clusters" (SC21), section 4.1.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from schedir.analysis.models import Model
from schedir.ir.ops import ROWS, SHARDING, consumers, producers
from schedir.ir.program import ADDRESS, FIELDS, OP, Program, Words, is_op
from schedir.passes.insert import before
from schedir.passes.record import Pass


def scatter_gather(program: Program) -> Program:
    """Lower replicated boundaries: scatter before each send, gather just before each use.

    Not sooner: a host that blocks waits at a gather for its message.

    Nothing to do where tp is 1.  A boundary that is sequence-sharded already needs no lowering
    either: leave this pass out (`compile(..., boundary="sharded")`).
    """
    if program.tp == 1:
        return program
    plan, fields = program.plan, program.words.view(FIELDS)
    address = program.words & ADDRESS
    key = fields["stage"].astype(np.int64) * plan.microbatches + fields["mb"]
    at: list[Words] = []
    words: list[Words] = []
    for change in SHARDING:  # of a value of a rank, before whoever takes it there
        (token,) = ROWS[change].gives
        made = np.zeros(plan.stages * plan.microbatches, bool)
        made[key[is_op(fields["op"], producers(token))]] = True
        here = np.flatnonzero(is_op(fields["op"], consumers(token)))
        here = here[made[key[here]]]
        at.append(here)
        words.append(address[here] | int(change) << OP)
    return before(program, np.concatenate(at), np.concatenate(words))


def _read(program: Program, model: Model) -> dict[str, Any]:
    if program.sequence:
        return {}
    whole = program.tp == 1 or not program.ops.isdisjoint(SHARDING)
    return {"boundary": "replicated" if whole else "sharded"}


PASSES: Final = (
    Pass(
        "scatter_gather",
        "messages",
        lambda program, options: scatter_gather(program),
        wanted=lambda program, options: options.boundary == "replicated",
        read=_read,
        order=1,
    ),
)
