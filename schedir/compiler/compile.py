"""Compile a schedule or a draft into a checked `Program`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, Unpack

from schedir.analysis.memory.footprint import compute_peak_bytes, require_memory_limit
from schedir.analysis.progress_models import ProgressModel
from schedir.call_errors import explain_wrong_calls
from schedir.compiler.compile_options import (
    STUB_PATH,
    CompileOptions,
    list_options_in_signature,
    make_stub,
)
from schedir.errors import (
    CommandHint,
    CompletenessError,
    DeadlockError,
    LoweringLevelError,
    MemoryLimitError,
    UsageError,
    describe,
    format_bytes,
    require_bool,
    require_type,
    to_float,
)
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes, add_tolerance, parse_bytes
from schedir.ir.isa.instructions import RECOMPUTE
from schedir.ir.pipeline.pipeline_shape import SHAPE_FIELDS, PipelineShape
from schedir.ir.pipeline.placement import Placement
from schedir.ir.pipeline.tied_weights import TiedWeights
from schedir.ir.program import ATTRIBUTE_FIELDS, Program
from schedir.passes.memory.buffer_sharing import share_slots
from schedir.passes.memory.offload_placement import DISK_TRIP, HOST_TRIP
from schedir.passes.pass_registry import LOWERING_PASSES, PASS_OPTIONS
from schedir.passes.pass_types import BoundaryLayout, BufferSharing, Options, Pass
from schedir.retired_names import RETIRED_HINTS, suggest_name
from schedir.schedules import find_schedule, get_built_in_schedules
from schedir.schedules.schedule_algebra import Schedule, get_placement_mark, get_stages_per_rank
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.verify.check import check, check_draft

SIZES_EXAMPLE = "Sizes(activation=16e6, saved=1.2e9)"  # Errors show this valid value.


@explain_wrong_calls("compile('one_f_one_b', PipelineShape(ranks=4, microbatches=8))")
@list_options_in_signature
def compile(
    schedule: str | Schedule | Program,
    shape: PipelineShape | None = None,
    *,
    tp: int | None = None,
    dp: int | None = None,
    progress_model: ProgressModel = "per_device",
    costs: Costs | None = None,
    ranks: int | None = None,
    microbatches: int | None = None,
    stages_per_rank: int | None = None,
    placement: Placement | None = None,
    optimizer_steps: int | None = None,
    weight_delay: int | tuple[int, ...] | None = None,
    sequence_chunks: int | None = None,
    tied_weights: bool | TiedWeights | Sequence[Sequence[int]] | None = None,
    clip_grad_norm: bool | None = None,
    skips: Sequence[tuple[int, int]] | None = None,
    boundary: BoundaryLayout | None = None,
    overlap: bool = False,
    buffer_sharing: BufferSharing | None = None,
    sizes: Sizes | None = None,
    memory_limit: float | None = None,
    blocking_hosts: bool = False,
    debug: bool = False,
    **extra_options: Unpack[CompileOptions],
) -> Program:
    """Compile a schedule into a program, and check it.

    Shape fields that are not given have the values that the schedule needs. For example,
    `interleaved` has two stages per rank, and `zb_v` has the placement "vee".

    Args:
        schedule: The name of a built-in schedule, a schedule function, or a draft. A draft is a
            program with compute instructions only, for example from `greedy_schedule` or a CSV
            file. A draft has its own shape. Its attributes apply unless you give other values here.
        shape: Shape of the pipeline. You can give its fields as keywords instead.
        tp: Size of the tensor-parallel groups. The default is `tp` of the draft, or 1.
        dp: Number of data-parallel replicas. The default is `dp` of the draft, or 1.
        progress_model: The progress model under which the program must finish. See `check`.
        costs: Times of instructions. They determine the order of messages. Options such as
            `buffer_sharing="latency_preserving"` and `recompute="fit"` use them, too.
        ranks: Number of pipeline ranks. This and the next six arguments are the fields of `shape`.
        microbatches: Number of microbatches of the program.
        stages_per_rank: Number of stages on each rank.
        placement: The rank of each stage: "loop", "vee", "mirror", "mirror-vee", or a list of
            ranks.
        optimizer_steps: Number of optimizer steps of the program. The pipeline does not drain
            between them.
        weight_delay: Age of the weights that a microbatch uses, in optimizer steps.
        sequence_chunks: Number of chunks of each sequence. Each chunk is a microbatch.
        tied_weights: The stages that have copies of one weight. Give the result of
            `schedir.find_tied_weights(stages)`, or tuples of stages such as `((0, 3), (1, 2))`.
            True means that the first and the last stage share a weight.
        clip_grad_norm: If True, gradients are clipped by their global norm.
        skips: Skip connections, as pairs of source and target stage: `((0, 5), (1, 4))`.
        boundary: Layout of the activations between stages on tensor-parallel ranks. A "replicated"
            activation is scattered before the send and gathered after it. A "sharded" activation is
            sent without a change. The default is "sharded" with `sequence_parallel=True`, and
            "replicated" without it.
        overlap: If True, opposite transfers of two ranks form one group, and other receives and
            gathers start early.
        buffer_sharing: The way in which values share static buffers. "minimal" uses the fewest
            buffers. "latency_preserving" searches for the fewest that do not lengthen the step with
            `costs`. If messages have cost 0, the search assumes that a message takes half a
            forward. By default each value has a separate buffer.
        sizes: Bytes of values. `memory_limit` needs them.
        memory_limit: Limit on the device memory of each rank, in bytes. None means no limit.
        blocking_hosts: If True, the host waits for the inputs of each compute, as on CPUs.
        debug: If True, the program is checked after each pass that leaves it complete.
        **extra_options: Further attributes of the program, such as `zero` and `frozen_stages` (the
            number of stages, counted from stage 0, that are not trained), and options of passes.
            `schedir options` lists all of them.

            - `recompute` selects the forwards that save only their inputs and run again. It is
              "all", "half", "fit" (as few as `memory_limit` requires), stages, pairs of (stage,
              microbatch), or a function of stage and microbatch.
            - `offload` selects the saved activations that move to the host, in the same forms.
              `offload_to_disk` selects the offloaded activations that move on to the disk.
            - `stage_segments` splits stages into segments, and `microbatch_chunks` splits
              microbatches into chunks. The program then has segments as its stages, and chunks as
              its microbatches. `costs` and `sizes` must be those of segments and chunks
              (`split_costs`).

    Returns:
        The program. It is complete, and it finishes under `progress_model`.

    Raises:
        SchedirError: The schedule is wrong.
        LoweringLevelError: `schedule` is a program that is already lowered.
        UsageError: The shape is missing or contradicts the draft, or a name or an option is
            unknown.
        MemoryLimitError: A rank needs more than `memory_limit`, or more than `host_memory_limit` on
            the host.

    Example:
        >>> from schedir import B, F, PipelineShape, compile, to_text
        >>> def mine(rank, ranks, microbatches):
        ...     return microbatches * F + microbatches * B
        >>> program = compile(mine, PipelineShape(ranks=2, microbatches=4))
        >>> print(to_text(program), end="")
        schedir 1
        program mine
        ranks 2  microbatches 4  stages_per_rank 1  placement loop
        tp 1  dp 1  tied_weights no  clip_grad_norm no
        <BLANKLINE>
        rank 0
          4 x  F 0.0+; send_act 0.0+
          4 x  recv_grad 0.0+; B 0.0+
          reduce_grads 0
          step
        <BLANKLINE>
        rank 1
          4 x  recv_act 1.0+; F 1.0+
          3 x  B 1.0+; send_grad 1.0+
          B 1.3
          reduce_grads 1
          send_grad 1.3
          step
    """
    if boundary not in (None, "replicated", "sharded"):
        raise UsageError(f"boundary must be 'replicated' or 'sharded', not {boundary!r}")
    overlap = require_bool(overlap, "overlap")
    debug = require_bool(debug, "debug")
    if costs is not None:
        require_type(costs, "costs", Costs, "Costs(F=1, B=2)")
    if sizes is not None:
        require_type(sizes, "sizes", Sizes, SIZES_EXAMPLE)
    options: dict[str, Any] = {**extra_options}
    _require_known_options(options, schedule=schedule)
    shape = resolve_shape(
        'compile("one_f_one_b", ranks=4, microbatches=8)', shape, ranks=ranks,
        microbatches=microbatches, stages_per_rank=stages_per_rank, placement=placement,
        optimizer_steps=optimizer_steps, weight_delay=weight_delay,
        sequence_chunks=sequence_chunks,
    )  # fmt: skip
    program = _to_draft(schedule, shape)
    attributes: dict[str, Any] = {
        "tp": tp,
        "dp": dp,
        "tied_weights": tied_weights,
        "clip_grad_norm": clip_grad_norm,
        "skips": skips,
    }
    attributes |= {f.name: options.pop(f.name) for f in ATTRIBUTE_FIELDS if f.name in options}
    program = replace(program, **{k: v for k, v in attributes.items() if v is not None})
    program = lower(
        _require_complete_draft(program), costs, progress_model,
        boundary=boundary, overlap=overlap, buffer_sharing=buffer_sharing, sizes=sizes,
        memory_limit=memory_limit, debug=debug,
        **options,
    )  # fmt: skip
    program = check(program, progress_model, blocking_hosts=blocking_hosts)
    if (host_limit := options.get("host_memory_limit")) is not None:
        check_memory(program, sizes, host_limit, "host")
    return program if memory_limit is None else check_memory(program, sizes, memory_limit)


def _require_known_options(
    extra_options: Mapping[str, Any], *, attributes: bool = True, schedule: object = None
) -> None:
    """Raise UsageError for an option that `compile` does not have.

    Args:
        extra_options: The options of a call.
        attributes: True if attributes of the program are allowed.
        schedule: The schedule of the call. The hint may say that an option is its parameter.
    """
    attribute_names = {f.name for f in ATTRIBUTE_FIELDS} if attributes else set()
    for option in extra_options:
        if option not in PASS_OPTIONS and option not in attribute_names:
            parameters = [*signature(compile).parameters][1:]
            option_names = [*parameters, *sorted({*PASS_OPTIONS} - {*parameters})]
            suggestion = _suggest_binding(schedule, option) or suggest_name(option, option_names)
            suggestion = suggestion or f"the options are {', '.join(option_names)}"
            raise UsageError(
                f"compile has no option {option!r}",
                hint=RETIRED_HINTS.get(option, suggestion),
                fields=[option],
            )


def _suggest_binding(schedule: object, option: str) -> str:
    """Return a hint if an option is a parameter of the user's schedule function."""
    if not callable(schedule):
        return ""
    try:
        parameters = signature(schedule).parameters
    except (TypeError, ValueError):
        return ""
    if option not in parameters:
        return ""
    name = getattr(schedule, "__name__", "schedule")
    return f"it is a parameter of the schedule: compile(functools.partial({name}, {option}=...))"


