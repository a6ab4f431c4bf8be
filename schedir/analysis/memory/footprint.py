"""Compute the bytes that each rank holds from its Stream and the Sizes.

Without sizes what counts is (stage, mb) pairs in flight: alive from their Forward until nothing
that it saved is held any more: until Backward, or until BackwardWeight when the backward is
split.

With sizes it is bytes.  What is received and what is sent lives in static slots: they are there
all the time, and how many there are is their memory, whichever order runs; each has room for a
value in the form in which it is sent.  A transport that sends from wherever a value is holds less,
while fewer are on their way.  What compute keeps for later compute (SAVED, TAPE), and what it hands
over on its rank, to a neighbouring stage or to a change of form, is held from the start of the
instruction that gives it to the end of the one that frees or changes it; compute is in order, so
that is exact, too.  A BackwardInput, which makes a tape of what was saved, holds `Sizes.both`:
until its end all that was saved counts as such, and as tape only what comes on top of it.
"""

from __future__ import annotations

from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.memory.buffer_slots import (
    KINDS,
    by_form,
    counts,
    form_sizes,
    groups,
    is_sent,
    sent_from,
    whole_sizes,
)
from schedir.analysis.memory.value_lifetimes import ValueLifetimes, kept_of, moved_sizes
from schedir.errors import InstructionSite, MemoryLimitError, UsageError
from schedir.ir.cost.sizes import AT_REST, Sizes, ample
from schedir.ir.cost.zero_states import IN_PARTS, WHOLE, ModelStates, is_cut, zero_model_states
from schedir.ir.dataflow import Dataflow
from schedir.ir.instruction_index import InstructionIndex, Positions
from schedir.ir.isa.instructions import (
    BOUNDARY,
    COMPUTE,
    KEPT,
    ROWS,
    SENDS,
    SLOTTED,
    STEPS,
    TIERS,
    VALUES,
    Lane,
    Scope,
    Value,
    consumers,
)
from schedir.ir.program import ADDRESS, ON_HOST, OWN, Program, Stream

# ---------------------------------------------------------------- values that move between tiers

# A value that moves between tiers holds a slot of each tier, however long the move takes.


Curve = tuple[NDArray[np.int64], NDArray[np.float64]]  # numbers and bytes
HOST: Final = {kind: name for name, kind in ON_HOST.items()}  # the host's slots, by kind


class OffloadSlots(NamedTuple):
    """How many slots each rank has for what is moved of a kind, and the bytes of the largest and of
    the smallest."""

    slots: NDArray[np.int64]
    most: NDArray[np.float64]
    least: NDArray[np.float64]

    @classmethod
    def of(cls, program: Program, kind: Value, sizes: Sizes, tier: str) -> OffloadSlots | None:
        """What a program says of a kind on a tier; None where it says no number."""
        if not program.slots:
            return None
        if tier == TIERS[0] and kind in SLOTTED and VALUES[kind].per is Scope.MICROBATCH:
            said = np.array([slots[SLOTTED.index(kind)] for slots in program.slots])
            slots = counts(program)[:, KINDS.index(kind)]
        elif tier == "host" and kind in HOST:
            said = slots = np.array([getattr(slots, HOST[kind]) for slots in program.slots])
        else:
            return None
        if (said == OWN).any():
            return None
        return cls(slots, *moved_sizes(program, kind, sizes, TIERS.index(tier)))

    def bound(self, rank: int, stays: Curve, moved: Curve) -> Curve:
        """Both together, of a rank: what stays has slots, and of what is moved there is no more
        than finds one, wherever the rest is."""
        there = np.minimum(moved[0], np.maximum(self.slots[rank] - stays[0], 0))
        size = np.minimum(moved[1] - (moved[0] - there) * self.least[rank], there * self.most[rank])
        return stays[0] + there, stays[1] + size


# What a microbatch is held by: what compute keeps of it for later compute.  A change in place is
# neither a fill nor an end.
_HELD: Final = {
    token for token in KEPT
    if VALUES[token].per is Scope.MICROBATCH
    and all(r.lane is Lane.COMPUTE for r in ROWS if token in {*r.gives} - {*r.needs} | {*r.frees})
}  # fmt: skip
_CHANGE: Final = np.array(
    [len(_HELD & {*r.gives} - {*r.needs}) - len(_HELD & {*r.frees} - {*r.gives}) for r in ROWS]
)
_USES_WEIGHTS: Final = tuple(dict.fromkeys((*COMPUTE, *consumers(Value.PARAMS))))
_COUNTED: Final = tuple(op for op in _USES_WEIGHTS if ROWS[op].per is Scope.MICROBATCH)
_PUT_OUT: Final = tuple(ROWS[op].needs[0] for op in SENDS)
_SEVERAL: Final = sum(VALUES[token].converted_from is None for token in _HELD) > 1


