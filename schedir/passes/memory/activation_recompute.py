"""Recompute forwards before their backwards, from saved inputs (activation checkpointing).

Sublinear memory (Chen et al., arXiv 1604.06174) as instructions of a schedule: an R runs as soon as
its rank has nothing better to do, as while the gradient of its microbatch is on its way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.critical_path.longest_path import walk
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.memory.footprint import Footprint, held
from schedir.errors import UsageError, describe
from schedir.ir.cost.per_stage_values import look_up
from schedir.ir.cost.sizes import Sizes, ample
from schedir.ir.isa.instructions import BACKWARDS, COMPUTE, FORWARDS, RECOMPUTE
from schedir.ir.pipeline.field_schema import FieldType
from schedir.ir.program import ADDRESS, OP, STAGE, Program, StreamSlices, Words, is_op
from schedir.passes.insertion import before
from schedir.passes.memory.offload_placement import span_of
from schedir.passes.pass_types import ExpectedInstructions, Options, Pass, Present
from schedir.passes.selection import fits, kind, meant

Positions = NDArray[np.intp]

_WHEN: Final = ("early", "late")


def recompute(program: Program, options: Options) -> Program:
    """A draft with R for what the options say, that has none; see `schedir.compile`.

    Raises UsageError for what says nothing, and for "fit" without a limit.
    """
    which, when = options.more["recompute"], options.more.get("recompute_at")
    if when not in (None, *_WHEN):
        raise UsageError(
            f"recompute_at is early or late, not {describe(when)}", fields=["recompute_at"]
        )
    candidates = _candidates(program)
    if fits(which) and fits(options.more.get("offload")):
        return _beside_offload(program, candidates, options)
    if fits(which):
        chosen = _as_few_as_fit(program, candidates, options)
    else:
        chosen = candidates[meant(which, "recompute", candidates, program.shape)]
    return _placed(program, chosen, options)


def _backwards(program: Program) -> Positions:
    return np.asarray(np.flatnonzero(is_op(program.op, BACKWARDS)), np.intp)


def _candidates(program: Program) -> Words:
    """The addresses of what can be recomputed: of which something stands between F and backward,
    and no R is there."""
    address, op = program.words & ADDRESS, program.op
    at = _backwards(program)
    own = np.isin(op[at - 1], FORWARDS) & (address[at - 1] == address[at])
    there = np.isin(address[at], address[op == RECOMPUTE])
    found: Words = address[at[~own & ~there]]
    return found


def _at(text: str) -> str:
    if text not in _WHEN:
        raise ValueError(f"must be early or late, not {text!r}")
    return text


WHICH: Final = kind("says what is recomputed")
AT: Final = FieldType("is early or late", _at, str, metavar="WHEN")
_ROUNDS: Final = 4  # of moving R ahead: each makes others wait less

# ---------------------------------------------------------------- where they stand


def _placed(program: Program, chosen: Words, options: Options) -> Program:
    """The draft with R for some addresses, each just before its backward, or where it is hidden.

    It is hidden before a forward that waits, if it fits in there: then it does not make its
    backward late.  It goes over forwards only.  What is there while they run is there when its own
    backward runs, too: so no more is held at once.
    """
    at = _backwards(program)
    at = at[np.isin((program.words & ADDRESS)[at], chosen)]
    address = (program.words & ADDRESS)[at]
    best = found = before(program, at, address | int(RECOMPUTE) << OP)
    if options.more.get("recompute_at") == "late" or not len(at):
        return best
    least = np.inf
    for _ in range(_ROUNDS):
        start, end = _times(found, options)
        if end.max() >= least:
            break
        best, least = found, end.max()
        earlier = _earlier(found, start, end)
        if not earlier:
            break
        found = _moved(found, earlier)
    return best


def _times(found: Program, options: Options) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """When each compute of a draft starts and ends in the program that is made of it."""
    lowered = options.rest(found)
    reached = walk(Graph.of(lowered, options.progress_model), options.costs)
    compute = np.isin(lowered.op, COMPUTE)
    return reached.start[compute], reached.end[compute]


def _earlier(
    program: Program, start: NDArray[np.float64], end: NDArray[np.float64]
) -> dict[int, int]:
    """For R that make a backward late, before which forward each would not; by position."""
    forward, address = np.isin(program.op, FORWARDS), program.words & ADDRESS
    begins = {*program.offsets.tolist()}
    found: dict[int, int] = {}
    for at in np.flatnonzero(program.op == RECOMPUTE).tolist():
        takes = (end[at] - start[at]) * (1 - 1e-9)
        if start[at + 1] - end[at] >= takes:
            continue  # it runs while the gradient is on its way
        to = at - 1
        while to + 1 not in begins and forward[to] and address[to] != address[at]:
            free = start[to] - (0.0 if to in begins else end[to - 1])
            if free >= takes and not program.joined[to]:
                found[at] = to
                break
            to -= 1
    return found


def _moved(program: Program, earlier: dict[int, int]) -> Program:
    """The program with some instructions before others."""
    key = np.arange(len(program), dtype=float)
    for at, to in earlier.items():
        key[at] = to - 0.5
    words = program.words[np.argsort(key, kind="stable")]
    return replace(program, streams=StreamSlices.at(words, program.offsets))


# ---------------------------------------------------------------- as few as fit


def _as_few_as_fit(program: Program, candidates: Words, options: Options) -> Words:
    """The addresses whose recomputation brings each rank below the limit, by the prediction: along
    the Stream, wherever too much is held, of what is kept there that which spares most.

    Where all stages keep equally much that is what is kept longest, and no smaller number would do.
    """
    if options.memory_limit is None or options.sizes is None:
        raise UsageError(
            'recompute="fit" recomputes what does not fit: it needs sizes and a limit',
            hint="--sizes saved=1.2GB --memory-limit 40GB, or sizes=Sizes(saved=1.2e9), "
            "memory_limit=40e9",
            fields=["recompute"],
        )
    sizes, limit = options.sizes, options.memory_limit
    chosen = candidates[:0]
    while True:
        lowered = options.rest(_placed(program, chosen, options))
        more = [
            _spared(lowered, rank, own, candidates[~np.isin(candidates, chosen)], sizes, limit)
            for rank, own in enumerate(held(lowered, sizes, late=True))
        ]
        if not sum(map(len, more)):
            return chosen
        chosen = np.concatenate([chosen, *more])


def _beside_offload(program: Program, candidates: Words, options: Options) -> Program:
    """The draft with R where both may bring ranks below the limit: what then runs again, and what
    is offloaded beside, is that with which the step is shortest by simulation.

    Tried are none; as few as would fit alone, or some of these, evenly apart; and from the best of
    these on each stage alike.  A choice that costs nothing ends it.
    """
    alone = replace(options, rest=partial(options.rest, offload=None, offload_to_disk=None))
    few = _as_few_as_fit(program, candidates, alone)
    plain = _judged(program, alone)[1] * (1 + 1e-9)
    best, least = program, _judged(program, options)

    def better(chosen: Words) -> bool:
        nonlocal best, least
        tried = _placed(program, chosen, alone)
        found = _judged(tried, options)
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
    for stage in np.unique(candidates >> STAGE).tolist():
        if least <= (0.0, plain):
            break
        own = chosen >> STAGE == stage
        other = chosen[~own] if own.any() else [*chosen, *candidates[candidates >> STAGE == stage]]
        if better(np.array(other, candidates.dtype)):
            chosen = np.array(other, candidates.dtype)
    return best


def _judged(program: Program, options: Options) -> tuple[float, float]:
    """By how many bytes what becomes of a draft is above the limit, and how long it takes."""
    assert options.sizes is not None and options.memory_limit is not None
    lowered = options.rest(program)
    most = max(own.bytes.max() for own in held(lowered, options.sizes, late=True))
    return max(0.0, most - ample(options.memory_limit)), span_of(lowered, options)


def _spared(
    program: Program, rank: int, own: Footprint, free: Words, sizes: Sizes, limit: float
) -> Words:
    """Of the addresses that are free, those that bring a rank below the limit; as far as they do,
    where even all of them do not."""
    excess = own.bytes - limit
    if excess.max(initial=0.0) <= 0:
        return free[:0]
    stream = program.streams[rank]
    address, shape = stream.words & ADDRESS, program.shape
    first = _where(address, np.isin(stream.op, FORWARDS), free)
    last = _where(address, np.isin(stream.op, BACKWARDS), free)
    here = (first >= 0) & (last >= 0)
    free, first, last = free[here], first[here], last[here]
    stage, mb = free >> STAGE & 0xFFFF, free & 0xFFFFFFFF
    less = look_up(sizes.each("saved", shape) - sizes.each("checkpoint", shape), stage, mb)
    begin, end = np.searchsorted(own.at, first), np.searchsorted(own.at, last)
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
    return free[found]


def _where(address: Words, which: NDArray[np.bool_], of: Words) -> Positions:
    """Where in a Stream those of a kind stand that have some addresses; -1 for none."""
    at = np.flatnonzero(which)
    order = at[np.argsort(address[at], kind="stable")]
    found = np.searchsorted(address[order], of)
    near = order[np.minimum(found, len(order) - 1)] if len(order) else np.zeros(len(of), np.intp)
    there = (found < len(order)) & (address[near] == of) if len(order) else np.zeros(len(of), bool)
    return np.where(there, near, -1)


def _both(program: Program, present: Present) -> Iterator[ExpectedInstructions]:
    """Who is run again has a backward."""
    back = np.logical_or.reduce([present(op) for op in BACKWARDS])
    yield ExpectedInstructions(
        RECOMPUTE, present(RECOMPUTE) & back, "there is no backward that it is for"
    )


PASSES: Final = (
    Pass(
        "recompute",
        "draft",
        recompute,
        wanted=lambda program, options: (
            program.trains and options.more.get("recompute") is not None
        ),
        expected=_both,
        options=("recompute", "recompute_at"),
        section="memory",
        kinds={"recompute": WHICH, "recompute_at": AT},
        abouts={
            "recompute": "which forwards save only their inputs and run again: all, half "
            "(every other "
            "microbatch), fit (as few as --memory-limit requires), stages 0,1 or microbatches of "
            "stages 0.3,0.4",
            "recompute_at": "early: where it costs no time (default), or late: just before "
            "the backward",
        },
    ),
)
