"""Sizes: the bytes of each kind of value on one device."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError
from schedir.ir.cost.per_stage_values import PerStage, by_stage, grid, per_stage, with_fields
from schedir.ir.isa.instructions import FORMS, ROWS, TIERS, TOKENS, Scope

if TYPE_CHECKING:
    from schedir.ir.pipeline.pipeline_shape import PipelineShape

Size = PerStage

MOST_BYTES: Final = 1e30  # of a size; sums of larger ones may overflow a float
_ROUNDING: Final = 1e-12  # sums of bytes differ by that much of themselves

_UNITS = {"": 1, "B": 1, "KB": 1000}
_UNITS |= {f"{p}B": 1000 ** (k + 1) for k, p in enumerate("kMGTP")}
_UNITS |= {f"{p}iB": 1024 ** (k + 1) for k, p in enumerate("KMGTP")}


# The sizes that the tables name; and those that can differ between microbatches.
_OF_CHANGES = [
    (name, TOKENS[change.token].per)
    for row in ROWS
    for change in row.changes
    for name in (change.before, change.after)
    if name not in TIERS
]
_NAMED = [row.size for row in TOKENS if row.size] + [name for name, _ in _OF_CHANGES]
_OF_FORMS = [form.size for form in FORMS if form.size]
OF_A_MICROBATCH: Final = {
    *(name for name, per in _OF_CHANGES if per is Scope.MICROBATCH),
    *(row.size for row in TOKENS if row.per is Scope.MICROBATCH),
    *(row.made_of[1] for row in TOKENS if row.made_of and row.per is Scope.MICROBATCH),
    *_OF_FORMS,
}
# The size that a missing one is equal to.
_LIKE: Final = (
    {row.size: row.like for row in TOKENS if row.like}
    | dict.fromkeys(_OF_FORMS, "activation")
    | {"version": "params"}
)

# What a stage holds all the time, told apart; `weights` is all of it together.
AT_REST: Final = ("params", "grads", "optimizer", "buffers")


@dataclass(frozen=True)
@with_fields([name for name in _NAMED if name not in _LIKE])
@with_fields(_LIKE, None)
class Sizes:
    """Bytes on one device, for one microbatch: a number, one number per stage, or an array.

    An array has a row for each stage, and in each row a number for each microbatch; one with a
    single row is of all stages alike.  A static slot has room for the largest value of its kind on
    its rank; what has no slot takes its own bytes.

    `activation` is what a stage puts out, whole even where tensor-parallel ranks send slices of it,
    and of a sharded boundary, which none makes whole, the own slice; between pieces that meet where
    ranks share the sequence, what is put out and what becomes of it, which are there at once;
    `gradient` is its gradient, as large unless told.  `saved` is what a Forward keeps for the
    backward, and `tape` what a BackwardInput leaves for the BackwardWeight: a part of it, and
    gradients of outputs; by default as much.  `both` is the most that there is of the two at
    once, while a BackwardInput makes a tape of what was saved.  What they share counts once, and
    what was saved goes as the tape comes: unless told it is the larger of the two, which is the
    least that it can be, as in arXiv 2401.10241, where M_W <= M_B.  `measure_sizes` measures it.
    `checkpoint` is what a Forward keeps until a Recompute, where there is one, makes `saved` of it:
    the stage's inputs; unless told, the activation of the stage before, and nothing in the first,
    whose inputs are there all the time.
    What a stage holds all the time is told apart or as one sum.  Apart: `params` are the parameters
    that are trained, `grads` their gradients, `optimizer` its state, with the copies of parameters
    that it steps in their place, and `buffers` are buffers and what is not trained.  The sum is
    `weights`, for who knows no more.  A program that validates after its step holds all but buffers
    once more.  `version` is a copy of a stage's parameters, unless told `params`, of which a run of
    several updates without a flush keeps one for each version that is of use.  `skip` is what a
    stage gives to one that is not its neighbour (`Program.skips`), told for the one that gives it.

    Raises UsageError for a size that is negative or not finite, for an array with rows of different
    lengths or of what is not of a microbatch, for a `both` that is less than one of the two or more
    than their sum, and for `weights` beside what it is the sum of.

    >>> from schedir import PipelineShape, Sizes, compile, schedules, simulate
    >>> program = compile(schedules.one_f_one_b, PipelineShape(ranks=2, microbatches=8),
    ...     slots="fewest")
    >>> sizes = Sizes(activation=10e6, saved=100e6, weights=1e9)
    >>> simulate(program, sizes=sizes).peak_memory / 1e6  # MB on each rank
    array([1220., 1120.])
    >>> apart = Sizes(activation=10e6, saved=100e6, params=2e8, grads=2e8, optimizer=6e8)
    >>> simulate(program, sizes=apart).peak_memory / 1e6
    array([1220., 1120.])
    """

    activation: Size = 0.0
    gradient: Size | None = None
    saved: Size = 0.0
    tape: Size | None = None
    both: Size | None = None
    checkpoint: Size | None = None
    weights: Size | None = None
    params: Size = 0.0
    grads: Size = 0.0
    optimizer: Size = 0.0
    buffers: Size = 0.0
    version: Size | None = None
    skip: Size = 0.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None:
                continue
            arrays = f.name in OF_A_MICROBATCH
            what = f"size {f.name}"
            value = per_stage(what, value, UsageError, arrays=arrays, most=MOST_BYTES)
            object.__setattr__(self, f.name, value)
        if self.both is not None:
            self._expect_both()
        if self.weights is not None and (apart := self.told_apart):
            raise UsageError(
                f"size weights is the sum of {', '.join(AT_REST)}, and is told beside "
                f"{' and '.join(apart)}",
                hint=f"leave out weights, or {' and '.join(apart)}",
                fields=["weights", *apart],
            )

    @property
    def told_apart(self) -> tuple[str, ...]:
        """The parts that are told of what a stage holds all the time."""
        return tuple(name for name in AT_REST if np.any(np.array(getattr(self, name))))

    @property
    def at_rest(self) -> tuple[str, ...]:
        """The sizes that tell what a stage holds all the time: its parts, or `weights`."""
        return self.told_apart or ("weights",)

    def _expect_both(self) -> None:
        """Raise UsageError where `saved` and `tape` cannot be that much at once."""
        try:
            saved, tape, both = np.broadcast_arrays(
                *(grid(self._said(name)) for name in ("saved", "tape", "both"))
            )
        except ValueError:
            return  # `each` says which is of another number of stages or microbatches
        least, most = np.maximum(saved, tape), saved + tape
        wrong = (both < least) | (both > most * (1 + 1e-12))
        if wrong.any():
            at = np.unravel_index(wrong.argmax(), wrong.shape)
            raise UsageError(
                f"size both is what there is of saved and tape at once: from {least[at]:g} to "
                f"{most[at]:g}, not {both[at]:g}"
            )

    def of(self, name: str, stages: int) -> NDArray[np.float64]:
        """The size of that name for each stage, shape (stages,): of the largest microbatch."""
        return np.asarray(self._each(name, stages, None).max(1))

    def each(self, name: str, plan: PipelineShape) -> NDArray[np.float64]:
        """The size of that name, shape (stages, microbatches), or (stages, 1) where it is the same
        for all microbatches.

        Raises UsageError for numbers of other stages or microbatches than the plan's.
        """
        return self._each(name, plan.stages, plan.microbatches)

    def require(self, plan: PipelineShape) -> None:
        """Raise UsageError for numbers of other stages or microbatches than the plan's, whether
        anybody asks for that size or not."""
        for f in fields(self):
            self.each(f.name, plan)

    def _each(self, name: str, stages: int, microbatches: int | None) -> NDArray[np.float64]:
        if name == "both" and self.both is None:
            each = (self._each(part, stages, microbatches) for part in ("saved", "tape"))
            return np.maximum(*each)
        if name == "checkpoint" and self.checkpoint is None:
            before = self._each("activation", stages, microbatches)
            return np.concatenate([np.zeros_like(before[:1]), before[:-1]])
        if name == "weights" and self.weights is None:
            return sum(
                (self._each(part, stages, microbatches) for part in AT_REST), np.zeros((stages, 1))
            )
        return by_stage(f"size {name}", self._said(name), stages, UsageError, microbatches)

    def _said(self, name: str) -> Size:
        """The given size, or the one that a missing size is equal to."""
        value: Size | None = getattr(self, name)
        return self._said(_LIKE[name]) if value is None else value

    def tells(self, name: str) -> bool:
        """Return whether a size that may be left out is given."""
        return getattr(self, name) is not None


def ample(limit: float) -> float:
    """A limit in bytes, and what sums of sizes may be above it by rounding: less than a byte of a
    terabyte."""
    return limit + _ROUNDING * abs(limit)


class EagerMessages(NamedTuple):
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
