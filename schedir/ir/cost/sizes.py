"""Sizes: the bytes of each kind of value on one device."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from schedir.call_errors import explain_wrong_calls
from schedir.errors import UsageError
from schedir.ir.cost.per_stage_values import (
    PerStage,
    add_fields,
    expand_by_stage,
    from_grid,
    to_grid,
    to_per_stage,
)
from schedir.ir.isa.instructions import FORMS, INSTRUCTIONS, TIERS, VALUES, Scope
from schedir.ir.pipeline.stage_segments import EP_LETTERS, STAGE_END

if TYPE_CHECKING:
    from schedir.ir.pipeline.pipeline_shape import PipelineShape

Size = PerStage

MAX_BYTES: Final = 1e30  # The largest size, in bytes.  Sums of larger sizes may overflow a float.
_ROUNDING: Final = 1e-12  # Relative rounding error of sums of bytes.

_BYTE_UNITS = {"": 1, "B": 1, "KB": 1000}
_BYTE_UNITS |= {f"{p}B": 1000 ** (k + 1) for k, p in enumerate("kMGTP")}
_BYTE_UNITS |= {f"{p}iB": 1024 ** (k + 1) for k, p in enumerate("KMGTP")}


# The sizes before and after each `Change` of a value: (name of the size, scope of the value).
_CHANGE_SIZES = [
    (name, VALUES[change.value].scope)
    for row in INSTRUCTIONS
    for change in row.changes
    for name in (change.before, change.after)
    if name not in TIERS
]
_TABLE_SIZES = [row.size for row in VALUES if row.size] + [name for name, _ in _CHANGE_SIZES]
_FORM_SIZES = [form.size for form in FORMS if form.size]
# The names of the sizes that can differ between microbatches.
MICROBATCH_SIZES: Final = {
    *(name for name, scope in _CHANGE_SIZES if scope is Scope.MICROBATCH),
    *(row.size for row in VALUES if row.scope is Scope.MICROBATCH),
    *(
        row.converted_from[1]
        for row in VALUES
        if row.converted_from and row.scope is Scope.MICROBATCH
    ),
    *_FORM_SIZES,
    "routed",
    "expert_buffer",
}
# Name of a size -> name of the size that is used if the first size is not given.
_FALLBACK_SIZES: Final = (
    {row.size: row.size_fallback for row in VALUES if row.size_fallback}
    | dict.fromkeys(_FORM_SIZES, "activation")
    | {"version": "params", "expert_buffer": "routed"}
)

# The sizes that a stage needs during the complete step.  `model_states` is their sum.
STATIC_SIZES: Final = ("params", "grads", "optimizer", "buffers")


@explain_wrong_calls("Sizes(activation=16e6, saved=1.2e9)")
@dataclass(frozen=True, kw_only=True)
@add_fields([name for name in _TABLE_SIZES if name not in _FALLBACK_SIZES])
@add_fields(_FALLBACK_SIZES, None)
class Sizes:
    """Bytes of the values of a stage on one device, such as activations and model states.

    Each size is a number, one number per stage, or an array of shape (stages, microbatches). An
    array with one row applies to all stages. A static buffer has the size of the rank's largest
    value of the same kind.

    Args:
        activation: Output of a stage. The size is that of the full tensor, even if each
            tensor-parallel rank sends a part of it. For a sharded boundary, the size is that of one
            rank's part. Between segments with sequence parallelism, the size is the sum of the
            output and the result of the collective, because both exist at the same time.
        activation_grad: Gradient of the output. The default is `activation`.
        saved: Tensors that a Forward saves for its backward.
        deferred_wgrad: Tensors that a BackwardInput keeps for its BackwardWeight: a part of
            `saved`, and gradients of outputs. The default is `saved`.
        saved_and_deferred: Peak of the sum of `saved` and `deferred_wgrad` while a BackwardInput
            runs. Tensors that are part of both are counted once. The default is the larger of the
            two sizes, which is the lowest possible value. This default matches arXiv 2401.10241,
            where M_W <= M_B. `measure_sizes` measures the actual size.
        recompute_inputs: Inputs of the stage, which a Forward saves if a Recompute runs the forward
            again. The default is the `activation` of the previous stage. For the first stage the
            default is 0, because its inputs exist all the time.
        model_states: Sum of `params`, `grads`, `optimizer` and `buffers`, as one number instead of
            these four.
        params: Trained parameters.
        grads: Gradients of the trained parameters.
        optimizer: Optimizer state, including float32 main parameters.
        buffers: Buffers, and parameters that are not trained.
        version: An older version of the parameters. A program with several optimizer steps keeps
            one copy for each version in use. The default is `params`.
        skip: Value that a stage sends along a skip connection (`Program.skips`). Numbers per stage
            are for the source stages.
        routed: Rows that a segment sends to experts, in addition to `activation`: tokens x experts
            per token x hidden size x bytes per number.
        expert_buffer: Buffer in which the rows for the experts of a rank arrive: `routed` x
            capacity factor. The buffer exists from `dispatch` on, together with the rows that the
            rank sends. The default is `routed`, for perfectly balanced experts.

    A program with norm_check="after_step" needs a second copy of all model states except `buffers`.

    Raises:
        UsageError: A size is negative or not finite. An array has rows of different lengths, or is
            given for a size that is not per microbatch. `saved_and_deferred` is less than `saved`
            or `deferred_wgrad`, or more than their sum. Or both `model_states` and one of `params`,
            `grads`, `optimizer` and `buffers` are given.

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
    activation_grad: Size | None = None
    saved: Size = 0.0
    deferred_wgrad: Size | None = None
    saved_and_deferred: Size | None = None
    recompute_inputs: Size | None = None
    model_states: Size | None = None
    params: Size = 0.0
    grads: Size = 0.0
    optimizer: Size = 0.0
    buffers: Size = 0.0
    version: Size | None = None
    skip: Size = 0.0
    routed: Size = 0.0
    expert_buffer: Size | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None:
                continue
            if isinstance(value, str):
                _refuse_text(f.name, value)
            allows_arrays = f.name in MICROBATCH_SIZES
            subject = f"size {f.name}"
            value = to_per_stage(
                subject, value, UsageError, allow_arrays=allows_arrays, max_value=MAX_BYTES
            )
            object.__setattr__(self, f.name, value)
        if self.saved_and_deferred is not None:
            self._require_joint_size()
        if self.model_states is not None and (given_parts := self.specified_parts):
            raise UsageError(
                f"size model_states is the sum of {', '.join(STATIC_SIZES)}, and cannot be given "
                f"together with {' and '.join(given_parts)}",
                hint=f"leave out model_states, or {' and '.join(given_parts)}",
                fields=["model_states", *given_parts],
            )

    @property
    def specified_parts(self) -> tuple[str, ...]:
        """The names of the parts of the model states that are given and not 0."""
        return tuple(name for name in STATIC_SIZES if np.any(np.array(getattr(self, name))))

    @property
    def static_sizes(self) -> tuple[str, ...]:
        """The names of the given parts of the model states; `model_states` if none is given."""
        return self.specified_parts or ("model_states",)

    def _require_joint_size(self) -> None:
        """Raise UsageError if `saved_and_deferred` contradicts `saved` and `deferred_wgrad`."""
        try:
            saved, deferred, joint = np.broadcast_arrays(
                *(
                    to_grid(self._resolve_size(name))
                    for name in ("saved", "deferred_wgrad", "saved_and_deferred")
                )
            )
        except ValueError:
            return  # `per_microbatch` raises an error for the size whose shape is wrong.
        lower_bound = np.maximum(saved, deferred)
        upper_bound = saved + deferred
        is_wrong = (joint < lower_bound) | (joint > upper_bound * (1 + 1e-12))
        if is_wrong.any():
            cell = np.unravel_index(is_wrong.argmax(), is_wrong.shape)
            raise UsageError(
                f"size saved_and_deferred must be from {lower_bound[cell]:g} to "
                f"{upper_bound[cell]:g}, not {joint[cell]:g}: it is at least the larger of saved "
                "and deferred_wgrad, and at most their sum"
            )

    def for_stages(self, name: str, stages: int) -> NDArray[np.float64]:
        """Return a size for each stage, as the maximum over the microbatches.

        Args:
            name: Name of the size.
            stages: Number of stages.

        Returns:
            The bytes, shape (stages,). A missing size has its default.

        Raises:
            UsageError: The size is given for another number of stages.
        """
        return np.asarray(self._expand(name, stages, None).max(1))

    def per_microbatch(self, name: str, shape: PipelineShape) -> NDArray[np.float64]:
        """Return a size for each stage and microbatch.

        Args:
            name: Name of the size.
            shape: Shape of the pipeline.

        Returns:
            The bytes, shape (stages, microbatches), or (stages, 1) if all microbatches have the
            same size. A missing size has its default.

        Raises:
            UsageError: The size is given for another number of stages or microbatches.
        """
        return self._expand(name, shape.stages, shape.microbatches)

    def validate(self, shape: PipelineShape) -> None:
        """Raise UsageError if any size is given for another number of stages or microbatches.

        Args:
            shape: Shape of the pipeline.

        Raises:
            UsageError: A size does not fit the shape, even if the program does not use it.
        """
        for f in fields(self):
            self.per_microbatch(f.name, shape)

    def add_expert_rows(self, shape: PipelineShape, segment_boundaries: str) -> Sizes:
        """Return sizes with `routed` and `expert_buffer` added to the activations at all-to-alls.

        Args:
            shape: Shape of the pipeline.
            segment_boundaries: See `Program`. `routed` and `expert_buffer` are added at the
                boundaries with the letters d and c.
        """
        rows = sum(self.per_microbatch(name, shape) for name in ("routed", "expert_buffer"))
        letters = f"{segment_boundaries:{STAGE_END}<{shape.stages}}"
        has_rows = np.array([[letter in EP_LETTERS] for letter in letters])
        if not np.any(rows) or not has_rows.any():
            return self
        activation_sizes = {
            name: from_grid(self.per_microbatch(name, shape) + rows * has_rows)
            for name in ("activation", "activation_grad")
        }
        return replace(self, routed=0.0, expert_buffer=None, **activation_sizes)

    def _expand(self, name: str, stages: int, microbatches: int | None) -> NDArray[np.float64]:
        if name == "saved_and_deferred" and self.saved_and_deferred is None:
            sizes = (
                self._expand(part, stages, microbatches) for part in ("saved", "deferred_wgrad")
            )
            return np.maximum(*sizes)
        if name == "recompute_inputs" and self.recompute_inputs is None:
            activations = self._expand("activation", stages, microbatches)
            return np.concatenate([np.zeros_like(activations[:1]), activations[:-1]])
        if name == "model_states" and self.model_states is None:
            return sum(
                (self._expand(part, stages, microbatches) for part in STATIC_SIZES),
                np.zeros((stages, 1)),
            )
        return expand_by_stage(
            f"size {name}", self._resolve_size(name), stages, UsageError, microbatches
        )

    def _resolve_size(self, name: str) -> Size:
        """Return a size if it is given, and otherwise its fallback size."""
        value: Size | None = getattr(self, name)
        return self._resolve_size(_FALLBACK_SIZES[name]) if value is None else value

    def is_specified(self, name: str) -> bool:
        """Return whether an optional size is given.

        Args:
            name: Name of a size whose default is None.

        Returns:
            True if the size is given.
        """
        return getattr(self, name) is not None


