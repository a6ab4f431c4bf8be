"""Reductions and the step: handlers of what ends an update.  What they begin is waited for once."""

from __future__ import annotations

from functools import partial

import torch

from schedir.ir.ops import Instr
from schedir.runtime.gradients import is_sharded
from schedir.runtime.precision import are_finite
from schedir.runtime.random import UPDATE
from schedir.runtime.rank import Call, Rank
from schedir.runtime.tied import summing


def reduce_grads(rank: Rank, i: Instr) -> Call:
    gradients, plan = rank.stages[i.stage].gradients, rank.plan
    start, reducing = rank.transport.collective, rank.reducing
    taken = [  # the losses that are taken here
        mb
        for mb in range(i.mb * plan.per_update, (i.mb + 1) * plan.per_update)
        if i.stage == plan.stages - 1 and plan.rank_at(i.stage, mb) == rank.rank
    ]

    def run() -> None:
        gradients.scale(rank.scale)
        if taken:  # a gradient may not tell of its loss: that of a mean over no tokens is zero
            losses = torch.stack([rank.losses[mb] for mb in taken])
            gradients.spoil((losses - losses).sum())
        if rank.program.dp > 1:
            for flat in gradients.flat:
                reducing.append(start("all_reduce", "dp", flat, flat))

    return Call(None, run)


def _reduced(rank: Rank) -> None:
    """Waits until every reduction that was begun has ended."""
    for work in rank.reducing:
        work.wait()
    rank.reducing.clear()


def reduce_holders(rank: Rank, i: Instr) -> Call:
    gradients = rank.stages[i.stage].gradients
    start, reducing = rank.transport.collective, rank.reducing

    def run() -> None:
        for flat in gradients.flat:
            reducing.append(start("all_reduce", "holders", flat, flat))

    # The sum over replicas comes first; what is reduced here alone is there already.
    return Call(partial(_reduced, rank) if rank.program.dp > 1 else None, run)


def reduce_tied(rank: Rank, i: Instr) -> Call:
    sums = [summing(w, rank.plan, rank.rank, rank.transport, rank.reducing) for w in rank.tied]

    def run() -> None:
        for begin in sums:
            begin()

    return Call(partial(_reduced, rank), run)


def reduce_norm(rank: Rank, i: Instr) -> Call:
    counted = [
        p
        for s, stage in rank.stages.items()
        for p in stage.gradients.parameters
        # What several ranks hold in full is counted by one of them.
        if rank.plan.rank_of[s] == rank.rank
        and (is_sharded(p) or rank.transport.tp_rank == 0)
        and not any(p is w.own.get(s) and s > w.stages[0] for w in rank.tied)
    ]

    start, reducing = rank.transport.collective, rank.reducing

    def run() -> None:
        grads = [p.grad for p in counted if p.grad is not None]
        reals = [torch.view_as_real(g) if g.is_complex() else g for g in grads]
        squares = [g.double().square().sum() for g in reals]
        rank.norm = torch.stack(squares).sum() if squares else torch.zeros_like(rank.norm)
        reducing.append(start("all_reduce", "model", rank.norm, rank.norm))

    return Call(partial(_reduced, rank), run)


def step(rank: Rank, i: Instr) -> Call:
    def run() -> None:
        if rank.program.clip:  # no number of it for Python: on a GPU that would wait for it
            rank.norm = rank.norm.sqrt()
            finite = rank.norm.isfinite()
            shrink = (rank.max_norm / (rank.norm + 1e-6)).clamp(max=1.0)
            for stage in rank.stages.values():
                # What is not finite is left to look at, and not made NaN everywhere.
                stage.gradients.scale(torch.where(finite, shrink, 1.0))
        else:
            finite = are_finite(flat for s in rank.stages.values() for flat in s.gradients.flat)
        rank.finite[i.mb] = finite
        rank.let_step(finite)
        if rank.loss_scale is not None:
            rank.loss_scale.update(finite)
        if i.mb < rank.plan.updates - 1:  # the last one's gradients are left to look at
            rank.begin_update(i.mb + 1)

    # Whoever holds these stages too, draws as this rank does.
    first, update = min(rank.stages), rank.plan.microbatches + i.mb
    return Call(partial(_reduced, rank), rank.draws.seeded(UPDATE, first, update, run))
