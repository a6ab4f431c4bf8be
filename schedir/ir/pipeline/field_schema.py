"""How the fields of a program are parsed, printed and offered as options.

`PipelineShape` and `Program` declare a field and, with `setting`, how it is said.  The header of
the text, the digest, the options of the command line, the settings of a configuration, and the
refusal of what contradicts a file are all made from these records, `HEADER` in
`schedir/ir/program.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from operator import index
from typing import Any

from schedir.errors import ShapeError, describe, require_bool
from schedir.ir.cost.number_parsing import whole


def _as_it_is(value: Any, _: Any) -> str:
    return str(value)


def _settled(_: str, value: Any, __: Any) -> Any:
    return value


@dataclass(frozen=True)
class FieldType:
    """What the values of a field are, and how they are written.

    `read` makes a value of a text, and raises ValueError for one that is none, which says of itself
    that it `takes` another; `show(value, shape)` makes the text of a value.  `settle(name, value,
    shape)` is what a Program holds where somebody says `value`; it raises ShapeError or UsageError.
    `type` is that of the value in a configuration; of numbers it is from `least` on, to `most`.
    `metavar` stands for the value on the command line: "" where the option alone says yes.
    """

    takes: str
    read: Callable[[str], Any]
    type: Any
    show: Callable[[Any, Any], str] = _as_it_is
    settle: Callable[[str, Any, Any], Any] = _settled
    metavar: str = "N"
    least: int | None = None
    most: int | None = None

    def parse(self, text: str) -> Any:
        """Return the value of a text that a user typed.  Raises ValueError for what is none."""
        value = self.read(text)
        least, most = self.least, self.most
        if least is not None and most is not None and not least <= value <= most:
            raise ValueError(f"must be a whole number from {least} to {most}, not {text!r}")
        return value


def whole_number(least: int, most: int) -> FieldType:
    """Whole numbers from `least` to `most`."""

    def settle(name: str, value: Any, _: Any) -> int:
        try:
            if isinstance(value, bool):
                raise TypeError
            number = index(value)
        except TypeError:
            raise ShapeError(
                f"{name} must be a whole number, not {value!r}", fields=[name]
            ) from None
        if not least <= number <= most:
            raise ShapeError(
                f"{name} must be from {least} to {most}, not {describe(number)}", fields=[name]
            )
        return number

    return FieldType("must be a whole number", whole, int, settle=settle, least=least, most=most)


def _yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(f"{text!r} is not yes or no")
    return text == "yes"


YES_OR_NO = FieldType(
    "is yes or no",
    _yes_or_no,
    bool,
    show=lambda value, _: "yes" if value else "no",
    settle=lambda name, value, _: require_bool(value, name),
    metavar="",
)


def whole_numbers(text: str) -> tuple[int, ...]:
    """The numbers of a text like `0,1,1,0`; ValueError for any other."""
    return tuple(map(whole, text.split(",")))


# What the digest has of a field with a value in a shape: nothing, or one thing or several.
Digest = Callable[[Any, Any], tuple[Any, ...]]


def itself(value: Any, _: Any) -> tuple[Any, ...]:
    """The digest has the value as it is."""
    return (value,)


@dataclass(frozen=True)
class Field:
    """A field of a PipelineShape or a Program: its name, its type, and where it is said.

    `help` describes it on the command line.  The text's header has it `always`, or
    where the field `beside` it, or without one it itself, is not the default.  The digest has what
    `digest` makes of it; without that, the field where it is not the default, so that a new one
    changes no digest of a program that is there.  `in_config` says whether it is a setting of a
    configuration, in its `section`.
    """

    name: str
    kind: FieldType
    of_plan: bool
    default: Any
    help: str
    always: bool
    beside: str
    digest: Digest | None
    in_config: bool
    section: str

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is MISSING

    def of(self, program: Any) -> Any:
        """The value that a program has."""
        return getattr(program.shape if self.of_plan else program, self.name)

    def show(self, program: Any) -> str:
        """The field in the text's header: `ranks 4`."""
        return f"{self.name} {self.kind.show(self.of(program), program.shape)}"

    def is_default(self, program: Any) -> bool:
        """Whether a program has what it has unless somebody says otherwise."""
        return bool(self.of(program) == self.default)


def setting(
    kind: FieldType,
    help: str,
    *,
    always: bool = False,
    beside: str = "",
    digest: Digest | None = None,
    in_config: bool = True,
    section: str = "pipeline",
) -> Mapping[str, Any]:
    """The metadata of a dataclass's field that is a setting of programs; see `Field`."""
    return {
        "kind": kind, "help": help, "always": always, "beside": beside, "digest": digest,
        "in_config": in_config, "section": section,
    }  # fmt: skip


def fields_of(owner: type, *, of_plan: bool) -> tuple[Field, ...]:
    """The fields that a dataclass declares with `setting`, in order."""
    found = []
    for f in dataclasses.fields(owner):
        if "kind" in f.metadata:
            found.append(Field(f.name, of_plan=of_plan, default=f.default, **f.metadata))
    return tuple(found)
