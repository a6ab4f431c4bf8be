"""Check the types of settings.

A type is an annotation: bool, int, float, str, a tuple, a union, or Annotated[..., NumberRange].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from schedir.errors import UsageError
from schedir.retired_names import get_rename_hint


def require_known(name: str, value: str, known: Sequence[str], hint: str = "") -> None:
    """Check that a setting has one of its possible values.

    Args:
        name: The name of the setting.
        value: The value.
        known: The possible values.
        hint: The hint for an unknown value. The default lists the possible values.

    Raises:
        UsageError: The value is unknown. If the value was renamed, the hint has the current name.
            Otherwise the error has `hint`.
    """
    if value not in known:
        raise UsageError(
            f"{name} {value!r} is not known",
            hint=get_rename_hint(name, value) or hint or " or ".join(known),
            fields=[name],
        )


class NumberRange(NamedTuple):
    """A range of numbers.

    Args:
        minimum: The smallest number.
        below: All numbers are less than this bound. The default is infinity.
    """

    minimum: float
    below: float = math.inf

    def __str__(self) -> str:
        below = "" if self.below == math.inf else f" and below {self.below:.9g}"
        return f"of at least {self.minimum:g}{below}"


_TYPE_NAMES = {
    bool: ("true or false", "booleans"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
}


def coerce(value: Any, type_hint: Any) -> Any:
    """Convert a value from TOML to a type.

    Lists become tuples. Integers become floats if the type is float.

    Args:
        value: The value.
        type_hint: The annotation of the type.

    Raises:
        TypeError: The value does not have the type, or is outside of its range.

    Example:
        >>> coerce([1, 2], tuple[float, ...])
        (1.0, 2.0)
    """
    parts = get_args(type_hint)
    if get_origin(type_hint) is Annotated:
        value = coerce(value, parts[0])
        if not all(limit.minimum <= value < limit.below for limit in parts[1:]):
            raise TypeError
        return value
    if get_origin(type_hint) in (Union, UnionType):
        for part in parts:
            try:
                return coerce(value, part)
            except TypeError:
                continue
        raise TypeError
    if get_origin(type_hint) is tuple and isinstance(value, list):
        item_types = [parts[0]] * len(value) if ... in parts else parts
        if len(item_types) != len(value):
            raise TypeError
        return tuple(map(coerce, value, item_types))
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise TypeError  # TOML has 64-bit integers.
    if type_hint is float and type(value) is int:
        value = float(value)
    if type_hint not in _TYPE_NAMES or type(value) is not type_hint:
        raise TypeError
    return value


def describe_type(type_hint: Any, *, is_plural: bool = False) -> str:
    """Return a text that describes a type.

    Args:
        type_hint: The annotation of the type.
        is_plural: If true, return the plural.

    Example:
        >>> describe_type(str | tuple[int, ...])
        'a string or a list of integers'
        >>> describe_type(tuple[float, float])
        'a list of 2 numbers'
    """
    parts = get_args(type_hint)
    if get_origin(type_hint) is Annotated:
        return " ".join([describe_type(parts[0], is_plural=is_plural), *map(str, parts[1:])])
    if get_origin(type_hint) in (Union, UnionType):
        return " or ".join(describe_type(part) for part in parts if part is not NoneType)
    if get_origin(type_hint) is tuple:
        number = "" if ... in parts else f"{len(parts)} "
        return (
            f"{'lists' if is_plural else 'a list'} of "
            f"{number}{describe_type(parts[0], is_plural=True)}"
        )
    return _TYPE_NAMES[type_hint][is_plural]
