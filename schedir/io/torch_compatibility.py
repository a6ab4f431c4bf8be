"""Refuse programs that torch's schedules cannot express."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from schedir.errors import GroupError, InstructionSite, UsageError
from schedir.ir.isa.instructions import (
    BACKWARD_OPS,
    COMPUTE_OPS,
    FORWARD,
    INSTRUCTIONS,
    RECOMPUTE,
    REDUCTION_OPS,
    TRANSFER_OPS,
    Opcode,
    Scope,
    Value,
    find_modifiers,
)
from schedir.ir.pipeline.stage_segments import has_collectives
from schedir.ir.program import JOINED_BIT, WORD_DTYPE, Program, is_op
from schedir.passes.pass_registry import OPTION_BY_OPCODE

_OFFLOAD_OPS = {op for op in find_modifiers(Value.SAVED) if op not in COMPUTE_OPS}
_PER_OCCURRENCE_REDUCES = tuple(
    op for op in REDUCTION_OPS if INSTRUCTIONS[op].scope is Scope.OCCURRENCE
)


def require_torch_support(
    program: Program, *, compute_only: bool, supported_ops: Collection[Opcode] = ()
) -> None:
    """Raise UsageError if torch's schedules cannot express a program.

    Args:
        program: The program.
        compute_only: True if only compute is exported, and torch adds the transfers.
        supported_ops: The instructions for which torch has an action.

    Raises:
        UsageError: The program has several replicas of a stage, several updates, skip connections,
            Recompute instructions, offloads of activations, or collectives between segments. Or it
            has an instruction for which torch has no action. Or it reduces gradients of a stage
            several times, and `compute_only` is False.
    """
    refusals = _find_refusals(program, supported_ops, compute_only=compute_only)
    if (refusal := next(refusals, None)) is not None:
        fact, hint = refusal
        raise UsageError(f"the program {fact}", program=program.name, hint=hint)


def _find_refusals(
    program: Program, supported_ops: Collection[Opcode], *, compute_only: bool
) -> Iterator[tuple[str, str]]:
    """Yield what a program has or does that torch's schedules cannot express, and a hint."""
    no_action = "but torch's schedules have no action for"
    for number, noun in (
        (program.shape.placement_rows, "replicas of each stage"),
        (program.shape.optimizer_steps, "updates"),
    ):
        if number > 1:
            yield f"has {number} {noun}, but torch's schedules have one", ""
    if program.skips:
        yield "has skip connections, but torch's stages send to their neighbours only", ""
    if RECOMPUTE in program.used_opcodes:
        yield (
            "has Recompute instructions (R), but torch's runtime recomputes only inside a backward",
            "leave out recompute, and use torch.utils.checkpoint in the modules of the stages",
        )
    if not program.used_opcodes.isdisjoint(_OFFLOAD_OPS):
        yield (
            f"offloads activations, {no_action} this",
            "run it with schedir.runtime.Executor; or leave out offload, and use "
            "torch.autograd.graph.save_on_cpu in the modules of the stages",
        )
    if has_collectives(program.segment_boundaries):
        yield (
            f"has collectives between the segments of a stage, {no_action} them",
            "leave out stage_segments, or leave out tp and ep if the modules run the collectives",
        )
    for op in sorted(program.used_opcodes - {*supported_ops}):
        if not INSTRUCTIONS[op].is_implicit_in_torch:
            text = INSTRUCTIONS[op].text
            yield (
                f"has {text}, {no_action} this",
                f"compile it without {OPTION_BY_OPCODE.get(op, text)}",
            )
    fields = program.words.view(WORD_DTYPE)
    is_repeated = is_op(fields["op"], _PER_OCCURRENCE_REDUCES) & (fields["mb"] > 0)
    if not compute_only and is_repeated.any():
        yield (
            "reduces the gradients of a stage several times, but torch reduces them once",
            "compile it with reduce_scatter_at='update_end'",
        )


def require_torch_pair(program: Program, rank: int, index: int) -> None:
    """Raise GroupError if torch cannot run two instructions as one action.

    torch runs only a forward and a backward as one action.

    Args:
        program: The program.
        rank: The rank.
        index: The index in the Stream of the second instruction. This instruction is joined with
            the previous instruction.

    Raises:
        GroupError: The two instructions are not a forward and a backward, or more than two are
            joined.
    """
    stream = program.streams[rank]
    pair_ops = [stream[k].op for k in range(max(index - 1, 0), index + 1)]
    is_first = not stream.words[max(index - 1, 0)] & JOINED_BIT
    if is_first and FORWARD in pair_ops and any(op in BACKWARD_OPS for op in pair_ops):
        return
    is_transfer_pair = all(op in TRANSFER_OPS for op in pair_ops)
    raise GroupError(
        "torch cannot issue two transfers as one"
        if is_transfer_pair
        else "torch runs only a forward and a backward as one",
        program=program.name,
        sites=[InstructionSite(rank, k, stream[k]) for k in range(max(index - 1, 0), index + 1)],
        hint="export to 'torch': torch then adds the transfers itself" if is_transfer_pair else "",
    )
