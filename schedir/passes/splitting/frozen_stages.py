"""Drop the backwards of frozen stages at the start of a model.

The other instructions keep their order. Later passes then send no gradients to frozen stages, and
insert no gradient reductions for them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from schedir.ir.isa.instructions import TRAINED_STAGE_OPS
from schedir.ir.program import JOINED_BIT, Program, Stream, is_op
from schedir.passes.pass_types import Pass


def drop_frozen_backwards(program: Program) -> Program:
    """Drop the backwards of frozen stages from a draft.

    An instruction that was joined with a dropped backward runs alone.

    Args:
        program: The draft.
    """
    if not program.frozen_stages:
        return program
    streams = []
    for stream in program.streams:
        is_dropped = is_op(stream.op, TRAINED_STAGE_OPS) & (stream.stage < program.frozen_stages)
        words = stream.words.copy()
        words[1:][is_dropped[:-1]] &= ~JOINED_BIT
        streams.append(Stream(words[~is_dropped]))
    return replace(program, streams=tuple(streams))


PASSES: Final = (Pass("frozen", "draft", lambda p, options: drop_frozen_backwards(p), order=-1),)
