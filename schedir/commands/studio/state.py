"""Define the state of a studio: a schedule, a program or code, and options.

The values of options are texts, as on the command line. So the studio can write the state as a
command, and errors can name the options of this command.
"""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

import numpy as np

from schedir.commands.common.program_options import PROGRAM_OPTIONS, unknown_option_error
from schedir.commands.common.schedule_options import (
    make_request,
    parse_byte_option,
    parse_costs,
    parse_sizes,
)
from schedir.errors import SchedirError, UsageError, describe
from schedir.io.option_spelling import option_name, option_words
from schedir.io.program_request import Request
from schedir.io.source_loader import Source
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.stage_segments import merge_segments
from schedir.ir.program import HEADER_FIELDS, Program
from schedir.passes.splitting.stage_segmentation import PER_CHUNK_FIELDS, SHARED_FIELDS
from schedir.schedules import get_built_in_schedules
from schedir.schedules.schedule_algebra import apply_schedule_defaults

# Name -> parser of the options that are neither fields of a program nor options of passes.
PREDICTION_OPTIONS: Final[Mapping[str, Callable[[str], Any]]] = {
    "costs": parse_costs,
    "sizes": parse_sizes,
    "memory_limit": parse_byte_option,
    "progress_model": str,
}
# Options that `schedir compare` accepts for a program, if they do not contradict the program.
_PROGRAM_FILE_OPTIONS: Final = PREDICTION_OPTIONS.keys() | {f.name for f in HEADER_FIELDS}


class CodeError(UsageError):
    """Raised if the code of the editor cannot be used. `line` is the line of the error, or 0."""

    def __init__(self, fact: str, *, line: int = 0, hint: str = "") -> None:
        super().__init__(fact, hint=hint, fields=["code"])
        self.line: int = line


