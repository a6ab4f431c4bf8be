"""Values that are one number, one number per stage, or an array per stage and microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

from schedir.errors import SchedirError, describe
from schedir.ir.cost.number_parsing import NON_NUMBER_TYPES

Row = tuple[float, ...]
# A number, one number per stage, or one row per stage with a number for each microbatch.  A single
# row applies to all stages.
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
    """Convert a value into a number, a tuple of numbers, or a tuple of rows.

    Args:
        subject: Name of the value, as the subject of an error message.
        value: A number, a sequence of numbers, nested sequences of numbers, or an array.
        error: Type of the error to raise.
        allow_arrays: If False, an array of shape (stages, microbatches) is refused.
        max_value: The largest number that is allowed.

    Returns:
        The converted value.

    Raises:
        SchedirError: An error of type `error`. `value` has another form, has rows of different
            lengths, is empty, or has a number that is negative, not finite or more than
            `max_value`.
    """
    if type(value) is float and 0 <= value <= max_value:  # The common case needs no conversion.
        return value
    values: PerStage
    try:
        values = _to_float_tuples(value, 1 + allow_arrays)
    except (TypeError, ValueError):
        array_option = ", or an array of (stages, microbatches)" * allow_arrays
        raise error(
            f"{subject} must be a number or one per stage{array_option}, not {describe(value)}"
        ) from None
    if is_per_microbatch(values) and len(lengths := sorted({len(row) for row in values})) > 1:
        raise error(
            f"{subject} has rows of {lengths[0]} and of {lengths[-1]} numbers: each row must "
            "have one number per microbatch"
        )
    flat = np.ravel(np.array(values, float))
    invalid = flat[~((flat >= 0) & (flat < np.inf))]
    if len(invalid) or not len(flat):
        actual = invalid[0] if len(invalid) else "empty"
        raise error(f"{subject} must be finite and not negative, not {actual}")
    if flat.max() > max_value:
        raise error(f"{subject} must be at most {max_value:g}, not {flat.max():g}")
    return values


def is_per_microbatch(value: object) -> TypeGuard[tuple[Row, ...]]:
    """Return whether a value has a number for each microbatch.

    Args:
        value: A value that `to_per_stage` returned.

    Returns:
        True for a tuple of rows.
    """
    return isinstance(value, tuple) and len(value) > 0 and isinstance(value[0], tuple)


def _to_float_tuples(value: Any, depth: int) -> Any:
    """Return a float, or nested tuples of floats of equal depth. Raises TypeError otherwise."""
    if isinstance(value, NON_NUMBER_TYPES):
        raise TypeError
    # An array or a tensor without dimensions is one number, although its class is an Iterable.
    if not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        try:
            return float(value)
        except OverflowError:  # An integer with hundreds of digits does not fit into a float.
            return np.inf
    if not depth:
        raise TypeError
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiu":
        value = value.tolist()
    items = tuple(_to_float_tuples(item, depth - 1) for item in value)
    if len({type(item) for item in items}) > 1:  # Numbers and rows are mixed.
        raise TypeError
    return items


def to_grid(value: PerStage) -> Floats:
    """Convert a value to an array with an axis for stages and an axis for microbatches.

    Args:
        value: A number, one per stage, or an array.

    Returns:
        An array of two dimensions. An axis has length 1 if `value` has no numbers along it.
    """
    grid = np.array(value, float)
    return grid[:, None] if grid.ndim == 1 else np.atleast_2d(grid)


def from_grid(each: Floats) -> PerStage:
    """Convert an array to a value, as the inverse of `to_grid`.

    Args:
        each: An array of two dimensions.

    Returns:
        A number, one number per stage, or a row for each stage.
    """
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
    """Return the number of each stage and microbatch.

    Args:
        subject: Name of the value, as the subject of an error message.
        value: A number, one per stage, or an array.
        stages: Number of stages.
        error: Type of the error to raise.
        microbatches: Number of microbatches. None allows any number.

    Returns:
        An array of shape (stages, microbatches), or (stages, 1) if all microbatches have the same
        number.

    Raises:
        SchedirError: An error of type `error`: `value` has another number of stages or
            microbatches.
    """
    if isinstance(value, (int, float)):  # The common case needs no checks.
        return np.full((stages, 1), value, float)
    grid = to_grid(value)
    rows, columns = grid.shape
    if is_per_microbatch(value):
        if rows not in (1, stages) or microbatches not in (None, columns):
            column_count = "any number of" if microbatches is None else microbatches
            raise error(
                f"{subject} is an array of {rows} x {columns} numbers; it must have {stages} "
                f"stages x {column_count} microbatches, or 1 x {column_count} if all stages are "
                "equal"
            )
    elif isinstance(value, tuple) and rows != stages:
        raise error(f"{subject} has {rows} numbers for {stages} stages")
    return np.broadcast_to(grid, (stages, columns))


def look_up(each: Floats, stage: NDArray[Any], mb: NDArray[Any]) -> Floats:
    """Return the number for each given pair of stage and microbatch.

    Args:
        each: An array that `expand_by_stage` returned.
        stage: Numbers of stages.
        mb: Numbers of microbatches, in the shape of `stage`.

    Returns:
        The numbers, in the shape of `stage`.
    """
    return np.asarray(each[:, 0][stage] if each.shape[1] == 1 else each[stage, mb])


def redistribute_stages(value: PerStage, old_stages: int, new_stages: int) -> PerStage:
    """Convert a value per stage to another number of stages of the same model.

    Args:
        value: The value for the old stages. One number applies to each of them.
        old_stages: Number of old stages. `old_stages` is used only if `value` is one number or one
            row.
        new_stages: Number of new stages.

    Returns:
        The value for the new stages. The number of each old stage is spread evenly over the part of
        the model that this stage has. In an array, each microbatch is converted separately.

    Example:
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
    with np.errstate(over="ignore"):  # `Costs` and `Sizes` raise errors for infinite numbers.
        return _redistribute_tuple(value, old_stages, new_stages)


