"""Fits: whether what passes between stages is what a program takes."""

from __future__ import annotations

from schedir.errors import ModelError
from schedir.ir.meets import ENTERS, LEAVES
from schedir.ir.program import Program
from schedir.runtime.boundary import Boundaries, Boundary


def require_fit(boundaries: Boundaries, program: Program) -> None:
    """Raise ModelError where a program takes a gradient back, and there is none, and where what
    passes is taken in another shape than tensor-parallel ranks make of it on its way."""
    own = [(s, f"stage {s} passes on", one) for s, one in enumerate(boundaries.crossings)]
    own += [(s, f"passes from stage {s} to {t}", one) for (s, t), one in boundaries.skips]
    for s, what, crossing in own:
        if program.trains and s >= program.frozen and not any(crossing.graded):
            raise ModelError(
                f"nothing that {what} has a gradient ({crossing}), and the program takes one back",
                program=program.name,
                hint="pass on a tensor that depends on what is trained, or "
                f"compile(..., frozen={s + 1}) if nothing is until there",
            )
    for at, (s, _, crossing) in enumerate(own):
        for k, one in enumerate(crossing.tensors):
            first = k == 0 and at < len(boundaries.crossings)
            taken = _taken(one, s, program) if first else one.shape
            if one.as_taken.shape != taken:
                raise ModelError(
                    f"tensor {k} that stage {s} passes on is {one}, and what the program makes of "
                    f"it is {list(taken)}",
                    program=program.name,
                    hint=f"Boundary({one.shape}, taken={taken})"
                    if taken != one.shape
                    else f"Boundary({one.shape})",
                )


def _taken(one: Boundary, stage: int, program: Program) -> tuple[int, ...]:
    """What becomes of the first tensor that a stage passes on: where ranks that share the sequence
    enter a region, all tokens of each one's own, and where they leave it, of all tokens its own."""
    letter, t = program.meets[stage : stage + 1], program.tp
    if not program.sequence or letter not in (ENTERS, LEAVES):
        return one.shape
    if len(one.shape) < 2 or (letter == LEAVES and one.shape[-2] % t):
        raise ModelError(
            f"tensor 0 that stage {stage} passes on is {one}, and there {t} tensor-parallel ranks "
            "share the sequence, which is the last dimension but one",
            program=program.name,
            hint=f"(..., tokens, features), and tokens that {t} divides",
        )
    *rest, tokens, features = one.shape
    return *rest, tokens * t if letter == ENTERS else tokens // t, features
