"""Memory: what a program holds, read off its Streams.

Without sizes what counts is (stage, mb) pairs in flight: alive from their Forward until nothing
that it saved is held any more: until Backward, or until BackwardWeight when the backward is
split.

With sizes it is bytes.  What is taken in and put out lives in static slots: they are there all
the time, and how many there are is their memory, whichever order runs.  What compute keeps for
later compute (SAVED, TAPE) is held from the start of the instruction that gives it to the end of
the one that frees it; compute is in order, so that is exact, too.  A BackwardInput, which makes a
tape of what was saved, holds `Sizes.both`: until its end all that was saved counts as such, and
as tape only what comes on top of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.slots import KINDS, counts, groups, uses
from schedir.errors import MemoryLimitError, Site
from schedir.ir.index import Index
from schedir.ir.ops import BOUNDARY, COMPUTE, ROWS, Opcode, Token
from schedir.ir.program import Program, Stream
from schedir.ir.sizes import Sizes

_HELD = {Token.SAVED, Token.TAPE}  # BackwardInput turns one into the other
_CHANGE = np.array([len(_HELD & {*r.gives}) - len(_HELD & {*r.frees}) for r in ROWS])


def in_flight(stream: Stream) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the number of (stage, mb) alive changes in a Stream, and to what."""
    change = _CHANGE[stream.op]
    at = np.flatnonzero(change)
    return at, np.cumsum(change[at])


def peak_versions(program: Program) -> NDArray[np.int64]:
    """Per rank, the most versions of its weights that are of use at once, the newest included.

    One for a program of one update.  An old version is of use until the last instruction that
    computes with it.
    """
    plan = program.plan
    peaks = np.ones(plan.ranks, np.int64)
    for rank, stream in enumerate(program.streams if plan.updates > 1 else ()):
        steps = np.flatnonzero(stream.op == Opcode.OptimizerStep)
        at = np.flatnonzero(np.isin(stream.op, COMPUTE))
        version = plan.version(stream.stage[at], stream.mb[at])
        last = np.full(plan.updates + 1, -1)
        np.maximum.at(last, version, at)
        old = [int((last[: k + 1] > step).sum()) for k, step in enumerate(steps.tolist())]
        peaks[rank] = 1 + max(old, default=0)
    return peaks


def peak_in_flight(program: Program) -> NDArray[np.int64]:
    """Per rank, the most (stage, mb) alive at once; exact, since a rank's compute is in order.

    A program that does not train keeps nothing for a backward.
    """
    if not program.trains:
        return np.zeros(program.plan.ranks, np.int64)
    return np.array([in_flight(s)[1].max(initial=0) for s in program.streams], np.int64)


# ---------------------------------------------------------------- in bytes


class Held(NamedTuple):
    """What one rank holds.

    `fixed` has the number and the bytes, together, of what is there all the time, by name.
    `at` are the indices in the Stream at which what compute holds changes, at their start where
    `starts`, else at their end; `kept` has the number and the bytes from then on, by name.  The
    first entry is the beginning.
    """

    fixed: dict[str, tuple[int, float]]
    at: NDArray[np.int64]
    starts: NDArray[np.bool_]
    kept: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]

    @property
    def bytes(self) -> NDArray[np.float64]:
        """All that is held from each change on."""
        always = sum(size for _, size in self.fixed.values())
        return np.asarray(always + sum(size for _, size in self.kept.values()), float)

    def table(self, change: int) -> list[tuple[str, int, float]]:
        """What is held from a change on: names, numbers and bytes, most bytes first."""
        now = {name: (int(n[change]), float(b[change])) for name, (n, b) in self.kept.items()}
        rows = [(name, n, size) for name, (n, size) in (self.fixed | now).items() if size]
        return sorted(rows, key=lambda row: -row[2])


