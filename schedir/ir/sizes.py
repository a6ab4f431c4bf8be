"""Sizes: how many bytes each kind of value takes on one device."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError
from schedir.ir.ops import ROWS, TIERS, TOKENS
from schedir.ir.per_stage import PerStage, by_stage, per_stage, with_fields

Size = PerStage

_UNITS = {"": 1, "B": 1, "KB": 1000}
_UNITS |= {f"{p}B": 1000 ** (k + 1) for k, p in enumerate("kMGTP")}
_UNITS |= {f"{p}iB": 1024 ** (k + 1) for k, p in enumerate("KMGTP")}


# What tables of instructions and values name.
_NAMED = [row.size for row in TOKENS if row.size] + [
    name
    for row in ROWS
    for change in row.changes
    for name in (change.before, change.after)
    if name not in TIERS
]


@dataclass(frozen=True)
@with_fields(_NAMED)
class Sizes:
    """Bytes on one device, for one microbatch: a number, or one number per stage.

    `activation` is what a stage puts out, whole even where tensor-parallel ranks send slices;
    `gradient` is its gradient, as large unless told.  `saved` is what a Forward keeps for the
    backward, and `tape` what a BackwardInput leaves for the BackwardWeight: a part of it, and
    gradients of outputs; by default as much.  `both` is the most that there is of the two at
    once, while a BackwardInput makes a tape of what was saved.  What they share counts once, and
    what was saved goes as the tape comes: unless told it is the larger of the two, which is the
    least that it can be, as in arXiv 2401.10241, where M_W <= M_B.  `sizes_of` measures it.
    `weights` is what a stage holds all the time: parameters, their gradients, and the
    optimizer's state.  `version` is a copy of a stage's parameters, of which a run of several
    updates without a flush keeps one for each version that is of use.

    Raises UsageError for a size that is negative or not finite, and for a `both` that is less than
    one of the two or more than their sum.

    >>> from schedir import Plan, Sizes, compile, schedules, simulate
    >>> program = compile(schedules.one_f_one_b, Plan(ranks=2, microbatches=8), slots="fewest")
    >>> sizes = Sizes(activation=10e6, saved=100e6, weights=1e9)
    >>> simulate(program, sizes=sizes).peak_memory / 1e6  # MB on each rank
    array([1220., 1120.])
    """

    activation: Size = 0.0
    gradient: Size | None = None
    saved: Size = 0.0
    tape: Size | None = None
    both: Size | None = None
    weights: Size = 0.0
    version: Size = 0.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None:
                continue
            object.__setattr__(self, f.name, per_stage(f"size {f.name}", value, UsageError))
        if self.both is not None:
            self._expect_both()

    def _expect_both(self) -> None:
        """Raise UsageError where `saved` and `tape` cannot be that much at once."""
        tape = self.saved if self.tape is None else self.tape
        each = [np.atleast_1d(np.asarray(n, float)) for n in (self.saved, tape, self.both)]
        if len({len(n) for n in each} - {1}) > 1:
            return  # `of` says which is of another number of stages
        for saved, tape, both in np.broadcast(*each):
            least, most = max(saved, tape), saved + tape
            if not least <= both <= most * (1 + 1e-12):
                raise UsageError(
                    f"size both is what there is of saved and tape at once: from {least:g} to "
                    f"{most:g}, not {both:g}"
                )

    def of(self, name: str, stages: int) -> NDArray[np.float64]:
        """The size of that name for each stage, shape (stages,)."""
        value = getattr(self, name)
        if name == "both" and value is None:
            return np.maximum(self.of("saved", stages), self.of("tape", stages))
        if value is None:
            value = self.activation if name == "gradient" else self.saved
        return by_stage(f"size {name}", value, stages, UsageError)


class Eager(NamedTuple):
    """Messages of at most `limit` bytes, where values have these sizes, wait for nobody."""

    limit: float
    sizes: Sizes


def bytes_of(text: str) -> float:
    """The number of bytes that a text says: `512`, `1.5GB` (10^9), `1.5 GiB` (2^30).

    Raises ValueError for anything else.
    """
    found = re.fullmatch(
        r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE]\+?\d+)?)\s*([A-Za-z]*)\s*", text, re.ASCII
    )
    if not found or found[2] not in _UNITS:
        raise ValueError(text)
    return float(found[1]) * _UNITS[found[2]]
