"""Per microbatch: what passes between stages, where microbatches differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schedir.errors import ModelError, said
from schedir.ir.program import Program
from schedir.runtime.boundary import Boundaries, Edges, Given
from schedir.runtime.fits import require_fit

_LENGTHS = "PerMicrobatch([(length, 64) for length in lengths])"


@dataclass(frozen=True)
class PerMicrobatch:
    """What passes between stages of each microbatch, where microbatches differ: packed data, a last
    batch that is smaller, segments of a sequence.

    `each[mb]` is what an Executor takes as `boundary` where they do not.  A slot has room for the
    largest value that it ever holds, and a message is as large as its own.

    Raises ModelError for what is no list.

    >>> import schedir, torch
    >>> from torch import nn
    >>> from schedir.runtime import InProcess, PerMicrobatch
    >>> program = schedir.compile(schedir.schedules.one_f_one_b, schedir.Plan(2, 3))
    >>> stages, loss = [nn.Linear(8, 8), nn.Linear(8, 1)], nn.functional.mse_loss
    >>> lengths = 4, 4, 1
    >>> boundary = PerMicrobatch([(n, 8) for n in lengths])
    >>> x, y = [torch.ones(n, 8) for n in lengths], [torch.ones(n, 1) for n in lengths]
    >>> InProcess(program, stages, loss=loss, boundary=boundary).step(x, y).shape
    torch.Size([])
    """

    each: Sequence[Given | Edges]

    def __post_init__(self) -> None:
        if not isinstance(self.each, tuple | list):
            raise ModelError(
                f"PerMicrobatch takes a list, and {said(self.each)} is none", hint=_LENGTHS
            )
        object.__setattr__(self, "each", tuple(self.each))


@dataclass(frozen=True)
class Passing:
    """What passes between the stages of a program: `rows` are of each microbatch, or one of all."""

    rows: tuple[Boundaries, ...]

    @classmethod
    def of(
        cls,
        given: Given | Edges | Boundaries | PerMicrobatch | Passing,
        program: Program,
    ) -> Passing:
        """What is meant: PerMicrobatch, of each its own; else what `Boundaries.of` takes, of all.

        Raises ModelError for those of another number of microbatches, and as `Boundaries.of`.
        """
        stages, parts, skips = program.plan.stages, program.tp, program.skips
        several = isinstance(given, PerMicrobatch)
        if isinstance(given, Passing):
            each: Sequence[Given | Edges | Boundaries] = given.rows
            several = len(each) > 1
        else:
            each = given.each if isinstance(given, PerMicrobatch) else (given,)
        if several and len(each) != program.plan.microbatches:
            raise ModelError(
                f"boundaries are given of {len(each)} microbatches, for "
                f"{program.plan.microbatches} microbatches",
                hint=_LENGTHS,
            )
        return cls(tuple(Boundaries.of(one, stages, parts, skips) for one in each))

    def __getitem__(self, mb: int) -> Boundaries:
        return self.rows[mb if len(self.rows) > 1 else 0]

    def __str__(self) -> str:
        if len(self.rows) == 1:
            return str(self.rows[0])
        return "; ".join(f"microbatch {mb}: {row}" for mb, row in enumerate(self.rows))

    def fit(self, program: Program) -> None:
        """Raise ModelError where what passes is not what a program takes (`require_fit`)."""
        for row in self.rows:
            require_fit(row, program)
