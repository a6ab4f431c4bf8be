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
    SLOT_KINDS,
    compute_form_sizes,
    compute_full_sizes,
    count_send_slots,
    count_slots,
    group_by_form,
    is_sent,
    number_groups,
)
from schedir.analysis.memory.value_lifetimes import (
    ValueLifetimes,
    compute_moved_sizes,
    compute_value_lifetimes,
)
from schedir.errors import InstructionSite, MemoryLimitError, UsageError
from schedir.ir.cost.sizes import STATIC_SIZES, Sizes, add_tolerance
from schedir.ir.cost.zero_states import (
    SHARDED_LABELS,
    UNSHARDED_LABELS,
    ModelStates,
    is_sharded,
    zero_model_states,
)
from schedir.ir.dataflow import Dataflow
from schedir.ir.instruction_index import InstructionIndex, Positions
from schedir.ir.isa.instructions import (
    BOUNDARY_VALUES,
    COMPUTE_OPS,
    INSTRUCTIONS,
    NON_BOUNDARY_VALUES,
    OPTIMIZER_STEP_OPS,
    SEND_OPS,
    SLOT_VALUES,
    TIERS,
    VALUES,
    Lane,
    Scope,
    Value,
    find_consumers,
)
from schedir.ir.program import ADDRESS_MASK, HOST_SLOT_VALUES, UNSHARED_SLOTS, Program, Stream

# ---------------------------------------------------------------- values that move between tiers

# A value that moves between tiers holds a slot of each tier, however long the move takes.


Curve = tuple[NDArray[np.int64], NDArray[np.float64]]  # numbers and bytes
HOST_SLOTS: Final = {
    kind: name for name, kind in HOST_SLOT_VALUES.items()
}  # the host's slots, by kind


class OffloadSlots(NamedTuple):
    """How many slots each rank has for what is moved of a kind, and the bytes of the largest and of
    the smallest."""

    slots: NDArray[np.int64]
    max_bytes: NDArray[np.float64]
    min_bytes: NDArray[np.float64]

    @classmethod
    def from_program(
        cls, program: Program, kind: Value, sizes: Sizes, tier: str
    ) -> OffloadSlots | None:
        """What a program says of a kind on a tier; None where it says no number."""
        if not program.slots:
            return None
        if tier == TIERS[0] and kind in SLOT_VALUES and VALUES[kind].scope is Scope.MICROBATCH:
            said = np.array([slots[SLOT_VALUES.index(kind)] for slots in program.slots])
            slots = count_slots(program)[:, SLOT_KINDS.index(kind)]
        elif tier == "host" and kind in HOST_SLOTS:
            said = slots = np.array([getattr(slots, HOST_SLOTS[kind]) for slots in program.slots])
        else:
            return None
        if (said == UNSHARED_SLOTS).any():
            return None
        return cls(slots, *compute_moved_sizes(program, kind, sizes, TIERS.index(tier)))

    def bound_usage(self, rank: int, resident: Curve, moved: Curve) -> Curve:
        """Both together, of a rank: what stays has slots, and of what is moved there is no more
        than finds one, wherever the rest is."""
        there = np.minimum(moved[0], np.maximum(self.slots[rank] - resident[0], 0))
        size = np.minimum(
            moved[1] - (moved[0] - there) * self.min_bytes[rank], there * self.max_bytes[rank]
        )
        return resident[0] + there, resident[1] + size


# What a microbatch is held by: what compute keeps of it for later compute.  A change in place is
# neither a fill nor an end.
_IN_FLIGHT_VALUES: Final = {
    token for token in NON_BOUNDARY_VALUES
    if VALUES[token].scope is Scope.MICROBATCH
    and all(
        r.lane is Lane.COMPUTE
        for r in INSTRUCTIONS if token in {*r.gives} - {*r.needs} | {*r.frees}
    )
}  # fmt: skip
_IN_FLIGHT_CHANGE: Final = np.array(
    [
        len(_IN_FLIGHT_VALUES & {*r.gives} - {*r.needs})
        - len(_IN_FLIGHT_VALUES & {*r.frees} - {*r.gives})
        for r in INSTRUCTIONS
    ]
)
_USES_WEIGHTS: Final = tuple(dict.fromkeys((*COMPUTE_OPS, *find_consumers(Value.PARAMS))))
_MICROBATCH_OPS: Final = tuple(
    op for op in _USES_WEIGHTS if INSTRUCTIONS[op].scope is Scope.MICROBATCH
)
_SENT_VALUES: Final = tuple(INSTRUCTIONS[op].needs[0] for op in SEND_OPS)
_HAS_SEVERAL_VALUES: Final = (
    sum(VALUES[token].converted_from is None for token in _IN_FLIGHT_VALUES) > 1
)