def _redistribute_tuple(value: tuple[Any, ...], old_stages: int, new_stages: int) -> PerStage:
    grid = to_grid(value)
    if is_per_microbatch(value):
        if len(grid) == 1:  # One row applies to all stages.
            return (tuple((grid[0] * old_stages / new_stages).tolist()),)
        columns = [
            redistribute_stages(tuple(column), old_stages, new_stages) for column in grid.T.tolist()
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
    """Return a decorator that adds fields with values per stage to a dataclass.

    Apply the decorator before `dataclass`, on the line below it.

    Args:
        names: Names of the fields. Fields that the class declares stay unchanged.
        default: Default of the new fields. If `default` is None, the fields accept None, too.

    Returns:
        A function that changes the class and returns it.
    """

    def extend_class(kind: type[_Class]) -> type[_Class]:
        for name in dict.fromkeys(names):
            if name not in kind.__annotations__:
                kind.__annotations__[name] = PerStage if default is not None else PerStage | None
                setattr(kind, name, default)
        return kind

    return extend_class


def sum_segments(each: Floats, segments: Sequence[int]) -> Floats:
    """Sum the numbers of the segments of each stage.

    Args:
        each: Numbers of the segments, shape (segments, microbatches). Either axis may have length
            1.
        segments: Number of segments of each stage.

    Returns:
        The sums, shape (stages, microbatches) or (stages, 1).
    """
    rows = np.broadcast_to(each, (sum(segments), each.shape[1]))
    sums: Floats = np.add.reduceat(rows, np.cumsum((0, *segments[:-1])), axis=0)
    return sums


def average_stages(value: PerStage, segments: Sequence[int]) -> PerStage:
    """Change a value per segment so that the segments of each stage have the same sum.

    This sum is the mean of the sums of all stages. The segments of a stage have equal parts of it.

    Args:
        value: A value per segment.
        segments: Number of segments of each stage.

    Returns:
        The value per segment. It is one number or one row if all stages have the same number of
        segments. For an array, each microbatch has its own mean.

    Example:
        >>> average_stages((1.0, 3.0), (1, 1)), average_stages((1.0, 4.0, 1.0, 2.0), (3, 1))
        (2.0, (1.3333333333333333, 1.3333333333333333, 1.3333333333333333, 4.0))
    """
    mean = sum_segments(to_grid(value), segments).mean(0)
    if len({*segments}) == 1:
        return from_grid(mean[None] / segments[0])
    return from_grid(mean / np.repeat(segments, segments)[:, None])
