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

from schedir.analysis.critical_path.longest_path import compute_earliest_times
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import ProgressModel
from schedir.errors import ShapeError, UsageError
from schedir.ir.cost.sizes import add_tolerance, parse_bytes
from schedir.ir.isa.instructions import COMPUTE_OPS
from schedir.ir.pipeline.field_schema import FieldType
from schedir.ir.program import ADDRESS_MASK, Program, Words
from schedir.passes.memory.offload_placement import (
    DISK_TRIP,
    HOST_TRIP,
    Counts,
    ForwardLifetimes,
    OffloadRoundTrip,
    SlotRange,
    Tier,
    compute_move_costs,
    compute_peak_memory,
    fill_move_costs,
    find_lifetimes,
    place_offloads,
    predict_span,
)
from schedir.passes.pass_types import ExpectedInstructions, Options, Pass, PresenceQuery
from schedir.passes.selection import (
    find_named_pairs,
    is_fit,
    is_keyword,
    make_selection_type,
    select_addresses,
    split_addresses,
)

Floats = NDArray[np.float64]
Positions = NDArray[np.intp]
MAX_LISTED: Final = 4  # of what is named for nothing
_TRIED_SHARES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)  # of what need not move, that is tried as well


class ImportedSelection(tuple[tuple[int, int], ...]):
    """Pairs that a program moves, named by nobody: of another one some may have no use."""

    __slots__ = ()


def insert_offloads(program: Program, options: Options) -> Program:
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
    if not program.has_backward:
        raise ShapeError(
            "the program has no backward: no forward saves what could be offloaded",
            program=program.name,
            hint="leave offload out",
            fields=["offload"],
        )
    if options.extra_options.get("offload") is None:
        raise UsageError(
            "offload_to_disk selects from the offloaded activations, and nothing is offloaded",
            hint='offload="all"',
            fields=["offload_to_disk", "offload"],
        )
    options = fill_move_costs(program, options)
    if not compute_earliest_times(
        Graph.from_program(program, options.progress_model), options.costs
    ).is_done.all():
        return program  # and `check` refuses it: moving hangs on times that there are not
    which, further = options.extra_options["offload"], options.extra_options.get("offload_to_disk")
    none = program.words[:0]

    def to_host(chosen: Words) -> Program:
        return place_offloads(program, chosen, none, options)

    chosen = _choose_addresses(program, which, "offload", _find_candidates(program), options)
    if is_fit(which):
        chosen = _choose_fewest_to_fit(program, chosen, to_host, "device", options)
    spilled = none
    if further is not None:

        def to_disk(spilled: Words) -> Program:
            return place_offloads(program, chosen, spilled, options)

        spilled = _choose_addresses(program, further, "offload_to_disk", chosen, options)
        if is_fit(further):
            spilled = _choose_fewest_to_fit(program, spilled, to_disk, "host", options)
    return _set_slots(place_offloads(program, chosen, spilled, options), options)


def _choose_addresses(
    program: Program, selection: Any, option: str, candidates: Words, options: Options
) -> Words:
    """The addresses that an option means, of those that can be meant; for "fit" all of these."""
    if is_keyword(selection) or callable(selection):
        trips = (HOST_TRIP,) if option == "offload" else (HOST_TRIP, DISK_TRIP)
        candidates = candidates[_has_time_to_move(program, candidates, trips, options)]
    else:
        for stage, *_ in find_named_pairs(selection, option, program.shape):
            if stage < program.frozen_stages:
                raise UsageError(
                    f"stage {stage} is frozen, and saves nothing to {option}",
                    hint=f"stages from {program.frozen_stages} on are trained",
                    fields=[option, "frozen_stages"],
                )
    if is_fit(selection):
        return candidates
    chosen = candidates[select_addresses(selection, option, candidates, program.shape)]
    if not (
        is_keyword(selection) or callable(selection) or isinstance(selection, ImportedSelection)
    ):
        _warn_of_no_effect(find_named_pairs(selection, option, program.shape), option, chosen)
    return chosen


