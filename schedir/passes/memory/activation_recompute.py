"""Recompute forwards before their backwards, from saved inputs (activation checkpointing).

If possible, a Recompute runs while its rank would otherwise wait, for example for the gradient of
its microbatch.

An address is a (stage, microbatch) pair, as a packed word.

References:
    Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.critical_path.longest_path import compute_earliest_times
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.memory.footprint import Footprint, compute_footprints
from schedir.errors import UsageError, describe
from schedir.ir.cost.per_stage_values import look_up
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import BACKWARD_OPS, COMPUTE_OPS, FORWARD_OPS, RECOMPUTE
from schedir.ir.pipeline.field_schema import make_choice_type
from schedir.ir.program import (
    ADDRESS_MASK,
    STAGE_SHIFT,
    Program,
    StreamSlices,
    Words,
    is_op,
    replace_opcode,
)
from schedir.passes.insertion import insert_before
from schedir.passes.memory.offload_placement import evaluate_program, predict_span
from schedir.passes.pass_types import ExpectedInstructions, Options, Pass, PresenceQuery
from schedir.passes.selection import (
    is_fit,
    make_selection_type,
    missing_limit_error,
    select_addresses,
)

Positions = NDArray[np.intp]

_RECOMPUTE_TIMES: Final = ("early", "late")


def insert_recomputes(program: Program, options: Options) -> Program:
    """Insert a Recompute for the selected forwards of a draft. See `schedir.compile`.

    Args:
        program: A draft.
        options: The options. `extra_options` has the selection `recompute`, and `recompute_at`
            ("early", the default, or "late").

    Raises:
        UsageError: The selection or `recompute_at` is not valid, or the selection is "fit" and the
            sizes or the memory limit is missing.
    """
    selection = options.extra_options["recompute"]
    recompute_at = options.extra_options.get("recompute_at")
    if recompute_at not in (None, *_RECOMPUTE_TIMES):
        raise UsageError(
            f"recompute_at must be early or late, not {describe(recompute_at)}",
            fields=["recompute_at"],
        )
    candidates = _find_candidates(program)
    if is_fit(selection) and is_fit(options.extra_options.get("offload")):
        return _place_with_offload(program, candidates, options)
    if is_fit(selection):
        addresses = _choose_fewest_to_fit(program, candidates, options)
    else:
        addresses = candidates[select_addresses(selection, "recompute", candidates, program.shape)]
    return _place_recomputes(program, addresses, options)


def _find_backwards(program: Program) -> Positions:
    return np.asarray(np.flatnonzero(is_op(program.op, BACKWARD_OPS)), np.intp)


def _find_candidates(program: Program) -> Words:
    """Return the addresses with a forward that can be recomputed.

    Such an address has another instruction between its F and its backward, and no R yet.
    """
    address, op = program.words & ADDRESS_MASK, program.op
    backwards = _find_backwards(program)
    is_adjacent = np.isin(op[backwards - 1], FORWARD_OPS)
    is_adjacent &= address[backwards - 1] == address[backwards]
    is_recomputed = np.isin(address[backwards], address[op == RECOMPUTE])
    candidates: Words = address[backwards[~is_adjacent & ~is_recomputed]]
    return candidates


RECOMPUTE_TYPE: Final = make_selection_type("must select the forwards that are recomputed")
RECOMPUTE_AT_TYPE: Final = make_choice_type("must be early or late", _RECOMPUTE_TIMES, "WHEN")
# Rounds that move R earlier.  After a move, another R can fit into an idle time.
_MAX_ROUNDS: Final = 4

# ---------------------------------------------------------------- placement


def _place_recomputes(program: Program, addresses: Words, options: Options) -> Program:
    """Insert an R for each address, in an idle time if possible, or else before its backward.

    An R moves before an earlier forward that waits at least as long as the R takes. Then the R does
    not delay its backward. An R moves only before forwards. The values that exist while these
    forwards run also exist while the backward of the R runs, so the peak memory does not grow.
    """
    backwards = _find_backwards(program)
    backwards = backwards[np.isin((program.words & ADDRESS_MASK)[backwards], addresses)]
    recomputes = replace_opcode(program.words[backwards], RECOMPUTE)
    best = trial = insert_before(program, backwards, recomputes)
    if options.extra_options.get("recompute_at") == "late" or not len(backwards):
        return best
    best_span = np.inf
    for _ in range(_MAX_ROUNDS):
        start, end = _predict_compute_times(trial, options)
        if end.max() >= best_span:
            break
        best, best_span = trial, end.max()
        targets = _find_earlier_positions(trial, start, end)
        if not targets:
            break
        trial = _move_earlier(trial, targets)
    return best


def _predict_compute_times(
    draft: Program, options: Options
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the predicted start and end of each compute of a draft after lowering."""
    lowered = options.run_later_passes(draft)
    earliest_times = compute_earliest_times(
        Graph.from_program(lowered, options.progress_model), options.costs
    )
    is_compute = np.isin(lowered.op, COMPUTE_OPS)
    return earliest_times.start[is_compute], earliest_times.end[is_compute]


