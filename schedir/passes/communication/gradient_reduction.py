"""Insert the gradient reductions and the optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from schedir.analysis.memory.buffer_slots import count_min_slots, count_slots
from schedir.ir.instruction_index import NO_POSITION, InstructionIndex
from schedir.ir.isa.instructions import GRAD_ADDING_OPS, Opcode, Scope, Value, find_producers
from schedir.ir.program import WORD_DTYPE, Program, is_op, pack
from schedir.passes.insertion import find_ranks, insert_after, insert_at_positions
from schedir.passes.pass_types import ExpectedInstructions, Mask, Options, Pass, PresenceQuery
from schedir.passes.stage_runs import find_stage_runs, number_occurrences
from schedir.passes.update_boundaries import find_update_ends

_WGRAD_SLOTS: Final = Value.WGRAD.name.lower()


def reduce_grads(program: Program) -> Program:
    """Insert the gradient reduction of each stage after its last backward of each update.

    The reduction runs while the rank computes other stages. Every program that trains
    without ZeRO has this reduction. With one replica, the reduction only scales the gradient.

    Args:
        program: A program with messages and without reductions.
    """
    shape, fields = program.shape, program.words.view(WORD_DTYPE)
    positions = np.flatnonzero(is_op(fields["op"], GRAD_ADDING_OPS))
    stage = fields["stage"][positions]
    update = fields["mb"][positions] // shape.microbatches_per_update
    rank = find_ranks(program, positions)
    row = shape.replica_row_of_stage(stage, rank)
    last_positions = np.full(
        (shape.optimizer_steps, shape.placement_rows, shape.stages), NO_POSITION
    )
    last_positions[update, row, stage] = positions  # numpy keeps the last one of equal indices
    positions = last_positions[last_positions != NO_POSITION]
    update, _, stage = np.nonzero(last_positions != NO_POSITION)
    words = pack(Opcode.ReduceGrads, stage, update)
    order = np.argsort(words, kind="stable")
    return insert_after(program, positions[order], words[order])


def reduce_scatter(program: Program) -> Program:
    """Insert reduce-scatters, which leave each replica a shard of a stage's gradient.

    A run is a sequence of instructions that add to the gradient of one stage. Other instructions
    may be between them, except instructions that add to the gradient of another stage of the rank.
    A group of joined instructions that adds to two stages belongs to the runs of both stages. A
    BackwardWeight belongs to a later run than its BackwardInput if a backward of another stage is
    between them.

    With `reduce_scatter_at` "each_backward", a reduce-scatter follows each run. So a rank has
    unsharded gradients only of the stages of its present run. With "update_end", one reduce-scatter
    follows the last run of each stage.

    Args:
        program: A program with messages and without reductions.
    """
    rank, _, stage, end = find_stage_runs(program, GRAD_ADDING_OPS)
    key = rank * program.shape.stages + stage
    if program.reduce_scatter_at == "update_end":
        last_from_end = np.unique(key[::-1], return_index=True)[1]
        rank, stage, end, key = (column[::-1][last_from_end] for column in (rank, stage, end, key))
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
    slot_limit = count_min_slots(program, [Value.WGRAD])[:, 0] + 1
    max_slots = count_slots(program, [Value.WGRAD])[:, 0]
    if (slot_limit >= max_slots).all():
        return program
    return program.with_slot_counts(_WGRAD_SLOTS, np.minimum(slot_limit, max_slots))


def reduce_replicated_stages(program: Program) -> Program:
    """Insert the sum of each stage's gradient over its stage replicas.

    The sum comes when the gradients of all replicas are ready. In the global order of
    `insert_transfers`, the message before the sum and the message after the sum are the same on all
    replicas. If several sums are between two messages, these sums have the same order on all ranks:
    the gradient that is ready earlier in its Stream comes first. So all Streams still follow one
    global order, and the program cannot hang.

    With data parallelism, all sums are at the end of the update. Each sum must wait for the
    reduction over the data-parallel replicas, which runs during compute. If the sum came earlier,
    all later instructions of a blocking host would also wait for this reduction.

    Args:
        program: A program with gradient reductions.
    """
    shape = program.shape
    if not (shape.placement_rows > 1 and program.has_backward):
        return program
    trained_stages = np.arange(program.frozen_stages, shape.stages)
    if program.dp > 1 or not program.message_order:
        stages_by_rank = [
            [s for s in rank_stages if s in trained_stages] for rank_stages in shape.stages_on_rank
        ]
        return append_to_updates(program, Opcode.ReduceReplicatedStages, stages_by_rank)
    index = InstructionIndex.from_program(program)
    stream_starts = program.offsets.tolist()
    messages = index.find_message_numbers()
    # The number of the last message up to each position of a Stream.
    last_message = np.concatenate(
        [np.maximum.accumulate(messages[begin:end]) for begin, end in pairwise(stream_starts)]
    )
    replica_ranks = shape.replica_ranks[:, trained_stages]
    grad_positions = index.find_all_positions(find_producers(Value.GRAD))
    ready_positions = np.zeros(shape.replica_ranks.size, np.intp)
    first_occurrence = np.zeros(len(grad_positions), np.int64)
    keys = index.compute_keys(Scope.STAGE, grad_positions, first_occurrence)
    np.maximum.at(ready_positions, keys, grad_positions)  # maximum.at keeps the last position
    ready_positions = ready_positions.reshape(shape.replica_ranks.shape)[:, trained_stages]
    # The number of the message that precedes the sum of each stage.
    preceding_message = last_message[ready_positions].max(0)
    ready_index = ready_positions - program.offsets[replica_ranks]
    order = np.lexsort((ready_index.max(0), preceding_message))
    positions, stages = [], []
    for rank in range(shape.ranks):
        rank_order = order[np.isin(trained_stages[order], shape.stages_on_rank[rank])]
        rank_stages = trained_stages[rank_order]
        rank_messages = last_message[stream_starts[rank] : stream_starts[rank + 1]]
        rank_ready = ready_index[shape.replica_row_of_stage(rank_stages, rank), rank_order]
        # The index of the last message of the rank that precedes each sum.
        next_index = np.searchsorted(rank_messages, preceding_message[rank_order], side="right")
        message_index = np.searchsorted(rank_messages, rank_messages[next_index - 1])
        insert_index = np.maximum.accumulate(np.maximum(rank_ready, message_index))
        positions.append(stream_starts[rank] + insert_index)
        stages.append(rank_stages)
    words = pack(Opcode.ReduceReplicatedStages, np.concatenate(stages), 0)
    return insert_after(program, np.concatenate(positions), words)


def reduce_tied_weights(program: Program) -> Program:
    """Insert the sum of the gradients of tied weights: one on each rank with tied weights.

    Args:
        program: The program.
    """
    if not (program.trained_ties and program.has_backward):
        return program
    tied_stages = {s for stages in program.trained_ties for s in stages}
    copies_by_rank = [
        [s for s in rank_stages if s in tied_stages] for rank_stages in program.shape.stages_on_rank
    ]
    return append_to_updates(program, Opcode.ReduceTied, [copies[:1] for copies in copies_by_rank])


def reduce_sequence_grads(program: Program) -> Program:
    """Insert the sum of gradients over tensor-parallel ranks, for sequence parallelism.

    This sum comes after all other sums, as in Megatron-LM. So with ZeRO, the ranks sum only the
    shard of a gradient, and only once.

    Args:
        program: The program.
    """
    if not (program.sequence_parallel and program.has_backward):
        return program
    stages_by_rank = [
        [s for s in rank_stages if s >= program.frozen_stages]
        for rank_stages in program.shape.stages_on_rank
    ]
    return append_to_updates(program, Opcode.ReduceSequenceParallelGrads, stages_by_rank)


def append_to_updates(program: Program, op: Opcode, stages: Sequence[Sequence[int]]) -> Program:
    """Append an instruction for each given stage at the end of each update of each rank.

    Args:
        program: The program.
        op: The opcode to insert.
        stages: For each rank, the stages that get an instruction. For an instruction per rank, this
            is `[0]`.
    """
    ranks = np.repeat(np.arange(len(stages)), [*map(len, stages)])
    stage = np.array([s for rank_stages in stages for s in rank_stages], np.int64)
    words = pack(op, stage, 0)
    ends, update = find_update_ends(program), np.arange(program.shape.optimizer_steps)[:, None]
    ranks_by_update = np.broadcast_to(ranks, (len(update), len(ranks)))
    return insert_at_positions(
        program,
        ends[:, ranks].reshape(-1),
        ranks_by_update.reshape(-1),
        (words + update).reshape(-1),
    )


# ------------------------------------------------------------ expected instructions


def _mask_trained(program: Program) -> Mask:
    """Return a mask of the keys of stages: True for trained stages of a program with a backward."""
    shape = program.shape
    is_trained = np.arange(shape.stages) >= program.frozen_stages
    return np.tile(is_trained & program.has_backward, len(shape.replica_ranks))


def _list_stage_reductions(
    program: Program, present: PresenceQuery
) -> Iterator[ExpectedInstructions]:
    required, is_sharded = _mask_trained(program), program.zero > 0
    full_reductions = ExpectedInstructions(
        Opcode.ReduceGrads,
        required & (not is_sharded),
        f"the program has 'zero {program.zero}', so reduce_scatter reduces the gradient",
    )
    is_present = present(Opcode.ReduceScatter)
    required = np.resize(required & is_sharded, len(is_present))
    stage_replicas = program.shape.replica_ranks.size
    # With "each_backward", any number of further occurrences is correct.
    required[stage_replicas:] = (
        is_present[stage_replicas:] if program.reduce_scatter_at == "each_backward" else False
    )
    shard_reductions = ExpectedInstructions(
        Opcode.ReduceScatter,
        required,
        "the program has 'reduce_scatter_at update_end': a gradient is reduced once, after its "
        "last backward"
        if is_sharded
        else "the program has 'zero 0', so reduce_grads reduces the gradient",
        "place it after the last B or W of its stage",
    )
    # `check` reports a forbidden instruction before a missing one.
    if is_sharded:
        yield from (full_reductions, shard_reductions)
    else:
        yield from (shard_reductions, full_reductions)


def _list_replica_reductions(
    program: Program, present: PresenceQuery
) -> Iterator[ExpectedInstructions]:
    required = _mask_trained(program) & (program.shape.placement_rows > 1)
    yield ExpectedInstructions(
        Opcode.ReduceReplicatedStages, required, "each stage has one replica"
    )


def _list_tied_reductions(
    program: Program, present: PresenceQuery
) -> Iterator[ExpectedInstructions]:
    rank_of_key = program.shape.replica_ranks.reshape(-1)  # the rank of each key
    first_key_by_rank: dict[int, int] = {}  # rank -> key of its first tied stage
    for stage in sorted({s for stages in program.trained_ties for s in stages}):
        for key in range(stage, len(rank_of_key), program.shape.stages):
            first_key_by_rank.setdefault(int(rank_of_key[key]), key)
    required = np.zeros(len(rank_of_key), bool)
    required[[*first_key_by_rank.values()]] = program.has_backward
    if not program.tied_weights:
        reason = "the program has 'tied_weights no'"
    elif not program.trained_ties:
        reason = "all tied stages are frozen"
    else:
        reason = "each rank has only one such sum, at its first stage with a copy of a tied weight"
    yield ExpectedInstructions(Opcode.ReduceTied, required, reason)


def _list_sequence_reductions(
    program: Program, present: PresenceQuery
) -> Iterator[ExpectedInstructions]:
    required = _mask_trained(program) & program.sequence_parallel
    yield ExpectedInstructions(
        Opcode.ReduceSequenceParallelGrads,
        required,
        "the program has 'sequence_parallel no': each rank has the gradient of all tokens",
        "with 'sequence_parallel yes', place it after the instruction that sums the stage's "
        "gradient",
    )


def _describe_extra_norm(program: Program) -> str:
    if program.clip_grad_norm:
        return "the program has 'norm_check after_step'"
    return "the program has 'clip_grad_norm no'"


def _make_rank_pass(
    name: str,
    op: Opcode,
    is_needed: Callable[[Program], bool],
    describe_extra: Callable[[Program], str],
    order: int,
) -> Pass:
    """Return a pass that appends one instruction per rank to the updates of programs that train."""

    def lower(program: Program, options: Options) -> Program:
        if not (program.has_backward and is_needed(program)):
            return program
        return append_to_updates(program, op, [[0]] * program.shape.ranks)

    def list_expected(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
        required = np.full(program.shape.ranks, program.has_backward and is_needed(program))
        yield ExpectedInstructions(op, required, describe_extra(program))

    return Pass(name, "ends", lower, list_expected=list_expected, order=order)


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
    _make_rank_pass(
        "reduce_norm",
        Opcode.ReduceNorm,
        lambda program: program.clip_grad_norm and program.norm_check == "before_step",
        _describe_extra_norm,
        order=5,
    ),
    _make_rank_pass(
        "optimizer_step", Opcode.OptimizerStep, lambda program: True, lambda program: "", order=9
    ),
    # Post-validation reduces the norm of the gradients after the optimizer step.
    _make_rank_pass(
        "norm_validation",
        Opcode.ReduceNormAfterStep,
        lambda program: program.norm_check == "after_step",
        lambda program: "the program does not have 'norm_check after_step'",
        order=10,
    ),
)