def add_tolerance(limit: float) -> float:
    """Return a limit plus the rounding error of sums of sizes.

    Args:
        limit: A limit in bytes.

    Returns:
        The limit in bytes, plus 1 byte per terabyte.
    """
    return limit + _ROUNDING * abs(limit)


class EagerMessages(NamedTuple):
    """The limit of eager messages, which do not wait for their receive.

    Args:
        max_bytes: Largest number of bytes of an eager message.
        sizes: Bytes of values. They determine the bytes of each message.
    """

    max_bytes: float
    sizes: Sizes


def _refuse_text(name: str, text: str) -> NoReturn:
    """Raise the error for a size that is a text. The hint has a valid number."""
    try:
        hint = f"Sizes({name}={parse_bytes(text):g})"
    except ValueError:
        hint = f"Sizes({name}=16e6)"
    raise UsageError(
        f"size {name} must be a number of bytes, not the text {text!r:.60}",
        hint=hint,
        fields=[name],
    )


def parse_bytes(text: str) -> float:
    """Parse a number of bytes.

    Args:
        text: A number with an optional unit: `512`, `1.5GB` (10^9) or `1.5 GiB` (2^30).

    Returns:
        The number of bytes.

    Raises:
        ValueError: The text has another form.
    """
    match = re.fullmatch(
        r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE]\+?\d+)?)\s*([A-Za-z]*)\s*", text, re.ASCII
    )
    if not match or match[2] not in _BYTE_UNITS:
        raise ValueError(text)
    return float(match[1]) * _BYTE_UNITS[match[2]]
