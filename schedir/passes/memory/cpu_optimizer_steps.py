"""Copy gradients to the host, run the optimizer step there, and copy the new weights back.

This is ZeRO-Offload. Forwards and backwards run on the device. The optimizer state is on the host,
which runs the optimizer step stage by stage. With several updates, the host runs the step of one
update while the device computes the next update with older weights (section 5.2 of the paper,
delayed parameter update).

References:
    ZeRO-Offload, arXiv 2101.06840, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from schedir.ir.dataflow import Dataflow
from schedir.ir.instruction_index import NO_POSITION, InstructionIndex
from schedir.ir.isa.instructions import (
    INSTRUCTIONS,
    OPTIMIZER_STEP_OPS,
    Opcode,
    Scope,
    Value,
    find_possible_givers,
)
from schedir.ir.program import Program, StreamSlices, pack
from schedir.passes.insertion import insert_at_positions
from schedir.passes.pass_types import ExpectedInstructions, Pass, PresenceQuery
from schedir.passes.update_boundaries import find_update_ends

_HOST_STEP_OPS: Final = (Opcode.OffloadGrads, Opcode.HostOptimizerStep, Opcode.ReloadWeights)
_RANK_OPS: Final = tuple(row.op for row in INSTRUCTIONS if row.scope is Scope.RANK)


def insert_host_steps(program: Program) -> Program:
    """Insert the copies of gradients, the steps on the host, and the copies of weights.

    Each trained stage has one instruction of each kind in every update. If a gradient is
    not summed over processes or tied stages, it is copied right after its ReduceGrads, during
    backwards of other stages. Otherwise the gradient is copied at the end of the update, where the
    host waits for the reduction in any case. The steps are in the order in which the gradients are
    ready. With several updates, a CheckGradsFinite comes before the steps. After this check, the
    next update can add to the gradients.

    Args:
        program: A program with gradient reductions.
    """
    shape, index = program.shape, InstructionIndex.from_program(program)
    producers = index.find_all_positions(find_possible_givers(Opcode.OffloadGrads, Value.GRAD))
    last_by_key = np.full(shape.replica_ranks.size * shape.optimizer_steps, NO_POSITION)
    np.maximum.at(last_by_key, index.compute_keys(Scope.STAGE, producers), producers)
    last_producers = last_by_key.reshape(shape.optimizer_steps, *shape.replica_ranks.shape)
    tied_stages = [s for stages in program.trained_ties for s in stages]
    ends = find_update_ends(program)
    positions, ranks, words = [], [], []
    for update in range(shape.optimizer_steps):
        for rank, rank_stages in enumerate(shape.stages_on_rank):
            trained_stages = np.array(
                [s for s in rank_stages if s >= program.frozen_stages], np.int64
            )
            row = shape.replica_row_of_stage(trained_stages, rank)
            grad_positions = last_producers[update, row, trained_stages]
            order = np.argsort(grad_positions, kind="stable")
            trained_stages, grad_positions = trained_stages[order], grad_positions[order]
            is_local_sum = (index.op[grad_positions] == Opcode.ReduceGrads) & (program.dp == 1)
            is_local_sum &= ~np.isin(trained_stages, tied_stages)
            offloads, steps, reloads = (pack(op, trained_stages, update) for op in _HOST_STEP_OPS)
            # With several updates, the next update may add to the gradients after this check. So
            # each update has a check with its number.
            check_numbers = [update] if shape.optimizer_steps > 1 else []
            checks = pack(Opcode.CheckGradsFinite, 0, np.array(check_numbers, int))
            words += [offloads, checks, steps, reloads]
            end = ends[update, rank]
            positions += [
                np.where(is_local_sum, grad_positions + 1, end),
                np.full(len(checks) + 2 * len(grad_positions), end),
            ]
            ranks += [np.full(len(checks) + 3 * len(grad_positions), rank)]
    return insert_at_positions(program, *map(np.concatenate, (positions, ranks, words)))


def delay_host_steps(program: Program) -> Program:
    """Move OptimizerStep and ReloadWeights of each update right before their result is first used.

    Until then, the host runs its steps, and the rank computes the next update with the older
    weights. The first use is a forward with the new weights, a gradient copy that reuses the buffer
    on the host, or the end of the next update.

    Args:
        program: A program with several updates and steps on the host.
    """
    index = InstructionIndex.from_program(program)
    n = len(program)
    updates = program.shape.optimizer_steps
    # Position of an instruction -> position of the first user of its results, or n without a user.
    first_user = np.full(n, n)
    for producer in Dataflow.from_program(program).givers:
        # `check` refuses a program in which a producer comes after its user.
        users = np.flatnonzero((producer != NO_POSITION) & (producer < np.arange(n)))
        np.minimum.at(first_user, producer[users], users)
    # The rank and the update of each instruction that has an update, as one number.
    key = index.rank.astype(np.int64) * updates + index.mb
    ends, steps = (index.find_all_positions(ops) for ops in (_RANK_OPS, OPTIMIZER_STEP_OPS))
    # Key -> position of the instruction before which the step must come: the first instruction that
    # ends the next update, or the first user of the step. The last update has no next update.
    deadline = np.full(program.shape.ranks * updates + 1, n)
    np.minimum.at(deadline, key[ends] - 1, ends)
    deadline[updates - 1 :: updates] = n
    np.minimum.at(deadline, key[steps], first_user[steps])
    group_start = np.append(np.maximum.accumulate(np.where(index.joined, 0, np.arange(n))), n)
    moves = index.find_all_positions((Opcode.ReloadWeights, *OPTIMIZER_STEP_OPS))
    target = deadline[key[moves]]
    # The sort key 2p keeps an instruction at position p. The sort key 2p - 1 puts it right before
    # the group that starts at position p.
    sort_key = 2 * np.arange(n)
    sort_key[moves] = np.where(target < n, 2 * group_start[target] - 1, sort_key[moves])
    order = np.argsort(sort_key, kind="stable")
    return replace(program, streams=StreamSlices.from_words(program.words[order], program.offsets))


def _list_expected(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    has_ops = program.has_backward and program.optimizer_placement == "cpu_step"
    required = np.tile(
        (np.arange(program.shape.stages) >= program.frozen_stages) & has_ops,
        program.shape.placement_rows,
    )
    reason = f"the program has 'optimizer_placement {program.optimizer_placement}'"
    for op in _HOST_STEP_OPS:
        yield ExpectedInstructions(
            op, required, reason,
            "each trained stage needs one offload_grads, one host_step and one reload_weights in "
            "each update",
        )  # fmt: skip
    has_several_updates = program.shape.optimizer_steps > 1
    if has_ops and not has_several_updates:
        reason = "the program has one update only"
    yield ExpectedInstructions(
        Opcode.CheckGradsFinite,
        np.full(program.shape.ranks, has_ops and has_several_updates),
        reason,
        "each rank needs one check_grads_finite in each update",
    )


PASSES: Final = (
    Pass(
        "host_steps",
        "ends",
        lambda program, options: insert_host_steps(program),
        should_run=lambda program, options: (
            program.has_backward
            and program.optimizer_placement == "cpu_step"
            and program.used_opcodes.isdisjoint(_HOST_STEP_OPS)
        ),
        list_expected=_list_expected,
        order=8,
    ),
    Pass(
        "delayed_host_steps",
        "ends",
        lambda program, options: delay_host_steps(program),
        should_run=lambda program, options: (
            program.has_backward
            and program.optimizer_placement == "cpu_step"
            and program.shape.optimizer_steps > 1
        ),
        order=11,
    ),
)
