"""Options that say how a schedule is compiled, and the Request that they make."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from schedir.analysis.progress_models import MODELS
from schedir.commands.common.program_options import PROGRAM_OPTIONS, add_program_options
from schedir.errors import SchedirError, ShapeError, UsageError
from schedir.io.cluster_file import load_cluster
from schedir.io.command_line import FIELDS_WITH_FLAGS, option_name, option_words
from schedir.io.files import read_text
from schedir.io.program_request import Request
from schedir.io.source_loader import Source
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.number_parsing import parse_decimal, parse_integer
from schedir.ir.cost.sizes import Sizes, parse_bytes
from schedir.ir.pipeline.field_schema import Field, FieldType
from schedir.ir.program import HEADER_FIELDS, Program
from schedir.passes.pass_registry import PASS_OPTIONS
from schedir.retired_names import RENAMED_COSTS, RENAMED_SIZES

SOURCE_HELP = (
    "a built-in schedule or file.py:function, with options in brackets if it has any "
    "(interleaved(group=4)), or a program FILE.sched, or a run FILE.timeline"
)
DEFAULT_RANKS, MICROBATCHES_PER_RANK = 4, 2  # ranks, and microbatches per rank, unless told
_COSTS_HELP = (
    "F=1,B=2,send=0.1; F=1:1:2 per stage, "
    "F=1/2:3/4 per stage and microbatch (F=1/2: all stages alike), or @FILE that says so"
)


def add_source(parser: argparse.ArgumentParser, *, allows_several: bool = False) -> None:
    """What a command works on."""
    parser.add_argument(
        "source", metavar="SCHEDULE", nargs="+" if allows_several else None, help=SOURCE_HELP
    )


def add_compile_options(parser: argparse.ArgumentParser) -> None:
    """Add the options by which a schedule is compiled; None where a FILE.sched may say it."""
    group = parser.add_argument_group("how a schedule is compiled; a FILE.sched has its shape")
    _add_shape_flags(group)
    _fill_lowering_group(group, has_shape_options=True)


def add_search_options(
    parser: argparse.ArgumentParser, *, costs_help: str
) -> argparse._ArgumentGroup:
    """Add the options that say for what a schedule is searched, and return their group."""
    group = parser.add_argument_group("for what")
    _add_shape_flags(group)
    _add_costs_option(group, costs_help)
    _add_memory_options(group)
    add_program_options(
        group, _require_shape_option, has_shape_options=True, has_lowering_options=False
    )
    return group


def add_lowering_options(parser: argparse.ArgumentParser) -> None:
    """Add the options by which a draft is lowered, for sources that have their shape."""
    _fill_lowering_group(parser.add_argument_group("how it is lowered"), has_shape_options=False)


def _add_shape_flags(group: argparse._ArgumentGroup) -> None:
    """Add the options of the shape that most people need."""
    for name in FIELDS_WITH_FLAGS:
        option = PROGRAM_OPTIONS[name]
        group.add_argument(
            "--" + name.replace("_", "-"), dest=name, type=_make_parser(option.kind), default=None,
            metavar=option.kind.metavar,
            help=option.help.format(ranks=DEFAULT_RANKS, per_rank=MICROBATCHES_PER_RANK),
        )  # fmt: skip


def _require_shape_option(name: str, text: str) -> None:
    """Refuse an option of the lowering, for a command that orders computes."""
    if not PROGRAM_OPTIONS[name].is_shape_option:
        raise UsageError(
            f"search finds the order of computes, and -O {name} is an option of their lowering",
            hint="search ... -o found.sched, and then: simulate found.sched --relower -O "
            + shlex.quote(text),
            fields=[name],
        )


def _fill_lowering_group(group: argparse._ArgumentGroup, *, has_shape_options: bool) -> None:
    def accept(name: str, text: str) -> None:
        if PROGRAM_OPTIONS[name].is_shape_option and not has_shape_options:
            raise UsageError(
                f"a CSV or a trace has its own shape: -O {name} does not apply", fields=[name]
            )

    add_program_options(group, accept, has_shape_options=has_shape_options)
    group.add_argument(
        "--relower",
        action="store_true",
        help="of a program in a file keep the compute alone, and lower it anew",
    )
    models = [f"{model} (default)" if model == "per_device" else model for model in MODELS]
    group.add_argument(
        "--progress-model", metavar="MODEL",
        help=f"what the transport promises: {', '.join(models[:-1])} or {models[-1]}",
    )  # fmt: skip
    _add_costs_option(group, _COSTS_HELP)
    group.add_argument(
        "--cluster", metavar="FILE.toml",
        help="fill costs of messages, reductions and steps that are not given, by --sizes and what "
        "these machines do in a second; costs are in seconds, then",
    )  # fmt: skip
    _add_memory_options(group)


def _add_costs_option(group: argparse._ArgumentGroup, help: str) -> None:
    group.add_argument("--costs", type=parse_costs, metavar="COSTS", help=help)


def _add_memory_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sizes",
        type=parse_sizes,
        metavar="SIZES",
        help="activation=16MB,saved=1.2GB; saved=1GB:2GB per stage, saved=1GB/2GB per microbatch",
    )
    group.add_argument(
        "--memory-limit", type=parse_byte_option, metavar="BYTES",
        help="what a rank may hold, like 40GB or 40GiB",
    )  # fmt: skip


def _make_parser(kind: FieldType) -> Callable[[str], Any]:
    """What an option makes of its text."""

    def read(text: str) -> Any:
        try:
            return kind.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def parse_count(text: str) -> int:
    """A whole number, as an option takes it."""
    try:
        return parse_integer(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_number(text: str) -> float:
    """A decimal number, as an option takes it."""
    try:
        return parse_decimal(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_byte_option(text: str) -> float:
    """A number of bytes, as an option takes it."""
    try:
        return parse_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be bytes, like 40GB, not {text!r}") from None


def parse_costs(text: str) -> Costs:
    """`F=1,B=2,send=0.1`, `F=1:1:2` for one per stage, `F=1/2:3/4` for one per microbatch, too."""
    return Costs(**_parse_fields("cost", Costs, text, parse_decimal, "1"))


def parse_sizes(text: str) -> Sizes:
    """`activation=16MB,saved=1.2GB`, or `saved=1GB:1GB:2GB` for one per stage."""
    return Sizes(**_parse_fields("size", Sizes, text, parse_bytes, "1GB"))


def _parse_fields(
    subject: str,
    result_type: type[Costs | Sizes],
    text: str,
    parse_value: Callable[[str], float],
    example: str,
) -> dict[str, Any]:
    """What `name=number,name=number:number` gives for the fields of a class."""
    if text.startswith("@"):
        text = "".join(read_text(text[1:]).split())
    names = [f.name for f in fields(result_type)]
    given: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        name, equals, value = part.partition("=")
        name = name.strip()
        if name not in names:
            near = get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            if new := (RENAMED_COSTS if subject == "cost" else RENAMED_SIZES).get(name):
                hint = f"it is now {new}"
            raise UsageError(f"--{subject}s: no {subject} {name!r}", hint=hint)
        if name in given:
            raise UsageError(f"--{subject}s: {name} is given twice")
        try:
            given[name] = _parse_stage_values(value, parse_value)
        except ValueError:
            said = f"{value!r}" if equals else "nothing"
            raise UsageError(
                f"--{subject}s: {name} must be a number or one per stage, not {said}",
                hint=f"{name}={example} or {name}={example}:{example}:{example}",
            ) from None
    return given


def _parse_stage_values(text: str, parse_value: Callable[[str], float]) -> Any:
    """A number, `1:2` for one per stage, or `1/2:3/4` for one per stage and microbatch."""
    stages = text.split(":")
    if "/" in text:
        return tuple(tuple(map(parse_value, stage.split("/"))) for stage in stages)
    return tuple(map(parse_value, stages)) if ":" in text else parse_value(text)


def make_request(args: argparse.Namespace, source: str, **extra_fields: Any) -> Request:
    """What the options ask for of a source; `extra_fields` are fields of the Request that none
    says."""
    values = {f.name: getattr(args, f.name, None) for f in HEADER_FIELDS}
    said = {name: value for name, value in values.items() if value is not None}
    ranks = said.get("ranks", DEFAULT_RANKS)
    return Request(
        Source(source),
        said,
        defaults={"ranks": ranks, "microbatches": MICROBATCHES_PER_RANK * ranks},
        costs=args.costs,
        cluster=load_cluster(path) if (path := getattr(args, "cluster", None)) else None,
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


def format_shape_options(
    program: Program,
    specified: Collection[str] = (),
    listed_fields: Collection[Field] = HEADER_FIELDS,
) -> list[str]:
    """The options that say the shape and the traits of a program, or those `listed_fields` of
    these.

    A number that is the default of programs is left out unless it was `specified`: a schedule or a
    file may have another.
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
        hint=f"leave out {option_name(field.name)}",
        fields=[field.name],
    )


def require_unsharded_stages(requests: Iterable[Request]) -> None:
    """Refuse more whole stages than any of several schedules has on a rank.

    Of one that has fewer, all are (`Request.share`).
    """
    most, active = 0, 0
    for request in requests:
        with suppress(SchedirError):  # a shape that its schedule cannot be on
            most = max(most, *map(len, request.shape.stages_on_rank))
            active = request.compile_options.get("unsharded_stages", 0)
    if active > most > 0:
        raise ShapeError(
            f"unsharded_stages is {active}, and no schedule has more than {most} "
            f"stage{'s' * (most > 1)} on a rank to make whole",
            hint=f"unsharded_stages={most}",
            fields=["unsharded_stages"],
        )
