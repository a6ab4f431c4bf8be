"""Values that are one number, one number per stage, or an array per stage and microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

from schedir.errors import SchedirError, describe
from schedir.ir.cost.number_parsing import NON_NUMBER_TYPES

Row = tuple[float, ...]
# A number; one for each stage; or, of each stage, one for each microbatch.  Where all stages have
# the same row there may be only that.
PerStage = float | Row | tuple[Row, ...]
Floats = NDArray[np.float64]


def to_per_stage(
    subject: str,
    value: object,
    error: type[SchedirError],
    *,
    allow_arrays: bool = True,
    max_value: float = np.finfo(float).max,
) -> PerStage:
    """A number, or several as a tuple, or an array as a tuple of its rows.

    Raises `error` if `value` is anything else, if a number is negative, not finite or more than
    `max_value`, and if `value` is an array of (stages, microbatches) and `allow_arrays` is False.
    """
    if type(value) is float and 0 <= value <= max_value:  # as most are
        return value
    each: PerStage
    try:
        each = _to_float_tuples(value, 1 + allow_arrays)
    except (TypeError, ValueError):
        also = ", or an array of (stages, microbatches)" * allow_arrays
        raise error(
            f"{subject} must be a number or one per stage{also}, not {describe(value)}"
        ) from None
    if is_per_microbatch(each) and len(lengths := sorted({len(row) for row in each})) > 1:
        raise error(
            f"{subject} has rows of {lengths[0]} and of {lengths[-1]} numbers: each row of an "
            "array "
            "has one number per microbatch"
        )
    flat = np.ravel(np.array(each, float))
    bad = flat[~((flat >= 0) & (flat < np.inf))]
    if len(bad) or not len(flat):
        raise error(
            f"{subject} must be finite and not negative, not {bad[0] if len(bad) else 'empty'}"
        )
    if flat.max() > max_value:
        raise error(f"{subject} must be at most {max_value:g}, not {flat.max():g}")
    return each


def is_per_microbatch(value: object) -> TypeGuard[tuple[Row, ...]]:
    """Whether numbers are said for each microbatch."""
    return isinstance(value, tuple) and len(value) > 0 and isinstance(value[0], tuple)


def _to_float_tuples(value: Any, depth: int) -> Any:
    """A float, or tuples of floats within each other, all as deep; TypeError for anything else."""
    if isinstance(value, NON_NUMBER_TYPES):
        raise TypeError
    # An array or a tensor without dimensions is one number, though its type can be iterated.
    if not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        try:
            return float(value)
        except OverflowError:  # a whole number of hundreds of digits
            return np.inf
    if not depth:
        raise TypeError
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiu":
        value = value.tolist()
    each = tuple(_to_float_tuples(one, depth - 1) for one in value)
    if len({type(one) for one in each}) > 1:  # a number beside a row
        raise TypeError
    return each


def to_grid(value: PerStage) -> Floats:
    """The numbers with an axis for stages and one for microbatches, of which either may be 1."""
    each = np.array(value, float)
    return each[:, None] if each.ndim == 1 else np.atleast_2d(each)


def from_grid(each: Floats) -> PerStage:
    """What `to_grid` makes this of: a number, one per stage, or of each stage one per
    microbatch."""
    if each.size == 1:
        return float(each[0, 0])
    if each.shape[1] == 1:
        return tuple(each[:, 0].tolist())
    return tuple(map(tuple, each.tolist()))


def expand_by_stage(
    subject: str,
    value: PerStage,
    stages: int,
    error: type[SchedirError],
    microbatches: int | None = None,
) -> Floats:
    """The number of each stage and microbatch: shape (stages, microbatches), or (stages, 1) where
    all microbatches have the same.

    Raises `error` for another number of either; without `microbatches` there may be any.
    """
    if isinstance(value, (int, float)):  # as most are
        return np.full((stages, 1), value, float)
    each = to_grid(value)
    rows, columns = each.shape
    if is_per_microbatch(value):
        if rows not in (1, stages) or microbatches not in (None, columns):
            many = "any number of" if microbatches is None else microbatches
            raise error(
                f"{subject} is an array of {rows} x {columns} numbers, not of {stages} stages x "
                f"{many} microbatches, or 1 x {many} where all stages are alike"
            )
    elif isinstance(value, tuple) and rows != stages:
        raise error(f"{subject} has {rows} numbers for {stages} stages")
    return np.broadcast_to(each, (stages, columns))


def look_up(each: Floats, stage: NDArray[Any], mb: NDArray[Any]) -> Floats:
    """Of what `expand_by_stage` gives, the numbers of some stages and microbatches."""
    return np.asarray(each[:, 0][stage] if each.shape[1] == 1 else each[stage, mb])


def redistribute_stages(value: PerStage, old_stages: int, new_stages: int) -> PerStage:
    """What the stages of a model take, with the model cut into another number of equal stages.

    A number is that of each of `old_stages`; of several, each is spread evenly over its own part;
    of an array, this is done for each microbatch.

    >>> redistribute_stages(3.0, 2, 4), redistribute_stages((1.0, 3.0), 2, 4)
    (1.5, (0.5, 0.5, 1.5, 1.5))
    >>> redistribute_stages((1.0, 3.0, 5.0, 7.0), 4, 2)
    (4.0, 12.0)
    >>> redistribute_stages(((1.0, 2.0), (3.0, 4.0)), 2, 1)
    ((4.0, 6.0),)
    >>> redistribute_stages(((1.0, 2.0),), 2, 1)
    ((2.0, 4.0),)
    """
    if not isinstance(value, tuple):
        return value * old_stages / new_stages
    with np.errstate(over="ignore"):  # Costs and Sizes refuse infinite numbers
        return _redistribute_tuple(value, old_stages, new_stages)


def _redistribute_tuple(value: tuple[Any, ...], old_stages: int, new_stages: int) -> PerStage:
    each = to_grid(value)
    if is_per_microbatch(value):
        if len(each) == 1:  # all stages alike
            return (tuple((each[0] * old_stages / new_stages).tolist()),)
        columns = [
            redistribute_stages(tuple(column), old_stages, new_stages) for column in each.T.tolist()
        ]
        return tuple(map(tuple, np.array(columns).T.tolist()))
    if len(value) == new_stages:
        return value
    total = np.concatenate([[0.0], np.cumsum(value)])
    ends = np.interp(np.linspace(0, 1, new_stages + 1), np.linspace(0, 1, len(value) + 1), total)
    return tuple(np.diff(ends).tolist())


_Class = TypeVar("_Class")


def add_fields(
    names: Iterable[str], default: float | None = 0.0
) -> Callable[[type[_Class]], type[_Class]]:
    """A class of numbers per stage with a field for each name that it lacks."""

    def extended(kind: type[_Class]) -> type[_Class]:
        for name in dict.fromkeys(names):
            if name not in kind.__annotations__:
                kind.__annotations__[name] = PerStage if default is not None else PerStage | None
                setattr(kind, name, default)
        return kind

    return extended


def sum_segments(each: Floats, segments: Sequence[int]) -> Floats:
    """What whole stages take of which each is so many `segments`, from what these do: shape
    (stages, microbatches), as that of the pieces, of which the first axis may be 1."""
    rows = np.broadcast_to(each, (sum(segments), each.shape[1]))
    found: Floats = np.add.reduceat(rows, np.cumsum((0, *segments[:-1])), axis=0)
    return found


def average_stages(value: PerStage, segments: Sequence[int]) -> PerStage:
    """The mean of all whole stages, of each microbatch where these differ, for one that is not cut,
    and for each of its pieces an equal share of it.

    >>> average_stages((1.0, 3.0), (1, 1)), average_stages((1.0, 4.0, 1.0, 2.0), (3, 1))
    (2.0, (1.3333333333333333, 1.3333333333333333, 1.3333333333333333, 4.0))
    """
    mean = sum_segments(to_grid(value), segments).mean(0)
    if len({*segments}) == 1:
        return from_grid(mean[None] / segments[0])
    return from_grid(mean / np.repeat(segments, segments)[:, None])
