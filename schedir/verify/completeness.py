"""Check that all work is there, once, and on the right rank.

Order is not looked at here; that is the dependency graph's.
"""

from __future__ import annotations

import numpy as np

from schedir.errors import (
    CompletenessError,
    GroupError,
    LoweringLevelError,
    ReductionError,
    require_type,
)
from schedir.ir.instruction_index import InstructionIndex
from schedir.ir.isa.instructions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    BACKWARDS,
    COMPUTE,
    FORWARD,
    OF_TRAINED,
    REDUCES,
    ROWS,
    TRANSFERS,
    Instr,
    Row,
    Scope,
)
from schedir.ir.program import FIELDS, Program, is_op
from schedir.passes.pass_registry import LOWERING
from schedir.passes.pass_types import ExpectedInstructions
from schedir.verify.communication import forms, meetings, transfers
from schedir.verify.inspector import Inspector

MOST_IN_GROUP = 256  # NCCL hangs on larger ones
_PER_RANK = tuple(row.op for row in ROWS if row.per is Scope.RANK)
_LETTERS = " and ".join([", ".join(ROWS[op].text for op in COMPUTE[:-1]), ROWS[COMPUTE[-1]].text])
_SMALL = 2**16  # instructions of which tables may be made, whatever the shape


def completeness(program: Program, *, draft: bool) -> InstructionIndex:
    """Raise for the first thing that is missing, there twice, or where it does not belong.

    A draft is held to its compute instructions only.  Returns the index of the program for
    those that look further.  Raises CompletenessError or one of its kinds, GroupError, or
    LoweringLevelError.
    """
    require_type(program, Program, "schedir.compile(schedule, shape)")
    _size(program)
    _words(program)
    index = InstructionIndex.of(program)
    look = Inspector(program, index)
    if draft:
        _only_compute(look)
    elif program.is_draft and program.trains:
        raise LoweringLevelError(
            "this is a draft: it computes, but nothing is sent, reduced or stepped",
            program=program.name,
            hint="schedir.compile lowers a draft, as well as a schedule",
        )
    _ranges(look)
    _owners(look)
    _twice(look)
    _groups(look)
    _compute(look)
    _turns(look)
    if not draft:
        transfers(look)
        forms(look)
        _expected(look)
        meetings(look)
    return index


def _size(program: Program) -> None:
    """Refuse what is far too small or too large for its shape, before tables of it are made.

    What is a little wrong is better said by what is missing, or there twice.
    """
    shape, n = program.shape, len(program)
    if len(program.streams) != shape.ranks:
        raise CompletenessError(
            f"{len(program.streams)} Streams for {shape.ranks} ranks", program=program.name
        )
    least = shape.stages * shape.microbatches
    if least > max(4 * n, _SMALL) or n > max(4 * shape.room, _SMALL):
        raise CompletenessError(
            f"{n} instructions are far too {'few' if n < least else 'many'} for {shape.stages} "
            f"stages x {shape.microbatches} microbatches, which take {least} to {shape.room}",
            program=program.name,
        )


def _words(program: Program) -> None:
    """Refuse what is no instruction at all; only hand-made words can be that wrong."""
    words, fields = program.words, program.words.view(FIELDS)
    known = (fields["joined"] <= 1) & (fields["op"] < len(ROWS))
    known &= (fields["stage"] == 0) | ~is_op(fields["op"], _PER_RANK)
    if not known.all():
        at = int(np.flatnonzero(~known)[0])
        rank = int(np.searchsorted(program.offsets, at, side="right")) - 1
        raise CompletenessError(
            f"rank {rank} #{at - int(program.offsets[rank])} is no instruction: "
            f"word {int(words[at]):#x}",
            program=program.name,
        )


def _only_compute(look: Inspector) -> None:
    look.refuse_first(~look.index.is_op(COMPUTE), lambda at: f"a draft has only {_LETTERS}")