def _warn_of_no_effect(named: set[tuple[int, ...]], option: str, chosen: Words) -> None:
    """Warn of stages and microbatches that are named, and of which nothing moves."""
    stage, mb = split_addresses(chosen)
    moved = {*zip(stage.tolist()), *zip(stage.tolist(), mb.tolist(), strict=True)}
    if left := sorted(named - moved):
        one = ", ".join(".".join(map(str, each)) for each in left[:MAX_LISTED])
        more = f" and {len(left) - MAX_LISTED} more" if len(left) > MAX_LISTED else ""
        why = (
            "nothing is computed between a forward there and its use"
            if option == "offload"
            else "it is not offloaded"
        )
        warnings.warn(f"{option} names {one}{more}, of which nothing moves: {why}", stacklevel=3)


def _find_candidates(program: Program) -> Words:
    """The addresses of what can be offloaded: something is computed before it is used."""
    own = find_lifetimes(program)
    work = np.cumsum(np.isin(program.op, COMPUTE_OPS) & ~program.joined)
    found: Words = own.address[work[own.first_user] - work[own.producer] > 1]
    return found


def _has_time_to_move(
    program: Program, addresses: Words, trips: tuple[OffloadRoundTrip, ...], options: Options
) -> NDArray[np.bool_]:
    """Whether each could go and come back before it is used, by the prediction of the program as it
    is."""
    own = find_lifetimes(program)
    takes = sum(
        compute_move_costs(program, op, own.address, options) for trip in trips for op in trip
    )
    worth = _compute_idle_times(program, own, options) >= takes * (1 - 1e-9)
    there: NDArray[np.bool_] = np.isin(addresses, own.address[worth])
    return there


def _compute_idle_times(program: Program, lifetimes: ForwardLifetimes, options: Options) -> Floats:
    """How long nobody uses each value, by the prediction of the program as it is."""
    reached = compute_earliest_times(
        Graph.from_program(program, options.progress_model), options.costs
    )
    return reached.start[lifetimes.first_user] - reached.end[lifetimes.producer]


def _set_slots(program: Program, options: Options) -> Program:
    """The program with slots of what is saved, where any of it is offloaded; and on the host, where
    any goes on from there, or there is a limit."""
    tiers: tuple[tuple[Tier, OffloadRoundTrip], ...] = (("device", HOST_TRIP), ("host", DISK_TRIP))
    for tier, ops in tiers:
        limit = _get_memory_limit(options, tier)
        if program.used_opcodes.isdisjoint(ops) and (
            limit is None or program.used_opcodes.isdisjoint(HOST_TRIP)
        ):
            continue
        room = SlotRange.from_program(program, tier)
        most = room.find_max_within_limit(program, options, limit)
        program = room.set_slots(program, room.find_sufficient_slots(program, options, most))
    return program


def _get_memory_limit(options: Options, tier: Tier) -> float | None:
    """The bytes that a rank may hold on a tier."""
    return (
        options.memory_limit if tier == "device" else options.extra_options.get("host_memory_limit")
    )


# ---------------------------------------------------------------- as few as fit