def in_flight(
    stream: Stream, frozen_stages: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the number of (stage, mb) alive changes in a Stream, and to what.

    Of the first `frozen_stages` stages nothing is kept.
    """
    change = _CHANGE[stream.op] * (stream.stage >= frozen_stages)
    at = np.flatnonzero(change)
    if _SEVERAL:  # values hold one (stage, mb), which begins with the first and ends with the last
        address = stream.words[at] & ADDRESS
        order = np.argsort(address, kind="stable")
        each, address = change[at][order], address[order]
        values = np.cumsum(each)
        first = np.searchsorted(address, address)
        values -= (values - each)[first]
        change[at[order]] = (values > 0).astype(np.int64) - (values > each)
        at = np.flatnonzero(change)
    return at, np.cumsum(change[at])


def peak_versions(program: Program) -> NDArray[np.int64]:
    """Per rank, the most versions of its weights that are of use at once, the newest included.

    One for a program of one update.  An old version is of use until the last instruction that
    computes with it, or reads it.
    """
    shape = program.shape
    peaks = np.ones(shape.ranks, np.int64)
    for rank, stream in enumerate(program.streams if shape.optimizer_steps > 1 else ()):
        steps = np.flatnonzero(np.isin(stream.op, STEPS))
        at = np.flatnonzero(np.isin(stream.op, _USES_WEIGHTS) & _changes(program, stream))
        counted = np.isin(stream.op[at], _COUNTED)  # what is once in an update, uses its weights
        version = np.minimum(stream.mb[at], shape.optimizer_steps)
        version[counted] = shape.version(stream.stage[at][counted], stream.mb[at][counted])
        last = np.full(shape.optimizer_steps + 1, -1)
        np.maximum.at(last, version, at)
        old = [int((last[: k + 1] > step).sum()) for k, step in enumerate(steps.tolist())]
        peaks[rank] = 1 + max(old, default=0)
    return peaks


def _changes(program: Program, stream: Stream) -> NDArray[np.bool_]:
    """Whether each instruction is of weights that steps change: not of a frozen stage's."""
    of_rank = np.array([row.per is Scope.RANK for row in ROWS])[stream.op]
    return of_rank | (stream.stage >= program.frozen_stages)


def peak_in_flight(program: Program, weight: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Per rank, the most (stage, mb) alive at once; exact, since a rank's compute is in order.
    Of a stage with a `weight` each counts as often.

    A program that does not train keeps nothing for a backward.
    """
    peaks = np.zeros(program.shape.ranks, np.int64)
    for rank, stream in enumerate(program.streams if program.trains else ()):
        at, alive = in_flight(stream, program.frozen_stages)
        if weight is not None:
            alive = np.cumsum(np.diff(alive, prepend=0) * weight[stream.stage[at]])
        peaks[rank] = alive.max(initial=0)
    return peaks


# ---------------------------------------------------------------- in bytes

_MOVED: Final = ", moved"  # of a kind what is elsewhere meanwhile, until that is bounded
_HANDED: Final = "handed_over"  # what compute leaves to compute on its rank, that no slot has


class Footprint(NamedTuple):
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

    def in_time(self, when: NDArray[np.float64]) -> Footprint:
        """The same, by when each change comes; what comes and goes at one moment counts as one.

        So what goes at a moment leaves room for what comes then, and what is there for no time at
        all is not held.
        """
        order = np.argsort(when, kind="stable")
        last = np.append(when[order][1:] > when[order][:-1], True)
        kept = {}
        for name, (number, size) in self.kept.items():
            changes = np.diff(number, prepend=0)[order], np.diff(size, prepend=0.0)[order]
            kept[name] = np.cumsum(changes[0])[last], np.cumsum(changes[1])[last]
        order = order[last]
        return Footprint(self.fixed, self.at[order], self.starts[order], kept)


def at_rest(program: Program, sizes: Sizes, tier: str = "device") -> dict[str, NDArray[np.float64]]:
    """Bytes per rank of what its stages hold all the time on one of TIERS, by the names of Sizes
    that tell it.

    A value that lies on a tier from the start has its room there all the time, wherever it is.
    """
    shape, zero = program.shape, program.zero
    lies = {row.size: program.lies(row.value) for row in VALUES if row.initial_tier}
    lies = {size: tier for size, tier in lies.items() if tier != TIERS[0]}
    if lies and np.any(np.array(sizes.model_states or 0)):
        raise UsageError(
            f"{' and '.join(lies)} of a stage is on the {' and '.join(lies.values())}, and "
            "model_states is one number for all that a stage has all the time",
            hint=f"{', '.join(f'{name}=' for name in AT_REST)} in place of model_states=",
            fields=["model_states", "optimizer_placement"],
        )
    if zero and np.any(np.array(sizes.model_states or 0)):
        raise UsageError(
            f"zero is {zero}, and model_states is one number for all that a stage has all the "
            "time, of which replicas share a part only",
            hint=f"{', '.join(f'{name}=' for name in AT_REST)} in place of model_states=",
            fields=["model_states", "zero"],
        )
    each = {name: sizes.of(name, shape.stages) for name in sizes.at_rest}
    params, grads, optimizer = (sizes.of(name, shape.stages) for name in ModelStates._fields)
    parts = zero_model_states(params, grads, optimizer, zero, program.dp)
    for name, size in parts._asdict().items():
        if name in each and is_cut(name, zero):
            each[IN_PARTS[name]] = np.where(
                np.arange(shape.stages) < program.frozen_stages, 0.0, size
            )
            each[name][program.frozen_stages :] = 0.0
    for name in sizes.at_rest:
        if lies.get(name, TIERS[0]) != tier:
            each.pop(name, None)
            each.pop(IN_PARTS.get(name, name), None)
    trained, parts_of = np.arange(shape.stages) >= program.frozen_stages, 1
    if is_cut("optimizer", zero):
        parts_of = program.dp
    for row in VALUES:
        if row.reserved is not None and row.reserved[0] == tier and program.has(row.value):
            each[row.reserved[1]] = sizes.of(row.reserved[1], shape.stages) * trained / parts_of
    return {
        name: np.array([size[list(own)].sum() for own in shape.stages_of])
        for name, size in each.items()
        if size.any() or not is_cut(name, zero)
    }


def tiers_of(program: Program) -> tuple[str, ...]:
    """Where a program holds anything: on the device, where its instructions move something, and
    where something lies.

    >>> from schedir import PipelineShape, compile, schedules
    >>> tiers_of(compile(schedules.one_f_one_b, PipelineShape(2, 4)))
    ('device',)
    """
    changes = [change for op in program.ops for change in ROWS[op].changes]
    there = {state for change in changes for state in (change.before, change.after)}
    has = [row for row in VALUES if program.has(row.value)]
    there |= {TIERS[0], *(program.lies(row.value) for row in VALUES)}
    there |= {row.reserved[0] for row in has if row.reserved}
    return tuple(tier for tier in TIERS if tier in there)


def held(
    program: Program, sizes: Sizes, tier: str = "device", *, late: bool = False
) -> list[Footprint]:
    """What each rank of a complete program holds as it runs, on one of TIERS.

    Changes come in the order of the Stream, as hosts issue them: what another lane fills is there
    from its start, and what another lane frees until somebody has waited for that.  That is the
    order of time where compute makes the changes.  With `late` nothing is ever more, whatever
    takes how long: what another lane fills counts as soon as its slot is free, and what another
    lane moves off the device until it is back, or freed.
    """
    shape = program.shape
    always = at_rest(program, sizes, tier)
    changed = sum(
        (sizes.of(name, shape.stages) for name in sizes.at_rest if name != "buffers"),
        np.zeros(shape.stages),
    )
    version, versions = sizes.of("version", shape.stages), peak_versions(program)
    static = [kind for kind in BOUNDARY if program.holds(kind)]
    room = {kind: _room(program, kind, sizes) for kind in static}
    kept, lent = dict[str, ValueLifetimes](), dict[str, OffloadSlots]()
    for kind in KINDS:
        if not program.holds(kind) or (kind in static and tier == TIERS[0]):
            continue
        if program.lies(kind) == tier:  # which is in `always`
            continue
        kept_on = partial(kept_of, program, kind, sizes, TIERS.index(tier), late)
        if late and (slots := OffloadSlots.of(program, kind, sizes, tier)) is not None:
            lent[name := _name(kind)] = slots
            kept[name], kept[name + _MOVED] = kept_on(False), kept_on(True)
        else:
            kept[_name(kind)] = kept_on()
    if tier == TIERS[0] and len((handed := _handed_over(program, sizes)).at):
        kept[_HANDED] = handed
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
    for rank, stages in enumerate(shape.stages_of):
        here = slice(first[rank], first[rank + 1])
        fixed = {name: (len(stages), float(each[rank])) for name, each in always.items()}
        if tier == TIERS[0]:
            trained = [s for s in stages if s >= program.frozen_stages]
            if program.norm_check == "after_step" and program.trains:  # to make an update again
                fixed["copies"] = (len(trained), float(changed[trained].sum()))
            if shape.optimizer_steps > 1:
                copies = int(versions[rank])
                size = copies * float(version[trained].sum())
                fixed["versions"] = (copies * len(trained), size)
            for kind, (number_of, bytes_of) in room.items():
                fixed[_name(kind)] = (int(number_of[rank]), float(bytes_of[rank]))
        curves = {}
        for k, name in enumerate(kept):
            mine = own[here] == k
            sums = np.cumsum(number[here] * mine), np.cumsum(change[here] * mine)
            curves[name] = (np.append(0, sums[0]), np.append(0.0, sums[1]))
        for name, slots in lent.items():
            curves[name] = slots.bound(rank, curves[name], curves.pop(name + _MOVED))
        index_in = np.append(0, at[here] - program.offsets[rank])
        ranks.append(Footprint(fixed, index_in, np.append(True, starts[here]), curves))
    return ranks


def _name(kind: Value) -> str:
    """What the memory of a kind's values is called."""
    return WHOLE.get(VALUES[kind].size, kind.name.lower())


def _sizes_of(program: Program, kind: Value, sizes: Sizes) -> NDArray[np.float64]:
    """Bytes of each value of a kind, whole."""
    return whole_sizes(program, kind, sizes, Dataflow.of(program).lives(kind).fill)


def _room(
    program: Program, kind: Value, sizes: Sizes
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Of each rank how many slots of a kind have memory, and how many bytes together: each the
    most that a value takes there."""
    lives, each = Dataflow.of(program).lives(kind), _sizes_of(program, kind, sizes)
    if kind not in _PUT_OUT:
        slots = counts(program)[:, KINDS.index(kind)]
        return slots, slots * lives.most(each)
    sent, number = is_sent(program, kind), np.zeros(program.shape.ranks, np.int64)
    size = np.zeros(program.shape.ranks)
    for changed, slots in sent_from(program, kind).items():
        each = form_sizes(program, kind, changed, sizes, lives.fill)
        number, size = number + slots, size + slots * lives.most(np.where(sent, each, 0.0))
    return number, size


def _handed_over(program: Program, sizes: Sizes) -> ValueLifetimes:
    """Return the memory of outputs that are not sent as they are.

    An output for a stage on the same rank is held until that stage has used it. An output that
    changes its form is held in each form but the last until the next change.
    """
    index = InstructionIndex.of(program)
    group, found = groups(index).astype(np.int64), []

    def add(begin: Positions, end: Positions, each: NDArray[np.float64]) -> None:
        one = np.ones(len(begin), np.int64)
        found.append((begin, 2 * group[begin], one, each))
        found.append((end, 2 * group[end] + 1, -one, -each))

    for kind in filter(program.has, _PUT_OUT):
        lives, sent = Dataflow.of(program).lives(kind), is_sent(program, kind)
        here = lives.fill[~sent]
        add(here, lives.freed[~sent], whole_sizes(program, kind, sizes, here))
        for changed, some in by_form(program, kind, lives.fill):
            begin = lives.fill[some & sent]
            for k, op in enumerate(changed):
                end = index.where(op, index.key[begin])
                add(begin, end, form_sizes(program, kind, changed[:k], sizes, begin))
                begin = end
    if not found:
        none = np.empty(0, np.int64)
        return ValueLifetimes(none, none, none, np.empty(0))
    return ValueLifetimes(*map(np.concatenate, zip(*found, strict=True)))


def require_memory_limit(
    program: Program, sizes: Sizes, limit: float, tier: str = "device"
) -> Program:
    """Return a complete program if no rank ever holds more than `limit` bytes on one of TIERS.

    Raises MemoryLimitError that says which rank does, when, and what fills it.
    """
    for rank, own in enumerate(held(program, sizes, tier, late=True)):
        most = int(own.bytes.argmax())
        if own.bytes[most] <= ample(limit):
            continue
        at = int(own.at[most])
        instr = program.streams[rank][at]
        tape = any(VALUES[token].converted_from for token in ROWS[instr.op].gives)
        new = ", and makes deferred weight gradients" * tape
        raise MemoryLimitError(
            program=program.name,
            limit=limit,
            needs=float(own.bytes[most]),
            holds=own.table(most),
            site=InstructionSite(rank, at, instr, "while it runs" + new),
            tier=tier,
        )
    return program
