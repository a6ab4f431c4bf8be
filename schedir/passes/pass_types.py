"""The record of a pass: function, order, options and expected instructions."""

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
    """The options of a lowering.

    Args:
        costs: The costs of instructions, which determine the order of messages; None for unit
            costs.
        progress_model: The progress model under which the program must finish.
        boundary: Layout of activations between stages: "replicated" over tensor-parallel ranks, or
            "sharded".
        overlap: True to group opposite transfers, and to post receives and gathers early.
        buffer_sharing: The rule for the number of static buffers; None means a separate buffer for
            each value.
        extra_options: The options that passes define: name -> value.
        sizes: The sizes of values, for `memory_limit`.
        memory_limit: The limit of the device memory of a rank in bytes; None for no limit.
        run_later_passes: A function that runs the later passes on a program. A pass uses this
            function to evaluate the final program. Keywords of the call replace entries of
            `extra_options`.
    """

    costs: Costs | None = None
    progress_model: ProgressModel = "per_device"
    boundary: BoundaryLayout = "replicated"
    overlap: bool = False
    buffer_sharing: BufferSharing | None = None
    extra_options: Mapping[str, Any] = field(default_factory=dict)
    sizes: Sizes | None = None
    memory_limit: float | None = None
    run_later_passes: Callable[..., Program] = lambda program, **extra_options: program


class ExpectedInstructions(NamedTuple):
    """The instructions of one opcode that a program must have.

    Attributes:
        op: The opcode.
        required: A mask over the keys of the opcode (`InstructionIndex.key`): True if the program
            must have the instruction with this key. The mask may have only the keys of update 0, or
            of occurrence 0. Then every update or occurrence requires the same instructions.
        reason: The reason in the error if the program has an instruction of this opcode that is not
            required.
        hint: The hint of the error if an instruction is missing.
        counterpart: The opcode of a related instruction with the same key. The error for a missing
            instruction shows this instruction.
    """

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
    """A pass: a function from a program to a program, its options, and its place in the lowering.

    Args:
        name: The name of the pass.
        phase: The phase of the pass. See `schedir.passes`. A program is valid without the passes of
            "memory" and "better".  So `check` expects their instructions only if the program has
            some of these instructions.
        lower: The function that runs the pass with the options of the lowering.
        should_run: A function that returns whether the pass runs for a program and options.
        list_expected: A function that yields the instructions that `check` must find. Its second
            argument is a function from an opcode to a mask of the keys that have an instruction
            (`Inspector.is_present`).
        read_options: A function that returns the options with which a program was lowered, as far
            as its instructions and slots show them.
        option_names: The names of the options in `Options.extra_options` that the pass uses.
        opcodes: For a pass whose only option is yes or no, the opcodes that no other pass inserts.
            A program that has one of these opcodes was lowered with the option. So `--relower` sets
            the option, and errors name the option.
        applies_to: A function that returns whether the options have an effect for a program.
        option_types: Name of an option -> its type. Options that are missing here are yes or no.
        description: The help text of the options in `--help`.
        option_descriptions: Name of an option -> its help text, instead of `description`.
        section: The section of a `schedir train` configuration that has the options.
        order: The order of the pass among the passes of its phase, ascending.
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
    opcodes: tuple[Opcode, ...] = ()
    applies_to: Callable[[Program], bool] = lambda program: True
    option_types: Mapping[str, FieldType] = field(default_factory=dict)
    description: str = ""
    option_descriptions: Mapping[str, str] = field(default_factory=dict)
    section: Literal["pipeline", "memory"] = "pipeline"
    order: int = 0
