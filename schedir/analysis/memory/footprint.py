"""Compute the memory of each rank from its Stream and the sizes of values.

Without sizes, memory is a number of (stage, microbatch) pairs in flight. A pair is in flight from
its Forward until the rank no longer needs the values that the Forward saved. The rank needs these
saved values until the end of the Backward, or of the BackwardWeight if the backward is split.

With sizes, memory is in bytes, and has two parts:

- Received and sent values use static slots, which exist during the full step. The memory of the
  slots is their number times the size of a slot. This memory does not depend on the order of the
  instructions. A slot has the size of a value in the form in which the value is sent. A transport
  that sends a value without a copy to a slot may use less memory.
- Values that compute keeps for later compute use memory from the start of the instruction that
  produces them until the end of the instruction that frees or changes them. These values are saved
  activations, deferred weight gradients, outputs for another stage of the same rank, and outputs
  that change form before they are sent. A rank runs its compute in order, so the order of
  these starts and ends is exact.

A BackwardInput converts saved activations to deferred weight gradients. While it runs, the two
together use `Sizes.saved_and_deferred` bytes. Of these bytes, the saved activations have their full
size, and the deferred weight gradients have the rest.
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

# Until a move between two tiers ends, the value uses a slot on each of the two tiers.


Curve = tuple[NDArray[np.int64], NDArray[np.float64]]  # number of values and bytes, over time
HOST_SLOTS: Final = {
    kind: name for name, kind in HOST_SLOT_VALUES.items()
}  # kind of value -> name of its slots on the host


class OffloadSlots(NamedTuple):
    """The slots of each rank for values of one kind that move between tiers.

    Attributes:
        slots: Number of slots of each rank, shape (ranks,).
        max_bytes: Bytes of the largest value on each rank, shape (ranks,).
        min_bytes: Bytes of the smallest value on each rank, shape (ranks,).
    """

    slots: NDArray[np.int64]
    max_bytes: NDArray[np.float64]
    min_bytes: NDArray[np.float64]

    @classmethod
    def from_program(
        cls, program: Program, kind: Value, sizes: Sizes, tier: str
    ) -> OffloadSlots | None:
        """Return the slots that a program specifies for values of a kind on a tier, or None.

        Args:
            program: The program.
            kind: The kind of value.
            sizes: The sizes of values.
            tier: One of `TIERS`.
        """
        if not program.slots:
            return None
        if tier == TIERS[0] and kind in SLOT_VALUES and VALUES[kind].scope is Scope.MICROBATCH:
            slot_counts = np.array([slots[SLOT_VALUES.index(kind)] for slots in program.slots])
            slots = count_slots(program, [kind])[:, 0]
        elif tier == "host" and kind in HOST_SLOTS:
            slot_counts = slots = np.array(
                [getattr(slots, HOST_SLOTS[kind]) for slots in program.slots]
            )
        else:
            return None
        if (slot_counts == UNSHARED_SLOTS).any():
            return None
        return cls(slots, *compute_moved_sizes(program, kind, sizes, TIERS.index(tier)))

    def bound_usage(self, rank: int, resident: Curve, moved: Curve) -> Curve:
        """Return upper bounds of the number and the bytes of a rank's values on the tier.

        Each value that never moves has a slot. Values that move can only use the remaining slots.

        Args:
            rank: The rank.
            resident: Numbers and bytes of the values that never move, over time.
            moved: Numbers and bytes of the values that move, over time.

        Returns:
            The bounds for the values of both curves together, over time.
        """
        count = np.minimum(moved[0], np.maximum(self.slots[rank] - resident[0], 0))
        size = np.minimum(
            moved[1] - (moved[0] - count) * self.min_bytes[rank], count * self.max_bytes[rank]
        )
        return resident[0] + count, resident[1] + size


# A (stage, microbatch) pair is in flight while it has a value of these kinds. Only compute
# instructions produce and free these values. A change in place neither starts nor ends a value.
_IN_FLIGHT_VALUES: Final = {
    kind for kind in NON_BOUNDARY_VALUES
    if VALUES[kind].scope is Scope.MICROBATCH
    and all(
        r.lane is Lane.COMPUTE
        for r in INSTRUCTIONS if kind in {*r.gives} - {*r.needs} | {*r.frees}
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
    sum(VALUES[kind].converted_from is None for kind in _IN_FLIGHT_VALUES) > 1
)


def count_in_flight(
    stream: Stream, frozen_stages: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return when the number of (stage, microbatch) pairs in flight changes along a Stream.

    Args:
        stream: The Stream of a rank.
        frozen_stages: Number of frozen stages. These are the first stages of the pipeline. They
            save no activations.

    Returns:
        The indices in the Stream at which the number of pairs changes, and the number of pairs from
        each index on.
    """
    change = _IN_FLIGHT_CHANGE[stream.op] * (stream.stage >= frozen_stages)
    positions = np.flatnonzero(change)
    if (
        _HAS_SEVERAL_VALUES
    ):  # a pair is in flight from the start of its first value to the end of its last value
        address = stream.words[positions] & ADDRESS_MASK
        order = np.argsort(address, kind="stable")
        sorted_change, address = change[positions][order], address[order]
        values = np.cumsum(sorted_change)
        pair_starts = np.searchsorted(address, address)
        values -= (values - sorted_change)[pair_starts]
        change[positions[order]] = (values > 0).astype(np.int64) - (values > sorted_change)
        positions = np.flatnonzero(change)
    return positions, np.cumsum(change[positions])


