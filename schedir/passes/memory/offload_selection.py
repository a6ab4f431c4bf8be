"""Offload saved activations to the host or its disk, and reload them before their use.

The activations of a microbatch are copied to the other tier and back. The copies run during compute
if a copy takes no longer than the compute. An address is a (stage, microbatch) pair, as a packed
word.

References:
    PipeOffload, arXiv 2503.01328.
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
from schedir.passes.insertion import find_ranks
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
    missing_limit_error,
    select_addresses,
    split_addresses,
)

Floats = NDArray[np.float64]
Positions = NDArray[np.intp]
MAX_LISTED: Final = 4  # number of selected addresses without effect that a warning lists
# Some values need not move to keep the limit. "fit" also tries to move these shares of them.
_TRIED_SHARES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)


class ImportedSelection(tuple[tuple[int, int], ...]):
    """The pairs of (stage, microbatch) whose activations an existing program moves.

    If such pairs have no effect in another program, there is no warning, because the user did not
    list them.
    """

    __slots__ = ()


def insert_offloads(program: Program, options: Options) -> Program:
    """Insert offloads and reloads of the selected saved activations, to the host and the disk.

    An Offload comes right after its forward, so the copy starts as soon as its lane is free. A
    Reload comes as late as possible: it is predicted to end just before its value is used. Reloads
    are in the order of these uses. A Reload and a forward wait for a slot of saved activations, so
    the number of slots limits how early a Reload can start. The pass searches for the smallest
    number of slots that does not increase the predicted time. If the cost of a move is 0, the pass
    assumes half a forward instead. With a memory limit, the pass chooses only as many slots as fit
    into the limit, whatever the durations of the instructions are. With OffloadToDisk and
    ReloadFromDisk, or a limit on the host, it chooses the slots of the host in the same way.

    A value is not offloaded if no compute runs between its forward and its use. A selection by a
    keyword or a function also skips a value if both moves together take longer than the time until
    its use. "half" is every other microbatch of each stage. Let k be the time of a copy divided by
    the time of a forward and a backward. Each direction has its own lane, so all copies can overlap
    with compute if k <= 1, and those of "half" if k <= 2.

    "fit" applies to the ranks that exceed the limit. As in the paper, it selects the values with
    the longest time until their use. If several values have the same time, it selects some of them
    at even distances, such as every second one. "fit" selects the smallest number of values that
    keeps the limit. It selects more values if the step is then shorter. For the disk, "fit" selects
    the values that are on the host for the longest time.

    Args:
        program: A program with messages.
        options: The options. `extra_options` has the selections `offload` and `offload_to_disk`,
            and `host_memory_limit` in bytes.

    Raises:
        UsageError: A selection is not valid or lists a frozen stage, "fit" has no sizes or no
            limit, or `offload_to_disk` is given without `offload`.
        ShapeError: The program does not train.

    References:
        PipeOffload, arXiv 2503.01328.

    Example:
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
            "offload needs a program that trains: this program has no backward",
            program=program.name,
            hint="leave offload out",
            fields=["offload"],
        )
    if options.extra_options.get("offload") is None:
        raise UsageError(
            "offload_to_disk selects from the offloaded activations, but offload is not set",
            hint='offload="all"',
            fields=["offload_to_disk", "offload"],
        )
    options = fill_move_costs(program, options)
    if not compute_earliest_times(
        Graph.from_program(program, options.progress_model), options.costs
    ).is_done.all():
        return program  # the program hangs, so there are no times.  `check` reports the hang.
    host_selection = options.extra_options["offload"]
    disk_selection = options.extra_options.get("offload_to_disk")
    no_addresses = program.words[:0]

    def to_host(host_addresses: Words) -> Program:
        return place_offloads(program, host_addresses, no_addresses, options)

    host_addresses = _choose_addresses(
        program, host_selection, "offload", _find_candidates(program), options
    )
    if is_fit(host_selection):
        host_addresses = _choose_fewest_to_fit(program, host_addresses, to_host, "device", options)
    disk_addresses = no_addresses
    if disk_selection is not None:

        def to_disk(disk_addresses: Words) -> Program:
            return place_offloads(program, host_addresses, disk_addresses, options)

        disk_addresses = _choose_addresses(
            program, disk_selection, "offload_to_disk", host_addresses, options
        )
        if is_fit(disk_selection):
            disk_addresses = _choose_fewest_to_fit(
                program, disk_addresses, to_disk, "host", options
            )
    return _set_slots(place_offloads(program, host_addresses, disk_addresses, options), options)


def _choose_addresses(
    program: Program, selection: Any, option: str, candidates: Words, options: Options
) -> Words:
    """Return the candidates that an option selects; all candidates for "fit"."""
    if is_keyword(selection) or callable(selection):
        trips = (HOST_TRIP,) if option == "offload" else (HOST_TRIP, DISK_TRIP)
        candidates = candidates[_has_time_to_move(program, candidates, trips, options)]
    else:
        for stage, *_ in find_named_pairs(selection, option, program.shape):
            if stage < program.frozen_stages:
                raise UsageError(
                    f"{option} selects stage {stage}, which is frozen and saves no activations",
                    hint=f"select stages from {program.frozen_stages} on",
                    fields=[option, "frozen_stages"],
                )
    if is_fit(selection):
        return candidates
    addresses = candidates[select_addresses(selection, option, candidates, program.shape)]
    if not (
        is_keyword(selection) or callable(selection) or isinstance(selection, ImportedSelection)
    ):
        _warn_of_no_effect(find_named_pairs(selection, option, program.shape), option, addresses)
    return addresses


