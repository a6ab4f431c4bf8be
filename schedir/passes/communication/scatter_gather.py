"""Scatter-gather optimization: send 1/t of a boundary from each of t tensor-parallel ranks.

"Efficient Large-Scale Language Model Training on GPU Clusters" (SC21), section 4.1.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from schedir.analysis.progress_models import ProgressModel
from schedir.ir.isa.instructions import (
    FORM_CHANGES,
    ROWS,
    Form,
    Opcode,
    changes,
    consumers,
    producers,
)
from schedir.ir.program import ADDRESS, FIELDS, OP, Program, Words, is_op
from schedir.passes.insertion import before
from schedir.passes.pass_types import Pass

_SHARDING: Final = tuple(op for op in FORM_CHANGES if ROWS[op].form is Form.PART)


def scatter_gather(program: Program) -> Program:
    """Lower replicated boundaries: scatter before each send, gather just before each use.

    Not sooner: a host that blocks waits at a gather for its message.

    Nothing to do where tp is 1.  A boundary that is sequence-sharded already needs no lowering
    either: leave this pass out (`compile(..., boundary="sharded")`).
    """
    return program if program.tp == 1 else with_form(program, Form.PART)


def with_form(program: Program, form: Form) -> Program:
    """Send every value that crosses ranks in this form, too.

    Args:
        program: A program with its messages.
        form: The form that the values do not have yet.

    Returns:
        The program with an instruction that gives the form before each send, and one that takes it
        just before the received value is used or loses another form.
    """
    shape, fields = program.shape, program.words.view(FIELDS)
    address = program.words & ADDRESS
    key = fields["stage"].astype(np.int64) * shape.microbatches + fields["mb"]
    at: list[Words] = []
    words: list[Words] = []
    for change in FORM_CHANGES:
        if ROWS[change].form is not form:
            continue
        (token,) = ROWS[change].gives
        made = np.zeros(shape.stages * shape.microbatches, bool)
        made[key[is_op(fields["op"], producers(token))]] = True
        later = _later_changes(program, change)
        here = np.flatnonzero(is_op(fields["op"], later + consumers(token)))
        here = here[made[key[here]]]
        if later:  # before the first instruction that takes the value
            here = here[np.sort(np.unique(key[here], return_index=True)[1])]
        at.append(here)
        words.append(address[here] | int(change) << OP)
    return before(program, np.concatenate(at), np.concatenate(words))


def _later_changes(program: Program, change: Opcode) -> tuple[Opcode, ...]:
    """The instructions of the program that change a value in place after `change`."""
    (token,) = ROWS[change].gives
    changed = changes(token)
    return tuple(op for op in changed[changed.index(change) + 1 :] if op in program.ops)


def _read(program: Program, progress_model: ProgressModel) -> dict[str, Any]:
    if program.sequence_parallel:
        return {}
    whole = program.tp == 1 or not program.ops.isdisjoint(_SHARDING)
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