def count_peak_versions(program: Program) -> NDArray[np.int64]:
    """Return the largest number of weight versions that each rank needs at the same time.

    The newest version counts, too. A rank needs a version until the last instruction that computes
    with it or reads it. A program with one update has one version.

    Args:
        program: The program.

    Returns:
        Numbers of shape (ranks,).
    """
    shape = program.shape
    peaks = np.ones(shape.ranks, np.int64)
    for rank, stream in enumerate(program.streams if shape.optimizer_steps > 1 else ()):
        steps = np.flatnonzero(np.isin(stream.op, OPTIMIZER_STEP_OPS))
        uses = np.flatnonzero(np.isin(stream.op, _USES_WEIGHTS) & _is_trained(program, stream))
        # An instruction that exists once per update uses the weights of that update.
        is_repeated = np.isin(stream.op[uses], _MICROBATCH_OPS)
        version = np.minimum(stream.mb[uses], shape.optimizer_steps)
        version[is_repeated] = shape.weight_version(
            stream.stage[uses][is_repeated], stream.mb[uses][is_repeated]
        )
        last_uses = np.full(shape.optimizer_steps + 1, -1)
        np.maximum.at(last_uses, version, uses)
        old_counts = [
            int((last_uses[: k + 1] > step).sum()) for k, step in enumerate(steps.tolist())
        ]
        peaks[rank] = 1 + max(old_counts, default=0)
    return peaks


def _is_trained(program: Program, stream: Stream) -> NDArray[np.bool_]:
    """Return a mask that is False for the instructions of frozen stages."""
    is_rank_op = np.array([row.scope is Scope.RANK for row in INSTRUCTIONS])[stream.op]
    return is_rank_op | (stream.stage >= program.frozen_stages)


