"""Offload saved activations to the host or its disk, and reload them before their use.

PipeOffload (arXiv 2503.01328) as instructions: of two copies a microbatch, one each way, that run
beside what is computed, as long as moving takes no longer than computing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.critical_path.longest_path import walk
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import ProgressModel
from schedir.errors import ShapeError, UsageError
from schedir.ir.cost.sizes import ample, bytes_of
from schedir.ir.isa.instructions import COMPUTE
from schedir.ir.pipeline.field_schema import FieldType
from schedir.ir.program import ADDRESS, Program, Words
from schedir.passes.memory.offload_placement import (
    DISK,
    HOST,
    Counts,
    ForwardLifetimes,
    OffloadRoundTrip,
    SlotRange,
    Tier,
    cost_of,
    held_most,
    lives,
    placed,
    priced,
    span_of,
)
from schedir.passes.pass_types import ExpectedInstructions, Options, Pass, Present
from schedir.passes.selection import by_word, fits, kind, meant, pairs, stages_of

Floats = NDArray[np.float64]
Positions = NDArray[np.intp]
SAID: Final = 4  # of what is named for nothing
_SHARES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)  # of what need not move, that is tried as well


class ImportedSelection(tuple[tuple[int, int], ...]):
    """Pairs that a program moves, named by nobody: of another one some may have no use."""

    __slots__ = ()


def offload(program: Program, options: Options) -> Program:
    """Offload and Reload, and of some of these OffloadToDisk and ReloadFromDisk, for what the
    options say.

    Each Offload stands right behind its forward: the copy begins as soon as the lane is free.  Each
    Reload stands where it must be issued so that, by the prediction, it ends just before its value
    is used, in the order of these uses: as late as that costs nothing.  That no more comes back
    earlier is said by the slots of what is saved: a Reload, and a forward, wait for one.  There are
    the fewest with which the predicted time is as long as without any; where costs say that moving
    is free, at moves of half a forward.  With a limit there are no more than it has room for,
    whatever takes how long.  Of the host's slots the same holds, for its limit,
    and with OffloadToDisk and
    ReloadFromDisk, which go on to the disk from there and come back.

    What nothing is computed between its forward and its use is not offloaded; nor is, but where it
    is named, what is used before it could have gone and come back.  "half" is every other
    microbatch of each stage: by 2503.01328 all moves are hidden while moving a microbatch's takes
    no longer than computing it (k <= 1), and those of half of them up to twice as long (k <= 2).

    "fit" takes of each rank that holds too much what lives longest first, as 2503.01328 does, and
    of what lives equally long what lies evenly apart: the fewest with which it holds no more than
    the limit, or, of some larger shares of the rest, the one with which the step is shortest.  Of
    what is spilled that is on the host longest.

    Raises UsageError for what says nothing, for stages that save nothing, and for "fit" without a
    limit; ShapeError for a program that does not train.

    >>> from schedir import Costs, PipelineShape, Sizes, compile, schedules, simulate
    >>> costs, sizes = Costs(F=1, B=2, offload=1, reload=1), Sizes(saved=10)
    >>> runs = [
    ...     simulate(compile(schedules.gpipe, PipelineShape(2, 8), costs=costs, **how), costs,
    ...     sizes=sizes)
    ...     for how in ({}, {"offload": "all"}, {"offload": "fit", "memory_limit": 60,
    ...         "sizes": sizes})
    ... ]
    >>> [(run.span, float(run.peak_memory.max())) for run in runs]
    [(27.0, 80.0), (27.0, 30.0), (27.0, 60.0)]
    """
    if not program.trains:
        raise ShapeError(
            "the program has no backward: no forward saves what could be offloaded",
            program=program.name,
            hint="leave offload out",
            fields=["offload"],
        )
    if options.more.get("offload") is None:
        raise UsageError(
            "offload_to_disk selects from the offloaded activations, and nothing is offloaded",
            hint='offload="all"',
            fields=["offload_to_disk", "offload"],
        )
    options = priced(program, options)
    if not walk(Graph.of(program, options.progress_model), options.costs).done.all():
        return program  # and `check` refuses it: moving hangs on times that there are not
    which, further = options.more["offload"], options.more.get("offload_to_disk")
    none = program.words[:0]

    def to_host(chosen: Words) -> Program:
        return placed(program, chosen, none, options)

    chosen = _chosen(program, which, "offload", _candidates(program), options)
    if fits(which):
        chosen = _as_few_as_fit(program, chosen, to_host, "device", options)
    spilled = none
    if further is not None:

        def to_disk(spilled: Words) -> Program:
            return placed(program, chosen, spilled, options)

        spilled = _chosen(program, further, "offload_to_disk", chosen, options)
        if fits(further):
            spilled = _as_few_as_fit(program, spilled, to_disk, "host", options)
    return _with_slots(placed(program, chosen, spilled, options), options)


def _chosen(
    program: Program, which: Any, option: str, candidates: Words, options: Options
) -> Words:
    """The addresses that an option means, of those that can be meant; for "fit" all of these."""
    if by_word(which) or callable(which):
        trips = (HOST,) if option == "offload" else (HOST, DISK)
        candidates = candidates[_is_worth_it(program, candidates, trips, options)]
    else:
        for stage, *_ in pairs(which, option, program.shape):
            if stage < program.frozen_stages:
                raise UsageError(
                    f"stage {stage} is frozen, and saves nothing to {option}",
                    hint=f"stages from {program.frozen_stages} on are trained",
                    fields=[option, "frozen_stages"],
                )
    if fits(which):
        return candidates
    chosen = candidates[meant(which, option, candidates, program.shape)]
    if not (by_word(which) or callable(which) or isinstance(which, ImportedSelection)):
        _tell_of_nothing(pairs(which, option, program.shape), option, chosen)
    return chosen


def _tell_of_nothing(named: set[tuple[int, ...]], option: str, chosen: Words) -> None:
    """Warn of stages and microbatches that are named, and of which nothing moves."""
    stage, mb = stages_of(chosen)
    moved = {*zip(stage.tolist()), *zip(stage.tolist(), mb.tolist(), strict=True)}
    if left := sorted(named - moved):
        one = ", ".join(".".join(map(str, each)) for each in left[:SAID])
        more = f" and {len(left) - SAID} more" if len(left) > SAID else ""
        why = (
            "nothing is computed between a forward there and its use"
            if option == "offload"
            else "it is not offloaded"
        )
        warnings.warn(f"{option} names {one}{more}, of which nothing moves: {why}", stacklevel=3)


def _candidates(program: Program) -> Words:
    """The addresses of what can be offloaded: something is computed before it is used."""
    own = lives(program)
    work = np.cumsum(np.isin(program.op, COMPUTE) & ~program.joined)
    found: Words = own.address[work[own.used] - work[own.made] > 1]
    return found


def _is_worth_it(
    program: Program, addresses: Words, trips: tuple[OffloadRoundTrip, ...], options: Options
) -> NDArray[np.bool_]:
    """Whether each could go and come back before it is used, by the prediction of the program as it
    is."""
    own = lives(program)
    takes = sum(cost_of(program, op, own.address, options) for trip in trips for op in trip)
    worth = _free(program, own, options) >= takes * (1 - 1e-9)
    there: NDArray[np.bool_] = np.isin(addresses, own.address[worth])
    return there


def _free(program: Program, own: ForwardLifetimes, options: Options) -> Floats:
    """How long nobody uses each value, by the prediction of the program as it is."""
    reached = walk(Graph.of(program, options.progress_model), options.costs)
    return reached.start[own.used] - reached.end[own.made]


def _with_slots(program: Program, options: Options) -> Program:
    """The program with slots of what is saved, where any of it is offloaded; and on the host, where
    any goes on from there, or there is a limit."""
    tiers: tuple[tuple[Tier, OffloadRoundTrip], ...] = (("device", HOST), ("host", DISK))
    for tier, ops in tiers:
        limit = _limit(options, tier)
        if program.ops.isdisjoint(ops) and (limit is None or program.ops.isdisjoint(HOST)):
            continue
        room = SlotRange.of(program, tier)
        most = room.within(program, options, limit)
        program = room.said(program, room.enough(program, options, most))
    return program


def _limit(options: Options, tier: Tier) -> float | None:
    """The bytes that a rank may hold on a tier."""
    return options.memory_limit if tier == "device" else options.more.get("host_memory_limit")


# ---------------------------------------------------------------- as few as fit


def _as_few_as_fit(
    program: Program,
    candidates: Words,
    to: Callable[[Words], Program],
    tier: Tier,
    options: Options,
) -> Words:
    """Of the candidates those that `to` moves off a tier, so that no rank holds too much there."""
    name, option = (
        ("memory_limit", "offload")
        if tier == "device"
        else ("host_memory_limit", "offload_to_disk")
    )
    limit = _limit(options, tier)
    if limit is None or options.sizes is None:
        raise UsageError(
            f'{option}="fit" moves what does not fit: it needs sizes and a {name}',
            hint=f"sizes=Sizes(activation=16e6, saved=1.2e9), {name}=40e9",
            fields=[option],
        )
    order = _in_order(program, candidates, options)
    ranks = range(program.shape.ranks)

    def some(number: Counts) -> Words:
        return np.concatenate([candidates[:0], *(order[r][: number[r]] for r in ranks)])

    def too_much(number: Counts) -> NDArray[np.bool_]:
        moved = to(some(number))
        room = SlotRange.of(moved, tier)
        moved = room.said(moved, room.least)
        return held_most(moved, options, tier) > ample(limit)

    most = np.array([len(own) for own in order])
    most[~too_much(0 * most)] = 0
    low, high = 0 * most - 1, most
    while (high - low > 1).any():
        middle = np.where(high > 0, (low + high) // 2, 0)
        wrong = too_much(middle)
        low, high = np.where(wrong, middle, low), np.where(wrong, high, middle)
        low = np.where(high > 0, low, -1)
    best, least, plain = some(high), np.inf, span_of(program, options)
    for share in _SHARES if high.any() else ():
        tried = some(high + np.floor(share * (most - high)).astype(np.int64))
        moved = to(tried)
        room = SlotRange.of(moved, tier)
        span = span_of(room.said(moved, room.within(moved, options, limit)), options)
        if span < least * (1 - 1e-9):
            best, least = tried, span
        if least <= plain * (1 + 1e-9):
            break
    return best


def _in_order(program: Program, candidates: Words, options: Options) -> list[Words]:
    """Of each rank the candidates, those first that nobody uses for longest, and of equals those
    evenly apart: any first ones of them are as far from each other as can be."""
    own = lives(program)
    free = _free(program, own, options)
    rank = np.searchsorted(program.offsets, own.made, side="right") - 1
    there = np.isin(own.address, candidates)
    found = []
    for one in range(program.shape.ranks):
        here = np.flatnonzero(there & (rank == one))
        grain = max(1e-9 * float(free[here].max(initial=0.0)), 1e-300)
        length = np.round(free[here] / grain)
        place = np.empty(len(here))
        for each in np.unique(length).tolist():
            equal = np.flatnonzero(length == each)
            place[equal] = _turned(len(equal))
        found.append(own.address[here[np.lexsort((place, -length))]])
    return found


def _turned(number: int) -> Floats:
    """The first so many of van der Corput's sequence: the bits of 0, 1, 2, ... turned round."""
    bits = np.arange(max(1, (number - 1).bit_length()))
    each = np.arange(number)[:, None] >> bits & 1
    return np.asarray((each / 2.0 ** (bits + 1)).sum(1))


