"""Check the types of settings.

Types are annotations: bool, int, float, str, tuples, unions, and Annotated[..., Range].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from schedir.errors import UsageError
from schedir.retired_names import renamed_value


def require_known(name: str, value: str, known: Sequence[str]) -> None:
    """Check that a setting has one of its known values.

    Raises:
        UsageError: The value is not known; the hint has its present name, or the known values.
    """
    if value not in known:
        raise UsageError(
            f"{name} {value!r} is not known",
            hint=renamed_value(name, value) or " or ".join(known),
            fields=[name],
        )


class NumberRange(NamedTuple):
    """The numbers from `least` on; less than `below`, which is infinity by default."""

    least: float
    below: float = math.inf

    def __str__(self) -> str:
        below = "" if self.below == math.inf else f" and below {self.below:.9g}"
        return f"of at least {self.least:g}{below}"


_NAMES = {
    bool: ("true or false", "booleans"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
}


def coerce(value: Any, kind: Any) -> Any:
    """The value as a `kind`: lists become tuples, and whole numbers floats, where one is asked for.

    Raises TypeError if it is none.

    >>> coerce([1, 2], tuple[float, ...])
    (1.0, 2.0)
    """
    parts = get_args(kind)
    if get_origin(kind) is Annotated:
        value = coerce(value, parts[0])
        if not all(limit.least <= value < limit.below for limit in parts[1:]):
            raise TypeError
        return value
    if get_origin(kind) in (Union, UnionType):
        for part in parts:
            try:
                return coerce(value, part)
            except TypeError:
                continue
        raise TypeError
    if get_origin(kind) is tuple and isinstance(value, list):
        each = [parts[0]] * len(value) if ... in parts else parts
        if len(each) != len(value):
            raise TypeError
        return tuple(map(coerce, value, each))
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise TypeError  # as TOML has them
    if kind is float and type(value) is int:
        value = float(value)
    if kind not in _NAMES or type(value) is not kind:
        raise TypeError
    return value


def describe_type(kind: Any, *, many: bool = False) -> str:
    """What a type is called.

    >>> describe_type(str | tuple[int, ...])
    'a string or a list of whole numbers'
    >>> describe_type(tuple[float, float])
    'a list of 2 numbers'
    """
    parts = get_args(kind)
    if get_origin(kind) is Annotated:
        return " ".join([describe_type(parts[0], many=many), *map(str, parts[1:])])
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(describe_type(part) for part in parts if part is not NoneType)
    if get_origin(kind) is tuple:
        number = "" if ... in parts else f"{len(parts)} "
        return f"{'lists' if many else 'a list'} of {number}{describe_type(parts[0], many=True)}"
    return _NAMES[kind][many]
