"""Draft: from what a schedule says of each rank to the instructions that it means."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedir.errors import ProgramError, ScheduleError, expect, in_words
from schedir.ir.ops import ROWS, Opcode
from schedir.ir.plan import Plan
from schedir.ir.program import JOINED, OP, STAGE, Program, Stream, Words, pack
from schedir.schedules.words import (
    AUTO,
    EMPTY,
    OLDEST,
    Schedule,
    Word,
    delay_for,
    name_of,
    placed_for,
    takes_v,
)

_ALGEBRA = "words are F + B, n * F, F[own stage] and F.at(microbatch)"


def draft(schedule: Schedule, plan: Plan) -> Program:
    """Spell a schedule out: F, B, I and W of every rank, no communication yet.

    `schedule` is called with (rank, ranks, microbatches), and with `v`, the number of the rank's
    own stages, if it has a parameter of that name.  It returns a Word or yields Words.

    Raises ScheduleError if it does not, raises, names a stage that the rank does not own, or is
    for another placement.

    >>> from schedir import B, F, Plan, draft, show
    >>> def mine(rank, ranks, microbatches):
    ...     lead = min(ranks - 1 - rank, microbatches)
    ...     return lead * F + (microbatches - lead) * (F + B) + lead * B
    >>> print(show(draft(mine, Plan(ranks=2, microbatches=4))), end="")
    schedir 1
    program mine
    ranks 2  microbatches 4  stages_per_rank 1  placement loop
    tp 1  dp 1  tied no  clip no
    <BLANKLINE>
    rank 0
      2 x  F 0.0+
      2 x  B 0.0+; F 0.2+
      2 x  B 0.2+
    <BLANKLINE>
    rank 1
      4 x  F 1.0+; B 1.0+
    """
    expect(plan, Plan, "Plan(ranks=4, microbatches=8)")
    name = name_of(schedule)
    try:
        parameters = inspect.signature(schedule).parameters
    except (TypeError, ValueError):
        hints = {str: "the built-in ones are in schedir.schedules", Word: "do not call it yourself"}
        raise ScheduleError(
            f"a schedule is a function, not {schedule!r:.60}", hint=hints.get(type(schedule), "")
        ) from None
    if inspect.iscoroutinefunction(schedule) or inspect.isasyncgenfunction(schedule):
        raise ScheduleError("a schedule is a plain function, not an async one", program=name)
    counted = takes_v(schedule)
    call = partial(schedule, v=plan.stages_per_rank) if counted else partial(schedule)
    try:
        inspect.signature(call).bind(0, plan.ranks, plan.microbatches)
    except TypeError:
        raise ScheduleError(
            f"a schedule takes (rank, ranks, microbatches), but this one takes "
            f"{inspect.signature(schedule)}",
            program=name,
            hint="bind other options with functools.partial" if len(parameters) > 3 else "",
        ) from None
    _check_placed(schedule, plan, name)
    streams = []
    for rank, own in enumerate(plan.stages_of):
        call = partial(schedule, v=len(own)) if counted else call
        word = _called(call, name, rank, plan)
        try:
            streams.append(_spell(word, rank, plan))
        except ProgramError as error:
            error.program = name
            raise
    return Program(name, plan, tuple(streams))


def _check_placed(schedule: Schedule, plan: Plan, name: str) -> None:
    placement, fixed = placed_for(schedule)
    delay = delay_for(schedule)
    if plan.updates > 1 and delay is not None and replace(plan, delay=delay) != plan:
        raise ScheduleError(
            f"{name} is for updates with a delay of {delay}, not of {plan.delay}", program=name
        )
    if placement is None:
        return
    v = fixed or plan.stages_per_rank
    right = Plan(plan.ranks, plan.microbatches, v, placement)
    if not np.array_equal(plan.holders, right.holders):
        raise ScheduleError(
            f"{name} is for placement {placement!r}{f' with {v} stages per rank' * bool(fixed)}, "
            f"not for {plan.placement!r} with {plan.stages_per_rank}",
            program=name,
        )


def _called(call: Schedule, name: str, rank: int, plan: Plan) -> Word:
    """All words of one rank as one, unless they do not end."""
    what = f"the schedule of rank {rank} of {plan.ranks}"
    enough = 3 * len(plan.stages_of[rank]) * plan.microbatches  # F, I and W of each (stage, mb)
    most = 4 * enough + 1000  # what is a little wrong is best said of the whole
    words, count = [EMPTY.letters], 0
    try:
        told = call(rank, plan.ranks, plan.microbatches)
        many = isinstance(told, Iterable) and not isinstance(told, str)
        for word in _yielded(told, what) if many else [told]:
            if not isinstance(word, Word):
                raise ScheduleError(
                    f"{what} must {'yield' if many else 'return'} words, not {word!r:.60}",
                    hint="return a sum like 2 * F + 2 * B, or yield its parts one by one",
                )
            words.append(word.letters)
            count += max(len(word), 1)
            if count > most:
                raise ScheduleError(
                    f"{what} says more than {most} times F, B, I or W, where {enough} are enough",
                    hint="does its loop end?" if many else "",
                )
    except ProgramError as error:
        error.program = error.program or name
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and GeneratorExit, too: it has nothing to exit
        raise ScheduleError(
            f"{what} raised {in_words(error)}",
            program=name,
            hint=_ALGEBRA if isinstance(error, TypeError) and "'Word'" in str(error) else "",
        ) from error
    return Word(np.concatenate(words))


def _yielded(told: Any, what: str) -> Iterator[Word]:
    """What a schedule yields; what it returns besides is lost, and so refused."""
    if (returned := (yield from told)) is not None:
        raise ScheduleError(
            f"{what} yields words and also returns {returned!r:.60}, which is lost",
            hint="yield that too, and then return",
        )


def _spell(word: Word, rank: int, plan: Plan) -> Stream:
    """Letters to instructions: own stages become stages of the model, and microbatches numbers."""
    letters, own = word.letters, plan.stages_of[rank]
    op, local = letters >> OP & 0xFF, _own_stages(letters, rank, plan)
    w, i = _finished(op, local, rank)
    local[w] = local[i]
    said = letters & AUTO
    mb = np.where(said == AUTO, _numbers(op, local, rank, plan), said)
    free = said[w] == AUTO
    mb[w[free]] = mb[i[free]]
    return Stream(pack(op, np.array(own, np.int64)[local], mb) | letters & JOINED)


def _own_stages(letters: Words, rank: int, plan: Plan) -> Words:
    """The own stage of each letter; OLDEST for a bare W, where the rank has several stages.

    Raises ScheduleError for a stage that the rank does not have.
    """
    own, local = plan.stages_of[rank], letters >> STAGE & 0xFFFF
    if len(own) == 1:
        local[local == OLDEST] = 0
    foreign = np.flatnonzero((local >= len(own)) & (local != OLDEST))
    if len(foreign):
        k = int(foreign[0])
        text, number = ROWS[letters[k] >> OP & 0xFF].text, len(own)
        has = "1 stage" if number == 1 else f"{number} stages"
        raise ScheduleError(
            f"rank {rank} says {text}[{local[k]}] as its letter #{k}, but has {has}: "
            f"{text}[0] is stage {own[0]} of the model",
            hint="F[j] is the rank's own stage j, from 0; microbatches number themselves, or are "
            "said as F.at(mb)",
        )
    return local


def _finished(op: Words, local: Words, rank: int) -> tuple[Words, Words]:
    """Each W that finishes an I, and that I, as indices of letters.

    The k-th W of a stage finishes the stage's k-th I; the k-th bare W finishes the rank's k-th I.
    Raises ScheduleError for bare W beside others, and for more of them than there are I.
    """
    w, i = np.flatnonzero(op == Opcode.BackwardWeight), np.flatnonzero(op == Opcode.BackwardInput)
    bare = local[w] == OLDEST
    if bare.any():
        if not bare.all():
            raise ScheduleError(f"rank {rank} says both W and W[j]: say W[j] everywhere")
        if len(w) > len(i):
            raise ScheduleError(f"rank {rank} has {len(w)} W for {len(i)} I")
        return w, i[: len(w)]
    pairs = []
    for stage in np.unique(local[w]):
        ws, js = w[local[w] == stage], i[local[i] == stage]
        count = min(len(ws), len(js))
        pairs.append((ws[:count], js[:count]))
    none = np.empty(0, np.int64)
    return (
        np.concatenate([none, *(ws for ws, _ in pairs)]),
        np.concatenate([none, *(js for _, js in pairs)]),
    )


def _numbers(op: Words, local: Words, rank: int, plan: Plan) -> Words:
    """The microbatch of each letter by order: the k-th forward of a stage is of its k-th one, and
    so is the k-th backward, where a B and an I count alike."""
    whole_or_input = np.where(op == Opcode.BackwardInput, Opcode.Backward, op)
    # The second of two holders begins at the microbatches that go up.
    begin = np.where(plan.rank_of[list(plan.stages_of[rank])] == rank, 0, plan.down)
    return np.asarray(_count(whole_or_input << 16 | local) + begin[local])


def _count(key: Words) -> Words:
    """How many equal keys came before each one: [a a b a b] -> [0 1 0 2 1]."""
    order = np.argsort(key, kind="stable")
    ordered: NDArray[np.int64] = key[order]
    new = np.r_[True, ordered[1:] != ordered[:-1]][: len(key)]
    begin = np.maximum.accumulate(np.where(new, np.arange(len(key)), 0))
    out = np.empty(len(key), np.int64)
    out[order] = np.arange(len(key)) - begin
    return out
