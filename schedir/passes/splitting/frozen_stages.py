"""Drop the backwards of frozen stages at the start of a model.

The other instructions keep their order. Later passes then send no gradients to frozen stages, and
insert no gradient reductions for them.
"""

from __future__ import annotations

from typing import Final

from schedir.ir.isa.instructions import TRAINED_STAGE_OPS
from schedir.ir.program import WORD_DTYPE, Program, is_op
from schedir.passes.insertion import drop_instructions
from schedir.passes.pass_types import Pass


def drop_frozen_backwards(program: Program) -> Program:
    """Drop the backwards of frozen stages from a draft.

    An instruction that was joined with a dropped backward runs alone.

    Args:
        program: The draft.
    """
    if not program.frozen_stages:
        return program
    stage = program.words.view(WORD_DTYPE)["stage"]
    return drop_instructions(
        program, is_op(program.op, TRAINED_STAGE_OPS) & (stage < program.frozen_stages)
    )


PASSES: Final = (Pass("frozen", "draft", lambda p, options: drop_frozen_backwards(p), order=-1),)
