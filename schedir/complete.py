"""Complete: all the work is there, once, where it belongs.  What counting alone can find.

Order is not looked at here; that is the dependency graph's.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from schedir.errors import (
    CompletenessError,
    GroupError,
    LevelError,
    PartnerError,
    ProgramError,
    ReductionError,
    Site,
    expect,
)
from schedir.index import NONE, Index
from schedir.ops import BACKWARDS, COMPUTE, ROWS, SHARDING, TRANSFERS, Instr, Opcode, Per
from schedir.program import FIELDS, Program, Words

MOST_IN_GROUP = 256  # NCCL hangs on larger ones
_SMALL = 2**16  # instructions of which tables may be made, whatever the plan
_O = Opcode
_F, _B, _I, _W = _O.Forward, _O.Backward, _O.BackwardInput, _O.BackwardWeight
_MOVE_GRADIENTS = (_O.SendGrad, _O.RecvGrad, _O.ScatterGrad, _O.GatherGrad)


def completeness(program: Program, *, draft: bool) -> Index:
    """Raise for the first thing that is missing, there twice, or where it does not belong.

    A draft is held to its compute instructions only.  Returns the index of the program for
    those that look further.  Raises CompletenessError or one of its kinds, GroupError, or
    LevelError.
    """
    expect(program, Program, "schedir.compile(schedule, plan)")
    _size(program)
    _words(program)
    index = Index(program)
    look = _Look(program, index)
    if draft:
        look.only_compute()
    elif program.is_draft and program.trains:
        raise LevelError(
            "this is a draft: it computes, but nothing is sent, reduced or stepped",
            program=program.name,
            hint="schedir.compile lowers a schedule",
        )
    look.ranges()
    look.owners()
    look.twice()
    look.groups()
    look.compute()
    if not draft:
        look.transfers()
        look.sharding()
        look.reductions()
    return index


def _size(program: Program) -> None:
    """Refuse what is far too small or too large for its plan, before tables of it are made.

    What is a little wrong is better said by what is missing, or there twice.
    """
    plan, n = program.plan, len(program)
    if len(program.streams) != plan.ranks:
        raise CompletenessError(
            f"{len(program.streams)} Streams for {plan.ranks} ranks", program=program.name
        )
    least = plan.stages * plan.microbatches
    if least > max(4 * n, _SMALL) or n > max(4 * plan.room, _SMALL):
        raise CompletenessError(
            f"{n} instructions are far too {'few' if n < least else 'many'} for {plan.stages} "
            f"stages x {plan.microbatches} microbatches, which take {least} to {plan.room}",
            program=program.name,
        )


def _words(program: Program) -> None:
    """Refuse what is no instruction at all; only hand-made words can be that wrong."""
    words, fields = program.words, program.words.view(FIELDS)
    known = (fields["joined"] <= 1) & (fields["op"] < len(ROWS))
    for row in ROWS:
        if row.per is Per.RANK:
            here = np.flatnonzero(fields["op"] == row.op)
            known[here] &= fields["stage"][here] == 0
    if not known.all():
        at = int(np.flatnonzero(~known)[0])
        rank = int(np.searchsorted(program.offsets, at, side="right")) - 1
        raise CompletenessError(
            f"rank {rank} #{at - int(program.offsets[rank])} is no instruction: "
            f"word {int(words[at]):#x}",
            program=program.name,
        )


class _Look:
    """One program under inspection."""

    def __init__(self, program: Program, index: Index) -> None:
        self.program, self.index, self.plan = program, index, program.plan
        stages, mbs = (
            np.arange(k, dtype=np.int32) for k in (self.plan.stages, self.plan.microbatches)
        )
        self.stage, self.mb = np.repeat(stages, len(mbs)), np.tile(mbs, len(stages))

    def site(self, position: int, note: str = "") -> Site:
        return Site(*self.index.place(position), note)

    def refuse(
        self,
        fact: str,
        *sites: Site,
        kind: type[ProgramError] = CompletenessError,
        hint: str = "",
    ) -> None:
        raise kind(fact, program=self.program.name, sites=sites, hint=hint)

    def any(self, wrong: NDArray[np.bool_], fact: Callable[[int], str]) -> None:
        """Refuse the first instruction that is marked wrong."""
        if wrong.any():
            at = int(wrong.argmax())
            self.refuse(fact(at), self.site(at))

    def there(self, op: Opcode) -> NDArray[np.bool_]:
        """Where `op` exists, by stage*microbatches + mb (or by stage, or rank)."""
        table = self.index.at.get(op)
        if table is None:
            return np.zeros(self.index.size[ROWS[op].per], bool)
        return np.asarray(table >= 0)

    def spot(self, op: Opcode, key: int, note: str = "") -> Site:
        return self.site(int(self.index.at[op][key]), note)

    def only_compute(self) -> None:
        self.any(~self.index.among(COMPUTE), lambda at: "a draft has only F, B, I and W")

    def ranges(self) -> None:
        ix, plan = self.index, self.plan
        self.any(
            ix.stage >= plan.stages,
            lambda at: f"there is no stage {ix.stage[at]}: they are 0 to {plan.stages - 1}",
        )
        late = ix.among(row.op for row in ROWS if row.per is not Per.MICROBATCH)
        self.any(
            (ix.mb >= plan.microbatches) & ~late,
            lambda at: (
                f"there is no microbatch {ix.mb[at]}: they are 0 to {plan.microbatches - 1}"
                + self._too_many(at)
            ),
        )
        self.any(
            (ix.mb >= plan.updates) & late,
            lambda at: f"there is no update {ix.mb[at]}: they are 0 to {plan.updates - 1}",
        )

    def _too_many(self, at: int) -> str:
        """What is there more often than there are microbatches, where that is so."""
        ix = self.index
        alike = BACKWARDS if ix.op[at] in BACKWARDS else (ix.op[at],)
        ops = [op for op in alike if ((ix.op == op) & (ix.stage == ix.stage[at])).any()]
        number = int((np.isin(ix.op, ops) & (ix.stage == ix.stage[at])).sum())
        if number <= self.plan.microbatches:
            return ""
        names = " and ".join(ROWS[op].text for op in ops)
        return f", but stage {ix.stage[at]} has {number} {names}"

    def owners(self) -> None:
        ix, plan = self.index, self.plan
        wrong = np.empty(len(ix), bool)
        for rank, (lo, hi) in enumerate(pairwise(self.program.offsets.tolist())):
            wrong[lo:hi] = plan.rank_at(ix.stage[lo:hi], ix.mb[lo:hi]) != rank
        for row in ROWS:
            if row.per is not Per.MICROBATCH:
                here = np.flatnonzero(ix.op == row.op)
                elsewhere = (plan.holders[:, ix.stage[here]] != ix.rank[here]).all(0)
                wrong[here] = elsewhere if row.per is Per.STAGE else False  # either holder reduces
        self.any(
            wrong,
            lambda at: (
                f"stage {ix.stage[at]}{f' runs microbatch {ix.mb[at]}' * plan.two_way} "
                f"{'' if plan.two_way else 'is '}on rank {plan.rank_at(ix.stage[at], ix.mb[at])}, "
                f"not on rank {ix.rank[at]}"
            ),
        )

    def twice(self) -> None:
        ix = self.index
        for row in ROWS:
            if row.op not in ix.at:
                continue
            here = ix.op == row.op
            if np.count_nonzero(here) > np.count_nonzero(ix.at[row.op] != NONE):
                found = np.flatnonzero(here)
                one = int(found[(ix.at[row.op][ix.key[found]] != found).argmax()])
                other = int(ix.at[row.op][ix.key[one]])
                kind = CompletenessError if row.per is Per.MICROBATCH else ReductionError
                site = self.site(one)
                self.refuse(f"{site.instr} is there twice", site, self.site(other), kind=kind)

    def groups(self) -> None:
        ix = self.index
        if not ix.joined.any():
            return
        starts = self.program.offsets[:-1]
        starts = starts[starts < len(ix.op)]
        lone = np.zeros(len(ix.op), bool)
        lone[starts] = ix.joined[starts]
        if lone.any():
            at = int(lone.argmax())
            self.refuse("nothing comes before it to be joined to", self.site(at), kind=GroupError)
        begins = np.flatnonzero(~ix.joined)
        sizes = np.diff([*begins.tolist(), len(ix.op)])
        transfer = ix.among(TRANSFERS)
        for begin, size in zip(begins[sizes > 1].tolist(), sizes[sizes > 1].tolist(), strict=True):
            ops = ix.op[begin : begin + size]
            if transfer[begin : begin + size].all():
                if size > MOST_IN_GROUP:
                    self.refuse(
                        f"{size} transfers are issued as one; at most {MOST_IN_GROUP} may be",
                        self.site(begin),
                        kind=GroupError,
                    )
            elif size > 2 or not np.isin(ops, COMPUTE).all():
                self.refuse(
                    "only transfers, or two computes, can be issued as one",
                    *(self.site(begin + k) for k in range(min(size, 4))),
                    kind=GroupError,
                )

    def missing(self, op: Opcode, key: int, why: str = "") -> None:
        instr = Instr(op, int(self.stage[key]), int(self.mb[key]))
        rank = int(self.plan.rank_at(*instr[1:]))
        self.refuse(f"{instr} is missing on rank {rank}{why}")

    def compute(self) -> None:
        f, b, i, w = (self.there(op) for op in (_F, _B, _I, _W))
        if not f.all():
            self.missing(_F, int((~f).argmax()))
        if not self.program.trains:
            return
        for split, name in ((i, _I), (w, _W)):
            if (b & split).any():
                key = int((b & split).argmax())
                self.refuse(
                    f"stage {self.stage[key]} has both a whole and a split backward of "
                    f"microbatch {self.mb[key]}",
                    self.spot(_B, key),
                    self.spot(name, key),
                    hint="B is I and W in one",
                )
        if (w & ~i).any():
            self.missing(_I, int((w & ~i).argmax()), ", but its W is there")
        if (i & ~w).any():
            self.missing(_W, int((i & ~w).argmax()), ", but its I is there")
        if not (b | i).all():
            key = int((~(b | i)).argmax())
            rank = int(self.plan.rank_at(self.stage[key], self.mb[key]))
            self.refuse(
                f"microbatch {self.mb[key]} has no backward in stage {self.stage[key]} "
                f"(rank {rank})",
                self.spot(_F, key),
            )

    def transfers(self) -> None:
        plan, m = self.plan, self.plan.microbatches
        if not self.program.trains:
            self.any(
                self.index.among(_MOVE_GRADIENTS),
                lambda at: "a program without a backward has no gradient to move",
            )
        for send in (_O.SendAct, _O.SendGrad) if self.program.trains else (_O.SendAct,):
            row = ROWS[send]
            receive = row.meets
            assert receive is not None
            other = self.stage + row.hop
            inside = (other >= 0) & (other < plan.stages)
            there = np.clip(other, 0, plan.stages - 1)
            here, away = plan.rank_at(self.stage, self.mb), plan.rank_at(there, self.mb)
            crosses = inside & (here != away)
            sent = self.there(send)
            key = np.where(inside, there * m + self.mb, 0)
            got = self.there(receive)[key] & inside
            self._stray(send, sent & ~crosses)
            edge = np.zeros_like(sent)  # receives that some edge accounts for
            edge[key[crosses]] = True
            self._stray(receive, self.there(receive) & ~edge)
            for one, two, side, gone, k in (
                (sent, got, send, receive, np.arange(len(sent))),
                (got, sent, receive, send, key),
            ):
                if (one & ~two & crosses).any():
                    at = int((one & ~two & crosses).argmax())
                    site = self.spot(side, int(k[at]))
                    partner = Instr(gone, int(other[at] if gone is receive else self.stage[at]),
                                    int(self.mb[at]))  # fmt: skip
                    rank = int(plan.rank_at(partner.stage, partner.mb))
                    self.refuse(
                        f"{site.instr} has no {partner} on rank {rank}", site, kind=PartnerError
                    )
            lost = crosses & ~sent
            if lost.any():
                at = int(lost.argmax())
                instr = Instr(send, int(self.stage[at]), int(self.mb[at]))
                self.refuse(
                    f"{instr} and its receive are missing: rank {here[at]} has what rank "
                    f"{away[at]} needs",
                    kind=PartnerError,
                )

    def _stray(self, op: Opcode, stray: NDArray[np.bool_]) -> None:
        if not stray.any():
            return
        site = self.spot(op, int(stray.argmax()))
        other = self.stage[int(stray.argmax())] + ROWS[op].hop
        why = (
            f"stage {other} is on the same rank"
            if 0 <= other < self.plan.stages
            else f"there is no stage {other}"
        )
        self.refuse(f"{site.instr} has nobody to go to: {why}", site, kind=PartnerError)

    def sharding(self) -> None:
        m = self.plan.microbatches
        if self.program.tp == 1:
            self.any(
                self.index.among(SHARDING),
                lambda at: "nothing is sharded where tp is 1",
            )
        for cut, send, whole in (
            (_O.Scatter, _O.SendAct, _O.Gather),
            (_O.ScatterGrad, _O.SendGrad, _O.GatherGrad),
        ):
            hop = ROWS[send].hop
            cuts, wholes, sent = self.there(cut), self.there(whole), self.there(send)
            moved = np.zeros_like(cuts)  # cuts, by where they arrive
            keys = np.flatnonzero(cuts & sent) + hop * m
            moved[keys] = True
            if (cuts & ~sent).any():
                site = self.spot(cut, int((cuts & ~sent).argmax()))
                self.refuse(f"{site.instr} is never sent", site, kind=PartnerError)
            for lost, op, gone, shift in (
                (moved & ~wholes, whole, cut, -hop * m),
                (wholes & ~moved, cut, whole, 0),
            ):
                if lost.any():
                    key = int(lost.argmax())
                    site = self.spot(gone, key + shift)
                    self.refuse(
                        f"{site.instr} has no {ROWS[op].text} on the other side",
                        site,
                        kind=PartnerError,
                    )

    def reductions(self) -> None:
        plan, program, trains = self.plan, self.program, self.program.trains
        holders = plan.holders.reshape(-1)  # by key: all first holders, then all second ones
        tied_at: dict[int, int] = {}  # the key of each rank's first copy
        for end in (0, plan.stages - 1):
            for key in range(end, len(holders), plan.stages):
                tied_at.setdefault(int(holders[key]), key)
        tied = trains and program.tied and plan.stages > 1
        every = np.ones(len(holders), bool), np.ones(plan.ranks, bool)
        expected: dict[Opcode, Words | NDArray[np.bool_]] = {
            _O.ReduceGrads: every[0] & trains,
            _O.ReduceHolders: every[0] & (trains and plan.two_way),
            _O.ReduceTied: np.isin(np.arange(len(holders)), [*tied_at.values()]) & tied,
            _O.ReduceNorm: every[1] & (trains and program.clip),
            _O.OptimizerStep: every[1] & trains,
        }
        why = {
            _O.ReduceHolders: "each stage has one holder",
            _O.ReduceTied: "the program says 'tied no'" if not program.tied else
            "one per rank that holds a copy of the tied weight",
            _O.ReduceNorm: "the program says 'clip no'",
        }  # fmt: skip
        for op, once in expected.items():
            should: NDArray[np.bool_] = np.tile(np.asarray(once, bool), plan.updates)
            there = self.there(op)
            if (should & ~there).any():
                update, key = divmod(int((should & ~there).argmax()), len(once))
                per_rank = ROWS[op].per is Per.RANK
                rank = key if per_rank else int(holders[key])
                instr = Instr(op, 0 if per_rank else key % plan.stages, update)
                self.refuse(f"{instr} is missing on rank {rank}", kind=ReductionError)
            if (there & ~should).any():
                site = self.spot(op, int((there & ~should).argmax()))
                reason = why.get(op, "") if trains else "the program has no backward"
                self.refuse(f"{site.instr} has nothing to do: {reason}", site, kind=ReductionError)
