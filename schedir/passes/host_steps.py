"""Host steps: gradients go to the host, which steps each stage, and its new weights come back.

ZeRO-Offload (arXiv 2101.06840, section 4) divides training so: forwards and backwards are the
device's, the optimizer's state and its step the host's.  Here the part that is stepped at once is a
stage's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from schedir.ir.index import NONE, Index
from schedir.ir.ops import Opcode, Per, Token, chain
from schedir.ir.program import Program, pack
from schedir.passes.insert import at_places
from schedir.passes.record import Expected, Pass, Present

_ROWS: Final = (Opcode.OffloadGrads, Opcode.StepHost, Opcode.ReloadWeights)


def host_steps(program: Program) -> Program:
    """Copy each trained stage's gradient to the host, and end the Stream of each rank with a step
    there of each, and a copy of its weights back.

    A gradient goes right behind its reduction, beside the backwards of other stages, where nobody
    else adds to it; else at the end of the Stream, where the host waits for the sum anyway.  Stages
    are stepped in the order in which their gradients are there.
    """
    plan, index = program.plan, Index.of(program)
    given = index.where_all(chain(Opcode.OffloadGrads, Token.GRAD))
    latest = np.full(plan.holders.size, NONE)
    key = index.keys(Per.STAGE, given, np.zeros(len(given), np.int64))
    np.maximum.at(latest, key, given)
    last = latest.reshape(plan.holders.shape)
    tied = [s for stages in program.summed for s in stages]
    places, ranks, words = [], [], []
    for rank, own in enumerate(plan.stages_of):
        trained = np.array([s for s in own if s >= program.frozen], np.int64)
        at = last[plan.row_of(trained, rank), trained]
        order = np.argsort(at, kind="stable")
        trained, at, end = trained[order], at[order], program.offsets[rank + 1]
        alone = (index.op[at] == Opcode.ReduceGrads) & (program.dp == 1) & ~np.isin(trained, tied)
        places += [np.where(alone, at + 1, end), np.full(2 * len(at), end)]
        ranks += [np.full(3 * len(at), rank)]
        words += [pack(op, trained, 0) for op in _ROWS]
    return at_places(program, *map(np.concatenate, (places, ranks, words)))


def _each(program: Program, present: Present) -> Iterator[Expected]:
    there = program.closes and program.states == "cpu"
    once = np.tile((np.arange(program.plan.stages) >= program.frozen) & there, program.plan.rows)
    why = (
        "the program says 'open yes'"
        if program.open
        else f"the program says 'states {program.states}'"
    )
    for op in _ROWS:
        yield Expected(op, once, why, "each trained stage goes, is stepped and comes back once")


PASSES: Final = (
    Pass(
        "host_steps",
        "ends",
        lambda program, options: host_steps(program),
        lambda program, options: (
            program.closes and program.states == "cpu" and program.ops.isdisjoint(_ROWS)
        ),
        _each,
        order=8,
    ),
)
