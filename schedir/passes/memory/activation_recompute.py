"""Recompute forwards before their backwards, from saved inputs (activation checkpointing).

If possible, a Recompute runs while its rank would otherwise wait, for example for the gradient of
its microbatch.

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
from schedir.ir.cost.sizes import Sizes, add_tolerance
from schedir.ir.isa.instructions import BACKWARD_OPS, COMPUTE_OPS, FORWARD_OPS, RECOMPUTE
from schedir.ir.pipeline.field_schema import FieldType
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
from schedir.passes.memory.offload_placement import predict_span
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
    which, when = options.extra_options["recompute"], options.extra_options.get("recompute_at")
    if when not in (None, *_RECOMPUTE_TIMES):
        raise UsageError(
            f"recompute_at must be early or late, not {describe(when)}", fields=["recompute_at"]
        )
    candidates = _find_candidates(program)
    if is_fit(which) and is_fit(options.extra_options.get("offload")):
        return _place_with_offload(program, candidates, options)
    if is_fit(which):
        chosen = _choose_fewest_to_fit(program, candidates, options)
    else:
        chosen = candidates[select_addresses(which, "recompute", candidates, program.shape)]
    return _place_recomputes(program, chosen, options)


def _find_backwards(program: Program) -> Positions:
    return np.asarray(np.flatnonzero(is_op(program.op, BACKWARD_OPS)), np.intp)


def _find_candidates(program: Program) -> Words:
    """Return the addresses whose forward can be recomputed.

    Such an address has another instruction between its F and its backward, and no R yet.
    """
    address, op = program.words & ADDRESS_MASK, program.op
    at = _find_backwards(program)
    own = np.isin(op[at - 1], FORWARD_OPS) & (address[at - 1] == address[at])
    there = np.isin(address[at], address[op == RECOMPUTE])
    found: Words = address[at[~own & ~there]]
    return found


def _parse_recompute_time(text: str) -> str:
    if text not in _RECOMPUTE_TIMES:
        raise ValueError(f"must be early or late, not {text!r}")
    return text


RECOMPUTE_TYPE: Final = make_selection_type("must select the forwards that are recomputed")
RECOMPUTE_AT_TYPE: Final = FieldType(
    "must be early or late", _parse_recompute_time, str, metavar="WHEN"
)
_MAX_ROUNDS: Final = 4  # rounds that move R earlier.  Each moved R can leave a wait for another R.

# ---------------------------------------------------------------- placement


def _place_recomputes(program: Program, chosen: Words, options: Options) -> Program:
    """Insert an R for each chosen address, in a wait if possible and else before its backward.

    An R moves before an earlier forward that waits at least as long as the R takes. Then the R does
    not delay its backward. An R moves only before forwards. The values that exist while these
    forwards run also exist while the backward of the R runs, so the peak memory does not grow.
    """
    at = _find_backwards(program)
    at = at[np.isin((program.words & ADDRESS_MASK)[at], chosen)]
    best = found = insert_before(program, at, replace_opcode(program.words[at], RECOMPUTE))
    if options.extra_options.get("recompute_at") == "late" or not len(at):
        return best
    least = np.inf
    for _ in range(_MAX_ROUNDS):
        start, end = _predict_compute_times(found, options)
        if end.max() >= least:
            break
        best, least = found, end.max()
        earlier = _find_earlier_positions(found, start, end)
        if not earlier:
            break
        found = _move_earlier(found, earlier)
    return best


def _predict_compute_times(
    draft: Program, options: Options
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the predicted start and end of each compute of a draft after lowering."""
    lowered = options.run_later_passes(draft)
    reached = compute_earliest_times(
        Graph.from_program(lowered, options.progress_model), options.costs
    )
    compute = np.isin(lowered.op, COMPUTE_OPS)
    return reached.start[compute], reached.end[compute]


def _find_earlier_positions(
    program: Program, start: NDArray[np.float64], end: NDArray[np.float64]
) -> dict[int, int]:
    """Find an earlier place for each R that delays its backward.

    The place is before a forward that waits at least as long as the R takes. Returns a dict from
    the position of the R to the position of this forward.
    """
    forward = np.isin(program.op, FORWARD_OPS)
    address = program.words & ADDRESS_MASK
    begins = {*program.offsets.tolist()}
    found: dict[int, int] = {}
    for at in np.flatnonzero(program.op == RECOMPUTE).tolist():
        takes = (end[at] - start[at]) * (1 - 1e-9)
        if start[at + 1] - end[at] >= takes:
            continue  # the R runs while the rank waits for the gradient
        to = at - 1
        while to + 1 not in begins and forward[to] and address[to] != address[at]:
            free = start[to] - (0.0 if to in begins else end[to - 1])
            if free >= takes and not program.joined[to]:
                found[at] = to
                break
            to -= 1
    return found