def require_option_names(options: Mapping[str, Any]) -> None:
    """Refuse options that `compile` does not have, before a call of `compile`.

    Args:
        options: Options for a later call of `compile`.

    Raises:
        UsageError: `compile` has no option of this name.
    """
    parameters = signature(compile).parameters
    _require_known_options(
        {name: value for name, value in options.items() if name not in parameters}
    )


def resolve_shape(example: str, shape: PipelineShape | None, **fields: Any) -> PipelineShape | None:
    """Return `shape`, or make a shape from keywords.

    Args:
        example: A correct call of the function that accepts these keywords, for errors.
        shape: The shape that the user gave, or None.
        **fields: Fields of `PipelineShape`. None means that a field is not given.

    Returns:
        The shape, or None if nothing is given.

    Raises:
        UsageError: Both a shape and fields are given, or `ranks` or `microbatches` is missing.
        ShapeError: A field is invalid.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    if not fields:
        return shape
    if shape is not None:
        raise UsageError(
            f"shape and {', '.join(fields)} cannot both be given",
            hint="give a PipelineShape, or its fields as keywords",
            fields=[*fields],
        )
    missing = [name for name in ("ranks", "microbatches") if name not in fields]
    if missing:
        raise UsageError(
            f"{example.partition('(')[0]} needs {' and '.join(missing)}; given: "
            f"{', '.join(fields)}",
            hint=example,
            fields=missing,
        )
    return PipelineShape(**fields)


def _to_draft(schedule: str | Schedule | Program, shape: PipelineShape | None) -> Program:
    """Expand a schedule to a draft, or verify a given draft and return it."""
    if isinstance(schedule, str):
        schedule = find_schedule(schedule)
    if not isinstance(schedule, Program):
        if shape is None:
            raise UsageError(
                "compile needs ranks and microbatches for this schedule",
                hint="ranks=4, microbatches=8",
                fields=["ranks", "microbatches"],
            )
        require_type(shape, "shape", PipelineShape, "PipelineShape(ranks=4, microbatches=8)")
        return expand_schedule(schedule, shape)
    if not schedule.is_draft:
        raise LoweringLevelError(
            "the program is lowered already: it has instructions other than F, B, I, W and R",
            program=schedule.name,
            hint="call schedir.check(program) to verify the program"
            if shape is None
            else "compile the schedule again, with the other shape",
        )
    if shape is not None:
        given_names = (f.name for f in SHAPE_FIELDS if f.name not in shape.default_fields)
        if any(getattr(shape, name) != getattr(schedule.shape, name) for name in given_names):
            raise UsageError(
                f"the draft has the shape {schedule.shape}, but the argument shape is {shape}"
            )
    return schedule


def _require_complete_draft(program: Program) -> Program:
    """Verify that a draft is complete, and return it.

    If each rank has instructions of its first stage only, the error gets a hint.
    """
    try:
        return check_draft(program)
    except CompletenessError as error:
        first_stages = [local_stages[0] for local_stages in program.shape.stages_on_rank]
        used_stages = {
            int(stage) for stream in program.streams for stage in set(stream.stage.tolist())
        }
        if program.shape.stages_per_rank > 1 and used_stages <= {*first_stages}:
            error.hint = (
                "F is F[0], the first stage of a rank: add F[1] and B[1] for its second stage; a "
                "parameter v receives the number of stages of a rank"
            )
            built_in = get_built_in_schedules()
            if program.name in built_in:
                multi_stage_names = [
                    name
                    for name, built_in_schedule in built_in.items()
                    if get_stages_per_rank(built_in_schedule) > 1
                    and _supports_placement(built_in_schedule, program.shape)
                ]
                error.hint = f"{program.name} has one stage per rank"
                if multi_stage_names:
                    error.hint += f"; use {' or '.join(multi_stage_names)}"
        raise


def _supports_placement(schedule: Schedule, shape: PipelineShape) -> bool:
    """Return whether a schedule works with the placement and the stages per rank of a shape."""
    placement, stages_per_rank = get_placement_mark(schedule)
    return placement in (None, shape.placement) and stages_per_rank in (
        None,
        shape.stages_per_rank,
    )


def check_memory(
    program: Program, sizes: Sizes | None, limit: float, tier: str = "device"
) -> Program:
    """Verify that no rank exceeds a memory limit, and return the program.

    Args:
        program: A program that `check` has accepted.
        sizes: Bytes of values.
        limit: The limit of each rank, in bytes, or a text such as "40GB".
        tier: The memory to which the limit applies: "device", "host" or "disk".

    Returns:
        `program` itself.

    Raises:
        MemoryLimitError: A rank needs more than `limit`. The error contains the rank, the
            instruction at the peak, and the values in memory at that time. If an option helps, the
            hint names it.
        UsageError: `sizes` is None, or `limit` is not a number of bytes.
    """
    name = "memory_limit" if tier == "device" else f"{tier}_memory_limit"
    if sizes is None:
        raise UsageError(
            f"{name} needs sizes, the bytes of each kind of value",
            hint=CommandHint(
                "sizes=Sizes(activation=16e6, saved=1.2e9)", "--sizes activation=16MB,saved=1.2GB"
            ),
            fields=[name, "sizes"],
        )
    require_type(sizes, "sizes", Sizes, SIZES_EXAMPLE)
    limit_bytes = _parse_byte_limit(limit, name)
    try:
        return require_memory_limit(program, sizes, limit_bytes, tier)
    except MemoryLimitError as error:
        if tier == "host":
            if program.used_opcodes.isdisjoint(HOST_TRIP):
                effect = "keeps the optimizer state on the device"
                error.hint = _hint_option("optimizer_placement", "device", effect)
            elif program.used_opcodes.isdisjoint(DISK_TRIP):
                effect = "moves activations that do not fit to the disk"
                error.hint = _hint_option("offload_to_disk", "fit", effect)
            raise
        minimal_program = share_slots(program, "minimal")
        peak = float(compute_peak_bytes(minimal_program, sizes).max())
        if peak <= add_tolerance(limit_bytes):
            effect = f"ranks need at most {format_bytes(peak)}"
            error.hint = _hint_option("buffer_sharing", "minimal", effect, "with ")
        elif program.used_opcodes.isdisjoint((*HOST_TRIP, RECOMPUTE)):
            # At the peak, an instruction uses one of the saved values, so this value cannot move.
            count, size = next(
                (value[1:] for value in error.live_values if value[0] == "saved"),
                (0, 0.0),
            )
            movable_bytes = size * (count - 1) / max(count, 1)
            if movable_bytes and error.required_bytes - movable_bytes <= add_tolerance(limit_bytes):
                size_text = f"{format_bytes(size)} are saved activations"
                action = "moves them to the host"
                error.hint = CommandHint(
                    f'{size_text}: offload="fit" {action}, recompute="fit" computes them again',
                    f"{size_text}: -O offload=fit {action}, -O recompute=fit computes them again",
                )
        raise


def _hint_option(name: str, value: str, effect: str, prefix: str = "") -> CommandHint:
    python, command = f'{name}="{value}"', f"-O {name}={value}"
    return CommandHint(f"{prefix}{python} {effect}", f"{prefix}{command} {effect}")


def _parse_byte_limit(limit: object, name: str) -> float:
    """Convert a limit to bytes. Raises UsageError if the limit is not a number, or is negative."""
    try:
        size = parse_bytes(limit) if isinstance(limit, str) else to_float(limit)
    except ValueError:
        size = None
    if size is None or size < 0:
        raise UsageError(
            f"{name} must be a number of bytes, not {describe(limit)}",
            hint=f"{name}=40e9",
            fields=[name],
        )
    return size


def lower(
    program: Program,
    costs: Costs | None = None,
    progress_model: ProgressModel = "per_device",
    *,
    boundary: BoundaryLayout | None = None,
    overlap: bool = False,
    buffer_sharing: BufferSharing | None = None,
    sizes: Sizes | None = None,
    memory_limit: float | None = None,
    debug: bool = False,
    **extra_options: Any,
) -> Program:
    """Lower a complete draft: add its transfers, reductions and optimizer steps.

    Without `overlap` and `buffer_sharing`, the result is legal under every progress model. With one
    of these options, the passes optimize for `progress_model`, and the caller must check the
    result.

    Args:
        program: A complete draft.
        costs: See `compile`.
        progress_model: See `compile`.
        boundary: See `compile`.
        overlap: See `compile`.
        buffer_sharing: See `compile`.
        sizes: See `compile`.
        memory_limit: See `compile`. Passes use the limit; this function does not verify it.
        debug: See `compile`.
        **extra_options: Options of passes. Attributes of the program are refused.

    Returns:
        The program with all its instructions. It is not checked.

    Raises:
        UsageError: An option is unknown, a limit is not a number of bytes, or `boundary` is
            "replicated" with sequence parallelism.
        ShapeError: The program would have more instructions than allowed.
    """
    _require_known_options(extra_options, attributes=False)
    if (host_limit := extra_options.get("host_memory_limit")) is not None:
        extra_options["host_memory_limit"] = _parse_byte_limit(host_limit, "host_memory_limit")
    if memory_limit is not None:
        memory_limit = _parse_byte_limit(memory_limit, "memory_limit")
    if boundary == "replicated" and program.sequence_parallel:
        raise UsageError(
            "boundary='replicated' does not work with sequence_parallel: each tensor-parallel "
            "rank has only its own tokens",
            hint="boundary='sharded', or sequence_parallel=False",
            fields=["boundary", "sequence_parallel"],
        )
    boundary = boundary or ("sharded" if program.sequence_parallel else "replicated")
    # Passes read an option several times, and an iterator can be read only once.
    extra_options = {
        k: tuple(v) if isinstance(v, Iterator) else v for k, v in extra_options.items()
    }
    options = Options(
        costs, progress_model, boundary, overlap, buffer_sharing, extra_options, sizes, memory_limit
    )
    program.shape.require_lowered_limit(
        has_backward=program.has_backward, frozen_stages=program.frozen_stages
    )
    try:
        return _apply_passes(program, LOWERING_PASSES, options, debug=debug)
    except DeadlockError as error:
        error.hint = error.hint or _suggest_placement(program)
        raise


def _suggest_placement(draft: Program) -> str:
    """Return a hint if the stages of a built-in schedule are not in the order of the ranks."""
    in_order = all(stages == (rank,) for rank, stages in enumerate(draft.shape.stages_on_rank))
    if in_order or draft.shape.stages_per_rank > 1 or draft.name not in get_built_in_schedules():
        return ""
    return f"use placement loop: {draft.name} takes the rank as the position of its stage"


def finish_lowering(program: Program) -> Program:
    """Add reductions, optimizer steps and weight gathers to a program that has its transfers.

    Args:
        program: A program with transfers. It may have the reductions of gradients and the gathers
            of weights already.

    Returns:
        The program after the passes of the lowering phases "ends" and "memory", with default
        options.
    """
    return _apply_passes(
        program, [p for p in LOWERING_PASSES if p.phase in ("ends", "memory")], Options()
    )


def _apply_remaining_passes(
    passes: Sequence[Pass], options: Options, program: Program, **extra_options: Any
) -> Program:
    """Apply the passes that come after a pass. `extra_options` replaces some of the options."""
    merged_options = {**options.extra_options, **extra_options}
    return _apply_passes(
        program,
        passes,
        replace(options, extra_options=merged_options) if extra_options else options,
    )


def _apply_passes(
    program: Program, passes: Sequence[Pass], options: Options, *, debug: bool = False
) -> Program:
    """Apply each pass whose `should_run` returns True."""
    for k, lowering_pass in enumerate(passes):
        if lowering_pass.should_run(program, options):
            run_later_passes = partial(_apply_remaining_passes, passes[k + 1 :], options)
            pass_options = replace(options, run_later_passes=run_later_passes)
            lowered = lowering_pass.lower(program, pass_options)
            if lowered is not program:
                program.clear_cache()
            program = lowered
        is_complete = all(
            later_pass.phase in ("memory", "better") for later_pass in passes[k + 1 :]
        )
        if debug and is_complete:
            is_better = lowering_pass.phase == "better"
            check(program, options.progress_model if is_better else "blocking_serial")
    return program


if __name__ == "__main__":
    STUB_PATH.write_text(make_stub(compile))
