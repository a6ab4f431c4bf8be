"""Words: how a schedule is written.

A word is what one rank does, as algebra: `3 * F + 5 * (F + B) + 3 * B`.  `+` is "then", `n *`
is "n times", `F[j]` is F on the rank's j-th own stage.  Microbatches number themselves in
order of occurrence, so a word stays as short as the idea; `F.at(mb)` says one when order does
not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import Any, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import NDArray

from schedir.errors import ProgramError, ScheduleError, expect, in_words, said
from schedir.ir.numerals import NO_NUMBERS
from schedir.ir.ops import ROWS, Opcode
from schedir.ir.plan import Plan
from schedir.ir.program import JOINED, OP, STAGE, Program, Stream, Words, pack

# In a letter, the microbatch that numbers itself, and the stage of a bare W.
_AUTO, _OLDEST = 0xFFFFFFFF, 0xFFFF
_MOST = 2**28  # letters of a rank, more than any plan has room for


@dataclass(frozen=True, eq=False)
class Word:
    """What one rank does: letters in order, each an op, a stage of its own and a microbatch."""

    letters: Words
    __array_ufunc__ = None  # numpy's numbers leave n * F to us

    def __add__(self, other: Word | int) -> Word:
        if isinstance(other, Word):
            return Word(np.concatenate([self.letters, other.letters]))
        return self if type(other) is int and other == 0 else NotImplemented  # the empty sum()

    __radd__ = __add__  # so that sum() needs no start

    def __mul__(self, times: SupportsIndex | np.bool_) -> Word:
        # (rank == 0) * F: once, or not at all.
        count = int(times) if isinstance(times, bool | np.bool_) else _whole("n * F", times)
        if count < 0:
            raise ValueError(f"n * F takes n from 0 on, not {count}: max(n, 0) is never less")
        if count * max(len(self), 1) > _MOST:
            raise ValueError(
                f"n * {self!r} is longer than the {_MOST} instructions that a rank may have"
            )
        return Word(np.tile(self.letters, count))

    __rmul__ = __mul__

    def __getitem__(self, local: SupportsIndex) -> Word:
        """The same on the rank's own stage number `local`, counted from 0."""
        local = _whole("F[own stage]", local)
        if not 0 <= local < _OLDEST:
            raise IndexError(f"a rank's own stages count from 0, not {local}")
        return Word(self.letters & ~(0xFFFF << STAGE) | local << STAGE)

    def at(self, mb: SupportsIndex) -> Word:
        """The same on microbatch `mb`."""
        mb = _whole("F.at(microbatch)", mb)
        if not 0 <= mb < _AUTO:
            raise IndexError(f"microbatches count from 0, not {mb}")
        return Word(self.letters & ~_AUTO | mb)

    __iter__ = None  # a word is one thing: without this, __getitem__ would make it endless

    def __len__(self) -> int:
        return len(self.letters)

    def __repr__(self) -> str:
        names = [ROWS[w >> OP & 0xFF].text for w in self.letters[:20].tolist()]
        return f"<Word {' '.join(names)}{' ...' if len(self) > 20 else ''}>"


def _whole(what: str, value: SupportsIndex) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)
    except TypeError:
        hint = ": divide by //" if isinstance(value, float) else ""
        raise TypeError(f"{what} takes a whole number, not {value!r:.60}{hint}") from None


F = Word(pack(Opcode.Forward, 0, _AUTO))
B = Word(pack(Opcode.Backward, 0, _AUTO))
I = Word(pack(Opcode.BackwardInput, 0, _AUTO))
W = Word(pack(Opcode.BackwardWeight, _OLDEST, _AUTO))  # bare: the oldest I not yet finished
EMPTY = Word(np.empty(0, np.int64))


def join(words: Iterable[Word]) -> Word:
    """One after the other.  `sum` says the same, and copies all that came before each time."""
    return Word(np.concatenate([EMPTY.letters, *(_letters("join", word) for word in words)]))


