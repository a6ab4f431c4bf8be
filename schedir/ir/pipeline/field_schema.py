"""Schema of the fields of a program, for parsing, printing and options.

`PipelineShape` and `Program` declare each field with `make_field_metadata`. `collect_fields` makes
`Field` records from these declarations. `HEADER_FIELDS` in `schedir/ir/program.py` lists all
records. These records define the header of a program's text, the digest, the command-line options
and the settings of a configuration. The records also define the error for an option that
contradicts a program file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
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
    """The type of a field's values, and their text form.

    Args:
        requirement: The verb phrase of an error about a wrong text, such as "must be yes or no".
        from_text: Parses a text. The function raises ValueError for a wrong text.
        type: Python type of the value in a configuration.
        to_text: Formats a value. Its arguments are the value and the shape. The default is `str`.
        resolve: Converts a value that a caller gives into the value that a Program stores. Its
            arguments are the name of the field, the value and the shape. The function raises
            ShapeError or UsageError for a wrong value. The default accepts every value.
        metavar: Placeholder of the value on the command line. "" means a flag without a value.
        min_value: The smallest number that is allowed. None means no limit.
        max_value: The largest number that is allowed. None means no limit.
        argument_type: Type of the value as an argument of `compile`, as source text. "" means the
            name of `type`.
    """

    requirement: str
    from_text: Callable[[str], Any]
    type: Any
    to_text: Callable[[Any, Any], str] = _format_as_str
    resolve: Callable[[str, Any, Any], Any] = _accept_value
    metavar: str = "N"
    min_value: int | None = None
    max_value: int | None = None
    argument_type: str = ""

    def parse(self, text: str) -> Any:
        """Parse a text that a user typed.

        Args:
            text: The text.

        Returns:
            The value.

        Raises:
            ValueError: The text is not a value of this type, or its number is out of range.
        """
        value = self.from_text(text)
        min_value, max_value = self.min_value, self.max_value
        if min_value is not None and max_value is not None and not min_value <= value <= max_value:
            raise ValueError(f"must be an integer from {min_value} to {max_value}, not {text!r}")
        return value


def make_choice_type(requirement: str, choices: Collection[str], metavar: str) -> FieldType:
    """Return a field type that accepts only the given words in a text.

    Args:
        requirement: The verb phrase of the error, such as "must be early or late".
        choices: The words.
        metavar: Placeholder of the value on the command line.
    """

    def parse_choice(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{requirement}, not {text!r}")
        return text

    return FieldType(requirement, parse_choice, str, metavar=metavar)


def make_integer_type(min_value: int, max_value: int, subject: str = "an integer") -> FieldType:
    """Return a field type for integers in a range.

    Args:
        min_value: The smallest number that is allowed.
        max_value: The largest number that is allowed.
        subject: The description of the number in errors, such as "a number of stages".

    Returns:
        The type. Its `resolve` raises ShapeError for other values, and also for booleans.
    """

    def resolve_integer(name: str, value: Any, _: Any) -> int:
        try:
            if isinstance(value, bool):
                raise TypeError
            number = index(value)
        except TypeError:
            is_list = isinstance(value, list | tuple | set) and len(value) >= min_value
            raise ShapeError(
                f"{name} must be {subject}, not {describe(value)}",
                hint=f"{name}={len(value)}" if is_list and subject != "an integer" else "",
                fields=[name],
            ) from None
        if not min_value <= number <= max_value:
            raise ShapeError(
                f"{name} must be from {min_value} to {max_value}, not {describe(number)}",
                fields=[name],
            )
        return number

    return FieldType(
        f"must be {subject}",
        parse_integer,
        int,
        resolve=resolve_integer,
        min_value=min_value,
        max_value=max_value,
    )


def _parse_yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(f"must be yes or no, not {text!r}")
    return text == "yes"


YES_OR_NO_TYPE = FieldType(
    "must be yes or no",
    _parse_yes_or_no,
    bool,
    to_text=lambda value, _: "yes" if value else "no",
    resolve=lambda name, value, _: require_bool(value, name),
    metavar="",
)


def parse_integers(text: str) -> tuple[int, ...]:
    """Return the numbers of a text such as `0,1,1,0`.

    Args:
        text: Integers with commas between them.

    Returns:
        The numbers.

    Raises:
        ValueError: The text has another form.
    """
    return tuple(map(parse_integer, text.split(",")))


# A function that takes the value of a field and the shape, and returns the entries of the field in
# `Program.digest`.
DigestFunction = Callable[[Any, Any], tuple[Any, ...]]


def digest_value(value: Any, _: Any) -> tuple[Any, ...]:
    """Return the value as the only entry of its field in `Program.digest`.

    Args:
        value: Value of the field.
        _: The shape, which is not used.

    Returns:
        A tuple with the value.
    """
    return (value,)


@dataclass(frozen=True)
class Field:
    """A field of a `PipelineShape` or a `Program`: its name, its type, and where it appears.

    Args:
        name: Name of the field.
        field_type: Type of its values.
        is_shape_field: True for a field of PipelineShape, False for one of Program.
        default: The default value, or `dataclasses.MISSING` if there is none.
        help: Description on the command line.
        is_always_shown: If True, the text's header always has the field.
        shown_with: Name of another field. The header shows this field if the other field differs
            from its default. With "", the header shows this field if its own value differs from its
            default.
        digest: A function that returns the field's entries in `Program.digest`. If `digest` is
            None, the digest contains the field only if its value is not the default. So a new field
            does not change the digests of existing programs.
        in_config: If True, the field is a setting of a configuration.
        section: The section of the configuration that has the setting.
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
        """Return whether the field has no default."""
        return self.default is MISSING

    def get_value(self, program: Any) -> Any:
        """Return the value of the field in a program.

        Args:
            program: A Program.

        Returns:
            The value of the attribute of the shape or the program.
        """
        return getattr(program.shape if self.is_shape_field else program, self.name)

    def to_text(self, program: Any) -> str:
        """Format the field for the header of a program's text, such as `ranks 4`.

        Args:
            program: A Program.

        Returns:
            The name and the value, with a space between them.
        """
        return f"{self.name} {self.field_type.to_text(self.get_value(program), program.shape)}"

    def is_default(self, program: Any) -> bool:
        """Return whether the field has its default value in a program.

        Args:
            program: A Program.

        Returns:
            True if the value equals the default.
        """
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
    """Return the metadata of a dataclass field that is a setting of programs.

    Args:
        field_type: See `Field`.
        help: See `Field`.
        is_always_shown: See `Field`.
        shown_with: See `Field`.
        digest: See `Field`.
        in_config: See `Field`.
        section: See `Field`.

    Returns:
        The mapping for `dataclasses.field(metadata=...)`. `collect_fields` reads this mapping.
    """
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
    """Return the fields that a dataclass declares with `make_field_metadata`, in order.

    Args:
        owner: The dataclass.
        is_shape: True for PipelineShape, False for Program.

    Returns:
        A record for each field. Other fields of the dataclass are ignored.
    """
    result = []
    for f in dataclasses.fields(owner):
        if "field_type" in f.metadata:
            result.append(Field(f.name, is_shape_field=is_shape, default=f.default, **f.metadata))
    return tuple(result)
