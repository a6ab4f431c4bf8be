"""Derive a forward-only program for evaluation from a training program."""

from __future__ import annotations

from dataclasses import replace

from schedir.analysis.progress_models import ProgressModel
from schedir.compiler.compile import lower
from schedir.errors import require_type
from schedir.ir.isa.instructions import FORM_CHANGE_OPS, FORWARD
from schedir.ir.program import WORD_DTYPE, Program, Stream, is_op
from schedir.ir.stream import JOINED_BIT
from schedir.passes.pass_types import BoundaryLayout, BufferSharing


def evaluation_program(
    program: Program,
    progress_model: ProgressModel = "per_device",
    *,
    overlap: bool = False,
    buffer_sharing: BufferSharing | None = None,
) -> Program:
    """Return a program that runs only the forwards of a training program, in the same order.

    The new program has the ranks and the placement of `program`, but other transfers. To run an
    evaluation, create the executor with the new program in `extra_programs`.

    Args:
        program: The training program.
        progress_model: See `compile`.
        overlap: See `compile`.
        buffer_sharing: See `compile`.

    Returns:
        The lowered program. Its name is "forwards of " plus the name of `program`.

    Raises:
        UsageError: `program` is not a program.

    Example:
        >>> from schedir import PipelineShape, compile, evaluation_program, schedules
        >>> train = compile(schedules.one_f_one_b, PipelineShape(ranks=2, microbatches=4))
        >>> evaluation_program(train)
        <program forwards of one_f_one_b: 2 ranks, 16 instructions>
    """
    require_type(program, "program", Program, "schedir.compile(schedule, shape)")
    streams = []
    for stream in program.streams:
        words = stream.words[is_op(stream.words.view(WORD_DTYPE)["op"], (FORWARD,))]
        streams.append(Stream(words & ~JOINED_BIT))
    draft = Program(
        f"forwards of {program.name}",
        replace(program.shape, optimizer_steps=1, weight_delay=0),
        tuple(streams),
        tp=program.tp,
        dp=program.dp,
        ep=program.ep,
        frozen_stages=program.frozen_stages,
        skips=program.skips,
        zero=program.zero,
        segment_boundaries=program.segment_boundaries,
        chunks_per_microbatch=program.chunks_per_microbatch,
        sequence_parallel=program.sequence_parallel,
    )
    is_scattered = not program.used_opcodes.isdisjoint(FORM_CHANGE_OPS)
    boundary: BoundaryLayout | None = None if is_scattered or program.tp == 1 else "sharded"
    return lower(
        draft,
        None,
        progress_model,
        boundary=boundary,
        overlap=overlap,
        buffer_sharing=buffer_sharing,
    )