# ---------------------------------------------------------------- what is expected


def _both(program: Program, present: Present) -> Iterator[ExpectedInstructions]:
    """What goes comes back, and only what has gone; what goes on to the disk is on the host."""
    gone = "nothing was moved"
    yield ExpectedInstructions(
        HOST.back, present(HOST.there), f"{gone} to the host", beside=HOST.there
    )
    yield ExpectedInstructions(
        HOST.there, present(HOST.back), "nothing comes back", beside=HOST.back
    )
    yield ExpectedInstructions(
        DISK.back, present(DISK.there), f"{gone} to the disk", beside=DISK.there
    )
    yield ExpectedInstructions(
        DISK.there, present(DISK.back), "nothing is fetched", beside=DISK.back
    )


def _read(program: Program, progress_model: ProgressModel) -> dict[str, Any]:
    """What is moved, as pairs."""
    found = {}
    for option, trip in (("offload", HOST), ("offload_to_disk", DISK)):
        stage, mb = stages_of((program.words & ADDRESS)[program.op == trip.there])
        found[option] = ImportedSelection(zip(stage.tolist(), mb.tolist(), strict=True)) or None
    return found


def _read_bytes(text: str) -> float:
    try:
        return bytes_of(text)
    except ValueError:
        raise ValueError(f"must be bytes, like 40GB, not {text!r}") from None


PASSES: Final = (
    Pass(
        "offload",
        "memory",
        offload,
        wanted=lambda program, options: any(
            options.more.get(name) is not None for name in ("offload", "offload_to_disk")
        ),
        expected=_both,
        read=_read,
        applies=lambda program: program.trains,
        options=("offload", "offload_to_disk", "host_memory_limit"),
        section="memory",
        kinds={
            "offload": kind("selects the saved activations that are offloaded"),
            "offload_to_disk": kind("selects the offloaded activations that move on to the disk"),
            "host_memory_limit": FieldType(
                "must be bytes like 40GB", _read_bytes, str, metavar="BYTES"
            ),
        },
        abouts={
            "offload": "which saved activations move to the host until they are used: all, half "
            "(every other microbatch), fit (as few as --memory-limit requires), stages 0,1 or "
            "microbatches of stages 0.3,0.4",
            "offload_to_disk": "which offloaded activations move on to the disk: given like "
            "offload; "
            "fit is as few as host_memory_limit requires",
            "host_memory_limit": "bytes of offloaded values that a rank may have on the host",
        },
    ),
)
