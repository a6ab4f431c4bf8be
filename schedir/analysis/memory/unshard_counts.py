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
    found = UnshardCounts([], [], [], [])
    for stream in program.streams:
        own = np.isin(stream.op, _UNSHARD_OPS)
        change = own.astype(np.int64) - np.isin(stream.op, _RESHARD_OPS)
        found.unshards.append(int(own.sum()))
        found.reductions.append(int(np.isin(stream.op, _REDUCE_OPS).sum()))
        found.max_unsharded.append(int(np.cumsum(change).max(initial=0)))
        found.stages.append(len(np.unique(stream.stage[own])))
    return found


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
    *most, last = [
        name for part, name in _STATE_NAMES.items() if program.zero >= SHARDED_FROM_LEVEL[part]
    ]
    cut = f"{', '.join(most)} and {last}" if most else last
    text = f"zero {program.zero}: {cut} split into {program.dp} shards, one per replica"
    if program.ep > 1:
        text += f", and of experts into {program.dp // program.ep}"
    found = count_unshards(program)
    if not any(found.unshards):
        return text
    one = len({*zip(*found, strict=True)}) == 1
    text += (
        f"; {'each rank gathers' if one else 'ranks gather'} weights "
        f"{_format_times(found.unshards)} per step"
    )
    if max(found.stages) > 1:
        text += (
            f", and {'has' if one else 'have'} at most {format_range(found.max_unsharded)} of "
            f"{'its' if one else 'their'} {format_range(found.stages)} stages unsharded"
        )
    if program.reduce_scatter_at == "each_backward":
        text += f"; gradients are reduced {_format_times(found.reductions)}"
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
    found = count_unshards(program)
    return {
        "zero": program.zero,
        "dp": program.dp,
        "unshards": found.unshards,
        "reductions": found.reductions,
        "max_unsharded_stages": found.max_unsharded,
    }


def format_range(numbers: list[int]) -> str:
    """Return "least to most", or the number itself if all numbers are equal.

    Args:
        numbers: The numbers; not empty.
    """
    least, most = min(numbers), max(numbers)
    return str(most) if least == most else f"{least} to {most}"


def _format_times(numbers: list[int]) -> str:
    many = format_range(numbers)
    return {"1": "once", "2": "twice"}.get(many, f"{many} times")
