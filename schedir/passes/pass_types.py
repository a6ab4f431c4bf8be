"""Pass: its function, position and options, and the instructions that `check` expects from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.progress_models import ProgressModel
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import Opcode
from schedir.ir.pipeline.field_schema import FieldType
from schedir.ir.program import Program

Boundary = Literal["replicated", "sharded"]
BufferSharing = Literal["minimal", "latency_preserving"]
Mask = NDArray[np.bool_]
Part = Literal["draft", "messages", "ends", "memory", "better"]

PARTS: Final[tuple[Part, ...]] = get_args(Part)


@dataclass(frozen=True)
class Options:
    """How a draft is lowered; `more` has the options that passes bring along, by name.

    `sizes` and `memory_limit` are those that the program is to fit.  `rest` runs the later
    passes on the result of a pass, for a pass that chooses by what becomes of its result; options
    in `more` may have another form there.
    """

    costs: Costs | None = None
    progress_model: ProgressModel = "per_device"
    boundary: Boundary = "replicated"
    overlap: bool = False
    buffer_sharing: BufferSharing | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    sizes: Sizes | None = None
    memory_limit: float | None = None
    rest: Callable[..., Program] = lambda program, **more: program


class ExpectedInstructions(NamedTuple):
    """Which instructions of one kind must be there: `once` has an entry for each key of its row
    (`Index.key`), of update 0 where the row is once in each.  `why` says why there is no other.
    Of one that is missing, `hint` says what is right, and `beside` what is there of its key."""

    op: Opcode
    once: Mask
    why: str = ""
    hint: str = ""
    beside: Opcode | None = None


Present = Callable[[Opcode], Mask]


def _nothing(program: Program, present: Present) -> Iterator[ExpectedInstructions]:
    return iter(())


def _none(program: Program, progress_model: ProgressModel) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Pass:
    """A pass: from a Program to a Program.

    `lower` does it, with the options of the whole lowering, where `wanted` says so.  `part` says
    when: "draft" passes work on drafts, "messages" make of a draft a program with its messages,
    "ends" add what ends updates, "memory" ones what says where values are kept, and "better" ones
    change an order or a number; of one part they come in the order of their `order`.
    `expected` is what `check` then finds of the instructions that it adds, given a function that
    says where those of an opcode are.  A program is right without "memory" and "better" passes,
    too: what such a pass adds is expected only where some of it is there.  `read` tells the options
    with which a program was lowered, as far as they show.  `options` are the names of those in
    `Options.more` that it takes: yes or no, or of the kind that `kinds` has of the name; they say
    something of programs for which `applies` says so.  `about` is what `--help` says of them, or of
    each by name `abouts`.  In a configuration of `schedir train` they are settings of a `section`.
    """

    name: str
    part: Part
    lower: Callable[[Program, Options], Program]
    wanted: Callable[[Program, Options], bool] = lambda program, options: True
    expected: Callable[[Program, Present], Iterator[ExpectedInstructions]] = _nothing
    read: Callable[[Program, ProgressModel], dict[str, Any]] = _none
    options: tuple[str, ...] = ()
    applies: Callable[[Program], bool] = lambda program: True
    kinds: Mapping[str, FieldType] = field(default_factory=dict)
    about: str = ""
    abouts: Mapping[str, str] = field(default_factory=dict)
    section: Literal["pipeline", "memory"] = "pipeline"
    order: int = 0
