"""Insert Unshard and Reshard around the compute of ZeRO-3 stages.

ZeRO (arXiv 1910.02054) as instructions: where weights are in parts, at level 3, no more than
`active` stages of a rank are whole at once; below it all of them are, until their last use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from schedir.analysis.memory.unshard_residency import AHEAD, whole
from schedir.analysis.progress_models import ProgressModel
from schedir.errors import ShapeError, UsageError
from schedir.ir.cost.zero_states import CUT_FROM
from schedir.ir.isa.instructions import ROWS, Opcode, Value
from schedir.ir.pipeline.field_schema import whole_number
from schedir.ir.pipeline.pipeline_shape import MAX_MICROBATCHES, MAX_STAGES
from schedir.ir.program import OWN, Program, SlotCounts, StreamSlices, pack
from schedir.passes.insertion import at_places
from schedir.passes.pass_types import ExpectedInstructions, Options, Pass, Present
from schedir.passes.stage_runs import StageRuns, runs, turns

_READS: Final = tuple(
    row.op for row in ROWS if Value.UNSHARDED_PARAMS in {*row.needs} - {*row.frees}
)
_ROWS: Final = (Opcode.Unshard, Opcode.Reshard)
_KINDS: Final = {
    "unsharded_stages": whole_number(1, MAX_STAGES),
    "unshard_prefetch": whole_number(0, MAX_MICROBATCHES),
}


def shard(program: Program, options: Options) -> Program:
    """Unshard and Reshard for each stay of a stage among those that are whole.

    A stage is let go of right behind the last reader of a stay, and made whole as soon as there is
    room for it: so the k-th gather of a rank stands behind the Reshard that is `active` before it,
    and the first ones at the head of the Stream, hidden under the warm-up.  At level 3 the slots
    of whole weights say so, too: then no more stages than that are whole at once, whatever the
    timing is.

    `active` is how many those are.  By default it is one more than are used at once, so that the
    next is gathered meanwhile; the largest part of what level 3 can spare is spared.  `ahead` is
    how many runs of one stage's instructions before its own each is whole, where there is room: by
    default one, which hides a gather behind a run, and costs few gathers more than none, with
    which there are the fewest.

    Raises UsageError for more active stages than a rank has, fewer than are used at once, and
    where all are whole anyway; ShapeError for what is no such number.
    """
    said = {
        name: kind.settle(name, options.more[name], program.shape)
        for name, kind in _KINDS.items()
        if options.more.get(name) is not None
    }
    if said and not _may_let_go(program):
        (name, *_) = said
        raise UsageError(
            f"{name} is {said[name]}, and with zero {program.zero} all stages stay whole",
            hint=f"zero={CUT_FROM['params']}, or leave {name} out",
            fields=[name, "zero"],
        )
    uses = runs(program, _READS)
    active = _active(program, uses, said.get("unsharded_stages"))
    rooms, at, rank, words = [], [], [], []
    for one in range(program.shape.ranks):
        here = slice(*np.searchsorted(uses.rank, [one, one + 1]))
        step, stage, end = uses.step[here], uses.stage[here], uses.end[here]
        own, begin, end = whole(
            step, stage, end, active, said.get("unshard_prefetch", AHEAD), program.offsets[one]
        )
        turn = turns(own)
        at += [end, begin]
        words += [pack(Opcode.Reshard, own, turn), pack(Opcode.Unshard, own, turn)]
        rank.append(np.full(2 * len(own), one))
        rooms.append(min(active, len(np.unique(own))))
    program = at_places(program, *map(np.concatenate, (at, rank, words)))
    if program.zero < CUT_FROM["params"]:
        return program
    return program.with_slots(
        [SlotCounts.unsaid()._replace(unsharded_params=room) for room in rooms]
    )


def _may_let_go(program: Program) -> bool:
    """Whether weights are in parts between their uses, or whole in all of the step."""
    return program.zero >= CUT_FROM["params"]


def _active(program: Program, uses: StageRuns, said: int | None) -> int:
    """How many stages of a rank are whole at once."""
    own = [len({*stages} - {*range(program.frozen_stages)}) for stages in program.shape.stages_of]
    if program.zero < CUT_FROM["params"]:
        return max(own)
    if said is None:
        return uses.most + 1
    if said > max(own):
        raise ShapeError(
            f"unsharded_stages is {said}, and no rank has more than {max(own)} "
            f"stage{'s' if max(own) > 1 else ''} to make whole",
            program=program.name,
            hint=f"unsharded_stages={max(own)}",
            fields=["unsharded_stages"],
        )
    if said < uses.most:
        raise ShapeError(
            f"unsharded_stages is {said}, and one action uses {uses.most} stages at once",
            program=program.name,
            hint=f"unsharded_stages={uses.most}",
            fields=["unsharded_stages"],
        )
    return said


def _both(program: Program, present: Present) -> Iterator[ExpectedInstructions]:
    once = present(Opcode.Unshard).copy()
    each = np.arange(program.shape.stages) >= program.frozen_stages
    once[: program.shape.holders.size] = np.tile(each, program.shape.rows)
    once &= program.zero > 0
    why = "the program says 'zero 0'" if not program.zero else "its weights are not gathered"
    for op, other, hint in (
        (Opcode.Unshard, Opcode.Reshard, "an unshard stands before what uses its weights"),
        (Opcode.Reshard, Opcode.Unshard, "a reshard stands behind the last that uses its weights"),
    ):
        yield ExpectedInstructions(op, once, why, hint, other)


def _read(program: Program, progress_model: ProgressModel) -> dict[str, Any]:
    """What gives the same stays: of `active` the slots, of `ahead` the first that does."""
    rooms = [slots.unsharded_params for slots in program.slots if slots.unsharded_params != OWN]
    if program.zero < CUT_FROM["params"] or not any(rooms):
        return {}
    moved = np.isin(program.op, _ROWS)
    offsets = np.append(0, np.cumsum(~moved))[program.offsets]
    bare = replace(program, streams=StreamSlices.at(program.words[~moved], offsets), slots=())
    found: dict[str, Any] = {"unsharded_stages": max(rooms)}
    for ahead in (AHEAD, 0, *range(AHEAD + 1, max(rooms) + 1)):
        more = found if ahead == AHEAD else found | {"unshard_prefetch": ahead}
        if _stays_of(shard(bare, Options(more=more))) == _stays_of(program):
            return more
    return found


def _stays_of(program: Program) -> bytes:
    """What uses weights, and makes them whole and parts, in its order."""
    return program.words[np.isin(program.op, (*_READS, *_ROWS))].tobytes()


def _wanted(program: Program, options: Options) -> bool:
    said = any(options.more.get(name) is not None for name in _KINDS)
    return said or (program.zero > 0 and program.ops.isdisjoint(_ROWS))


PASSES = (
    Pass(
        "shard",
        "ends",
        shard,
        _wanted,
        _both,
        _read,
        options=("unsharded_stages", "unshard_prefetch"),
        applies=_may_let_go,
        section="memory",
        kinds=_KINDS,
        abouts={
            "unsharded_stages": "with zero 3: how many stages of a rank have unsharded "
            "weights at once; by "
            "default the stage that computes and the next one",
            "unshard_prefetch": "with zero 3: by how many runs of other stages an unshard "
            "precedes its "
            "use (1), where unsharded_stages allows it; 0 gathers least often",
        },
        order=20,  # a program with it is not right without
    ),
)
