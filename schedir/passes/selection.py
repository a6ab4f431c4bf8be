"""Parse selections such as "all", "half", "fit", stages, or pairs of stage and microbatch.

"all", "half" (every other microbatch of each stage), "fit" (as few as limits ask for), stages,
pairs of (stage, microbatch), or a function that says it of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import index
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError, describe
from schedir.ir.cost.number_parsing import whole
from schedir.ir.pipeline.field_schema import FieldType
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import STAGE, Words

Which = str | Iterable[int] | Iterable[tuple[int, int]] | Callable[[int, int], bool]

WORDS: Final = ("all", "half", "fit")
_HOW: Final = (
    '"all", "half", "fit", stages as [0, 1], pairs as [(0, 3)], or what says it of (stage, mb)'
)


def fits(which: object) -> bool:
    """Whether limits choose."""
    return isinstance(which, str) and which == "fit"


def by_word(which: object) -> bool:
    """Whether a word says it, and nothing names stages or microbatches."""
    return isinstance(which, str) and which in WORDS


def meant(which: Which, option: str, addresses: Words, shape: PipelineShape) -> NDArray[np.bool_]:
    """Which of some addresses an option means, of those that it can mean; not for "fit".

    Raises UsageError for what says nothing, and for stages and microbatches that are not there.
    """
    stage, mb = stages_of(addresses)
    if callable(which):
        each = zip(stage.tolist(), mb.tolist(), strict=True)
        return np.array([bool(which(*one)) for one in each], bool)
    if isinstance(which, str):
        if which == "all":
            return np.ones(len(addresses), bool)
        if which == "half":
            return np.asarray(mb % 2 == 0)
    named = pairs(which, option, shape)
    return np.array([(s,) in named or (s, m) in named
                     for s, m in zip(stage.tolist(), mb.tolist(), strict=True)], bool)  # fmt: skip


def pairs(which: Which, option: str, shape: PipelineShape) -> set[tuple[int, ...]]:
    """The stages and the pairs of (stage, microbatch) that are named."""
    if isinstance(which, bytes):
        raise _not_said(which, option)
    if isinstance(which, str):
        try:
            which = read(which)
        except ValueError:
            raise _not_said(which, option) from None
        assert not isinstance(which, str)
    try:
        named = {(_number(one),) if not isinstance(one, tuple | list) else (*map(_number, one),)
                 for one in which}  # type: ignore[union-attr]  # fmt: skip
    except (TypeError, ValueError):
        raise _not_said(which, option) from None
    for one in named:
        if len(one) not in (1, 2):
            raise _not_said(which, option)
        there = (("stage", shape.stages), ("microbatch", shape.microbatches))
        for number, (what, most) in zip(one, there, strict=False):
            if not 0 <= number < most:
                raise UsageError(
                    f"there is no {what} {number} to {option}: they are 0 to {most - 1}",
                    fields=[option],
                )
    return named


def _number(value: Any) -> int:
    """A whole number.  Raises TypeError for all else: also for 1.5, and for yes and no."""
    if isinstance(value, bool):
        raise TypeError
    return index(value)


def stages_of(addresses: Words) -> tuple[Words, Words]:
    """The stage and the microbatch of each of some addresses."""
    return addresses >> STAGE & 0xFFFF, addresses & 0xFFFFFFFF


def _not_said(which: object, option: str) -> UsageError:
    return UsageError(f"{option} is {_HOW}, not {describe(which)}", fields=[option])


def read(text: str) -> Any:
    """`all`, `half`, `fit`, or stages and microbatches of stages: `0,1.3`."""
    if text in WORDS:
        return text
    found: list[Any] = []
    for part in text.split(","):
        try:
            numbers = tuple(map(whole, part.split(".")))
        except ValueError:
            numbers = ()
        if len(numbers) not in (1, 2):
            raise ValueError(f"must be all, half, fit, or stages like 0,1 or 0.3,0.4, not {text!r}")
        found.append(numbers if len(numbers) == 2 else numbers[0])
    return tuple(found)


def kind(takes: str) -> FieldType:
    """The kind of an option that says which."""
    return FieldType(takes, read, str, metavar="WHAT")
