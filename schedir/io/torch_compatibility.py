"""Refuse programs that torch's schedules cannot express."""

from __future__ import annotations

from collections.abc import Collection

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
from schedir.ir.pipeline.stage_segments import has_tp_collectives
from schedir.ir.program import JOINED_BIT, WORD_DTYPE, Program, is_op

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
        UsageError: The program has several replicas of a stage, several updates, skips, R,
            offloads, or collectives between segments. Or it reduces gradients of a stage several
            times. Or it has an instruction for which torch has no action.
    """
    if program.shape.placement_rows > 1:
        raise UsageError(
            f"{program.name} has {program.shape.placement_rows} holders of each stage, and "
            "torch's schedules "
            "have one",
            program=program.name,
        )
    if program.shape.optimizer_steps > 1:
        raise UsageError(
            f"{program.name} has {program.shape.optimizer_steps} updates, "
            "and torch's schedules one",
            program=program.name,
        )
    if program.skips:
        raise UsageError(
            f"{program.name} has skips, and stages of torch's schedules pass on to neighbours only",
            program=program.name,
        )
    if RECOMPUTE in program.used_opcodes:
        raise UsageError(
            f"{program.name} has R, and torch's runtime recomputes within backwards only",
            program=program.name,
            hint="leave recompute out, and run what is in these stages under "
            "torch.utils.checkpoint",
        )
    if not program.used_opcodes.isdisjoint(_OFFLOAD_OPS):
        raise UsageError(
            f"{program.name} offloads what forwards saved, for which schedules of torch, and what "
            "stands in the place of one, have no action",
            program=program.name,
            hint="schedir.runtime.Executor runs it; or leave offload out, and run what is in these "
            "stages under torch.autograd.graph.save_on_cpu",
        )
    if has_tp_collectives(program.segment_boundaries):
        raise UsageError(
            f"{program.name} sums what pieces of its stages pass on, for which torch's schedules "
            "have no action",
            program=program.name,
            hint="leave cut out, or tp where the modules of pieces sum by themselves",
        )
    strange = sorted(
        op
        for op in program.used_opcodes
        if not INSTRUCTIONS[op].is_implicit_in_torch and op not in supported_ops
    )
    if strange:
        text = INSTRUCTIONS[strange[0]].text
        raise UsageError(
            f"{program.name} has {text}, for which torch's schedules have no action",
            program=program.name,
            hint="compile it without",
        )
    fields = program.words.view(WORD_DTYPE)
    if (
        not compute_only
        and (is_op(fields["op"], _PER_OCCURRENCE_REDUCES) & (fields["mb"] > 0)).any()
    ):
        raise UsageError(
            f"{program.name} reduces gradients in turns, and torch's schedules reduce them once",
            program=program.name,
            hint="compile it with reduce_scatter_at='update_end'",
        )


def require_torch_pair(program: Program, rank: int, index: int) -> None:
    """Raise GroupError if torch cannot run two instructions as one.

    torch runs only a forward and a backward as one.

    Args:
        program: The program.
        rank: The rank.
        index: The index in the Stream of the second instruction. It is joined with the one before.

    Raises:
        GroupError: The two are not a forward and a backward, or more than two are joined.
    """
    stream = program.streams[rank]
    both = [stream[k].op for k in range(max(index - 1, 0), index + 1)]
    alone = not stream.words[max(index - 1, 0)] & JOINED_BIT
    if alone and FORWARD in both and any(op in BACKWARD_OPS for op in both):
        return
    transfers = all(op in TRANSFER_OPS for op in both)
    raise GroupError(
        "torch issues each transfer by itself"
        if transfers
        else "torch runs a forward and a backward as one, and nothing else",
        program=program.name,
        sites=[InstructionSite(rank, k, stream[k]) for k in range(max(index - 1, 0), index + 1)],
        hint="export to 'torch', where it places transfers itself" if transfers else "",
    )