def _warn_of_no_effect(named_pairs: set[tuple[int, ...]], option: str, addresses: Words) -> None:
    """Warn of listed stages and microbatches for which no value moves."""
    stage, mb = split_addresses(addresses)
    moved_pairs = {*zip(stage.tolist()), *zip(stage.tolist(), mb.tolist(), strict=True)}
    if unmoved_pairs := sorted(named_pairs - moved_pairs):
        names = ", ".join(".".join(map(str, pair)) for pair in unmoved_pairs[:MAX_LISTED])
        if len(unmoved_pairs) > MAX_LISTED:
            names += f" and {len(unmoved_pairs) - MAX_LISTED} more"
        reason = (
            "no compute runs between the forward and the use of the activations"
            if option == "offload"
            else "offload does not move the activations to the host"
        )
        warnings.warn(
            f"{option} selects {names}, but moves no activation of this selection: {reason}",
            stacklevel=3,
        )


def _find_candidates(program: Program) -> Words:
    """Return the addresses with other compute between the forward and the first use."""
    lifetimes = find_lifetimes(program)
    compute_count = np.cumsum(np.isin(program.op, COMPUTE_OPS) & ~program.joined)
    candidates: Words = lifetimes.address[
        compute_count[lifetimes.first_user] - compute_count[lifetimes.producer] > 1
    ]
    return candidates


def _has_time_to_move(
    program: Program, addresses: Words, trips: tuple[OffloadRoundTrip, ...], options: Options
) -> NDArray[np.bool_]:
    """Return a mask of the addresses whose value can be moved and moved back before its use.

    The times are predicted for the program without moves.
    """
    lifetimes = find_lifetimes(program)
    durations = sum(
        compute_move_costs(program, op, lifetimes.address, options) for trip in trips for op in trip
    )
    has_time = _compute_idle_times(program, lifetimes, options) >= durations * (1 - 1e-9)
    is_movable: NDArray[np.bool_] = np.isin(addresses, lifetimes.address[has_time])
    return is_movable


def _compute_idle_times(program: Program, lifetimes: ForwardLifetimes, options: Options) -> Floats:
    """Return the predicted time between the producer and the first user of each value."""
    earliest_times = compute_earliest_times(
        Graph.from_program(program, options.progress_model), options.costs
    )
    return earliest_times.start[lifetimes.first_user] - earliest_times.end[lifetimes.producer]


def _set_slots(program: Program, options: Options) -> Program:
    """Set the numbers of slots for saved activations on the device and the host.

    The number is set for the device if a value is offloaded. It is set for the host if a value
    moves on to the disk, or if a value is offloaded and the host has a memory limit.
    """
    tiers: tuple[tuple[Tier, OffloadRoundTrip], ...] = (("device", HOST_TRIP), ("host", DISK_TRIP))
    for tier, ops in tiers:
        limit = _get_memory_limit(options, tier)
        if program.used_opcodes.isdisjoint(ops) and (
            limit is None or program.used_opcodes.isdisjoint(HOST_TRIP)
        ):
            continue
        slot_range = SlotRange.from_program(program, tier)
        max_slots = slot_range.find_max_within_limit(program, options, limit)
        slots = slot_range.find_sufficient_slots(program, options, max_slots)
        program = slot_range.set_slots(program, slots)
    return program


def _get_memory_limit(options: Options, tier: Tier) -> float | None:
    """Return the memory limit of a rank on a tier, in bytes."""
    return (
        options.memory_limit if tier == "device" else options.extra_options.get("host_memory_limit")
    )


# ---------------------------------------------------------------- selection "fit"