def _letters(what: str, word: object) -> Words:
    if not isinstance(word, Word):
        raise TypeError(f"{what} takes words, as 3 * F and F + B, not {said(word)}")
    return word.letters


def weave(forwards: Word, backwards: Word, lead: int, weights: Word = EMPTY, late: int = 0) -> Word:
    """`lead` forwards, then forward and backward by turns, then the backwards that remain.

    With split backwards each turn ends with one of `weights`, from the turn after `late` on;
    those that remain come last.  Raises TypeError for what is no word, or no whole number.
    """
    words = [_letters("weave", word) for word in (forwards, backwards, weights)]
    lead, late = _whole("the lead of weave", lead), _whole("the late of weave", late)
    starts = [-max(lead, 0), 0, max(late, 0)]
    turn = np.concatenate([np.arange(len(w)) + s for w, s in zip(words, starts, strict=True)])
    return Word(np.concatenate(words)[np.argsort(turn, kind="stable")])


def overlap(first: Word, second: Word) -> Word:
    """The letters of both in pairs, each pair run together as one: DualPipe's cell."""
    one, other = _letters("overlap", first), _letters("overlap", second)
    if len(one) != len(other):
        raise ValueError(f"overlap pairs letters: {len(one)} do not go with {len(other)}")
    return Word(np.stack([one, other | JOINED], 1).reshape(-1))


_ALGEBRA = "words are F + B, n * F, F[own stage] and F.at(microbatch)"

Schedule = Callable[..., Word | Iterable[Word]]
_S = TypeVar("_S", bound=Schedule)


def placed(placement: str | tuple[int, ...], v: int | None = None) -> Callable[[_S], _S]:
    """Mark a schedule as one for this placement, and for `v` stages per rank where that is fixed.

    A schedule sees numbers only, and so cannot tell: `draft` reads the mark, as `schedule.placed`,
    and refuses plans whose stages lie elsewhere.  Raises TypeError for what is no placement.
    """
    if not isinstance(placement, str | tuple):
        raise TypeError(f"@placed takes a placement, as in @placed('loop'), not {placement!r:.60}")

    def mark(schedule: _S) -> _S:
        vars(schedule)["placed"] = (placement, v)
        return schedule

    return mark


def delayed(delay: int | Iterable[int]) -> Callable[[_S], _S]:
    """Mark a schedule as one whose updates take this delay, where a plan has several.

    A number, or one per stage, as in `Plan`.  As with `placed`: `draft` reads it, as
    `schedule.delay`, and refuses other plans.  Raises TypeError for anything else.
    """
    if isinstance(delay, NO_NUMBERS):
        raise TypeError(f"@delayed takes a whole number or one per stage, not {delay!r:.60}")
    if isinstance(delay, Iterable):
        delay = tuple(_whole("@delayed", each) for each in delay)
    else:
        delay = _whole("@delayed", delay)

    def mark(schedule: _S) -> _S:
        vars(schedule)["delay"] = delay
        return schedule

    return mark


def _function(schedule: Schedule) -> Schedule:
    while isinstance(schedule, partial):
        schedule = schedule.func
    return schedule


def name_of(schedule: Schedule) -> str:
    """The name a schedule goes by."""
    schedule = _function(schedule)
    return str(getattr(schedule, "__name__", type(schedule).__name__))


