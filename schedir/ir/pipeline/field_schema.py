"""How the fields of a program are parsed, printed and offered as options.

`PipelineShape` and `Program` declare a field and, with `make_field_metadata`, how it is said.  The
header of the text, the digest, the options of the command line, the settings of a configuration,
and the refusal of what contradicts a file are all made from these records, `HEADER` in
`schedir/ir/program.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from operator import index
from typing import Any

from schedir.errors import ShapeError, describe, require_bool
from schedir.ir.cost.number_parsing import parse_integer


def _format_as_str(value: Any, _: Any) -> str:
    return str(value)


def _accept_value(_: str, value: Any, __: Any) -> Any:
    return value


@dataclass(frozen=True)
class FieldType:
    """What the values of a field are, and how they are written.

    `from_text` makes a value of a text, and raises ValueError for one that is none, which says of
    itself that it `requirement` another; `show(value, shape)` makes the text of a value.
    `settle(name, value, shape)` is what a Program holds where somebody says `value`; it raises
    ShapeError or UsageError.
    `type` is that of the value in a configuration; of numbers it is from `min_value` on, to
    `max_value`.
    `metavar` stands for the value on the command line: "" where the option alone says yes.
    """

    requirement: str
    from_text: Callable[[str], Any]
    type: Any
    to_text: Callable[[Any, Any], str] = _format_as_str
    resolve: Callable[[str, Any, Any], Any] = _accept_value
    metavar: str = "N"
    min_value: int | None = None
    max_value: int | None = None

    def parse(self, text: str) -> Any:
        """Return the value of a text that a user typed.  Raises ValueError for what is none."""
        value = self.from_text(text)
        least, most = self.min_value, self.max_value
        if least is not None and most is not None and not least <= value <= most:
            raise ValueError(f"must be a whole number from {least} to {most}, not {text!r}")
        return value


def make_integer_type(min_value: int, max_value: int) -> FieldType:
    """Whole numbers from `min_value` to `max_value`."""

    def settle(name: str, value: Any, _: Any) -> int:
        try:
            if isinstance(value, bool):
                raise TypeError
            number = index(value)
        except TypeError:
            raise ShapeError(
                f"{name} must be a whole number, not {value!r}", fields=[name]
            ) from None
        if not min_value <= number <= max_value:
            raise ShapeError(
                f"{name} must be from {min_value} to {max_value}, not {describe(number)}",
                fields=[name],
            )
        return number

    return FieldType(
        "must be a whole number",
        parse_integer,
        int,
        resolve=settle,
        min_value=min_value,
        max_value=max_value,
    )


def _parse_yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(f"{text!r} is not yes or no")
    return text == "yes"


YES_OR_NO_TYPE = FieldType(
    "is yes or no",
    _parse_yes_or_no,
    bool,
    to_text=lambda value, _: "yes" if value else "no",
    resolve=lambda name, value, _: require_bool(value, name),
    metavar="",
)


def parse_integers(text: str) -> tuple[int, ...]:
    """The numbers of a text like `0,1,1,0`; ValueError for any other."""
    return tuple(map(parse_integer, text.split(",")))


# What the digest has of a field with a value in a shape: nothing, or one thing or several.
DigestFunction = Callable[[Any, Any], tuple[Any, ...]]


def digest_value(value: Any, _: Any) -> tuple[Any, ...]:
    """The digest has the value as it is."""
    return (value,)


@dataclass(frozen=True)
class Field:
    """A field of a PipelineShape or a Program: its name, its type, and where it is said.

    `help` describes it on the command line.  The text's header has it `is_always_shown`, or
    where the field `shown_with` it, or without one it itself, is not the default.  The digest has
    what
    `digest` makes of it; without that, the field where it is not the default, so that a new one
    changes no digest of a program that is there.  `in_config` says whether it is a setting of a
    configuration, in its `section`.
    """

    name: str
    field_type: FieldType
    is_shape_field: bool
    default: Any
    help: str
    is_always_shown: bool
    shown_with: str
    digest: DigestFunction | None
    in_config: bool
    section: str

    @property
    def is_required(self) -> bool:
        """Whether there is no default."""
        return self.default is MISSING

    def get_value(self, program: Any) -> Any:
        """The value that a program has."""
        return getattr(program.shape if self.is_shape_field else program, self.name)

    def to_text(self, program: Any) -> str:
        """The field in the text's header: `ranks 4`."""
        return f"{self.name} {self.field_type.to_text(self.get_value(program), program.shape)}"

    def is_default(self, program: Any) -> bool:
        """Whether a program has what it has unless somebody says otherwise."""
        return bool(self.get_value(program) == self.default)


def make_field_metadata(
    field_type: FieldType,
    help: str,
    *,
    is_always_shown: bool = False,
    shown_with: str = "",
    digest: DigestFunction | None = None,
    in_config: bool = True,
    section: str = "pipeline",
) -> Mapping[str, Any]:
    """The metadata of a dataclass's field that is a setting of programs; see `Field`."""
    return {
        "field_type": field_type,
        "help": help,
        "is_always_shown": is_always_shown,
        "shown_with": shown_with,
        "digest": digest,
        "in_config": in_config,
        "section": section,
    }


def collect_fields(owner: type, *, is_shape: bool) -> tuple[Field, ...]:
    """The fields that a dataclass declares with `make_field_metadata`, in order."""
    found = []
    for f in dataclasses.fields(owner):
        if "field_type" in f.metadata:
            found.append(Field(f.name, is_shape_field=is_shape, default=f.default, **f.metadata))
    return tuple(found)
