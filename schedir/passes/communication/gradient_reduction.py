"""Insert the gradient reductions and the optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from schedir.analysis.memory.buffer_slots import KINDS, counts, minimum_slots
from schedir.ir.instruction_index import NONE, InstructionIndex
from schedir.ir.isa.instructions import ADDS, Opcode, Scope, Value, producers
from schedir.ir.program import FIELDS, Program, SlotCounts, is_op, pack
from schedir.passes.insertion import at_places, behind
from schedir.passes.pass_types import ExpectedInstructions, Mask, Options, Pass, Present
from schedir.passes.stage_runs import runs, turns
from schedir.passes.update_boundaries import places

_WHOLE: Final = Value.WGRAD.name.lower()


def reduce_grads(program: Program) -> Program:
    """Reduce each stage's gradient right after its last backward, beside what is left.

    Always there when the program trains: with one replica it is local, and scales.  Of several
    updates each has its own.
    """
    shape, fields = program.shape, program.words.view(FIELDS)
    at = np.flatnonzero(is_op(fields["op"], ADDS))
    stage, update = fields["stage"][at], fields["mb"][at] // shape.per_update
    rank = np.searchsorted(program.offsets, at, side="right") - 1
    last = np.full((shape.optimizer_steps, shape.rows, shape.stages), NONE)
    last[update, shape.row_of(stage, rank), stage] = at  # the last of those with one address stays
    at = last[last != NONE]
    update, _, stage = np.nonzero(last != NONE)
    words = pack(Opcode.ReduceGrads, stage, update)
    order = np.argsort(words, kind="stable")
    return behind(program, at[order], words[order])


def reduce_scatter(program: Program) -> Program:
    """As `reduce_grads`, where each replica keeps a part of the sum; each turn, or at the end.

    A turn is a run of what adds to one stage's gradient, with nothing between that adds to
    another's of the rank; what is issued as one and adds to two is a turn of both.  So of a rank's
    gradients those alone are whole that are added to.  A W that runs late is in turns, too.
    """
    rank, _, stage, end = runs(program, ADDS)
    key = rank * program.shape.stages + stage
    if program.reduce_scatter_at == "update_end":
        last = np.unique(key[::-1], return_index=True)[1]
        rank, stage, end, key = (each[::-1][last] for each in (rank, stage, end, key))
    return at_places(program, end, rank, pack(Opcode.ReduceScatter, stage, turns(key)))


def leave_room(program: Program) -> Program:
    """Say how many stages' gradients are whole at once, where not all of a rank's may be: the
    fewest, and one that is being reduced beside them, so that backwards go on meanwhile."""
    column = KINDS.index(Value.WGRAD)
    room, most = minimum_slots(program)[:, column] + 1, counts(program)[:, column]
    if (room >= most).all():
        return program
    said = program.slots or [SlotCounts.unsaid()] * program.shape.ranks
    each = zip(said, np.minimum(room, most).tolist(), strict=True)
    return program.with_slots([slots._replace(**{_WHOLE: n}) for slots, n in each])


def reduce_holders(program: Program) -> Program:
    """Sum each stage's gradient over its holders, if it has several, as soon as all are ready.

    On all of them a sum stands between the same two messages of the one order in which `transfers`
    has placed them all, and of two sums there the same one comes first, that of the gradient which
    stands earlier in its Stream.  So all Streams agree with one order still, and none can hang.

    With replicas all sums stand at the end: each has to wait for the one over the replicas, which
    goes on beside what is computed, and what stands behind it on hosts that block would wait too.
    """
    shape = program.shape
    if not (shape.rows > 1 and program.trains):
        return program
    trained = np.arange(program.frozen_stages, shape.stages)
    if program.dp > 1 or not program.order:
        own_of = [[s for s in own if s in trained] for own in shape.stages_of]
        return append(program, Opcode.ReduceReplicatedStages, own_of)
    index, begins = InstructionIndex.of(program), program.offsets.tolist()
    messages = index.messages()
    passed = np.concatenate([np.maximum.accumulate(messages[b:e]) for b, e in pairwise(begins)])
    holders = shape.holders[:, trained]
    reduced, ready = index.where_all(producers(Value.GRAD)), np.zeros(shape.holders.size, np.intp)
    first_turn = np.zeros(len(reduced), np.int64)
    np.maximum.at(ready, index.keys(Scope.STAGE, reduced, first_turn), reduced)  # the last turn's
    ready = ready.reshape(shape.holders.shape)[:, trained]
    after = passed[ready].max(0)  # the message that the sum of each stage stands behind
    ready = ready - program.offsets[holders]
    order = np.lexsort((ready.max(0), after))
    at, stages = [], []
    for rank in range(shape.ranks):
        own = order[np.isin(trained[order], shape.stages_of[rank])]
        before = passed[begins[rank] : begins[rank + 1]]
        there = ready[shape.row_of(trained[own], rank), own]
        last = before[np.searchsorted(before, after[own], side="right") - 1]
        index_of = np.maximum.accumulate(np.maximum(there, np.searchsorted(before, last)))
        at.append(begins[rank] + index_of)
        stages.append(trained[own])
    return behind(
        program, np.concatenate(at), pack(Opcode.ReduceReplicatedStages, np.concatenate(stages), 0)
    )


def reduce_tied(program: Program) -> Program:
    """Sum the copies of tied weights: one instruction on each rank that holds any."""
    if not (program.summed and program.trains):
        return program
    tied = {s for stages in program.summed for s in stages}
    copies = [[s for s in own if s in tied] for own in program.shape.stages_of]
    return append(program, Opcode.ReduceTied, [own[:1] for own in copies])


def reduce_sequence(program: Program) -> Program:
    """Sum over tensor-parallel ranks what each has of its part of the sequence, where they share
    it: when it is summed over all others, as Megatron-LM does.

    So of what replicas keep in parts it is the part that is summed, however often that is added to.
    """
    if not (program.sequence_parallel and program.trains):
        return program
    own_of = [[s for s in own if s >= program.frozen_stages] for own in program.shape.stages_of]
    return append(program, Opcode.ReduceSequenceParallelGrads, own_of)


def reduce_norm(program: Program) -> Program:
    """The global norm that clipping needs; all ranks meet."""
    if not (program.clip_grad_norm and program.trains and program.norm_check == "before_step"):
        return program
    return append(program, Opcode.ReduceNorm, [[0]] * program.shape.ranks)


def optimizer_step(program: Program) -> Program:
    """End every Stream, and every update in it, with the optimizer's step, if there are any."""
    if not program.trains:
        return program
    return append(program, Opcode.OptimizerStep, [[0]] * program.shape.ranks)