def peak_in_flight(
    program: Program, stage_weights: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return the largest number of (stage, microbatch) pairs in flight on each rank.

    The number is exact, since a rank's compute is in order. The number is 0 for a program that does
    not train.

    Args:
        program: The program.
        stage_weights: A factor for the pairs of each stage, shape (stages,). By default each pair
            counts once.

    Returns:
        Numbers of shape (ranks,).
    """
    peaks = np.zeros(program.shape.ranks, np.int64)
    for rank, stream in enumerate(program.streams if program.has_backward else ()):
        positions, in_flight = count_in_flight(stream, program.frozen_stages)
        if stage_weights is not None:
            in_flight = np.cumsum(
                np.diff(in_flight, prepend=0) * stage_weights[stream.stage[positions]]
            )
        peaks[rank] = in_flight.max(initial=0)
    return peaks


# ---------------------------------------------------------------- in bytes

_MOVED_SUFFIX: Final = ", moved"  # marks curves of moved values until `bound_usage` merges them
_HANDED_OVER_NAME: Final = (
    "handed_over"  # outputs that use no slot, because a later instruction of the rank takes them
)


class Footprint(NamedTuple):
    """The memory of one rank over time.

    The first entry of each array is for the beginning of the step.

    Attributes:
        static_memory: Memory that is used during the full step: name -> (number of values, their
            bytes).
        positions: Indices in the Stream of the instructions that change the memory.
        is_at_start: True if the change is at the start of the instruction, False if at its end.
        dynamic_memory: Name -> (number of values, their bytes), each as an array with one entry per
            change. The entry is valid from this change to the next one.
    """

    static_memory: dict[str, tuple[int, float]]
    positions: NDArray[np.int64]
    is_at_start: NDArray[np.bool_]
    dynamic_memory: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]

    @property
    def total_bytes(self) -> NDArray[np.float64]:
        """Bytes of all memory from each change on, static memory included."""
        static_bytes = sum(size for _, size in self.static_memory.values())
        dynamic_bytes = sum(size for _, size in self.dynamic_memory.values())
        return np.asarray(static_bytes + dynamic_bytes, float)

    def list_values(self, change: int) -> list[tuple[str, int, float]]:
        """Return the values that are in memory after a change.

        Args:
            change: Index of the change.

        Returns:
            (name, number of values, their bytes), largest bytes first.
        """
        dynamic_values = {
            name: (int(n[change]), float(b[change])) for name, (n, b) in self.dynamic_memory.items()
        }
        values = (self.static_memory | dynamic_values).items()
        rows = [(name, n, size) for name, (n, size) in values if size]
        return sorted(rows, key=lambda row: -row[2])

    def order_by_time(self, times: NDArray[np.float64]) -> Footprint:
        """Return the footprint with its changes in order of time.

        Changes at the same time become one change. So a value that starts at a time can use memory
        that is freed at that time. A value that starts and ends at the same time uses no memory.

        Args:
            times: The time of each change, in the shape of `positions`.
        """
        order = np.argsort(times, kind="stable")
        is_last = np.append(times[order][1:] > times[order][:-1], True)
        dynamic_memory = {}
        for name, (number, size) in self.dynamic_memory.items():
            changes = np.diff(number, prepend=0)[order], np.diff(size, prepend=0.0)[order]
            dynamic_memory[name] = np.cumsum(changes[0])[is_last], np.cumsum(changes[1])[is_last]
        order = order[is_last]
        return Footprint(
            self.static_memory, self.positions[order], self.is_at_start[order], dynamic_memory
        )


def compute_static_memory(
    program: Program, sizes: Sizes, tier: str = "device"
) -> dict[str, NDArray[np.float64]]:
    """Return the bytes that the stages of each rank use on a tier during the full step.

    A value that is on a tier at the start of a step has memory there during the full step, even
    while the value is on another tier.

    Args:
        program: The program.
        sizes: The sizes of values.
        tier: One of `TIERS`.

    Returns:
        Name in `Sizes`, or label of a sharded state -> bytes of each rank, shape (ranks,).

    Raises:
        UsageError: `sizes` has one size for all model states (`model_states`), but the program
            shards or offloads only some of these states.
    """
    shape, zero = program.shape, program.zero
    tiers = {row.size: program.initial_tier(row.value) for row in VALUES if row.initial_tier}
    tiers = {size: tier for size, tier in tiers.items() if tier != TIERS[0]}
    if tiers and np.any(np.array(sizes.model_states or 0)):
        raise UsageError(
            f"model_states is one size for all states of a stage, but {' and '.join(tiers)} of a "
            f"stage is not on the device: it is on the {' and '.join(tiers.values())}",
            hint=f"{', '.join(f'{name}=' for name in STATIC_SIZES)} in place of model_states=",
            fields=["model_states", "optimizer_placement"],
        )
    if zero and np.any(np.array(sizes.model_states or 0)):
        raise UsageError(
            f"model_states is one size for all states of a stage, but with zero {zero} the "
            "replicas shard only some states",
            hint=f"{', '.join(f'{name}=' for name in STATIC_SIZES)} in place of model_states=",
            fields=["model_states", "zero"],
        )
    stage_bytes = {name: sizes.for_stages(name, shape.stages) for name in sizes.static_sizes}
    params, grads, optimizer = (
        sizes.for_stages(name, shape.stages) for name in ModelStates._fields
    )
    shards = zero_model_states(params, grads, optimizer, zero=zero, dp=program.dp)
    for name, size in shards._asdict().items():
        if name in stage_bytes and is_sharded(name, zero):
            stage_bytes[SHARDED_LABELS[name]] = np.where(
                np.arange(shape.stages) < program.frozen_stages, 0.0, size
            )
            stage_bytes[name][program.frozen_stages :] = 0.0
    for name in sizes.static_sizes:
        if tiers.get(name, TIERS[0]) != tier:
            stage_bytes.pop(name, None)
            stage_bytes.pop(SHARDED_LABELS.get(name, name), None)
    is_trained, shard_count = np.arange(shape.stages) >= program.frozen_stages, 1
    if is_sharded("optimizer", zero):
        shard_count = program.dp
    for row in VALUES:
        if (
            row.reserved_memory is not None
            and row.reserved_memory[0] == tier
            and program.uses_value(row.value)
        ):
            stage_bytes[row.reserved_memory[1]] = (
                sizes.for_stages(row.reserved_memory[1], shape.stages) * is_trained / shard_count
            )
    return {
        name: np.array([size[list(stages)].sum() for stages in shape.stages_on_rank])
        for name, size in stage_bytes.items()
        if size.any() or not is_sharded(name, zero)
    }


def find_used_tiers(program: Program) -> tuple[str, ...]:
    """Return the tiers on which a program uses memory, the device first.

    A program uses a tier if instructions move values to it, or if a value is there from the start.

    Args:
        program: The program.

    Example:
        >>> from schedir import PipelineShape, compile, schedules
        >>> find_used_tiers(compile(schedules.one_f_one_b, PipelineShape(2, 4)))
        ('device',)
    """
    changes = [change for op in program.used_opcodes for change in INSTRUCTIONS[op].changes]
    used_states = {state for change in changes for state in (change.before, change.after)}
    used_rows = [row for row in VALUES if program.uses_value(row.value)]
    used_states |= {TIERS[0], *(program.initial_tier(row.value) for row in VALUES)}
    used_states |= {row.reserved_memory[0] for row in used_rows if row.reserved_memory}
    return tuple(tier for tier in TIERS if tier in used_states)


def compute_footprints(
    program: Program, sizes: Sizes, tier: str = "device", *, worst_case: bool = False
) -> list[Footprint]:
    """Return the memory of each rank on a tier during a step.

    Changes are in the order of the Stream, in which the host issues the instructions. Compute
    instructions also run in this order. For the other lanes, the result is conservative: a value
    uses memory from the start of the instruction that produces it, until the host has waited for
    the end of the instruction that frees it.

    Args:
        program: A complete program.
        sizes: The sizes of values.
        tier: One of `TIERS`.
        worst_case: True for an upper bound that is valid for all durations of instructions. For
            this bound, a value that a lane other than compute produces uses memory as soon as its
            slot is free. A value that is offloaded uses memory on the device until it is reloaded
            or freed.

    Returns:
        A footprint for each rank.

    Raises:
        UsageError: See `compute_static_memory`.
    """
    sizes = sizes.add_expert_rows(program.shape, program.segment_boundaries)
    static_memory_by_rank = _compute_static_memory_by_rank(program, sizes, tier)
    lifetimes_by_name, offload_slots = _find_lifetimes(program, sizes, tier, worst_case)
    lifetimes = [*lifetimes_by_name.values()]
    # With equal `order_key`, values that are freed come before values that start.
    is_growth = np.concatenate([lifetime.byte_change > 0 for lifetime in lifetimes])
    order_key = np.concatenate([lifetime.order_key for lifetime in lifetimes])
    order = np.lexsort((is_growth, order_key))
    positions = np.concatenate([lifetime.positions for lifetime in lifetimes])[order]
    is_at_start = order_key[order] % 2 == 0
    change_counts = [len(lifetime.positions) for lifetime in lifetimes]
    name_index = np.repeat(range(len(lifetimes)), change_counts)[order]
    count_change = np.concatenate([lifetime.count_change for lifetime in lifetimes])[order]
    byte_change = np.concatenate([lifetime.byte_change for lifetime in lifetimes])[order]
    rank_starts = np.searchsorted(positions, program.offsets)
    footprints = []
    for rank, rank_memory in enumerate(static_memory_by_rank):
        rank_slice = slice(rank_starts[rank], rank_starts[rank + 1])
        curves = {}
        for k, name in enumerate(lifetimes_by_name):
            has_name = name_index[rank_slice] == k
            counts, byte_totals = np.zeros(len(has_name) + 1, np.int64), np.zeros(len(has_name) + 1)
            np.cumsum(count_change[rank_slice] * has_name, out=counts[1:])
            np.cumsum(byte_change[rank_slice] * has_name, out=byte_totals[1:])
            curves[name] = (counts, byte_totals)
        for name, slots in offload_slots.items():
            curves[name] = slots.bound_usage(rank, curves[name], curves.pop(name + _MOVED_SUFFIX))
        stream_index = np.append(0, positions[rank_slice] - program.offsets[rank])
        footprints.append(
            Footprint(rank_memory, stream_index, np.append(True, is_at_start[rank_slice]), curves)
        )
    return footprints


def _compute_static_memory_by_rank(
    program: Program, sizes: Sizes, tier: str
) -> list[dict[str, tuple[int, float]]]:
    """Return `Footprint.static_memory` of each rank."""
    shape = program.shape
    static_memory = compute_static_memory(program, sizes, tier)
    state_bytes = sum(
        (sizes.for_stages(name, shape.stages) for name in sizes.static_sizes if name != "buffers"),
        np.zeros(shape.stages),
    )
    version_bytes = sizes.for_stages("version", shape.stages)
    peak_versions = count_peak_versions(program)
    buffer_memory = {
        kind: _compute_buffer_memory(program, kind, sizes) for kind in _list_buffers(program)
    }
    memory_by_rank = []
    for rank, stages in enumerate(shape.stages_on_rank):
        rank_memory = {n: (len(stages), float(b[rank])) for n, b in static_memory.items()}
        if tier == TIERS[0]:
            trained_stages = [s for s in stages if s >= program.frozen_stages]
            # Copies of the states, with which the rank can repeat the update.
            if program.norm_check == "after_step" and program.has_backward:
                size = float(state_bytes[trained_stages].sum())
                rank_memory["copies"] = (len(trained_stages), size)
            if shape.optimizer_steps > 1:
                version_count = int(peak_versions[rank])
                size = version_count * float(version_bytes[trained_stages].sum())
                rank_memory["versions"] = (version_count * len(trained_stages), size)
            for kind, (slot_counts, slot_bytes) in buffer_memory.items():
                name = _get_memory_name(kind)
                rank_memory[name] = (int(slot_counts[rank]), float(slot_bytes[rank]))
        memory_by_rank.append(rank_memory)
    return memory_by_rank


def _list_buffers(program: Program) -> list[Value]:
    """Return the kinds of values that use static slots on the device."""
    return [kind for kind in BOUNDARY_VALUES if program.takes_memory(kind)]


def _find_lifetimes(
    program: Program, sizes: Sizes, tier: str, worst_case: bool
) -> tuple[dict[str, ValueLifetimes], dict[str, OffloadSlots]]:
    """Return the lifetimes of values on a tier, and the slots of offloaded values, by name.

    The slots are for `worst_case` only. For a kind of value with slots, the name with
    `_MOVED_SUFFIX` has the lifetimes of the values that move.
    """
    static_kinds = _list_buffers(program)
    lifetimes_by_name = dict[str, ValueLifetimes]()
    offload_slots = dict[str, OffloadSlots]()
    for kind in SLOT_KINDS:
        if not program.takes_memory(kind) or (kind in static_kinds and tier == TIERS[0]):
            continue
        if program.initial_tier(kind) == tier:  # the static memory includes it
            continue
        compute_lifetimes = partial(
            compute_value_lifetimes, program, kind, sizes, TIERS.index(tier), worst_case
        )
        if (
            worst_case
            and (slots := OffloadSlots.from_program(program, kind, sizes, tier)) is not None
        ):
            name = _get_memory_name(kind)
            offload_slots[name] = slots
            lifetimes_by_name[name] = compute_lifetimes(False)
            lifetimes_by_name[name + _MOVED_SUFFIX] = compute_lifetimes(True)
        else:
            lifetimes_by_name[_get_memory_name(kind)] = compute_lifetimes()
    if tier == TIERS[0] and len((handovers := _find_handover_memory(program, sizes)).positions):
        lifetimes_by_name[_HANDED_OVER_NAME] = handovers
    return lifetimes_by_name, offload_slots


def _get_memory_name(kind: Value) -> str:
    """Return the name under which a Footprint lists the memory of values of a kind."""
    return UNSHARDED_LABELS.get(VALUES[kind].size, kind.name.lower())


def _compute_buffer_memory(
    program: Program, kind: Value, sizes: Sizes
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the number of static slots of a kind on each rank, and their total bytes.

    Each slot has the bytes of the largest value that uses such a slot.
    """
    lives = Dataflow.from_program(program).find_lifetimes(kind)
    value_sizes = compute_full_sizes(program, kind, sizes, lives.filled_at)
    if kind not in _SENT_VALUES:
        slots = count_slots(program, [kind])[:, 0]
        return slots, slots * lives.max_per_rank(value_sizes)
    is_sent_value = is_sent(program, kind)
    slot_counts = np.zeros(program.shape.ranks, np.int64)
    total_bytes = np.zeros(program.shape.ranks)
    for change_ops, slots in count_send_slots(program, kind).items():
        value_sizes = compute_form_sizes(program, kind, change_ops, sizes, lives.filled_at)
        slot_counts = slot_counts + slots
        total_bytes = total_bytes + slots * lives.max_per_rank(
            np.where(is_sent_value, value_sizes, 0.0)
        )
    return slot_counts, total_bytes


def _find_handover_memory(program: Program, sizes: Sizes) -> ValueLifetimes:
    """Return the memory of outputs without a slot: the rank uses them or changes their form.

    An output for a stage on the same rank uses memory until that stage has used it. An output that
    changes its form before it is sent uses memory in each form until the next change of form. The
    last form uses a send slot, and is not included.
    """
    index = InstructionIndex.from_program(program)
    group, changes = number_groups(index).astype(np.int64), []

    def add(begin: Positions, end: Positions, byte_counts: NDArray[np.float64]) -> None:
        ones = np.ones(len(begin), np.int64)
        changes.append((begin, 2 * group[begin], ones, byte_counts))
        changes.append((end, 2 * group[end] + 1, -ones, -byte_counts))

    for kind in filter(program.uses_value, _SENT_VALUES):
        lives = Dataflow.from_program(program).find_lifetimes(kind)
        is_sent_value = is_sent(program, kind)
        filled_at = lives.filled_at[~is_sent_value]
        add(
            filled_at,
            lives.freed_at[~is_sent_value],
            compute_full_sizes(program, kind, sizes, filled_at),
        )
        for change_ops, is_member in group_by_form(program, kind, lives.filled_at):
            begin = lives.filled_at[is_member & is_sent_value]
            for k, op in enumerate(change_ops):
                end = index.find_positions(op, index.key[begin])
                add(begin, end, compute_form_sizes(program, kind, change_ops[:k], sizes, begin))
                begin = end
    if not changes:
        empty = np.empty(0, np.int64)
        return ValueLifetimes(empty, empty, empty, np.empty(0))
    return ValueLifetimes(*map(np.concatenate, zip(*changes, strict=True)))


def compute_peak_bytes(program: Program, sizes: Sizes, tier: str = "device") -> NDArray[np.float64]:
    """Return the peak memory of each rank on a tier, in the worst case of `compute_footprints`.

    Args:
        program: A complete program.
        sizes: The sizes of values.
        tier: One of `TIERS`.

    Returns:
        Bytes of shape (ranks,).
    """
    footprints = compute_footprints(program, sizes, tier, worst_case=True)
    return np.array([footprint.total_bytes.max(initial=0.0) for footprint in footprints])


def fits_memory_limit(program: Program, sizes: Sizes, limit: float) -> bool:
    """Return whether no rank uses more than `limit` bytes on the device.

    Args:
        program: A complete program.
        sizes: The sizes of values.
        limit: The limit in bytes.
    """
    try:
        require_memory_limit(program, sizes, limit)
    except MemoryLimitError:
        return False
    return True


def require_memory_limit(
    program: Program, sizes: Sizes, limit: float, tier: str = "device"
) -> Program:
    """Verify that no rank uses more than `limit` bytes on a tier, and return the program.

    The check uses the worst case of `compute_footprints`.

    Args:
        program: A complete program.
        sizes: The sizes of values.
        limit: The limit in bytes.
        tier: One of `TIERS`.

    Raises:
        MemoryLimitError: A rank uses more than `limit`. The error lists the rank that uses the
            most memory, the instruction at its peak, and the values.
    """
    footprints = compute_footprints(program, sizes, tier, worst_case=True)
    peaks = [float(footprint.total_bytes.max(initial=0.0)) for footprint in footprints]
    rank = max(range(len(peaks)), key=peaks.__getitem__)
    if peaks[rank] > add_tolerance(limit):
        footprint = footprints[rank]
        peak_change = int(footprint.total_bytes.argmax())
        index = int(footprint.positions[peak_change])
        instr = program.streams[rank][index]
        has_conversion = any(VALUES[kind].converted_from for kind in INSTRUCTIONS[instr.op].gives)
        conversion_note = ", and makes deferred weight gradients" * has_conversion
        raise MemoryLimitError(
            program=program.name,
            limit_bytes=limit,
            required_bytes=peaks[rank],
            live_values=footprint.list_values(peak_change),
            site=InstructionSite(rank, index, instr, "while it runs" + conversion_note),
            tier=tier,
        )
    return program
