"""ZeRO-Offload: copy gradients to the host, step there, and copy the new weights back.

ZeRO-Offload (arXiv 2101.06840, section 4) divides training so: forwards and backwards are the
device's, the optimizer's state and its step the host's.  Here the part that is stepped at once is a
stage's.  Of several updates the host steps one while the next is computed, on older weights
(section 5.2, there called delayed parameter update).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from schedir.ir.dataflow import Dataflow
from schedir.ir.instruction_index import NONE, InstructionIndex
from schedir.ir.isa.instructions import ROWS, STEPS, Opcode, Scope, Value, chain
from schedir.ir.program import Program, StreamSlices, pack
from schedir.passes.insertion import at_places
from schedir.passes.pass_types import ExpectedInstructions, Pass, Present
from schedir.passes.update_boundaries import places

_ROWS: Final = (Opcode.OffloadGrads, Opcode.HostOptimizerStep, Opcode.ReloadWeights)
_PER_RANK: Final = tuple(row.op for row in ROWS if row.per is Scope.RANK)


def host_steps(program: Program) -> Program:
    """Copy each trained stage's gradient to the host, and end each update of each rank with a step
    there of each, and a copy of its weights back.

    A gradient goes right behind its reduction, beside the backwards of other stages, where nobody
    else adds to it; else at the end of the update, where the host waits for the sum anyway.  Stages
    are stepped in the order in which their gradients are there.  Of several updates each lets go of
    the rank's gradients before the host steps, so that the next may add to them.
    """
    shape, index = program.shape, InstructionIndex.of(program)
    given = index.where_all(chain(Opcode.OffloadGrads, Value.GRAD))
    latest = np.full(shape.holders.size * shape.optimizer_steps, NONE)
    time = (
        None if shape.optimizer_steps > 1 else np.zeros(len(given), np.int64)
    )  # turns are of one update
    np.maximum.at(latest, index.keys(Scope.STAGE, given, time), given)
    last = latest.reshape(shape.optimizer_steps, *shape.holders.shape)
    tied = [s for stages in program.summed for s in stages]
    ends = places(program)
    at_, ranks, words = [], [], []
    for update in range(shape.optimizer_steps):
        for rank, own in enumerate(shape.stages_of):
            trained = np.array([s for s in own if s >= program.frozen_stages], np.int64)
            at = last[update, shape.row_of(trained, rank), trained]
            order = np.argsort(at, kind="stable")
            trained, at = trained[order], at[order]
            alone = (index.op[at] == Opcode.ReduceGrads) & (program.dp == 1)
            alone &= ~np.isin(trained, tied)
            go, step, back = (pack(op, trained, update) for op in _ROWS)
            between = pack(
                Opcode.CheckGradsFinite, 0, np.array([update] * (shape.optimizer_steps > 1), int)
            )
            words += [go, between, step, back]
            end = ends[update, rank]
            at_ += [np.where(alone, at + 1, end), np.full(len(between) + 2 * len(at), end)]
            ranks += [np.full(len(between) + 3 * len(at), rank)]
    return at_places(program, *map(np.concatenate, (at_, ranks, words)))


def late_steps(program: Program) -> Program:
    """Let each step that ends an update stand ahead of the first that asks for it, with the copies
    of weights that it waits for.

    Until then the host steps, and the rank computes the next update on weights that it has.  Who
    asks for it is a forward on its weights, a gradient that goes where that of its update was, or
    what ends the next update.
    """
    index, n = InstructionIndex.of(program), len(program)
    first = np.full(n, n)  # that asks for each instruction
    for giver in Dataflow.of(program).needs:
        needer = np.flatnonzero((giver != NONE) & (giver < np.arange(n)))  # else it is refused
        np.minimum.at(first, giver[needer], needer)
    end = (
        index.rank.astype(np.int64) * program.shape.optimizer_steps + index.mb
    )  # of what ends updates
    ends, steps = (index.where_all(ops) for ops in (_PER_RANK, STEPS))
    ahead = np.full(program.shape.ranks * program.shape.optimizer_steps + 1, n)
    np.minimum.at(ahead, end[ends] - 1, ends)  # who ends the next update
    ahead[program.shape.optimizer_steps - 1 :: program.shape.optimizer_steps] = (
        n  # which the last has not
    )
    np.minimum.at(ahead, end[steps], first[steps])
    whole = np.append(np.maximum.accumulate(np.where(index.joined, 0, np.arange(n))), n)
    moves = index.where_all((Opcode.ReloadWeights, *STEPS))
    place = 2 * np.arange(n)
    place[moves] = np.where(ahead[end[moves]] < n, 2 * whole[ahead[end[moves]]] - 1, place[moves])
    order = np.argsort(place, kind="stable")
    return replace(program, streams=StreamSlices.at(program.words[order], program.offsets))


def _each(program: Program, present: Present) -> Iterator[ExpectedInstructions]:
    there = program.trains and program.optimizer_placement == "cpu_step"
    once = np.tile(
        (np.arange(program.shape.stages) >= program.frozen_stages) & there, program.shape.rows
    )
    why = f"the program says 'optimizer_placement {program.optimizer_placement}'"
    for op in _ROWS:
        yield ExpectedInstructions(
            op, once, why, "each trained stage goes, is stepped and comes back once"
        )
    several = program.shape.optimizer_steps > 1
    yield ExpectedInstructions(
        Opcode.CheckGradsFinite,
        np.full(program.shape.ranks, there and several),
        why if several or not there else "there is no next update to add to them",
        "each rank lets go of its gradients once in each of several updates",
    )


PASSES: Final = (
    Pass(
        "host_steps",
        "ends",
        lambda program, options: host_steps(program),
        lambda program, options: (
            program.trains
            and program.optimizer_placement == "cpu_step"
            and program.ops.isdisjoint(_ROWS)
        ),
        _each,
        order=8,
    ),
    Pass(
        "late_steps",
        "ends",
        lambda program, options: late_steps(program),
        lambda program, options: (
            program.trains
            and program.optimizer_placement == "cpu_step"
            and program.shape.optimizer_steps > 1
        ),
        order=11,
    ),
)
