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

BoundaryLayout = Literal["replicated", "sharded"]
BufferSharing = Literal["minimal", "latency_preserving"]
Mask = NDArray[np.bool_]
LoweringPhase = Literal["draft", "messages", "ends", "memory", "better"]

LOWERING_PHASES: Final[tuple[LoweringPhase, ...]] = get_args(LoweringPhase)


@dataclass(frozen=True)
class Options:
    """How a draft is lowered; `extra_options` has the options that passes bring along, by name.

    `sizes` and `memory_limit` are those that the program is to fit.  `run_later_passes` runs the
    later passes on the result of a pass, for a pass that chooses by what becomes of its result;
    options in `extra_options` may have another form there.
    """

    costs: Costs | None = None
    progress_model: ProgressModel = "per_device"
    boundary: BoundaryLayout = "replicated"
    overlap: bool = False
    buffer_sharing: BufferSharing | None = None
    extra_options: Mapping[str, Any] = field(default_factory=dict)
    sizes: Sizes | None = None
    memory_limit: float | None = None
    run_later_passes: Callable[..., Program] = lambda program, **more: program


class ExpectedInstructions(NamedTuple):
    """Which instructions of one kind must be there: `required` has an entry for each key of its row
    (`Index.key`), of update 0 where the row is once in each.  `reason` says why there is no other.
    Of one that is missing, `hint` says what is right, and `counterpart` what is there of its
    key."""

    op: Opcode
    required: Mask
    reason: str = ""
    hint: str = ""
    counterpart: Opcode | None = None


PresenceQuery = Callable[[Opcode], Mask]


def _list_none_expected(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    return iter(())


def _read_no_options(program: Program, progress_model: ProgressModel) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Pass:
    """A pass: from a Program to a Program.

    `lower` does it, with the options of the whole lowering, where `should_run` says so.  `phase`
    says
    when: "draft" passes work on drafts, "messages" make of a draft a program with its messages,
    "ends" add what ends updates, "memory" ones what says where values are kept, and "better" ones
    change an order or a number; of one part they come in the order of their `order`.
    `list_expected` is what `check` then finds of the instructions that it adds, given a function
    that says where those of an opcode are.  A program is right without "memory" and "better"
    passes,
    too: what such a pass adds is expected only where some of it is there.  `read_options` tells the
    options with which a program was lowered, as far as they show.  `option_names` are the names of
    those in
    `Options.more` that it takes: yes or no, or of the kind that `option_types` has of the name;
    they say something of programs for which `applies_to` says so.  `description` is what `--help`
    says of them, or of each by name `option_descriptions`.  In a configuration of `schedir train`
    they are settings of a `section`.
    """

    name: str
    phase: LoweringPhase
    lower: Callable[[Program, Options], Program]
    should_run: Callable[[Program, Options], bool] = lambda program, options: True
    list_expected: Callable[[Program, PresenceQuery], Iterator[ExpectedInstructions]] = (
        _list_none_expected
    )
    read_options: Callable[[Program, ProgressModel], dict[str, Any]] = _read_no_options
    option_names: tuple[str, ...] = ()
    applies_to: Callable[[Program], bool] = lambda program: True
    option_types: Mapping[str, FieldType] = field(default_factory=dict)
    description: str = ""
    option_descriptions: Mapping[str, str] = field(default_factory=dict)
    section: Literal["pipeline", "memory"] = "pipeline"
    order: int = 0
