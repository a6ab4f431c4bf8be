"""The attributes of a program, such as `tp`, `dp` and `zero`, and the rules for combining them."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import Any, Final, NamedTuple, NoReturn

from schedir.errors import ShapeError, describe, require_bool
from schedir.ir.cost.zero_states import SHARDED_FROM_LEVEL, ZERO_LEVEL_COUNT
from schedir.ir.isa.table_schema import TIERS
from schedir.ir.pipeline.field_schema import (
    YES_OR_NO_TYPE,
    FieldType,
    digest_value,
    make_choice_type,
    make_field_metadata,
    make_integer_type,
)
from schedir.ir.pipeline.pipeline_shape import MAX_MICROBATCHES, MAX_STAGES, PipelineShape
from schedir.ir.pipeline.skip_connections import SKIPS_TYPE as SKIPS_KIND
from schedir.ir.pipeline.stage_segments import EP_LETTERS, TP_LETTERS, has_collectives
from schedir.ir.pipeline.stage_segments import SEGMENT_BOUNDARIES_TYPE as MEETS_KIND
from schedir.ir.pipeline.tied_weights import TIED_WEIGHTS_TYPE as TIED_KIND
from schedir.ir.pipeline.tied_weights import TiedStages, format_tied_stages, normalize_tied_stages
from schedir.retired_names import get_rename_hint


class OptimizerTiers(NamedTuple):
    """The memory tiers of the optimizer state of a stage.

    Attributes:
        tier: The tier of the state between steps, one of TIERS.
        stepped_at: The tier on which the optimizer steps the state: "device" or "host".
    """

    tier: str
    stepped_at: str


# Value of `optimizer_placement` -> the tiers of the optimizer state.
OPTIMIZER_TIERS: Final = {
    **{tier: OptimizerTiers(tier, "device") for tier in TIERS},
    "cpu_step": OptimizerTiers("host", "host"),
}


def _digest_tied_weights(tied: TiedStages, shape: PipelineShape) -> tuple[object, ...]:
    """Return the entry of `tied_weights` in the digest of a program.

    The entry is True if only the first and the last stage share a weight. So the entry does not
    depend on the number of stages.
    """
    # With one stage, both keys of `old_values` are (), and the value is False: a single stage is
    # not tied.
    old_values = {normalize_tied_stages(True, shape): True, (): False}
    return (old_values.get(tied, tied),)


def _resolve_frozen_stages(name: str, value: Any, shape: PipelineShape) -> int:
    """Return the number of frozen stages. Raises ShapeError if no stage would be trained."""
    frozen: int = _STAGE_COUNT_TYPE.resolve(name, value, shape)
    if frozen >= shape.stages:
        raise ShapeError(
            f"{name} is {frozen}, but the number of stages is {shape.stages}: no stage would be "
            "trained",
            hint="the schedule forward_only runs forwards only, with or without frozen stages",
            fields=[name],
        )
    return frozen


def _resolve_chunks(name: str, value: Any, shape: PipelineShape) -> int:
    """Return the number of chunks per microbatch.

    Raises ShapeError if an update or a row of the placement would have an incomplete microbatch.
    """
    chunks: int = CHUNK_COUNT_TYPE.resolve(name, value, shape)
    if any(
        end % (chunks * shape.sequence_chunks)
        for end in (*shape.microbatch_row_offsets, shape.microbatches_per_update)
    ):
        rule = (
            "; the microbatches of each update, and of each row of the placement, must be a "
            f"multiple of {chunks * shape.sequence_chunks}"
        ) * (shape.optimizer_steps + shape.placement_rows > 2)
        raise ShapeError(
            f"{shape.microbatches} microbatches cannot be divided by {name} {chunks}{rule}",
            fields=[name, "microbatches"],
        )
    return chunks


def _make_choice_type(*choices: str, metavar: str = "WHEN") -> FieldType:
    """Return a field type that accepts only the given words."""
    requirement = f"must be {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"

    def resolve_choice(name: str, value: Any, _: PipelineShape) -> str:
        if value not in choices:
            raise ShapeError(
                f"{name} {requirement}, not {describe(value)}",
                hint=get_rename_hint(name, value),
                fields=[name],
            )
        return str(value)

    return replace(make_choice_type(requirement, choices, metavar), resolve=resolve_choice)


def _refuse(fact: str, hint: str, *fields: str) -> NoReturn:
    raise ShapeError(fact, hint=hint, fields=fields)


def _require_equally_frozen(tied_weights: TiedStages, frozen_stages: int) -> None:
    """Raise ShapeError if a weight is shared by a frozen and a trained stage."""
    for stages in tied_weights:
        if stages[0] < frozen_stages <= stages[-1]:
            _refuse(
                f"stages {format_tied_stages(stages)} share a weight, but stage {stages[0]} is "
                f"frozen and stage {stages[-1]} is trained",
                "freeze all stages that share the weight, or do not share it",
                "tied_weights",
                "frozen_stages",
            )


def _require_checkable_norm(clip_grad_norm: bool, steps: int) -> None:
    """Raise ShapeError if a program cannot check the gradient norm after the optimizer step."""
    if not clip_grad_norm:
        _refuse(
            "norm_check='after_step' needs clip_grad_norm: without clipping, there is no norm "
            "to check",
            "clip_grad_norm=True; an infinite max_norm clips nothing",
            "norm_check",
            "clip_grad_norm",
        )
    if steps > 1:
        _refuse(
            f"norm_check='after_step' needs optimizer_steps=1, not {steps}: each step computes "
            "with the weights of the step before it",
            "norm_check='before_step', or optimizer_steps=1",
            "norm_check",
            "optimizer_steps",
        )


def _require_repeatable_step(
    zero: int, checkpoint_snapshots: bool, optimizer_placement: str
) -> None:
    """Raise ShapeError if a rank cannot undo and repeat an optimizer step."""
    if zero:
        _refuse(
            f"norm_check='after_step' needs zero=0, not {zero}: to repeat a step, a rank "
            "needs full weights and gradients, but with ZeRO it has only its shards between steps",
            "norm_check='before_step'",
            "zero",
            "norm_check",
        )
    if checkpoint_snapshots:
        _refuse(
            "checkpoint_snapshots are copied during the next step, but with "
            "norm_check='after_step' that step may undo the update that is copied",
            "norm_check='before_step', or no checkpoint_snapshots",
            "checkpoint_snapshots",
            "norm_check",
        )
    if optimizer_placement != "device":
        _refuse(
            "norm_check='after_step' needs optimizer_placement='device', not "
            f"{optimizer_placement!r}: to repeat a step, a rank needs the optimizer state, "
            "but has moved it off the device",
            "optimizer_placement='device', or norm_check='before_step'",
            "optimizer_placement",
            "norm_check",
        )


def _require_zero_support(zero: int, steps: int, reduce_scatter_at: str) -> None:
    """Raise ShapeError if the ZeRO level does not permit the other attributes."""
    if zero and steps > 1:
        _refuse(
            f"zero={zero} needs optimizer_steps=1, not {steps}: weights are gathered once per "
            "program, but several optimizer steps would need a gather after each step",
            "zero=0, or optimizer_steps=1",
            "zero",
            "optimizer_steps",
        )
    if reduce_scatter_at == "each_backward" and zero < SHARDED_FROM_LEVEL["grads"]:
        _refuse(
            f"reduce_scatter_at='each_backward' needs zero={SHARDED_FROM_LEVEL['grads']} or "
            f"more, not {zero}: with zero={zero} each replica has the full gradient, and reduces "
            "it once",
            f"zero={SHARDED_FROM_LEVEL['grads']}, or reduce_scatter_at='update_end'",
            "reduce_scatter_at",
            "zero",
        )


def _require_update_before_next_step(optimizer_placement: str, steps: int) -> None:
    """Raise ShapeError if the next step would compute before the weights are updated."""
    if optimizer_placement in TIERS[1:] and steps > 1:
        _refuse(
            f"optimizer_placement={optimizer_placement!r} needs optimizer_steps=1, not {steps}: "
            "the next step would compute while the device updates the weights",
            "optimizer_placement='cpu_step' or 'device', or optimizer_steps=1",
            "optimizer_placement",
            "optimizer_steps",
        )


def _require_parallel_groups(
    segment_boundaries: str, sequence_parallel: bool, tp: int, dp: int, ep: int
) -> None:
    """Raise ShapeError if a tensor-parallel or expert-parallel group is missing or incomplete."""
    if has_collectives(segment_boundaries, TP_LETTERS) and tp == 1:
        _refuse(
            f"segment_boundaries={segment_boundaries!r} has tensor-parallel collectives, but tp "
            "is 1",
            "tp=2, or '.' for each f and g",
            "segment_boundaries",
            "tp",
        )
    if has_collectives(segment_boundaries, EP_LETTERS) and ep == 1:
        _refuse(
            f"segment_boundaries={segment_boundaries!r} has all-to-alls of experts, but ep is 1",
            "ep=2, or '.' for each d and c",
            "segment_boundaries",
            "ep",
        )
    if dp % ep:
        _refuse(
            f"dp={dp} is not a multiple of ep={ep}: experts are distributed over replicas",
            f"dp={dp - dp % ep + ep}, or an ep that divides {dp}",
            "ep",
            "dp",
        )
    if sequence_parallel and tp == 1:
        _refuse(
            "sequence_parallel splits tokens over tensor-parallel ranks, but tp is 1",
            "tp=2, or sequence_parallel=False",
            "sequence_parallel",
            "tp",
        )


def require_compatible(
    shape: PipelineShape,
    *,
    tied_weights: TiedStages,
    clip_grad_norm: bool,
    frozen_stages: int,
    norm_check: str,
    zero: int,
    reduce_scatter_at: str,
    checkpoint_snapshots: bool,
    optimizer_placement: str,
    segment_boundaries: str,
    sequence_parallel: bool,
    tp: int,
    dp: int,
    ep: int,
) -> None:
    """Raise ShapeError if attributes that are valid separately cannot be combined.

    Args:
        shape: Shape of the pipeline.
        tied_weights: See `Program`.
        clip_grad_norm: See `Program`.
        frozen_stages: See `Program`.
        norm_check: See `Program`.
        zero: See `Program`.
        reduce_scatter_at: See `Program`.
        checkpoint_snapshots: See `Program`.
        optimizer_placement: See `Program`.
        segment_boundaries: See `Program`.
        sequence_parallel: See `Program`.
        tp: See `Program`.
        dp: See `Program`.
        ep: See `Program`.

    Raises:
        ShapeError: Two attributes cannot be combined. The hint names values that work.
    """
    steps = shape.optimizer_steps
    _require_equally_frozen(tied_weights, frozen_stages)
    if norm_check == "after_step":
        _require_checkable_norm(clip_grad_norm, steps)
        _require_repeatable_step(zero, checkpoint_snapshots, optimizer_placement)
    _require_zero_support(zero, steps, reduce_scatter_at)
    _require_update_before_next_step(optimizer_placement, steps)
    _require_parallel_groups(segment_boundaries, sequence_parallel, tp, dp, ep)


# The attributes that `require_compatible` compares: all its parameters except the shape.
COMPATIBILITY_FIELDS: Final = tuple(signature(require_compatible).parameters)[1:]

_CLIPPING_HINT = "clip_grad_norm=True, and GradientOptions(max_norm=1.0) for the executor"
_CLIPPING_TYPE = replace(
    YES_OR_NO_TYPE, resolve=lambda name, value, _: require_bool(value, name, _CLIPPING_HINT)
)
_STAGE_COUNT_TYPE = make_integer_type(0, MAX_STAGES, "a number of stages")
CHUNK_COUNT_TYPE: Final = make_integer_type(1, MAX_MICROBATCHES)
_CHUNKS_TYPE = replace(CHUNK_COUNT_TYPE, resolve=_resolve_chunks)
_FROZEN_STAGES_TYPE = replace(_STAGE_COUNT_TYPE, resolve=_resolve_frozen_stages)
TP: Final = make_field_metadata(
    make_integer_type(1, 65535),
    "size of the tensor-parallel groups (1)",
    is_always_shown=True,
    digest=digest_value,
)
DP: Final = make_field_metadata(
    make_integer_type(1, 65535),
    "number of data-parallel replicas (1)",
    is_always_shown=True,
    digest=digest_value,
)
TIED_WEIGHTS: Final = make_field_metadata(
    TIED_KIND,
    "stages that share weights: yes for the first and last (a tied embedding), or a list of sets: "
    "0=2,1=3 for stages 0 and 2, and stages 1 and 3",
    is_always_shown=True,
    digest=_digest_tied_weights,
    in_config=False,  # The model section of a configuration has this setting.
)
CLIP_GRAD_NORM: Final = make_field_metadata(
    _CLIPPING_TYPE,
    "clip gradients by their global norm",
    is_always_shown=True,
    digest=digest_value,
    in_config=False,  # A configuration gives the maximal norm instead.
)
FROZEN_STAGES: Final = make_field_metadata(
    _FROZEN_STAGES_TYPE,
    "number of stages, from the first, that are not trained (0). compare and recommend divide the "
    "model into one equal part per rank, and freeze N of these parts",
)
NORM_CHECK: Final = make_field_metadata(
    _make_choice_type("before_step", "after_step"),
    "when the gradient norm is checked: before_step (default), or after_step, which repeats a "
    "step if its gradients had to be clipped",
    in_config=False,  # A training run needs the gradient norm of each step before the next step.
)
ZERO: Final = make_field_metadata(
    make_integer_type(0, ZERO_LEVEL_COUNT - 1), "ZeRO level, 0 to 3 (0)"
)
REDUCE_SCATTER_AT: Final = make_field_metadata(
    _make_choice_type("update_end", "each_backward"),
    "with zero 2 or 3, when gradients are reduced: update_end (default) or each_backward",
)
CHECKPOINT_SNAPSHOTS: Final = make_field_metadata(
    YES_OR_NO_TYPE,
    "for checkpoints, copy weights and optimizer state while the next step runs",
    in_config=False,  # The checkpoint settings of a configuration turn snapshots on.
)
OPTIMIZER_PLACEMENT: Final = make_field_metadata(
    _make_choice_type(*OPTIMIZER_TIERS, metavar="WHERE"),
    "where the optimizer state is between steps: device (default), host, disk, or cpu_step (on "
    "the host, which runs the optimizer step)",
    section="memory",
)
SEQUENCE_PARALLEL: Final = make_field_metadata(
    YES_OR_NO_TYPE, "tensor-parallel ranks also split the tokens of norms, dropout and messages"
)
EP: Final = make_field_metadata(
    make_integer_type(1, 65535),
    "size of the expert-parallel groups, which are parts of the data-parallel groups (1)",
)
SKIPS: Final = make_field_metadata(
    SKIPS_KIND,
    "skip connections, each from a source to a target stage: 0=5,1=4",
    in_config=False,  # The model of a configuration determines the skip connections.
)
SEGMENT_BOUNDARIES: Final = make_field_metadata(
    MEETS_KIND,
    "set by -O stage_segments; use that option instead. A letter for the collective between two "
    "segments: f or g (begin or end of a tensor-parallel part), d or c (dispatch or combine of "
    "experts), . (none); and - between two stages: fgfg-fgfg",
    in_config=False,  # A configuration has stage_segments instead.
)
CHUNKS_PER_MICROBATCH: Final = make_field_metadata(
    _CHUNKS_TYPE,
    "set by -O microbatch_chunks; use that option instead. Number of chunks of each microbatch; "
    "the program counts each chunk as a microbatch",
    in_config=False,  # A configuration has microbatch_chunks instead.
)