def count_in_flight(
    stream: Stream, frozen_stages: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the number of (stage, mb) alive changes in a Stream, and to what.

    Of the first `frozen_stages` stages nothing is kept.
    """
    change = _IN_FLIGHT_CHANGE[stream.op] * (stream.stage >= frozen_stages)
    at = np.flatnonzero(change)
    if (
        _HAS_SEVERAL_VALUES
    ):  # values hold one (stage, mb), which begins with the first and ends with the last
        address = stream.words[at] & ADDRESS_MASK
        order = np.argsort(address, kind="stable")
        each, address = change[at][order], address[order]
        values = np.cumsum(each)
        first = np.searchsorted(address, address)
        values -= (values - each)[first]
        change[at[order]] = (values > 0).astype(np.int64) - (values > each)
        at = np.flatnonzero(change)
    return at, np.cumsum(change[at])


def count_peak_versions(program: Program) -> NDArray[np.int64]:
    """Per rank, the most versions of its weights that are of use at once, the newest included.

    One for a program of one update.  An old version is of use until the last instruction that
    computes with it, or reads it.
    """
    shape = program.shape
    peaks = np.ones(shape.ranks, np.int64)
    for rank, stream in enumerate(program.streams if shape.optimizer_steps > 1 else ()):
        steps = np.flatnonzero(np.isin(stream.op, OPTIMIZER_STEP_OPS))
        at = np.flatnonzero(np.isin(stream.op, _USES_WEIGHTS) & _is_trained(program, stream))
        counted = np.isin(
            stream.op[at], _MICROBATCH_OPS
        )  # what is once in an update, uses its weights
        version = np.minimum(stream.mb[at], shape.optimizer_steps)
        version[counted] = shape.weight_version(stream.stage[at][counted], stream.mb[at][counted])
        last = np.full(shape.optimizer_steps + 1, -1)
        np.maximum.at(last, version, at)
        old = [int((last[: k + 1] > step).sum()) for k, step in enumerate(steps.tolist())]
        peaks[rank] = 1 + max(old, default=0)
    return peaks


def _is_trained(program: Program, stream: Stream) -> NDArray[np.bool_]:
    """Whether each instruction is of weights that steps change: not of a frozen stage's."""
    of_rank = np.array([row.scope is Scope.RANK for row in INSTRUCTIONS])[stream.op]
    return of_rank | (stream.stage >= program.frozen_stages)


def peak_in_flight(
    program: Program, stage_weights: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Per rank, the most (stage, mb) alive at once; exact, since a rank's compute is in order.
    Of a stage with a `stage_weights` each counts as often.

    A program that does not train keeps nothing for a backward.
    """
    peaks = np.zeros(program.shape.ranks, np.int64)
    for rank, stream in enumerate(program.streams if program.has_backward else ()):
        at, alive = count_in_flight(stream, program.frozen_stages)
        if stage_weights is not None:
            alive = np.cumsum(np.diff(alive, prepend=0) * stage_weights[stream.stage[at]])
        peaks[rank] = alive.max(initial=0)
    return peaks


# ---------------------------------------------------------------- in bytes

_MOVED_SUFFIX: Final = ", moved"  # of a kind what is elsewhere meanwhile, until that is bounded
_HANDED_OVER_NAME: Final = (
    "handed_over"  # what compute leaves to compute on its rank, that no slot has
)


class Footprint(NamedTuple):
    """What one rank holds.

    `static_memory` has the number and the bytes, together, of what is there all the time, by name.
    `positions` are the indices in the Stream at which what compute holds changes, at their start
    where
    `is_at_start`, else at their end; `dynamic_memory` has the number and the bytes from then on, by
    name.  The first entry is the beginning.
    """

    static_memory: dict[str, tuple[int, float]]
    positions: NDArray[np.int64]
    is_at_start: NDArray[np.bool_]
    dynamic_memory: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]

    @property
    def total_bytes(self) -> NDArray[np.float64]:
        """All that is held from each change on."""
        always = sum(size for _, size in self.static_memory.values())
        return np.asarray(always + sum(size for _, size in self.dynamic_memory.values()), float)

    def list_values(self, change: int) -> list[tuple[str, int, float]]:
        """What is held from a change on: names, numbers and bytes, most bytes first."""
        now = {
            name: (int(n[change]), float(b[change])) for name, (n, b) in self.dynamic_memory.items()
        }
        rows = [(name, n, size) for name, (n, size) in (self.static_memory | now).items() if size]
        return sorted(rows, key=lambda row: -row[2])

    def order_by_time(self, times: NDArray[np.float64]) -> Footprint:
        """The same, by when each change comes; what comes and goes at one moment counts as one.

        So what goes at a moment leaves room for what comes then, and what is there for no time at
        all is not held.
        """
        order = np.argsort(times, kind="stable")
        last = np.append(times[order][1:] > times[order][:-1], True)
        kept = {}
        for name, (number, size) in self.dynamic_memory.items():
            changes = np.diff(number, prepend=0)[order], np.diff(size, prepend=0.0)[order]
            kept[name] = np.cumsum(changes[0])[last], np.cumsum(changes[1])[last]
        order = order[last]
        return Footprint(self.static_memory, self.positions[order], self.is_at_start[order], kept)


def compute_static_memory(
    program: Program, sizes: Sizes, tier: str = "device"
) -> dict[str, NDArray[np.float64]]:
    """Bytes per rank of what its stages hold all the time on one of TIERS, by the names of Sizes
    that tell it.

    A value that lies on a tier from the start has its room there all the time, wherever it is.
    """
    shape, zero = program.shape, program.zero
    lies = {row.size: program.initial_tier(row.value) for row in VALUES if row.initial_tier}
    lies = {size: tier for size, tier in lies.items() if tier != TIERS[0]}
    if lies and np.any(np.array(sizes.model_states or 0)):
        raise UsageError(
            f"{' and '.join(lies)} of a stage is on the {' and '.join(lies.values())}, and "
            "model_states is one number for all that a stage has all the time",
            hint=f"{', '.join(f'{name}=' for name in STATIC_SIZES)} in place of model_states=",
            fields=["model_states", "optimizer_placement"],
        )
    if zero and np.any(np.array(sizes.model_states or 0)):
        raise UsageError(
            f"zero is {zero}, and model_states is one number for all that a stage has all the "
            "time, of which replicas share a part only",
            hint=f"{', '.join(f'{name}=' for name in STATIC_SIZES)} in place of model_states=",
            fields=["model_states", "zero"],
        )
    each = {name: sizes.for_stages(name, shape.stages) for name in sizes.static_sizes}
    params, grads, optimizer = (
        sizes.for_stages(name, shape.stages) for name in ModelStates._fields
    )
    parts = zero_model_states(params, grads, optimizer, zero, program.dp)
    for name, size in parts._asdict().items():
        if name in each and is_sharded(name, zero):
            each[SHARDED_LABELS[name]] = np.where(
                np.arange(shape.stages) < program.frozen_stages, 0.0, size
            )
            each[name][program.frozen_stages :] = 0.0
    for name in sizes.static_sizes:
        if lies.get(name, TIERS[0]) != tier:
            each.pop(name, None)
            each.pop(SHARDED_LABELS.get(name, name), None)
    trained, parts_of = np.arange(shape.stages) >= program.frozen_stages, 1
    if is_sharded("optimizer", zero):
        parts_of = program.dp
    for row in VALUES:
        if (
            row.reserved_memory is not None
            and row.reserved_memory[0] == tier
            and program.uses_value(row.value)
        ):
            each[row.reserved_memory[1]] = (
                sizes.for_stages(row.reserved_memory[1], shape.stages) * trained / parts_of
            )
    return {
        name: np.array([size[list(own)].sum() for own in shape.stages_on_rank])
        for name, size in each.items()
        if size.any() or not is_sharded(name, zero)
    }


def find_used_tiers(program: Program) -> tuple[str, ...]:
    """Where a program holds anything: on the device, where its instructions move something, and
    where something lies.

    >>> from schedir import PipelineShape, compile, schedules
    >>> find_used_tiers(compile(schedules.one_f_one_b, PipelineShape(2, 4)))
    ('device',)
    """
    changes = [change for op in program.used_opcodes for change in INSTRUCTIONS[op].changes]
    there = {state for change in changes for state in (change.before, change.after)}
    has = [row for row in VALUES if program.uses_value(row.value)]
    there |= {TIERS[0], *(program.initial_tier(row.value) for row in VALUES)}
    there |= {row.reserved_memory[0] for row in has if row.reserved_memory}
    return tuple(tier for tier in TIERS if tier in there)


def compute_footprints(
    program: Program, sizes: Sizes, tier: str = "device", *, worst_case: bool = False
) -> list[Footprint]:
    """What each rank of a complete program holds as it runs, on one of TIERS.

    Changes come in the order of the Stream, as hosts issue them: what another lane fills is there
    from its start, and what another lane frees until somebody has waited for that.  That is the
    order of time where compute makes the changes.  With `worst_case` nothing is ever more, whatever
    takes how long: what another lane fills counts as soon as its slot is free, and what another
    lane moves off the device until it is back, or freed.
    """
    shape = program.shape
    always = compute_static_memory(program, sizes, tier)
    changed = sum(
        (sizes.for_stages(name, shape.stages) for name in sizes.static_sizes if name != "buffers"),
        np.zeros(shape.stages),
    )
    version, versions = sizes.for_stages("version", shape.stages), count_peak_versions(program)
    static = [kind for kind in BOUNDARY_VALUES if program.takes_memory(kind)]
    room = {kind: _compute_buffer_memory(program, kind, sizes) for kind in static}
    kept, lent = dict[str, ValueLifetimes](), dict[str, OffloadSlots]()
    for kind in SLOT_KINDS:
        if not program.takes_memory(kind) or (kind in static and tier == TIERS[0]):
            continue
        if program.initial_tier(kind) == tier:  # which is in `always`
            continue
        kept_on = partial(
            compute_value_lifetimes, program, kind, sizes, TIERS.index(tier), worst_case
        )
        if (
            worst_case
            and (slots := OffloadSlots.from_program(program, kind, sizes, tier)) is not None
        ):
            lent[name := _get_memory_name(kind)] = slots
            kept[name], kept[name + _MOVED_SUFFIX] = kept_on(False), kept_on(True)
        else:
            kept[_get_memory_name(kind)] = kept_on()
    if tier == TIERS[0] and len((handed := _find_handover_memory(program, sizes)).positions):
        kept[_HANDED_OVER_NAME] = handed
    # What goes at the end of an instruction goes before what comes there.
    comes = np.concatenate([k.byte_change > 0 for k in kept.values()])
    order = np.lexsort((comes, np.concatenate([k.order_key for k in kept.values()])))
    at = np.concatenate([k.positions for k in kept.values()])[order]
    starts = np.concatenate([k.order_key % 2 == 0 for k in kept.values()])[order]
    own = np.repeat(range(len(kept)), [len(k.positions) for k in kept.values()])[order]
    number = np.concatenate([k.count_change for k in kept.values()])[order]
    change = np.concatenate([k.byte_change for k in kept.values()])[order]
    first = np.searchsorted(at, program.offsets)
    ranks = []
    for rank, stages in enumerate(shape.stages_on_rank):
        here = slice(first[rank], first[rank + 1])
        fixed = {name: (len(stages), float(each[rank])) for name, each in always.items()}
        if tier == TIERS[0]:
            trained = [s for s in stages if s >= program.frozen_stages]
            if (
                program.norm_check == "after_step" and program.has_backward
            ):  # to make an update again
                fixed["copies"] = (len(trained), float(changed[trained].sum()))
            if shape.optimizer_steps > 1:
                copies = int(versions[rank])
                size = copies * float(version[trained].sum())
                fixed["versions"] = (copies * len(trained), size)
            for kind, (number_of, bytes_of) in room.items():
                fixed[_get_memory_name(kind)] = (int(number_of[rank]), float(bytes_of[rank]))
        curves = {}
        for k, name in enumerate(kept):
            mine = own[here] == k
            sums = np.cumsum(number[here] * mine), np.cumsum(change[here] * mine)
            curves[name] = (np.append(0, sums[0]), np.append(0.0, sums[1]))
        for name, slots in lent.items():
            curves[name] = slots.bound_usage(rank, curves[name], curves.pop(name + _MOVED_SUFFIX))
        index_in = np.append(0, at[here] - program.offsets[rank])
        ranks.append(Footprint(fixed, index_in, np.append(True, starts[here]), curves))
    return ranks


def _get_memory_name(kind: Value) -> str:
    """What the memory of a kind's values is called."""
    return UNSHARDED_LABELS.get(VALUES[kind].size, kind.name.lower())


def _compute_value_sizes(program: Program, kind: Value, sizes: Sizes) -> NDArray[np.float64]:
    """Bytes of each value of a kind, whole."""
    return compute_full_sizes(
        program, kind, sizes, Dataflow.from_program(program).find_lifetimes(kind).filled_at
    )


def _compute_buffer_memory(
    program: Program, kind: Value, sizes: Sizes
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Of each rank how many slots of a kind have memory, and how many bytes together: each the
    most that a value takes there."""
    lives, each = (
        Dataflow.from_program(program).find_lifetimes(kind),
        _compute_value_sizes(program, kind, sizes),
    )
    if kind not in _SENT_VALUES:
        slots = count_slots(program)[:, SLOT_KINDS.index(kind)]
        return slots, slots * lives.max_per_rank(each)
    sent, number = is_sent(program, kind), np.zeros(program.shape.ranks, np.int64)
    size = np.zeros(program.shape.ranks)
    for changed, slots in count_send_slots(program, kind).items():
        each = compute_form_sizes(program, kind, changed, sizes, lives.filled_at)
        number, size = number + slots, size + slots * lives.max_per_rank(np.where(sent, each, 0.0))
    return number, size


def _find_handover_memory(program: Program, sizes: Sizes) -> ValueLifetimes:
    """Return the memory of outputs that are not sent as they are.

    An output for a stage on the same rank is held until that stage has used it. An output that
    changes its form is held in each form but the last until the next change.
    """
    index = InstructionIndex.from_program(program)
    group, found = number_groups(index).astype(np.int64), []

    def add(begin: Positions, end: Positions, each: NDArray[np.float64]) -> None:
        one = np.ones(len(begin), np.int64)
        found.append((begin, 2 * group[begin], one, each))
        found.append((end, 2 * group[end] + 1, -one, -each))

    for kind in filter(program.uses_value, _SENT_VALUES):
        lives, sent = Dataflow.from_program(program).find_lifetimes(kind), is_sent(program, kind)
        here = lives.filled_at[~sent]
        add(here, lives.freed_at[~sent], compute_full_sizes(program, kind, sizes, here))
        for changed, some in group_by_form(program, kind, lives.filled_at):
            begin = lives.filled_at[some & sent]
            for k, op in enumerate(changed):
                end = index.find_positions(op, index.key[begin])
                add(begin, end, compute_form_sizes(program, kind, changed[:k], sizes, begin))
                begin = end
    if not found:
        none = np.empty(0, np.int64)
        return ValueLifetimes(none, none, none, np.empty(0))
    return ValueLifetimes(*map(np.concatenate, zip(*found, strict=True)))


def require_memory_limit(
    program: Program, sizes: Sizes, limit: float, tier: str = "device"
) -> Program:
    """Return a complete program if no rank ever holds more than `limit_bytes` bytes on one of
    TIERS.

    Raises MemoryLimitError that says which rank does, when, and what fills it.
    """
    for rank, own in enumerate(compute_footprints(program, sizes, tier, worst_case=True)):
        most = int(own.total_bytes.argmax())
        if own.total_bytes[most] <= add_tolerance(limit):
            continue
        at = int(own.positions[most])
        instr = program.streams[rank][at]
        tape = any(VALUES[token].converted_from for token in INSTRUCTIONS[instr.op].gives)
        new = ", and makes deferred weight gradients" * tape
        raise MemoryLimitError(
            program=program.name,
            limit_bytes=limit,
            required_bytes=float(own.total_bytes[most]),
            live_values=own.list_values(most),
            site=InstructionSite(rank, at, instr, "while it runs" + new),
            tier=tier,
        )
    return program