def _choose_fewest_to_fit(
    program: Program,
    candidates: Words,
    move: Callable[[Words], Program],
    tier: Tier,
    options: Options,
) -> Words:
    """Of the candidates those that `move` moves off a tier, so that no rank holds too much
    there."""
    name, option = (
        ("memory_limit", "offload")
        if tier == "device"
        else ("host_memory_limit", "offload_to_disk")
    )
    limit = _get_memory_limit(options, tier)
    if limit is None or options.sizes is None:
        raise UsageError(
            f'{option}="fit" moves what does not fit: it needs sizes and a {name}',
            hint=f"sizes=Sizes(activation=16e6, saved=1.2e9), {name}=40e9",
            fields=[option],
        )
    order = _order_candidates(program, candidates, options)
    ranks = range(program.shape.ranks)

    def some(number: Counts) -> Words:
        return np.concatenate([candidates[:0], *(order[r][: number[r]] for r in ranks)])

    def too_much(number: Counts) -> NDArray[np.bool_]:
        moved = move(some(number))
        room = SlotRange.from_program(moved, tier)
        moved = room.set_slots(moved, room.min_slots)
        return compute_peak_memory(moved, options, tier) > add_tolerance(limit)

    most = np.array([len(own) for own in order])
    most[~too_much(0 * most)] = 0
    low, high = 0 * most - 1, most
    while (high - low > 1).any():
        middle = np.where(high > 0, (low + high) // 2, 0)
        wrong = too_much(middle)
        low, high = np.where(wrong, middle, low), np.where(wrong, high, middle)
        low = np.where(high > 0, low, -1)
    best, least, plain = some(high), np.inf, predict_span(program, options)
    for share in _TRIED_SHARES if high.any() else ():
        tried = some(high + np.floor(share * (most - high)).astype(np.int64))
        moved = move(tried)
        room = SlotRange.from_program(moved, tier)
        span = predict_span(
            room.set_slots(moved, room.find_max_within_limit(moved, options, limit)), options
        )
        if span < least * (1 - 1e-9):
            best, least = tried, span
        if least <= plain * (1 + 1e-9):
            break
    return best


def _order_candidates(program: Program, candidates: Words, options: Options) -> list[Words]:
    """Of each rank the candidates, those first that nobody uses for longest, and of equals those
    evenly apart: any first ones of them are as far from each other as can be."""
    own = find_lifetimes(program)
    free = _compute_idle_times(program, own, options)
    rank = np.searchsorted(program.offsets, own.producer, side="right") - 1
    there = np.isin(own.address, candidates)
    found = []
    for one in range(program.shape.ranks):
        here = np.flatnonzero(there & (rank == one))
        grain = max(1e-9 * float(free[here].max(initial=0.0)), 1e-300)
        length = np.round(free[here] / grain)
        place = np.empty(len(here))
        for each in np.unique(length).tolist():
            equal = np.flatnonzero(length == each)
            place[equal] = _make_van_der_corput(len(equal))
        found.append(own.address[here[np.lexsort((place, -length))]])
    return found


def _make_van_der_corput(number: int) -> Floats:
    """The first so many of van der Corput's sequence: the bits of 0, 1, 2, ... turned round."""
    bits = np.arange(max(1, (number - 1).bit_length()))
    each = np.arange(number)[:, None] >> bits & 1
    return np.asarray((each / 2.0 ** (bits + 1)).sum(1))


# ---------------------------------------------------------------- what is expected


def _list_expected(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    """What goes comes back, and only what has gone; what goes on to the disk is on the host."""
    gone = "nothing was moved"
    yield ExpectedInstructions(
        HOST_TRIP.reload_op,
        present(HOST_TRIP.offload_op),
        f"{gone} to the host",
        counterpart=HOST_TRIP.offload_op,
    )
    yield ExpectedInstructions(
        HOST_TRIP.offload_op,
        present(HOST_TRIP.reload_op),
        "nothing comes back",
        counterpart=HOST_TRIP.reload_op,
    )
    yield ExpectedInstructions(
        DISK_TRIP.reload_op,
        present(DISK_TRIP.offload_op),
        f"{gone} to the disk",
        counterpart=DISK_TRIP.offload_op,
    )
    yield ExpectedInstructions(
        DISK_TRIP.offload_op,
        present(DISK_TRIP.reload_op),
        "nothing is fetched",
        counterpart=DISK_TRIP.reload_op,
    )


def _read_options(program: Program, progress_model: ProgressModel) -> dict[str, Any]:
    """What is moved, as pairs."""
    found = {}
    for option, trip in (("offload", HOST_TRIP), ("offload_to_disk", DISK_TRIP)):
        stage, mb = split_addresses((program.words & ADDRESS_MASK)[program.op == trip.offload_op])
        found[option] = ImportedSelection(zip(stage.tolist(), mb.tolist(), strict=True)) or None
    return found


def _parse_bytes(text: str) -> float:
    try:
        return parse_bytes(text)
    except ValueError:
        raise ValueError(f"must be bytes, like 40GB, not {text!r}") from None


PASSES: Final = (
    Pass(
        "offload",
        "memory",
        insert_offloads,
        should_run=lambda program, options: any(
            options.extra_options.get(name) is not None for name in ("offload", "offload_to_disk")
        ),
        list_expected=_list_expected,
        read_options=_read_options,
        applies_to=lambda program: program.has_backward,
        option_names=("offload", "offload_to_disk", "host_memory_limit"),
        section="memory",
        option_types={
            "offload": make_selection_type("selects the saved activations that are offloaded"),
            "offload_to_disk": make_selection_type(
                "selects the offloaded activations that move on to the disk"
            ),
            "host_memory_limit": FieldType(
                "must be bytes like 40GB", _parse_bytes, str, metavar="BYTES"
            ),
        },
        option_descriptions={
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
