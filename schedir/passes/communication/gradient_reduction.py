"""Insert the gradient reductions and the optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from schedir.analysis.memory.buffer_slots import SLOT_KINDS, count_min_slots, count_slots
from schedir.ir.instruction_index import NO_POSITION, InstructionIndex
from schedir.ir.isa.instructions import GRAD_ADDING_OPS, Opcode, Scope, Value, find_producers
from schedir.ir.program import WORD_DTYPE, Program, is_op, pack
from schedir.passes.insertion import insert_after, insert_at_positions
from schedir.passes.pass_types import ExpectedInstructions, Mask, Options, Pass, PresenceQuery
from schedir.passes.stage_runs import find_stage_runs, number_occurrences
from schedir.passes.update_boundaries import find_update_ends

_WGRAD_SLOTS: Final = Value.WGRAD.name.lower()


def reduce_grads(program: Program) -> Program:
    """Insert the gradient reduction of each stage after its last backward of each update.

    The reduction runs while the rank computes other stages. Every program that trains has this
    reduction. With one replica, the reduction only scales the gradient.

    Args:
        program: A program with messages and without reductions.
    """
    shape, fields = program.shape, program.words.view(WORD_DTYPE)
    at = np.flatnonzero(is_op(fields["op"], GRAD_ADDING_OPS))
    stage, update = fields["stage"][at], fields["mb"][at] // shape.microbatches_per_update
    rank = np.searchsorted(program.offsets, at, side="right") - 1
    last = np.full((shape.optimizer_steps, shape.placement_rows, shape.stages), NO_POSITION)
    last[update, shape.replica_row_of_stage(stage, rank), stage] = (
        at  # numpy keeps the last position of equal indices
    )
    at = last[last != NO_POSITION]
    update, _, stage = np.nonzero(last != NO_POSITION)
    words = pack(Opcode.ReduceGrads, stage, update)
    order = np.argsort(words, kind="stable")
    return insert_after(program, at[order], words[order])


def reduce_scatter(program: Program) -> Program:
    """Insert reduce-scatters, which leave each replica a shard of a stage's gradient.

    A run is a sequence of instructions that add to the gradient of one stage. Other instructions
    may be between them, except those that add to the gradient of another stage of the rank. A group
    that adds to two stages belongs to the runs of both stages. Late BackwardWeights form runs, too.

    With `reduce_scatter_at` "each_backward", a reduce-scatter follows each run. So a rank has
    unsharded gradients only of the stages of its present run. With "update_end", one reduce-scatter
    follows the last run of each stage.

    Args:
        program: A program with messages and without reductions.
    """
    rank, _, stage, end = find_stage_runs(program, GRAD_ADDING_OPS)
    key = rank * program.shape.stages + stage
    if program.reduce_scatter_at == "update_end":
        last = np.unique(key[::-1], return_index=True)[1]
        rank, stage, end, key = (each[::-1][last] for each in (rank, stage, end, key))
    return insert_at_positions(
        program, end, rank, pack(Opcode.ReduceScatter, stage, number_occurrences(key))
    )


def limit_unsharded_grads(program: Program) -> Program:
    """Limit the number of unsharded gradients on each rank.

    The limit is the smallest possible number plus one. So backwards can continue while one gradient
    is reduced. The program is returned unchanged if no rank has more unsharded gradients than the
    limit.

    Args:
        program: A program with reduce-scatters.
    """
    column = SLOT_KINDS.index(Value.WGRAD)
    room, most = count_min_slots(program)[:, column] + 1, count_slots(program)[:, column]
    if (room >= most).all():
        return program
    return program.with_slot_counts(_WGRAD_SLOTS, np.minimum(room, most))


def reduce_replicated_stages(program: Program) -> Program:
    """Insert the sum of each stage's gradient over its stage replicas.

    The sum comes when the gradients of all replicas are ready. In the global order of
    `insert_transfers`, the sum is between the same two messages on all replicas. If several sums
    are between two messages, these sums have the same order on all ranks: the gradient that is
    ready earlier in its Stream comes first. So all Streams still follow one global order, and the
    program cannot hang.

    With data parallelism, all sums are at the end of the update. The reason is that each sum must
    wait for the reduction over the data-parallel replicas, which runs during compute. With an
    earlier sum on blocking hosts, all later instructions would wait for this reduction, too.

    Args:
        program: A program with gradient reductions.
    """
    shape = program.shape
    if not (shape.placement_rows > 1 and program.has_backward):
        return program
    trained = np.arange(program.frozen_stages, shape.stages)
    if program.dp > 1 or not program.message_order:
        own_of = [[s for s in own if s in trained] for own in shape.stages_on_rank]
        return append_to_updates(program, Opcode.ReduceReplicatedStages, own_of)
    index = InstructionIndex.from_program(program)
    begins = program.offsets.tolist()
    messages = index.find_message_numbers()
    passed = np.concatenate([np.maximum.accumulate(messages[b:e]) for b, e in pairwise(begins)])
    holders = shape.replica_ranks[:, trained]
    reduced = index.find_all_positions(find_producers(Value.GRAD))
    ready = np.zeros(shape.replica_ranks.size, np.intp)
    first_turn = np.zeros(len(reduced), np.int64)
    np.maximum.at(
        ready, index.compute_keys(Scope.STAGE, reduced, first_turn), reduced
    )  # the position of the last instruction that makes the gradient of each stage replica
    ready = ready.reshape(shape.replica_ranks.shape)[:, trained]
    after = passed[ready].max(0)  # the number of the message that precedes the sum of each stage
    ready = ready - program.offsets[holders]
    order = np.lexsort((ready.max(0), after))
    at, stages = [], []
    for rank in range(shape.ranks):
        own = order[np.isin(trained[order], shape.stages_on_rank[rank])]
        before = passed[begins[rank] : begins[rank + 1]]
        there = ready[shape.replica_row_of_stage(trained[own], rank), own]
        last = before[np.searchsorted(before, after[own], side="right") - 1]
        index_of = np.maximum.accumulate(np.maximum(there, np.searchsorted(before, last)))
        at.append(begins[rank] + index_of)
        stages.append(trained[own])
    return insert_after(
        program, np.concatenate(at), pack(Opcode.ReduceReplicatedStages, np.concatenate(stages), 0)
    )


def reduce_tied_weights(program: Program) -> Program:
    """Insert the sum of the gradients of tied weights: one instruction on each rank with a copy.

    Args:
        program: The program.
    """
    if not (program.trained_ties and program.has_backward):
        return program
    tied = {s for stages in program.trained_ties for s in stages}
    copies = [[s for s in own if s in tied] for own in program.shape.stages_on_rank]
    return append_to_updates(program, Opcode.ReduceTied, [own[:1] for own in copies])


def reduce_sequence_grads(program: Program) -> Program:
    """Insert the sum of gradients over tensor-parallel ranks, for sequence parallelism.

    This sum comes after all other sums, as in Megatron-LM. So with ZeRO, it sums only the shard of
    a gradient, and only once.

    Args:
        program: The program.
    """
    if not (program.sequence_parallel and program.has_backward):
        return program
    own_of = [
        [s for s in own if s >= program.frozen_stages] for own in program.shape.stages_on_rank
    ]
    return append_to_updates(program, Opcode.ReduceSequenceParallelGrads, own_of)


def reduce_norm(program: Program) -> Program:
    """Insert the reduction of the global gradient norm for clipping, on all ranks.

    Args:
        program: The program.
    """
    if not (
        program.clip_grad_norm and program.has_backward and program.norm_check == "before_step"
    ):
        return program
    return append_to_updates(program, Opcode.ReduceNorm, [[0]] * program.shape.ranks)


def insert_optimizer_steps(program: Program) -> Program:
    """Insert the optimizer step at the end of each update of each rank, if the program trains.

    Args:
        program: The program.
    """
    if not program.has_backward:
        return program
    return append_to_updates(program, Opcode.OptimizerStep, [[0]] * program.shape.ranks)


def insert_norm_validation(program: Program) -> Program:
    """Insert the reduction of the global gradient norm after the step (post-validation).

    Args:
        program: The program.
    """
    if not (program.has_backward and program.norm_check == "after_step"):
        return program
    return append_to_updates(program, Opcode.ReduceNormAfterStep, [[0]] * program.shape.ranks)


def append_to_updates(program: Program, op: Opcode, stages: Sequence[Sequence[int]]) -> Program:
    """Append an instruction for each given stage at the end of each update of each rank.

    Args:
        program: The program.
        op: The opcode to insert.
        stages: For each rank, the stages that get an instruction. For an instruction per rank, this
            is `[0]`.
    """
    ranks = np.repeat(np.arange(len(stages)), [*map(len, stages)])
    words = pack(op, np.array([stage for own in stages for stage in own], np.int64), 0)
    ends, update = find_update_ends(program), np.arange(program.shape.optimizer_steps)[:, None]
    each = np.broadcast_to(ranks, (len(update), len(ranks)))
    return insert_at_positions(
        program, ends[:, ranks].reshape(-1), each.reshape(-1), (words + update).reshape(-1)
    )


# ------------------------------------------------------------ expected instructions


def _mask_required(program: Program, scope: Scope) -> Mask:
    """Return a mask of the keys of a scope: True for trained stages, or with RANK for all ranks.

    All entries are False for a program without a backward.
    """
    shape = program.shape
    if scope is Scope.RANK:
        return np.full(shape.ranks, program.has_backward)
    trained = np.arange(shape.stages) >= program.frozen_stages
    return np.tile(trained & program.has_backward, len(shape.replica_ranks))


def _list_stage_reductions(
    program: Program, present: PresenceQuery
) -> Iterator[ExpectedInstructions]:
    once, cut = _mask_required(program, Scope.STAGE), program.zero > 0
    whole = ExpectedInstructions(
        Opcode.ReduceGrads,
        once & (not cut),
        f"the program has 'zero {program.zero}', so reduce_scatter reduces the gradient",
    )
    there = present(Opcode.ReduceScatter)
    once = np.resize(once & cut, len(there))
    each = program.shape.replica_ranks.size
    once[each:] = (
        there[each:] if program.reduce_scatter_at == "each_backward" else False
    )  # with "each_backward", any number of further occurrences is correct
    parts = ExpectedInstructions(
        Opcode.ReduceScatter,
        once,
        "the program has 'reduce_scatter_at update_end': a gradient is reduced once, after its "
        "last backward"
        if cut
        else "the program has 'zero 0', so reduce_grads reduces the gradient",
        "place it after the last B or W of its stage",
    )
    # The error for a forbidden instruction comes first.
    yield from (whole, parts) if cut else (parts, whole)


def _list_replica_reductions(
    program: Program, present: PresenceQuery
) -> Iterator[ExpectedInstructions]:
    once = _mask_required(program, Scope.STAGE) & (program.shape.placement_rows > 1)
    yield ExpectedInstructions(Opcode.ReduceReplicatedStages, once, "each stage has one replica")


def _list_tied_reductions(
    program: Program, present: PresenceQuery
) -> Iterator[ExpectedInstructions]:
    holders = program.shape.replica_ranks.reshape(-1)  # the rank of each key
    first: dict[int, int] = {}  # rank -> key of its first stage with a copy
    for stage in sorted({s for stages in program.trained_ties for s in stages}):
        for key in range(stage, len(holders), program.shape.stages):
            first.setdefault(int(holders[key]), key)
    once = np.zeros(len(holders), bool)
    once[[*first.values()]] = program.has_backward
    why = "each rank has only one such sum, at its first stage with a copy of a tied weight"
    why = why if program.trained_ties or not program.tied_weights else "all tied stages are frozen"
    yield ExpectedInstructions(
        Opcode.ReduceTied,
        once,
        why if program.tied_weights else "the program has 'tied_weights no'",
    )


def _list_sequence_reductions(
    program: Program, present: PresenceQuery
) -> Iterator[ExpectedInstructions]:
    once = _mask_required(program, Scope.STAGE) & program.sequence_parallel
    yield ExpectedInstructions(
        Opcode.ReduceSequenceParallelGrads,
        once,
        "the program has 'sequence_parallel no': each rank has the gradient of all tokens",
        "with 'sequence_parallel yes', place it after the instruction that sums the stage's "
        "gradient",
    )


def _list_norm_reductions(
    program: Program, present: PresenceQuery
) -> Iterator[ExpectedInstructions]:
    once = (
        _mask_required(program, Scope.RANK)
        & program.clip_grad_norm
        & (program.norm_check == "before_step")
    )
    why = (
        "the program has 'norm_check after_step'"
        if program.clip_grad_norm
        else "the program has 'clip_grad_norm no'"
    )
    yield ExpectedInstructions(Opcode.ReduceNorm, once, why)


def _list_optimizer_steps(
    program: Program, present: PresenceQuery
) -> Iterator[ExpectedInstructions]:
    yield ExpectedInstructions(Opcode.OptimizerStep, _mask_required(program, Scope.RANK))


def _list_norm_validations(
    program: Program, present: PresenceQuery
) -> Iterator[ExpectedInstructions]:
    once = _mask_required(program, Scope.RANK) & (program.norm_check == "after_step")
    yield ExpectedInstructions(
        Opcode.ReduceNormAfterStep, once, "the program does not have 'norm_check after_step'"
    )


def _needs_grad_reduction(program: Program, options: Options) -> bool:
    return program.has_backward and program.used_opcodes.isdisjoint(
        {Opcode.ReduceGrads, Opcode.ReduceScatter}
    )


PASSES: Final = (
    Pass(
        "reduce_grads",
        "ends",
        lambda p, options: reduce_scatter(p) if p.zero else reduce_grads(p),
        should_run=_needs_grad_reduction,
        list_expected=_list_stage_reductions,
        order=1,
    ),
    Pass(
        "unsharded_gradient_slots",
        "memory",
        lambda p, options: limit_unsharded_grads(p),
        should_run=lambda p, options: (
            p.has_backward
            and p.takes_memory(Value.WGRAD)
            and options.buffer_sharing is None
            and not any(_WGRAD_SLOTS in slots.specified() for slots in p.slots)
        ),
        order=2,
    ),
    Pass(
        "reduce_replicated_stages",
        "ends",
        lambda p, options: reduce_replicated_stages(p),
        list_expected=_list_replica_reductions,
        order=2,
    ),
    Pass(
        "reduce_tied",
        "ends",
        lambda p, options: reduce_tied_weights(p),
        list_expected=_list_tied_reductions,
        order=3,
    ),
    Pass(
        "reduce_sequence_parallel_grads",
        "ends",
        lambda p, options: reduce_sequence_grads(p),
        list_expected=_list_sequence_reductions,
        order=4,
    ),
    Pass(
        "reduce_norm",
        "ends",
        lambda p, options: reduce_norm(p),
        list_expected=_list_norm_reductions,
        order=5,
    ),
    Pass(
        "optimizer_step",
        "ends",
        lambda p, options: insert_optimizer_steps(p),
        list_expected=_list_optimizer_steps,
        order=9,
    ),
    Pass(
        "norm_validation",
        "ends",
        lambda p, options: insert_norm_validation(p),
        list_expected=_list_norm_validations,
        order=10,
    ),
)