def validate(program: Program) -> Program:
    """The global norm behind a step that has not waited for it; all ranks meet."""
    if not (program.trains and program.norm_check == "after_step"):
        return program
    return append(program, Opcode.ReduceNormAfterStep, [[0]] * program.shape.ranks)


def append(program: Program, op: Opcode, stages: Sequence[Sequence[int]]) -> Program:
    """End each Stream, and each update before the last, with an `op` for some stages."""
    ranks = np.repeat(np.arange(len(stages)), [*map(len, stages)])
    words = pack(op, np.array([stage for own in stages for stage in own], np.int64), 0)
    ends, update = places(program), np.arange(program.shape.optimizer_steps)[:, None]
    each = np.broadcast_to(ranks, (len(update), len(ranks)))
    return at_places(
        program, ends[:, ranks].reshape(-1), each.reshape(-1), (words + update).reshape(-1)
    )


# ------------------------------------------------------------ what must then be there


def _each(program: Program, per: Scope) -> Mask:
    """A mask over the holders of trained stages, or over ranks, if the program ends an update."""
    shape = program.shape
    if per is Scope.RANK:
        return np.full(shape.ranks, program.trains)
    trained = np.arange(shape.stages) >= program.frozen_stages
    return np.tile(trained & program.trains, len(shape.holders))


def _stages(program: Program, present: Present) -> Iterator[ExpectedInstructions]:
    once, cut = _each(program, Scope.STAGE), program.zero > 0
    whole = ExpectedInstructions(
        Opcode.ReduceGrads,
        once & (not cut),
        f"the program says 'zero {program.zero}', and reduce_scatter leaves a part",
    )
    there = present(Opcode.ReduceScatter)
    once = np.resize(once & cut, len(there))
    each = program.shape.holders.size
    once[each:] = (
        there[each:] if program.reduce_scatter_at == "each_backward" else False
    )  # as often as it likes
    parts = ExpectedInstructions(
        Opcode.ReduceScatter,
        once,
        "the program says 'reduce_scatter_at update_end': a gradient is reduced once, behind "
        "its last backward"
        if cut
        else "the program says 'zero 0', and reduce_grads leaves the whole",
        "one stands behind the last B or W of its stage",
    )
    yield from (whole, parts) if cut else (parts, whole)  # what should not be there is said first