def _find_earlier_positions(
    program: Program, start: NDArray[np.float64], end: NDArray[np.float64]
) -> dict[int, int]:
    """Find an earlier place for each R that delays its backward.

    The place is before a forward that waits at least as long as the R takes. Returns a dict from
    the position of the R to the position of this forward.
    """
    is_forward = np.isin(program.op, FORWARD_OPS)
    address = program.words & ADDRESS_MASK
    stream_starts = {*program.offsets.tolist()}
    targets: dict[int, int] = {}
    for recompute in np.flatnonzero(program.op == RECOMPUTE).tolist():
        duration = (end[recompute] - start[recompute]) * (1 - 1e-9)
        if start[recompute + 1] - end[recompute] >= duration:
            continue  # the R runs while the rank waits for the gradient
        target = recompute - 1
        while (
            target + 1 not in stream_starts
            and is_forward[target]
            and address[target] != address[recompute]
        ):
            idle_time = start[target] - (0.0 if target in stream_starts else end[target - 1])
            if idle_time >= duration and not program.joined[target]:
                targets[recompute] = target
                break
            target -= 1
    return targets


def _move_earlier(program: Program, targets: dict[int, int]) -> Program:
    """Move the instruction at each position p in `targets` before position `targets[p]`."""
    key = np.arange(len(program), dtype=float)
    for position, target in targets.items():
        key[position] = target - 0.5
    words = program.words[np.argsort(key, kind="stable")]
    return replace(program, streams=StreamSlices.from_words(words, program.offsets))


# ---------------------------------------------------------------- selection "fit"


def _choose_fewest_to_fit(program: Program, candidates: Words, options: Options) -> Words:
    """Return the addresses to recompute so that each rank stays below the memory limit.

    `compute_footprints` predicts the memory. At each position of the Stream at which a rank exceeds
    the limit, the function chooses the address whose recomputation removes the most bytes above the
    limit. If all stages save the same number of bytes, this is the address whose activations are
    saved longest. Then no smaller number of addresses keeps the limit.
    """
    if options.memory_limit is None or options.sizes is None:
        raise missing_limit_error("recompute", options.sizes, "memory_limit", options.memory_limit)
    sizes, limit = options.sizes, options.memory_limit
    addresses = candidates[:0]
    while True:
        lowered = options.run_later_passes(_place_recomputes(program, addresses, options))
        remaining = candidates[~np.isin(candidates, addresses)]
        additions = [
            _choose_for_rank(lowered, rank, footprint, remaining, sizes, limit)
            for rank, footprint in enumerate(compute_footprints(lowered, sizes, worst_case=True))
        ]
        if not sum(map(len, additions)):
            return addresses
        addresses = np.concatenate([addresses, *additions])


def _place_with_offload(program: Program, candidates: Words, options: Options) -> Program:
    """Insert R into a draft in which both recomputation and offload can reduce memory.

    The function searches for the choice of R that keeps the memory limit with the shortest
    simulated step. It first tries no R, then a quarter, a half and all of the R that are needed
    without offload. It then changes the best choice stage by stage: it removes all R of the stage,
    or adds all candidates of the stage if the stage has no R. It stops when a choice keeps the
    limit and the step takes no longer than without recomputation and offload.
    """
    without_offload = replace(
        options,
        run_later_passes=partial(options.run_later_passes, offload=None, offload_to_disk=None),
    )
    fit_addresses = _choose_fewest_to_fit(program, candidates, without_offload)
    plain_time = predict_span(without_offload.run_later_passes(program), without_offload) * (
        1 + 1e-9
    )
    best, best_evaluation = program, evaluate_program(options.run_later_passes(program), options)

    def improve(addresses: Words) -> bool:
        nonlocal best, best_evaluation
        trial = _place_recomputes(program, addresses, without_offload)
        evaluation = evaluate_program(options.run_later_passes(trial), options)
        if evaluation < (best_evaluation[0], best_evaluation[1] * (1 - 1e-9)):
            best, best_evaluation = trial, evaluation
            return True
        return False

    addresses = candidates[:0]
    for choice in (fit_addresses[::4], fit_addresses[::2], fit_addresses):
        if best_evaluation <= (0.0, plain_time):
            return best
        if improve(choice):
            addresses = choice
    for stage in np.unique(candidates >> STAGE_SHIFT).tolist():
        if best_evaluation <= (0.0, plain_time):
            break
        is_of_stage = addresses >> STAGE_SHIFT == stage
        if is_of_stage.any():
            choice = addresses[~is_of_stage]
        else:
            choice = np.concatenate([addresses, candidates[candidates >> STAGE_SHIFT == stage]])
        if improve(choice):
            addresses = choice
    return best


