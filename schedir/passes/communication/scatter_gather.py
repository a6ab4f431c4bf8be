"""Scatter-gather optimization: each of t tensor-parallel ranks sends 1/t of a boundary.

References:
    "Efficient Large-Scale Language Model Training on GPU Clusters" (SC21), section 4.1.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from schedir.analysis.progress_models import ProgressModel
from schedir.ir.isa.instructions import (
    FORM_CHANGE_OPS,
    INSTRUCTIONS,
    Form,
    Opcode,
    find_consumers,
    find_modifiers,
    find_producers,
)
from schedir.ir.program import WORD_DTYPE, Program, Words, is_op, replace_opcode
from schedir.passes.insertion import insert_before
from schedir.passes.pass_types import Pass

_SHARDING_OPS: Final = tuple(op for op in FORM_CHANGE_OPS if INSTRUCTIONS[op].form is Form.TP_SHARD)


def scatter_gather(program: Program) -> Program:
    """Insert a scatter before each send and a gather just before each use of a boundary.

    The gather is not earlier, because a blocking host waits at a gather for its message. The
    program is unchanged if tp is 1. A sequence-sharded boundary needs no scatter, so leave this
    pass out (`compile(..., boundary="sharded")`).

    Args:
        program: A program with messages and replicated boundaries.
    """
    return program if program.tp == 1 else insert_form_changes(program, Form.TP_SHARD)


def insert_form_changes(program: Program, form: Form) -> Program:
    """Convert every value that passes between ranks to a form before its send, and back afterwards.

    Args:
        program: A program with its messages.
        form: The form that the values do not have yet.

    Returns:
        The program with two more instructions for each value. One instruction converts the value
        before its send. The other instruction converts the received value back, just before its
        first use or before the next instruction that changes its form.
    """
    shape, fields = program.shape, program.words.view(WORD_DTYPE)
    key = fields["stage"].astype(np.int64) * shape.microbatches + fields["mb"]
    positions: list[Words] = []
    words: list[Words] = []
    for change in FORM_CHANGE_OPS:
        if INSTRUCTIONS[change].form is not form:
            continue
        (kind,) = INSTRUCTIONS[change].gives
        is_produced = np.zeros(shape.stages * shape.microbatches, bool)
        is_produced[key[is_op(fields["op"], find_producers(kind))]] = True
        later_changes = _find_later_changes(program, change)
        uses = np.flatnonzero(is_op(fields["op"], later_changes + find_consumers(kind)))
        uses = uses[is_produced[key[uses]]]
        if later_changes:  # only the first instruction that uses the value needs the conversion
            uses = uses[np.sort(np.unique(key[uses], return_index=True)[1])]
        positions.append(uses)
        words.append(replace_opcode(program.words[uses], change))
    return insert_before(program, np.concatenate(positions), np.concatenate(words))


def _find_later_changes(program: Program, change: Opcode) -> tuple[Opcode, ...]:
    """Return the opcodes of the program that change a value in place after `change`."""
    (kind,) = INSTRUCTIONS[change].gives
    modifiers = find_modifiers(kind)
    return tuple(
        op for op in modifiers[modifiers.index(change) + 1 :] if op in program.used_opcodes
    )


def _read_options(program: Program, progress_model: ProgressModel) -> dict[str, Any]:
    if program.sequence_parallel:
        return {}
    is_replicated = program.tp == 1 or not program.used_opcodes.isdisjoint(_SHARDING_OPS)
    return {"boundary": "replicated" if is_replicated else "sharded"}


PASSES: Final = (
    Pass(
        "scatter_gather",
        "messages",
        lambda program, options: scatter_gather(program),
        should_run=lambda program, options: options.boundary == "replicated",
        read_options=_read_options,
        order=1,
    ),
)
