"""Insert Unshard and Reshard around the compute of stages with ZeRO (arXiv 1910.02054).

At level 3, replicas shard the weights, and at most `unsharded_stages` stages of a rank are
unsharded at the same time. Below level 3, each stage stays unsharded until its last use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from schedir.analysis.progress_models import ProgressModel
from schedir.errors import ShapeError, UsageError
from schedir.ir.cost.zero_states import SHARDED_FROM_LEVEL
from schedir.ir.isa.instructions import INSTRUCTIONS, Opcode, Value
from schedir.ir.pipeline.field_schema import make_integer_type
from schedir.ir.pipeline.pipeline_shape import MAX_MICROBATCHES, MAX_STAGES
from schedir.ir.program import UNSHARED_SLOTS, Program, SlotCounts, StreamSlices, pack
from schedir.passes.communication.unshard_placement import (
    DEFAULT_PREFETCH,
    find_unsharded_intervals,
)
from schedir.passes.insertion import insert_at_positions
from schedir.passes.pass_types import ExpectedInstructions, Options, Pass, PresenceQuery
from schedir.passes.stage_runs import StageRuns, find_stage_runs, number_occurrences

_WEIGHT_READING_OPS: Final = tuple(
    row.op for row in INSTRUCTIONS if Value.UNSHARDED_PARAMS in {*row.needs} - {*row.frees}
)
_UNSHARD_OPS: Final = (Opcode.Unshard, Opcode.Reshard)
_OPTION_TYPES: Final = {
    "unsharded_stages": make_integer_type(1, MAX_STAGES, "a number of stages"),
    "unshard_prefetch": make_integer_type(0, MAX_MICROBATCHES),
}


def insert_unshards(program: Program, options: Options) -> Program:
    """Insert an Unshard and a Reshard for each interval in which a stage stays unsharded.

    A Reshard comes right after the last reader of an interval. An Unshard comes as soon as a slot
    is free: Unshard number k of a rank comes after Reshard number k - `unsharded_stages`. The first
    Unshards are at the start of the Stream, and overlap with the warmup. At level 3, the program
    also has `unsharded_stages` slots for unsharded weights. These slots limit the number of
    unsharded stages, whatever the durations of the instructions are.

    Args:
        program: A program with messages.
        options: The options. In `extra_options`, `unsharded_stages` is the largest number of stages
            that are unsharded at the same time at level 3. The default is the number of stages that
            a run of computes uses, plus one. So a rank can gather the next stage during a run.
            `unshard_prefetch` is the number of runs by which an Unshard precedes the run that needs
            it, if slots allow this. The value 0 makes the fewest gathers. The default, 1, makes a
            few more gathers, but a gather overlaps with the compute of a run.

    Raises:
        UsageError: One of these options is given, and weights are not sharded.
        ShapeError: The value of an option has a wrong type or range. `unsharded_stages` is larger
            than the number of trained stages of each rank, or smaller than the number of stages of
            a run.
    """
    given_options = {
        name: option_type.resolve(name, options.extra_options[name], program.shape)
        for name, option_type in _OPTION_TYPES.items()
        if options.extra_options.get(name) is not None
    }
    if given_options and not _has_sharded_weights(program):
        (name, *_) = given_options
        raise UsageError(
            f"{name} is {given_options[name]}, but zero={program.zero} does not shard weights",
            hint=f"zero={SHARDED_FROM_LEVEL['params']}, or leave {name} out",
            fields=[name, "zero"],
        )
    uses = find_stage_runs(program, _WEIGHT_READING_OPS)
    max_unsharded = _count_unsharded_stages(program, uses, given_options.get("unsharded_stages"))
    slot_counts, positions, ranks, words = [], [], [], []
    for rank in range(program.shape.ranks):
        rank_uses = slice(*np.searchsorted(uses.rank, [rank, rank + 1]))
        stage, begin, end = find_unsharded_intervals(
            uses.run[rank_uses],
            uses.stage[rank_uses],
            uses.end[rank_uses],
            max_unsharded,
            given_options.get("unshard_prefetch", DEFAULT_PREFETCH),
            program.offsets[rank],
        )
        occurrence = number_occurrences(stage)
        positions += [end, begin]
        words += [pack(op, stage, occurrence) for op in (Opcode.Reshard, Opcode.Unshard)]
        ranks.append(np.full(2 * len(stage), rank))
        slot_counts.append(min(max_unsharded, len(np.unique(stage))))
    program = insert_at_positions(program, *map(np.concatenate, (positions, ranks, words)))
    if program.zero < SHARDED_FROM_LEVEL["params"]:
        return program
    return program.with_slots(
        [SlotCounts.unspecified()._replace(unsharded_params=count) for count in slot_counts]
    )


def _has_sharded_weights(program: Program) -> bool:
    """Return whether replicas shard the weights (ZeRO level 3)."""
    return program.zero >= SHARDED_FROM_LEVEL["params"]


def _count_unsharded_stages(program: Program, uses: StageRuns, stage_limit: int | None) -> int:
    """Return the largest number of stages of a rank that are unsharded at the same time."""
    max_sharded = max(
        len({*stages} - {*range(program.frozen_stages)}) for stages in program.shape.stages_on_rank
    )
    if program.zero < SHARDED_FROM_LEVEL["params"]:
        return max_sharded
    if stage_limit is None:
        return uses.max_stages + 1
    if stage_limit > max_sharded:
        raise ShapeError(
            f"unsharded_stages is {stage_limit}, but no rank has more than {max_sharded} sharded "
            f"stage{'s' if max_sharded > 1 else ''}",
            program=program.name,
            hint=f"unsharded_stages={max_sharded}",
            fields=["unsharded_stages"],
        )
    if stage_limit < uses.max_stages:
        raise ShapeError(
            f"unsharded_stages is {stage_limit}, but one group of instructions uses "
            f"{uses.max_stages} stages at once",
            program=program.name,
            hint=f"unsharded_stages={uses.max_stages}",
            fields=["unsharded_stages"],
        )
    return stage_limit


def _list_expected(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    required = present(Opcode.Unshard).copy()
    is_trained = np.arange(program.shape.stages) >= program.frozen_stages
    required[: program.shape.replica_ranks.size] = np.tile(is_trained, program.shape.placement_rows)
    required &= program.zero > 0
    reason = "the program has 'zero 0'" if not program.zero else "its weights are not sharded"
    for op, counterpart, hint in (
        (Opcode.Unshard, Opcode.Reshard, "place unshard before the first use of the weights"),
        (Opcode.Reshard, Opcode.Unshard, "place reshard after the last use of the weights"),
    ):
        yield ExpectedInstructions(op, required, reason, hint, counterpart)


def _read_options(program: Program, progress_model: ProgressModel) -> dict[str, Any]:
    """Return options with which the pass inserts the unshards and reshards of the program.

    `unsharded_stages` is the largest number of slots that a rank has for unsharded weights.
    `unshard_prefetch` is the first value that reproduces the program. It is left out if this value
    is the default, or if no value reproduces the program.
    """
    slot_counts = [
        slots.unsharded_params
        for slots in program.slots
        if slots.unsharded_params != UNSHARED_SLOTS
    ]
    if program.zero < SHARDED_FROM_LEVEL["params"] or not any(slot_counts):
        return {}
    is_unshard = np.isin(program.op, _UNSHARD_OPS)
    offsets = np.append(0, np.cumsum(~is_unshard))[program.offsets]
    without_unshards = replace(
        program, streams=StreamSlices.from_words(program.words[~is_unshard], offsets), slots=()
    )
    base_options: dict[str, Any] = {"unsharded_stages": max(slot_counts)}
    for prefetch in (DEFAULT_PREFETCH, 0, *range(DEFAULT_PREFETCH + 1, max(slot_counts) + 1)):
        options = base_options
        if prefetch != DEFAULT_PREFETCH:
            options = base_options | {"unshard_prefetch": prefetch}
        lowered = insert_unshards(without_unshards, Options(extra_options=options))
        if _encode_unshard_order(lowered) == _encode_unshard_order(program):
            return options
    return base_options


def _encode_unshard_order(program: Program) -> bytes:
    """Return the order of unshards, reshards and uses of weights as bytes, to compare programs."""
    return program.words[np.isin(program.op, (*_WEIGHT_READING_OPS, *_UNSHARD_OPS))].tobytes()


def _should_run(program: Program, options: Options) -> bool:
    is_requested = any(options.extra_options.get(name) is not None for name in _OPTION_TYPES)
    return is_requested or (program.zero > 0 and program.used_opcodes.isdisjoint(_UNSHARD_OPS))


PASSES = (
    Pass(
        "unshards",
        "ends",
        insert_unshards,
        should_run=_should_run,
        list_expected=_list_expected,
        read_options=_read_options,
        option_names=("unsharded_stages", "unshard_prefetch"),
        applies_to=_has_sharded_weights,
        section="memory",
        option_types=_OPTION_TYPES,
        option_descriptions={
            "unsharded_stages": "with zero 3: the largest number of stages of a rank that have all "
            "their weights at the same time (2: the stage that computes and the next one; 3 if two "
            "stages compute together)",
            "unshard_prefetch": "with zero 3: number of stage computations between the gather of "
            "weights and their use (1). unsharded_stages can make this number smaller. With 0, "
            "ranks gather least often, but wait for each gather",
        },
        order=20,  # in phase "ends", because a program with ZeRO is incomplete without unshards
    ),
)