def _move_earlier(program: Program, targets: dict[int, int]) -> Program:
    """Move the instruction at each key of `targets` before the position that is its value."""
    key = np.arange(len(program), dtype=float)
    for at, to in targets.items():
        key[at] = to - 0.5
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
    chosen = candidates[:0]
    while True:
        lowered = options.run_later_passes(_place_recomputes(program, chosen, options))
        more = [
            _choose_for_rank(
                lowered, rank, own, candidates[~np.isin(candidates, chosen)], sizes, limit
            )
            for rank, own in enumerate(compute_footprints(lowered, sizes, worst_case=True))
        ]
        if not sum(map(len, more)):
            return chosen
        chosen = np.concatenate([chosen, *more])


def _place_with_offload(program: Program, candidates: Words, options: Options) -> Program:
    """Insert R into a draft in which both recomputation and offload can reduce memory.

    The function searches for the choice of R that keeps the memory limit with the shortest
    simulated step. It first tries no R, then a quarter, a half and all of the R that are needed
    without offload. It then changes the best choice stage by stage: it removes all R of the stage,
    or adds all if there are none. It stops when a choice keeps the limit and the step takes no
    longer than without recomputation and offload.
    """
    alone = replace(
        options,
        run_later_passes=partial(options.run_later_passes, offload=None, offload_to_disk=None),
    )
    few = _choose_fewest_to_fit(program, candidates, alone)
    plain = _evaluate_draft(program, alone)[1] * (1 + 1e-9)
    best, least = program, _evaluate_draft(program, options)

    def better(chosen: Words) -> bool:
        nonlocal best, least
        tried = _place_recomputes(program, chosen, alone)
        found = _evaluate_draft(tried, options)
        if found < (least[0], least[1] * (1 - 1e-9)):
            best, least = tried, found
            return True
        return False

    chosen, tries = candidates[:0], [few[::4], few[::2], few]
    for some in tries:
        if least <= (0.0, plain):
            return best
        if better(some):
            chosen = some
    for stage in np.unique(candidates >> STAGE_SHIFT).tolist():
        if least <= (0.0, plain):
            break
        own = chosen >> STAGE_SHIFT == stage
        other = (
            chosen[~own]
            if own.any()
            else [*chosen, *candidates[candidates >> STAGE_SHIFT == stage]]
        )
        if better(np.array(other, candidates.dtype)):
            chosen = np.array(other, candidates.dtype)
    return best


def _evaluate_draft(program: Program, options: Options) -> tuple[float, float]:
    """Return the bytes above the memory limit after lowering, and the predicted time."""
    assert options.sizes is not None and options.memory_limit is not None
    lowered = options.run_later_passes(program)
    most = max(
        own.total_bytes.max() for own in compute_footprints(lowered, options.sizes, worst_case=True)
    )
    return max(0.0, most - add_tolerance(options.memory_limit)), predict_span(lowered, options)


def _choose_for_rank(
    program: Program, rank: int, footprint: Footprint, candidates: Words, sizes: Sizes, limit: float
) -> Words:
    """Return candidates to recompute, so that a rank exceeds the limit by as little as possible."""
    excess = footprint.total_bytes - limit
    if excess.max(initial=0.0) <= 0:
        return candidates[:0]
    stream = program.streams[rank]
    address, shape = stream.words & ADDRESS_MASK, program.shape
    first = _find_positions(address, np.isin(stream.op, FORWARD_OPS), candidates)
    last = _find_positions(address, np.isin(stream.op, BACKWARD_OPS), candidates)
    here = (first >= 0) & (last >= 0)
    candidates, first, last = candidates[here], first[here], last[here]
    stage = candidates >> STAGE_SHIFT & 0xFFFF
    mb = candidates & 0xFFFFFFFF
    less = look_up(
        sizes.per_microbatch("saved", shape) - sizes.per_microbatch("recompute_inputs", shape),
        stage,
        mb,
    )
    begin = np.searchsorted(footprint.positions, first)
    end = np.searchsorted(footprint.positions, last)
    taken = less <= 0
    found: list[int] = []
    for at in range(len(excess)):
        while excess[at] > 0:
            can = np.flatnonzero(~taken & (begin <= at) & (at < end))
            if not len(can):
                break
            spares = [float(np.minimum(np.maximum(excess[at : end[k]], 0), less[k]).sum())
                      for k in can.tolist()]  # fmt: skip
            one = int(can[np.lexsort((end[can], np.array(spares)))[-1]])
            taken[one] = True
            found.append(one)
            excess[begin[one] : end[one]] -= less[one]
    return candidates[found]


def _find_positions(address: Words, mask: NDArray[np.bool_], targets: Words) -> Positions:
    """Return the index of the first instruction in `mask` that has each target address, or -1."""
    at = np.flatnonzero(mask)
    order = at[np.argsort(address[at], kind="stable")]
    found = np.searchsorted(address[order], targets)
    near = (
        order[np.minimum(found, len(order) - 1)] if len(order) else np.zeros(len(targets), np.intp)
    )
    there = (
        (found < len(order)) & (address[near] == targets)
        if len(order)
        else np.zeros(len(targets), bool)
    )
    return np.where(there, near, -1)


def _list_expected(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    """Yield the expected R: an R is allowed only if its address has a backward."""
    back = np.logical_or.reduce([present(op) for op in BACKWARD_OPS])
    yield ExpectedInstructions(
        RECOMPUTE, present(RECOMPUTE) & back, "its stage has no backward of its microbatch"
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
