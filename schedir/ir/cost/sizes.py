"""Sizes: the bytes of each kind of value on one device."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError
from schedir.ir.cost.per_stage_values import (
    PerStage,
    add_fields,
    expand_by_stage,
    to_grid,
    to_per_stage,
)
from schedir.ir.isa.instructions import FORMS, INSTRUCTIONS, TIERS, VALUES, Scope

if TYPE_CHECKING:
    from schedir.ir.pipeline.pipeline_shape import PipelineShape

Size = PerStage

MAX_BYTES: Final = 1e30  # of a size; sums of larger ones may overflow a float
_ROUNDING: Final = 1e-12  # sums of bytes differ by that much of themselves

_BYTE_UNITS = {"": 1, "B": 1, "KB": 1000}
_BYTE_UNITS |= {f"{p}B": 1000 ** (k + 1) for k, p in enumerate("kMGTP")}
_BYTE_UNITS |= {f"{p}iB": 1024 ** (k + 1) for k, p in enumerate("KMGTP")}


# The sizes that the tables name; and those that can differ between microbatches.
_CHANGE_SIZES = [
    (name, VALUES[change.value].scope)
    for row in INSTRUCTIONS
    for change in row.changes
    for name in (change.before, change.after)
    if name not in TIERS
]
_TABLE_SIZES = [row.size for row in VALUES if row.size] + [name for name, _ in _CHANGE_SIZES]
_FORM_SIZES = [form.size for form in FORMS if form.size]
MICROBATCH_SIZES: Final = {
    *(name for name, per in _CHANGE_SIZES if per is Scope.MICROBATCH),
    *(row.size for row in VALUES if row.scope is Scope.MICROBATCH),
    *(
        row.converted_from[1]
        for row in VALUES
        if row.converted_from and row.scope is Scope.MICROBATCH
    ),
    *_FORM_SIZES,
}
# The size that a missing one is equal to.
_FALLBACK_SIZES: Final = (
    {row.size: row.size_fallback for row in VALUES if row.size_fallback}
    | dict.fromkeys(_FORM_SIZES, "activation")
    | {"version": "params"}
)

# What a stage holds all the time, one by one; `model_states` is all of it together.
STATIC_SIZES: Final = ("params", "grads", "optimizer", "buffers")


@dataclass(frozen=True)
@add_fields([name for name in _TABLE_SIZES if name not in _FALLBACK_SIZES])
@add_fields(_FALLBACK_SIZES, None)
class Sizes:
    """Bytes of values on one device, for one microbatch.

    Each size is a number, one number per stage, or an array with a row per stage and in each row a
    number per microbatch; an array with one row is for all stages.  A static buffer has the size
    of the largest value of its kind on its rank; a value without one has its own bytes.

    Args:
        activation: What a stage puts out: all of it, also where tensor-parallel ranks send parts of
            it; of a sharded boundary the rank's own part.  Between segments with sequence
            parallelism it is the output and what the collective makes of it, which exist together.
        gradient: The gradient of that; by default as large.
        saved: What a Forward saves for its backward.
        deferred_wgrad: What a BackwardInput leaves for its BackwardWeight: a part of `saved`, and
            gradients of outputs; by default as much as `saved`.
        saved_and_deferred: The most bytes of the two together, while a BackwardInput runs; what
            they share counts once.  By default the larger of the two, which is the least possible,
            as in arXiv 2401.10241, where M_W <= M_B.  `measure_sizes` measures it.
        checkpoint: What a Forward saves if a Recompute runs it again: the inputs of the stage.  By
            default the activation of the stage before, and nothing in the first stage, whose inputs
            exist all the time.
        model_states: All that a stage has all the time, as one number: the sum of the next four,
            instead of them.
        params: The parameters that are trained.
        grads: Their gradients.
        optimizer: The optimizer state, with main parameters in float32.
        buffers: Buffers, and parameters that are not trained.
        version: An older copy of the parameters, of which a program with several optimizer steps
            keeps one for each version in use; by default as large as `params`.
        skip: What a stage gives to one that is not its neighbour (`Program.skips`), by the stage
            that gives it.

    A program with norm_check="after_step" has all but the buffers once more.

    Raises:
        UsageError: A size is negative or not finite; an array has rows of different lengths, or is
            for what is not of a microbatch; `saved_and_deferred` is less than one of the two or
            more than their sum; or both `model_states` and a part of it are given.

    Example:
        >>> from schedir import PipelineShape, Sizes, compile, schedules, simulate
        >>> program = compile(schedules.one_f_one_b, PipelineShape(ranks=2, microbatches=8),
        ...     buffer_sharing="minimal")
        >>> sizes = Sizes(activation=10e6, saved=100e6, model_states=1e9)
        >>> simulate(program, sizes=sizes).peak_memory / 1e6  # MB on each rank
        array([1220., 1120.])
        >>> apart = Sizes(activation=10e6, saved=100e6, params=2e8, grads=2e8, optimizer=6e8)
        >>> simulate(program, sizes=apart).peak_memory / 1e6
        array([1220., 1120.])
    """

    activation: Size = 0.0
    gradient: Size | None = None
    saved: Size = 0.0
    deferred_wgrad: Size | None = None
    saved_and_deferred: Size | None = None
    checkpoint: Size | None = None
    model_states: Size | None = None
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
            arrays = f.name in MICROBATCH_SIZES
            what = f"size {f.name}"
            value = to_per_stage(what, value, UsageError, allow_arrays=arrays, max_value=MAX_BYTES)
            object.__setattr__(self, f.name, value)
        if self.saved_and_deferred is not None:
            self._require_joint_size()
        if self.model_states is not None and (apart := self.specified_parts):
            raise UsageError(
                f"size model_states is the sum of {', '.join(STATIC_SIZES)}, and is given "
                "together with "
                f"{' and '.join(apart)}",
                hint=f"leave out model_states, or {' and '.join(apart)}",
                fields=["model_states", *apart],
            )

    @property
    def specified_parts(self) -> tuple[str, ...]:
        """The parts of the model states that are given."""
        return tuple(name for name in STATIC_SIZES if np.any(np.array(getattr(self, name))))

    @property
    def static_sizes(self) -> tuple[str, ...]:
        """The sizes of what a stage holds all the time: its parts, or `model_states`."""
        return self.specified_parts or ("model_states",)

    def _require_joint_size(self) -> None:
        """Raise UsageError where `saved` and `tape` cannot be that much at once."""
        try:
            saved, tape, both = np.broadcast_arrays(
                *(
                    to_grid(self._resolve_size(name))
                    for name in ("saved", "deferred_wgrad", "saved_and_deferred")
                )
            )
        except ValueError:
            return  # `per_microbatch` says which is of another number of stages or microbatches
        least, most = np.maximum(saved, tape), saved + tape
        wrong = (both < least) | (both > most * (1 + 1e-12))
        if wrong.any():
            at = np.unravel_index(wrong.argmax(), wrong.shape)
            raise UsageError(
                "size saved_and_deferred is for saved and deferred_wgrad together: "
                f"from {least[at]:g} to "
                f"{most[at]:g}, not {both[at]:g}"
            )

    def for_stages(self, name: str, stages: int) -> NDArray[np.float64]:
        """The size of that name for each stage, shape (stages,): of the largest microbatch."""
        return np.asarray(self._expand(name, stages, None).max(1))

    def per_microbatch(self, name: str, shape: PipelineShape) -> NDArray[np.float64]:
        """The size of that name, shape (stages, microbatches), or (stages, 1) where it is the same
        for all microbatches.

        Raises UsageError for numbers of other stages or microbatches than the shape's.
        """
        return self._expand(name, shape.stages, shape.microbatches)

    def validate(self, shape: PipelineShape) -> None:
        """Raise UsageError for numbers of other stages or microbatches than the shape's, whether
        anybody asks for that size or not."""
        for f in fields(self):
            self.per_microbatch(f.name, shape)

    def _expand(self, name: str, stages: int, microbatches: int | None) -> NDArray[np.float64]:
        if name == "saved_and_deferred" and self.saved_and_deferred is None:
            each = (
                self._expand(part, stages, microbatches) for part in ("saved", "deferred_wgrad")
            )
            return np.maximum(*each)
        if name == "checkpoint" and self.checkpoint is None:
            before = self._expand("activation", stages, microbatches)
            return np.concatenate([np.zeros_like(before[:1]), before[:-1]])
        if name == "model_states" and self.model_states is None:
            return sum(
                (self._expand(part, stages, microbatches) for part in STATIC_SIZES),
                np.zeros((stages, 1)),
            )
        return expand_by_stage(
            f"size {name}", self._resolve_size(name), stages, UsageError, microbatches
        )

    def _resolve_size(self, name: str) -> Size:
        """The given size, or the one that a missing size is equal to."""
        value: Size | None = getattr(self, name)
        return self._resolve_size(_FALLBACK_SIZES[name]) if value is None else value

    def is_specified(self, name: str) -> bool:
        """Return whether a size that may be left out is given."""
        return getattr(self, name) is not None


def add_tolerance(limit: float) -> float:
    """A limit in bytes, and what sums of sizes may be above it by rounding: less than a byte of a
    terabyte."""
    return limit + _ROUNDING * abs(limit)


class EagerMessages(NamedTuple):
    """Messages of at most `max_bytes` bytes, where values have these sizes, wait for nobody."""

    max_bytes: float
    sizes: Sizes


def parse_bytes(text: str) -> float:
    """The number of bytes that a text says: `512`, `1.5GB` (10^9), `1.5 GiB` (2^30).

    Raises ValueError for anything else.
    """
    found = re.fullmatch(
        r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE]\+?\d+)?)\s*([A-Za-z]*)\s*", text, re.ASCII
    )
    if not found or found[2] not in _BYTE_UNITS:
        raise ValueError(text)
    return float(found[1]) * _BYTE_UNITS[found[2]]