def _choose_fewest_to_fit(
    program: Program,
    candidates: Words,
    move: Callable[[Words], Program],
    tier: Tier,
    options: Options,
) -> Words:
    """Return the candidates to move from a tier, so that no rank exceeds the limit of the tier."""
    name, option = (
        ("memory_limit", "offload")
        if tier == "device"
        else ("host_memory_limit", "offload_to_disk")
    )
    limit = _get_memory_limit(options, tier)
    if limit is None or options.sizes is None:
        raise missing_limit_error(option, options.sizes, name, limit)
    order = _order_candidates(program, candidates, options)
    ranks = range(program.shape.ranks)

    def take_first(counts: Counts) -> Words:
        return np.concatenate([candidates[:0], *(order[r][: counts[r]] for r in ranks)])

    def exceeds_limit(counts: Counts) -> NDArray[np.bool_]:
        moved_program = move(take_first(counts))
        slot_range = SlotRange.from_program(moved_program, tier)
        moved_program = slot_range.set_slots(moved_program, slot_range.min_slots)
        return compute_peak_memory(moved_program, options, tier) > add_tolerance(limit)

    max_counts = np.array([len(rank_candidates) for rank_candidates in order])
    max_counts[~exceeds_limit(0 * max_counts)] = 0
    low, high = 0 * max_counts - 1, max_counts
    while (high - low > 1).any():
        middle = np.where(high > 0, (low + high) // 2, 0)
        is_over_limit = exceeds_limit(middle)
        low = np.where(is_over_limit, middle, low)
        high = np.where(is_over_limit, high, middle)
        low = np.where(high > 0, low, -1)
    best = take_first(high)
    best_span = np.inf
    plain_span = predict_span(program, options)
    for share in _TRIED_SHARES if high.any() else ():
        trial = take_first(high + np.floor(share * (max_counts - high)).astype(np.int64))
        moved_program = move(trial)
        slot_range = SlotRange.from_program(moved_program, tier)
        slots = slot_range.find_max_within_limit(moved_program, options, limit)
        span = predict_span(slot_range.set_slots(moved_program, slots), options)
        if span < best_span * (1 - 1e-9):
            best, best_span = trial, span
        if best_span <= plain_span * (1 + 1e-9):
            break
    return best


def _order_candidates(program: Program, candidates: Words, options: Options) -> list[Words]:
    """Return the candidates of each rank, in descending order of the time until their use.

    Candidates with equal times have a special order: for any n, the distances between the first n
    candidates are as equal as possible.
    """
    lifetimes = find_lifetimes(program)
    idle_times = _compute_idle_times(program, lifetimes, options)
    ranks = find_ranks(program, lifetimes.producer)
    is_candidate = np.isin(lifetimes.address, candidates)
    candidates_by_rank = []
    for rank in range(program.shape.ranks):
        rank_entries = np.flatnonzero(is_candidate & (ranks == rank))
        tolerance = max(1e-9 * float(idle_times[rank_entries].max(initial=0.0)), 1e-300)
        rounded_times = np.round(idle_times[rank_entries] / tolerance)
        spread_order = np.empty(len(rank_entries))
        for rounded_time in np.unique(rounded_times).tolist():
            equal_entries = np.flatnonzero(rounded_times == rounded_time)
            spread_order[equal_entries] = _make_van_der_corput(len(equal_entries))
        order = np.lexsort((spread_order, -rounded_times))
        candidates_by_rank.append(lifetimes.address[rank_entries[order]])
    return candidates_by_rank


def _make_van_der_corput(number: int) -> Floats:
    """Return van der Corput's sequence: the reversed bits of 0, 1, 2, ... as fractions below 1."""
    bits = np.arange(max(1, (number - 1).bit_length()))
    bit_values = np.arange(number)[:, None] >> bits & 1
    return np.asarray((bit_values / 2.0 ** (bits + 1)).sum(1))


# ---------------------------------------------------------------- expected instructions


def _list_expected(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    """Yield the expected moves: each offload has a reload, and each reload an offload."""
    for op, counterpart, move in (
        (HOST_TRIP.reload_op, HOST_TRIP.offload_op, "to the host"),
        (HOST_TRIP.offload_op, HOST_TRIP.reload_op, "back"),
        (DISK_TRIP.reload_op, DISK_TRIP.offload_op, "to the disk"),
        (DISK_TRIP.offload_op, DISK_TRIP.reload_op, "back from the disk"),
    ):
        yield ExpectedInstructions(
            op, present(counterpart), f"its activations are not moved {move}", "", counterpart
        )


def _read_options(program: Program, progress_model: ProgressModel) -> dict[str, Any]:
    """Return the options `offload` and `offload_to_disk` that select the moves of a program."""
    selections = {}
    for option, trip in (("offload", HOST_TRIP), ("offload_to_disk", DISK_TRIP)):
        stage, mb = split_addresses((program.words & ADDRESS_MASK)[program.op == trip.offload_op])
        pairs = zip(stage.tolist(), mb.tolist(), strict=True)
        selections[option] = ImportedSelection(pairs) or None
    return selections


def _parse_bytes(text: str) -> float:
    try:
        return parse_bytes(text)
    except ValueError:
        raise ValueError(f"must be a number of bytes like 40GB, not {text!r}") from None


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
            "offload": make_selection_type("must select the saved activations that are offloaded"),
            "offload_to_disk": make_selection_type(
                "must select the offloaded activations that move on to the disk"
            ),
            "host_memory_limit": FieldType(
                "must be a number of bytes like 40GB",
                _parse_bytes,
                str,
                metavar="BYTES",
                argument_type="float | str",
            ),
        },
        option_descriptions={
            "offload": "saved activations that move to the host until they are used: all, half "
            "(every other microbatch), fit (as few as --memory-limit requires), stages (0,1), "
            "or stage.microbatch pairs (0.3,0.4: microbatches 3 and 4 of stage 0)",
            "offload_to_disk": "offloaded activations that move on to the disk: all, half, fit "
            "(as few as host_memory_limit requires), stages, or stage.microbatch pairs",
            "host_memory_limit": "largest number of bytes of offloaded values of a rank on the "
            "host",
        },
    ),
)