def draft(schedule: Schedule, plan: Plan) -> Program:
    """Spell a schedule out: F, B, I and W of every rank, no communication yet.

    `schedule` is called with (rank, ranks, microbatches), and with `v`, the number of the rank's
    own stages, if it has a parameter of that name.  It returns a Word or yields Words.

    Raises ScheduleError if it does not, raises, names a stage that the rank does not own, or is
    for another placement.
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


def takes_v(schedule: Schedule) -> bool:
    """Whether a schedule is to be told `v`: has a parameter of that name, which is not bound."""
    bound = schedule.keywords if isinstance(schedule, partial) else {}
    try:
        return "v" in inspect.signature(schedule).parameters and "v" not in bound
    except (TypeError, ValueError):  # no function: `draft` says so
        return False


def stages_per_rank_for(schedule: Schedule) -> int:
    """How many stages per rank a schedule has unless told.

    Those that it is marked for; else the `v` that is bound, or the default of its parameter `v`; 2
    where that has none, for such a schedule is for several; and 1 where there is no `v`.
    """
    if fixed := placed_for(schedule)[1]:
        return fixed
    try:
        v = inspect.signature(schedule).parameters.get("v")
    except (TypeError, ValueError):  # no function: `draft` says so
        return 1
    if v is None:
        return 1
    return 2 if v.default is inspect.Parameter.empty else int(v.default)


def placed_for(schedule: Schedule) -> tuple[str | tuple[int, ...] | None, int | None]:
    """The placement and the stages per rank that a schedule is marked for; None where it is not."""
    mark: tuple[str | tuple[int, ...] | None, int | None] = getattr(
        _function(schedule), "placed", (None, None)
    )
    return mark


def delay_for(schedule: Schedule) -> int | tuple[int, ...] | None:
    """The delay of updates that a schedule is marked for; None where it is not."""
    mark: int | tuple[int, ...] | None = getattr(_function(schedule), "delay", None)
    return mark


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
    """Letters to instructions: own stages to stages of the model, and microbatches by count."""
    letters, own = word.letters, plan.stages_of[rank]
    op, local, mb = letters >> OP & 0xFF, letters >> STAGE & 0xFFFF, letters & _AUTO
    oldest = local == _OLDEST
    if len(own) == 1:
        local = np.where(oldest, 0, local)
        oldest = np.zeros_like(oldest)
    foreign = np.flatnonzero((local >= len(own)) & ~oldest)
    if len(foreign):
        k = int(foreign[0])
        text, number = ROWS[op[k]].text, len(own)
        has = "1 stage" if number == 1 else f"{number} stages"
        raise ScheduleError(
            f"rank {rank} says {text}[{local[k]}] as its letter #{k}, but has {has}: "
            f"{text}[0] is stage {own[0]} of the model",
            hint="F[j] is the rank's own stage j, from 0; microbatches number themselves, or are "
            "said as F.at(mb)",
        )
    backward = np.where(op == Opcode.BackwardInput, Opcode.Backward, op)  # B and I count as one
    auto = _count(backward << 16 | local)
    w, i = np.flatnonzero(op == Opcode.BackwardWeight), np.flatnonzero(op == Opcode.BackwardInput)
    if oldest.any():
        if not oldest[w].all():
            raise ScheduleError(f"rank {rank} says both W and W[j]: say W[j] everywhere")
        if len(w) > len(i):
            raise ScheduleError(f"rank {rank} has {len(w)} W for {len(i)} I")
        local = local.copy()
        local[w] = local[i[: len(w)]]
    # Of two holders the second has the microbatches that go up.
    begin = np.where(plan.rank_of[list(own)] == rank, 0, plan.down)
    mb = np.where(mb == _AUTO, auto + begin[np.where(oldest, 0, local)], mb)
    # The k-th W of a stage, or of the rank where W is bare, finishes its k-th I.
    for stage in [slice(None)] if oldest.any() else range(len(own)):
        ws = w if isinstance(stage, slice) else w[local[w] == stage]
        js = i if isinstance(stage, slice) else i[local[i] == stage]
        n = min(len(ws), len(js))
        free = (letters[ws[:n]] & _AUTO) == _AUTO
        mb[ws[:n][free]] = mb[js[:n][free]]
    stages = np.array(own, np.int64)[local]
    return Stream(pack(op, stages, mb) | letters & JOINED)


def _count(key: Words) -> Words:
    """How many equal keys came before each one: [a a b a b] -> [0 1 0 2 1]."""
    order = np.argsort(key, kind="stable")
    ordered: NDArray[np.int64] = key[order]
    new = np.r_[True, ordered[1:] != ordered[:-1]][: len(key)]
    begin = np.maximum.accumulate(np.where(new, np.arange(len(key)), 0))
    out = np.empty(len(key), np.int64)
    out[order] = np.arange(len(key)) - begin
    return out