def _holders(program: Program, present: Present) -> Iterator[ExpectedInstructions]:
    once = _each(program, Scope.STAGE) & (program.shape.rows > 1)
    yield ExpectedInstructions(Opcode.ReduceReplicatedStages, once, "each stage has one holder")


def _tied(program: Program, present: Present) -> Iterator[ExpectedInstructions]:
    holders = program.shape.holders.reshape(-1)  # by key: a row behind the other
    first: dict[int, int] = {}  # the key of each rank's first copy
    for stage in sorted({s for stages in program.summed for s in stages}):
        for key in range(stage, len(holders), program.shape.stages):
            first.setdefault(int(holders[key]), key)
    once = np.zeros(len(holders), bool)
    once[[*first.values()]] = program.trains
    why = "one per rank that holds a copy of a tied weight, at its first stage"
    why = why if program.summed or not program.tied_weights else "all that is tied is frozen"
    yield ExpectedInstructions(
        Opcode.ReduceTied,
        once,
        why if program.tied_weights else "the program says 'tied_weights no'",
    )


def _sequence(program: Program, present: Present) -> Iterator[ExpectedInstructions]:
    once = _each(program, Scope.STAGE) & program.sequence_parallel
    yield ExpectedInstructions(
        Opcode.ReduceSequenceParallelGrads,
        once,
        "the program says 'sequence_parallel no': each rank has seen all of it",
        "the program says 'sequence_parallel yes': one stands behind what sums the stage's "
        "gradient",
    )


def _norm(program: Program, present: Present) -> Iterator[ExpectedInstructions]:
    once = (
        _each(program, Scope.RANK) & program.clip_grad_norm & (program.norm_check == "before_step")
    )
    why = (
        "the program says 'norm_check after_step'"
        if program.clip_grad_norm
        else "the program says 'clip_grad_norm no'"
    )
    yield ExpectedInstructions(Opcode.ReduceNorm, once, why)


def _steps(program: Program, present: Present) -> Iterator[ExpectedInstructions]:
    yield ExpectedInstructions(Opcode.OptimizerStep, _each(program, Scope.RANK))


def _validated(program: Program, present: Present) -> Iterator[ExpectedInstructions]:
    once = _each(program, Scope.RANK) & (program.norm_check == "after_step")
    yield ExpectedInstructions(
        Opcode.ReduceNormAfterStep, once, "the program does not say 'norm_check after_step'"
    )


def _unless_there(program: Program, options: Options) -> bool:
    return program.trains and program.ops.isdisjoint({Opcode.ReduceGrads, Opcode.ReduceScatter})


PASSES: Final = (
    Pass(
        "reduce_grads",
        "ends",
        lambda p, options: reduce_scatter(p) if p.zero else reduce_grads(p),
        _unless_there,
        _stages,
        order=1,
    ),
    Pass(
        "leave_room",
        "memory",
        lambda p, options: leave_room(p),
        lambda p, options: (
            p.trains
            and p.holds(Value.WGRAD)
            and options.buffer_sharing is None
            and not any(_WHOLE in slots.said() for slots in p.slots)
        ),
        order=2,
    ),
    Pass(
        "reduce_replicated_stages",
        "ends",
        lambda p, options: reduce_holders(p),
        expected=_holders,
        order=2,
    ),
    Pass("reduce_tied", "ends", lambda p, options: reduce_tied(p), expected=_tied, order=3),
    Pass(
        "reduce_sequence_parallel_grads",
        "ends",
        lambda p, options: reduce_sequence(p),
        expected=_sequence,
        order=4,
    ),
    Pass("reduce_norm", "ends", lambda p, options: reduce_norm(p), expected=_norm, order=5),
    Pass("optimizer_step", "ends", lambda p, options: optimizer_step(p), expected=_steps, order=9),
    Pass("validate", "ends", lambda p, options: validate(p), expected=_validated, order=10),
)
