"""Again: the compute of a program that is lowered, lowered anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from schedir.analysis.models import Model
from schedir.ir.ops import COMPUTE
from schedir.ir.plan import Plan
from schedir.ir.program import Program, Stream
from schedir.passes.lowering import LOWERING


def compute_of(program: Program) -> Program:
    """The draft that a program has in it: its compute, each rank's in its order.

    >>> from schedir import Plan, compile, draft, schedules
    >>> plan = Plan(ranks=4, microbatches=8)
    >>> compute_of(compile(schedules.gpipe, plan)) == draft(schedules.gpipe, plan)
    True
    """
    work = tuple(Stream(s.words[np.isin(s.op, COMPUTE)]) for s in program.streams)
    return replace(program, streams=work, slots=(), order={})


def options_of(program: Program, model: Model, draft: Program | None = None) -> dict[str, Any]:
    """The options of `compile` with which a program was lowered, as far as they show; those that
    say something of the `draft`, if there is one, which has other traits."""
    options: dict[str, Any] = {}
    for each in LOWERING:
        if each.applies(program if draft is None else draft):
            options |= each.read(program, model)
    return options


def fitting(options: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Options of a program for a plan that may have fewer stages on a rank: then no more of these
    are whole."""
    own = max(map(len, plan.stages_of))
    return {k: min(v, own) if k == "active" and v else v for k, v in options.items()}
