"""ZeRO-Offload: copy gradients to the host, step there, and copy the new weights back.

Forwards and backwards run on the device. The optimizer state and its step are on the host. A step
covers one stage at a time. With several updates, the host steps one update while the device
computes the next one on older weights (section 5.2 of the paper, delayed parameter update).

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

    Each trained stage has one of each in every update. A gradient is copied right after its
    reduction, during backwards of other stages, if no other instruction adds to it. Otherwise it is
    copied at the end of the update, where the host waits for the sum anyway. Stages are stepped in
    the order in which their gradients are ready. With several updates, the rank releases its
    gradients before the steps, so that the next update can add to them.

    Args:
        program: A program with gradient reductions.
    """
    shape, index = program.shape, InstructionIndex.from_program(program)
    givers = index.find_all_positions(find_possible_givers(Opcode.OffloadGrads, Value.GRAD))
    latest = np.full(shape.replica_ranks.size * shape.optimizer_steps, NO_POSITION)
    time = (
        None if shape.optimizer_steps > 1 else np.zeros(len(givers), np.int64)
    )  # programs with occurrences have one update
    np.maximum.at(latest, index.compute_keys(Scope.STAGE, givers, time), givers)
    last = latest.reshape(shape.optimizer_steps, *shape.replica_ranks.shape)
    tied = [s for stages in program.trained_ties for s in stages]
    ends = find_update_ends(program)
    positions, ranks, words = [], [], []
    for update in range(shape.optimizer_steps):
        for rank, own in enumerate(shape.stages_on_rank):
            trained = np.array([s for s in own if s >= program.frozen_stages], np.int64)
            at = last[update, shape.replica_row_of_stage(trained, rank), trained]
            order = np.argsort(at, kind="stable")
            trained, at = trained[order], at[order]
            is_local_sum = (index.op[at] == Opcode.ReduceGrads) & (program.dp == 1)
            is_local_sum &= ~np.isin(trained, tied)
            copies, step, reloads = (pack(op, trained, update) for op in _HOST_STEP_OPS)
            between = pack(
                Opcode.CheckGradsFinite, 0, np.array([update] * (shape.optimizer_steps > 1), int)
            )
            words += [copies, between, step, reloads]
            end = ends[update, rank]
            positions += [
                np.where(is_local_sum, at + 1, end),
                np.full(len(between) + 2 * len(at), end),
            ]
            ranks += [np.full(len(between) + 3 * len(at), rank)]
    return insert_at_positions(program, *map(np.concatenate, (positions, ranks, words)))


def delay_host_steps(program: Program) -> Program:
    """Move each optimizer step and its copies of weights before the first use.

    Until then the host steps, and the rank computes the next update with the weights that it has.
    The first use is a forward with the new weights, a gradient copy that reuses the buffer, or the
    end of the next update.

    Args:
        program: A program with several updates and steps on the host.
    """
    index, n = InstructionIndex.from_program(program), len(program)
    first = np.full(n, n)  # the first instruction that needs each instruction
    for giver in Dataflow.from_program(program).givers:
        needer = np.flatnonzero(
            (giver != NO_POSITION) & (giver < np.arange(n))
        )  # `check` refuses other orders
        np.minimum.at(first, giver[needer], needer)
    end = (
        index.rank.astype(np.int64) * program.shape.optimizer_steps + index.mb
    )  # the rank and update that an instruction at the end of an update belongs to
    ends, steps = (index.find_all_positions(ops) for ops in (_RANK_OPS, OPTIMIZER_STEP_OPS))
    first_end = np.full(program.shape.ranks * program.shape.optimizer_steps + 1, n)
    np.minimum.at(first_end, end[ends] - 1, ends)  # the first instruction that ends the next update
    first_end[program.shape.optimizer_steps - 1 :: program.shape.optimizer_steps] = (
        n  # the last update has no next one
    )
    np.minimum.at(first_end, end[steps], first[steps])
    group_start = np.append(np.maximum.accumulate(np.where(index.joined, 0, np.arange(n))), n)
    moves = index.find_all_positions((Opcode.ReloadWeights, *OPTIMIZER_STEP_OPS))
    place = 2 * np.arange(n)
    target = group_start[first_end[end[moves]]]
    place[moves] = np.where(first_end[end[moves]] < n, 2 * target - 1, place[moves])
    order = np.argsort(place, kind="stable")
    return replace(program, streams=StreamSlices.from_words(program.words[order], program.offsets))


def _list_expected(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    there = program.has_backward and program.optimizer_placement == "cpu_step"
    once = np.tile(
        (np.arange(program.shape.stages) >= program.frozen_stages) & there,
        program.shape.placement_rows,
    )
    why = f"the program has 'optimizer_placement {program.optimizer_placement}'"
    for op in _HOST_STEP_OPS:
        yield ExpectedInstructions(
            op,
            once,
            why,
            "each trained stage needs one copy of gradients, one step and one copy of weights",
        )
    several = program.shape.optimizer_steps > 1
    yield ExpectedInstructions(
        Opcode.CheckGradsFinite,
        np.full(program.shape.ranks, there and several),
        why if several or not there else "the program has one update only",
        "each rank needs one in each update",
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
