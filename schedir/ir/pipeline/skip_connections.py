"""Skip connections: values that a stage sends to a later stage that is not its neighbour.

`Program.skips` has pairs of source and target stage. With `((0, 5), (1, 4))`, as in a U-Net, stage
5 receives a value from stage 0, and stage 4 receives another value from stage 1. A stage is the
source of at most one skip, and the target of at most one skip. A stage that receives a value can
send it to a later stage.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise
from operator import index
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.errors import ShapeError
from schedir.ir.cost.number_parsing import NON_NUMBER_TYPES
from schedir.ir.isa.table_schema import PeerRule
from schedir.ir.pipeline.field_schema import FieldType
from schedir.ir.pipeline.pipeline_shape import PipelineShape

Skips = tuple[tuple[int, int], ...]  # Pairs of source and target stage, ascending.


def normalize_skips(value: object, shape: PipelineShape) -> Skips:
    """Verify and sort pairs of stages for `Program.skips`.

    Args:
        value: Pairs of source and target stage, in any order.
        shape: Shape of the pipeline.

    Returns:
        The pairs, ascending.

    Raises:
        ShapeError: `value` is not a collection of pairs. A stage does not exist. The target is not
            after the source, or is its neighbour. Two skips have the same source or the same
            target.
    """
    pairs: Any = value
    try:
        if isinstance(value, NON_NUMBER_TYPES):
            raise TypeError
        result = sorted((index(begin), index(end)) for begin, end in pairs)
    except (TypeError, ValueError):
        raise _make_error(
            "skips must be pairs of a source and a target stage, like ((0, 5), (1, 4)), not "
            f"{value!r:.60}"
        ) from None
    for begin, end in result:
        lead = f"the skip from stage {begin} to stage {end}"
        if begin < 0 or max(begin, end) >= shape.stages:
            raise _make_error(f"{lead} is not possible: the stages are 0 to {shape.stages - 1}")
        if begin >= end:
            raise _make_error(f"{lead} must lead to a later stage", "each pair is (source, target)")
        if begin + 1 == end:
            raise _make_error(
                f"{lead} connects neighbours",
                f"return the value as another output of stage {begin}: a boundary may be several "
                "tensors",
            )
    for (begin, end), (next_begin, next_end) in pairwise(result):
        if begin == next_begin:
            route = _describe_route(begin, end, next_end)
            raise _make_error(
                f"two skips begin at stage {begin}: to stage {end} and to stage {next_end}",
                f"let stage {end} pass the value on: {route}"
                if end < next_end
                else "remove one of the two",
            )
    for (end, begin), (next_end, next_begin) in pairwise(
        sorted((end, begin) for begin, end in result)
    ):
        if end == next_end:
            raise _make_error(
                f"two skips end at stage {end}: from stage {begin} and from stage {next_begin}",
                f"let stage {next_begin} pass on both values, because a skip may have several "
                f"tensors: {_describe_route(begin, next_begin, end)}",
            )
    return tuple(result)


def _describe_route(first: int, second: int, third: int) -> str:
    """Return, for a hint, the `skips` that send a value from one stage through a second to a third.

    A skip between neighbours is not possible, so the hint replaces it by a boundary of several
    tensors.
    """
    skips = [pair for pair in pairwise((first, second, third)) if pair[1] > pair[0] + 1]
    neighbours = "" if len(skips) == 2 else ", and a boundary of several tensors between neighbours"
    return f"skips={tuple(skips)}{neighbours}"


def _make_error(fact: str, hint: str = "") -> ShapeError:
    return ShapeError(fact, hint=hint, fields=["skips"])


def _parse_skips(text: str) -> Skips:
    if text == "no":
        return ()
    if not re.fullmatch(r"\d{1,5}=\d{1,5}(,\d{1,5}=\d{1,5})*", text, re.ASCII):
        raise ValueError(f"skips must be pairs of stages like 0=5,1=4, not {text!r}")
    pairs = (map(int, pair.split("=")) for pair in text.split(","))
    return tuple((begin, end) for begin, end in pairs)


SKIPS_TYPE: Final = FieldType(
    "must be pairs of stages, from and to, like 0=5,1=4",
    _parse_skips,
    tuple[tuple[int, int], ...],
    to_text=lambda skips, _: ",".join(f"{begin}={end}" for begin, end in skips) or "no",
    resolve=lambda _, value, shape: normalize_skips(value, shape),
    metavar="STAGES",
)


@lru_cache(maxsize=64)
def find_neighbor_stages(peer_rule: PeerRule, stages: int, skips: Skips) -> NDArray[np.int32]:
    """Return, for each stage, the stage on the other side of a message.

    The result is cached. Do not change it.

    Args:
        peer_rule: Direction of the message: next or previous stage, or along a skip.
        stages: Number of stages.
        skips: Skip connections of the program.

    Returns:
        The other stages, shape (stages,). An entry is -1 if there is no other stage.
    """
    result = np.full(stages, -1, np.int32)
    if peer_rule is PeerRule.NEXT:
        result[:-1] = np.arange(1, stages)
    elif peer_rule is PeerRule.PREVIOUS:
        result[1:] = np.arange(stages - 1)
    else:
        for begin, end in skips:
            stage, neighbor = (begin, end) if peer_rule is PeerRule.SKIP_TO else (end, begin)
            result[stage] = neighbor
    result.flags.writeable = False
    return result