def _ranges(look: Inspector) -> None:
    ix, shape = look.index, look.shape
    if ix.all_valid:
        return
    look.refuse_first(
        ix.stage >= shape.stages,
        lambda at: f"there is no stage {ix.stage[at]}: they are 0 to {shape.stages - 1}",
    )
    late = ix.is_op(row.op for row in ROWS if row.per is not Scope.MICROBATCH)
    look.refuse_first(
        (ix.mb >= shape.microbatches) & ~late,
        lambda at: (
            f"there is no microbatch {ix.mb[at]}: they are 0 to {shape.microbatches - 1}"
            + _too_many(look, at)
        ),
    )
    turns = ix.is_op(row.op for row in ROWS if row.per is Scope.OCCURRENCE)
    look.refuse_first(
        (ix.mb >= shape.optimizer_steps) & late & ~turns,
        lambda at: f"there is no update {ix.mb[at]}: they are 0 to {shape.optimizer_steps - 1}",
    )
    look.refuse_first(
        (ix.mb >= ix.turns) & turns,
        lambda at: f"there is no turn {ix.mb[at]}: turns of a stage count from 0 on",
    )


def _too_many(look: Inspector, at: int) -> str:
    """What is there more often than there are microbatches, where that is so."""
    ix = look.index
    alike = BACKWARDS if ix.op[at] in BACKWARDS else (ix.op[at],)
    ops = [op for op in alike if ((ix.op == op) & (ix.stage == ix.stage[at])).any()]
    number = int((np.isin(ix.op, ops) & (ix.stage == ix.stage[at])).sum())
    if number <= look.shape.microbatches:
        return ""
    names = " and ".join(ROWS[op].text for op in ops)
    return f", but stage {ix.stage[at]} has {number} {names}"


def _owners(look: Inspector) -> None:
    ix, shape = look.index, look.shape
    wrong = shape.rank_at(ix.stage, ix.mb) != ix.rank
    for row, here in ix.rows():
        if row.per is Scope.RANK:
            wrong[here] = False
        elif row.per is not Scope.MICROBATCH:  # each holder reduces
            wrong[here] = (shape.holders[:, ix.stage[here]] != ix.rank[here]).all(0)
    look.refuse_first(
        wrong,
        lambda at: (
            f"stage {ix.stage[at]}{f' runs microbatch {ix.mb[at]}' * (shape.rows > 1)} "
            f"{'' if shape.rows > 1 else 'is '}on rank {shape.rank_at(ix.stage[at], ix.mb[at])}, "
            f"not on rank {ix.rank[at]}"
        ),
    )


def _twice(look: Inspector) -> None:
    ix = look.index
    if ix.once:
        return
    for row, found in ix.rows():
        twice = ix.at[row.op][ix.key[found]] != found
        if twice.any():
            one = int(found[twice.argmax()])
            other = int(ix.at[row.op][ix.key[one]])
            kind = _kind(row)
            site = look.site(one)
            look.refuse(f"{site.instr} is there twice", site, look.site(other), kind=kind)


def _kind(row: Row) -> type[CompletenessError]:
    """What it is that there is too little, or too much, of a row."""
    ends = row.per in (Scope.STAGE, Scope.RANK) or row.op in REDUCES
    return ReductionError if ends else CompletenessError


def _groups(look: Inspector) -> None:
    ix = look.index
    if not ix.any_joined:
        return
    starts = look.program.offsets[:-1]
    starts = starts[starts < len(ix.op)]
    lone = np.zeros(len(ix.op), bool)
    lone[starts] = ix.joined[starts]
    if lone.any():
        at = int(lone.argmax())
        look.refuse("nothing comes before it to be joined to", look.site(at), kind=GroupError)
    begins = np.flatnonzero(~ix.joined)
    sizes = np.diff([*begins.tolist(), len(ix.op)])
    transfer = ix.is_op(TRANSFERS)
    for begin, size in zip(begins[sizes > 1].tolist(), sizes[sizes > 1].tolist(), strict=True):
        ops = ix.op[begin : begin + size]
        if transfer[begin : begin + size].all():
            if size > MOST_IN_GROUP:
                look.refuse(
                    f"{size} transfers are issued as one; at most {MOST_IN_GROUP} may be",
                    look.site(begin),
                    kind=GroupError,
                )
        elif size > 2 or not np.isin(ops, COMPUTE).all():
            look.refuse(
                "only transfers, or two computes, can be issued as one",
                *(look.site(begin + k) for k in range(min(size, 4))),
                kind=GroupError,
            )


