"""Offload: what forwards saved is on the host, or its disk, until shortly before it is used.

PipeOffload (arXiv 2503.01328) as instructions: of two copies a microbatch, one each way, that run
beside what is computed, as long as moving takes no longer than computing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.graph import Graph
from schedir.analysis.longest_path import walk
from schedir.analysis.models import Model
from schedir.analysis.slots import KINDS, counts, minimum_slots
from schedir.errors import PlanError, UsageError
from schedir.ir.costs import FIELD, Costs
from schedir.ir.flow import Flow
from schedir.ir.ops import COMPUTE, FORWARD, ROWS, SLOTTED, TIERS, Opcode, Token, changes
from schedir.ir.program import ADDRESS, OP, Program, Slots, Words
from schedir.passes.insert import at_places
from schedir.passes.record import Expected, Options, Pass, Present
from schedir.passes.share_slots import MESSAGE
from schedir.passes.which import by_word, kind, meant, pairs, stages_of

Floats = NDArray[np.float64]
Positions = NDArray[np.intp]


_PARTS: Final = 16  # how finely ranks are divided to try fewer slots on each part


class Trip(NamedTuple):
    """There and back: the two instructions that move a value to another tier, and back."""

    there: Opcode
    back: Opcode


_MOVES: Final = {  # of what a forward saved, by from where to where
    (change.before, change.after): row.op
    for row in ROWS for change in row.changes
    if change.token is Token.SAVED and change.before in TIERS
}  # fmt: skip
HOST: Final = Trip(_MOVES["device", "host"], _MOVES["host", "device"])
DISK: Final = Trip(_MOVES["host", "disk"], _MOVES["disk", "host"])


def offload(program: Program, options: Options) -> Program:
    """Offload and Reload, and of some of these Spill and Fetch, for what the options say.

    Each Offload stands right behind its forward: the copy begins as soon as the lane is free.  Each
    Reload stands where it must be issued so that, by the prediction, it ends just before its value
    is used, in the order of these uses: as late as that costs nothing.  That no more comes back
    earlier is said by the slots of what is saved: a Reload, and a forward, wait for one.  There are
    the fewest with which the predicted time is as long as without any; where costs say that moving
    is free, at moves of half a forward.

    What nothing is computed between its forward and its use is not offloaded; nor is, by "all" and
    "half", what is used before it could have gone and come back.  "half" is every other microbatch
    of each stage: by 2503.01328 all moves are hidden while moving a microbatch's takes no longer
    than computing it (k <= 1), and those of half of them up to twice as long (k <= 2).

    Raises UsageError for what says nothing, and for stages that save nothing; PlanError for a
    program that does not train.

    >>> from schedir import Costs, Plan, Sizes, compile, schedules, simulate
    >>> costs, sizes = Costs(F=1, B=2, offload=1, reload=1), Sizes(saved=10)
    >>> runs = [
    ...     simulate(compile(schedules.gpipe, Plan(2, 8), costs=costs, **how), costs, sizes=sizes)
    ...     for how in ({}, {"offload": "all"})
    ... ]
    >>> [(run.span, run.peak_memory.max()) for run in runs]
    [(27.0, 80.0), (27.0, 30.0)]
    """
    if not program.trains:
        raise PlanError(
            "the program has no backward: no forward saves what could be offloaded",
            program=program.name,
            hint="leave offload out",
            fields=["offload"],
        )
    options = _priced(program, options)
    chosen = _chosen(program, options, "offload", _candidates(program, options))
    spilled = chosen[:0]
    if options.more.get("spill") is not None:
        spilled = _chosen(program, options, "spill", chosen)
    return _with_credits(placed(program, chosen, spilled, options), options)


def _chosen(program: Program, options: Options, option: str, candidates: Words) -> Words:
    """The addresses that an option means, of those that can be meant."""
    which = options.more[option]
    if not by_word(which) and not callable(which):
        _require_there(program, which, option)
    else:
        candidates = candidates[_is_worth_it(program, candidates, options)]
    return candidates[meant(which, option, candidates, program.plan)]


def _require_there(program: Program, which: Any, option: str) -> None:
    """Refuse to move what stages save that are frozen."""
    for stage, *_ in pairs(which, option, program.plan):
        if stage < program.frozen:
            raise UsageError(
                f"stage {stage} is frozen, and saves nothing to {option}",
                hint=f"stages from {program.frozen} on are trained",
                fields=[option, "frozen"],
            )


def _priced(program: Program, options: Options) -> Options:
    """The options with costs at which moving takes time: if they say none, half a forward."""
    costs = options.costs or Costs()
    usual = MESSAGE * float(costs.of(FORWARD, program.plan).mean())
    free = {FIELD[op]: usual for op in _MOVES.values() if not costs.of(op, program.plan).any()}
    return replace(options, costs=replace(costs, **free))


# ---------------------------------------------------------------- what can be offloaded


class Lives(NamedTuple):
    """Where forwards stand, and the first who uses what each saved, of each of some addresses."""

    address: Words
    made: Positions
    used: Positions


def lives(program: Program) -> Lives:
    """Of all that is saved and used again, where it is made and first used on the compute lane."""
    own = Flow.of(program).lives(Token.SAVED)
    address = program.words & ADDRESS
    made = own.fill.astype(np.intp)
    first = {
        int(address[at]): at
        for op in reversed((*changes(Token.SAVED),))
        if op in COMPUTE
        for at in np.flatnonzero(program.op == op).tolist()
    }
    used = [first.get(int(address[m]), f) for m, f in zip(made, own.freed.tolist(), strict=True)]
    return Lives(address[made], made, np.array(used, np.intp))


def _candidates(program: Program, options: Options) -> Words:
    """The addresses of what can be offloaded: something is computed before it is used."""
    own = lives(program)
    work = np.cumsum(np.isin(program.op, COMPUTE) & ~program.joined)
    found: Words = own.address[work[own.used] - work[own.made] > 1]
    return found


def _is_worth_it(program: Program, addresses: Words, options: Options) -> NDArray[np.bool_]:
    """Whether each could go and come back before it is used, by the prediction of the program as it
    is."""
    own = lives(program)
    reached = walk(Graph.of(program, options.model), options.costs)
    free = reached.start[own.used] - reached.end[own.made]
    takes = sum(_cost(program, op, own.address, options) for op in HOST)
    there: NDArray[np.bool_] = np.isin(addresses, own.address[free >= takes * (1 - 1e-9)])
    return there


def _cost(program: Program, op: Opcode, addresses: Words, options: Options) -> Floats:
    assert options.costs is not None
    table = options.costs.of(op, program.plan)
    stage, mb = stages_of(addresses)
    return np.asarray(table[stage, mb if table.shape[1] > 1 else 0])


# ---------------------------------------------------------------- where they stand


def placed(program: Program, chosen: Words, spilled: Words, options: Options) -> Program:
    """The program with what moves some addresses to the host, and some of these to the disk."""
    if not len(chosen):
        return program
    own = lives(program)
    there = np.isin(own.address, chosen)
    program = _moved(program, HOST, own.made[there], own.used[there], options)
    if len(spilled):
        address = program.words & ADDRESS
        spills = np.isin(address, spilled)
        gone, used = (np.flatnonzero((program.op == op) & spills) for op in HOST)
        gone, used = (at[np.argsort(address[at], kind="stable")] for at in (gone, used))
        program = _moved(program, DISK, gone, used, options)
    return program


def _moved(
    program: Program, trip: Trip, made: Positions, used: Positions, options: Options
) -> Program:
    """The program with what moves values away behind some positions, and back before others."""
    order = np.argsort(used, kind="stable")
    made, used = made[order], used[order]
    address = (program.words & ADDRESS)[made]
    groups = np.append(np.flatnonzero(~program.joined), len(program))
    leaves = groups[np.searchsorted(groups, made, side="right")]
    needed = groups[np.searchsorted(groups, used, side="right") - 1]
    rank = np.searchsorted(program.offsets, made, side="right") - 1
    words = [address | int(op) << OP for op in trip]

    def back_at(place: Positions) -> Program:
        at, ranks = np.concatenate([leaves, place]), np.concatenate([rank, rank])
        return at_places(program, at, ranks, np.concatenate(words))

    def times(found: Program) -> tuple[Floats, Floats, Program]:
        """When what was there before starts and ends."""
        reached = walk(Graph.of(found, options.model), options.costs)
        old = ~np.isin(found.op, trip) | ~np.isin(found.words & ADDRESS, address)
        return reached.start[old], reached.end[old], found

    def as_late_as(start: Floats, end: Floats) -> Program:
        """In front of what is computed when it must begin, to end at these times."""
        late = _latest(start[used], _cost(program, trip.back, address, options), rank)
        place, compute = needed.copy(), np.isin(program.op, COMPUTE)
        for one in np.unique(rank).tolist():
            mine = np.arange(*program.offsets[one : one + 2])
            mine, here = mine[compute[mine]], rank == one
            place[here] = mine[np.searchsorted(end[mine], late[here], side="right")]
        place = groups[np.searchsorted(groups, place, side="right") - 1]
        return back_at(np.maximum.accumulate(np.clip(place, leaves, needed)))

    # The times of uses are those where moving takes its time; or, where moves wait for each other,
    # those without it.
    last, ideal = times(back_at(needed)), times(program)
    tried = [times(as_late_as(*each[:2])) for each in (last, ideal)]
    return min(tried, key=lambda each: float(each[1].max()) * (1 - 1e-9 * (each is tried[0])))[2]


def _latest(start: Floats, takes: Floats, rank: Positions) -> Floats:
    """When each of some moves, in order on the lane of their rank, may start at the latest to end
    by the start of what they are for."""
    found = np.empty(len(start))
    for one in np.unique(rank).tolist():
        here = rank == one
        before = np.cumsum(takes[here])
        latest = start[here] - before
        found[here] = np.minimum.accumulate(latest[::-1])[::-1] + before - takes[here]
    return found


# ---------------------------------------------------------------- how much of it is there at once


def _with_credits(program: Program, options: Options) -> Program:
    """The program with slots of what is saved, where any of it is offloaded: as few as keep the
    predicted time."""
    if program.ops.isdisjoint(HOST):
        return program
    least = minimum_slots(program)[:, SLOTTED.index(Token.SAVED)]
    most = counts(program)[:, KINDS.index(Token.SAVED)]
    span = _span(program, options) * (1 + 1e-9)

    def keeps(number: NDArray[np.int64]) -> bool:
        return _span(_with_slots(program, number), options) <= span

    low, high = -1, int((most - least).max(initial=0))
    while high - low > 1:  # as many more than the least on all ranks
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(np.minimum(least + middle, most)) else (middle, high)
    best = np.minimum(least + high, most)
    parts = [np.flatnonzero(best > least)]
    while parts:  # and fewer on some
        part = parts.pop()
        fewer = best.copy()
        fewer[part] = least[part]
        if not len(part) or keeps(fewer):
            best = fewer
        elif len(part) > max(1, len(least) // _PARTS):
            parts += np.array_split(part, 2)
    return _with_slots(program, best)


def _span(program: Program, options: Options) -> float:
    """The predicted time."""
    end = walk(Graph(program, options.model), options.costs).end
    return float(end.max(initial=0.0))


def _with_slots(program: Program, number: NDArray[np.int64]) -> Program:
    told = program.slots or [Slots.unsaid()] * program.plan.ranks
    return program.with_slots(
        [own._replace(saved=n) for own, n in zip(told, number.tolist(), strict=True)]
    )


# ---------------------------------------------------------------- what is expected


def _both(program: Program, present: Present) -> Iterator[Expected]:
    """What goes comes back, and only what has gone; what goes on to the disk is on the host."""
    gone = "nothing was moved"
    yield Expected(HOST.back, present(HOST.there), f"{gone} to the host", beside=HOST.there)
    yield Expected(HOST.there, present(HOST.back), "nothing comes back", beside=HOST.back)
    yield Expected(DISK.back, present(DISK.there), f"{gone} to the disk", beside=DISK.there)
    yield Expected(DISK.there, present(DISK.back), "nothing is fetched", beside=DISK.back)


def _read(program: Program, model: Model) -> dict[str, Any]:
    """What is moved, as pairs."""
    found = {}
    for option, trip in (("offload", HOST), ("spill", DISK)):
        stage, mb = stages_of((program.words & ADDRESS)[program.op == trip.there])
        found[option] = tuple(zip(stage.tolist(), mb.tolist(), strict=True)) or None
    return found


PASSES: Final = (
    Pass(
        "offload",
        "memory",
        offload,
        wanted=lambda program, options: options.more.get("offload") is not None,
        expected=_both,
        read=_read,
        applies=lambda program: program.trains,
        options=("offload", "spill"),
        section="memory",
        kinds={"offload": kind("says what is offloaded"), "spill": kind("says what is spilled")},
        abouts={
            "offload": "move what forwards saved to the host until it is used: all, half (every "
            "other microbatch), stages 0,1 or microbatches of stages 0.3,0.4",
            "spill": "of what is offloaded, move it on to the disk: as --offload says it",
        },
    ),
)
