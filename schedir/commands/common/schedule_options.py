"""Define the options for compiling a schedule, and convert them into a `Request`."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import fields
from typing import Any, Final, TypeVar

import numpy as np

from schedir.analysis.progress_models import MODELS
from schedir.commands.common.program_options import PROGRAM_OPTIONS, add_program_options
from schedir.errors import SchedirError, ShapeError, UsageError, format_bytes
from schedir.io.cluster_file import load_cluster
from schedir.io.files import read_text
from schedir.io.option_spelling import FIELDS_WITH_FLAGS, option_name, option_words
from schedir.io.program_request import Request
from schedir.io.source_loader import Source
from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.number_parsing import parse_decimal, parse_integer
from schedir.ir.cost.sizes import Sizes, parse_bytes
from schedir.ir.pipeline.field_schema import Field
from schedir.ir.program import HEADER_FIELDS, Program
from schedir.passes.pass_registry import PASS_OPTIONS
from schedir.retired_names import RENAMED_COSTS, RENAMED_SIZES, find_similar_name

_Value = TypeVar("_Value")

SOURCE_HELP = (
    "a built-in schedule or file.py:function, with its options in brackets "
    "(interleaved(group=4)); a program FILE.sched; or a run FILE.timeline"
)
# The default shape is small, so that users can read the output.
DEFAULT_RANKS, MICROBATCHES_PER_RANK = 4, 2
# A size below this number of bytes and this share of the memory limit probably lacks its unit.
_MIN_PLAUSIBLE_SIZE: Final = 1000
_MIN_PLAUSIBLE_SHARE: Final = 1e-6
_COSTS_HELP = (
    "times of instructions: F=1,B=2,send=0.1; ':' separates stages (F=1:1:2), '/' separates "
    "microbatches (F=10/20 for all stages, F=10/20:30/40 for two stages); @FILE reads them from a "
    "file. By default, F is 1. If B is given, I and W are each half of B; otherwise, I and W are "
    "each equal to F, and B is I+W. All other costs are 0"
)


def add_source(parser: argparse.ArgumentParser, *, allows_several: bool = False) -> None:
    """Add the argument for a schedule, a program or a run.

    Args:
        parser: The parser of the command.
        allows_several: True if the command accepts several arguments.
    """
    parser.add_argument(
        "source", metavar="SCHEDULE", nargs="+" if allows_several else None, help=SOURCE_HELP
    )


def add_compile_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for compiling a schedule.

    The options default to None, because a FILE.sched may contain the values.

    Args:
        parser: The parser of the command.
    """
    group = parser.add_argument_group("compiling a schedule (a FILE.sched already has its shape)")
    _add_shape_flags(group)
    _fill_lowering_group(group, has_shape_options=True)


def add_search_options(
    parser: argparse.ArgumentParser, *, costs_help: str
) -> argparse._ArgumentGroup:
    """Add the options for the problem of a schedule search, and return their group.

    Args:
        parser: The parser of the command.
        costs_help: The help of `--costs`.
    """
    group = parser.add_argument_group("the problem")
    _add_shape_flags(group)
    _add_costs_option(group, costs_help)
    _add_memory_options(group)
    add_program_options(
        group, _require_shape_option, has_shape_options=True, has_lowering_options=False
    )
    return group


