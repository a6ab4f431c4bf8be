"""Count unshards, reduce-scatters and unsharded stages of each rank."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from schedir.ir.cost.zero_states import SHARDED_FROM_LEVEL
from schedir.ir.isa.instructions import INSTRUCTIONS, Scope, Value, find_producers
from schedir.ir.program import Program

_UNSHARD_OPS: Final = find_producers(Value.UNSHARDED_PARAMS)
_RESHARD_OPS: Final = tuple(row.op for row in INSTRUCTIONS if Value.UNSHARDED_PARAMS in row.frees)
_REDUCE_OPS: Final = tuple(
    op for op in find_producers(Value.GRAD) if INSTRUCTIONS[op].scope is Scope.OCCURRENCE
)
_STATE_NAMES: Final = {
    "params": "weights",
    "grads": "gradients",
    "optimizer": "optimizer state",
}  # field of `Sizes` -> name in texts


class UnshardCounts(NamedTuple):
    """The numbers of unshards and reduce-scatters of each rank in a step.

    Attributes:
        unshards: Number of unshards of each rank.
        reductions: Number of reduce-scatters of each rank.
        max_unsharded: Largest number of stages of each rank that are unsharded at the same time, if
            instructions run in the order of the Stream.
        stages: Number of different stages that each rank unshards.
    """

    unshards: list[int]
    reductions: list[int]
    max_unsharded: list[int]
    stages: list[int]


def count_unshards(program: Program) -> UnshardCounts:
    """Count the unshards and reduce-scatters; zeros for a program without ZeRO.

    Args:
        program: The program.
    """
    counts = UnshardCounts([], [], [], [])
    for stream in program.streams:
        is_unshard = np.isin(stream.op, _UNSHARD_OPS)
        change = is_unshard.astype(np.int64) - np.isin(stream.op, _RESHARD_OPS)
        counts.unshards.append(int(is_unshard.sum()))
        counts.reductions.append(int(np.isin(stream.op, _REDUCE_OPS).sum()))
        counts.max_unsharded.append(int(np.cumsum(change).max(initial=0)))
        counts.stages.append(len(np.unique(stream.stage[is_unshard])))
    return counts


def describe_sharding(program: Program) -> str:
    """Describe what ZeRO shards, and the number of unshards. The text is "" without ZeRO.

    Args:
        program: The program.

    Example:
        >>> from schedir import PipelineShape, compile, schedules
        >>> shape = PipelineShape(ranks=1, microbatches=4, stages_per_rank=6)
        >>> describe_sharding(compile(schedules.looped_bfs, shape, dp=2, zero=1))
        'zero 1: optimizer state split into 2 shards, one per replica; each rank gathers weights \
6 times per step, and has at most 6 of its 6 stages unsharded'
        >>> describe_sharding(compile(schedules.looped_bfs, shape, zero=3))
        'zero 3 saves no memory: dp is 1, so the only replica has all states'
    """
    if not program.zero:
        return ""
    if program.dp == 1:
        return f"zero {program.zero} saves no memory: dp is 1, so the only replica has all states"
    *leading_names, last_name = [
        name for field, name in _STATE_NAMES.items() if program.zero >= SHARDED_FROM_LEVEL[field]
    ]
    names = f"{', '.join(leading_names)} and {last_name}" if leading_names else last_name
    text = f"zero {program.zero}: {names} split into {program.dp} shards, one per replica"
    if program.ep > 1:
        text += f", and of experts into {program.dp // program.ep}"
    counts = count_unshards(program)
    if not any(counts.unshards):
        return text
    is_uniform = len({*zip(*counts, strict=True)}) == 1
    text += (
        f"; {'each rank gathers' if is_uniform else 'ranks gather'} weights "
        f"{_format_times(counts.unshards)} per step"
    )
    if max(counts.stages) > 1:
        text += (
            f", and {'has' if is_uniform else 'have'} at most "
            f"{format_range(counts.max_unsharded)} of {'its' if is_uniform else 'their'} "
            f"{format_range(counts.stages)} stages unsharded"
        )
    if program.reduce_scatter_at == "each_backward":
        text += f"; gradients are reduced {_format_times(counts.reductions)}"
    return text


def collect_sharding_facts(program: Program) -> dict[str, Any]:
    """Return the facts of `describe_sharding` as a dictionary; empty without ZeRO.

    Args:
        program: The program.

    Returns:
        `zero` and `dp` as numbers. `unshards`, `reductions` and `max_unsharded_stages` (the
        largest number of unsharded stages) with a number per rank.
    """
    if not program.zero:
        return {}
    counts = count_unshards(program)
    return {
        "zero": program.zero,
        "dp": program.dp,
        "unshards": counts.unshards,
        "reductions": counts.reductions,
        "max_unsharded_stages": counts.max_unsharded,
    }


def format_range(numbers: list[int]) -> str:
    """Return "least to most", or the number itself if all numbers are equal.

    Args:
        numbers: The numbers; not empty.
    """
    lowest, highest = min(numbers), max(numbers)
    return str(highest) if lowest == highest else f"{lowest} to {highest}"


def _format_times(numbers: list[int]) -> str:
    text = format_range(numbers)
    return {"1": "once", "2": "twice"}.get(text, f"{text} times")