def _compute(look: Inspector) -> None:
    """Each stage runs each microbatch forward once, and backward once if the program trains."""
    f, b, i, w = (look.present(op) for op in (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT))
    if not f.all():
        look.missing(FORWARD, int((~f).argmax()))
    if not look.program.trains:
        return
    ix, frozen = look.index, look.stage < look.program.frozen_stages
    if look.program.frozen_stages:
        look.refuse_first(
            ix.is_op(OF_TRAINED) & (ix.stage < look.program.frozen_stages),
            lambda at: f"stage {ix.stage[at]} is frozen, and has no {ROWS[ix.op[at]].text}",
        )
    for split, name in ((i, BACKWARD_INPUT), (w, BACKWARD_WEIGHT)):
        if (b & split).any():
            key = int((b & split).argmax())
            look.refuse(
                f"stage {look.stage[key]} has both a whole and a split backward of "
                f"microbatch {look.mb[key]}",
                look.site_of(BACKWARD, key),
                look.site_of(name, key),
                hint="B is I and W in one",
            )
    if (w & ~i).any():
        look.missing(BACKWARD_INPUT, int((w & ~i).argmax()), ", but its W is there")
    if (i & ~w).any():
        look.missing(BACKWARD_WEIGHT, int((i & ~w).argmax()), ", but its I is there")
    if not (b | i | frozen).all():
        key = int((~(b | i | frozen)).argmax())
        rank = int(look.shape.rank_at(look.stage[key], look.mb[key]))
        look.refuse(
            f"microbatch {look.mb[key]} has no backward in stage {look.stage[key]} (rank {rank})",
            look.site_of(FORWARD, key),
        )


def _turns(look: Inspector) -> None:
    """What comes several times for a stage counts its turns from 0 on, along the Stream."""
    ix = look.index
    for row, at in ix.rows():
        if row.per is not Scope.OCCURRENCE:
            continue
        if look.shape.optimizer_steps > 1:
            look.refuse(f"{row.text} goes with one update", look.site(int(at[0])))
        place = ix.keys(row.per, at, np.zeros(len(at), np.int64))
        order = np.argsort(place, kind="stable")
        first = np.searchsorted(place[order], place[order])
        wrong = ix.mb[at[order]] != np.arange(len(at)) - first
        if wrong.any():
            where = int(at[order[wrong.argmax()]])
            stage, turn = int(ix.stage[where]), int((np.arange(len(at)) - first)[wrong.argmax()])
            look.refuse(
                f"{look.site(where).instr} comes where {Instr(row.op, stage, turn)} should",
                look.site(where),
                hint=f"each {row.text} of a stage has the number of those before it",
            )


def _expected(look: Inspector) -> None:
    """What passes add is there as the shape and the program's traits ask, and no more."""
    for each in LOWERING:
        for expected in each.expected(look.program, look.present):
            _as_expected(look, expected)


def _as_expected(look: Inspector, expected: ExpectedInstructions) -> None:
    op, shape = expected.op, look.shape
    per, present = ROWS[op].per, look.present(op)
    should = np.asarray(expected.once, bool)
    if len(should) != len(present):  # so in each update, or turn
        should = np.resize(should, len(present))
    if not (should != present).any():
        return
    kind = _kind(ROWS[op])
    if (should & ~present).any():
        at = int((should & ~present).argmax())
        if per is Scope.MICROBATCH:
            look.missing(op, at)
        time, key = divmod(at, shape.ranks if per is Scope.RANK else shape.holders.size)
        rank = key if per is Scope.RANK else int(shape.holders.reshape(-1)[key])
        instr = Instr(op, 0 if per is Scope.RANK else key % shape.stages, time)
        beside = expected.beside
        there = beside is not None and look.present(beside)[at]
        sites = [look.site_of(beside, at)] if beside is not None and there else []
        look.refuse(f"{instr} is missing on rank {rank}", *sites, kind=kind, hint=expected.hint)
    if (present & ~should).any():
        site = look.site_of(op, int((present & ~should).argmax()))
        reason = expected.why if look.program.trains else "the program has no backward"
        look.refuse(f"{site.instr} has nothing to do: {reason}", site, kind=kind)