@dataclass(frozen=True)
class StudioState:
    """The input of a studio: a schedule, a program or code, and options.

    Args:
        schedule: The name of a built-in schedule, with its options in brackets.
        program: The text of a program, which replaces the schedule.
        code: Python code with a schedule function, which replaces the schedule.
        function: The name of the function in `code`. "" means the last function of the code.
        run: True if the studio shows the run with which it was started.
        other: The name of a built-in schedule for a comparison, or "".
        challenge: The name of the challenge that the user solves, or "".
        options: Name -> text of each option that is set. The names are those of `schedir options`,
            and `costs`, `sizes`, `memory_limit` and `progress_model`. Costs and sizes are those of
            a stage of the schedule, the program or the code.
    """

    schedule: str = "one_f_one_b"
    program: str = ""
    code: str = ""
    function: str = ""
    run: bool = False
    other: str = ""
    challenge: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: object) -> StudioState:
        """Return the state in a JSON object, with the defaults for missing keys.

        Args:
            data: The object, in the form that `dataclasses.asdict` returns.

        Raises:
            UsageError: A key is unknown, or a value has a wrong type.
        """
        known = {f.name: type(f.default) for f in fields(cls)} | {"options": dict}
        if not isinstance(data, dict) or not data.keys() <= known.keys():
            raise UsageError(
                f"a state must be a JSON object with no other keys than {', '.join(known)}"
            )
        for name, value in data.items():
            if not isinstance(value, known[name]):
                kind = known[name].__name__
                raise UsageError(
                    f"{name} of the state must be a {kind}, not {describe(value)}", fields=[name]
                )
        options = data.get("options", {})
        if not all(isinstance(text, str) for pair in options.items() for text in pair):
            raise UsageError(
                "in the state of the studio, the names and values of options must be strings",
                fields=["options"],
            )
        given_options = {name: text for name, text in options.items() if text.strip()}
        return cls(**data | {"options": given_options})

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON object."""
        return asdict(self)


def make_state_request(
    state: StudioState, source: Source, *, for_comparison: bool = False
) -> Request:
    """Return the request for a source with the options of a state.

    Options that do not apply to the source are ignored. For a draft, the options of the shape are
    ignored. For a lowered program or a run, only the options in `PREDICTION_OPTIONS` apply.

    Args:
        state: The state.
        source: The schedule, program or run.
        for_comparison: See `Request`. The options of the state must be those of
            `make_comparison_options`.

    Raises:
        UsageError: An option is unknown, or its value is invalid.
    """
    loaded = source.schedule_or_program
    args = Namespace(**dict.fromkeys([*PROGRAM_OPTIONS, *PREDICTION_OPTIONS]), relower=False)
    args.overlap = False
    for name, text in state.options.items():
        if applies_to(name, loaded):
            setattr(args, name, _parse_option(name, text.strip()))
    return make_request(
        args, source, lower_drafts=isinstance(loaded, Program), for_comparison=for_comparison
    )


def applies_to(name: str, loaded: object) -> bool:
    """Return whether an option applies to a schedule or a program.

    Args:
        name: The name of the option.
        loaded: The schedule or the program.
    """
    if not isinstance(loaded, Program) or name in PREDICTION_OPTIONS:
        return True
    option = PROGRAM_OPTIONS.get(name)
    return option is None or (loaded.is_draft and not option.is_shape_option)


def _parse_option(name: str, text: str) -> Any:
    """Return the value of an option. Errors have the name of the option in `fields`."""
    if name not in PROGRAM_OPTIONS and name not in PREDICTION_OPTIONS:
        raise unknown_option_error(name)
    if text.startswith("@"):
        raise UsageError(
            f"{name} is {text!r:.80}, but the studio reads no files: write the values",
            fields=[name],
        )
    flag = f"--{name.replace('_', '-')}"
    try:
        if name in PREDICTION_OPTIONS:
            return PREDICTION_OPTIONS[name](text)
        flag = option_name(name)
        return PROGRAM_OPTIONS[name].kind.parse(text)
    except (ValueError, ArgumentTypeError) as error:
        raise UsageError(f"{flag} {error}", fields=[name]) from None
    except UsageError as error:
        error.fields = error.fields or (name,)
        raise


def make_comparison_options(state: StudioState, program: Program) -> dict[str, str]:
    """Return the options of a state in the form that `schedir compare` takes.

    In a comparison, options are for a model with one stage per rank. The result has
    `stages_per_rank` and `placement` only if they differ from the defaults of the state's schedule.

    Args:
        state: The state.
        program: The program of the state.

    Raises:
        UsageError: The state has an option that has no such form.
    """
    shape, segments, chunks = merge_segments(
        program.shape, program.segment_boundaries, program.chunks_per_microbatch
    )
    for name in ("frozen_stages", "stage_segments"):
        if name in state.options and shape.stages_per_rank > 1:
            raise UsageError(
                f"a comparison with {name} needs one stage per rank, but {program.name} has "
                f"{shape.stages_per_rank}",
                fields=["other", name],
            )
    options = {**state.options, "ranks": str(shape.ranks), "microbatches": str(shape.microbatches)}
    if max(segments) > 1:
        _require_equal_segments(options, program.name)
    if state.program or _has_default_stages(state, shape):
        for name in ("stages_per_rank", "placement"):
            options.pop(name, None)
    factor: float | Sequence[float] = program.shape.stages / shape.ranks
    if len({*segments}) > 1:
        factor = segments
    return scale_stage_values(options, factor, chunks)


def _require_equal_segments(options: Mapping[str, str], name: str) -> None:
    """Raise UsageError if a cost or a size differs between segments.

    A comparison divides the costs of a stage equally over its segments.
    """
    for option in {"costs", "sizes"} & options.keys():
        for field_name, value in _split_fields(options[option]):
            if field_name in SHARED_FIELDS and ":" in value:
                raise UsageError(
                    f"a comparison of {name} with segments needs one number for all segments as "
                    f"{field_name}, not {value!r:.80}",
                    fields=["other", option],
                )


def _has_default_stages(state: StudioState, shape: PipelineShape) -> bool:
    """Return whether a shape has the stages of each rank that a schedule has without options."""
    default = PipelineShape(shape.ranks, shape.microbatches)
    if not state.code:
        schedule = get_built_in_schedules()[state.schedule.partition("(")[0].strip()]
        try:
            default = apply_schedule_defaults(schedule, default).resolve_defaults()
        except SchedirError:
            return False
    return np.array_equal(shape.replica_ranks, default.replica_ranks)


def scale_stage_values(
    options: Mapping[str, str], factor: float | Sequence[float], chunks: int = 1
) -> dict[str, str]:
    """Convert the costs and sizes in options to stages of another length.

    Args:
        options: Name -> text of each option, with valid costs and sizes.
        factor: The length of a new stage, divided by the length of an old stage, or one such number
            for each new stage. Lists with one number per stage are not multiplied by it.
        chunks: The number of chunks of each microbatch, which the new microbatches are not divided
            into.

    Returns:
        All options, with the new costs and sizes.

    Example:
        >>> scale_stage_values({"costs": "F=1,B=2:3,send=0.1", "sizes": "saved=1GB"}, 2)
        {'costs': 'F=2,B=2:3,send=0.1', 'sizes': 'saved=2GB'}
        >>> scale_stage_values({"costs": "F=1"}, (3, 1))
        {'costs': 'F=3:1'}
    """
    scaled = dict(options)
    costs = options.get("costs", "")
    if not re.search(r"\bF\s*=", costs):  # the default of F does not depend on the stages
        scaled["costs"] = ",".join(["F=1", *filter(None, [costs])])
    factors = [*factor] if isinstance(factor, Sequence) else [factor]
    for option in {"costs", "sizes"} & scaled.keys():
        parts = []
        for name, value in _split_fields(scaled[option]):
            chunk_factor = float(chunks) if name in PER_CHUNK_FIELDS else 1.0
            is_scaled = name in SHARED_FIELDS and ":" not in value
            texts = [
                _multiply_numbers(value, chunk_factor * stage_factor)
                for stage_factor in (factors if is_scaled else [1.0])
            ]
            parts.append(f"{name}={':'.join(texts)}")
        scaled[option] = ",".join(parts)
    return scaled


def _split_fields(text: str) -> list[tuple[str, str]]:
    """Return the name and the value of each cost or size in a text."""
    fields_in_text = []
    for part in filter(str.strip, text.split(",")):
        name, _, value = part.partition("=")
        fields_in_text.append((name.strip(), value.strip()))
    return fields_in_text


def _multiply_numbers(text: str, factor: float) -> str:
    """Return a text with each of its numbers multiplied. Units such as "GB" stay."""
    if factor == 1:
        return text
    number = r"(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
    return re.sub(number, lambda match: _format_number(float(match[0]) * factor), text)


def _format_number(number: float) -> str:
    """Return a number without a negative exponent, which numbers of bytes cannot have."""
    text = f"{number:.12g}"
    return np.format_float_positional(float(text), trim="-") if "e-" in text else text


def format_options(options: Mapping[str, str]) -> list[str]:
    """Return options as words of the command line.

    Args:
        options: Name -> text of each option.
    """
    words = []
    for name, text in options.items():
        if name in PREDICTION_OPTIONS:
            words += [f"--{name.replace('_', '-')}", text]
        else:
            words += option_words(name, text)
    return words


def format_command(state: StudioState, program: Program, run_file: str = "") -> str:
    """Return the command that draws or compares the timelines of a state.

    Args:
        state: The state.
        program: The program of the state.
        run_file: The file of the run, if the state shows a run.

    Returns:
        The command, or "" if `schedir compare` has no options for this comparison.
    """
    source, name = state.schedule, program.name
    options = state.options
    is_comparison = bool(state.other) and not state.run
    if is_comparison:
        options = make_comparison_options(state, program)
        # `schedir compare` gives both schedules the same placement, and has no options of the
        # lowering if one of them is a program.
        if "placement" in options or (
            state.program and not options.keys() <= _PROGRAM_FILE_OPTIONS
        ):
            return ""
    elif state.run or state.program:  # The file contains the other options.
        options = {key: text for key, text in options.items() if key in PREDICTION_OPTIONS}
    if state.run:
        source = run_file
    elif state.program:
        source = format_file_name(name, "sched")
    elif state.code:
        source = f"{format_file_name(name, 'py')}:{name}"
    words = ["compare", source, state.other] if is_comparison else ["draw", source]
    return shlex.join(["schedir", *words, *format_options(options)])


def format_file_name(name: str, suffix: str) -> str:
    """Return the name of the file to which a program is exported.

    Args:
        name: The name of the program.
        suffix: The suffix without the dot.
    """
    letters = (letter if letter.isalnum() or letter in "-_" else "_" for letter in name)
    return f"{''.join(letters) or 'mine'}.{suffix}"
