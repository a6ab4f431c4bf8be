"""Meets: at which boundaries between pieces of a stage tensor-parallel ranks sum what passes.

A stage that ranks of a tensor-parallel group share is cut where they meet (Megatron-LM, arXiv
1909.08053, section 3): into pieces, which are stages of the program on the same rank.  A program
says of each boundary between two of its stages what is there, a letter each: `f` where such a
region is entered, and the gradient that goes back is summed; `g` where it is left, and the
activation is; `-` where nobody meets.
"""

from __future__ import annotations

from typing import Final

from schedir.errors import PlanError, said
from schedir.ir.fields import Kind
from schedir.ir.plan import Plan

NONE: Final = "-"
ENTERS, LEAVES = "f", "g"
LETTERS: Final = ENTERS + LEAVES + NONE


def _settle(name: str, value: object, plan: Plan) -> str:
    """A letter for each boundary, or "" where nobody meets at any."""
    if not isinstance(value, str) or not {*value} <= {*LETTERS}:
        raise PlanError(f"{name} {_TAKES}, not {said(value)}", fields=[name])
    if not value.strip(NONE):
        return ""
    if len(value) != plan.stages - 1:
        raise PlanError(
            f"{name} has {len(value)} letters for the {plan.stages - 1} boundaries of "
            f"{plan.stages} stages",
            hint="compile(..., cut=5) cuts stages in pieces, and says of each boundary who meets",
            fields=[name],
        )
    for s, letter in enumerate(value):
        if letter != NONE and (plan.holders[:, s] != plan.holders[:, s + 1]).any():
            raise PlanError(
                f"{name} says {letter} between stages {s} and {s + 1}, which are on different "
                "ranks: what is summed stays on its rank",
                hint="end a stage with what follows its last sum",
                fields=[name],
            )
    return value


def _read(text: str) -> str:
    if text == "no":
        return ""
    if not text or not {*text} <= {*LETTERS}:
        raise ValueError(f"{_TAKES}, not {said(text)}")
    return text


_TAKES: Final = "has a letter for each boundary: f and g where ranks meet, as in fgfg-fgfg"
MEETS: Final = Kind(_TAKES, _read, str, lambda value, _: value or "no", _settle, metavar="LETTERS")
