"""Reductions and the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np

from schedir.analysis.graph import Graph
from schedir.ir.index import Index
from schedir.ir.ops import ADDS, Opcode, Per
from schedir.ir.program import Program, Stream, Words, pack
from schedir.passes.ends import apart, meets, together
from schedir.passes.insert import insert
from schedir.passes.record import Expected, Mask, Options, Pass, Present


def reduce_grads(program: Program) -> Program:
    """Reduce each stage's gradient right after its last backward, beside what is left.

    Always there when the program trains: with one replica it is local, and scales.  Of several
    updates each has its own.
    """
    streams = []
    for stream in program.streams:
        at = np.flatnonzero(np.isin(stream.op, ADDS))
        word = pack(Opcode.ReduceGrads, stream.stage[at], stream.mb[at] // program.plan.per_update)
        words, last = np.unique(word[::-1], return_index=True)
        none = np.empty(0, np.int64)
        streams.append(insert(stream, (none, none), (at[::-1][last], words)))
    return replace(program, streams=tuple(streams))


def reduce_holders(program: Program) -> Program:
    """Sum each stage's gradient over its two holders, if it has two, as soon as both are ready.

    On both ranks a sum stands between the same two messages of the one order in which `transfers`
    has placed them all, and of two sums there the same one comes first, that of the gradient which
    stands earlier in its Stream.  So all Streams agree with one order still, and none can hang.

    With replicas all sums stand at the end: each has to wait for the one over the replicas, which
    goes on beside what is computed, and what stands behind it on hosts that block would wait too.
    """
    plan = program.plan
    if not (plan.two_way and program.trains):
        return program
    if program.dp > 1 or not program.order:
        return _append(program, [pack(Opcode.ReduceHolders, own, 0) for own in plan.stages_of])
    index, begins = Index.of(program), program.offsets.tolist()
    messages = index.messages()
    passed = np.concatenate([np.maximum.accumulate(messages[b:e]) for b, e in pairwise(begins)])
    ready = index.at[Opcode.ReduceGrads].reshape(plan.holders.shape)
    behind = passed[ready].max(0)  # the message that the sum of each stage stands behind
    ready = ready - program.offsets[plan.holders]
    order = np.lexsort((ready.max(0), behind))
    streams, none = [], np.empty(0, np.int64)
    for rank, stream in enumerate(program.streams):
        own = order[np.isin(order, plan.stages_of[rank])]
        before = passed[begins[rank] : begins[rank + 1]]
        reduced = np.where(plan.holders[0, own] == rank, *ready[:, own])
        last = before[np.searchsorted(before, behind[own], side="right") - 1]
        after = np.maximum.accumulate(np.maximum(reduced, np.searchsorted(before, last)))
        streams.append(insert(stream, (none, none), (after, pack(Opcode.ReduceHolders, own, 0))))
    return replace(program, streams=tuple(streams))


def reduce_tied(program: Program) -> Program:
    """Sum the copies of tied weights: one instruction on each rank that holds any."""
    if not (program.tied and program.trains):
        return program
    tied = {s for stages in program.tied for s in stages}
    copies = [[s for s in own if s in tied] for own in program.plan.stages_of]
    return _append(program, [pack(Opcode.ReduceTied, own[:1], 0) for own in copies])


def reduce_norm(program: Program) -> Program:
    """The global norm that clipping needs; all ranks meet."""
    if not (program.clip and program.trains):
        return program
    return _append(program, [pack(Opcode.ReduceNorm, 0, 0)] * program.plan.ranks)


def optimizer_step(program: Program) -> Program:
    """End every Stream, and every update in it, with the optimizer's step, if there are any."""
    if not program.trains:
        return program
    return _append(program, [pack(Opcode.OptimizerStep, 0, 0)] * program.plan.ranks)


def _append(program: Program, tails: list[Words]) -> Program:
    """End each Stream, and each update before the last, with its tail."""
    plan, none = program.plan, np.empty(0, np.int64)
    earlier = np.arange(plan.updates - 1)
    ends = together(Graph.of(program)) if meets(program) else apart(program)
    streams = []
    for stream, tail, end in zip(
        program.streams, tails, (ends - program.offsets[:-1]).T, strict=True
    ):
        words = (tail + earlier[:, None]).reshape(-1)
        after = (np.repeat(end, len(tail)), words)
        words = insert(stream, (none, none), after).words if len(words) else stream.words
        streams.append(Stream(np.concatenate([words, tail + plan.updates - 1])))
    return replace(program, streams=tuple(streams))


# ------------------------------------------------------------ what must then be there


def _each(program: Program, per: Per) -> Mask:
    """A mask over the holders of stages, or over ranks, which is true if the program trains."""
    size = program.plan.ranks if per is Per.RANK else program.plan.holders.size
    return np.full(size, program.trains)


def _stages(program: Program, present: Present) -> Iterator[Expected]:
    yield Expected(Opcode.ReduceGrads, _each(program, Per.STAGE))


def _holders(program: Program, present: Present) -> Iterator[Expected]:
    once = _each(program, Per.STAGE) & program.plan.two_way
    yield Expected(Opcode.ReduceHolders, once, "each stage has one holder")


def _tied(program: Program, present: Present) -> Iterator[Expected]:
    holders = program.plan.holders.reshape(-1)  # by key: all first holders, then all second ones
    first: dict[int, int] = {}  # the key of each rank's first copy
    for stage in sorted({s for stages in program.tied for s in stages}):
        for key in range(stage, len(holders), program.plan.stages):
            first.setdefault(int(holders[key]), key)
    once = _each(program, Per.STAGE) & np.isin(np.arange(len(holders)), [*first.values()])
    why = "one per rank that holds a copy of a tied weight, at its first stage"
    yield Expected(Opcode.ReduceTied, once, why if program.tied else "the program says 'tied no'")


def _norm(program: Program, present: Present) -> Iterator[Expected]:
    once = _each(program, Per.RANK) & program.clip
    yield Expected(Opcode.ReduceNorm, once, "the program says 'clip no'")


def _steps(program: Program, present: Present) -> Iterator[Expected]:
    yield Expected(Opcode.OptimizerStep, _each(program, Per.RANK))


def _unless_there(program: Program, options: Options) -> bool:
    return Opcode.ReduceGrads not in program.ops


REDUCE_GRADS: Final = Pass(
    "reduce_grads", "ends", lambda p, options: reduce_grads(p), _unless_there, _stages
)
REDUCE_HOLDERS: Final = Pass(
    "reduce_holders", "ends", lambda p, options: reduce_holders(p), expected=_holders
)
REDUCE_TIED: Final = Pass("reduce_tied", "ends", lambda p, options: reduce_tied(p), expected=_tied)
REDUCE_NORM: Final = Pass("reduce_norm", "ends", lambda p, options: reduce_norm(p), expected=_norm)
OPTIMIZER_STEP: Final = Pass(
    "optimizer_step", "ends", lambda p, options: optimizer_step(p), expected=_steps
)