def _choose_for_rank(
    program: Program, rank: int, footprint: Footprint, candidates: Words, sizes: Sizes, limit: float
) -> Words:
    """Return candidates to recompute, so that a rank exceeds the limit by as little as possible."""
    excess = footprint.total_bytes - limit
    if excess.max(initial=0.0) <= 0:
        return candidates[:0]
    stream = program.streams[rank]
    address, shape = stream.words & ADDRESS_MASK, program.shape
    forward = _find_positions(address, np.isin(stream.op, FORWARD_OPS), candidates)
    backward = _find_positions(address, np.isin(stream.op, BACKWARD_OPS), candidates)
    has_both = (forward >= 0) & (backward >= 0)
    candidates, forward, backward = candidates[has_both], forward[has_both], backward[has_both]
    stage = candidates >> STAGE_SHIFT & 0xFFFF
    mb = candidates & 0xFFFFFFFF
    saved_bytes = look_up(
        sizes.per_microbatch("saved", shape) - sizes.per_microbatch("recompute_inputs", shape),
        stage,
        mb,
    )
    begin = np.searchsorted(footprint.positions, forward)
    end = np.searchsorted(footprint.positions, backward)
    is_excluded = saved_bytes <= 0
    choices: list[int] = []
    for point in range(len(excess)):
        while excess[point] > 0:
            eligible = np.flatnonzero(~is_excluded & (begin <= point) & (point < end))
            if not len(eligible):
                break
            reductions = [
                float(np.minimum(np.maximum(excess[point : end[k]], 0), saved_bytes[k]).sum())
                for k in eligible.tolist()
            ]
            order = np.lexsort((end[eligible], np.array(reductions)))
            choice = int(eligible[order[-1]])
            is_excluded[choice] = True
            choices.append(choice)
            excess[begin[choice] : end[choice]] -= saved_bytes[choice]
    return candidates[choices]


def _find_positions(address: Words, mask: NDArray[np.bool_], targets: Words) -> Positions:
    """Return the index of the first instruction in `mask` that has each target address, or -1."""
    positions = np.flatnonzero(mask)
    order = positions[np.argsort(address[positions], kind="stable")]
    order_index = np.searchsorted(address[order], targets)
    if not len(order):
        return np.full(len(targets), -1, np.intp)
    nearest = order[np.minimum(order_index, len(order) - 1)]
    is_match = (order_index < len(order)) & (address[nearest] == targets)
    return np.where(is_match, nearest, -1)


def _list_expected(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    """Yield the expected R: an R is allowed only if its address has a backward."""
    has_backward = np.logical_or.reduce([present(op) for op in BACKWARD_OPS])
    yield ExpectedInstructions(
        RECOMPUTE, present(RECOMPUTE) & has_backward, "its stage has no backward of its microbatch"
    )


PASSES: Final = (
    Pass(
        "recompute",
        "draft",
        insert_recomputes,
        should_run=lambda program, options: (
            program.has_backward and options.extra_options.get("recompute") is not None
        ),
        list_expected=_list_expected,
        option_names=("recompute", "recompute_at"),
        section="memory",
        option_types={"recompute": RECOMPUTE_TYPE, "recompute_at": RECOMPUTE_AT_TYPE},
        option_descriptions={
            "recompute": "forwards that save only their inputs and run again: all, half (every "
            "other microbatch), fit (as few as --memory-limit requires), stages (0,1), "
            "or stage.microbatch pairs (0.3,0.4: microbatches 3 and 4 of stage 0)",
            "recompute_at": "early: recompute when it costs no time (default), or late: just "
            "before the backward",
        },
    ),
)
