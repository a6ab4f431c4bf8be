"""Per stage: numbers of which there is one for all stages, or one for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from schedir.errors import ProgramError
from schedir.ir.numerals import NO_NUMBERS

PerStage = float | tuple[float, ...]


def per_stage(what: str, value: object, error: type[ProgramError]) -> PerStage:
    """A number, or several as a tuple.

    Raises `error` for anything else, and where one is negative or not finite.
    """
    if type(value) is float and 0 <= value < np.inf:  # as most are
        return value
    try:
        if isinstance(value, NO_NUMBERS):
            raise TypeError
        # An array or a tensor without dimensions is one number, though its type can be iterated.
        several = isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0
        each = tuple(map(float, value)) if several else float(value)  # type: ignore[arg-type, call-overload]
    except (TypeError, ValueError):
        raise error(f"{what} must be a number or one per stage, not {value!r:.60}") from None
    bad = [n for n in np.atleast_1d(each) if not 0 <= n < np.inf]
    if bad or each == ():
        raise error(f"{what} must be finite and not negative, not {bad[0] if bad else 'empty'}")
    return each


def by_stage(
    what: str, value: PerStage, stages: int, error: type[ProgramError]
) -> NDArray[np.float64]:
    """The number of each stage, shape (stages,).  Raises `error` for another number of them."""
    if isinstance(value, tuple) and len(value) != stages:
        raise error(f"{what} has {len(value)} numbers for {stages} stages")
    row = np.empty(stages)
    row[:] = value
    return row


def cut(value: PerStage, parts: int, into: int) -> PerStage:
    """What the stages of a model take, with the model cut into another number of equal stages.

    A number is that of each of `parts`; of several, each is spread evenly over its own part.

    >>> cut(3.0, 2, 4), cut((1.0, 3.0), 2, 4), cut((1.0, 3.0, 5.0, 7.0), 4, 2)
    (1.5, (0.5, 0.5, 1.5, 1.5), (4.0, 12.0))
    """
    if not isinstance(value, tuple):
        return value * parts / into
    if len(value) == into:
        return value
    total = np.concatenate([[0.0], np.cumsum(value)])
    ends = np.interp(np.linspace(0, 1, into + 1), np.linspace(0, 1, len(value) + 1), total)
    return tuple(np.diff(ends).tolist())


_Class = TypeVar("_Class")


def with_fields(names: Iterable[str]) -> Callable[[type[_Class]], type[_Class]]:
    """A class of numbers per stage with a field, 0 unless told, for each name that it lacks."""

    def extended(kind: type[_Class]) -> type[_Class]:
        for name in dict.fromkeys(names):
            if name not in kind.__annotations__:
                kind.__annotations__[name] = PerStage
                setattr(kind, name, 0.0)
        return kind

    return extended
