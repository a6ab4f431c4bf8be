"""Lowered: all that a lowered program has beyond its draft is there, once, where it belongs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedir.errors import PartnerError, ReductionError
from schedir.ir.ops import ROWS, SENDS, SHARDING, Instr, Opcode, Per
from schedir.ir.program import Words
from schedir.verify.inspector import Look

_O = Opcode
_MOVE_GRADIENTS = (_O.SendGrad, _O.RecvGrad, _O.ScatterGrad, _O.GatherGrad)


def transfers(look: Look) -> None:
    """Each value that crosses ranks is sent and received, and nothing else is."""
    plan, m = look.plan, look.plan.microbatches
    if not look.program.trains:
        look.any(
            look.index.among(_MOVE_GRADIENTS),
            lambda at: "a program without a backward has no gradient to move",
        )
    for send in SENDS if look.program.trains else (_O.SendAct,):
        row = ROWS[send]
        receive = row.meets
        assert receive is not None
        other = look.stage + row.hop
        inside = (other >= 0) & (other < plan.stages)
        there = np.clip(other, 0, plan.stages - 1)
        here, away = plan.rank_at(look.stage, look.mb), plan.rank_at(there, look.mb)
        crosses = inside & (here != away)
        sent = look.there(send)
        key = np.where(inside, there * m + look.mb, 0)
        got = look.there(receive)[key] & inside
        _stray(look, send, sent & ~crosses)
        edge = np.zeros_like(sent)  # receives that some edge accounts for
        edge[key[crosses]] = True
        _stray(look, receive, look.there(receive) & ~edge)
        for one, two, side, gone, k in (
            (sent, got, send, receive, np.arange(len(sent))),
            (got, sent, receive, send, key),
        ):
            if (one & ~two & crosses).any():
                at = int((one & ~two & crosses).argmax())
                site = look.spot(side, int(k[at]))
                partner = Instr(gone, int(other[at] if gone is receive else look.stage[at]),
                                int(look.mb[at]))  # fmt: skip
                rank = int(plan.rank_at(partner.stage, partner.mb))
                look.refuse(
                    f"{site.instr} has no {partner} on rank {rank}", site, kind=PartnerError
                )
        lost = crosses & ~sent
        if lost.any():
            at = int(lost.argmax())
            instr = Instr(send, int(look.stage[at]), int(look.mb[at]))
            look.refuse(
                f"{instr} and its receive are missing: rank {here[at]} has what rank "
                f"{away[at]} needs",
                kind=PartnerError,
            )


def _stray(look: Look, op: Opcode, stray: NDArray[np.bool_]) -> None:
    if not stray.any():
        return
    site = look.spot(op, int(stray.argmax()))
    other = look.stage[int(stray.argmax())] + ROWS[op].hop
    why = (
        f"stage {other} is on the same rank"
        if 0 <= other < look.plan.stages
        else f"there is no stage {other}"
    )
    look.refuse(f"{site.instr} has nobody to go to: {why}", site, kind=PartnerError)


def sharding(look: Look) -> None:
    """Each slice that is sent is made whole behind the wire, and nothing else is."""
    m = look.plan.microbatches
    if look.program.tp == 1:
        look.any(
            look.index.among(SHARDING),
            lambda at: "nothing is sharded where tp is 1",
        )
    for cut, send, whole in (
        (_O.Scatter, _O.SendAct, _O.Gather),
        (_O.ScatterGrad, _O.SendGrad, _O.GatherGrad),
    ):
        hop = ROWS[send].hop
        cuts, wholes, sent = look.there(cut), look.there(whole), look.there(send)
        moved = np.zeros_like(cuts)  # cuts, by where they arrive
        keys = np.flatnonzero(cuts & sent) + hop * m
        moved[keys] = True
        if (cuts & ~sent).any():
            site = look.spot(cut, int((cuts & ~sent).argmax()))
            look.refuse(f"{site.instr} is never sent", site, kind=PartnerError)
        for lost, op, gone, shift in (
            (moved & ~wholes, whole, cut, -hop * m),
            (wholes & ~moved, cut, whole, 0),
        ):
            if lost.any():
                key = int(lost.argmax())
                site = look.spot(gone, key + shift)
                look.refuse(
                    f"{site.instr} has no {ROWS[op].text} on the other side",
                    site,
                    kind=PartnerError,
                )


def reductions(look: Look) -> None:
    """Gradients are reduced and stepped as the plan and the program's traits ask, and no more."""
    plan, program, trains = look.plan, look.program, look.program.trains
    holders = plan.holders.reshape(-1)  # by key: all first holders, then all second ones
    tied_at: dict[int, int] = {}  # the key of each rank's first copy
    for stage in sorted({s for stages in program.tied for s in stages}):
        for key in range(stage, len(holders), plan.stages):
            tied_at.setdefault(int(holders[key]), key)
    every = np.ones(len(holders), bool), np.ones(plan.ranks, bool)
    expected: dict[Opcode, Words | NDArray[np.bool_]] = {
        _O.ReduceGrads: every[0] & trains,
        _O.ReduceHolders: every[0] & (trains and plan.two_way),
        _O.ReduceTied: np.isin(np.arange(len(holders)), [*tied_at.values()]) & trains,
        _O.ReduceNorm: every[1] & (trains and program.clip),
        _O.OptimizerStep: every[1] & trains,
    }
    why = {
        _O.ReduceHolders: "each stage has one holder",
        _O.ReduceTied: "the program says 'tied no'" if not program.tied else
        "one per rank that holds a copy of a tied weight, at its first stage",
        _O.ReduceNorm: "the program says 'clip no'",
    }  # fmt: skip
    for op, once in expected.items():
        should: NDArray[np.bool_] = np.tile(np.asarray(once, bool), plan.updates)
        there = look.there(op)
        if (should & ~there).any():
            update, key = divmod(int((should & ~there).argmax()), len(once))
            per_rank = ROWS[op].per is Per.RANK
            rank = key if per_rank else int(holders[key])
            instr = Instr(op, 0 if per_rank else key % plan.stages, update)
            look.refuse(f"{instr} is missing on rank {rank}", kind=ReductionError)
        if (there & ~should).any():
            site = look.spot(op, int((there & ~should).argmax()))
            reason = why.get(op, "") if trains else "the program has no backward"
            look.refuse(f"{site.instr} has nothing to do: {reason}", site, kind=ReductionError)