def held(program: Program, sizes: Sizes) -> list[Held]:
    """What each rank of a complete program holds as it runs."""
    index, plan = Index(program), program.plan
    weights, slots = sizes.of("weights", plan.stages), counts(index)
    version, versions = sizes.of("version", plan.stages), peak_versions(program)
    room = [_slot_sizes(index, kind, sizes) for kind in BOUNDARY]
    kept = {kind: _kept(index, kind, sizes) for kind in KINDS[len(BOUNDARY) :]}
    # What goes at the end of an instruction goes before what comes there.
    comes = np.concatenate([k.bytes > 0 for k in kept.values()])
    order = np.lexsort((comes, np.concatenate([k.when for k in kept.values()])))
    at = np.concatenate([k.at for k in kept.values()])[order]
    starts = np.concatenate([k.when % 2 == 0 for k in kept.values()])[order]
    own = np.repeat(range(len(kept)), [len(k.at) for k in kept.values()])[order]
    number = np.concatenate([k.number for k in kept.values()])[order]
    change = np.concatenate([k.bytes for k in kept.values()])[order]
    first = np.searchsorted(at, program.offsets)
    ranks = []
    for rank, stages in enumerate(plan.stages_of):
        here = slice(first[rank], first[rank + 1])
        fixed = {"weights": (len(stages), float(weights[list(stages)].sum()))}
        if plan.updates > 1:
            copies = int(versions[rank])
            size = copies * float(version[list(stages)].sum())
            fixed["versions"] = (copies * len(stages), size)
        for kind, count, each in zip(BOUNDARY, slots[rank].tolist(), room, strict=False):
            fixed[kind.name.lower()] = (count, count * float(each[rank]))
        curves = {}
        for k, kind in enumerate(kept):
            mine = own[here] == k
            sums = np.cumsum(number[here] * mine), np.cumsum(change[here] * mine)
            curves[kind.name.lower()] = (np.append(0, sums[0]), np.append(0.0, sums[1]))
        index_in = np.append(0, at[here] - program.offsets[rank])
        ranks.append(Held(fixed, index_in, np.append(True, starts[here]), curves))
    return ranks


class _Kept(NamedTuple):
    """Changes of what compute keeps: positions, when along the Streams, number and bytes."""

    at: NDArray[np.int64]
    when: NDArray[np.int64]
    number: NDArray[np.int64]
    bytes: NDArray[np.float64]


def _kept(index: Index, kind: Token, sizes: Sizes) -> _Kept:
    fill, freed, _, _ = uses(index, kind)
    stage, stages = index.stage[fill], index.program.plan.stages
    size = sizes.of(kind.name.lower(), stages)[stage]
    group, one = groups(index).astype(np.int64), np.ones(len(fill), np.int64)
    changes = [(fill, 2 * group[fill], one, size), (freed, 2 * group[freed] + 1, -one, -size)]
    if kind is Token.TAPE:  # while it is made, it counts as what it adds to what was saved
        new = (sizes.of("both", stages) - sizes.of("saved", stages))[stage]
        made = fill, 2 * group[fill] + 1, 0 * one, size - new
        changes[:1] = [(fill, 2 * group[fill], one, new), made]
    return _Kept(*map(np.concatenate, zip(*changes, strict=True)))


def _slot_sizes(index: Index, kind: Token, sizes: Sizes) -> NDArray[np.float64]:
    """Bytes of a slot of each rank: the most that a value of that kind takes there."""
    name = "activation" if kind in (Token.ACT_IN, Token.ACT_OUT) else "gradient"
    edge = 1 if kind in (Token.ACT_IN, Token.GRAD_OUT) else 0  # what the stage before puts out
    own = uses(index, kind)
    size = sizes.of(name, index.program.plan.stages)
    return own.most(size[index.stage[own.fill].astype(np.intp) - edge])


def fit(program: Program, sizes: Sizes, limit: float) -> Program:
    """Return a complete program if no rank ever holds more than `limit` bytes.

    Raises MemoryLimitError that says which rank does, when, and what fills it.
    """
    for rank, own in enumerate(held(program, sizes)):
        most = int(own.bytes.argmax())
        if own.bytes[most] <= limit:
            continue
        at = int(own.at[most])
        instr = program.streams[rank][at]
        new = ", and its own tape is what it adds to what was saved"
        raise MemoryLimitError(
            program=program.name,
            limit=limit,
            needs=float(own.bytes[most]),
            holds=own.table(most),
            site=Site(rank, at, instr, "while it runs" + new * (instr.op is Opcode.BackwardInput)),
        )
    return program
