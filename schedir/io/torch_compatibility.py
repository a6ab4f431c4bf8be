"""Refuse programs that torch's schedules cannot express."""

from __future__ import annotations

from collections.abc import Collection

from schedir.errors import GroupError, InstructionSite, UsageError
from schedir.ir.isa.instructions import (
    BACKWARDS,
    COMPUTE,
    FORWARD,
    RECOMPUTE,
    REDUCES,
    ROWS,
    TRANSFERS,
    Opcode,
    Scope,
    Value,
    changes,
)
from schedir.ir.pipeline.stage_segments import ranks_meet
from schedir.ir.program import FIELDS, JOINED, Program, is_op

_MOVES = {op for op in changes(Value.SAVED) if op not in COMPUTE}
_IN_TURNS = tuple(op for op in REDUCES if ROWS[op].per is Scope.OCCURRENCE)


def require_torch_has_it(
    program: Program, *, computes: bool, actions: Collection[Opcode] = ()
) -> None:
    """Refuse a program that torch's schedules cannot express.

    Args:
        program: The program.
        computes: Whether only its computes are exported, and torch adds the transfers.
        actions: The instructions for which torch has an action.

    Raises:
        UsageError: The program has something that torch's schedules cannot do.
    """
    if program.shape.rows > 1:
        raise UsageError(
            f"{program.name} has {program.shape.rows} holders of each stage, and torch's schedules "
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
    if RECOMPUTE in program.ops:
        raise UsageError(
            f"{program.name} has R, and torch's runtime recomputes within backwards only",
            program=program.name,
            hint="leave recompute out, and run what is in these stages under "
            "torch.utils.checkpoint",
        )
    if not program.ops.isdisjoint(_MOVES):
        raise UsageError(
            f"{program.name} offloads what forwards saved, for which schedules of torch, and what "
            "stands in the place of one, have no action",
            program=program.name,
            hint="schedir.runtime.Executor runs it; or leave offload out, and run what is in these "
            "stages under torch.autograd.graph.save_on_cpu",
        )
    if ranks_meet(program.segment_boundaries):
        raise UsageError(
            f"{program.name} sums what pieces of its stages pass on, for which torch's schedules "
            "have no action",
            program=program.name,
            hint="leave cut out, or tp where the modules of pieces sum by themselves",
        )
    strange = sorted(op for op in program.ops if not ROWS[op].in_torch and op not in actions)
    if strange:
        text = ROWS[strange[0]].text
        raise UsageError(
            f"{program.name} has {text}, for which torch's schedules have no action",
            program=program.name,
            hint="compile it without",
        )
    fields = program.words.view(FIELDS)
    if not computes and (is_op(fields["op"], _IN_TURNS) & (fields["mb"] > 0)).any():
        raise UsageError(
            f"{program.name} reduces gradients in turns, and torch's schedules reduce them once",
            program=program.name,
            hint="compile it with reduce_scatter_at='update_end'",
        )


def require_pair(program: Program, rank: int, index: int) -> None:
    """Refuse what torch cannot run as one: it has pairs of a forward and a backward only."""
    stream = program.streams[rank]
    both = [stream[k].op for k in range(max(index - 1, 0), index + 1)]
    alone = not stream.words[max(index - 1, 0)] & JOINED
    if alone and FORWARD in both and any(op in BACKWARDS for op in both):
        return
    transfers = all(op in TRANSFERS for op in both)
    raise GroupError(
        "torch issues each transfer by itself"
        if transfers
        else "torch runs a forward and a backward as one, and nothing else",
        program=program.name,
        sites=[InstructionSite(rank, k, stream[k]) for k in range(max(index - 1, 0), index + 1)],
        hint="export to 'torch', where it places transfers itself" if transfers else "",
    )