def add_lowering_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for lowering a draft, for commands whose sources contain the shape.

    Args:
        parser: The parser of the command.
    """
    _fill_lowering_group(parser.add_argument_group("lowering"), has_shape_options=False)


def _add_shape_flags(group: argparse._ArgumentGroup) -> None:
    """Add the most common options of the shape as separate flags, such as `--ranks`."""
    for name in FIELDS_WITH_FLAGS:
        option = PROGRAM_OPTIONS[name]
        group.add_argument(
            "--" + name.replace("_", "-"), dest=name, default=None,
            type=make_argument_type(option.kind.parse), metavar=option.kind.metavar,
            help=option.help.format(ranks=DEFAULT_RANKS, per_rank=MICROBATCHES_PER_RANK),
        )  # fmt: skip


def _require_shape_option(name: str, text: str) -> None:
    """Raise an error for an option of the lowering, because `search` does not lower schedules."""
    if not PROGRAM_OPTIONS[name].is_shape_option:
        raise UsageError(
            f"-O {name} is an option of the lowering, but schedir search only orders compute "
            "instructions",
            hint="schedir search ... -o found.sched, then schedir simulate found.sched --relower "
            f"-O {shlex.quote(text)}",
            fields=[name],
        )


def _fill_lowering_group(group: argparse._ArgumentGroup, *, has_shape_options: bool) -> None:
    def accept(name: str, text: str) -> None:
        if PROGRAM_OPTIONS[name].is_shape_option and not has_shape_options:
            raise UsageError(
                f"-O {name} does not apply: the CSV or the traces already give the shape",
                fields=[name],
            )

    add_program_options(group, accept, has_shape_options=has_shape_options)
    group.add_argument(
        "--relower", action="store_true",
        help="remove the communication from the program FILE.sched, and add it again",
    )  # fmt: skip
    models = [f"{model} (default)" if model == "per_device" else model for model in MODELS]
    group.add_argument(
        "--progress-model", metavar="MODEL",
        help="the progress model: the rule that decides which transfers wait for each other in a "
        "queue. "
        f"{', '.join(models[:-1])} or {models[-1]}",
    )  # fmt: skip
    _add_costs_option(group, _COSTS_HELP)
    group.add_argument(
        "--cluster", metavar="FILE.toml",
        help="the speeds of a cluster. From them and --sizes, schedir computes the costs of "
        "messages, reductions and optimizer steps that --costs does not give. Give --costs in "
        "seconds. `schedir examples` writes files to edit, such as examples/clusters/a100.toml",
    )  # fmt: skip
    _add_memory_options(group)


def _add_costs_option(group: argparse._ArgumentGroup, help: str) -> None:
    group.add_argument("--costs", type=parse_costs, metavar="COSTS", help=help)


def _add_memory_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sizes", type=parse_sizes, metavar="SIZES",
        help="bytes of values of a stage: activation=16MB,saved=1.2GB,model_states=20GB; "
        "saved=1GB:2GB per stage; saved=1GB/2GB per microbatch. In compare and recommend, saved "
        "and model_states are per rank; the command splits them evenly over the rank's stages",
    )  # fmt: skip
    group.add_argument(
        "--memory-limit", type=parse_byte_option, metavar="BYTES",
        help="the most bytes that a rank may use, such as 40GB or 40GiB",
    )  # fmt: skip


def make_argument_type(
    parse: Callable[[str], _Value], requirement: str = ""
) -> Callable[[str], _Value]:
    """Return a function that parses the values of an option for argparse.

    Args:
        parse: A function that parses a text. It raises ValueError if the text is not valid.
        requirement: What the value must be, for the error; by default the message of `parse`.
    """

    def read(text: str) -> _Value:
        try:
            return parse(text)
        except ValueError as error:
            message = f"{requirement}, not {text!r}" if requirement else str(error)
            raise argparse.ArgumentTypeError(message) from None

    return read


def _parse_seconds(text: str) -> float:
    try:
        return parse_decimal(text)
    except ValueError:
        raise ValueError(f"must be a number of seconds, such as 60, not {text!r:.60}") from None


def _parse_positive_number(text: str) -> float:
    if (number := parse_decimal(text)) <= 0:
        raise ValueError(f"must be more than 0, not {text!r}")
    return number


parse_count: Final = make_argument_type(parse_integer)
parse_number: Final = make_argument_type(parse_decimal)
parse_seconds: Final = make_argument_type(_parse_seconds)
parse_positive_number: Final = make_argument_type(_parse_positive_number)
parse_byte_option: Final = make_argument_type(
    parse_bytes, "must be a number of bytes, such as 40GB"
)


def parse_costs(text: str) -> Costs:
    """Return the costs in the text of `--costs`.

    Args:
        text: Costs by name, such as `F=1,B=2,send=0.1`. `F=1:1:2` has one value per stage, and
            `F=1/2:3/4` one value per stage and microbatch. `@FILE` reads the text from a file.

    Raises:
        UsageError: A name is unknown or given twice, or a value is not a number.
    """
    return Costs(**_parse_fields("cost", Costs, text, parse_decimal, "1"))


def parse_sizes(text: str) -> Sizes:
    """Return the sizes in the text of `--sizes`.

    Args:
        text: Sizes in bytes by name, such as `activation=16MB,saved=1.2GB`. `saved=1GB:1GB:2GB` has
            one value per stage, and `saved=1GB/2GB` one value per microbatch. `@FILE` reads the
            text from a file.

    Raises:
        UsageError: A name is unknown or given twice, or a value is not a number of bytes.
    """
    return Sizes(**_parse_fields("size", Sizes, text, parse_bytes, "1GB"))


def _parse_fields(
    subject: str,
    result_type: type[Costs | Sizes],
    text: str,
    parse_value: Callable[[str], float],
    example: str,
) -> dict[str, Any]:
    """Parse a text such as `F=1,B=2:3` into field -> value, for the fields of `result_type`."""
    if text.startswith("@"):
        # A line that begins with a name begins a new value, even without a comma before it.
        lines = re.sub(r"(?<![,\s])\s*\n\s*(?=[A-Za-z])", ",", read_text(text[1:]).strip())
        text = "".join(lines.split())
    names = [f.name for f in fields(result_type)]
    values: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        name, equals, value = part.partition("=")
        name = name.strip()
        if name not in names:
            match = find_similar_name(name, names)
            hint = f"did you mean {match!r}?" if match else f"the {subject}s are {', '.join(names)}"
            if not name.isidentifier():  # as in JSON, or in F:1
                hint = f"write NAME=VALUE with commas between: {names[0]}={example}"
            if new_name := (RENAMED_COSTS if subject == "cost" else RENAMED_SIZES).get(name):
                hint = f"it is now {new_name}"
            raise UsageError(f"--{subject}s: no {subject} {name!r}", hint=hint)
        if name in values:
            raise UsageError(f"--{subject}s: {name} is given twice")
        try:
            values[name] = _parse_stage_values(value, parse_value)
        except ValueError:
            value_text = f"{value!r}" if equals else "nothing"
            kind = "a number" if subject == "cost" else "a number of bytes of at least 0,"
            hint = f"{name}={example} or {name}={example}:{example}:{example}"
            if "=" in value:  # as in F=1;B=2
                pairs = re.split(r"[^\w.]+(?=[A-Za-z_]+=)", f"{name}={value}")
                hint = f"write a comma between two {subject}s: {','.join(pairs)}"
            raise UsageError(
                f"--{subject}s: {name} must be {kind} or one per stage, not {value_text}", hint=hint
            ) from None
    return values


def _parse_stage_values(text: str, parse_value: Callable[[str], float]) -> Any:
    """Return a number, a tuple by stage for `1:2`, or tuples by microbatch for `1/2:3/4`."""
    stages = text.split(":")
    if "/" in text:
        return tuple(tuple(map(parse_value, stage.split("/"))) for stage in stages)
    return tuple(map(parse_value, stages)) if ":" in text else parse_value(text)


def make_request(args: argparse.Namespace, source: str, **extra_fields: Any) -> Request:
    """Return the request for a source with the options of a command.

    Args:
        args: The parsed options of `add_compile_options` or `add_lowering_options`.
        source: The schedule, program or run.
        **extra_fields: Fields of the `Request` that no option sets.

    Raises:
        UsageError: The cluster file or the progress model is invalid.
    """
    require_size_units(args.sizes, args.memory_limit)
    values = {f.name: getattr(args, f.name, None) for f in HEADER_FIELDS}
    specified = {name: value for name, value in values.items() if value is not None}
    ranks = specified.get("ranks", DEFAULT_RANKS)
    return Request(
        Source(source),
        specified,
        defaults={"ranks": ranks, "microbatches": MICROBATCHES_PER_RANK * ranks},
        costs=args.costs,
        cluster=_read_cluster(path) if (path := getattr(args, "cluster", None)) else None,
        sizes=args.sizes,
        progress_model=args.progress_model,
        overlap=args.overlap,
        buffer_sharing=args.buffer_sharing,
        memory_limit=args.memory_limit,
        compile_options={
            name: value for name in PASS_OPTIONS if (value := getattr(args, name)) is not None
        },
        draft=getattr(args, "draft", False),
        relower=args.relower,
        make_conflict_error=_make_conflict_error,
        **extra_fields,
    )


def require_size_units(sizes: Sizes | None, memory_limit: float | None) -> None:
    """Raise UsageError if the sizes probably lack their units.

    Args:
        sizes: The sizes of `--sizes`.
        memory_limit: The bytes of `--memory-limit`.
    """
    if sizes is None or memory_limit is None:
        return
    largest_sizes = {
        f.name: float(np.max(size)) for f in fields(sizes) if (size := getattr(sizes, f.name))
    }
    name = max(largest_sizes, key=largest_sizes.__getitem__, default="")
    size = largest_sizes.get(name, 0.0)
    if 0 < size < _MIN_PLAUSIBLE_SIZE and size <= memory_limit * _MIN_PLAUSIBLE_SHARE:
        raise UsageError(
            f"--sizes {name}={size:g} is {format_bytes(size)}, and --memory-limit is "
            f"{format_bytes(memory_limit)}: the sizes probably lack their unit",
            hint=f"--sizes {name}={size:g}GB",
            fields=["sizes"],
        )


def _read_cluster(path: str) -> Cluster:
    from schedir.planner.hardware.cluster_presets import get_preset_path

    preset = get_preset_path(path)
    if preset is not None:
        raise UsageError(
            f"--cluster {path}: this command needs a FILE.toml; only schedir plan accepts the name "
            "of a preset",
            hint="run schedir examples, set nodes and gpus_per_node in the new file "
            f"examples/clusters/{preset.name}, and give --cluster this file",
            fields=["cluster"],
        )
    return load_cluster(path)


def format_shape_options(
    program: Program,
    specified: Collection[str] = (),
    listed_fields: Collection[Field] = HEADER_FIELDS,
) -> list[str]:
    """Return the options that give a schedule the shape and the attributes of a program.

    Args:
        program: The program.
        specified: Names of fields that the user gave. The result has these fields even if their
            values are the defaults of programs, because the schedule or file of the command may
            have other defaults.
        listed_fields: The fields to list.

    Returns:
        The words of a command line.
    """
    words = []
    for f in listed_fields:
        flag = not f.field_type.metavar
        if not f.is_default(program) or (f.name in specified and not flag):
            words += option_words(f.name, f.field_type.to_text(f.get_value(program), program.shape))
    return words


def _make_conflict_error(source: str, field: Field, actual: str, specified: str) -> UsageError:
    return UsageError(
        f"{source} has {field.name} {actual}, not {specified}",
        hint=f"leave out {option_name(field.name)}"
        + ", or compile the schedule again" * source.endswith(".sched"),
        fields=[field.name],
    )


def require_unsharded_stages(requests: Iterable[Request]) -> None:
    """Raise an error if no schedule has as many stages on a rank as `unsharded_stages`.

    A schedule with fewer stages on a rank keeps all of them unsharded (`Request.for_comparison`).

    Args:
        requests: The requests of the schedules.

    Raises:
        ShapeError: Every schedule has fewer stages on each rank than `unsharded_stages`.
    """
    max_stages, unsharded = 0, 0
    for request in requests:
        with suppress(SchedirError):  # The schedule does not support the shape.
            max_stages = max(max_stages, *map(len, request.shape.stages_on_rank))
            unsharded = request.compile_options.get("unsharded_stages", 0)
    if unsharded > max_stages > 0:
        raise ShapeError(
            f"-O unsharded_stages is {unsharded}, but no schedule has more than {max_stages} "
            f"stage{'s' * (max_stages > 1)} on a rank",
            hint=f"-O unsharded_stages={max_stages}",
            fields=["unsharded_stages"],
        )
